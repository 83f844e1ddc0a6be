"""The command line that makes the same change as a command of the console."""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, Final

import msgspec

from serve_common.api import commands as c
from serve_common.config.backend import (
    METHODS,
    BackendConfig,
    EndpointOptions,
    RayActorOptions,
    ReplicaConfig,
)
from serve_common.errors import BadField
from serve_common.names import check_route, deployment_tag, short_name
from serve_common.protocol.subjects import Subjects
from serve_console.core.form_values import whole

_DASHED: Final = frozenset({"on_failure", "replica_policy"})
_FILE_ENDS: Final = (".yaml", ".yml", ".json")
_ENDPOINT_METHODS: Final = ["GET", "POST"]


class _NoEqual(Exception):
    """The CLI cannot express the command."""


def command_line(command: c.Command[Any], prefix: str = "serve") -> str:
    """The ``muster`` command line that sends ``command``; where there is none, a request with the ``nats`` CLI.

    ``prefix`` is that of the stack's subjects. Ids of requests are left out: the CLI makes its own.
    """
    try:
        return shlex.join(["muster", *_BUILD[type(command)](command)])
    except (_NoEqual, KeyError):
        pass
    fields = _without_defaults(command)
    fields.pop("request_id", None)
    body = msgspec.json.encode(fields).decode()
    return shlex.join(["nats", "request", Subjects(prefix).admin(command.verb), body])


def _without_defaults(value: msgspec.Struct) -> dict[str, Any]:
    """The fields that differ from their defaults."""
    fields: dict[str, Any] = {}
    for each in msgspec.structs.fields(value):
        found = getattr(value, each.name)
        default = each.default if each.default_factory is msgspec.NODEFAULT else each.default_factory()
        if found != default:
            fields[each.encode_name] = _plain(found)
    return fields


def _plain(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        return _without_defaults(value)
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _name(tag: str) -> str:
    """A tag as the CLI takes it."""
    short = short_name(tag)
    try:
        is_same = deployment_tag(short) == tag
    except BadField:
        is_same = False
    _require(is_same)
    return short


def _require(is_possible: bool) -> None:  # noqa: FBT001 - a condition, as of assert
    if not is_possible:
        raise _NoEqual


def _option(name: str, value: Any) -> list[str]:
    """``--name value``, with an equals sign where the value could be taken for an option."""
    flag = f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        return [flag if value else f"--no-{flag.removeprefix('--')}"]
    if isinstance(value, Enum):
        value = value.value
    if name in _DASHED:
        value = str(value).replace("_", "-")
    text = value if isinstance(value, str) else _json(whole(value) if isinstance(value, float) else value)
    return [f"{flag}={text}"] if text.startswith("-") or not text else [flag, text]


def _shares(weights: Mapping[str, float]) -> list[str]:
    _require(bool(weights) and all(0 <= weight <= 1 for weight in weights.values()))
    return [
        _name(tag) if len(weights) == 1 and weight == 1 else f"{_name(tag)}={_json(whole(weight))}"
        for tag, weight in weights.items()
    ]


def _scale(command: c.Scale) -> list[str]:
    _require(command.num_replicas >= 0)
    return ["scale", _name(command.backend_tag), str(command.num_replicas)]


def _set_traffic(command: c.SetTraffic) -> list[str]:
    return ["traffic", "set", _name(command.endpoint), *_shares(command.weights)]


def _shadow_traffic(command: c.ShadowTraffic) -> list[str]:
    _require(0 <= command.proportion <= 1)
    share = _json(whole(command.proportion))
    return ["traffic", "shadow", _name(command.endpoint), _name(command.backend_tag), share]


def _rollback(command: c.Rollback) -> list[str]:
    match command.to:
        case None:
            target: list[str] = []
        case int():
            target = _option("to_revision", command.to)
        case text:
            target = _option("to_version", text)
    return ["rollback", _name(command.name), *target]


def _control_rollout(command: c.ControlRollout) -> list[str]:
    _require(command.step is None)
    _require(not command.reason or command.action is c.RolloutAction.ABORT)
    reason = _option("reason", command.reason) if command.reason else []
    return ["rollout", command.action.value, _name(command.name), *reason]


def _update_backend_config(command: c.UpdateBackendConfig) -> list[str]:
    _require(bool(command.config))
    plain = {name: value for name, value in command.config.items() if _is_plain(name, value)}
    others = {name: value for name, value in command.config.items() if name not in plain}
    options = [part for name, value in plain.items() for part in _option(name, value)]
    fields = _option("fields", others) if others else []
    skips = ["--no-rollout"] if command.skips_rollout else []
    return ["update", _name(command.backend_tag), *options, *fields, *skips]


def _is_plain(name: str, value: Any) -> bool:
    """Whether the option of a field takes the value as it is; others are part of ``--fields``."""
    default = getattr(BackendConfig(), name, None)
    if isinstance(default, Enum):
        return value in {each.value for each in type(default)}
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return (
        is_number
        and isinstance(default, int | float)
        and (isinstance(default, float) or isinstance(value, int))
    )


def _set_endpoint_options(command: c.SetEndpointOptions) -> list[str]:
    _require(bool(command.options))
    name = _name(command.endpoint)
    if any(value is None or isinstance(value, bool) for value in command.options.values()):
        return ["endpoint", "update", name, *_option("fields", command.options)]
    options = [part for field, value in command.options.items() for part in _option(field, value)]
    return ["endpoint", "update", name, *options]


def _set_http_options(command: c.SetHttpOptions) -> list[str]:
    _require(bool(command.options))
    parts: list[str] = []
    for name, value in command.options.items():
        if name == "middlewares":
            _require(isinstance(value, list) and all(isinstance(each, str) and each for each in value))
            parts += [part for each in value or [""] for part in _option(name, each)]
        else:
            _require(value is not None)
            parts += _option(name, value)
    return ["http", "update", *parts]


def _create_endpoint(command: c.CreateEndpoint) -> list[str]:
    parts = [*_route(command.route), *_methods(command.methods, _ENDPOINT_METHODS)]
    weights = _shares(command.traffic)
    return ["endpoint", "create", _name(command.endpoint), *weights, *parts, *_endpoint(command.options)]


def _create_backend(command: c.CreateBackend) -> list[str]:
    code = _code(command.replica_config)
    target = command.replica_config.import_path
    _require(not target.startswith("-"))
    return ["backend", "create", _name(command.backend_tag), target, *code, *_backend(command.backend_config)]


def _delete_backend(command: c.DeleteBackend) -> list[str]:
    force = ["--force-kill"] if command.force_kill else []
    return ["backend", "delete", _name(command.backend_tag), *force]


def _deploy(command: c.Deploy) -> list[str]:
    target = command.replica_config.import_path
    _require(":" in target and not target.startswith("-") and not target.endswith(_FILE_ENDS))
    return [
        "deploy",
        target,
        *_option("name", _name(command.name)),
        *_route(command.route_prefix),
        *_methods(command.methods, list(METHODS)),
        *([] if command.version is None else _option("version", command.version)),
        *([] if command.prev_version is None else _option("prev_version", command.prev_version)),
        *(["--no-rollout"] if command.skips_rollout else []),
        *_code(command.replica_config),
        *_backend(command.backend_config),
        *_endpoint(command.endpoint_options),
    ]


def _start_rollout(command: c.StartRollout) -> list[str]:
    _require(command.rollout is None)
    code = dict(command.replica_config)
    parts: list[str] = []
    if "import_path" in code:
        _require(code.pop("code", None) == "")
        parts += _option("to", code.pop("import_path"))
    _require(code.keys() <= {"app_dir", "init_args", "init_kwargs", "ray_actor_options"})
    try:
        built = msgspec.convert({"import_path": "a:b", **code}, ReplicaConfig)
    except msgspec.ValidationError as error:
        raise _NoEqual from error
    _require(code == {name: value for name, value in msgspec.to_builtins(built).items() if name in code})
    if "app_dir" in code:
        parts += _app_dir(built.app_dir)
    parts += [
        part for name in ("init_args", "init_kwargs") if name in code for part in _option(name, code[name])
    ]
    if "ray_actor_options" in code:
        parts += _option("ray_actor_options", code["ray_actor_options"])
    parts += [part for name, value in command.backend_config.items() for part in _backend_field(name, value)]
    limits = dict(command.rollout_fields)
    steps = limits.pop("steps", None)
    if steps is not None:
        _require(
            all(isinstance(step, str) and step and step == step.strip() and "," not in step for step in steps)
        )
        parts += _option("steps", ", ".join(steps))
    parts += _option("limits", limits) if limits else []
    version = [] if command.version is None else _option("version", command.version)
    again = ["--again"] if command.again else []
    return ["rollout", "start", _name(command.name), *version, *parts, *again]


def _route(route: str | None) -> list[str]:
    if route is None:
        return []
    _require(check_route(route, "route") == route)
    return _option("route_prefix", route)


def _methods(methods: Sequence[str], default: Sequence[str]) -> list[str]:
    if list(methods) == list(default):
        return []
    _require(
        bool(methods) and all(method == method.upper().strip() and "," not in method for method in methods)
    )
    return _option("methods", ",".join(methods))


def _app_dir(app_dir: str) -> list[str]:
    _require(app_dir.startswith("/") and posixpath.normpath(app_dir) == app_dir)
    return _option("app_dir", app_dir)


def _code(config: ReplicaConfig) -> list[str]:
    _require(not (config.code or config.working_dir or config.py_modules))
    parts = _app_dir(config.app_dir) if config.app_dir else []
    parts += _option("init_args", config.init_args) if config.init_args else []
    parts += _option("init_kwargs", config.init_kwargs) if config.init_kwargs else []
    options, default = config.ray_actor_options, RayActorOptions()
    for name in ("num_cpus", "num_gpus"):
        if getattr(options, name) != getattr(default, name):
            parts += _option(name, getattr(options, name))
    others = msgspec.structs.replace(options, num_cpus=default.num_cpus, num_gpus=default.num_gpus)
    parts += _option("ray_actor_options", others) if others != default else []
    return parts


def _backend(config: BackendConfig) -> list[str]:
    default, plain = BackendConfig(), msgspec.to_builtins(config)
    changed = [name for name in plain if getattr(config, name) != getattr(default, name)]
    return [part for name in changed for part in _backend_field(name, plain[name])]


def _backend_field(name: str, value: Any) -> list[str]:
    """The option of one field of `BackendConfig`."""
    match value:
        case None:
            _require(name in {"rollout", "autoscaling_config", "logging_config"})
            return _option(name, "off")
        case list() | tuple() if name == "may_call":
            return _option(name, ",".join(value))
        case str() if name == "user_config":
            return _option(name, _json(value))
        case bool():
            _require(name == "user_config")
            return _option(name, _json(value))
        case dict() if name == "rollout":
            return _option(name, value or "default")
        case _:
            return _option(name, value)


def _endpoint(options: EndpointOptions) -> list[str]:
    default = EndpointOptions()
    plain = msgspec.to_builtins(options)
    changed = [name for name in plain if getattr(options, name) != getattr(default, name)]
    return [part for name in changed for part in _option(name, plain[name])]


_BUILD: Final[Mapping[type[c.Command[Any]], Callable[[Any], list[str]]]] = {
    c.Scale: _scale,
    c.SetTraffic: _set_traffic,
    c.ShadowTraffic: _shadow_traffic,
    c.Rollback: _rollback,
    c.ControlRollout: _control_rollout,
    c.StartRollout: _start_rollout,
    c.UpdateBackendConfig: _update_backend_config,
    c.SetEndpointOptions: _set_endpoint_options,
    c.SetHttpOptions: _set_http_options,
    c.CreateEndpoint: _create_endpoint,
    c.CreateBackend: _create_backend,
    c.Deploy: _deploy,
    c.PauseAutoscaling: lambda command: ["autoscaling", "pause", _name(command.backend_tag)],
    c.ResumeAutoscaling: lambda command: ["autoscaling", "resume", _name(command.backend_tag)],
    c.DrainHost: lambda command: ["host", "drain", command.host_id],
    c.UndrainHost: lambda command: ["host", "undrain", command.host_id],
    c.DeleteDeployment: lambda command: ["delete", _name(command.name)],
    c.DeleteApplication: lambda command: ["app", "delete", command.name],
    c.DeleteEndpoint: lambda command: ["endpoint", "delete", _name(command.endpoint)],
    c.DeleteBackend: _delete_backend,
}
