"""The reconcile function of a host: compares its goal with its replicas.

Why one function for everything: starts, reconfigures, drains, health checks and all deadlines follow from the same
state, so a lost event or a late goal is repaired by the next reconcile, without special paths.
"""

from __future__ import annotations

from typing import Final

import msgspec

from serve_common.names import ReplicaTag
from serve_common.protocol.reports import ReplicaGoal, ReplicaStatus
from serve_replica_host.core.events import Gone, ReplicaEventKind, after, count_failed_check, fail
from serve_replica_host.core.state import HostedReplica, HostState, forget_replica, put_replica


class StartReplica(msgspec.Struct, frozen=True):
    """Start its actor and construct the user's code in it."""

    goal: ReplicaGoal


class ReconfigureReplica(msgspec.Struct, frozen=True):
    """Apply the goal's configuration in place."""

    goal: ReplicaGoal


class CheckReplica(msgspec.Struct, frozen=True):
    """Send it a health check."""

    replica_tag: ReplicaTag


class DrainReplica(msgspec.Struct, frozen=True):
    """Make it refuse new requests and finish those in flight."""

    replica_tag: ReplicaTag


class KillReplica(msgspec.Struct, frozen=True):
    """Kill its process."""

    replica_tag: ReplicaTag
    is_forced: bool = False
    """It was killed before and still exists."""


Action = StartReplica | ReconfigureReplica | CheckReplica | DrainReplica | KillReplica


class HostPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one reconcile. ``state`` includes all actions, so the next reconcile does not repeat them."""

    state: HostState
    actions: list[Action]
    """To be performed in this order, so that short actions do not wait behind starts.

    Performing an action that no longer applies is harmless.
    """
    check_again_at: float | None
    """When to reconcile again; None when only an event or a goal can change anything."""


FORCE_KILL_AFTER_S: Final = 1.0
"""Seconds before a kill is repeated by the kernel; Ray usually kills a process within milliseconds."""
FORCE_KILL_PERIOD_S: Final = 5.0
_SERVING: Final = (ReplicaStatus.RUNNING, ReplicaStatus.UNHEALTHY)
_ORDER: Final = (CheckReplica, DrainReplica, ReconfigureReplica, KillReplica, StartReplica)
_QUEUED: Final = "waits for its turn: as many processes as may are starting on this host"


def reconcile_host(state: HostState, now: float) -> HostPlan:
    """The actions that move the replicas of ``state`` towards its goal, at time ``now``."""
    wanted: dict[ReplicaTag, ReplicaGoal] = {}
    kill_tags = frozenset(() if state.goal is None else state.goal.kill)
    if state.goal is not None and not state.is_leaving:
        wanted = {goal.replica_tag: goal for goal in state.goal.replicas}
    actions: list[Action] = []
    for tag, replica in list(state.replicas.items()):
        goal = wanted.get(tag)
        changed = (
            _omit(replica, state.leave_by, now, is_drained=tag not in kill_tags)
            if goal is None
            else msgspec.structs.replace(replica, goal=goal)
        )
        if changed is None:
            state = forget_replica(state, tag)
            continue
        changed = _advance(changed, now, actions)
        state = put_replica(state, changed) if changed != replica else state
    for tag, goal in wanted.items():
        if tag not in state.replicas:
            state = put_replica(state, _new_replica(goal, is_spent=tag in state.spent_tags))
    state = _start_replicas(state, now, actions)
    actions.sort(key=lambda action: _ORDER.index(type(action)))
    deadlines = [at for replica in state.replicas.values() if (at := _deadline(replica)) is not None]
    return HostPlan(state=state, actions=actions, check_again_at=min(deadlines, default=None))


def _new_replica(goal: ReplicaGoal, *, is_spent: bool) -> HostedReplica:
    if is_spent:
        return HostedReplica(
            goal=goal,
            status=ReplicaStatus.DEAD,
            error="this replica already ended on this host; a tag is never used again",
        )
    return HostedReplica(goal=goal, error=_QUEUED)


def _start_replicas(state: HostState, now: float, actions: list[Action]) -> HostState:
    """Order queued starts up to the limit; replicas that are omitted while queued never start."""
    starting = sum(replica.is_process_starting for replica in state.replicas.values())
    for replica in list(state.replicas.values()):
        if starting >= state.starts_max:
            break
        if replica.status is ReplicaStatus.STARTING and not replica.is_ordered:
            starting += 1
            actions.append(StartReplica(replica.goal))
            ordered = msgspec.structs.replace(
                replica,
                is_ordered=True,
                is_process_starting=True,
                has_process=True,
                start_by=now + replica.goal.start_timeout_s,
                requested_config_version=replica.goal.config_version,
                requested_rank=replica.goal.rank,
                requested_world_size=replica.goal.world_size,
                error="",
            )
            state = put_replica(state, ordered)
    return state


def _omit(
    replica: HostedReplica, leave_by: float | None, now: float, *, is_drained: bool
) -> HostedReplica | None:
    next_status = after(replica.status, ReplicaEventKind.OMITTED)
    if replica.status is ReplicaStatus.STARTING and not replica.is_ordered:
        return None
    if isinstance(next_status, Gone):
        return replica if replica.has_process else None
    drain_by = replica.drain_by
    if replica.status is not ReplicaStatus.DRAINING:
        # A replica that is not serving yet has nothing to finish.
        grace_s = replica.goal.graceful_shutdown_timeout_s if replica.status in _SERVING else 0.0
        drain_by = now + grace_s
    if not is_drained:
        drain_by = now if drain_by is None else min(drain_by, now)
    if leave_by is not None and drain_by is not None:
        drain_by = min(drain_by, leave_by)
    return msgspec.structs.replace(replica, status=next_status, drain_by=drain_by)


def _advance(replica: HostedReplica, now: float, actions: list[Action]) -> HostedReplica:
    """``replica`` after everything that is due for it; the necessary actions are appended to ``actions``."""
    if replica.status is ReplicaStatus.STARTING and replica.start_by is not None and now >= replica.start_by:
        reason = f" ({replica.error})" if replica.error else ""
        replica = fail(
            replica, f"import and constructor took longer than {replica.goal.start_timeout_s:g} s{reason}"
        )
    if replica.status in _SERVING:
        replica = _configure(replica, now, actions)
        replica = _check(replica, now, actions)
    if replica.status is ReplicaStatus.DRAINING and replica.drain_by is not None:
        if not replica.is_drained and now < replica.drain_by:
            if not replica.is_drain_requested:
                actions.append(DrainReplica(replica.tag))
                replica = msgspec.structs.replace(replica, is_drain_requested=True)
        else:
            if replica.is_drain_requested and not replica.is_drained and not replica.is_kill_requested:
                replica = msgspec.structs.replace(replica, error="what was in flight did not finish in time")
            replica = _kill(replica, now, actions)
    if replica.status is ReplicaStatus.FAILED and replica.has_process:
        replica = _kill(replica, now, actions)
    return replica


def _kill(replica: HostedReplica, now: float, actions: list[Action]) -> HostedReplica:
    if not replica.is_kill_requested:
        actions.append(KillReplica(replica.tag))
        return msgspec.structs.replace(
            replica, is_kill_requested=True, kill_again_at=now + FORCE_KILL_AFTER_S
        )
    if replica.kill_again_at is None or now < replica.kill_again_at:
        return replica
    actions.append(KillReplica(replica.tag, is_forced=True))
    new_error = replica.error
    if replica.status is ReplicaStatus.DRAINING:
        new_error = f"its process {replica.pid} was killed and is still there; it is killed by force"
    return msgspec.structs.replace(
        replica, is_process_starting=False, kill_again_at=now + FORCE_KILL_PERIOD_S, error=new_error
    )


def _configure(replica: HostedReplica, now: float, actions: list[Action]) -> HostedReplica:
    if replica.is_reconfiguring:
        if replica.reconfigure_by is None or now < replica.reconfigure_by:
            return replica
        # It is reported, and the replica continues to serve. A second call would only queue up behind the first.
        return msgspec.structs.replace(
            replica,
            reconfigure_by=None,
            config_error_version=replica.requested_config_version,
            error=f"reconfigure took longer than {replica.goal.start_timeout_s:g} s",
        )
    goal = replica.goal
    is_ranked = (goal.rank, goal.world_size) == (replica.requested_rank, replica.requested_world_size)
    requested = replica.requested_config_version
    if goal.config_version < requested or (goal.config_version == requested and is_ranked):
        return replica
    actions.append(ReconfigureReplica(goal))
    return msgspec.structs.replace(
        replica,
        is_reconfiguring=True,
        reconfigure_by=now + goal.start_timeout_s,
        requested_config_version=goal.config_version,
        requested_rank=goal.rank,
        requested_world_size=goal.world_size,
    )


def _check(replica: HostedReplica, now: float, actions: list[Action]) -> HostedReplica:
    if replica.check_at is None or now < replica.check_at:
        return replica
    if replica.is_check_pending:
        # The call may hang forever; another one would hang as well.
        timeout_s = replica.goal.health_check_timeout_s
        replica = count_failed_check(replica, f"the health check did not answer within {timeout_s:g} s")
        return msgspec.structs.replace(replica, check_at=now + replica.goal.health_check_period_s)
    actions.append(CheckReplica(replica.tag))
    return msgspec.structs.replace(replica, is_check_pending=True, check_at=None)


def _deadline(replica: HostedReplica) -> float | None:
    match replica.status:
        case ReplicaStatus.STARTING:
            return replica.start_by
        case ReplicaStatus.RUNNING | ReplicaStatus.UNHEALTHY:
            return min(
                (at for at in (replica.check_at, replica.reconfigure_by) if at is not None), default=None
            )
        case ReplicaStatus.DRAINING:
            return replica.kill_again_at if replica.is_kill_requested else replica.drain_by
        case ReplicaStatus.FAILED:
            return replica.kill_again_at if replica.has_process else None
        case ReplicaStatus.DEAD:
            return None
