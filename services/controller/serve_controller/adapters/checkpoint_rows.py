"""Between the checkpoint's objects and their rows.

Why apart from both: the core does not know how its objects are stored, and the store does not know what they
mean. The format has a version, so that a later version of the code reads what this one wrote, and this one
refuses what a later one wrote instead of dropping what it does not know. Every change of the shape of a
stored type is a new `SCHEMA_VERSION` with a file of examples in ``tests/data/checkpoints``; rows of older
versions stay readable.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from serve_common.errors import CheckpointUnreadable
from serve_controller.core.checkpoint import CLASSES, Changes, Checkpoint, Key, Kind, key_of
from serve_controller.core.objects import CheckpointObject

SCHEMA_VERSION: Final = 1
"""The format that is written; all from 1 to this one are read."""

HISTORY_ROWS_MAX: Final = 10_000
"""History rows that are kept; a store may hold a few more until it next trims."""

_ENCODER: Final = msgspec.json.Encoder()
_DECODERS: Final[Mapping[Kind, msgspec.json.Decoder[Any]]] = {
    kind: msgspec.json.Decoder(stored_type) for kind, stored_type in CLASSES.items()
}


class Row(msgspec.Struct, frozen=True):
    """One object as it is stored."""

    kind: str
    key: str
    schema_version: int
    value: str
    """JSON."""


class RowChanges(msgspec.Struct, frozen=True):
    """`Changes` as rows; no key occurs twice."""

    puts: tuple[Row, ...]
    deletes: tuple[tuple[str, str], ...]
    """Kind and key."""


def dump(value: CheckpointObject) -> Row:
    """The row of an object."""
    kind, key = key_of(value)
    return Row(kind.value, key, SCHEMA_VERSION, _to_json(value))


def load(row: Row) -> CheckpointObject:
    """The object of a row. Raises `CheckpointUnreadable`, which names the row and the reason."""
    try:
        kind = Kind(row.kind)
    except ValueError:
        raise _unreadable(row, "this version of the code knows no such kind") from None
    if row.schema_version != SCHEMA_VERSION:
        reason = (
            f"its schema_version is {row.schema_version}; this version of the code reads {SCHEMA_VERSION}"
        )
        raise _unreadable(row, reason)
    try:
        value: CheckpointObject = _DECODERS[kind].decode(row.value)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise _unreadable(row, str(error)) from error
    if key_of(value) != (kind, row.key):
        raise _unreadable(row, f"it holds the object {key_of(value)[1]!r}")
    return value


def load_checkpoint(rows: Iterable[Row]) -> Checkpoint:
    """The checkpoint that ``rows`` make. Raises `CheckpointUnreadable`."""
    return Checkpoint().applied(Changes(puts=tuple(load(row) for row in rows)))


def dump_changes(changes: Changes) -> RowChanges:
    """What a store must write. Of several values of one key the last counts; a deleted key is not put."""
    gone = dict.fromkeys(changes.deletes)
    puts: dict[Key, CheckpointObject] = {key_of(value): value for value in changes.puts}
    return RowChanges(
        puts=tuple(dump(value) for key, value in puts.items() if key not in gone),
        deletes=tuple((kind.value, key) for kind, key in gone),
    )


def _unreadable(row: Row, reason: str) -> CheckpointUnreadable:
    return CheckpointUnreadable(f"row {row.kind} {row.key!r}: {reason}")


def _to_json(value: CheckpointObject) -> str:
    try:
        return _ENCODER.encode(value).decode()
    except UnicodeEncodeError:
        # A lone surrogate has no UTF-8, so neither JSON nor Postgres takes it, yet a traceback that names a
        # file with undecodable bytes holds one. Showing it as an escape is better than refusing the whole
        # change.
        return json.dumps(_without_surrogates(msgspec.to_builtins(value)), separators=(",", ":"))


def _without_surrogates(value: Any) -> Any:
    match value:
        case str():
            return value.encode("utf-8", "backslashreplace").decode()
        case dict():
            return {_without_surrogates(key): _without_surrogates(item) for key, item in value.items()}
        case list() | tuple():
            return [_without_surrogates(item) for item in value]
        case _:
            return value
