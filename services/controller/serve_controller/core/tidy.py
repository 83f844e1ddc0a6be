"""Forgetting what is over, so that nothing grows for ever. Done about once a minute: nothing depends on it."""

from __future__ import annotations

from serve_controller.core.changes import Kind
from serve_controller.core.checkpoint import Draft
from serve_controller.core.goals.ids import number_of
from serve_controller.core.observed import HostStatus, ObservedState, host_status
from serve_controller.core.snapshots import forget_tombstones

FINISHED_KEPT_S = 86_400.0
"""A finished goal can be asked for at least a day."""
FINISHED_KEPT_MAX = 20_000
"""Beyond this many, the oldest finished goals are forgotten also before that; their ids still tell that they ended."""
ENDED_KEPT_MAX = 1_000
"""Deployments that are gone and still listed."""


def tidy(draft: Draft, observed: ObservedState, now: float) -> None:
    """Forget finished goals, ended deployments, tombstones and hosts that are lost."""
    _forget_goals(draft, now)
    _forget_deployments(draft)
    _forget_hosts(draft, observed, now)
    forget_tombstones(draft)


def _forget_goals(draft: Draft, now: float) -> None:
    """A backend's newest goal is always kept."""
    newest = {backend.goal_id for backend in draft.backends.values()}
    finished = sorted(
        (g for g in draft.goals.values() if g.finished_at is not None and g.goal_id not in newest),
        key=lambda g: (g.finished_at or 0.0, number_of(g.goal_id)),
    )
    surplus = len(finished) - FINISHED_KEPT_MAX
    for index, goal in enumerate(finished):
        if index < surplus or now - (goal.finished_at or now) > 2 * FINISHED_KEPT_S:
            draft.delete((Kind.GOAL, goal.goal_id))


def _forget_deployments(draft: Draft) -> None:
    ended = sorted(
        (d for d in draft.deployments.values() if d.ended_at is not None),
        key=lambda d: (d.ended_at or 0.0, d.tag),
    )
    for deployment in ended[: max(0, len(ended) - ENDED_KEPT_MAX)]:
        draft.delete((Kind.DEPLOYMENT, deployment.tag))


def _forget_hosts(draft: Draft, observed: ObservedState, now: float) -> None:
    """A lost host that runs nothing is forgotten, unless it is drained: that must outlast its absence."""
    for host_id, record in sorted(draft.hosts.items()):
        is_used = host_id in draft.by_host or host_id in observed.hosts
        if not is_used and not record.draining and host_status(observed, host_id, now) is HostStatus.LOST:
            draft.delete((Kind.HOST, host_id))
