"""The controller as a running service: leads or stands by, and connects the bus to the term.

Why handlers only enqueue: messages from the bus are queued and the loop is woken, so that the controller runs at its
own pace however fast reports arrive.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import msgspec
import structlog

from serve_common.clock import Clock
from serve_common.errors import BusUnavailable, FencedOut, StoreUnavailable
from serve_common.names import BackendTag, ControllerId
from serve_common.protocol.reports import HostReport, LeaderNotice, ProxyReport, Wake
from serve_common.runtime.tasks import TaskOwner, raise_if_cancelled
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.restored import NO_CLAIMS
from serve_controller.ports import (
    ControllerBus,
    GateSource,
    LoadSource,
    PolicyRunner,
    ReplicaEvaluator,
    Store,
)
from serve_controller.shell.admin import AdminApi
from serve_controller.shell.autoscaler import Autoscaler
from serve_controller.shell.boundary import Boundary, LeadersBoundary, Telemetry
from serve_controller.shell.code_store import TRIM_EVERY_S, CodeStore, named_code
from serve_controller.shell.control_loop import Term
from serve_controller.shell.external_gates import GateSampler
from serve_controller.shell.leadership import PING_EVERY_S, PING_TIMEOUT_S, BusLiveness, Leadership
from serve_controller.shell.observations import EVENTS_MAX
from serve_controller.shell.program_policies import ProgramPolicies
from serve_controller.shell.queries import ReadLoad

_log = structlog.get_logger()

IDLE_WAIT_S = 5.0
"""Longest time between two cycles, seconds: a lost wake-up delays the next plan by no more than this."""
CYCLE_GAP_S = 0.002
"""Seconds to wait after a wake-up, so that a burst of reports is handled by one cycle."""


class ScalingParts(msgspec.Struct, frozen=True, kw_only=True):
    """What autoscaling needs from outside."""

    loads: LoadSource
    policies: PolicyRunner
    replicas: ReplicaEvaluator | None = None
    """None: policies that came with programs fail."""
    read_load: ReadLoad


class ControllerService:
    """One controller process."""

    def __init__(
        self,
        *,
        controller_id: ControllerId,
        store: Store,
        bus: ControllerBus,
        clock: Clock,
        boundary: Boundary,
        telemetry: Telemetry,
        scaling: ScalingParts | None = None,
        code: CodeStore | None = None,
        gates: GateSource | None = None,
    ) -> None:
        """None disables in this controller: ``scaling`` autoscaling, ``code`` uploads of code, ``gates`` what rollouts
        ask outside (those that need it stay where they are)."""
        self.term: Term | None = None
        self.autoscaler: Autoscaler | None = None
        """The autoscaler of the current term; None while there is none."""
        self.admin = AdminApi(
            controller_id,
            clock,
            boundary,
            self._leading_term,
            read_load=None if scaling is None else scaling.read_load,
            code=code,
        )
        self._code = code
        self._gates = gates
        self._missing_code: set[str] = set()
        """Code that hosts did not find in the bucket."""
        self._code_missed = asyncio.Event()
        self._scaling = scaling
        self._controller_id = controller_id
        self._store = store
        self._bus = bus
        self._clock = clock
        self._boundary = boundary
        self._telemetry = telemetry
        self._wake = asyncio.Event()
        self._newest_epoch = 0
        self._liveness = BusLiveness(clock.now())
        """Outlives terms: one that begins while the bus is unavailable must not take silence for death."""
        self._claims = NO_CLAIMS
        """Numbers given by former terms of this process: a store that lacks them was restored to an earlier state."""
        self._leadership = Leadership(controller_id, store, self._lead)

    async def run(self) -> None:
        """Serve until cancelled. Raises errors that no retry can fix."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch_bus(), name="watch_bus")
            await self._leadership.run()

    def readiness_error(self) -> str | None:
        """Return why this controller can neither lead nor take over; None when it is ready."""
        term = self.term
        if self._liveness.is_away:
            return "NATS does not answer"
        leadership = self._leadership
        is_away = leadership.is_store_unavailable or leadership.is_store_slow
        if term is not None and (is_away or not term.is_store_available):
            return "this controller leads, but Postgres is away: it answers queries and refuses commands"
        if term is None and self._leadership.is_store_unavailable:
            return "this controller does not lead and could not take over: Postgres is away"
        return None

    def _leading_term(self) -> Term | None:
        """The term, unless this process was suspended for so long that another one may lead by now.

        Raises `StoreUnavailable` when the store, which alone could confirm it, is unavailable too.
        """
        if self._leadership.is_sure:
            return self.term
        if self.term is not None and (
            self._leadership.is_store_unavailable or self._leadership.is_store_slow
        ):
            raise StoreUnavailable(
                "this controller stood still, and Postgres does not say whether it still leads"
            )
        return None

    def on_report(self, report: HostReport | ProxyReport) -> None:
        """Receive a report; ignored unless this controller leads."""
        if self.term is None:
            return
        self.term.on_report(report)
        if isinstance(report, HostReport) and report.missing_code and self._code is not None:
            self._missing_code.update(report.missing_code)
            self._code_missed.set()

    def on_wake_message(self, wake: Wake) -> None:
        """Receive a wake message: requests wait for a backend without replicas. Ignored unless leading."""
        if self.autoscaler is not None and self._leadership.is_sure:
            self.autoscaler.wake(wake)

    def sleeping(self) -> list[BackendTag]:
        """Backends that `on_wake_message` could wake: scaled to zero by the autoscaler."""
        if self.term is None:
            return []
        backends = self.term.checkpoint.backends
        return [tag for tag, b in backends.items() if b.autoscaling is not None and b.num_wanted == 0]

    def on_bus_lost(self) -> None:
        """The bus became unavailable."""
        self._liveness.went()
        if self.term is not None:
            self.term.on_bus_lost()

    def on_bus_restored(self) -> None:
        """The bus is available again."""
        self._liveness.came(self._clock.now())
        if self.term is not None:
            self.term.on_bus_restored()

    def on_bucket_entries(self, entries: Mapping[str, tuple[int, int | None]], *, whole: bool) -> None:
        """Receive entries of the bucket, or with ``whole`` its whole content; ignored unless this controller leads."""
        if self.term is not None:
            self.term.on_bucket_entries(entries, whole=whole)

    def on_leader_notice(self, notice: LeaderNotice) -> None:
        """Receive a leader's notice. A higher epoch ends this controller's term, even while Postgres is unavailable."""
        if self.term is not None and notice.epoch > self.term.epoch:
            self._newest_epoch = notice.epoch
            self._wake.set()

    async def _lead(self, epoch: int, checkpoint: Checkpoint) -> None:
        term = Term(
            epoch=epoch,
            checkpoint=checkpoint,
            store=self._store,
            bus=self._bus,
            clock=self._clock,
            boundary=LeadersBoundary(self._boundary, lambda: self._leadership.is_sure),
            telemetry=self._telemetry,
            regain=self._leadership.regain,
            claims=self._claims,
            is_store_unavailable=lambda: self._leadership.is_store_unavailable,
        )
        self._newest_epoch = 0  # the store has just confirmed that this epoch is the newest
        term.on_change = self._wake.set
        term.on_goals = self.admin.on_goals
        term.on_reload = self.admin.on_term_end
        if self._liveness.is_away:
            term.on_bus_lost()
        self.term = term
        background = TaskOwner("term")
        try:
            await self._bus.start_term(LeaderNotice(controller_id=self._controller_id, epoch=epoch))
            background.start(self._load_events(term), name="recall_events")
            if self._code is not None:
                background.start(self._supply_code(self._code, term), name="supply_code")
            if self._gates is not None:
                background.start(GateSampler(term, self._gates, self._clock).run(), name="external_gates")
            if self._scaling is not None:
                programs = None
                if self._scaling.replicas is not None and self._code is not None:
                    programs = ProgramPolicies(self._scaling.replicas, self._code.read)
                self.autoscaler = Autoscaler(
                    term, self._scaling.loads, self._scaling.policies, self._clock, programs
                )
                background.start(self.autoscaler.run(), name="autoscaler")
            while True:
                raise_if_cancelled()
                self._wake.clear()
                if self._newest_epoch > term.epoch:
                    raise FencedOut(f"epoch {self._newest_epoch} began")
                due_at = await term.run_cycle()
                await self._wait_until(due_at)
        finally:
            self.term = self.autoscaler = None
            self._claims = term.claims
            term.end()
            self.admin.on_term_end()  # callers that wait for a goal must ask the next leader
            await background.close(timeout_s=0.1)
            await self._bus.end_term()

    async def _watch_bus(self) -> None:
        """Probe the bus periodically, so that silence of hosts and proxies counts only while it responds."""
        while True:
            raise_if_cancelled()
            started_at = self._clock.now()
            try:
                await self._bus.round_trip(PING_TIMEOUT_S)
            except BusUnavailable as error:
                if self._liveness.unanswered(started_at):
                    _log.warning("bus_silent", reason=str(error))
                    self.on_bus_lost()
            else:
                await self._on_round_trip(started_at)
            await asyncio.sleep(min(max(0.05, started_at + PING_EVERY_S - self._clock.now()), PING_EVERY_S))

    async def _on_round_trip(self, started_at: float) -> None:
        was_away, term = self._liveness.record_response(self._clock.now()), self.term
        if was_away:
            _log.warning("bus_answers_again")
            self.on_bus_restored()
        if term is not None:
            term.on_round_trip(started_at)
            if was_away:  # every silence counts from now, and all hosts and proxies are asked to report
                await self._bus.announce(LeaderNotice(controller_id=self._controller_id, epoch=term.epoch))

    async def _load_events(self, term: Term) -> None:
        """Load events of earlier terms, in a task of its own: a slow stream must not delay the first plan."""
        term.remember(await self._bus.recent_events(EVENTS_MAX))

    async def _supply_code(self, code: CodeStore, term: Term) -> None:
        """Publish what hosts miss of what is deployed, and now and then delete what nothing names any more."""
        while True:
            try:
                async with asyncio.timeout(TRIM_EVERY_S):
                    await self._code_missed.wait()
            except TimeoutError:
                pass
            self._code_missed.clear()
            missing, self._missing_code = self._missing_code, set()
            try:
                if missing:
                    await code.publish(missing & named_code(term.checkpoint), again=True)
                else:
                    await code.trim(term.checkpoint)
            except StoreUnavailable as error:
                _log.warning("code_not_supplied", error=str(error))
                await asyncio.sleep(IDLE_WAIT_S)

    async def _wait_until(self, due_at: float | None) -> None:
        wait_s = IDLE_WAIT_S
        if due_at is not None:
            wait_s = min(max(due_at - self._clock.now(), CYCLE_GAP_S), IDLE_WAIT_S)
        try:
            async with asyncio.timeout(wait_s):
                await self._wake.wait()
        except TimeoutError:
            return
        await asyncio.sleep(CYCLE_GAP_S)
