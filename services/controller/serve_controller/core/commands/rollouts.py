"""Rollouts: started, and changed by people and programs while they run."""

from __future__ import annotations

import msgspec

from serve_common.api.commands import ControlRollout, RolloutAction, StartRollout
from serve_common.config.backend import check_backend_config, check_replica_config, merged
from serve_common.config.rollout import RolloutConfig, check_rollout_config
from serve_common.errors import BadField, Conflict, LimitReached, NotFound
from serve_common.names import NAME_LENGTH_MAX, BackendTag, deployment_tag
from serve_common.protocol.subjects import backend_key
from serve_common.values import truncate
from serve_controller.core.checkpoint import Checkpoint, Draft
from serve_controller.core.commands.changes import (
    VERSION_LENGTH_MAX,
    Accepted,
    changed,
    check_backend_limit,
    new_goal,
    nothing_to_do,
    retried,
)
from serve_controller.core.goals import pending_goal
from serve_controller.core.objects import Backend, GoalKind
from serve_controller.core.rollouts.closing import abort
from serve_controller.core.rollouts.record import (
    BASELINE_SUFFIX,
    CANARY_SUFFIX,
    STEPPING,
    Candidate,
    Rollout,
    RolloutOutcome,
    RolloutState,
    baseline_tag,
    canary_tag,
    rollout_owned,
)
from serve_controller.core.rollouts.starting import get_aborted, get_version_digest, put_rollout

ROLLOUTS_MAX = 100
"""Most rollouts at once."""
_REASON_LENGTH_MAX = 500


def start_rollout(checkpoint: Checkpoint, command: StartRollout, now: float) -> Accepted:
    """Start the rollout of a new version of a backend that runs."""
    tag = deployment_tag(command.name)
    backend = _running(checkpoint, tag)
    target = backend.target
    candidate = Candidate(
        replica_config=check_replica_config(
            merged(target.replica_config, command.replica_config, "replica_config")
        ),
        backend_config=check_backend_config(
            merged(target.backend_config, command.backend_config, "backend_config")
        ),
        version=command.version,
    )
    limits = command.rollout or candidate.backend_config.rollout or RolloutConfig()
    limits = check_rollout_config(merged(limits, command.rollout_fields, "rollout_fields"))
    if (
        command.backend_config.get("num_replicas", candidate.backend_config.num_replicas)
        != target.backend_config.num_replicas
    ):
        raise BadField("backend_config.num_replicas", "stays as it is in a rollout; scale before or after it")
    if command.version is not None and not 0 < len(command.version) <= VERSION_LENGTH_MAX:
        raise BadField("version", f"must have 1 to {VERSION_LENGTH_MAX} characters")
    again = retried(checkpoint, command.request_id, tag, rollout_owned(tag))
    if again is not None:
        return again
    _check_new_version(checkpoint, backend, candidate)
    check_may_start(checkpoint, backend, candidate, now, again=command.again)
    draft = Draft(checkpoint)
    goal_id = new_goal(
        draft, GoalKind.ROLLOUT, tag, owned_by_rollout(tag), now, request_id=command.request_id
    )
    put_rollout(draft, backend, candidate, config=limits, goal_id=goal_id, now=now)
    return changed(draft, tag, goal_id)


def _running(checkpoint: Checkpoint, tag: BackendTag) -> Backend:
    backend = checkpoint.backends.get(tag)
    if backend is None or backend.deleting:
        raise NotFound(f"name: there is no deployment or backend {tag!r}")
    check_name_for_rollouts(tag)
    if backend.halted or backend.last_good is None:
        raise Conflict(f"name: {tag!r} has no version yet that worked; deploy it")
    goal = pending_goal(checkpoint, tag)
    if goal is not None:
        raise Conflict(f"name: {tag!r} is being changed by {goal.goal_id}; wait for its end")
    return backend


def owned_by_rollout(tag: BackendTag) -> list[str]:
    """The keys owned by the goal of a rollout."""
    return [rollout_owned(tag), backend_key(canary_tag(tag)), backend_key(baseline_tag(tag))]


def check_name_for_rollouts(tag: BackendTag, field: str = "name") -> None:
    """Raise where a deployment of that name can have no rollout."""
    if tag.endswith((CANARY_SUFFIX, BASELINE_SUFFIX)):
        raise Conflict(f"{field}: {tag!r} belongs to a rollout itself")
    if len(tag.rpartition("/")[2]) > NAME_LENGTH_MAX - len(BASELINE_SUFFIX):
        raise BadField(field, f"is too long: {baseline_tag(tag)!r} must be a valid name too")


def _check_new_version(checkpoint: Checkpoint, backend: Backend, candidate: Candidate) -> None:
    tag, target = backend.backend_tag, backend.target
    if candidate.version is not None and candidate.version == target.version:
        raise Conflict(
            f"version: {candidate.version!r} of {tag!r} runs already; give the new one another name"
        )
    same = Candidate(replica_config=target.replica_config, backend_config=target.backend_config, version=None)
    if is_same_version(candidate, same):
        raise Conflict(f"version: nothing of {tag!r} would change; name the version, if its code has changed")
    if not checkpoint.used_by.get(tag):
        raise Conflict(f"name: no endpoint sends requests to {tag!r}; deploy the new version")
    former = checkpoint.rollouts.get(tag)
    if former is not None and former.is_active:
        if former.outcome is not None:
            raise Conflict(f"name: a rollout of {tag!r} is ending; wait for {former.goal_id}")
        raise Conflict(
            f"name: a rollout of {tag!r} is under way ({former.goal_id}); abort or promote it first"
        )


def check_may_start(
    checkpoint: Checkpoint,
    backend: Backend,
    candidate: Candidate,
    now: float,
    *,
    again: bool = False,
    more: int = 1,
) -> None:
    """Raise where the version may not be rolled out; one that was aborted a short time ago may only ``again``.

    ``more``: rollouts that start together.
    """
    tag = backend.backend_tag
    for one in (canary_tag(tag), baseline_tag(tag)):
        if checkpoint.living_deployment(one) is not None:
            raise Conflict(f"name: there is a deployment {one!r}, whose name the rollout needs")
    check_backend_limit(checkpoint, 2 * more)
    former, digest = checkpoint.rollouts.get(tag), get_version_digest(candidate)
    for aborted in () if again else get_aborted(former, now):
        if aborted.version_digest == digest:
            raise Conflict(
                f"version: this version was aborted {now - aborted.decided_at:.0f} s ago and is refused for another "
                f"{aborted.refused_until - now:.0f} s, but for `muster rollout start --again` and a deploy with "
                f"skips_rollout (--no-rollout): {aborted.reason[:300]}"
            )
    if len(checkpoint.active_rollouts) + more > ROLLOUTS_MAX:
        raise LimitReached(f"{ROLLOUTS_MAX} rollouts are under way already")


def is_same_version(one: Candidate, other: Candidate) -> bool:
    """Whether replicas of both are alike, whatever their number and the steps by which they take over."""
    return get_version_digest(one) == get_version_digest(other)


def control_rollout(checkpoint: Checkpoint, command: ControlRollout, now: float) -> Accepted:
    """Pause, resume, abort or promote a rollout, or let its step pass."""
    tag = deployment_tag(command.name)
    rollout = checkpoint.rollouts.get(tag)
    if rollout is None:
        raise NotFound(f"name: {tag!r} has no rollout")
    action = command.action
    if rollout.outcome is not None:
        wanted = {RolloutAction.ABORT: RolloutOutcome.ABORTED, RolloutAction.PROMOTE: RolloutOutcome.PROMOTED}
        if wanted.get(action) is rollout.outcome:
            is_ending = rollout.goal_id in checkpoint.pending
            return nothing_to_do(tag, rollout.goal_id if is_ending else None, updating=is_ending)
        raise Conflict(f"name: the rollout of {tag!r} has ended: it was {rollout.outcome.value}")
    if command.step is not None and command.step != rollout.step:
        return nothing_to_do(tag, None)
    draft = Draft(checkpoint)
    if action is RolloutAction.ABORT:
        reason = truncate(command.reason, _REASON_LENGTH_MAX)
        abort(draft, tag, f"by command: {reason}" if reason else "by command", now)
        return changed(draft, tag, rollout.goal_id)
    after = _controlled(rollout, action)
    goal_id = rollout.goal_id if action is RolloutAction.PROMOTE else None
    if after == rollout:
        return nothing_to_do(tag, goal_id, updating=goal_id is not None)
    draft.put(after)
    return changed(draft, tag, goal_id)


def _controlled(rollout: Rollout, action: RolloutAction) -> Rollout:
    tag = rollout.backend_tag
    if rollout.state not in STEPPING:
        if action is RolloutAction.PAUSE:
            raise Conflict(f"name: the rollout of {tag!r} is being promoted, which cannot be paused")
        return rollout
    match action:
        case RolloutAction.PAUSE:
            return msgspec.structs.replace(rollout, state=RolloutState.PAUSED)
        case RolloutAction.PROMOTE:
            return msgspec.structs.replace(rollout, state=RolloutState.RUNNING, skips_to_end=True)
        case RolloutAction.STEP:
            if rollout.state is RolloutState.PAUSED:
                raise Conflict(f"name: the rollout of {tag!r} is paused; resume it first")
            if not rollout.is_in_force:
                raise Conflict(f"name: {rollout.progress}; it cannot pass before its requests go that way")
            return msgspec.structs.replace(rollout, approved=True)
        case _:
            return msgspec.structs.replace(rollout, state=RolloutState.RUNNING)
