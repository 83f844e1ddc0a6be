"""The changes of a command, for the audit log: as values and as text.

The texts also serve dry runs: the same change must have the same text everywhere, and large values must not be
repeated.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, Final, TypeAlias, TypeVar

import msgspec
from immutables import Map

from serve_common.config.backend import BackendConfig
from serve_common.protocol.reports import ReplicaGoal
from serve_common.values import truncate, truncate_start
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.objects import (
    Application,
    Backend,
    BackendVersion,
    BuildFailure,
    CheckpointObject,
    EndpointConfig,
    EndpointRecord,
    HostRecord,
    HttpRecord,
    Key,
    ObjectChanges,
    ObjectKind,
    get_key,
)

AUDIT_BYTES_MAX: Final = 64 * 1024
"""Most bytes of each side of an entry, as JSON."""
OBJECT_BYTES_MAX: Final = 16 * 1024
"""Bytes of an object beyond which large values given by users are replaced by a note."""
VALUE_BYTES_MAX: Final = 1024
"""Bytes beyond which such a value is large."""
LEFT_OUT: Final = "left out"
"""Key of the note about what was left out because of the limits."""
_NOTE_BYTES: Final = 2048
"""Bytes reserved for that note."""
_NAMES_LEFT_OUT_MAX: Final = 5
_USER_VALUES: Final = frozenset({"user_config", "init_args", "init_kwargs", "runtime_env", "resources"})

Side: TypeAlias = dict[str, Any] | None
"""Objects by kind and name ("backend default/a"), None for a missing one; None in all if nothing is logged."""


def audit_values(before: Checkpoint, changes: ObjectChanges) -> tuple[Side, Side]:
    """What ``changes`` do to user-visible objects, as (old, new) with the same keys, as far as the limits allow.

    Only some kinds are logged: replicas, goals, counters and snapshots follow from what was decided, and the log is
    read to find out what was requested. It is bounded because one entry must stay readable while a command may change
    everything.
    """
    changed: list[tuple[Key, CheckpointObject | None]] = [(get_key(value), value) for value in changes.puts]
    changed += [(key, None) for key in changes.deletes]
    old, new = _Entry(), _Entry()
    for key, value in sorted(changed, key=lambda entry: _title(entry[0])):
        known = before.lookup(key)
        was, becomes = _plain(known), _plain(value)
        if was == becomes or (key[0] is ObjectKind.HOST and not (_drains(known) or _drains(value))):
            continue
        old.add(_title(key), was)
        new.add(_title(key), becomes)
    return old.content(), new.content()


def _title(key: Key) -> str:
    kind, name = key
    return "http options" if kind is ObjectKind.HTTP else f"{kind.value} {name}"


def _drains(value: CheckpointObject | None) -> bool:
    return isinstance(value, HostRecord) and value.draining


def _plain(value: CheckpointObject | None) -> Any:
    """The logged value of an object; None for a missing one and for kinds that are not logged."""
    match value:
        case Backend():
            plain: dict[str, Any] = {"target": msgspec.to_builtins(value.target)}
            flags = {"deleting": value.deleting, "halted": value.halted}
            return plain | {name: True for name, is_set in flags.items() if is_set}
        case EndpointRecord() | HttpRecord():
            return msgspec.to_builtins(value.target)
        case Application():
            plain = msgspec.to_builtins(value.target)
            return plain | {"deleting": True} if value.deleting else plain
        case BuildFailure():
            return {"error": truncate_start(value.error, VALUE_BYTES_MAX)}
        case HostRecord():
            return {"draining": value.draining}
        case _:
            return None


class _Entry:
    """Builder of one side of an entry."""

    def __init__(self) -> None:
        self._objects: dict[str, Any] = {}
        self._bytes_left = AUDIT_BYTES_MAX - _NOTE_BYTES
        self._left_out: list[str] = []

    def add(self, title: str, value: Any) -> None:
        """Add an object if it fits; from the first one that does not fit, objects are only counted."""
        if self._left_out:
            self._left_out.append(title)
            return
        if _size(value) > OBJECT_BYTES_MAX:
            value = _shortened(value)
        size = _size({title: value})
        if size > self._bytes_left:
            self._left_out.append(title)
            return
        self._bytes_left -= size
        self._objects[title] = value

    def content(self) -> Side:
        """The added objects, and a note of those left out."""
        if not self._left_out:
            return self._objects or None
        named, more = self._left_out[:_NAMES_LEFT_OUT_MAX], len(self._left_out) - _NAMES_LEFT_OUT_MAX
        names = ", ".join(named) + (f" and {more} more" if more > 0 else "")
        return {
            **self._objects,
            LEFT_OUT: f"{len(self._left_out)} objects for which there is no room: {names}",
        }


def _shortened(value: Any, name: str = "") -> Any:
    """``value`` with large values given by users replaced by a note."""
    if name in _USER_VALUES:
        size = _size(value)
        return value if size <= VALUE_BYTES_MAX else f"{LEFT_OUT}: {size} bytes"
    if isinstance(value, dict):
        return {name: _shortened(inner, name) for name, inner in value.items()}
    return value


def _size(value: Any) -> int:
    return len(msgspec.json.encode(value))


Name = TypeVar("Name", bound=str)

REPLICA_OPTIONS: Final = frozenset(BackendConfig.__struct_fields__) & frozenset(ReplicaGoal.__struct_fields__)
"""Options that running replicas must apply; a change of any other one reaches no replica."""
_UNSHOWN: Final = frozenset({"user_config", "init_args", "init_kwargs", "runtime_env"})
"""Fields whose values are not shown: they may be large or secret."""
_SHOWN_LENGTH_MAX: Final = 80


def format_value(value: Any) -> str:
    """A value as text for people, cut."""
    if value is None or value == "":
        return "none"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, dict | list):
        return truncate(msgspec.json.encode(value).decode(), _SHOWN_LENGTH_MAX)
    return truncate(str(msgspec.to_builtins(value)), _SHOWN_LENGTH_MAX)


def changed_fields(before: msgspec.Struct, after: msgspec.Struct, names: Collection[str] = ()) -> list[str]:
    """Text for each field (of ``names``, or all) that differs, such as ``num_replicas 3 → 5``."""
    texts = []
    for name in before.__struct_fields__:
        if names and name not in names:
            continue
        old, new = getattr(before, name), getattr(after, name)
        if old == new:
            continue
        if isinstance(old, msgspec.Struct) and isinstance(new, msgspec.Struct):
            texts += [f"{name}.{word}" for word in changed_fields(old, new)]
        elif name in _UNSHOWN:
            texts.append(f"{name} changes")
        else:
            texts.append(f"{name} {format_value(old)} → {format_value(new)}")
    return texts


def code_change(before: BackendVersion, after: BackendVersion) -> str:
    """Why replicas of ``before`` are replaced by those of ``after``."""
    parts = []
    if before.version != after.version:
        parts.append(f"version {format_value(before.version)} → {format_value(after.version)}")
    fields = changed_fields(before.replica_config, after.replica_config)
    if fields:
        parts.append(f"the code changes: {', '.join(fields)}")
    if not parts and after.version is None:
        return "the code may have changed: no version is named"
    return "; ".join(parts) or "the code is started anew"


def config_change(before: BackendVersion, after: BackendVersion) -> str:
    """Why replicas of ``before`` are reconfigured."""
    fields = changed_fields(before.backend_config, after.backend_config, REPLICA_OPTIONS)
    return ", ".join(fields) or "a newer configuration"


def light_changes(before: BackendConfig, after: BackendConfig) -> list[str]:
    """Changed options that reach no replica, except ``num_replicas``."""
    light = frozenset(BackendConfig.__struct_fields__) - REPLICA_OPTIONS - {"num_replicas"}
    return changed_fields(before, after, light)


def format_traffic(traffic: Iterable[tuple[str, float]]) -> str:
    """Where requests go: ``default/a 70 %, default/b 30 %``."""
    return ", ".join(f"{tag} {100 * share:g} %" for tag, share in sorted(traffic)) or "nowhere"


def endpoint_changes(before: EndpointConfig, after: EndpointConfig) -> list[str]:
    """Changes of an endpoint's route, methods, traffic, shadows and options."""
    texts = changed_fields(before, after, ("route",))
    if sorted(before.methods) != sorted(after.methods):
        texts.append(f"methods {', '.join(before.methods)} → {', '.join(after.methods)}")
    for name, old, new in (
        ("traffic", before.traffic, after.traffic),
        ("shadows", before.shadows, after.shadows),
    ):
        if old != new:
            texts.append(f"{name} {format_traffic(old.items())} → {format_traffic(new.items())}")
    return texts + changed_fields(before.options, after.options)


def changed_names(before: Map[Name, Any], after: Map[Name, Any]) -> list[Name]:
    """Names whose values were changed, removed or added; in order."""
    if before is after:
        return []
    gone = [name for name in before if name not in after]
    others = [
        name for name, value in after.items() if (known := before.get(name)) is not value and known != value
    ]
    return sorted(gone + others)
