"""Applications by their import paths: imported, built, and with the options of a configuration file over the code's.

The rules are Ray Serve's (``call_user_app_builder_with_args_if_necessary``, ``override_deployment_info``). The code is
imported in the process of the one who deploys, with that one's packages, and travels as `muster.run` sends it.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Final

import msgspec
from pydantic import BaseModel, ValidationError

from muster.config import AutoscalingPolicy
from muster.schema import LoggingConfig, ServeApplicationSchema
from muster.sdk.build import BuiltApplication, BuiltDeployment, build_app
from muster.sdk.deployments import Application, Deployment
from muster.sdk.run import RunTarget
from serve_common.errors import BadField, CommandRefused, PermanentError

_TRACEBACK_LINES_MAX: Final = 40


class BuildFailed(PermanentError):
    """An application cannot be imported or built."""

    error_code = "build_failed"


BUILD_ERRORS: Final = (CommandRefused, TypeError, ValueError)
"""What the code of an application, or its options over those of the code, are refused with."""


class PreparedApplication(msgspec.Struct, frozen=True, kw_only=True):
    """An application that is imported, built and checked: what is left is to deploy it."""

    built: BuiltApplication
    target: RunTarget
    app_config: dict[str, Any] | None
    """What the controller records as the configuration it was deployed from; None for none."""


def import_application(
    import_path: str, arguments: Mapping[str, Any] | None, directories: Sequence[Path]
) -> Application:
    """Import an application, or the function that builds one, which is called with ``arguments``; None refuses it.

    ``directories`` come first on ``sys.path``, so modules in them travel as those beside a program do.
    Raises `BadField` with the traceback of user code that raises.
    """
    module_name, _, attribute = import_path.rpartition(":" if ":" in import_path else ".")
    for directory in reversed([os.path.abspath(each) for each in directories]):  # noqa: PTH100 - no links followed
        if directory not in sys.path:
            sys.path.insert(0, directory)
    try:
        found = importlib.import_module(module_name)
        for name in attribute.split("."):
            found = getattr(found, name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise _failed(import_path, error) from error
        places = ", ".join(map(str, directories))
        raise BadField(
            "import_path", f"{import_path}: No module named {error.name!r} in {places}, nor installed"
        ) from error
    except AttributeError as error:
        if not hasattr(sys.modules.get(module_name), "__spec__"):
            raise _failed(import_path, error) from error
        raise BadField("import_path", f"{import_path}: {error}") from error
    except (Exception, SystemExit) as error:
        raise _failed(import_path, error) from error
    return _build(found, import_path, arguments)


def forget_modules(directories: Sequence[Path]) -> None:
    """Forget the modules of these directories, so that they are imported anew."""
    importlib.invalidate_caches()
    for name, module in list(sys.modules.items()):
        if _is_in(module, directories):
            del sys.modules[name]


def _is_in(module: ModuleType, directories: Sequence[Path]) -> bool:
    """Whether a module was found in one of the directories itself, and not in a place for packages below it."""
    top = sys.modules.get(getattr(module, "__name__", "").partition(".")[0], module)
    paths = list(getattr(top, "__path__", ())) or [getattr(top, "__file__", None)]
    return any(
        path is not None and Path(path).resolve().parent == each.resolve()
        for path in paths
        for each in directories
    )


def _failed(import_path: str, error: BaseException) -> BadField:
    """The error for user code that raised: its traceback without our own frames."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [each for each in frames if each.filename != __file__ and "importlib" not in each.filename]
    lines = "".join([*traceback.format_list(own), *traceback.format_exception_only(error)]).splitlines()
    shown = "\n".join(["Traceback (most recent call last):", *lines[-_TRACEBACK_LINES_MAX:]])
    return BadField("import_path", f"{import_path} raised:\n{shown}")


def _build(found: Any, import_path: str, arguments: Mapping[str, Any] | None) -> Application:
    if isinstance(found, Application):
        if arguments:
            raise BadField(
                "args",
                "Arguments can only be passed to an application builder function, not an already built application, "
                f"which {import_path} is",
            )
        return found
    if arguments is None or not isinstance(found, FunctionType):
        hint = ""
        if isinstance(found, Deployment):
            hint = "; name what its bind() returns"
        elif isinstance(found, FunctionType):
            hint = "; a function that builds one is named in a file, with its args"
        raise BadField(
            "import_path",
            f"TypeError: Expected '{import_path}' to be an Application but got {type(found)}{hint}"
            if arguments is None
            else "Expected a built Serve application or an application builder function but got: "
            f"{import_path}, a {type(found)}{hint}.",
        )
    try:
        parameters = inspect.signature(found, eval_str=True).parameters
    except NameError:
        parameters = inspect.signature(found).parameters
    if len(parameters) != 1:
        raise BadField(
            "import_path",
            "Application builder functions should take exactly one parameter, a dictionary containing the passed "
            f"arguments, which {import_path} does not.",
        )
    kind = next(iter(parameters.values())).annotation
    values: Any = dict(arguments)
    if inspect.isclass(kind) and issubclass(kind, BaseModel):
        try:
            values = kind.model_validate(values)
        except ValidationError as error:
            raise BadField("args", f"of {import_path}: {error}") from error
    try:
        app = found(values)
    except (Exception, SystemExit) as error:
        raise _failed(import_path, error) from error
    if not isinstance(app, Application):
        raise BadField(
            "import_path",
            "Application builder functions must return an `Application` returned from `Deployment.bind()`, but "
            f"{import_path} returned: {type(app)}.",
        )
    return app


def prepare_application(
    schema: ServeApplicationSchema,
    directories: Sequence[Path],
    *,
    base: Path,
    runtime_env: Mapping[str, Any] | None = None,
    logging_config: LoggingConfig | None = None,
    is_recorded: bool = True,
) -> PreparedApplication:
    """Import and build what a file in the directory ``base`` has for one application, with its overrides.

    ``runtime_env`` has the defaults of the application's own, ``logging_config`` is for one that has none.
    Raises `BadField` whose field is the path within the application's part of the file.
    """
    app = import_application(schema.import_path, schema.args, directories)
    built = build_configured(app, schema, base, runtime_env)
    target = RunTarget(
        app,
        schema.name,
        schema.route_prefix,
        schema.logging_config or logging_config,
        schema.external_scaler_enabled,
    )
    recorded = build_app_config(schema, logging_config) if is_recorded else None
    return PreparedApplication(built=built, target=target, app_config=recorded)


def build_app_config(schema: ServeApplicationSchema, logging_config: LoggingConfig | None) -> dict[str, Any]:
    """What the controller records of an application's part of a file; ``logging_config`` is that of the whole file."""
    recorded = schema.model_dump(mode="json", exclude_unset=True)
    if schema.logging_config is None and logging_config is not None:
        recorded["logging_config"] = logging_config.model_dump(mode="json", exclude_unset=True)
    return recorded


def build_configured(
    app: Application,
    schema: ServeApplicationSchema,
    base: Path,
    default_env: Mapping[str, Any] | None = None,
) -> BuiltApplication:
    """Build ``app`` with the options of the file over those of the code.

    Relative paths of a ``runtime_env`` are resolved in ``base``. ``default_env`` is what that of the application is
    merged over. Raises `BadField` for a deployment that is not there.
    """
    options = {each.name: each.options() for each in schema.deployments}
    runtime_env = merge_runtime_envs(default_env or {}, resolve_paths(schema.runtime_env, base))

    def configure(name: str, deployment: Deployment) -> Deployment:
        return _override(deployment, options.get(name, {}), runtime_env, base)

    policy = schema.autoscaling_policy
    built = build_app(
        app,
        name=schema.name,
        route_prefix=schema.route_prefix,
        configure=configure,
        autoscaling_policy=None if policy is None else AutoscalingPolicy(**policy),
    )
    names = [each.name for each in built.deployments]
    for at, name in enumerate(schema.deployment_names):
        if name not in names:
            raise BadField(
                f"deployments[{at}].name",
                f"{name!r} is none of the deployments; there are: {', '.join(names)}",
            )
    return built


def _override(
    code: Deployment, options: dict[str, Any], runtime_env: Mapping[str, Any], base: Path
) -> Deployment:
    autoscaling = code.deployment_options.autoscaling_config
    if (
        options.get("num_replicas") == "auto"
        and not options.get("autoscaling_config")
        and autoscaling is not None
    ):
        options = {**options, "autoscaling_config": autoscaling}
    actor, own = code.ray_actor_options, code.ray_actor_options.get("runtime_env") or {}
    if "ray_actor_options" in options:
        actor = options["ray_actor_options"]
        own = resolve_paths(actor.get("runtime_env") or {}, base)
    if runtime_env or own:
        merged = merge_runtime_envs(runtime_env, own)
        options = {**options, "ray_actor_options": {**actor, "runtime_env": merged}}
    return code.options(**options) if options else code


def merge_runtime_envs(defaults: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """``own`` over ``defaults`` as Ray merges the environments of a job and an actor: only ``env_vars`` one by one."""
    env_vars = {**(defaults.get("env_vars") or {}), **(own.get("env_vars") or {})}
    return {**defaults, **own, **({"env_vars": env_vars} if env_vars else {})}


def resolve_paths(runtime_env: Mapping[str, Any], base: Path) -> dict[str, Any]:
    """The environment with the local paths of a file as they are from everywhere."""

    def resolve(path: Any) -> Any:
        return str(base / path) if isinstance(path, str) and "://" not in path else path

    resolved = dict(runtime_env)
    if resolved.get("working_dir"):
        resolved["working_dir"] = resolve(resolved["working_dir"])
    if isinstance(resolved.get("py_modules"), list):
        resolved["py_modules"] = [resolve(each) for each in resolved["py_modules"]]
    return resolved


def describe_application(
    import_path: str, directories: Sequence[Path], *, name: str, route: str
) -> dict[str, Any]:
    """The part of a configuration file for an application, with the options that its code chooses.

    Raises `BadField` as `import_application`; a function that builds an application is refused, as by Ray Serve.
    """
    app = import_application(import_path, None, directories)
    built = build_app(app, name=name, route_prefix=route)
    return {
        "name": name,
        "route_prefix": route,
        "import_path": import_path,
        "runtime_env": {},
        "deployments": [_describe(each) for each in built.deployments],
    }


def _describe(built: BuiltDeployment) -> dict[str, Any]:
    code, described = built.deployment, {"name": built.name}
    chosen = set(code.chosen_options) - {"name"}
    autoscaling = code.deployment_options.autoscaling_config
    if autoscaling is not None:
        # All of it: 'auto' stands for some fields that are not the defaults.
        chosen = (chosen - {"num_replicas"}) | {"autoscaling_config"}
    else:
        chosen -= {"autoscaling_config"}
    for option in sorted(chosen):
        value = getattr(code, option) if hasattr(code, option) else getattr(code.deployment_options, option)
        if isinstance(value, BaseModel):
            value = value.model_dump(mode="json", exclude_unset=True)
        described[option] = value
    return described
