"""Deploys that are rollouts: those of another version of a deployment whose configuration has ``rollout``.

Why at the commands: only these know whether a person wants the version that runs, or an earlier one, at once.
"""

from __future__ import annotations

import msgspec

from serve_common.api.views import GoalStatus
from serve_common.errors import BadField, Conflict
from serve_common.names import BackendTag, EndpointTag, GoalId
from serve_controller.core.checkpoint import Checkpoint, Draft
from serve_controller.core.commands.changes import Accepted, changed, new_goal, nothing_to_do
from serve_controller.core.commands.rollouts import (
    check_may_start,
    check_name_for_rollouts,
    is_same_version,
    owned_by_rollout,
)
from serve_controller.core.goals import end_goal, pending_goal
from serve_controller.core.objects import Backend, EndpointConfig, GoalKind
from serve_controller.core.rollouts.closing import close_rollout
from serve_controller.core.rollouts.promotion import endpoint_fields
from serve_controller.core.rollouts.record import (
    STEPPING,
    Candidate,
    Deployed,
    Rollout,
    RolloutOutcome,
    RolloutState,
)
from serve_controller.core.rollouts.starting import put_rollout
from serve_controller.core.versions import Wanted, replica_part, with_same_code


def check_rollout_of_deployment(wanted: Wanted, tag: BackendTag, at: str, *, is_deployment: bool) -> None:
    """Raise `BadField` where ``rollout`` is set of what can have none."""
    if wanted.backend_config.rollout is None:
        return
    if not is_deployment:
        raise BadField(at, "is for deployments; of a backend by itself, use start_rollout")
    check_name_for_rollouts(tag, at)


def makes_rollout(checkpoint: Checkpoint, existing: Backend, wanted: Wanted, *, skips: bool) -> bool:
    """Whether ``wanted`` is to be rolled out: it is another version of what runs and has worked. ``skips``: it is not.

    What touches no replica is not, such as ``num_replicas``; nor is going back to the version that last worked.
    """
    tag = existing.backend_tag
    if existing.deleting or existing.halted or existing.last_good is None or not checkpoint.used_by.get(tag):
        return False
    if wanted.backend_config.rollout is None or skips:
        return False
    known = with_same_code(existing, wanted)
    if known is not None and known is not existing.target:
        return False
    config = existing.target.backend_config
    return known is None or replica_part(wanted.backend_config) != replica_part(config)


class Rolled(msgspec.Struct, frozen=True, kw_only=True):
    """What a deploy rolls out of one deployment."""

    existing: Backend
    candidate: Candidate
    deployed: Deployed
    continues: bool
    """Whether it is what the rollout that is under way rolls out already."""


def check_rolled(
    checkpoint: Checkpoint,
    existing: Backend,
    wanted: Wanted,
    endpoint: EndpointConfig | None,
    now: float,
    *,
    at: str = "name",
    more: int = 1,
) -> Rolled:
    """Raise unless ``wanted`` can be rolled out now; ``endpoint`` None: it is left alone.

    ``more``: rollouts that start together.
    """
    tag, former = existing.backend_tag, checkpoint.rollouts.get(existing.backend_tag)
    candidate = Candidate(
        replica_config=wanted.replica_config, backend_config=wanted.backend_config, version=wanted.version
    )
    continues = False
    if former is not None and former.is_active:
        continues = former.state in STEPPING and wanted.is_same_code and _is_same_rollout(former, candidate)
        if former.state is RolloutState.PROMOTING or former.outcome is RolloutOutcome.PROMOTED:
            raise Conflict(
                f"{at}: {tag!r} is being promoted to another version by {former.goal_id}; wait for its end"
            )
    if not continues:
        _check_proven(checkpoint, existing, at)
        check_may_start(checkpoint, existing, candidate, now, more=more)
    deployed = _deployed(checkpoint, existing, wanted, endpoint)
    return Rolled(existing=existing, candidate=candidate, deployed=deployed, continues=continues)


def deploy_by_rollout(
    checkpoint: Checkpoint,
    existing: Backend,
    wanted: Wanted,
    endpoint: EndpointConfig | None,
    now: float,
    *,
    request_id: str | None = None,
) -> Accepted:
    """Start the rollout of a deployment, or go on with the one that is under way."""
    rolled = check_rolled(checkpoint, existing, wanted, endpoint, now)
    tag = existing.backend_tag
    former = checkpoint.rollouts.get(tag)
    draft = Draft(checkpoint)
    if rolled.continues:
        assert former is not None
        go_on(draft, former, rolled, former.goal_id)
        changes = draft.changes()
        return changed(draft, tag, former.goal_id) if changes else nothing_to_do(tag, former.goal_id)
    _check_alone(checkpoint, former)
    if former is not None and former.is_active:
        _end_former(draft, former, rolled, now)
    goal_id = new_goal(draft, GoalKind.ROLLOUT, tag, owned_by_rollout(tag), now, request_id=request_id)
    _put(draft, rolled, goal_id, now)
    return changed(draft, tag, goal_id)


def roll_out_part(draft: Draft, rolled: Rolled, goal_id: GoalId, now: float) -> None:
    """The same for a deployment of an application, whose goal waits for the rollout."""
    former = draft.rollouts.get(rolled.existing.backend_tag)
    if former is not None and former.is_active:
        goal = draft.pending.get(former.goal_id)
        if rolled.continues and goal is not None and goal.goal_id != goal_id:
            end_goal(draft, goal, GoalStatus.SUPERSEDED, now, f"replaced by {goal_id}")
        if rolled.continues:
            go_on(draft, former, rolled, goal_id)
            return
        _end_former(draft, former, rolled, now)
    _put(draft, rolled, goal_id, now)


def _put(draft: Draft, rolled: Rolled, goal_id: GoalId, now: float) -> None:
    backend, config = draft.backends[rolled.existing.backend_tag], rolled.candidate.backend_config.rollout
    assert config is not None
    put_rollout(
        draft, backend, rolled.candidate, config=config, goal_id=goal_id, now=now, deployed=rolled.deployed
    )


def _deployed(
    checkpoint: Checkpoint, existing: Backend, wanted: Wanted, endpoint: EndpointConfig | None
) -> Deployed:
    tag, target = existing.backend_tag, existing.target
    record = None if endpoint is None else checkpoint.endpoints.get(EndpointTag(tag))
    return Deployed(
        former_config=target.backend_config,
        keeps_code=with_same_code(existing, wanted) is target,
        endpoint=None if endpoint is None else endpoint_fields(endpoint),
        former_endpoint=None if record is None else endpoint_fields(record.target),
    )


def _is_same_rollout(former: Rollout, candidate: Candidate) -> bool:
    steps = former.candidate.backend_config.rollout
    return is_same_version(former.candidate, candidate) and candidate.backend_config.rollout == steps


def go_on(draft: Draft, former: Rollout, rolled: Rolled, goal_id: GoalId) -> None:
    """The same version again: what else is changed is applied when it is promoted, as it was deployed last."""
    deployed, known = rolled.deployed, former.deployed
    if deployed.endpoint is None and known is not None:
        deployed = msgspec.structs.replace(
            deployed, endpoint=known.endpoint, former_endpoint=known.former_endpoint
        )
    same_endpoint = known is not None and known.endpoint == deployed.endpoint
    if rolled.candidate == former.candidate and same_endpoint:
        deployed = known or deployed
    after = msgspec.structs.replace(former.with_goal(goal_id), candidate=rolled.candidate, deployed=deployed)
    if after != former:
        draft.put(after)


def is_rolled_out_as(
    checkpoint: Checkpoint, goal_id: GoalId, tag: BackendTag, wanted: Wanted, endpoint: EndpointConfig
) -> bool:
    """Whether the goal rolls out exactly this already."""
    rollout = checkpoint.rollouts.get(tag)
    if rollout is None or rollout.goal_id != goal_id or rollout.deployed is None:
        return False
    made = (rollout.candidate.replica_config, rollout.candidate.backend_config, rollout.candidate.version)
    return (
        rollout.state in STEPPING
        and wanted.is_same_code
        and made == (wanted.replica_config, wanted.backend_config, wanted.version)
        and rollout.deployed.endpoint == endpoint_fields(endpoint)
    )


def _check_alone(checkpoint: Checkpoint, former: Rollout | None) -> None:
    """Raise `Conflict` where the rollout that is under way is part of an application's deploy."""
    goal = None if former is None or former.outcome is not None else checkpoint.pending.get(former.goal_id)
    if goal is not None and goal.kind is GoalKind.APPLICATION:
        raise Conflict(
            f"name: the application {goal.subject!r} is being deployed by {goal.goal_id}, which rolls it out; "
            f"deploy the application, or wait"
        )


def _check_proven(checkpoint: Checkpoint, existing: Backend, at: str) -> None:
    """Raise `Conflict` while an update may still fail: there is no version to compare with."""
    goal, good = pending_goal(checkpoint, existing.backend_tag), existing.last_good
    assert good is not None
    target = existing.target
    is_proven = (good.code_version, good.config_version) == (target.code_version, target.config_version)
    if goal is not None and not is_proven:
        raise Conflict(
            f"{at}: {existing.backend_tag!r} is being changed by {goal.goal_id}; wait for its end, or deploy "
            f"with skips_rollout"
        )


def has_deployed_rollout(checkpoint: Checkpoint, tag: BackendTag) -> bool:
    """Whether a deploy has started a rollout that the deploy of the version that runs would end."""
    rollout = checkpoint.rollouts.get(tag)
    return rollout is not None and rollout.deployed is not None and rollout.state in STEPPING


def supersede_rollout(draft: Draft, tag: BackendTag, now: float) -> None:
    """End such a rollout: the deployment stays what it is."""
    if has_deployed_rollout(draft, tag):
        reason = f"another deploy of {tag} followed"
        close_rollout(draft, tag, RolloutOutcome.SUPERSEDED, reason, now)


def _end_former(draft: Draft, former: Rollout, rolled: Rolled, now: float) -> None:
    if former.outcome is None:
        reason = f"version {rolled.candidate.version or 'unversioned'} was deployed"
        close_rollout(draft, former.backend_tag, RolloutOutcome.SUPERSEDED, reason, now)
        return
    goal = draft.pending.get(former.goal_id)
    if goal is not None and goal.kind is GoalKind.ROLLOUT:
        end_goal(draft, goal, GoalStatus.FAILED, now, former.reason)
