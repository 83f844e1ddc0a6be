"""The loop of a replica host: receives goals and events, reconciles, performs the actions, reports."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from typing import Final, final

import msgspec
import structlog

from serve_common.names import HostId, ReplicaTag, parse_backend_tag
from serve_common.protocol.reports import HostGoal, HostReport, LeaderNotice, ReplicaStatus
from serve_common.protocol.subjects import UNREADABLE
from serve_common.runtime.tasks import TaskOwner
from serve_common.telemetry.log_lines import RateLimitedLogger
from serve_replica_host.core.events import (
    Constructed,
    HealthChecked,
    HealthCheckSent,
    Placed,
    ProcessEnded,
    ReplicaEvent,
    ReplicaStartFailed,
    apply_event,
)
from serve_replica_host.core.reconcile import (
    Action,
    CheckReplica,
    DrainReplica,
    KillReplica,
    ReconfigureReplica,
    StartReplica,
    reconcile_host,
)
from serve_replica_host.core.state import (
    STARTS_MAX,
    HostState,
    Refused,
    accept_goal,
    build_report,
    has_left,
    on_leader_notice,
    start_leaving,
)
from serve_replica_host.ports import HostMetrics, ReplicaRuntime, ReportBus

_FAILURES: Final = (ReplicaStatus.FAILED, ReplicaStatus.DEAD, ReplicaStatus.UNHEALTHY)


class _Start(msgspec.Struct):
    """A replica whose start was requested and that is not running yet."""

    ordered_at: float
    was_spare: bool = False


@final
class ReplicaCounts:
    """Counts starts and failures of one host's replicas."""

    def __init__(self, metrics: HostMetrics, now: Callable[[], float]) -> None:
        """``now`` returns monotonic seconds."""
        self._metrics = metrics
        self._now = now
        self._starts: dict[ReplicaTag, _Start] = {}

    def ordered(self, replica_tag: ReplicaTag) -> None:
        """Called when a start is requested from the runtime."""
        self._starts[replica_tag] = _Start(self._now())

    def record(self, event: ReplicaEvent) -> None:
        """Process an event of the runtime."""
        start = self._starts.get(event.replica_tag)
        if start is None:
            return
        if isinstance(event, Placed):
            start.was_spare = event.was_spare
        elif isinstance(event, Constructed | ReplicaStartFailed | ProcessEnded):
            del self._starts[event.replica_tag]
            if isinstance(event, Constructed):
                seconds = self._now() - start.ordered_at
                backend_tag = parse_backend_tag(event.replica_tag)
                self._metrics.count_start(backend_tag, seconds, was_spare=start.was_spare)

    def compare(self, before: HostState, after: HostState) -> None:
        """Count the failures between two states of the host."""
        for tag, replica in after.replicas.items():
            if replica.status in _FAILURES:
                known = before.replicas.get(tag)
                if known is None or known.status is not replica.status:
                    self._metrics.count_failure(parse_backend_tag(tag), replica.status)


_log = structlog.get_logger(__name__)

REPORT_PERIOD_S: Final = 1.0
_KILL_GRACE_S: Final = 2.0
"""Seconds to wait for killed processes after leaving has timed out."""
_CLOSE_TIMEOUT_S: Final = 1.0
RETIRE_AGAIN_S: Final = 5.0
"""Seconds after which the metrics of an ended process are retired once more.

Why: Ray reports the end of a process that it kills before it is over, 12 ms on an idle machine. One that is just
starting creates files meanwhile, and their gauges would stay on the page.
"""
INBOX_MAX: Final = 10_000
"""Queued inputs above which goals and notices are dropped, which their senders repeat. Events are never dropped."""


class _ReportNow(msgspec.Struct, frozen=True):
    """Report at once, whether anything changed or not."""


class _Leave(msgspec.Struct, frozen=True):
    """Drain everything and exit."""

    timeout_s: float


_Input = HostGoal | LeaderNotice | ReplicaEvent | _ReportNow | _Leave


@final
class HostShell:
    """The main loop of a host process, from `run` to its end after `leave`.

    Why one task: the state is changed in one place, in order. Callbacks only append to the inbox and wake the loop, so
    however many come in one iteration, there is one reconcile and one report.
    """

    def __init__(
        self,
        host_id: HostId,
        *,
        runtime: ReplicaRuntime,
        bus: ReportBus,
        metrics: HostMetrics,
        incarnation: str,
        started_at: float,
        now: Callable[[], float],
        metrics_url: Callable[[], str] = lambda: "",
        missing_code: Callable[[], list[str]] = list,
        starts_max: int = STARTS_MAX,
    ) -> None:
        """``started_at`` is wall time, ``now`` returns monotonic seconds; ``incarnation`` is unique per process.

        ``metrics_url`` returns the URL where the host is scraped, empty while unknown; ``missing_code`` the digests of
        code that is waited for. ``starts_max`` is the maximum of
        processes starting at once.
        """
        self._state = HostState(host_id=host_id, starts_max=starts_max)
        self._runtime = runtime
        self._bus = bus
        self._metrics = metrics
        self._incarnation = incarnation
        self._started_at = started_at
        self._now = now
        self._metrics_url = metrics_url
        self._missing_code = missing_code
        self._sequence = 0
        self._inbox: deque[_Input] = deque()
        self._processes: dict[str, str] = {}
        """Names of replicas' processes in their metrics files."""
        self._counts = ReplicaCounts(metrics, now)
        self._wake = asyncio.Event()
        self._tasks = TaskOwner("host_shell")
        self._dropped_inputs = RateLimitedLogger(_log.warning)

    # -- inputs; called on the loop -------------------------------------------------------------------------------

    def take_goal(self, payload: bytes) -> None:
        """Queue a `HostGoal` in JSON; an unreadable one is counted, logged and dropped."""
        if self._is_inbox_full("goal"):
            return
        try:
            self._enqueue(msgspec.json.decode(payload, type=HostGoal))
        except UNREADABLE as error:
            self._metrics.message_refused("host_goal", f"{len(payload)} bytes", error)

    def take_leader(self, payload: bytes) -> None:
        """Queue a `LeaderNotice` in JSON; an unreadable one is counted, logged and dropped."""
        if self._is_inbox_full("leader notice"):
            return
        try:
            self._enqueue(msgspec.json.decode(payload, type=LeaderNotice))
        except UNREADABLE as error:
            self._metrics.message_refused("leader_notice", f"{len(payload)} bytes", error)

    def take_event(self, event: ReplicaEvent) -> None:
        """Queue an event of the runtime."""
        self._enqueue(event)

    def report_now(self) -> None:
        """Report at once, such as after a reconnect."""
        self._enqueue(_ReportNow())

    def leave(self, timeout_s: float) -> None:
        """Drain everything; `run` returns when no process is left, or soon after ``timeout_s``."""
        self._enqueue(_Leave(timeout_s))

    @property
    def backlog(self) -> int:
        """Number of unprocessed inputs."""
        return len(self._inbox)

    def _is_inbox_full(self, dropped: str) -> bool:
        if len(self._inbox) < INBOX_MAX:
            return False
        self._dropped_inputs.log(self._now(), "inbox_full", dropped=dropped, inbox_max=INBOX_MAX)
        return True

    def _enqueue(self, item: _Input) -> None:
        self._inbox.append(item)
        self._wake.set()

    # -- the loop -------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Run until the host has left. The last report has the final state."""
        report_at = self._now()
        while True:
            before = self._state
            must_report = self._process_inbox()
            plan = reconcile_host(self._state, self._now())
            has_changed = plan.state != self._state
            self._state = plan.state
            if must_report or has_changed:
                self._counts.compare(before, plan.state)
            for action in plan.actions:
                self._perform(action)
            now = self._now()
            if must_report or has_changed or now >= report_at:
                await self._report()
                report_at = now + REPORT_PERIOD_S
            if self._is_finished(now):
                await self._tasks.close(_CLOSE_TIMEOUT_S)
                return
            wake_at = report_at if plan.check_again_at is None else min(report_at, plan.check_again_at)
            await self._sleep_until(wake_at)

    async def _sleep_until(self, wake_at: float) -> None:
        try:
            async with asyncio.timeout(max(wake_at - self._now(), 0.0)):
                await self._wake.wait()
        except TimeoutError:
            pass
        self._wake.clear()

    def _process_inbox(self) -> bool:
        """Process the inbox; returns True when a report is due."""
        must_report = False
        while self._inbox:
            before = self._state
            item = self._inbox.popleft()
            match item:
                case HostGoal():
                    must_report = self._process_goal(item) or must_report
                case LeaderNotice(epoch=epoch):
                    self._state = on_leader_notice(self._state, epoch)
                    must_report = True
                case _ReportNow():
                    must_report = True
                case _Leave(timeout_s=timeout_s):
                    _log.info("leaving", replicas=len(self._state.replicas), timeout_s=timeout_s)
                    self._state = start_leaving(self._state, self._now() + timeout_s)
                case _:
                    self._process_event(item)
            must_report = must_report or self._state != before
        return must_report

    def _process_goal(self, goal: HostGoal) -> bool:
        accepted = accept_goal(self._state, goal)
        if isinstance(accepted, Refused):
            _log.warning("goal_refused", reason=accepted.reason, epoch=goal.epoch, generation=goal.generation)
            return True  # so that the sender learns the current goal
        if accepted is not self._state:
            _log.info(
                "goal_accepted", epoch=goal.epoch, generation=goal.generation, replicas=len(goal.replicas)
            )
        self._state = accepted
        return True

    def _process_event(self, event: ReplicaEvent) -> None:
        self._counts.record(event)
        if isinstance(event, Placed):
            self._processes[event.replica_tag] = event.process or str(event.pid)
        if isinstance(event, ProcessEnded):
            process = self._processes.pop(event.replica_tag, None)
            if process is not None:
                self._tasks.start(self._retire(process), f"retire_process.{process}")
        is_usual = isinstance(event, HealthCheckSent) or (
            isinstance(event, HealthChecked) and event.error is None
        )
        if not is_usual:
            _log.info("replica_event", **msgspec.to_builtins(event))
        self._state = apply_event(self._state, event, self._now())

    async def _retire(self, process: str) -> None:
        await asyncio.to_thread(self._metrics.retire_process, process)
        await asyncio.sleep(RETIRE_AGAIN_S)
        if process not in self._processes.values():  # it may be another replica's by now
            await asyncio.to_thread(self._metrics.retire_process, process)

    def _perform(self, action: Action) -> None:
        match action:
            case StartReplica(goal):
                self._counts.ordered(goal.replica_tag)
                self._runtime.start(goal)
            case ReconfigureReplica(goal):
                self._runtime.reconfigure(goal)
            case CheckReplica(tag):
                self._runtime.check_health(tag)
            case DrainReplica(tag):
                self._runtime.drain(tag)
            case KillReplica(tag, is_forced=True):
                _log.warning("replica_survives_kill", replica_tag=tag, process=self._processes.get(tag, ""))
                self._runtime.kill_by_force(tag)
            case KillReplica(tag):
                self._runtime.kill(tag)

    async def _report(self) -> None:
        self._sequence += 1
        report: HostReport = build_report(
            self._state,
            incarnation=self._incarnation,
            started_at=self._started_at,
            sequence=self._sequence,
            resources=self._runtime.resources,
            metrics_url=self._metrics_url(),
            missing_code=self._missing_code(),
        )
        self._metrics.show_replicas(Counter(replica.status for replica in self._state.replicas.values()))
        if self._bus.is_connected:
            await self._bus.publish_report(msgspec.json.encode(report))

    def _is_finished(self, now: float) -> bool:
        leave_by = self._state.leave_by
        if leave_by is None:
            return False
        return has_left(self._state) or now >= leave_by + _KILL_GRACE_S
