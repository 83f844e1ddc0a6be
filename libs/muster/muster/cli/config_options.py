"""Options for the fields of a backend's and a replica's configuration.

Why tables: a field is an option of `muster deploy`, `muster backend create` and `muster update` alike, and a
test ensures that none is forgotten.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Final

import msgspec

from muster.cli import parsing
from muster.cli.output import print_error
from muster.cli.queries import get_option_name, option
from serve_common.config.autoscaling import AutoscalingConfig
from serve_common.config.backend import (
    BackendConfig,
    BackpressureConfig,
    CircuitBreaker,
    LoggingConfig,
    OnFailure,
    OutlierEjection,
    Placement,
    RayActorOptions,
    ReplicaConfig,
    ReplicaPolicyName,
    check_backend_config,
    check_replica_config,
    merged,
)
from serve_common.config.rollout import RolloutConfig
from serve_common.errors import BadField

_CODE, _SIZE, _UPDATES = "Code", "Size and place", "Updates"
_LIFE, _GUARD = "Life and health of a replica", "Routing and protection"
_GROUP: Final = "NAME=VALUE,..."


def _dashed(kind: type[Enum]) -> Any:
    """The same enumeration with values as the command line spells them."""
    return Enum(kind.__name__, {each.name: each.value.replace("_", "-") for each in kind})


CODE_OPTIONS: Final = (
    option(
        "app_dir",
        str,
        "Directory of the module. It is not uploaded: it must exist under this path on every replica host. "
        "Default: none; the module is found among the hosts' installed packages.",
        panel=_CODE,
        metavar="DIR",
    ),
    option(
        "init_args",
        str,
        "Positional arguments of the constructor: a JSON array, or a file (.json, .yaml).",
        panel=_CODE,
        metavar="JSON|@FILE",
    ),
    option(
        "init_kwargs",
        str,
        "Keyword arguments of the constructor: a JSON object, or a file (.json, .yaml).",
        panel=_CODE,
        metavar="JSON|@FILE",
    ),
    option(
        "num_cpus",
        float,
        "CPUs reserved for each replica, such as 0.5. Default: 1.",
        panel=_SIZE,
        metavar="N",
    ),
    option("num_gpus", float, "GPUs reserved for each replica. Default: 0.", panel=_SIZE, metavar="N"),
    option(
        "ray_actor_options",
        str,
        "Ray options of each replica: memory (bytes), resources, runtime_env (env_vars only), num_cpus and "
        "num_gpus, which --num-cpus and --num-gpus override.",
        panel=_SIZE,
        metavar="JSON|@FILE",
    ),
)
"""Options for the fields of `ReplicaConfig`, except its import path."""

_FIELDS: Final = (
    (
        "user_config",
        str,
        "Value passed to reconfigure() of every replica: JSON, or a file (.json, .yaml).",
        _CODE,
        "JSON|@FILE",
    ),
    (
        "logging_config",
        str,
        (
            "Log lines of replicas: log_level of the loggers ray.serve and muster, enable_access_log for a line per "
            "request, encoding=JSON for 'muster logs', additional_log_standard_attrs, and logs_dir for files too. "
            "Default: 'off'."
        ),
        _LIFE,
        _GROUP,
    ),
    (
        "may_call",
        str,
        (
            "Applications or deployments (APP/NAME) that this one may call through deployment handles; '*' for all. "
            "Default: its own application."
        ),
        _CODE,
        "NAME,...",
    ),
    (
        "num_replicas",
        int,
        (
            "Number of replicas, 0 to 10000. With autoscaling a deploy ignores it, and 'muster update' pauses the "
            "autoscaling with it."
        ),
        _SIZE,
        "N",
    ),
    (
        "autoscaling_config",
        str,
        (
            "Let the number of replicas follow the load between two limits, as in min_replicas=1,max_replicas=8; 'off' "
            "fixes the number. The load is target_ongoing_requests per replica, waiting ones included; a new "
            "deployment starts with initial_replicas, or else min_replicas. docs/reference/configuration.md explains "
            "each field."
        ),
        _SIZE,
        _GROUP,
    ),
    (
        "max_concurrent_queries",
        int,
        "Requests that one replica works on at once; also the size of its thread pool.",
        _SIZE,
        "N",
    ),
    (
        "max_queued_requests",
        int,
        "Requests that may wait for a replica in one proxy; further ones are refused. -1 means no limit.",
        _SIZE,
        "N",
    ),
    (
        "placement",
        Placement,
        "How a host is chosen for a replica. spread: the one with the fewest replicas; pack: the fullest.",
        _SIZE,
        "PLACEMENT",
    ),
    ("max_replicas_per_host", int, "Most replicas on one host. Default: as many as fit.", _SIZE, "N"),
    (
        "on_failure",
        _dashed(OnFailure),
        (
            "What becomes of new replicas that serve when an update fails. keep: they stay beside the old ones; "
            "go-back: the old version replaces them."
        ),
        _UPDATES,
        "ACTION",
    ),
    (
        "rollout",
        str,
        (
            "Roll out each new version step by step, as 'muster rollout start' does: its steps, as in '5%, 50% 10m, "
            "100%', or 'default', or its settings as a JSON object or in a file; 'off': replace the old version at "
            "once."
        ),
        _UPDATES,
        "STEPS|JSON|@FILE",
    ),
    (
        "max_surge_percent",
        float,
        "Extra replicas allowed during an update, in % of --num-replicas, rounded up.",
        _UPDATES,
        "PERCENT",
    ),
    (
        "max_unavailable_percent",
        float,
        "Replicas that may be missing during an update when capacity is short, in % of --num-replicas, rounded up.",
        _UPDATES,
        "PERCENT",
    ),
    (
        "max_constructor_retry_count",
        int,
        "Failed starts of a version, over all its replicas, after which its update fails.",
        _LIFE,
        "N",
    ),
    (
        "start_timeout_s",
        float,
        "Seconds that import and constructor may take before the start counts as failed.",
        _LIFE,
        "SECONDS",
    ),
    (
        "graceful_shutdown_timeout_s",
        float,
        "Seconds for a stopped replica to finish requests in flight before it is killed.",
        _LIFE,
        "SECONDS",
    ),
    (
        "health_check_period_s",
        float,
        "Seconds between calls of check_health() of a replica.",
        _LIFE,
        "SECONDS",
    ),
    ("health_check_timeout_s", float, "Seconds before a check counts as failed.", _LIFE, "SECONDS"),
    (
        "health_check_failure_threshold",
        int,
        "Consecutive failed checks before a replica is replaced.",
        _LIFE,
        "N",
    ),
    (
        "replica_policy",
        _dashed(ReplicaPolicyName),
        (
            "How proxies and handles choose among replicas below --max-concurrent-queries: power-of-two-choices, "
            "round-robin, random or fixed-packing."
        ),
        _GUARD,
        "POLICY",
    ),
    ("packing_num", int, "Consecutive requests to one replica, with fixed-packing.", _GUARD, "N"),
    (
        "backpressure_config",
        str,
        "Response when the queue is full: its status (503 or 429) and the seconds in its Retry-After header (1).",
        _GUARD,
        _GROUP,
    ),
    (
        "outlier_ejection",
        str,
        (
            "Send nothing to a replica for ejection_time_s seconds after consecutive_failures failures in a row, but "
            "never eject more than max_ejected_percent of the replicas; 'off' disables it."
        ),
        _GUARD,
        _GROUP,
    ),
    (
        "retry_budget_percent",
        float,
        (
            "Share of requests, in %, that may be sent again because their replica died. 0 allows only ten in ten "
            "seconds. A POST is sent again only with the header Idempotency-Key."
        ),
        _GUARD,
        "PERCENT",
    ),
    (
        "circuit_breaker",
        str,
        (
            "Answer 503 for open_time_s seconds once failure_percent of at least requests_min requests within "
            "window_s seconds failed because replicas died or fell silent; 'off' disables it."
        ),
        _GUARD,
        _GROUP,
    ),
)
"""Options for the fields of `BackendConfig`: name, type, help text, panel, metavar."""


_CHOICES: Final[Mapping[str, type[Enum]]] = {"on_failure": OnFailure, "replica_policy": ReplicaPolicyName}
_GROUPS: Final[Mapping[str, type[msgspec.Struct]]] = {
    "backpressure_config": BackpressureConfig,
    "outlier_ejection": OutlierEjection,
    "circuit_breaker": CircuitBreaker,
    "autoscaling_config": AutoscalingConfig,
    "logging_config": LoggingConfig,
}
_OFF: Final = "off"
_OFF_VALUES: Final[Mapping[str, Any]] = {
    "autoscaling_config": None,
    "logging_config": None,
    "outlier_ejection": {"consecutive_failures": 0},
    "circuit_breaker": {"failure_percent": 0.0},
}


def _text_with_default(name: str, text: str) -> str:
    if name in _GROUPS:
        return f"{text} Fields and defaults: {', '.join(_fields_with_defaults(_GROUPS[name]()))}."
    default = getattr(BackendConfig(), name)
    if default is None:
        return text
    if isinstance(default, Enum):
        return f"{text} Default: {default.value.replace('_', '-')}."
    return f"{text} Default: {default:g}."


def _fields_with_defaults(group: msgspec.Struct) -> Iterator[str]:
    for name, value in msgspec.structs.asdict(group).items():
        match value:
            case None | msgspec.Struct() | () | "":
                yield name
            case Enum():
                yield f"{name}={value.value}"
            case bool():
                yield f"{name}={str(value).lower()}"
            case str():
                yield f"{name}={value}"
            case _:
                yield f"{name}={value:g}"


def _text_with_names(name: str, text: str) -> str:
    kind = _GROUPS.get(name)
    return text if kind is None else f"{text} Fields: {', '.join(kind.__struct_fields__)}."


BACKEND_OPTIONS: Final = tuple(
    option(name, kind, _text_with_default(name, text), panel=panel, metavar=metavar)
    for name, kind, text, panel, metavar in _FIELDS
)
"""Options for a complete `BackendConfig`; help texts end with the default."""
BACKEND_CHANGES: Final = tuple(
    option(name, kind, _text_with_names(name, text), panel=panel, metavar=metavar)
    for name, kind, text, panel, metavar in _FIELDS
)
"""Options for a partial `BackendConfig`: fields that are not given stay as they are."""

_BACKEND_FIELDS: Final = frozenset(name for name, *_rest in _FIELDS)


def build_backend_config(overrides: Mapping[str, Any], directory: Path) -> BackendConfig:
    """Build a complete configuration: given fields, defaults for the rest. Raises `BadField` naming the option."""
    try:
        return check_backend_config(merged(BackendConfig(), _fields(overrides, directory), "backend_config"))
    except BadField as error:
        raise name_option(error, "backend_config") from error


def parse_backend_overrides(
    overrides: Mapping[str, Any], fields: str | None, directory: Path
) -> dict[str, Any]:
    """Collect the given fields: those of the JSON object ``fields``, overridden by options. Raises `BadField`."""
    partial = dict(parsing.read_object(fields, directory, "--fields"))
    for name, value in _fields(overrides, directory).items():
        known = partial.get(name)
        partial[name] = {**known, **value} if name in _GROUPS and isinstance(known, dict) else value
    if not partial:
        raise BadField("options", "nothing is given; --help shows them")
    try:
        check_backend_config(merged(BackendConfig(), partial, "backend_config"))
    except BadField as error:
        raise name_option(error, "backend_config") from error
    return partial


def build_replica_config(import_path: str, overrides: Mapping[str, Any], directory: Path) -> ReplicaConfig:
    """Build a complete configuration: given fields, defaults for the rest. Raises `BadField` naming the option.

    Prints a note when the directory exists only on the replica hosts.
    """
    app_dir, note = parsing.resolve_app_dir(overrides.get("app_dir"), directory)
    if note:
        print_error(note)
    args, kwargs = overrides.get("init_args"), overrides.get("init_kwargs")
    config = ReplicaConfig(
        import_path=import_path,
        app_dir=app_dir,
        init_args=parsing.read_typed(args, directory, "--init-args", list[Any], "an array") or [],
        init_kwargs=parsing.read_typed(kwargs, directory, "--init-kwargs", dict[str, Any], "an object") or {},
        ray_actor_options=_actor_options(overrides, directory),
    )
    try:
        return check_replica_config(config)
    except BadField as error:
        raise name_option(error, "replica_config") from error


def name_option(error: BadField, prefix: str) -> BadField:
    """The same error naming the option that sets the field, if the field is one of ``prefix``."""
    name = error.field.removeprefix(f"{prefix}.")
    if name == error.field:
        return error
    field, dot, rest = name.partition(".")
    if field == "import_path":
        return BadField("import_path", error.reason)
    return BadField(f"{get_option_name(field)}{dot}{rest}", error.reason)


def _fields(overrides: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    fields = {name: value for name, value in overrides.items() if name in _BACKEND_FIELDS}
    if "user_config" in fields:
        fields["user_config"] = parsing.read_user_config(fields["user_config"], directory)
    if "may_call" in fields:
        fields["may_call"] = [name.strip() for name in fields["may_call"].split(",") if name.strip()]
    for name, kind in _CHOICES.items():
        if name in fields:
            fields[name] = kind[fields[name].name]
    for name, group in _GROUPS.items():
        if name not in fields:
            continue
        if name in _OFF_VALUES and fields[name].strip() == _OFF:
            fields[name] = _OFF_VALUES[name]
        else:
            fields[name] = parsing.read_group(fields[name], get_option_name(name), group)
    if "rollout" in fields:
        fields["rollout"] = _read_rollout(fields["rollout"], directory)
    plain: dict[str, Any] = msgspec.to_builtins(fields)
    return plain


def _read_rollout(text: str, directory: Path) -> dict[str, Any] | None:
    """Read steps, or settings by name as a JSON object or from a file; ``default`` changes no setting."""
    if text.startswith("@"):
        return parsing.read_object(text, directory, get_option_name("rollout"))
    if text.lstrip().startswith("{"):
        return parsing.read_group(text, get_option_name("rollout"), RolloutConfig)
    match text.strip():
        case "off":
            return None
        case "default":
            return {}
        case steps:
            return {"steps": [step.strip() for step in steps.split(",")]}


def _actor_options(overrides: Mapping[str, Any], directory: Path) -> RayActorOptions:
    text = overrides.get("ray_actor_options")
    options = parsing.read_typed(text, directory, "--ray-actor-options", RayActorOptions, "an object")
    amounts = {name: overrides[name] for name in ("num_cpus", "num_gpus") if name in overrides}
    return msgspec.structs.replace(options or RayActorOptions(), **amounts)
