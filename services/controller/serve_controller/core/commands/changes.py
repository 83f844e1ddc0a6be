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
    BackendConfig,
    ReplicaConfig,
    check_backend_config,
    check_replica_config,
)
from serve_common.errors import BadField, LimitReached
from serve_common.names import BackendTag, GoalId, check_name
from serve_controller.core.audit import REPLICA_OPTIONS
from serve_controller.core.checkpoint import Checkpoint, Draft
from serve_controller.core.goals import backend_keys, end_goal, owned_application, owned_backends
from serve_controller.core.objects import (
    Backend,
    BackendVersion,
    Goal,
    GoalKind,
    ObjectChanges,
    ObjectKind,
    parse_number,
)
from serve_controller.core.scaling import scaled_config

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


def retried(checkpoint: Checkpoint, request_id: str | None, subject: str, owned: str) -> Accepted | None:
    """The outcome of a command that was accepted before under the same request id, or None.

    ``owned`` is the key that its goal must own: an id used for something else is no retry. Raises `BadField` for an
    invalid id.
    """
    if request_id is None:
        return None
    check_name(request_id, "request_id")
    goal_id = checkpoint.requests.get(request_id)
    goal = None if goal_id is None else checkpoint.goals.get(goal_id)
    if goal is None or owned not in goal.owns:
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


class Wanted(msgspec.Struct, frozen=True):
    """The desired version of a backend."""

    replica_config: ReplicaConfig
    backend_config: BackendConfig
    version: str | None
    is_same_code: bool
    """Whether replicas of the current target may stay if the replica configuration is the same too."""
    leaves_retained: bool = False
    """Whether replicas kept by a failed update (`Backend.retained`) may stay, unless they must be reconfigured."""


def check_target(wanted: Wanted, at: str = "") -> None:
    """Raise `BadField` for invalid values; ``at`` is put before the field's path."""
    check_backend_config(wanted.backend_config, f"{at}backend_config")
    check_replica_config(wanted.replica_config, f"{at}replica_config")
    if wanted.version is not None and not 0 < len(wanted.version) <= VERSION_LENGTH_MAX:
        raise BadField(f"{at}version", f"must have 1 to {VERSION_LENGTH_MAX} characters")


def as_scaled(wanted: Wanted, existing: Backend | None) -> Wanted:
    """``wanted`` with the number of replicas as decided by autoscaling, by the rules of `core.scaling`."""
    is_new = existing is None or _with_same_code(existing, wanted) is None
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


def check_backend_limit(checkpoint: Checkpoint, more: int) -> None:
    """Raise `LimitReached` when there would be too many."""
    if len(checkpoint.backends) + more > NUM_BACKENDS_MAX:
        raise LimitReached(
            f"there are {len(checkpoint.backends)} backends; at most {NUM_BACKENDS_MAX} may be"
        )


def matches_target(backend: Backend, wanted: Wanted) -> bool:
    """Whether the target equals ``wanted`` already."""
    target = backend.target
    return (
        wanted.is_same_code
        and not backend.deleting
        and not backend.halted
        and (backend.retained is None or wanted.leaves_retained)
        and wanted.version == target.version
        and wanted.replica_config == target.replica_config
        and wanted.backend_config == target.backend_config
    )


def make_backend(existing: Backend | None, tag: BackendTag, goal_id: GoalId, wanted: Wanted) -> Backend:
    """The backend with ``wanted`` as its target."""
    if existing is not None:
        return _with_target(existing, goal_id, wanted)
    return Backend(
        backend_tag=tag,
        goal_id=goal_id,
        target=BackendVersion(
            code_version=1,
            config_version=1,
            version=wanted.version,
            replica_config=wanted.replica_config,
            backend_config=wanted.backend_config,
        ),
        last_good=None,
        newest_code_version=1,
        newest_config_version=1,
    )


def _with_target(existing: Backend, goal_id: GoalId, wanted: Wanted) -> Backend:
    target = existing.target
    known = _with_same_code(existing, wanted)
    light = known is target and replica_part(wanted.backend_config) == replica_part(target.backend_config)
    newest_code = existing.newest_code_version + (1 if known is None else 0)
    newest_config = existing.newest_config_version + (0 if light else 1)
    version = BackendVersion(
        code_version=newest_code if known is None else known.code_version,
        config_version=target.config_version if light else newest_config,
        version=wanted.version,
        replica_config=wanted.replica_config,
        backend_config=wanted.backend_config,
    )
    others = existing.others if light else [*existing.others, target]
    retained = existing.retained if light and wanted.leaves_retained else None
    if existing.retained is not None and retained is None:
        others = [*others, existing.retained]
    last_good = existing.last_good
    if existing.deleting and last_good is not None:
        # It was being deleted: if the new version fails, the deleted one must not come back.
        others, last_good = [*others, last_good], None
    return msgspec.structs.replace(
        existing,
        goal_id=goal_id,
        target=version,
        last_good=last_good,
        retained=retained,
        others=others,
        newest_code_version=newest_code,
        newest_config_version=newest_config,
        deleting=False,
        force_kill=False,
        halted=False,
        start_failures=0,
        last_error="",
        retry_at=0.0,
        autoscaling_paused=(
            "" if wanted.backend_config.autoscaling_config is None else existing.autoscaling_paused
        ),
    )


def _with_same_code(existing: Backend, wanted: Wanted) -> BackendVersion | None:
    """The version with the wanted code that may run already: the target, or, to cancel an update, the last good one."""
    if existing.halted or not wanted.is_same_code:
        return None
    for version in (existing.target, existing.last_good):
        if version is None or wanted.version != version.version:
            continue
        if wanted.replica_config == version.replica_config:
            return version
    return None


def replica_part(config: BackendConfig) -> BackendConfig:
    """The configuration reduced to the options that replicas must apply."""
    return BackendConfig(**{name: getattr(config, name) for name in REPLICA_OPTIONS})
