"""The state of a host, the goals that it accepts, and its report with its complete inventory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from serve_common.names import HostId, ReplicaTag
from serve_common.protocol.reports import (
    ERROR_LENGTH_MAX,
    MISSING_CODE_MAX,
    HostGoal,
    HostReport,
    ReplicaGoal,
    ReplicaRank,
    ReplicaReport,
    ReplicaStatus,
)
from serve_common.values import truncate_start

STARTS_MAX: Final = 8
"""Default of `HostState.starts_max`."""
SPENT_TAGS_MAX: Final = 10_000
"""Newest tags of ended replicas that are remembered; ordinals only increase, so older ones do not recur."""


class HostedReplica(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one replica on its host. Times are the host's monotonic seconds."""

    goal: ReplicaGoal
    status: ReplicaStatus = ReplicaStatus.STARTING
    is_ordered: bool = False
    """Its start was requested from the runtime; until then it is queued, without a process."""
    is_process_starting: bool = False
    """True while it counts against `HostState.starts_max`."""
    start_by: float | None = None
    """Deadline of its start; None until the start is ordered."""
    has_process: bool = False
    """True while it may have a process, or one may be starting."""
    is_kill_requested: bool = False
    kill_again_at: float | None = None
    """When a process that survived a kill is killed by force."""
    drain_by: float | None = None
    """Deadline of its drain; None while it does not drain."""
    is_drain_requested: bool = False
    is_drained: bool = False
    config_version: int = 0
    """The applied version."""
    requested_config_version: int = 0
    """The version requested last: in progress, applied, or refused by the user's code."""
    requested_rank: ReplicaRank | None = None
    requested_world_size: int = 0
    """These two as passed on last."""
    is_reconfiguring: bool = False
    reconfigure_by: float | None = None
    """Deadline of the reconfigure in progress."""
    config_error_version: int = 0
    error: str = ""
    is_unusable: bool = False
    """Its start failed, and would wherever it is tried."""
    pid: int = 0
    is_check_pending: bool = False
    check_at: float | None = None
    """When to send a health check, or, while one is pending, when to count it as failed.

    None until a requested check was sent, so that delays of the host itself do not count.
    """
    checks_failed: int = 0
    """Consecutive failed health checks."""

    @property
    def tag(self) -> ReplicaTag:
        """Its tag."""
        return self.goal.replica_tag


class HostState(msgspec.Struct, frozen=True, kw_only=True):
    """The complete input of the host's decisions.

    Why frozen: a step of the host is `state, input -> state`, which a property test can drive through any order of
    goals, events and delays.
    """

    host_id: HostId
    starts_max: int = STARTS_MAX
    """Maximum processes starting at once; further starts are queued."""
    epoch: int = 0
    """The highest epoch received, in a goal or in a leader notice."""
    goal: HostGoal | None = None
    replicas: dict[ReplicaTag, HostedReplica] = {}
    spent_tags: dict[ReplicaTag, None] = {}
    """Tags of replicas that ended on this host process, oldest first; they are never started again."""
    is_leaving: bool = False
    leave_by: float | None = None
    """Deadline of all drains while the host leaves."""

    @property
    def generation(self) -> int:
        """Generation of the current goal; 0 before the first."""
        return 0 if self.goal is None else self.goal.generation

    @property
    def goal_epoch(self) -> int:
        """Epoch of the current goal; 0 before the first."""
        return 0 if self.goal is None else self.goal.epoch


class Refused(msgspec.Struct, frozen=True):
    """A goal was refused."""

    reason: str


def accept_goal(state: HostState, goal: HostGoal) -> HostState | Refused:
    """Accept ``goal`` if it is at least as new as everything received before; a repeated one changes nothing."""
    if goal.host_id != state.host_id:
        return Refused(f"it is for host {goal.host_id!r}")
    if goal.epoch < state.epoch:
        return Refused(f"epoch {goal.epoch} is over; {state.epoch} leads")
    current = (state.goal_epoch, state.generation)
    if (goal.epoch, goal.generation) < current:
        return Refused(f"generation {goal.epoch}.{goal.generation} is older than {current[0]}.{current[1]}")
    tags = [replica.replica_tag for replica in goal.replicas]
    if len(set(tags)) != len(tags):
        return Refused("it names a replica twice")
    if state.goal is not None and current == (goal.epoch, goal.generation):
        return state
    return msgspec.structs.replace(state, goal=goal, epoch=goal.epoch)


def on_leader_notice(state: HostState, epoch: int) -> HostState:
    """Record the leader's ``epoch``: goals of older epochs are refused from now on."""
    return msgspec.structs.replace(state, epoch=max(state.epoch, epoch))


def start_leaving(state: HostState, leave_by: float) -> HostState:
    """Drain everything regardless of the goal, until ``leave_by`` at most; a repeated call cannot postpone it."""
    soonest = leave_by if state.leave_by is None else min(state.leave_by, leave_by)
    return msgspec.structs.replace(state, is_leaving=True, leave_by=soonest)


def has_left(state: HostState) -> bool:
    """True once a leaving host has no processes."""
    return state.is_leaving and not any(replica.has_process for replica in state.replicas.values())


def put_replica(state: HostState, replica: HostedReplica) -> HostState:
    """``state`` with ``replica`` added or replaced."""
    return msgspec.structs.replace(state, replicas={**state.replicas, replica.tag: replica})


def forget_replica(state: HostState, tag: ReplicaTag) -> HostState:
    """``state`` without ``tag``, which is recorded as spent."""
    spent = {known: None for known in state.spent_tags if known != tag} | {tag: None}
    while len(spent) > SPENT_TAGS_MAX:
        del spent[next(iter(spent))]
    remaining = {known: replica for known, replica in state.replicas.items() if known != tag}
    return msgspec.structs.replace(state, replicas=remaining, spent_tags=spent)


def trim_error(text: str) -> str:
    """``text`` cut to the limit of a report: the end is kept, which has the exception."""
    return truncate_start(text, ERROR_LENGTH_MAX)


def build_report(
    state: HostState,
    *,
    incarnation: str,
    started_at: float,
    sequence: int,
    resources: dict[str, float],
    metrics_url: str = "",
    missing_code: Sequence[str] = (),
) -> HostReport:
    """Build the host's report; equal states give reports that differ in ``sequence`` only.

    Why it is always the whole inventory: a lost report is repaired by the next one, and the controller never has to add
    up differences.
    """
    return HostReport(
        host_id=state.host_id,
        incarnation=incarnation,
        sequence=sequence,
        started_at=started_at,
        epoch=state.goal_epoch,
        leader_epoch=state.epoch,
        generation=state.generation,
        resources=resources,
        replicas=[_replica_report(replica) for replica in state.replicas.values()],
        metrics_url=metrics_url,
        leaving=state.is_leaving,
        missing_code=list(missing_code[:MISSING_CODE_MAX]),
    )


def _replica_report(replica: HostedReplica) -> ReplicaReport:
    return ReplicaReport(
        replica_tag=replica.tag,
        status=replica.status,
        config_version=replica.config_version,
        config_error_version=replica.config_error_version,
        error=replica.error,
        is_unusable=replica.is_unusable,
        pid=replica.pid,
    )
