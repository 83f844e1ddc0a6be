"""Backends as callers see them: health, replicas by state, revisions, autoscaling."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from immutables import Map

from serve_common.api.queries import PagedQuery
from serve_common.api.views import (
    AutoscalingView,
    BackendConfigView,
    BackendView,
    DeploymentStatus,
    GoalStatus,
    ReplicaView,
    RevisionView,
)
from serve_common.errors import NotFound
from serve_common.names import BackendTag, GoalId, deployment_tag
from serve_controller.core.autoscaling.values import ScalingStatus
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.objects import Backend, BackendVersion, Goal, Replica, ReplicaState, Revision
from serve_controller.core.transitions import ROUTED
from serve_controller.core.views.hosts import ALL, paginate


def view_autoscaling(
    checkpoint: Checkpoint,
    statuses: Mapping[BackendTag, ScalingStatus],
    now: float,
    query: PagedQuery[Any] = ALL,
) -> list[AutoscalingView]:
    """Autoscaling of every backend that has an ``autoscaling_config``, in the order of their tags."""
    tags = [tag for tag, backend in checkpoint.backends.items() if _is_configured(backend)]
    return [_view(checkpoint.backends[tag], statuses.get(tag), now) for tag in paginate(tags, query)]


def _is_configured(backend: Backend) -> bool:
    return not backend.deleting and backend.target.backend_config.autoscaling_config is not None


def _view(backend: Backend, status: ScalingStatus | None, now: float) -> AutoscalingView:
    config = backend.target.backend_config.autoscaling_config
    assert config is not None
    fields: dict[str, Any] = {}
    if backend.autoscaling_paused:
        fields["why"] = (
            f"paused by {backend.autoscaling_paused}: resume_autoscaling lets it follow the load again"
        )
    elif backend.halted:
        fields["why"] = "halted: its first version failed, and nothing is started until the next deploy"
    elif status is not None:
        decision = status.decision
        fields = {
            "verdict": decision.verdict.value,
            "seen": decision.seen,
            "wanted": decision.wanted,
            "why": decision.why,
            "source": status.source,
            "decided_at": status.decided_at,
            "data_age_s": None if status.read_at is None else round(now - status.read_at, 3),
        }
    return AutoscalingView(
        backend_tag=backend.backend_tag,
        paused=backend.autoscaling_paused,
        num_replicas=backend.target.backend_config.num_replicas,
        min_replicas=config.min_replicas,
        max_replicas=config.max_replicas,
        **fields,
    )


def view_backends(checkpoint: Checkpoint, query: PagedQuery[Any] = ALL) -> list[BackendView]:
    """All backends in the order of their tags."""
    return [
        _backend(checkpoint, checkpoint.backends[tag]) for tag in paginate(checkpoint.backends.keys(), query)
    ]


def _backend(checkpoint: Checkpoint, backend: Backend) -> BackendView:
    status, message = get_status(checkpoint, backend)
    return BackendView(
        backend_tag=backend.backend_tag,
        backend_config=backend.target.backend_config,
        replica_config=backend.target.replica_config,
        replicas=view_replicas(checkpoint, backend),
        status=status,
        message=message,
        goal_id=backend.goal_id,
        goal_status=get_goal_status(checkpoint, backend.goal_id),
    )


def view_backend_config(checkpoint: Checkpoint, backend_tag: str) -> BackendConfigView:
    """One backend's configuration. Raises `NotFound` or `BadField`."""
    tag = deployment_tag(backend_tag, "backend_tag")
    backend = checkpoint.backends.get(tag)
    if backend is None:
        raise NotFound(f"backend_tag: there is no backend {tag!r}")
    return BackendConfigView(
        backend_tag=tag,
        backend_config=backend.target.backend_config,
        replica_config=backend.target.replica_config,
        version=backend.target.version,
    )


def get_goal_status(checkpoint: Checkpoint, goal_id: GoalId) -> GoalStatus:
    """Status of a goal; a forgotten one counts as succeeded."""
    goal = checkpoint.goals.get(goal_id)
    return GoalStatus.SUCCEEDED if goal is None else goal.status


def get_status(checkpoint: Checkpoint, backend: Backend) -> tuple[DeploymentStatus, str]:
    """A backend's status, and the reason as text for people; empty when it is healthy.

    It is derived on request: it follows from the replicas and the newest goal, and a stored one could diverge from
    them.
    """
    goal = checkpoint.goals.get(backend.goal_id)
    replicas = list(checkpoint.get_replicas(backend.backend_tag).values())
    serving = sum(r.state in ROUTED for r in replicas)
    reasons = "; ".join(sorted({r.message for r in replicas if r.message})[:3])
    if backend.deleting:
        return DeploymentStatus.DELETING, f"{len(replicas)} replicas still stop"
    if backend.halted:
        return DeploymentStatus.UNHEALTHY, backend.last_error
    if goal is not None and goal.status is GoalStatus.PENDING:
        return DeploymentStatus.UPDATING, reasons or backend.last_error
    if serving < backend.num_wanted:
        message = f"{serving} of {backend.num_wanted} replicas serve"
        detail = reasons or (backend.last_error if backend.start_failures else "")
        return DeploymentStatus.UNHEALTHY, f"{message}: {detail}" if detail else message
    if goal is not None and goal.status is GoalStatus.FAILED:
        return DeploymentStatus.HEALTHY, _after_failure(backend, goal, replicas)
    rollout = checkpoint.rollouts.get(backend.backend_tag)
    if rollout is not None and rollout.is_active:
        return DeploymentStatus.HEALTHY, f"rollout of version {rollout.candidate.version}: {rollout.progress}"
    return DeploymentStatus.HEALTHY, ""


def _after_failure(backend: Backend, goal: Goal, replicas: list[Replica]) -> str:
    retained = backend.retained
    if retained is not None:
        count = sum(r.state in ROUTED and r.config_version == retained.config_version for r in replicas)
        if count:
            name = retained.version or retained.code_version
            return f"the last change failed; {count} replicas of version {name} are kept: {goal.error}"
    return f"the last change failed and was undone: {goal.error}"


def view_replicas(checkpoint: Checkpoint, backend: Backend) -> list[ReplicaView]:
    """A backend's replicas, the oldest first."""
    names = {v.code_version: v.version for v in backend.versions()}
    replicas = sorted(checkpoint.get_replicas(backend.backend_tag).values(), key=lambda r: r.ordinal)
    return [
        ReplicaView(
            replica_tag=replica.replica_tag,
            state=replica.state.value,
            host_id=replica.host_id,
            version=names.get(replica.code_version),
            message=replica.message,
        )
        for replica in replicas
    ]


def count_replicas(checkpoint: Checkpoint) -> Iterator[tuple[BackendTag, ReplicaState, int]]:
    """Number of replicas of each backend in each state; every state is listed, so that a series falls to zero.

    One pass over all replicas, because this runs at every scrape, also with ten thousand of them.
    """
    for tag in sorted(checkpoint.backends.keys()):
        counts = Counter(replica.state for replica in checkpoint.get_replicas(tag).values())
        for state in ReplicaState:
            if state is not ReplicaState.STOPPED:
                yield tag, state, counts[state]


def view_revisions(checkpoint: Checkpoint, name: str) -> list[RevisionView]:
    """A deployment's or backend's revisions, the newest first. Raises `NotFound` or `BadField`."""
    tag = deployment_tag(name)
    revisions: Map[int, Revision] = checkpoint.revisions.get(tag, Map())
    if tag not in checkpoint.backends and not revisions:
        raise NotFound(f"name: there is no deployment or backend {tag!r}")
    current = _current(checkpoint, tag, revisions)
    views = []
    for number in sorted(revisions.keys(), reverse=True):
        revision = revisions[number]
        views.append(
            RevisionView(
                revision=number,
                at=revision.at,
                goal_id=revision.goal_id,
                status=get_goal_status(checkpoint, revision.goal_id),
                is_current=number == current,
                version=revision.version.version,
                import_path=revision.version.replica_config.import_path,
                num_replicas=revision.version.backend_config.num_replicas,
                route_prefix=None if revision.endpoint is None else revision.endpoint.route,
            )
        )
    return views


def _current(checkpoint: Checkpoint, tag: BackendTag, revisions: Map[int, Revision]) -> int | None:
    """The newest revision that equals the last good version; None without one, or if it is no longer retained."""
    backend = checkpoint.backends.get(tag)
    if backend is None or backend.last_good is None:
        return None
    good = _content(backend.last_good)
    return max((n for n, r in revisions.items() if _content(r.version) == good), default=None)


def _content(version: BackendVersion) -> BackendVersion:
    """The version without its ``config_version``, which changes when a failed change is undone."""
    return msgspec.structs.replace(version, config_version=0)
