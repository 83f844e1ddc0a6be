"""What commands share: their outcome, the goal that they create, and the new version of a backend.

Why one place for versions: the cost of a change (nothing, a reconfigure, a restart) is a promise to users, whatever the
command.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from serve_common.api.commands import ChangeReply, CommandReply
from serve_common.api.views import GoalStatus
from serve_common.config.backend import (
    METHODS,
    check_backend_config,
    check_replica_config,
)
from serve_common.errors import BadField, Conflict, LimitReached
from serve_common.names import BackendTag, GoalId, check_name
from serve_common.protocol.subjects import backend_key
from serve_controller.core.checkpoint import Checkpoint, Draft
from serve_controller.core.goals import backend_keys, end_goal, owned_application, owned_backends
from serve_controller.core.objects import (
    Backend,
    Goal,
    GoalKind,
    ObjectChanges,
    ObjectKind,
    parse_number,
)
from serve_controller.core.rollouts.record import rolled_out
from serve_controller.core.scaling import scaled_config
from serve_controller.core.versions import Wanted, with_same_code

GOALS_PENDING_MAX = 20_000
NUM_BACKENDS_MAX = 10_000
VERSION_LENGTH_MAX = 200


class Accepted(msgspec.Struct, frozen=True, kw_only=True):
    """What to record, and the reply to send afterwards. Empty changes: there was nothing to do."""

    changes: ObjectChanges
    reply: CommandReply
    subject: str
    """Name of the changed object, for the audit log."""
    goal_id: GoalId | None


def changed(draft: Draft, subject: str, goal_id: GoalId | None) -> Accepted:
    """The outcome of a command that changes something."""
    reply = ChangeReply(goal_id=goal_id, updating=True)
    return Accepted(changes=draft.changes(), reply=reply, subject=subject, goal_id=goal_id)


def nothing_to_do(subject: str, goal_id: GoalId | None, *, updating: bool = False) -> Accepted:
    """The outcome of a command whose target is reached already, or is being reached by a pending goal."""
    reply = ChangeReply(goal_id=goal_id or None, updating=updating)
    return Accepted(changes=ObjectChanges(), reply=reply, subject=subject, goal_id=None)


def already_deleted(checkpoint: Checkpoint, subject: str, owned: str) -> Accepted:
    """The outcome of a deletion of a missing object; a deletion that is still pending can be waited for.

    ``owned`` is the key that the pending goal owns.
    """
    goal_id = min(checkpoint.owners.get(owned, {}), key=parse_number, default=None)
    return nothing_to_do(subject, goal_id, updating=goal_id is not None)


def goal_failed(checkpoint: Checkpoint, goal_id: GoalId) -> bool:
    """Whether a goal failed or was superseded: it must not be the reply to a command with the same target."""
    goal = checkpoint.goals.get(goal_id)
    return goal is not None and goal.status in (GoalStatus.FAILED, GoalStatus.SUPERSEDED)


def is_going(checkpoint: Checkpoint, backend: Backend) -> bool:
    """Whether a backend is being deleted by a pending goal."""
    return backend.deleting and backend.goal_id in checkpoint.pending


def retried(checkpoint: Checkpoint, request_id: str | None, subject: str, *owned: str) -> Accepted | None:
    """The outcome of a command that was accepted before under the same request id, or None.

    Its goal must own one of the keys ``owned``: an id used for something else is no retry. Raises `BadField` for an
    invalid id.
    """
    if request_id is None:
        return None
    check_name(request_id, "request_id")
    goal_id = checkpoint.requests.get(request_id)
    goal = None if goal_id is None else checkpoint.goals.get(goal_id)
    if goal is None or not set(owned) & set(goal.owns):
        return None
    return nothing_to_do(subject, goal.goal_id, updating=True)


def new_goal(
    draft: Draft,
    kind: GoalKind,
    subject: str,
    owns: Sequence[str],
    now: float,
    *,
    request_id: str | None = None,
) -> GoalId:
    """Create a pending goal; the pending goals that it replaces end SUPERSEDED.

    A change of one part of a larger pending change (a deployment of an application that is being deployed) becomes a
    goal of the whole, so that the rest still has one.
    """
    replaced = {goal_id for key in owns for goal_id in draft.owners.get(key, {})}
    whole = _get_whole(draft, replaced, kind, owns)
    if whole is not None:
        kind, subject, owns = whole.kind, whole.subject, whole.owns
    if len(draft.pending) - len(replaced) >= GOALS_PENDING_MAX:
        raise LimitReached(f"{GOALS_PENDING_MAX} goals are pending already")
    goal_id = draft.next_goal_id()
    _end_replaced(draft, replaced, owns, goal_id, now)
    if whole is not None:
        _hand_over(draft, whole, goal_id)
    if kind is GoalKind.APPLICATION:
        _hand_over_rollouts(draft, replaced, owns, goal_id)
    draft.put(
        Goal(
            goal_id=goal_id,
            kind=kind,
            subject=subject,
            owns=list(owns),
            status=GoalStatus.PENDING,
            created_at=now,
            request_id=request_id,
        )
    )
    return goal_id


def _get_whole(
    draft: Draft, replaced: Collection[GoalId], kind: GoalKind, owns: Sequence[str]
) -> Goal | None:
    """The replaced goal of an application of which the new goal covers only a part, if any."""
    if kind not in (GoalKind.DEPLOY, GoalKind.DELETE):
        return None
    for goal_id in sorted(replaced, key=parse_number):
        former = draft.pending[goal_id]
        some, all_of_it = backend_keys(owns), backend_keys(former.owns)
        is_part = former.owns[0] not in owns and (
            some < all_of_it or (some == all_of_it and kind is GoalKind.DEPLOY)
        )
        if former.kind is GoalKind.APPLICATION and is_part:
            return former
    return None


def _end_replaced(
    draft: Draft, replaced: Collection[GoalId], owns: Sequence[str], goal_id: GoalId, now: float
) -> None:
    for former_id in sorted(replaced, key=parse_number):
        former = draft.pending[former_id]
        if former.owns[0] in owns or backend_keys(former.owns) & backend_keys(owns):
            end_goal(draft, former, GoalStatus.SUPERSEDED, now, f"replaced by {goal_id}")
            application = owned_application(draft, former)
            if application is not None and application.deleting and former.owns[0] not in owns:
                # Part of a deleted application is deployed again: the rest is deleted, and so is the group.
                draft.delete((ObjectKind.APPLICATION, application.name))


def _hand_over(draft: Draft, former: Goal, goal_id: GoalId) -> None:
    """Make the goal that replaces ``former`` the newest goal of all objects that ``former`` covered."""
    application = owned_application(draft, former)
    if application is not None:
        draft.put(msgspec.structs.replace(application, goal_id=goal_id))
    for tag in owned_backends(former):
        backend = draft.backends.get(tag)
        if backend is not None and backend.goal_id == former.goal_id:
            draft.put(msgspec.structs.replace(backend, goal_id=goal_id))


def _hand_over_rollouts(
    draft: Draft, replaced: Collection[GoalId], owns: Sequence[str], goal_id: GoalId
) -> None:
    """Make a goal of an application wait for the rollouts that the goal before it had started."""
    keys = backend_keys(owns)
    for tag in sorted(draft.active_rollouts):
        rollout = draft.rollouts[tag]
        if rollout.outcome is None and rollout.goal_id in replaced and backend_key(tag) in keys:
            draft.put(rollout.with_goal(goal_id))


def check_target(wanted: Wanted, at: str = "") -> None:
    """Raise `BadField` for invalid values; ``at`` is put before the field's path."""
    check_backend_config(wanted.backend_config, f"{at}backend_config")
    check_replica_config(wanted.replica_config, f"{at}replica_config")
    if wanted.version is not None and not 0 < len(wanted.version) <= VERSION_LENGTH_MAX:
        raise BadField(f"{at}version", f"must have 1 to {VERSION_LENGTH_MAX} characters")


def as_scaled(wanted: Wanted, existing: Backend | None) -> Wanted:
    """``wanted`` with the number of replicas as decided by autoscaling, by the rules of `core.scaling`."""
    is_new = existing is None or with_same_code(existing, wanted) is None
    config = scaled_config(wanted.backend_config, existing, is_new_code=is_new)
    return Wanted(
        wanted.replica_config,
        config,
        wanted.version,
        wanted.is_same_code,
        leaves_retained=wanted.leaves_retained,
    )


def check_methods(methods: list[str]) -> list[str]:
    """Validate HTTP methods and return them sorted. Raises `BadField`."""
    if not methods:
        raise BadField("methods", "must not be empty")
    for index, method in enumerate(methods):
        if method not in METHODS:
            raise BadField(f"methods[{index}]", f"{method[:40]!r} is none of {', '.join(METHODS)}")
    return sorted(set(methods))


def check_not_in_rollout(checkpoint: Checkpoint, tag: BackendTag, field: str) -> None:
    """Raise `Conflict` for the canary or the baseline of a rollout that is under way."""
    owner = rolled_out(tag)
    if owner != tag and owner in checkpoint.active_rollouts:
        raise Conflict(f"{field}: {tag!r} belongs to the rollout of {owner!r}, which decides about it")


def check_backend_limit(checkpoint: Checkpoint, more: int) -> None:
    """Raise `LimitReached` when there would be too many."""
    if len(checkpoint.backends) + more > NUM_BACKENDS_MAX:
        raise LimitReached(
            f"there are {len(checkpoint.backends)} backends; at most {NUM_BACKENDS_MAX} may be"
        )
