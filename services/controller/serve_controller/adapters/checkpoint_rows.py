"""Converts between the checkpoint's objects and their rows.

The core does not know how its objects are stored, nor the store what they mean. The format has a version: this code
refuses what other code wrote instead of dropping what it does not know.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from serve_common.errors import CheckpointUnreadable
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.objects import (
    CLASSES,
    CheckpointObject,
    Key,
    ObjectChanges,
    get_key,
)

SCHEMA_VERSION: Final = 1
"""The format that is written and read. Every change of the shape of a stored type needs the next number, a file of
examples in ``tests/data/checkpoints``, and in `load` a way from the rows of this one to today's objects."""

_ENCODER: Final = msgspec.json.Encoder()
_DECODERS: Final = {kind.value: msgspec.json.Decoder(stored_type) for kind, stored_type in CLASSES.items()}


class Row(msgspec.Struct, frozen=True):
    """One object as it is stored."""

    kind: str
    key: str
    schema_version: int
    value: str
    """JSON."""


class RowChanges(msgspec.Struct, frozen=True):
    """`ObjectChanges` as rows; each key occurs once."""

    puts: tuple[Row, ...]
    deletes: tuple[tuple[str, str], ...]
    """Kind and key."""


def dump(value: CheckpointObject) -> Row:
    """Encode an object as a row."""
    kind, key = get_key(value)
    return Row(kind.value, key, SCHEMA_VERSION, _to_json(value))


def load(row: Row) -> CheckpointObject:
    """Decode one row by itself. Raises `CheckpointUnreadable`, which names the row and the reason."""
    if row.schema_version != SCHEMA_VERSION:
        raise _unreadable(
            row,
            f"its schema_version is {row.schema_version}, and this version of Muster reads {SCHEMA_VERSION}: "
            "use the version that wrote it",
        )
    decoder = _DECODERS.get(row.kind)
    if decoder is None:
        raise _unreadable(row, "this version of Muster knows no such kind")
    try:
        value = decoder.decode(row.value)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise _unreadable(row, str(error)) from error
    kind, key = get_key(value)
    if key != row.key or kind.value != row.kind:
        raise _unreadable(row, f"it holds the object {key!r}")
    return value


def load_checkpoint(rows: Iterable[Row]) -> Checkpoint:
    """Decode ``rows`` in any order. Raises `CheckpointUnreadable`."""
    return Checkpoint().applied(ObjectChanges(puts=tuple(map(load, rows))))


def dump_changes(changes: ObjectChanges) -> RowChanges:
    """The rows that a store must write. The last of several values of one key wins; a deleted key is not put."""
    gone = dict.fromkeys(changes.deletes)
    puts: dict[Key, CheckpointObject] = {get_key(value): value for value in changes.puts}
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
        # A lone surrogate has no UTF-8 encoding, so neither JSON nor Postgres accepts it, yet a traceback with an
        # undecodable file name contains one. An escape is better than refusing the whole change.
        return json.dumps(without_surrogates(msgspec.to_builtins(value)), separators=(",", ":"))


def without_surrogates(value: Any) -> Any:
    """``value``, made of JSON's types, with every lone surrogate in its strings replaced by an escape."""
    match value:
        case str():
            return value.encode("utf-8", "backslashreplace").decode()
        case dict():
            return {without_surrogates(key): without_surrogates(item) for key, item in value.items()}
        case list() | tuple():
            return [without_surrogates(item) for item in value]
        case _:
            return value
