"""Host goals: everything that a host should run, sent until the host acknowledges it."""

from __future__ import annotations

import traceback
from collections.abc import Iterable

import msgspec

from serve_common.names import HostId
from serve_common.protocol.reports import HostGoal, ReplicaGoal
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.objects import Replica
from serve_controller.core.observed import GOAL_RESEND_AFTER_S, HostStatus, ObservedState, host_status
from serve_controller.core.transitions import IN_HOST_GOAL


class SendHostGoal(msgspec.Struct, frozen=True):
    """Send a host everything it should run. May be performed twice."""

    goal: HostGoal


class Fault(msgspec.Struct, frozen=True):
    """An error in one backend's or host's part of the plan; the other parts are unaffected."""

    about: str
    """The backend's tag or the host's id."""
    error: str


class DueTime(msgspec.Struct, frozen=True):
    """When an object must be reconciled even if nothing is reported."""

    at: float
    subject: tuple[str, str]
    """``backend`` or ``host_goal``, and its name."""


def send_host_goals(
    checkpoint: Checkpoint, observed: ObservedState, epoch: int, now: float, host_ids: Iterable[HostId]
) -> tuple[list[SendHostGoal], list[DueTime], list[Fault]]:
    """Goals for the hosts that have not acknowledged theirs, each at most once in `GOAL_RESEND_AFTER_S`.

    A silent host is sent its goal again too: it responds to each with a report, so it is probed several times before it
    counts as lost.
    """
    if observed.bucket is None:
        # Routers must leave a replica before its host drains it, and nothing can be published yet.
        return [], [], []
    actions: list[SendHostGoal] = []
    times: list[DueTime] = []
    faults: list[Fault] = []
    for host_id in sorted(host_ids):
        host, record = observed.hosts.get(host_id), checkpoint.hosts.get(host_id)
        status = host_status(observed, host_id, now)
        if host is None or record is None or status is HostStatus.LOST:
            continue
        wanted = (epoch, record.generation)
        if (host.report.epoch, host.report.generation) == wanted and status is not HostStatus.SUSPECT:
            continue
        resend_at = host.sent_at + GOAL_RESEND_AFTER_S
        if host.sent == wanted and now < resend_at:
            times.append(DueTime(resend_at, ("host_goal", host_id)))
            continue
        times.append(DueTime(now + GOAL_RESEND_AFTER_S, ("host_goal", host_id)))
        try:
            goal = _host_goal(checkpoint, host_id, wanted)
        except Exception:  # noqa: BLE001 - any defect in one host's part; the shell logs it
            # No goal at all: one that lacks a replica would stop it.
            faults.append(Fault(host_id, traceback.format_exc()))
            continue
        actions.append(SendHostGoal(goal))
    return actions, times, faults


def _host_goal(checkpoint: Checkpoint, host_id: HostId, number: tuple[int, int]) -> HostGoal:
    known = checkpoint.by_host.get(host_id)
    replicas = [] if known is None else sorted(known.values(), key=lambda r: r.replica_tag)
    return HostGoal(
        host_id=host_id,
        epoch=number[0],
        generation=number[1],
        replicas=[_replica_goal(checkpoint, r) for r in replicas if r.state in IN_HOST_GOAL],
        kill=[r.replica_tag for r in replicas if r.force_kill and r.state not in IN_HOST_GOAL],
    )


def _replica_goal(checkpoint: Checkpoint, replica: Replica) -> ReplicaGoal:
    version = checkpoint.backends[replica.backend_tag].get_version(replica.config_version)
    assert version is not None, f"{replica.replica_tag} runs a version that is forgotten"
    config = version.backend_config
    return ReplicaGoal(
        replica_tag=replica.replica_tag,
        backend_tag=replica.backend_tag,
        replica_config=version.replica_config,
        config_version=version.config_version,
        user_config=config.user_config,
        max_concurrent_queries=config.max_concurrent_queries,
        graceful_shutdown_timeout_s=config.graceful_shutdown_timeout_s,
        health_check_period_s=config.health_check_period_s,
        health_check_timeout_s=config.health_check_timeout_s,
        health_check_failure_threshold=config.health_check_failure_threshold,
        start_timeout_s=config.start_timeout_s,
        may_call=config.may_call,
        code_version=replica.code_version,
        peer_versions=replica.peer_versions,
    )
