"""What a host does next: compares its goal with what it holds.

Why one function for everything: starting, reconfiguring, draining, health and every deadline follow from the same
values, so a lost event or a late goal is repaired by the next look, not by a path of its own.
"""

from __future__ import annotations

from typing import Final

import msgspec

from serve_common.names import ReplicaTag
from serve_common.protocol.reports import ReplicaGoal, ReplicaStatus
from serve_replica_host.core.events import Gone, ReplicaEventKind, after, count_failed_check, fail
from serve_replica_host.core.state import HeldReplica, HostState, forget_replica, put_replica


class StartReplica(msgspec.Struct, frozen=True):
    """Start its actor and construct the user's code in it."""

    goal: ReplicaGoal


class ReconfigureReplica(msgspec.Struct, frozen=True):
    """Apply the goal's configuration in place."""

    goal: ReplicaGoal


class CheckReplica(msgspec.Struct, frozen=True):
    """Ask for its health."""

    replica_tag: ReplicaTag


class DrainReplica(msgspec.Struct, frozen=True):
    """Let it refuse what is new and finish what is in flight."""

    replica_tag: ReplicaTag


class KillReplica(msgspec.Struct, frozen=True):
    """End its process now."""

    replica_tag: ReplicaTag
    is_forced: bool = False
    """It was killed before and is still there."""


Action = StartReplica | ReconfigureReplica | CheckReplica | DrainReplica | KillReplica


class HostPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What follows from one look. Each action is in ``state`` already, so the next look does not repeat it."""

    state: HostState
    actions: list[Action]
    """To be performed in this order, which lets nothing short wait behind starts.

    Performing one that no longer applies is harmless.
    """
    look_again_at: float | None
    """The next deadline; None when only an event or a goal can change anything."""


KILL_WITHIN_S: Final = 1.0
"""Ray ends a process within milliseconds; one that is still there is then killed by the kernel."""
KILL_AGAIN_S: Final = 5.0
_SERVING: Final = (ReplicaStatus.RUNNING, ReplicaStatus.UNHEALTHY)
_ORDER: Final = (CheckReplica, DrainReplica, ReconfigureReplica, KillReplica, StartReplica)
_QUEUED: Final = "waits for its turn: as many processes as may are starting on this host"


def reconcile_host(state: HostState, now: float) -> HostPlan:
    """The actions that bring what ``state`` holds nearer to its goal, judged at ``now``."""
    wanted: dict[ReplicaTag, ReplicaGoal] = {}
    undrained = frozenset(() if state.goal is None else state.goal.kill)
    if state.goal is not None and not state.is_leaving:
        wanted = {goal.replica_tag: goal for goal in state.goal.replicas}
    actions: list[Action] = []
    for tag, held in list(state.replicas.items()):
        goal = wanted.get(tag)
        changed = (
            _omit(held, state.leave_by, now, is_drained=tag not in undrained)
            if goal is None
            else msgspec.structs.replace(held, goal=goal)
        )
        if changed is None:
            state = forget_replica(state, tag)
            continue
        changed = _advance(changed, now, actions)
        state = put_replica(state, changed) if changed != held else state
    for tag, goal in wanted.items():
        if tag not in state.replicas:
            state = put_replica(state, _first_seen(goal, is_spent=tag in state.spent_tags))
    state = _order_starts(state, now, actions)
    actions.sort(key=lambda action: _ORDER.index(type(action)))
    deadlines = [at for held in state.replicas.values() if (at := _deadline(held)) is not None]
    return HostPlan(state=state, actions=actions, look_again_at=min(deadlines, default=None))


def _first_seen(goal: ReplicaGoal, *, is_spent: bool) -> HeldReplica:
    if is_spent:
        return HeldReplica(
            goal=goal,
            status=ReplicaStatus.DEAD,
            error="this replica already ended on this host; a tag is never used again",
        )
    return HeldReplica(goal=goal, error=_QUEUED)


def _order_starts(state: HostState, now: float, actions: list[Action]) -> HostState:
    """Order as many of the starts that wait for their turn as may be; what is left out meanwhile never begins."""
    starting = sum(held.is_process_starting for held in state.replicas.values())
    for held in list(state.replicas.values()):
        if starting >= state.starts_max:
            break
        if held.status is ReplicaStatus.STARTING and not held.is_ordered:
            starting += 1
            actions.append(StartReplica(held.goal))
            ordered = msgspec.structs.replace(
                held,
                is_ordered=True,
                is_process_starting=True,
                has_process=True,
                start_by=now + held.goal.start_timeout_s,
                asked_config_version=held.goal.config_version,
                error="",
            )
            state = put_replica(state, ordered)
    return state


def _omit(held: HeldReplica, leave_by: float | None, now: float, *, is_drained: bool) -> HeldReplica | None:
    following = after(held.status, ReplicaEventKind.OMITTED)
    if held.status is ReplicaStatus.STARTING and not held.is_ordered:
        return None
    if isinstance(following, Gone):
        return held if held.has_process else None
    drain_by = held.drain_by
    if held.status is not ReplicaStatus.DRAINING:
        # What has not begun to serve has nothing to finish.
        grace_s = held.goal.graceful_shutdown_timeout_s if held.status in _SERVING else 0.0
        drain_by = now + grace_s
    if not is_drained:
        drain_by = now if drain_by is None else min(drain_by, now)
    if leave_by is not None and drain_by is not None:
        drain_by = min(drain_by, leave_by)
    return msgspec.structs.replace(held, status=following, drain_by=drain_by)


def _advance(held: HeldReplica, now: float, actions: list[Action]) -> HeldReplica:
    """``held`` after everything that is due for it; what is to be done is appended to ``actions``."""
    if held.status is ReplicaStatus.STARTING and held.start_by is not None and now >= held.start_by:
        reason = f" ({held.error})" if held.error else ""
        held = fail(held, f"import and constructor took longer than {held.goal.start_timeout_s:g} s{reason}")
    if held.status in _SERVING:
        held = _configure(held, now, actions)
        held = _check(held, now, actions)
    if held.status is ReplicaStatus.DRAINING and held.drain_by is not None:
        if not held.is_drained and now < held.drain_by:
            if not held.is_draining_asked:
                actions.append(DrainReplica(held.tag))
                held = msgspec.structs.replace(held, is_draining_asked=True)
        else:
            if held.is_draining_asked and not held.is_drained and not held.is_kill_asked:
                held = msgspec.structs.replace(held, error="what was in flight did not finish in time")
            held = _kill(held, now, actions)
    if held.status is ReplicaStatus.FAILED and held.has_process:
        held = _kill(held, now, actions)
    return held


def _kill(held: HeldReplica, now: float, actions: list[Action]) -> HeldReplica:
    if not held.is_kill_asked:
        actions.append(KillReplica(held.tag))
        return msgspec.structs.replace(held, is_kill_asked=True, kill_again_at=now + KILL_WITHIN_S)
    if held.kill_again_at is None or now < held.kill_again_at:
        return held
    actions.append(KillReplica(held.tag, is_forced=True))
    told = held.error
    if held.status is ReplicaStatus.DRAINING:
        told = f"its process {held.pid} was killed and is still there; it is killed by force"
    return msgspec.structs.replace(
        held, is_process_starting=False, kill_again_at=now + KILL_AGAIN_S, error=told
    )


def _configure(held: HeldReplica, now: float, actions: list[Action]) -> HeldReplica:
    if held.is_reconfiguring:
        if held.reconfigure_by is None or now < held.reconfigure_by:
            return held
        # It is told, and the replica serves on. A second call would only queue up behind the first.
        return msgspec.structs.replace(
            held,
            reconfigure_by=None,
            config_error_version=held.asked_config_version,
            error=f"reconfigure took longer than {held.goal.start_timeout_s:g} s",
        )
    if held.goal.config_version <= held.asked_config_version:
        return held
    actions.append(ReconfigureReplica(held.goal))
    return msgspec.structs.replace(
        held,
        is_reconfiguring=True,
        reconfigure_by=now + held.goal.start_timeout_s,
        asked_config_version=held.goal.config_version,
    )


def _check(held: HeldReplica, now: float, actions: list[Action]) -> HeldReplica:
    if held.check_at is None or now < held.check_at:
        return held
    if held.is_check_pending:
        # The call may hang for ever; another one would only hang beside it.
        timeout_s = held.goal.health_check_timeout_s
        held = count_failed_check(held, f"the health check did not answer within {timeout_s:g} s")
        return msgspec.structs.replace(held, check_at=now + held.goal.health_check_period_s)
    actions.append(CheckReplica(held.tag))
    return msgspec.structs.replace(held, is_check_pending=True, check_at=None)


def _deadline(held: HeldReplica) -> float | None:
    match held.status:
        case ReplicaStatus.STARTING:
            return held.start_by
        case ReplicaStatus.RUNNING | ReplicaStatus.UNHEALTHY:
            return min((at for at in (held.check_at, held.reconfigure_by) if at is not None), default=None)
        case ReplicaStatus.DRAINING:
            return held.kill_again_at if held.is_kill_asked else held.drain_by
        case ReplicaStatus.FAILED:
            return held.kill_again_at if held.has_process else None
        case ReplicaStatus.DEAD:
            return None
