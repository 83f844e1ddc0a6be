"""Options for the fields of a backend's and of its replicas' configuration, the same for every command that takes them.

Why tables: a field is an option of `muster deploy`, `muster backend create` and `muster backend update` alike, and a
test sees that none is forgotten.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Final

import msgspec

from muster.cli import output, values_given
from muster.cli.signature import option, option_of
from serve_common.errors import BadField
from serve_common.values import (
    BackendConfig,
    OnFailure,
    Placement,
    RayActorOptions,
    ReplicaConfig,
    check_backend_config,
    check_replica_config,
    merged,
)

_CODE, _SIZE, _UPDATES = "Code", "Size and place", "Updates"
_LIFE = "Life and health of a replica"


class _OnFailureChoice(Enum):
    """As options are spelled."""

    KEEP = "keep"
    GO_BACK = "go-back"


CODE_OPTIONS: Final = (
    option("app_dir", str, "Directory where replicas find the module.", panel=_CODE),
    option("init_args", str, "Array for the constructor.", panel=_CODE, metavar="JSON"),
    option("init_kwargs", str, "Object for the constructor.", panel=_CODE, metavar="JSON"),
    option("num_cpus", float, "CPUs that one replica reserves. Default: 1.", panel=_SIZE, metavar="N"),
    option("num_gpus", float, "GPUs that one replica reserves.", panel=_SIZE, metavar="N"),
    option(
        "ray_actor_options",
        str,
        "num_cpus, num_gpus, memory, resources, runtime_env.",
        panel=_SIZE,
        metavar="JSON",
    ),
)
"""Of `ReplicaConfig`, its import path excepted."""

_FIELDS: Final = (
    ("user_config", str, "For reconfigure(); @file.json or @file.yaml.", _CODE, "JSON|@FILE"),
    ("num_replicas", int, "How many run.", _SIZE, "N"),
    ("max_concurrent_queries", int, "Requests at once in one replica.", _SIZE, "N"),
    ("max_queued_requests", int, "Requests that wait in one proxy; -1 is no limit.", _SIZE, "N"),
    ("placement", Placement, "Over many hosts, or few.", _SIZE, None),
    ("max_replicas_per_host", int, "No more of them on one host.", _SIZE, "N"),
    ("on_failure", _OnFailureChoice, "Whether new replicas that serve stay.", _UPDATES, None),
    ("max_surge_percent", float, "Replicas more than wanted meanwhile.", _UPDATES, "N"),
    ("max_unavailable_percent", float, "Replicas fewer, where no room is for more.", _UPDATES, "N"),
    ("max_constructor_retry_count", int, "Failed starts before an update fails.", _LIFE, "N"),
    ("start_timeout_s", float, "Time for import and constructor.", _LIFE, "S"),
    ("graceful_shutdown_timeout_s", float, "Time to finish what is in flight.", _LIFE, "S"),
    ("health_check_period_s", float, "Between two checks.", _LIFE, "S"),
    ("health_check_timeout_s", float, "Of one check.", _LIFE, "S"),
    ("health_check_failure_threshold", int, "Checks in a row that fail.", _LIFE, "N"),
)
"""Of `BackendConfig`, field by field: name, type, text, panel, metavar."""


def _text_with_default(name: str, text: str) -> str:
    default = getattr(BackendConfig(), name)
    if default is None:
        return text
    shown = default.value.replace("_", "-") if isinstance(default, Enum) else f"{default:g}"
    return f"{text} Default: {shown}."


BACKEND_OPTIONS: Final = tuple(
    option(name, kind, _text_with_default(name, text), panel=panel, metavar=metavar)
    for name, kind, text, panel, metavar in _FIELDS
)
"""Of a whole `BackendConfig`."""
BACKEND_CHANGES: Final = tuple(
    option(name, kind, text, panel=panel, metavar=metavar) for name, kind, text, panel, metavar in _FIELDS
)
"""Of some fields of a `BackendConfig`: what is not given stays."""

_BACKEND_FIELDS: Final = frozenset(name for name, *_rest in _FIELDS)


def backend_config_of(given: Mapping[str, Any], directory: Path) -> BackendConfig:
    """What was given, and defaults for the rest. Raises `BadField` naming the option."""
    try:
        return check_backend_config(BackendConfig(**_fields(given, directory)))
    except BadField as error:
        raise named_by_option(error, "backend_config") from error


def partial_backend_config(given: Mapping[str, Any], config: str | None, directory: Path) -> dict[str, Any]:
    """Only what was given: the fields of the JSON object ``config``, and options over them. Raises `BadField`."""
    partial = dict(values_given.read_object(config, directory, "--config"))
    partial |= msgspec.to_builtins(_fields(given, directory))
    if not partial:
        raise BadField("config", "nothing is given; --help shows the options")
    try:
        check_backend_config(merged(BackendConfig(), partial, "backend_config"))
    except BadField as error:
        raise named_by_option(error, "backend_config") from error
    return partial


def replica_config_of(import_path: str, given: Mapping[str, Any], directory: Path) -> ReplicaConfig:
    """What was given, and defaults for the rest; says when a directory is one of the hosts. Raises `BadField`."""
    app_dir, note = values_given.place_app_dir(given.get("app_dir"), directory)
    if note:
        output.complain(note)
    read = values_given.read_json
    config = ReplicaConfig(
        import_path=import_path,
        app_dir=app_dir,
        init_args=read(given.get("init_args"), "--init-args", list[Any], "an array") or [],
        init_kwargs=read(given.get("init_kwargs"), "--init-kwargs", dict[str, Any], "an object") or {},
        ray_actor_options=_actor_options(given),
    )
    try:
        return check_replica_config(config)
    except BadField as error:
        raise named_by_option(error, "replica_config") from error


def named_by_option(error: BadField, prefix: str) -> BadField:
    """The same error with the option that sets the field, where it is the field of ``prefix``."""
    name = error.field.removeprefix(f"{prefix}.")
    if name == error.field:
        return error
    field, dot, rest = name.partition(".")
    if field == "import_path":
        return BadField("import_path", error.reason)
    return BadField(f"{option_of(field)}{dot}{rest}", error.reason)


def _fields(given: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    fields = {name: value for name, value in given.items() if name in _BACKEND_FIELDS}
    if "user_config" in fields:
        fields["user_config"] = values_given.read_user_config(fields["user_config"], directory)
    if "on_failure" in fields:
        fields["on_failure"] = OnFailure[fields["on_failure"].name]
    return fields


def _actor_options(given: Mapping[str, Any]) -> RayActorOptions:
    text = given.get("ray_actor_options")
    options = values_given.read_json(text, "--ray-actor-options", RayActorOptions, "an object")
    amounts = {name: given[name] for name in ("num_cpus", "num_gpus") if name in given}
    return msgspec.structs.replace(options or RayActorOptions(), **amounts)
