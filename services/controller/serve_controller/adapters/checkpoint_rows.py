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
from serve_controller.adapters.upgrade_v1 import DECODERS_V1, GoalV1, completed, upgraded_goal
from serve_controller.core.changes import CLASSES, Changes, Key, key_of
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.objects import CheckpointObject

SCHEMA_VERSION: Final = 8
"""The format that is written; all from 1 to this one are read."""

_ENCODER: Final = msgspec.json.Encoder()
_PRESENT: Final = {kind.value: msgspec.json.Decoder(stored_type) for kind, stored_type in CLASSES.items()}
_DECODERS: Final[Mapping[int, Mapping[str, msgspec.json.Decoder[Any]]]] = {
    1: {kind.value: decoder for kind, decoder in DECODERS_V1.items()},
    2: _PRESENT,
    3: _PRESENT,
    4: _PRESENT,
    5: _PRESENT,
    6: _PRESENT,
    7: _PRESENT,
    SCHEMA_VERSION: _PRESENT,
}
"""By schema version and kind. What came with versions 3 (options of endpoints, companions of replicas, how backends are
protected), 4 (autoscaling), 5 (access log), 6 (a restored store; whom the ids of hosts and proxies belong to), 7 (whom
replicas may call) and 8 (after which restore a host's replicas were adopted) has defaults that mean what was so before,
except that replicas of before 7 could call all."""


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


class Loaded(msgspec.Struct, frozen=True):
    """What the rows of a store mean."""

    checkpoint: Checkpoint
    upgraded: tuple[CheckpointObject, ...]
    """Objects that are stored in the first format, or follow from such ones and are not stored at all. They must be
    written with the next change: what follows from an old row is lost when that row is replaced alone."""


def load(row: Row) -> CheckpointObject:
    """The object of a row by itself. Raises `CheckpointUnreadable`, which names the row and the reason."""
    decoders = _DECODERS.get(row.schema_version)
    if decoders is None:
        raise _unreadable(
            row,
            f"its schema_version is {row.schema_version}; this version of the code reads 1 to {SCHEMA_VERSION}",
        )
    decoder = decoders.get(row.kind)
    if decoder is None:
        raise _unreadable(row, "this version of the code knows no such kind")
    try:
        value = decoder.decode(row.value)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise _unreadable(row, str(error)) from error
    result: CheckpointObject = upgraded_goal(value) if isinstance(value, GoalV1) else value
    kind, key = key_of(result)
    if key != row.key or kind.value != row.kind:
        raise _unreadable(row, f"it holds the object {key!r}")
    return result


def load_rows(rows: Iterable[Row]) -> Loaded:
    """What ``rows`` of all versions mean together, in any order. Raises `CheckpointUnreadable`."""
    current: list[CheckpointObject] = []
    old: list[CheckpointObject] = []
    for row in rows:
        (old if row.schema_version == 1 else current).append(load(row))
    upgraded = tuple(completed(old, current)) if old else ()
    return Loaded(Checkpoint().applied(Changes(puts=(*current, *upgraded))), upgraded)


def load_checkpoint(rows: Iterable[Row]) -> Checkpoint:
    """The checkpoint that ``rows`` make. Raises `CheckpointUnreadable`."""
    return load_rows(rows).checkpoint


def dump_changes(changes: Changes, upgraded: Iterable[CheckpointObject] = ()) -> RowChanges:
    """What a store must write. Of several values of one key the last counts; a deleted key is not put.

    ``upgraded`` is what the last `load_rows` found to be rewritten; ``changes`` were decided after it and go before.
    """
    gone = dict.fromkeys(changes.deletes)
    puts: dict[Key, CheckpointObject] = {key_of(value): value for value in (*upgraded, *changes.puts)}
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
        return json.dumps(without_surrogates(msgspec.to_builtins(value)), separators=(",", ":"))


def without_surrogates(value: Any) -> Any:
    """``value``, made of JSON's types, with every lone surrogate in its texts shown as an escape."""
    match value:
        case str():
            return value.encode("utf-8", "backslashreplace").decode()
        case dict():
            return {without_surrogates(key): without_surrogates(item) for key, item in value.items()}
        case list() | tuple():
            return [without_surrogates(item) for item in value]
        case _:
            return value
