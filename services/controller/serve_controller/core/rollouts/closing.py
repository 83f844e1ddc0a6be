"""Decides that a rollout ends: from then on the deployment has all requests.

Commands and plans share this. What follows once every proxy knows is in `rollouts.advance`.
"""

from __future__ import annotations

from typing import Final

import msgspec

from serve_common.api.views import GoalStatus
from serve_common.names import BackendTag, EndpointTag
from serve_common.protocol.reports import ERROR_LENGTH_MAX
from serve_controller.core.checkpoint import Draft
from serve_controller.core.goals import end_goal, undo_backend, undo_endpoint
from serve_controller.core.objects import GoalKind
from serve_controller.core.rollouts.record import RolloutOutcome, RolloutState

PAUSED_BY: Final = "start_rollout"
"""What pauses a deployment's autoscaling in a rollout: its replicas must be there should all requests come back."""


def abort(draft: Draft, tag: BackendTag, reason: str, now: float) -> None:
    """Give all requests back to the old version: one change of the endpoints' snapshots."""
    rollout, backend = draft.rollouts[tag], draft.backends.get(tag)
    is_promoting = rollout.state is RolloutState.PROMOTING
    if (
        backend is not None
        and is_promoting
        and rollout.is_promoted_to(backend.target.code_version, backend.target.config_version)
    ):
        undo_backend(draft, backend, reason[-ERROR_LENGTH_MAX:], is_whole=True)
        if rollout.deployed is not None:
            undo_endpoint(draft, EndpointTag(tag))
    close_rollout(draft, tag, RolloutOutcome.ABORTED, reason[-ERROR_LENGTH_MAX:], now)


def close_rollout(draft: Draft, tag: BackendTag, outcome: RolloutOutcome, reason: str, now: float) -> None:
    """Decide how a rollout ends: from now on the deployment has all requests."""
    rollout = draft.rollouts[tag]
    draft.put(
        msgspec.structs.replace(
            rollout, state=RolloutState.CLOSING, outcome=outcome, reason=reason, decided_at=now
        )
    )
    own = draft.backends.get(tag)
    if own is not None and rollout.pauses_autoscaling and own.autoscaling_paused == PAUSED_BY:
        draft.put(msgspec.structs.replace(own, autoscaling_paused=""))
    goal = draft.pending.get(rollout.goal_id)
    if goal is not None and goal.kind is GoalKind.ROLLOUT and outcome is RolloutOutcome.SUPERSEDED:
        end_goal(draft, goal, GoalStatus.SUPERSEDED, now, reason)
