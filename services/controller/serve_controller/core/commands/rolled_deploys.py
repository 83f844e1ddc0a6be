"""Deploys that are rollouts: those of another version of a deployment whose configuration has ``rollout``.

Why at the commands: only these know whether a person wants the version that runs, or an earlier one, at once.
"""

from __future__ import annotations

import msgspec

from serve_common.api.views import GoalStatus
from serve_common.errors import BadField, Conflict
from serve_common.names import BackendTag, EndpointTag
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
    check_name_for_rollouts(tag)


def makes_rollout(checkpoint: Checkpoint, existing: Backend, wanted: Wanted) -> bool:
    """Whether ``wanted`` is to be rolled out: it is another version of what runs and has worked.

    What touches no replica is not, such as ``num_replicas``; nor is going back to the version that last worked.
    """
    tag = existing.backend_tag
    if existing.deleting or existing.halted or existing.last_good is None or not checkpoint.used_by.get(tag):
        return False
    if wanted.backend_config.rollout is None:
        return False
    known = with_same_code(existing, wanted)
    if known is not None and known is not existing.target:
        return False
    config = existing.target.backend_config
    return known is None or replica_part(wanted.backend_config) != replica_part(config)


def deploy_by_rollout(
    checkpoint: Checkpoint,
    existing: Backend,
    wanted: Wanted,
    endpoint: EndpointConfig | None,
    now: float,
    *,
    request_id: str | None = None,
) -> Accepted:
    """Start the rollout of ``wanted``, or go on with the one that is under way. ``endpoint`` None: it is left alone."""
    tag, former = existing.backend_tag, checkpoint.rollouts.get(existing.backend_tag)
    candidate = Candidate(
        replica_config=wanted.replica_config, backend_config=wanted.backend_config, version=wanted.version
    )
    deployed = _deployed(checkpoint, existing, wanted, endpoint)
    if former is not None and former.is_active:
        if former.state in STEPPING and wanted.is_same_code and _is_same_rollout(former, candidate):
            return _go_on(checkpoint, former, candidate, deployed)
        if former.state is RolloutState.PROMOTING or former.outcome is RolloutOutcome.PROMOTED:
            raise Conflict(
                f"name: {tag!r} is being promoted to another version by {former.goal_id}; wait for its end"
            )
    _check_proven(checkpoint, existing)
    check_may_start(checkpoint, existing, candidate, now)
    assert wanted.backend_config.rollout is not None
    draft = Draft(checkpoint)
    if former is not None and former.is_active:
        _end_former(draft, former, f"version {wanted.version or 'unversioned'} was deployed", now)
    goal_id = new_goal(draft, GoalKind.ROLLOUT, tag, owned_by_rollout(tag), now, request_id=request_id)
    backend, config = draft.backends[tag], wanted.backend_config.rollout
    put_rollout(draft, backend, candidate, config=config, goal_id=goal_id, now=now, deployed=deployed)
    return changed(draft, tag, goal_id)


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


def _go_on(checkpoint: Checkpoint, former: Rollout, candidate: Candidate, deployed: Deployed) -> Accepted:
    """The same version again: what else it changes is applied when it is promoted, as it was deployed last."""
    tag, known = former.backend_tag, former.deployed
    same_endpoint = deployed.endpoint is None or (known is not None and known.endpoint == deployed.endpoint)
    if candidate == former.candidate and same_endpoint:
        return nothing_to_do(tag, former.goal_id)
    if deployed.endpoint is None and known is not None:
        deployed = msgspec.structs.replace(
            deployed, endpoint=known.endpoint, former_endpoint=known.former_endpoint
        )
    draft = Draft(checkpoint)
    draft.put(msgspec.structs.replace(former, candidate=candidate, deployed=deployed))
    return changed(draft, tag, former.goal_id)


def _check_proven(checkpoint: Checkpoint, existing: Backend) -> None:
    """Raise `Conflict` while an update may still fail: there is no version to compare with."""
    goal, good = pending_goal(checkpoint, existing.backend_tag), existing.last_good
    assert good is not None
    target = existing.target
    is_proven = (good.code_version, good.config_version) == (target.code_version, target.config_version)
    if goal is not None and not is_proven:
        raise Conflict(
            f"name: {existing.backend_tag!r} is being changed by {goal.goal_id}; wait for its end, or deploy "
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


def _end_former(draft: Draft, former: Rollout, reason: str, now: float) -> None:
    if former.outcome is None:
        close_rollout(draft, former.backend_tag, RolloutOutcome.SUPERSEDED, reason, now)
        return
    goal = draft.pending.get(former.goal_id)
    if goal is not None:
        end_goal(draft, goal, GoalStatus.FAILED, now, former.reason)
