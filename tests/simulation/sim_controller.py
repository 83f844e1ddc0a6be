"""A controller process: the real `Term` and `Admin`, led by what `Leadership` and `ControllerService` do with asyncio.

It dies when its boundary says so and is started anew, and it may stand still while time passes for all others.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final

from serve_common.api.commands import Command, CommandReply
from serve_common.errors import FencedOut, ServeError, StoreUnavailable
from serve_common.names import ControllerId
from serve_common.protocol.reports import HostReport, ProxyReport
from serve_controller.core.restored import NO_CLAIMS
from serve_controller.core.rollouts.external import DueGate, get_due_gates, with_response, without_response
from serve_controller.shell.admin import AdminApi
from serve_controller.shell.boundary import LeadersBoundary
from serve_controller.shell.control_loop import Term
from serve_controller.shell.external_gates import TICK_S
from serve_controller.shell.leadership import (
    LEASE_TTL_S,
    PING_EVERY_S,
    PING_TIMEOUT_S,
    RENEW_EVERY_S,
    STANDBY_POLL_S,
    STORE_RETRY_S,
    BusLiveness,
)
from serve_controller.shell.service import CYCLE_GAP_S, IDLE_WAIT_S
from tests.simulation.crashes import Crash, SimBoundary
from tests.simulation.kernel import Process, SimLock, run_now
from tests.simulation.rollout_wishes import gate_response
from tests.simulation.world_store import StoreOf

if TYPE_CHECKING:
    from tests.simulation.world import World

RESTART_S: Final = 1.0
GATE_S: Final = 0.2
"""Seconds that an external gate's answer takes; less than a tick, so that none is asked twice at once."""

Execute = Callable[[Command[Any], bytes, str], Coroutine[Any, Any, CommandReply]]
Answer = Callable[[bytes | ServeError | None], None]
"""Takes the reply, an error, or None when the process died on the way."""


def no_refusal(kind: str, sender: str, error: Exception) -> None:
    """For reports that are all sound, or of a process that began anew before its last life counted as silent."""
    if kind == "identity":
        return
    raise AssertionError(f"the {kind} of {sender} was refused") from error


class SilentTelemetry:
    """Measures nothing."""

    def effect_performed(self, effect: str, seconds: float, error: str | None) -> None: ...

    def plan_made(self, seconds: float) -> None: ...

    def message_refused(self, kind: str, sender: str, error: Exception) -> None:
        no_refusal(kind, sender, error)


class SimController:
    """One controller: stands by, leads, dies, comes again."""

    def __init__(self, world: World, controller_id: str) -> None:
        self.world, self.controller_id = world, ControllerId(controller_id)
        self.process = Process(world)
        self.lives = 0
        self.terms = 0
        self.cycles = 0
        self.is_up = False
        self.term: Term | None = None
        self._start()

    def _start(self) -> None:
        self.lives += 1
        self.is_up = True
        self.store = StoreOf(self.world.store, (self.controller_id, self.lives))
        self.boundary = LeadersBoundary(
            SimBoundary(self.world.crashes, self._effect_delay, self._trace), lambda: self.is_sure
        )
        self.admin = AdminApi(self.controller_id, self.world, self.boundary, self._leading_term)
        self.liveness = BusLiveness(self.world.time)
        if not self.world.bus.available:
            self.liveness.went()
        self._heartbeat_at, self._is_in_doubt = float("-inf"), False
        self.effect_begun_at = 0.0
        """The last one."""
        self._newest_epoch = 0
        self._known_claims = NO_CLAIMS
        self._claims: dict[int, str] = {}
        """What is wrong with the answer to a command, by the identity of its payload; empty when nothing is."""
        self._after(0.0, self._try_to_lead)
        self._after(0.0, self._ping)

    def crash(self) -> None:
        """The process dies; something starts it again."""
        if not self.is_up:
            return
        self.world.trace(f"{self.controller_id} dies")
        self.term, self.is_up = None, False
        self.process.kill()
        self.world.after(RESTART_S, self._start)

    def _after(self, delay_s: float, event: Callable[[], object]) -> None:
        life = self.lives

        def happen() -> None:
            if self.is_up and self.lives == life:
                self.process.when_running(event)

        self.world.after(delay_s, happen)

    def _trace(self, effect: str) -> None:
        self.world.trace(f"{self.controller_id} {effect}")

    def _effect_delay(self, effect: str) -> float:
        self.effect_begun_at = self.world.time
        leads = self.world.store.controller_id == self.controller_id
        self.world.check(
            leads or not self._has_stood_still(),
            f"{self.controller_id} stood still until another one led, and goes on with {effect}",
        )
        delay_s, stall_s = self.world.weather.of_effect(effect)
        if stall_s > 0:
            self.world.trace(f"{self.controller_id} stands still for {stall_s:.1f} s")
            self.process.stall(stall_s)
        return delay_s

    # -- leading -------------------------------------------------------------------------------------------------------

    @property
    def is_sure(self) -> bool:
        """See `Leadership.is_sure`."""
        return not self._is_in_doubt and not self._has_stood_still()

    def _has_stood_still(self) -> bool:
        return self.world.time - self._heartbeat_at >= LEASE_TTL_S

    def _leading_term(self) -> Term | None:
        return self.term if self.is_sure else None

    def _try_to_lead(self) -> None:
        try:
            epoch = run_now(self.store.acquire_leadership(self.controller_id, LEASE_TTL_S))
            checkpoint = None if epoch is None else run_now(self.store.load())
        except StoreUnavailable:
            self._after(STORE_RETRY_S, self._try_to_lead)
            return
        if epoch is None:
            self._after(STANDBY_POLL_S, self._try_to_lead)
            return
        assert checkpoint is not None
        self._know()
        self.terms += 1
        self.world.trace(f"{self.controller_id} leads with {epoch}")
        self.world.checks.on_epoch(epoch, (self.controller_id, self.lives))
        term = self.world.term_class(
            epoch=epoch,
            checkpoint=checkpoint,
            store=self.store,
            bus=self.world.bus,
            clock=self.world,
            boundary=self.boundary,
            telemetry=SilentTelemetry(),
            regain=self._regain,
            claims=self._known_claims,
        )
        term._turn = SimLock()  # type: ignore[assignment]
        term.execute = self._watched(term.execute)  # type: ignore[method-assign]
        term.on_change = self._wake
        self.term = term
        self._newest_epoch = 0
        self._wake_at: float | None = None
        self._cycle_number: int | None = None
        self._is_woken = False
        if self.liveness.is_away:
            term.on_bus_lost()
        self._after(RENEW_EVERY_S, lambda: self._renew(term))
        self._after(TICK_S, lambda: self._sample_gates(term))
        self._begin_term(term)

    def _begin_term(self, term: Term) -> None:
        if self.term is not term:
            return
        if not self.world.bus.available:
            self._after(0.5, lambda: self._begin_term(term))
            return
        self.world.bus.open_term_watch(self)
        self.world.tell_leader(self, term.epoch)
        self.is_offered = True
        self._schedule(0.0)

    def _sample_gates(self, term: Term) -> None:
        """See `GateSampler`."""
        if self.term is not term:
            return
        for due in get_due_gates(term.checkpoint, term.observed.gates, self.world.time):
            self._after(GATE_S, lambda due=due: self._end_sample(term, due))  # type: ignore[misc]
        self._after(TICK_S, lambda: self._sample_gates(term))

    def _end_sample(self, term: Term, due: DueGate) -> None:
        known, now = term.observed.gates.get(due.key), self.world.time
        response = gate_response(due.request, now)
        sample = (
            without_response(due, known, "away", now)
            if response is None
            else with_response(due, known, response, now)
        )
        if self.term is term:
            term.on_gate_sample(due.key, sample)

    def _watched(self, execute: Execute) -> Execute:
        async def watched(command: Command[Any], request: bytes, who: str = "") -> CommandReply:
            reply = await execute(command, request, who)
            self._claims[id(request)] = self.world.checks.reference.on_executed(command, reply)
            return reply

        return watched

    async def _regain(self, above: int) -> int:
        epoch = await self.store.acquire_leadership(self.controller_id, LEASE_TTL_S, above)
        if epoch is None:
            raise FencedOut("another controller leads")
        self._know()
        self.world.checks.on_epoch(epoch, (self.controller_id, self.lives))
        return epoch

    def _know(self) -> None:
        self._heartbeat_at, self._is_in_doubt = self.world.time, False

    def _renew(self, term: Term) -> None:
        if self.term is not term:
            return
        self._is_in_doubt = self._is_in_doubt or self._has_stood_still()
        self._heartbeat_at = self.world.time
        # Who stood still goes on before the store has answered.
        self._after(0.005 if self._is_in_doubt else 0.0, lambda: self._ask_to_renew(term))

    def _ask_to_renew(self, term: Term) -> None:
        if self.term is not term:
            return
        try:
            run_now(self.store.renew_leadership(self.controller_id, term.epoch, LEASE_TTL_S))
        except FencedOut:
            self._lose(term)
            return
        except StoreUnavailable:
            pass
        else:
            self._know()
        self._after(RENEW_EVERY_S if self.is_sure else STORE_RETRY_S, lambda: self._renew(term))

    def _lose(self, term: Term) -> None:
        if self.term is not term:
            return
        self.world.trace(f"{self.controller_id} leads no more")
        self.term = None
        self._known_claims = term.claims
        if self._cycle_number is not None:
            self.process.cancel(self._cycle_number)
        term.end()
        self._after(0.0, self._try_to_lead)

    # -- the loop ------------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        self._is_woken = True
        if self._cycle_number is None and self._wake_at is not None:
            self._schedule(CYCLE_GAP_S)

    def _schedule(self, delay_s: float) -> None:
        at, term = self.world.time + delay_s, self.term
        if self._wake_at is not None and self._wake_at <= at:
            return
        self._wake_at = at

        def begin() -> None:
            if self.term is term and self._wake_at == at and self._cycle_number is None:
                self._cycle()

        self._after(delay_s, begin)

    def _cycle(self) -> None:
        term = self.term
        assert term is not None
        self._is_woken = False
        self._cycle_number = -1
        if self._newest_epoch > term.epoch:
            self._lose(term)
            return

        def ended(check_again_at: float | None, error: BaseException | None) -> None:
            if self.term is not term:
                return
            self._cycle_number = None
            match error:
                case None:
                    self._cycled(term, check_again_at)
                case Crash():
                    self.crash()
                case FencedOut():
                    self._lose(term)
                case _:
                    raise error

        number = self.process.spawn(term.run_cycle(), ended)
        if self._cycle_number == -1:
            self._cycle_number = number

    def _cycled(self, term: Term, check_again_at: float | None) -> None:
        self.cycles += 1
        self.world.checks.on_cycle(self, term)
        self._wake_at = None
        if self._is_woken:
            self._schedule(CYCLE_GAP_S)
        else:
            wait_s = IDLE_WAIT_S if check_again_at is None else check_again_at - self.world.time
            self._schedule(min(max(wait_s, CYCLE_GAP_S), IDLE_WAIT_S))

    # -- what comes over the bus ---------------------------------------------------------------------------------------

    def on_report(self, report: HostReport | ProxyReport) -> None:
        """A report came."""
        self.process.when_running(lambda: self.term.on_report(report) if self.term is not None else None)

    def on_leader_notice(self, epoch: int) -> None:
        """Another controller says that it leads."""

        def hear() -> None:
            if self.term is not None and epoch > self.term.epoch:
                self._newest_epoch = epoch
                self._wake()

        self.process.when_running(hear)

    def notice_bus(self) -> None:
        """The connection to the bus broke, or is there again."""

        def notice() -> None:
            if self.world.bus.available:
                self._bus_came()
            else:
                self._bus_went()

        if self.is_up:
            self.process.when_running(notice)

    def _bus_went(self) -> None:
        self.liveness.went()
        if self.term is not None:
            self.term.on_bus_lost()

    def _bus_came(self) -> None:
        self.liveness.came(self.world.time)
        if self.term is not None:
            self.term.on_bus_restored()

    def _ping(self) -> None:
        """See `ControllerService._watch_bus`."""
        begun_at, life, over = self.world.time, self.lives, []

        def end(take: Callable[[], None]) -> None:
            if self.is_up and self.lives == life and not over:
                over.append(True)
                take()
                self._after(max(0.05, begun_at + PING_EVERY_S - self.world.time), self._ping)

        def unanswered() -> None:
            if self.liveness.unanswered(begun_at):
                self._bus_went()

        def answered() -> None:
            was_away = self.liveness.record_response(self.world.time)
            if was_away:
                self._bus_came()
            if self.term is not None:
                self.term.on_round_trip(begun_at)
                if was_away:
                    self.world.tell_leader(self, self.term.epoch)

        self.world.bus.round_trip(lambda: self.process.when_running(lambda: end(answered)))
        self._after(PING_TIMEOUT_S, lambda: end(unanswered))

    def call(self, verb: str, payload: bytes, answer: Answer) -> None:
        """A command comes; ``answer`` is called when there is one to give."""
        life = self.lives

        def ended(reply: bytes | None, error: BaseException | None) -> None:
            lie = self._claims.pop(id(payload), "")
            match error:
                case None:
                    assert reply is not None
                    self.world.check(not lie, lie)
                    answer(reply)
                case ServeError():
                    answer(error)
                case Crash():
                    self.crash()
                case _:
                    raise error

        def begin() -> None:
            if self.is_up and self.lives == life:
                self.process.spawn(self.admin.handle(verb, payload, "client"), ended)

        self.process.when_running(begin)
