"""``serve.run`` and its relatives: deploys applications on the stack that is found, or on one within this process.

Every function blocks, may be called on any thread and within a running event loop, and any number of times: what talks
to the stack runs on a thread of its own.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from muster.client.admin import Stack
from muster.config import ControllerOptions, HTTPOptions, ProxyLocation, gRPCOptions, normalize_location
from muster.handles.handle import DeploymentHandle
from muster.schema import LoggingConfig, ServeStatus, TracingConfig
from muster.sdk.build import BuiltApplication, build_app
from muster.sdk.client import close_client, find_address, get_client, is_connected
from muster.sdk.deployments import Application, check_targets
from muster.sdk.local import run_locally
from muster.sdk.states import format_failed, view_status
from muster.sdk.translate import deploy_command
from serve_common.api.commands import ChangeReply, DeleteApplication, SetHttpOptions, Shutdown
from serve_common.api.queries import GetAllApplications
from serve_common.api.views import DeploymentStatus, DeploymentView, GoalStatus, GoalView, StatusView
from serve_common.errors import BadField, BusUnavailable, NotFound, PermanentError, ServeError
from serve_common.names import DEFAULT_APPLICATION, GoalId, check_name, check_route

_log: Final = logging.getLogger("ray.serve")

DEPLOY_TIMEOUT_S: Final = 24 * 3600.0
"""Seconds that `run` waits for an application; its own limits (failed starts, time to start) end it long before."""
START_SLACK_S: Final = 60.0
"""Seconds that an application that was deployed before may need to serve, beyond the time to start of its replicas."""
_STOP_SLACK_S: Final = 5.0
"""Seconds that replaced replicas may need to end, beyond the time that their requests have."""
_STOPPING: Final = ("should_stop", "stopping")
_STATUS_PAUSE_S: Final = 0.1
_STATUS_PAUSE_S_MAX: Final = 1.0


class DeployFailed(PermanentError, RuntimeError):
    """An application could not be deployed; a note has the user's traceback. What served before serves on."""

    error_code = "deploy_failed"


@dataclass(frozen=True)
class RunTarget:
    """An application to run, for `run_many`."""

    target: Application
    name: str = DEFAULT_APPLICATION
    route_prefix: str | None = "/"
    logging_config: dict[str, Any] | LoggingConfig | None = None
    external_scaler_enabled: bool = False


def run(  # noqa: PLR0917 - Ray Serve's signature
    target: Application,
    blocking: bool = False,  # noqa: FBT001, FBT002 - Ray Serve's signature
    name: str = DEFAULT_APPLICATION,
    route_prefix: str | None = "/",
    logging_config: dict[str, Any] | LoggingConfig | None = None,
    _local_testing_mode: bool = False,  # noqa: FBT001, FBT002 - as above
    external_scaler_enabled: bool = False,  # noqa: FBT001, FBT002 - as above
    controller_options: dict[str, Any] | ControllerOptions | None = None,
) -> DeploymentHandle:
    """Deploy an application, wait until it serves, and return the handle of its ingress.

    The stack is the one that the command line would find; where there is none, one is started within this process and
    ends with it. With ``blocking`` it returns at Ctrl-C only. The same application again changes nothing.

    Raises `DeployFailed` with the traceback of the user's code; then the former version serves on. Raises
    `CodeUnpicklable` for what cannot be pickled, and other `RayServeException`.
    """
    run_target = RunTarget(target, name, route_prefix, logging_config, external_scaler_enabled)
    [handle] = run_many(
        [run_target],
        blocking=blocking,
        _local_testing_mode=_local_testing_mode,
        controller_options=controller_options,
    )
    return handle


def run_many(
    targets: Sequence[RunTarget],
    blocking: bool = False,  # noqa: FBT001, FBT002 - Ray Serve's signature
    wait_for_ingress_deployment_creation: bool = True,  # noqa: ARG001, FBT001, FBT002 - recorded is created here
    wait_for_applications_running: bool = True,  # noqa: FBT001, FBT002 - as above
    _local_testing_mode: bool = False,  # noqa: FBT001, FBT002 - as above
    controller_options: dict[str, Any] | ControllerOptions | None = None,
) -> list[DeploymentHandle]:
    """Deploy several applications; returns the handles of their ingresses, in the same order. As `run` otherwise."""
    if not targets:
        raise ValueError("No applications provided.")
    check_targets([each.target for each in targets])
    _check_controller_options(controller_options)
    for each in targets:
        if isinstance(each.logging_config, dict):
            LoggingConfig(**each.logging_config)
        if not each.name:
            raise ServeError("Application name must a non-empty string.")
        check_name(each.name, "name")
        if each.route_prefix is not None:
            check_route_prefix(each.route_prefix)
    if _local_testing_mode or os.environ.get("RAY_SERVE_FORCE_LOCAL_TESTING_MODE") == "1":
        return [run_locally(each.target, each.name) for each in targets]
    apps = [build_app(each.target, name=each.name, route_prefix=each.route_prefix) for each in targets]

    async def deploy_all(stack: Stack) -> None:
        replies = [await _deploy(stack, app, each) for app, each in zip(apps, targets, strict=True)]
        if wait_for_applications_running:
            for app, reply in zip(apps, replies, strict=True):
                failure = f"Deploying application {app.name} failed"
                await _wait(stack, reply.goal_id, failure, app)
                if reply.updating:
                    await _wait_stopped(stack, app)
                else:
                    await wait_serving(stack, app, failure)

    get_client().call(deploy_all)
    if blocking:
        _wait_for_interrupt()
    return [DeploymentHandle(app.ingress, app.name) for app in apps]


def _run(
    target: Application,
    *,
    _blocking: bool = True,
    name: str = DEFAULT_APPLICATION,
    route_prefix: str | None = "/",
    logging_config: dict[str, Any] | LoggingConfig | None = None,
    _local_testing_mode: bool = False,
    external_scaler_enabled: bool = False,
    controller_options: dict[str, Any] | ControllerOptions | None = None,
) -> DeploymentHandle:
    """`run`, which with ``_blocking=False`` does not wait until the application serves."""
    [handle] = run_many(
        [RunTarget(target, name, route_prefix, logging_config, external_scaler_enabled)],
        wait_for_applications_running=_blocking,
        _local_testing_mode=_local_testing_mode,
        controller_options=controller_options,
    )
    return handle


def _run_many(
    targets: Sequence[RunTarget],
    wait_for_ingress_deployment_creation: bool = True,  # noqa: FBT001, FBT002 - Ray Serve's signature
    wait_for_applications_running: bool = True,  # noqa: FBT001, FBT002 - as above
    _local_testing_mode: bool = False,  # noqa: FBT001, FBT002 - as above
    controller_options: dict[str, Any] | ControllerOptions | None = None,
) -> list[DeploymentHandle]:
    """`run_many`, without ``blocking``."""
    return run_many(
        targets,
        wait_for_ingress_deployment_creation=wait_for_ingress_deployment_creation,
        wait_for_applications_running=wait_for_applications_running,
        _local_testing_mode=_local_testing_mode,
        controller_options=controller_options,
    )


async def _deploy(stack: Stack, app: BuiltApplication, target: RunTarget) -> ChangeReply:
    client = get_client()
    # A stack that others started is spared a line for each request, whose cost is about that of a small one.
    own = LoggingConfig() if client.is_embedded else None
    logs = target.logging_config or client.logging_config or own
    command = deploy_command(app, logs, external_scaler=target.external_scaler_enabled)
    await upload_application(stack, app)
    return await stack.admin.call(command)


async def upload_application(stack: Stack, app: BuiltApplication) -> None:
    """Upload code and files of an application, as far as they are not stored yet."""
    for digest, data in app.uploads.items():
        await stack.admin.upload_code(digest, data)


async def _wait(
    stack: Stack, goal_id: GoalId | None, failure: str, app: BuiltApplication | None = None
) -> None:
    if goal_id is None:
        return
    try:
        goal: GoalView = await stack.admin.wait_for_goal(goal_id, deadline_s=DEPLOY_TIMEOUT_S)
    except NotFound:
        return  # it ended so long ago that it was forgotten
    if goal.status is not GoalStatus.SUCCEEDED:
        reason = goal.error or goal.message or goal.status.value
        parts = [] if app is None else [each.name for each in app.deployments]
        failed = [name for name in parts if app is not None and f"{app.name}/{name}: " in reason]
        if not failed:
            raise DeployFailed(f"{failure}: {reason}")
        error = DeployFailed(f"{failure}: {format_failed(failed)}")
        error.add_note(reason)  # the message is Ray Serve's, which programs compare
        raise error


async def _wait_stopped(stack: Stack, app: BuiltApplication) -> None:
    """Wait until the replicas that an update replaced have gone, as Ray Serve does; no longer than they may drain."""
    loop, deadline, pause_s = asyncio.get_running_loop(), None, _STATUS_PAUSE_S
    own = {f"{app.name}/{each.name}" for each in app.deployments}
    while True:
        status = await stack.admin.fetch_status()
        going = [
            view
            for view in status.deployments
            if view.name in own and any(replica.state in _STOPPING for replica in view.replicas)
        ]
        if deadline is None:
            drains_s = [view.backend_config.graceful_shutdown_timeout_s for view in going]
            deadline = loop.time() + max(drains_s, default=0.0) + _STOP_SLACK_S
        if not going or loop.time() >= deadline:
            return
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _STATUS_PAUSE_S_MAX)


async def wait_serving(stack: Stack, app: BuiltApplication, failure: str) -> None:
    """Wait until an application serves that was deployed before: no goal waits for that, and its replicas may be down.

    Serving means that all wanted replicas are routed to, on hosts that report, and every live proxy knows them. Raises
    `DeployFailed`, which begins with ``failure``, when the application was deleted meanwhile, or does not serve within
    the time to start of its replicas and `START_SLACK_S`.
    """
    loop, pause_s = asyncio.get_running_loop(), _STATUS_PAUSE_S
    deadline, snapshot_id = None, None
    while True:
        status = await stack.admin.fetch_status()
        deployments = {view.name: view for view in status.deployments}
        parts = [deployments.get(f"{app.name}/{each.name}") for each in app.deployments]
        views = [view for view in parts if view is not None and view.status not in _GOING]
        if len(views) < len(parts):
            raise DeployFailed(f"{failure}: it was deleted meanwhile")
        reason = _not_serving(views, status)
        if reason is None:
            snapshot_id = status.snapshot_id if snapshot_id is None else snapshot_id
            behind = [
                p.proxy_id
                for p in status.proxies
                if p.status == "live" and p.applied_snapshot_id < snapshot_id
            ]
            if not behind:
                return
            reason = f"the proxies {', '.join(behind)} do not know yet that it does"
        if deadline is None:
            deadline = (
                loop.time() + max(view.backend_config.start_timeout_s for view in views) + START_SLACK_S
            )
        if loop.time() >= deadline:
            raise DeployFailed(f"{failure}: it was deployed before and does not serve: {reason}")
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _STATUS_PAUSE_S_MAX)


_GOING: Final = (DeploymentStatus.DELETING, DeploymentStatus.DELETED)
_ROUTED: Final = ("running", "updating")


def _not_serving(views: Sequence[DeploymentView], status: StatusView) -> str | None:
    """Why deployments do not serve as wanted; None when they do."""
    live = {host.host_id for host in status.hosts if host.status == "live"}
    for view in views:
        if view.status is not DeploymentStatus.HEALTHY:
            return f"{view.name} is {view.status.value}: {view.message}"
        for replica in view.replicas:
            if replica.state in _ROUTED and replica.host_id not in live:
                return f"{replica.replica_tag} is on a host that does not report"
    return None


def _wait_for_interrupt() -> None:
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        _log.warning("Got KeyboardInterrupt, exiting...")
        raise


def start(  # noqa: PLR0917 - Ray Serve's signature
    proxy_location: str | ProxyLocation | None = None,
    http_options: dict[str, Any] | HTTPOptions | None = None,
    grpc_options: dict[str, Any] | gRPCOptions | None = None,
    logging_config: dict[str, Any] | LoggingConfig | None = None,
    tracing_config: dict[str, Any] | TracingConfig | None = None,
    controller_options: dict[str, Any] | ControllerOptions | None = None,
    **kwargs: Any,
) -> None:
    """Connect to the stack that is found, or start one within this process, with these HTTP options.

    Of a running stack, ``request_timeout_s``, ``keep_alive_timeout_s`` and ``root_path`` are set; where its proxies
    listen is its own affair. ``logging_config`` is for the applications that this process runs from then on and that
    have none. Raises TypeError for unknown options, ValueError for what Muster does not have.
    """
    for name in kwargs:
        if name != "detached":
            raise TypeError(f"start() got an unexpected keyword argument {name!r}")
    http = _located(http_options, normalize_location(proxy_location))
    if isinstance(grpc_options, dict):
        gRPCOptions(**grpc_options)
    if isinstance(logging_config, dict):
        logging_config = LoggingConfig(**logging_config)
    if isinstance(tracing_config, dict):
        TracingConfig(**tracing_config)
    _check_controller_options(controller_options)
    changes = {} if http is None else _changes(http)

    async def apply(stack: Stack) -> None:
        if changes:
            reply = await stack.admin.call(SetHttpOptions(options=changes))
            await _wait(stack, reply.goal_id, "Setting the HTTP options failed")

    client = get_client()
    client.call(apply, http)
    if logging_config is not None:
        client.logging_config = logging_config
    if not client.is_embedded and http is not None and http.model_fields_set & _OF_PROXIES:
        _log.warning("The stack runs already: host, port and TLS of http_options are those of its proxies.")


def _changes(http: HTTPOptions) -> dict[str, Any]:
    """What a running stack can take of these options, as far as they are given."""
    changes: dict[str, Any] = {}
    if http.request_timeout_s is not None:
        changes["request_timeout_s"] = http.request_timeout_s
    if "keep_alive_timeout_s" in http.model_fields_set:
        changes["keep_alive_timeout_s"] = float(http.keep_alive_timeout_s)
    if "root_path" in http.model_fields_set:
        changes["root_path"] = http.root_path.rstrip("/")
    return changes


def _located(
    options: dict[str, Any] | HTTPOptions | None, location: ProxyLocation | None
) -> HTTPOptions | None:
    """The options as an object; without HTTP where ``location`` says so."""
    http = HTTPOptions(**options) if isinstance(options, dict) else options
    if location is ProxyLocation.Disabled:
        http = (http or HTTPOptions()).model_copy(update={"location": location})
    return http


_OF_PROXIES: Final = frozenset({"host", "port", "ssl_keyfile", "ssl_certfile", "ssl_keyfile_password"})
"""HTTP options that a running proxy has from its start."""


def delete(name: str, _blocking: bool = True) -> None:  # noqa: FBT001, FBT002 - Ray Serve's signature
    """Delete an application; an unknown name succeeds. Waits until it is gone, unless ``_blocking`` is false."""
    try:
        check_name(name, "name")
    except BadField:
        return  # no application can have it

    async def work(stack: Stack) -> None:
        goal = (await stack.admin.call(DeleteApplication(name=name))).goal_id
        if _blocking:
            await _wait(stack, goal, f"Deleting application '{name}' failed")

    get_client().call(work)


def shutdown() -> None:
    """Delete everything that is served. A stack within this process ends too; any other goes on, empty."""
    if not (is_connected() or _finds_stack()):
        _log.info("Nothing to shut down. There's no Serve application running.")
        return

    async def work(stack: Stack) -> None:
        for goal in (await stack.admin.call(Shutdown(confirm="everything"))).goal_ids:
            await _wait(stack, goal, "Shutting down failed")

    client = get_client()
    if not client.is_embedded:
        client.call(work)
    close_client()


async def shutdown_async() -> None:
    """`shutdown`, for event loops."""
    await asyncio.to_thread(shutdown)


def status() -> ServeStatus:
    """The state of all applications and proxies; empty where there is no stack."""
    if not (is_connected() or _finds_stack()):
        return ServeStatus()

    async def work(stack: Stack) -> ServeStatus:
        applications = await stack.admin.call(GetAllApplications())
        return view_status(await stack.admin.fetch_status(), applications)

    return get_client().call(work)


def _finds_stack() -> bool:
    try:
        find_address()
    except BusUnavailable:
        return False
    return True


def check_route_prefix(route_prefix: str) -> None:
    """Raise ValueError, or `BadField`, for what is no path prefix."""
    if not route_prefix.startswith("/"):
        raise ValueError(f"Invalid route_prefix '{route_prefix}', must start with a forward slash ('/').")
    if route_prefix != "/" and route_prefix.endswith("/"):
        raise ValueError(f"Invalid route_prefix '{route_prefix}', may not end with a trailing '/'.")
    if "{" in route_prefix or "}" in route_prefix:
        raise ValueError(f"Invalid route_prefix '{route_prefix}', may not contain wildcards.")
    check_route(route_prefix, "route_prefix")


def _check_controller_options(options: dict[str, Any] | ControllerOptions | None) -> None:
    if isinstance(options, dict):
        options = ControllerOptions(**options)
    if options is not None and options.runtime_env:
        raise ValueError(
            "controller_options.runtime_env is not supported: set the variables of the controller's service."
        )
