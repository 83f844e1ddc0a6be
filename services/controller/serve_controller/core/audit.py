"""What a command changed, for the audit log: what it was about before and after, as plain values.

Why only some objects: replicas, goals, counters and snapshots follow from what was decided, and the log is read by
people who ask what somebody wanted. Why bounded: one entry must stay readable, and a command may change everything.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import msgspec

from serve_controller.core.changes import Changes, Key, Kind, key_of
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.objects import (
    Application,
    Backend,
    CheckpointObject,
    Endpoint,
    HostRecord,
    HttpRecord,
)

AUDIT_BYTES_MAX: Final = 64 * 1024
"""Of each side, as JSON."""
OBJECT_BYTES_MAX: Final = 16 * 1024
"""In an object that is larger, large values that users gave are named instead."""
VALUE_BYTES_MAX: Final = 1024
"""Such a value is large beyond this."""
LEFT_OUT: Final = "left out"
"""The key that says what is not there because of the limits."""
_NOTE_BYTES: Final = 2048
"""Kept free for that."""
_NAMES_LEFT_OUT_MAX: Final = 5
_GIVEN_BY_USERS: Final = frozenset({"user_config", "init_args", "init_kwargs", "runtime_env", "resources"})

Side: TypeAlias = dict[str, Any] | None
"""Objects by kind and name ("backend default/a"), None for one that is not there; None: nothing of it is logged."""


def audit_of(before: Checkpoint, changes: Changes) -> tuple[Side, Side]:
    """What ``changes`` do to what users decide on, as (old, new); each with the same keys, as far as there is room."""
    changed: list[tuple[Key, CheckpointObject | None]] = [(key_of(value), value) for value in changes.puts]
    changed += [(key, None) for key in changes.deletes]
    old, new = _Entry(), _Entry()
    for key, value in sorted(changed, key=lambda entry: _title(entry[0])):
        known = before.lookup(key)
        was, becomes = _plain(known), _plain(value)
        if was == becomes or (key[0] is Kind.HOST and not (_drains(known) or _drains(value))):
            continue
        old.add(_title(key), was)
        new.add(_title(key), becomes)
    return old.content(), new.content()


def _title(key: Key) -> str:
    kind, name = key
    return "http options" if kind is Kind.HTTP else f"{kind.value} {name}"


def _drains(value: CheckpointObject | None) -> bool:
    return isinstance(value, HostRecord) and value.draining


def _plain(value: CheckpointObject | None) -> Any:
    """What is logged of an object; None for what is not there, and for kinds that are not logged."""
    match value:
        case Backend():
            plain: dict[str, Any] = {"target": msgspec.to_builtins(value.target)}
            flags = {"deleting": value.deleting, "halted": value.halted}
            return plain | {name: True for name, is_set in flags.items() if is_set}
        case Endpoint() | HttpRecord():
            return msgspec.to_builtins(value.target)
        case Application():
            plain = msgspec.to_builtins(value.target)
            return plain | {"deleting": True} if value.deleting else plain
        case HostRecord():
            return {"draining": value.draining}
        case _:
            return None


class _Entry:
    """One side of an entry, as it is filled."""

    def __init__(self) -> None:
        self._objects: dict[str, Any] = {}
        self._room = AUDIT_BYTES_MAX - _NOTE_BYTES
        self._left_out: list[str] = []

    def add(self, title: str, value: Any) -> None:
        """Take in an object while there is room; what comes after the first that has none is only counted."""
        if self._left_out:
            self._left_out.append(title)
            return
        if _size(value) > OBJECT_BYTES_MAX:
            value = _shortened(value)
        size = _size({title: value})
        if size > self._room:
            self._left_out.append(title)
            return
        self._room -= size
        self._objects[title] = value

    def content(self) -> Side:
        """Everything taken in, and a note of what is missing."""
        if not self._left_out:
            return self._objects or None
        named, more = self._left_out[:_NAMES_LEFT_OUT_MAX], len(self._left_out) - _NAMES_LEFT_OUT_MAX
        names = ", ".join(named) + (f" and {more} more" if more > 0 else "")
        return {
            **self._objects,
            LEFT_OUT: f"{len(self._left_out)} objects for which there is no room: {names}",
        }


def _shortened(value: Any, name: str = "") -> Any:
    """``value`` with a note in place of each value that a user gave and that is large."""
    if name in _GIVEN_BY_USERS:
        size = _size(value)
        return value if size <= VALUE_BYTES_MAX else f"{LEFT_OUT}: {size} bytes"
    if isinstance(value, dict):
        return {name: _shortened(inner, name) for name, inner in value.items()}
    return value


def _size(value: Any) -> int:
    return len(msgspec.json.encode(value))
