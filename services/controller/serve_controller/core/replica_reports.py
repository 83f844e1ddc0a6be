"""Updates one backend's replicas from the hosts' reports.

Why apart from the rolling update: this module only follows reality (what runs, failed, died, is gone, is stuck), that
only decides what should be. The result of both is recorded before anything is done.
"""

from __future__ import annotations

import msgspec

from serve_common.api.views import HEALTH_CHECKS_FAILED
from serve_common.clock import backoff_s
from serve_common.protocol.reports import ReplicaReport, ReplicaStatus
from serve_controller.core.checkpoint import Draft
from serve_controller.core.goals import fail, goal_failing_with
from serve_controller.core.objects import Backend, BackendVersion, ObjectKind, Replica, ReplicaState
from serve_controller.core.observed import HostObserved, HostStatus, ObservedState, host_status
from serve_controller.core.transitions import IN_HOST_GOAL, ROUTED, TransitionEvent, moved

SHORT_LIFE_S = 10.0
"""Age in seconds below which a replica that dies counts as a failed start, so that crash loops back off too."""
RETRY_WAIT_MIN_S = 0.2
RETRY_WAIT_MAX_S = 30.0
RAN_RETRY_WAIT_MAX_S = 1.0
"""Longest backoff where the replica had served: the code can start, and the cause of its death (a bad request, memory,
an operator) may last for a while. The backend must not be unavailable for half a minute after that."""
STUCK_GRACE_S = 15.0
"""Seconds beyond the timeout of a start or a stop, for the host itself to end it and report that."""


def retry_wait_s(start_failures: int, *, had_run: bool = False) -> float:
    """Seconds to back off after so many failed starts in a row: none after the first, then doubling, bounded.

    ``had_run``: the last of them had served before it ended.
    """
    longest_s = RAN_RETRY_WAIT_MAX_S if had_run else RETRY_WAIT_MAX_S
    return backoff_s(start_failures - 1, RETRY_WAIT_MIN_S, longest_s)


def with_event(draft: Draft, replica: Replica, event: TransitionEvent, now: float) -> Replica | None:
    """Move a replica along the transition table; None when it is gone (its row is deleted)."""
    state = moved(replica.state, event)
    if state is ReplicaState.STOPPED:
        draft.delete((ObjectKind.REPLICA, replica.replica_tag))
        if replica.host_id is not None and replica.state in IN_HOST_GOAL:
            # Each generation is one goal: a late copy of the former one must not bring the replica back.
            draft.renew_host_goal(replica.host_id)
        return None
    if state is replica.state:
        return replica
    # Why it has to stop stays of interest until it has.
    message = replica.message if state is ReplicaState.STOPPING else ""
    result = msgspec.structs.replace(replica, state=state, since=now, message=message)
    draft.put(result)
    return result


def stuck_at(backend: Backend, replica: Replica) -> float | None:
    """When a replica in its present state counts as stuck; None when it cannot be."""
    version = backend.get_version(replica.config_version) or backend.target
    match replica.state:
        case ReplicaState.STARTING:
            return replica.since + version.start_seconds + STUCK_GRACE_S
        case ReplicaState.STOPPING if not replica.force_kill:
            return replica.since + version.backend_config.graceful_shutdown_timeout_s + STUCK_GRACE_S
        case _:
            return None


def apply_reports(draft: Draft, observed: ObservedState, backend: Backend, epoch: int, now: float) -> None:
    """Update the backend's replicas from the reports to the leader of ``epoch``; count failed starts."""
    for tag in sorted(draft.get_replicas(backend.backend_tag)):
        replica = draft.get_replicas(backend.backend_tag)[tag]
        if replica.host_id is None:
            continue
        if host_status(observed, replica.host_id, now) is HostStatus.LOST:
            with_event(draft, replica, TransitionEvent.GONE, now)
            continue
        at = stuck_at(backend, replica)
        if at is not None and now >= at:
            _apply_stuck(draft, replica, now)
            continue
        host = observed.hosts.get(replica.host_id)
        if host is None:
            continue  # no report yet: nothing is known, so nothing is done
        report = host.replicas.get(replica.replica_tag)
        if report is None:
            _apply_absence(draft, host, replica, now)
        else:
            _apply_report(draft, host, replica, report, epoch=epoch, now=now)


def _apply_stuck(draft: Draft, replica: Replica, now: float) -> None:
    """The host failed to end it in time: a stuck start is replaced, a stuck stop is forced."""
    assert replica.host_id is not None
    since_s = now - replica.since
    if replica.state is ReplicaState.STARTING:
        text = f"{replica.replica_tag} has been starting for {since_s:.0f} s and its host {replica.host_id} neither "
        _count_failure(draft, replica, text + "runs it nor gives it up", now)
        stopping = with_event(draft, replica, TransitionEvent.UNWANTED, now)
        assert stopping is not None
        draft.put(msgspec.structs.replace(stopping, force_kill=True, message="was stuck in starting"))
        return
    message = (
        f"{replica.replica_tag} has been stopping for {since_s:.0f} s: {replica.host_id} is told to kill it"
    )
    draft.put(
        msgspec.structs.replace(
            replica, force_kill=True, message=message, generation=draft.renew_host_goal(replica.host_id)
        )
    )


def _apply_absence(draft: Draft, host: HostObserved, replica: Replica, now: float) -> None:
    """A report is complete: a replica that is not in it does not run, unless the host has yet to get its goal."""
    is_goal_pending = host.report.generation < replica.generation
    may_yet_start = replica.state in (ReplicaState.STARTING, ReplicaState.SHOULD_STOP)
    if is_goal_pending and (may_yet_start or host.report.generation > 0):
        # A goal in flight may start it: its end is certain once the host has received the goal that leaves it out. And
        # the first report that a new leader receives may be a late one.
        return
    if replica.state is ReplicaState.STARTING and not host.report.leaving:
        # The host has the goal, and neither starts it nor reports why; without a backoff that would loop for ever.
        _count_failure(draft, replica, f"the host {replica.host_id} was told to start it and does not", now)
    with_event(draft, replica, TransitionEvent.GONE, now)


def _apply_report(
    draft: Draft, host: HostObserved, replica: Replica, report: ReplicaReport, *, epoch: int, now: float
) -> None:
    state, status = replica.state, report.status
    if status in (ReplicaStatus.FAILED, ReplicaStatus.DEAD):
        _apply_end(draft, host, replica, report, now)
    elif state is ReplicaState.SHOULD_STOP:
        if host.report.generation >= replica.generation:
            with_event(draft, replica, TransitionEvent.ACKNOWLEDGED, now)
    elif state is ReplicaState.STOPPING:
        return
    elif (
        status is ReplicaStatus.STARTING and state is not ReplicaState.STARTING and host.report.epoch == epoch
    ):
        # Not a late report, for it acknowledges a goal of this leader. So a restarted host got the goal before its
        # first report was received: the replica that had served is gone.
        with_event(draft, replica, TransitionEvent.UNWANTED, now)
    elif _is_config_refused(draft, replica, report):
        _apply_refused_config(draft, replica, report, now)
    elif status is ReplicaStatus.RUNNING and state in (ReplicaState.STARTING, ReplicaState.UNHEALTHY):
        running = with_event(draft, replica, TransitionEvent.REPORTED_RUNNING, now)
        if running is not None and report.config_version < replica.config_version:
            # A newer configuration was sent before or while it was unhealthy, and is yet to be applied.
            with_event(draft, running, TransitionEvent.RECONFIGURE, now)
    elif status is ReplicaStatus.UNHEALTHY:
        _apply_unhealthy(draft, replica, report, now)
    elif state is ReplicaState.UPDATING and report.config_version >= replica.config_version:
        with_event(draft, replica, TransitionEvent.REPORTED_CONFIG, now)
    elif status is ReplicaStatus.DRAINING and (
        host.report.leaving or host.report.epoch < draft.counters.restored_epoch
    ):
        # The host leaves, or follows a goal that is lost: the replicas that it drains must be replaced.
        with_event(draft, replica, TransitionEvent.UNWANTED, now)


def _apply_unhealthy(draft: Draft, replica: Replica, report: ReplicaReport, now: float) -> None:
    """Stop routing to an unhealthy replica and replace it. For a young one this counts as a failed start."""
    unhealthy = replica
    if replica.state in ROUTED:
        marked = with_event(draft, replica, TransitionEvent.REPORTED_UNHEALTHY, now)
        assert marked is not None
        unhealthy = marked
    backend = draft.backends[replica.backend_tag]
    version: BackendVersion = backend.get_version(replica.config_version) or backend.target
    config = version.backend_config
    checks_s = (config.health_check_period_s + config.health_check_timeout_s) * (
        config.health_check_failure_threshold + 1
    )
    never_ran = replica.state is ReplicaState.STARTING  # as far as is known: a report may have been lost
    if never_ran or now - replica.since < max(SHORT_LIFE_S, checks_s):
        _count_failure(draft, replica, report.error or "its health checks fail", now)
    stopping = with_event(draft, unhealthy, TransitionEvent.UNWANTED, now)
    assert stopping is not None
    draft.put(msgspec.structs.replace(stopping, message=HEALTH_CHECKS_FAILED))


def _apply_end(draft: Draft, host: HostObserved, replica: Replica, report: ReplicaReport, now: float) -> None:
    with_event(draft, replica, TransitionEvent.GONE, now)
    # An end while the host leaves is no failure of the code.
    wanted = (
        replica.state not in (ReplicaState.SHOULD_STOP, ReplicaState.STOPPING) and not host.report.leaving
    )
    had_run = replica.state is not ReplicaState.STARTING
    if wanted and not (had_run and now - replica.since >= SHORT_LIFE_S):
        error = report.error or "the replica's process ended"
        _count_failure(draft, replica, error, now, had_run=had_run, is_unusable=report.is_unusable)


def _count_failure(
    draft: Draft,
    replica: Replica,
    error: str,
    now: float,
    *,
    had_run: bool = False,
    is_unusable: bool = False,
) -> None:
    """Count a failed start, which delays the next one; ignored for another version than the target's.

    One of unusable code counts as all that a goal allows, because no other can succeed.
    """
    backend = draft.backends[replica.backend_tag]
    target = backend.target
    if (replica.code_version, replica.config_version) != (target.code_version, target.config_version):
        return
    if replica.since <= draft.counters.restored_at:
        return  # started before the store was restored; it may have run and ended since
    failures = backend.start_failures + 1
    if is_unusable:
        failures = max(failures, target.backend_config.max_constructor_retry_count)
    draft.put(
        msgspec.structs.replace(
            backend,
            start_failures=failures,
            last_error=error,
            retry_at=now + retry_wait_s(failures, had_run=had_run),
        )
    )


def _is_config_refused(draft: Draft, replica: Replica, report: ReplicaReport) -> bool:
    """Whether ``reconfigure`` raised for the target's configuration; any other one is replaced anyway."""
    target = draft.backends[replica.backend_tag].target
    return (
        replica.state in (ReplicaState.UPDATING, ReplicaState.UNHEALTHY)
        and replica.config_version == target.config_version
        and report.config_version < replica.config_version <= report.config_error_version
    )


def _apply_refused_config(draft: Draft, replica: Replica, report: ReplicaReport, now: float) -> None:
    """``reconfigure`` raised: fail the pending change, or without one replace the replica."""
    goal = goal_failing_with(draft, draft.backends[replica.backend_tag])
    if goal is not None:
        fail(draft, goal, report.error or "reconfigure raised", now, of=replica.backend_tag)
    else:
        with_event(draft, replica, TransitionEvent.UNWANTED, now)
