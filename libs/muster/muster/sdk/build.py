"""From bound deployments to what is deployed: names, handles in the place of nested applications, code.

The order and the names are Ray Serve's (``ray.serve._private.build_app``): children before their parents, and a second
deployment of a name gets the suffix ``_1``.
"""

from __future__ import annotations

import io
import logging
import pickle
from collections.abc import Callable, Mapping
from typing import Any, Final, final

import cloudpickle  # type: ignore[import-untyped]  # it ships no hints
import msgspec

from muster.config import AutoscalingPolicy
from muster.handles.handle import DeploymentHandle
from muster.sdk.code import CodeUnpicklable, dump_code
from muster.sdk.deployments import Application, Deployment
from muster.sdk.files import Files, PackagedEnvironment
from muster.sdk.policies import BuiltPolicy, build_policy, find_application_policy, find_policy
from serve_common.config.autoscaling import PolicyScope
from serve_common.errors import BadField
from serve_common.protocol.code import digest_code

_log: Final = logging.getLogger("ray.serve")

MakeHandle = Callable[[Deployment, str], DeploymentHandle]
"""Makes the handle of a deployment, whose arguments are final, in the application of that name."""


class BuiltDeployment(msgspec.Struct, frozen=True, kw_only=True):
    """One deployment of an application, under its final name."""

    name: str
    """Name within the application."""
    deployment: Deployment
    """Its options, and its arguments as bound."""
    code: bytes
    """The class or function with its arguments, by `muster.sdk.code.dump_code`; handles replace applications."""
    digest: str
    """Name of the code in the code store."""
    environment: PackagedEnvironment
    """Its ``runtime_env``, with digests in the place of files."""
    policy: BuiltPolicy | None
    """The autoscaling policy of its own or of its application; None for the default one."""


class BuiltApplication(msgspec.Struct, frozen=True, kw_only=True):
    """An application that is ready to be deployed."""

    name: str
    """Name of the application."""
    route_prefix: str | None
    """HTTP path prefix; None is headless."""
    ingress: str
    """Name of the deployment that was run, which the route leads to."""
    deployments: list[BuiltDeployment]
    """All of its deployments, children first; the last is the ingress."""
    archives: dict[str, bytes]
    """Files that travel with it, by digest."""

    @property
    def uploads(self) -> dict[str, bytes]:
        """All that travels, by digest: files, code and policies."""
        policies = [each.policy for each in self.deployments if each.policy is not None]
        code = {policy.digest: policy.code for policy in policies if policy.code}
        return self.archives | {each.digest: each.code for each in self.deployments} | code


@final
class _Scan(cloudpickle.Pickler):  # type: ignore[misc]  # it ships no hints
    """Finds the applications within arguments, at any depth, and can put other objects in their place."""

    def __init__(self, value: Any) -> None:
        self.found: list[Application] = []
        self._file = io.BytesIO()
        super().__init__(self._file)
        self.dump(value)

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, Application):
            return None
        for at, known in enumerate(self.found):
            if known is value:
                return at
        self.found.append(value)
        return len(self.found) - 1

    def replaced(self, instead: Callable[[Application], Any]) -> Any:
        """A copy of the value with other objects in the place of its applications."""
        unpickler = pickle.Unpickler(io.BytesIO(self._file.getvalue()))  # noqa: S301 - our own bytes
        unpickler.persistent_load = lambda at: instead(self.found[at])  # type: ignore[method-assign]
        return unpickler.load()


@final
class _Builder:
    """Walks the graph of applications; each is built once."""

    def __init__(self, app_name: str) -> None:
        self._app_name = app_name
        self._names: dict[int, str] = {}
        self._retained: list[Application] = []
        """Keeps the applications alive, so that their ids stay theirs."""
        self.order: list[tuple[str, Application, _Scan]] = []

    def add(self, app: Application) -> str:
        """The name of the deployment of ``app``; its children are visited before."""
        if id(app) in self._names:
            return self._names[id(app)]
        bound = app.bound_deployment
        arguments = {"args": bound.init_args, "kwargs": bound.init_kwargs}
        try:
            scan = _Scan(arguments)
        except Exception as error:
            # Names what it is, or pickles it after all, where only the order mattered.
            dump_code(None, bound.init_args, bound.init_kwargs, name=bound.name, replace=_handle_for_any)
            raise CodeUnpicklable(bound.name, f"its arguments cannot be pickled: {error}") from error
        for child in scan.found:
            self.add(child)
        name = self._unique(bound.name)
        self._names[id(app)] = name
        self._retained.append(app)
        self.order.append((name, app, scan))
        return name

    def handle(self, app: Application) -> DeploymentHandle:
        """The handle that replaces ``app`` in arguments."""
        return DeploymentHandle(self._names[id(app)], self._app_name)

    def _unique(self, name: str) -> str:
        taken, number, unique = set(self._names.values()), 0, name
        while unique in taken:
            number += 1
            unique = f"{name}_{number}"
        if number:
            _log.warning(
                "There are multiple deployments with the same name '%s'. Renaming one to '%s'.", name, unique
            )
        return unique


def _handle_for_any(value: Any) -> Any:
    return DeploymentHandle("any", "any") if isinstance(value, Application) else value


def build_app(
    app: Application,
    *,
    name: str,
    route_prefix: str | None,
    configure: Callable[[str, Deployment], Deployment] = lambda _name, deployment: deployment,
    autoscaling_policy: AutoscalingPolicy | None = None,
) -> BuiltApplication:
    """Build ``app`` under ``name``.

    ``configure`` returns each deployment, which it gets with its final name, with the options that it is to have.
    ``autoscaling_policy`` decides for all autoscaled deployments, in the place of their own policies.
    Raises `CodeUnpicklable`, `LimitReached` for code or files that are too large, and `BadField` for files that cannot
    be read.
    """
    builder = _Builder(name)
    ingress = builder.add(app)
    if (
        sum(hasattr(each.bound_deployment.func_or_class, "__muster_asgi__") for _, each, _ in builder.order)
        > 1
    ):
        raise BadField(
            "app",
            f'Found multiple FastAPI deployments in application "{name}". Please only include one deployment '
            "with @serve.ingress in your application to avoid this issue.",
        )
    configured = [(final, configure(final, each.bound_deployment)) for final, each, _ in builder.order]
    policies = {final: find_policy(final, bound) for final, bound in configured}
    shared = find_application_policy(autoscaling_policy)
    replaced = [name for name, own in policies.items() if shared is not None and own is not None]
    for deployment_name in replaced:
        _log.warning("The policy of the application replaces that of the deployment '%s'.", deployment_name)
    files = Files()  # after the modules of policies were imported

    def replace(value: Any) -> Any:
        return builder.handle(value) if isinstance(value, Application) else value

    built_shared = build_policy(shared, files.travelling, PolicyScope.APPLICATION)
    deployments = []
    for deployment_name, bound in configured:
        is_autoscaled = bound.deployment_options.autoscaling_config is not None
        code = dump_code(
            bound.func_or_class,
            bound.init_args,
            bound.init_kwargs,
            name=deployment_name,
            replace=replace,
            files=files.travelling,
        )
        runtime_env = bound.ray_actor_options.get("runtime_env", {})
        deployments.append(
            BuiltDeployment(
                name=deployment_name,
                deployment=bound,
                code=code,
                digest=digest_code(code),
                environment=files.package(runtime_env, f"{deployment_name}: ray_actor_options.runtime_env"),
                policy=built_shared
                if built_shared is not None and is_autoscaled
                else build_policy(policies[deployment_name], files.travelling),
            )
        )
    return BuiltApplication(
        name=name,
        route_prefix=route_prefix,
        ingress=ingress,
        deployments=deployments,
        archives=files.archives,
    )


def build_local(app: Application, *, name: str, make_handle: MakeHandle) -> DeploymentHandle:
    """Build ``app`` within this process; returns the ingress's handle.

    ``make_handle`` is called for each deployment, children first, with a copy whose arguments are final.
    """
    builder = _Builder(name)
    builder.add(app)
    handles: dict[int, DeploymentHandle] = {}
    for deployment_name, each, scan in builder.order:
        arguments: Mapping[str, Any] = scan.replaced(lambda inner: handles[id(inner)])
        final_deployment = each.bound_deployment.options(name=deployment_name).bind(
            *arguments["args"], **arguments["kwargs"]
        )
        handles[id(each)] = make_handle(final_deployment.bound_deployment, name)
    return handles[id(app)]
