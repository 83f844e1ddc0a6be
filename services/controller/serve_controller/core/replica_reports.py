"""What the hosts' reports mean for one backend's replicas.

Why apart from the rollout: this part only follows reality (what runs, failed, died, is gone, is stuck), the rollout
only decides what should be. The result of both is recorded before anything is done.
"""

from __future__ import annotations

import msgspec

from serve_common.protocol.reports import ReplicaReport, ReplicaStatus
from serve_controller.core.checkpoint import Draft
from serve_controller.core.goals.progress import fail
from serve_controller.core.goals.scope import goal_at_stake
from serve_controller.core.objects import Backend, BackendVersion, ObjectKind, Replica, ReplicaState
from serve_controller.core.observed import HostObserved, HostStatus, ObservedState, host_status
from serve_controller.core.transitions import IN_HOST_GOAL, ROUTED, TransitionEvent, moved

SHORT_LIFE_S = 10.0
"""A replica that dies younger than this counts as a failed start, so that crash loops are slowed down too."""
RETRY_WAIT_MIN_S = 0.2
RETRY_WAIT_MAX_S = 30.0
RAN_RETRY_WAIT_MAX_S = 1.0
"""Where it had served: the code can start, and whatever kills replicas (a bad request, memory, somebody) may go on for
a while. A backend must not stay away for half a minute after that."""
STUCK_GRACE_S = 15.0
"""Beyond the time that a start or a stop may take, for the host itself to end it and to say so."""


def retry_wait_s(start_failures: int, *, had_run: bool = False) -> float:
    """How long to wait after so many failed starts in a row: none after the first, then doubling, bounded.

    ``had_run``: the last of them had served before it ended.
    """
    if start_failures <= 1:
        return 0.0
    longest_s = RAN_RETRY_WAIT_MAX_S if had_run else RETRY_WAIT_MAX_S
    return min(RETRY_WAIT_MIN_S * 2.0 ** min(start_failures - 2, 20), longest_s)


def with_event(draft: Draft, replica: Replica, event: TransitionEvent, now: float) -> Replica | None:
    """Move a replica along the transition table; None when it is gone (its row is deleted)."""
    state = moved(replica.state, event)
    if state is ReplicaState.STOPPED:
        draft.delete((ObjectKind.REPLICA, replica.replica_tag))
        if replica.host_id is not None and replica.state in IN_HOST_GOAL:
            # One number names one goal: a late copy of the former must not bring the replica back.
            draft.renew_host_goal(replica.host_id)
        return None
    if state is replica.state:
        return replica
    result = msgspec.structs.replace(replica, state=state, since=now, message="")
    draft.put(result)
    return result


def stuck_at(backend: Backend, replica: Replica) -> float | None:
    """When a replica in its present state counts as stuck; None when it cannot be."""
    version = backend.version_of(replica.config_version) or backend.target
    match replica.state:
        case ReplicaState.STARTING:
            return replica.since + version.backend_config.start_timeout_s + STUCK_GRACE_S
        case ReplicaState.STOPPING if not replica.force_kill:
            return replica.since + version.backend_config.graceful_shutdown_timeout_s + STUCK_GRACE_S
        case _:
            return None


def follow_reports(draft: Draft, observed: ObservedState, backend: Backend, epoch: int, now: float) -> None:
    """Bring the backend's replicas to what was heard of them by the leader of ``epoch``; count failed starts."""
    for tag in sorted(draft.replicas_of(backend.backend_tag)):
        replica = draft.replicas_of(backend.backend_tag)[tag]
        if replica.host_id is None:
            continue
        if host_status(observed, replica.host_id, now) is HostStatus.LOST:
            with_event(draft, replica, TransitionEvent.GONE, now)
            continue
        at = stuck_at(backend, replica)
        if at is not None and now >= at:
            _follow_stuck(draft, replica, now)
            continue
        host = observed.hosts.get(replica.host_id)
        if host is None:
            continue  # not heard of yet: nothing is known, so nothing is done
        report = host.replicas.get(replica.replica_tag)
        if report is None:
            _follow_absence(draft, host, replica, now)
        else:
            _follow_report(draft, host, replica, report, epoch=epoch, now=now)


def _follow_stuck(draft: Draft, replica: Replica, now: float) -> None:
    """The host should have ended it long ago. A start is given up and replaced; a stop is ordered by force."""
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


def _follow_absence(draft: Draft, host: HostObserved, replica: Replica, now: float) -> None:
    """A report is whole: a replica that is not in it does not run, unless the host has yet to hear of it."""
    unheard = host.report.generation < replica.generation
    may_yet_start = replica.state in (ReplicaState.STARTING, ReplicaState.SHOULD_STOP)
    if unheard and (may_yet_start or host.report.generation > 0):
        # It may have been told to start by a goal that is under way: its end is certain once the host has heard the
        # goal that leaves it out. And the first report that a new leader hears may be a late one.
        return
    if replica.state is ReplicaState.STARTING and not host.report.leaving:
        # Told to start it, the host neither does nor says why; without a wait that would go round for ever.
        _count_failure(draft, replica, f"the host {replica.host_id} was told to start it and does not", now)
    with_event(draft, replica, TransitionEvent.GONE, now)


def _follow_report(
    draft: Draft, host: HostObserved, replica: Replica, report: ReplicaReport, *, epoch: int, now: float
) -> None:
    state, status = replica.state, report.status
    if status in (ReplicaStatus.FAILED, ReplicaStatus.DEAD):
        _follow_end(draft, host, replica, report, now)
    elif state is ReplicaState.SHOULD_STOP:
        if host.report.generation >= replica.generation:
            with_event(draft, replica, TransitionEvent.ACKNOWLEDGED, now)
    elif state is ReplicaState.STOPPING:
        return
    elif (
        status is ReplicaStatus.STARTING and state is not ReplicaState.STARTING and host.report.epoch == epoch
    ):
        # No late report, for it obeys a goal of this leader's. So a new life of its host was told to run the replica
        # before that life was heard of: what had served is gone.
        with_event(draft, replica, TransitionEvent.UNWANTED, now)
    elif _is_config_refused(draft, replica, report):
        _follow_refused_config(draft, replica, report, now)
    elif status is ReplicaStatus.RUNNING and state in (ReplicaState.STARTING, ReplicaState.UNHEALTHY):
        running = with_event(draft, replica, TransitionEvent.HEARD_RUNNING, now)
        if running is not None and report.config_version < replica.config_version:
            # It was told of a newer configuration before or while it was unhealthy, and has yet to take it.
            with_event(draft, running, TransitionEvent.RECONFIGURE, now)
    elif status is ReplicaStatus.UNHEALTHY:
        _follow_unhealthy(draft, replica, report, now)
    elif state is ReplicaState.UPDATING and report.config_version >= replica.config_version:
        with_event(draft, replica, TransitionEvent.HEARD_CONFIG, now)
    elif status is ReplicaStatus.DRAINING and (
        host.report.leaving or host.report.epoch < draft.counters.restored_epoch
    ):
        # The host stops by itself, or obeys a goal that is lost: what it drains must be replaced.
        with_event(draft, replica, TransitionEvent.UNWANTED, now)


def _follow_unhealthy(draft: Draft, replica: Replica, report: ReplicaReport, now: float) -> None:
    """It leaves the routes and is replaced. One that was young never proved itself: that counts as a failed start."""
    unhealthy = replica
    if replica.state in ROUTED:
        heard = with_event(draft, replica, TransitionEvent.HEARD_UNHEALTHY, now)
        assert heard is not None
        unhealthy = heard
    backend = draft.backends[replica.backend_tag]
    version: BackendVersion = backend.version_of(replica.config_version) or backend.target
    config = version.backend_config
    checks_s = (config.health_check_period_s + config.health_check_timeout_s) * (
        config.health_check_failure_threshold + 1
    )
    never_ran = replica.state is ReplicaState.STARTING  # the report that said so was lost
    if never_ran or now - replica.since < max(SHORT_LIFE_S, checks_s):
        _count_failure(draft, replica, report.error or "its health checks fail", now)
    stopping = with_event(draft, unhealthy, TransitionEvent.UNWANTED, now)
    assert stopping is not None
    draft.put(msgspec.structs.replace(stopping, message="its health checks failed"))


def _follow_end(
    draft: Draft, host: HostObserved, replica: Replica, report: ReplicaReport, now: float
) -> None:
    with_event(draft, replica, TransitionEvent.GONE, now)
    # What ends while its host leaves says nothing about the code.
    wanted = (
        replica.state not in (ReplicaState.SHOULD_STOP, ReplicaState.STOPPING) and not host.report.leaving
    )
    had_run = replica.state is not ReplicaState.STARTING
    if wanted and not (had_run and now - replica.since >= SHORT_LIFE_S):
        error = report.error or "the replica's process ended"
        _count_failure(draft, replica, error, now, had_run=had_run)


def _count_failure(draft: Draft, replica: Replica, error: str, now: float, *, had_run: bool = False) -> None:
    """A start that failed delays the next one; that of another version than the target's says nothing about it."""
    backend = draft.backends[replica.backend_tag]
    target = backend.target
    if (replica.code_version, replica.config_version) != (target.code_version, target.config_version):
        return
    if replica.since <= draft.counters.restored_at:
        return  # it is from before the store was restored, and may have run and ended since
    failures = backend.start_failures + 1
    draft.put(
        msgspec.structs.replace(
            backend,
            start_failures=failures,
            last_error=error,
            retry_at=now + retry_wait_s(failures, had_run=had_run),
        )
    )


def _is_config_refused(draft: Draft, replica: Replica, report: ReplicaReport) -> bool:
    """Whether ``reconfigure`` raised at the target's configuration; another one is replaced anyway."""
    target = draft.backends[replica.backend_tag].target
    return (
        replica.state in (ReplicaState.UPDATING, ReplicaState.UNHEALTHY)
        and replica.config_version == target.config_version
        and report.config_version < replica.config_version <= report.config_error_version
    )


def _follow_refused_config(draft: Draft, replica: Replica, report: ReplicaReport, now: float) -> None:
    """``reconfigure`` raised: that fails a pending change; without one, the replica is replaced by a new one."""
    goal = goal_at_stake(draft, draft.backends[replica.backend_tag])
    if goal is not None:
        fail(draft, goal, report.error or "reconfigure raised", now, of=replica.backend_tag)
    else:
        with_event(draft, replica, TransitionEvent.UNWANTED, now)
