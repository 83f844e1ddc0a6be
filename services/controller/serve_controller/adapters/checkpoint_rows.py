"""Converts between the checkpoint's objects and their rows, including rows of older formats.

The core does not know how its objects are stored, nor the store what they mean. The format has a version, so that later
code reads what this code wrote, and this code refuses what later code wrote instead of dropping what it does not know.
Every change of the shape of a stored type needs a new `SCHEMA_VERSION` and a file of examples in
``tests/data/checkpoints``; rows of older versions stay readable.

The first format (V1) is history and never changes again. In it every backend was a deployment, a goal named one backend
tag, and what a replica takes from its host was looked up in its backend's version. Some of today's objects follow from
several of its rows, so all rows are read first and completed together.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, Final

import msgspec

from serve_common.api.views import GoalStatus
from serve_common.errors import CheckpointUnreadable
from serve_common.names import BackendTag, EndpointTag, GoalId
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.goals.scope import deployment_owned
from serve_controller.core.objects import (
    CLASSES,
    Backend,
    BackendVersion,
    CheckpointObject,
    Deployment,
    EndpointRecord,
    Goal,
    GoalKind,
    Key,
    ObjectChanges,
    ObjectKind,
    Replica,
    Revision,
    key_of,
)
from serve_controller.core.placement import estimate_goal_bytes, resource_needs


class _GoalKindV1(Enum):
    DEPLOY = "deploy"
    DELETE = "delete"


class GoalV1(msgspec.Struct, frozen=True, kw_only=True):
    """A goal in the first format."""

    goal_id: GoalId
    kind: _GoalKindV1
    backend_tag: BackendTag
    status: GoalStatus
    created_at: float
    request_id: str | None = None
    error: str = ""
    finished_at: float | None = None


KINDS_V1: Final = (
    ObjectKind.BACKEND,
    ObjectKind.ENDPOINT,
    ObjectKind.REPLICA,
    ObjectKind.GOAL,
    ObjectKind.HOST,
    ObjectKind.PROXY,
    ObjectKind.SNAPSHOT,
    ObjectKind.COUNTERS,
)
DECODERS_V1: Final[Mapping[ObjectKind, msgspec.json.Decoder[Any]]] = {
    kind: msgspec.json.Decoder(GoalV1 if kind is ObjectKind.GOAL else CLASSES[kind]) for kind in KINDS_V1
}
"""Decoders of old rows. All but goals use the current classes: new fields have defaults, which `completed` fills in."""


def upgraded_goal(goal: GoalV1) -> Goal:
    """The goal in the current format."""
    return Goal(
        goal_id=goal.goal_id,
        kind=GoalKind.DEPLOY if goal.kind is _GoalKindV1.DEPLOY else GoalKind.DELETE,
        subject=goal.backend_tag,
        owns=deployment_owned(goal.backend_tag),
        status=goal.status,
        created_at=goal.created_at,
        request_id=goal.request_id,
        error=goal.error,
        finished_at=goal.finished_at,
    )


def completed(old: Sequence[CheckpointObject], others: Iterable[CheckpointObject]) -> list[CheckpointObject]:
    """``old`` (decoded by `DECODERS_V1`) with all derived fields and objects; ``others`` come from newer rows."""
    known = [*old, *others]
    goals = [value for value in known if isinstance(value, Goal)]
    backends = {value.backend_tag: value for value in known if isinstance(value, Backend)}
    endpoints = {value.endpoint_tag: value for value in known if isinstance(value, EndpointRecord)}
    first_at: dict[str, float] = {}
    for value in known:
        if isinstance(value, Goal):
            first_at[value.subject] = min(value.created_at, first_at.get(value.subject, value.created_at))
        elif isinstance(value, Replica):
            first_at[value.backend_tag] = min(value.since, first_at.get(value.backend_tag, value.since))
    succeeded = {goal.goal_id: goal for goal in goals if goal.status is GoalStatus.SUCCEEDED}
    deployments = {value.tag for value in known if isinstance(value, Deployment)}
    sizes = _Sizes()
    result: list[CheckpointObject] = []
    for value in old:
        match value:
            case Replica():
                result.append(_sized(value, backends.get(value.backend_tag), sizes))
            case Backend():
                revision = _first_revision(
                    value, succeeded.get(value.goal_id), endpoints.get(EndpointTag(value.backend_tag))
                )
                if revision is not None:
                    result.append(revision)
                result.append(msgspec.structs.replace(value, newest_revision=0 if revision is None else 1))
                if value.backend_tag not in deployments:
                    # Goals are deleted after a while, so the oldest one left is only an upper bound.
                    started_at = first_at.get(value.backend_tag, 0.0)
                    result.append(Deployment(tag=value.backend_tag, started_at=started_at))
            case _:
                result.append(value)
    return result


class _Sizes:
    """Cache of the capacity that a replica of each version takes; thousands of replicas share a few versions."""

    def __init__(self) -> None:
        self._found: dict[tuple[BackendTag, int], tuple[dict[str, float], int]] = {}

    def of(self, tag: BackendTag, version: BackendVersion) -> tuple[dict[str, float], int]:
        key = tag, version.config_version
        if key not in self._found:
            self._found[key] = resource_needs(version), estimate_goal_bytes(version)
        return self._found[key]


def _sized(replica: Replica, backend: Backend | None, sizes: _Sizes) -> Replica:
    if backend is None:
        return replica
    # A version that is no longer retained took about as much as the current one.
    version = backend.version_of(replica.config_version) or backend.target
    needs, goal_bytes = sizes.of(backend.backend_tag, version)
    return msgspec.structs.replace(replica, needs=needs, goal_bytes=goal_bytes)


def _first_revision(
    backend: Backend, succeeded: Goal | None, endpoint: EndpointRecord | None
) -> Revision | None:
    """A revision of the newest goal's result, so that the first deploy after the upgrade can be rolled back."""
    if succeeded is None or backend.last_good is None:
        return None
    return Revision(
        backend_tag=backend.backend_tag,
        revision=1,
        at=succeeded.created_at if succeeded.finished_at is None else succeeded.finished_at,
        goal_id=succeeded.goal_id,
        version=backend.last_good,
        endpoint=None if endpoint is None else endpoint.last_good,
    )


SCHEMA_VERSION: Final = 8
"""The format that is written; all formats from 1 to this one are read."""

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
"""Decoders by schema version and kind. The fields added with versions 3 (options of endpoints, companions of replicas,
protection of backends), 4 (autoscaling), 5 (access log), 6 (a restored store; the holders of host and proxy ids), 7
(the deployments that replicas may call) and 8 (the restore after which a host's replicas were adopted) have defaults
that mean the former behavior, except that replicas of before 7 could call all deployments."""


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
    kind, key = key_of(value)
    return Row(kind.value, key, SCHEMA_VERSION, _to_json(value))


class Loaded(msgspec.Struct, frozen=True):
    """The decoded rows of a store."""

    checkpoint: Checkpoint
    upgraded: tuple[CheckpointObject, ...]
    """Objects that are stored in the first format, or are derived from such ones and not stored at all. They must be
    written with the next change: what is derived from an old row is lost when that row is replaced alone."""


def load(row: Row) -> CheckpointObject:
    """Decode one row by itself. Raises `CheckpointUnreadable`, which names the row and the reason."""
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
    """Decode ``rows`` of any versions in any order. Raises `CheckpointUnreadable`."""
    current: list[CheckpointObject] = []
    old: list[CheckpointObject] = []
    for row in rows:
        (old if row.schema_version == 1 else current).append(load(row))
    upgraded = tuple(completed(old, current)) if old else ()
    return Loaded(Checkpoint().applied(ObjectChanges(puts=(*current, *upgraded))), upgraded)


def load_checkpoint(rows: Iterable[Row]) -> Checkpoint:
    """Decode ``rows`` into a checkpoint. Raises `CheckpointUnreadable`."""
    return load_rows(rows).checkpoint


def dump_changes(changes: ObjectChanges, upgraded: Iterable[CheckpointObject] = ()) -> RowChanges:
    """The rows that a store must write. The last of several values of one key wins; a deleted key is not put.

    ``upgraded`` are the objects that the last `load_rows` returned for rewriting; ``changes`` take precedence.
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
