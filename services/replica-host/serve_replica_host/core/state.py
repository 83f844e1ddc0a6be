"""What a host knows, which goals it obeys, and its report: its whole inventory."""

from __future__ import annotations

from typing import Final

import msgspec

from serve_common.names import HostId, ReplicaTag
from serve_common.protocol.reports import (
    ERROR_LENGTH_MAX,
    HostGoal,
    HostReport,
    ReplicaGoal,
    ReplicaReport,
    ReplicaStatus,
)

STARTS_MAX: Final = 8
"""Processes that start at once, unless told otherwise."""
SPENT_TAGS_MAX: Final = 10_000
"""Tags of ended replicas that are remembered, the newest; ordinals rise, so an older one hardly comes again."""


class HeldReplica(msgspec.Struct, frozen=True, kw_only=True):
    """One replica as its host holds it. Times are the host's monotonic seconds."""

    goal: ReplicaGoal
    status: ReplicaStatus = ReplicaStatus.STARTING
    is_ordered: bool = False
    """The runtime was told to start it; until then it waits for its turn, without a process."""
    is_process_starting: bool = False
    """Counts among the processes that start at once."""
    start_by: float | None = None
    """When starting has taken too long; None until it is ordered."""
    has_process: bool = False
    """It may still have a process, or one may be under way."""
    is_kill_asked: bool = False
    kill_again_at: float | None = None
    """When a process that was killed and is still there is killed by force."""
    drain_by: float | None = None
    """When draining ends by force; None while it does not drain."""
    is_draining_asked: bool = False
    is_drained: bool = False
    config_version: int = 0
    """Applied."""
    asked_config_version: int = 0
    """Under way, or applied, or refused by the user's code."""
    is_reconfiguring: bool = False
    reconfigure_by: float | None = None
    """When a reconfigure that is under way counts as stuck."""
    config_error_version: int = 0
    error: str = ""
    pid: int = 0
    is_check_pending: bool = False
    check_at: float | None = None
    """When to ask for its health, or, while an answer is pending, when to count that as a failure.

    None while the question has not been sent: what the host itself delays is no fault of the replica.
    """
    checks_failed: int = 0
    """In a row."""

    @property
    def tag(self) -> ReplicaTag:
        """Its tag."""
        return self.goal.replica_tag


class HostState(msgspec.Struct, frozen=True, kw_only=True):
    """All that the host decides from."""

    host_id: HostId
    starts_max: int = STARTS_MAX
    """Processes that may be starting at once; further replicas wait for their turn."""
    epoch: int = 0
    """The highest that was heard, by a goal or by a leader's notice."""
    goal: HostGoal | None = None
    replicas: dict[ReplicaTag, HeldReplica] = {}
    spent_tags: dict[ReplicaTag, None] = {}
    """Of replicas that ended in this life of the host, oldest first; never started again."""
    is_leaving: bool = False
    leave_by: float | None = None
    """When leaving ends every drain by force."""

    @property
    def generation(self) -> int:
        """Of the goal that is obeyed; 0 before the first."""
        return 0 if self.goal is None else self.goal.generation

    @property
    def goal_epoch(self) -> int:
        """Of the goal that is obeyed; 0 before the first."""
        return 0 if self.goal is None else self.goal.epoch


class Refused(msgspec.Struct, frozen=True):
    """The goal is not obeyed, and why."""

    reason: str


def accept_goal(state: HostState, goal: HostGoal) -> HostState | Refused:
    """Take ``goal`` when it is at least as new as everything heard before; the same one again changes nothing."""
    if goal.host_id != state.host_id:
        return Refused(f"it is for host {goal.host_id!r}")
    if goal.epoch < state.epoch:
        return Refused(f"epoch {goal.epoch} is over; {state.epoch} leads")
    held = (state.goal_epoch, state.generation)
    if (goal.epoch, goal.generation) < held:
        return Refused(f"generation {goal.epoch}.{goal.generation} is older than {held[0]}.{held[1]}")
    tags = [replica.replica_tag for replica in goal.replicas]
    if len(set(tags)) != len(tags):
        return Refused("it names a replica twice")
    if state.goal is not None and held == (goal.epoch, goal.generation):
        return state
    return msgspec.structs.replace(state, goal=goal, epoch=goal.epoch)


def hear_leader(state: HostState, epoch: int) -> HostState:
    """Remember that ``epoch`` leads: goals of older ones are refused from now on."""
    return msgspec.structs.replace(state, epoch=max(state.epoch, epoch))


def begin_leaving(state: HostState, leave_by: float) -> HostState:
    """Drain everything, whatever the goal says, until ``leave_by`` at most; what was said before is not put off."""
    soonest = leave_by if state.leave_by is None else min(state.leave_by, leave_by)
    return msgspec.structs.replace(state, is_leaving=True, leave_by=soonest)


def has_left(state: HostState) -> bool:
    """True once a leaving host holds no process any more."""
    return state.is_leaving and not any(replica.has_process for replica in state.replicas.values())


def put_replica(state: HostState, replica: HeldReplica) -> HostState:
    """``state`` with ``replica`` in place of what had its tag."""
    return msgspec.structs.replace(state, replicas={**state.replicas, replica.tag: replica})


def forget_replica(state: HostState, tag: ReplicaTag) -> HostState:
    """``state`` without ``tag``, which counts as spent."""
    spent = {known: None for known in state.spent_tags if known != tag} | {tag: None}
    while len(spent) > SPENT_TAGS_MAX:
        del spent[next(iter(spent))]
    kept = {known: replica for known, replica in state.replicas.items() if known != tag}
    return msgspec.structs.replace(state, replicas=kept, spent_tags=spent)


def trim_error(text: str) -> str:
    """``text`` within the limit of a report: the end is kept, for there stands what was raised."""
    return text if len(text) <= ERROR_LENGTH_MAX else "…" + text[-(ERROR_LENGTH_MAX - 1) :]


def build_report(
    state: HostState,
    *,
    incarnation: str,
    started_at: float,
    sequence: int,
    resources: dict[str, float],
    metrics_url: str = "",
) -> HostReport:
    """What the host says of itself; equal states give reports that differ in ``sequence`` only."""
    return HostReport(
        host_id=state.host_id,
        incarnation=incarnation,
        sequence=sequence,
        started_at=started_at,
        epoch=state.goal_epoch,
        leader_epoch=state.epoch,
        generation=state.generation,
        resources=resources,
        replicas=[_replica_report(held) for held in state.replicas.values()],
        metrics_url=metrics_url,
        leaving=state.is_leaving,
    )


def _replica_report(held: HeldReplica) -> ReplicaReport:
    return ReplicaReport(
        replica_tag=held.tag,
        status=held.status,
        config_version=held.config_version,
        config_error_version=held.config_error_version,
        error=held.error,
        pid=held.pid,
    )
