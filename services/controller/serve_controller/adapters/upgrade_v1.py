"""What the first format of the checkpoint's rows means in the present one.

Why a module of its own: this format is history and never changes again. In it every backend was a deployment, a goal
named one backend tag, and what a replica takes from its host was looked up in its backend's version. Some objects of
the present format follow from several rows of the old one, so the rows are read first and completed together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, Final

import msgspec

from serve_common.names import BackendTag, EndpointTag, GoalId
from serve_common.wires.views import GoalStatus
from serve_controller.core.changes import CLASSES, Kind
from serve_controller.core.goals.scope import deployment_owned
from serve_controller.core.objects import (
    Backend,
    BackendVersion,
    CheckpointObject,
    Deployment,
    Endpoint,
    Goal,
    GoalKind,
    Replica,
    Revision,
)
from serve_controller.core.placement import goal_bytes_of, needs_of


class _GoalKindV1(Enum):
    DEPLOY = "deploy"
    DELETE = "delete"


class GoalV1(msgspec.Struct, frozen=True, kw_only=True):
    """A goal as it was stored."""

    goal_id: GoalId
    kind: _GoalKindV1
    backend_tag: BackendTag
    status: GoalStatus
    created_at: float
    request_id: str | None = None
    error: str = ""
    finished_at: float | None = None


KINDS_V1: Final = (
    Kind.BACKEND,
    Kind.ENDPOINT,
    Kind.REPLICA,
    Kind.GOAL,
    Kind.HOST,
    Kind.PROXY,
    Kind.SNAPSHOT,
    Kind.COUNTERS,
)
DECODERS_V1: Final[Mapping[Kind, msgspec.json.Decoder[Any]]] = {
    kind: msgspec.json.Decoder(GoalV1 if kind is Kind.GOAL else CLASSES[kind]) for kind in KINDS_V1
}
"""Of all but goals the present classes read the old rows: what is new in them has a default, completed below."""


def upgraded_goal(goal: GoalV1) -> Goal:
    """The goal in the present format."""
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
    """``old`` (read by `DECODERS_V1`) with all that follows from it; ``others`` are what newer rows hold."""
    known = [*old, *others]
    goals = [value for value in known if isinstance(value, Goal)]
    backends = {value.backend_tag: value for value in known if isinstance(value, Backend)}
    endpoints = {value.endpoint_tag: value for value in known if isinstance(value, Endpoint)}
    begun: dict[str, float] = {}
    for value in known:
        if isinstance(value, Goal):
            begun[value.subject] = min(value.created_at, begun.get(value.subject, value.created_at))
        elif isinstance(value, Replica):
            begun[value.backend_tag] = min(value.since, begun.get(value.backend_tag, value.since))
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
                    # Goals are forgotten after a while, so the oldest that is left says no more than "not later".
                    started_at = begun.get(value.backend_tag, 0.0)
                    result.append(Deployment(tag=value.backend_tag, started_at=started_at))
            case _:
                result.append(value)
    return result


class _Sizes:
    """What a replica of each version takes; thousands of replicas share a few versions."""

    def __init__(self) -> None:
        self._found: dict[tuple[BackendTag, int], tuple[dict[str, float], int]] = {}

    def of(self, tag: BackendTag, version: BackendVersion) -> tuple[dict[str, float], int]:
        key = tag, version.config_version
        if key not in self._found:
            self._found[key] = needs_of(version), goal_bytes_of(version)
        return self._found[key]


def _sized(replica: Replica, backend: Backend | None, sizes: _Sizes) -> Replica:
    if backend is None:
        return replica
    # A version that is remembered no more took about what the present one takes.
    version = backend.version_of(replica.config_version) or backend.target
    needs, goal_bytes = sizes.of(backend.backend_tag, version)
    return msgspec.structs.replace(replica, needs=needs, goal_bytes=goal_bytes)


def _first_revision(backend: Backend, succeeded: Goal | None, endpoint: Endpoint | None) -> Revision | None:
    """What the newest goal made, so that the first deploy after the upgrade can be rolled back."""
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
