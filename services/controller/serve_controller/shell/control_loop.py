"""One term of leadership: decide → record → reply, and reconcile → record → perform → publish."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Reversible, Sequence
from contextlib import ExitStack
from typing import Any, Final, TypeVar

import msgspec
import structlog

from serve_common.api.commands import Command, CommandReply, UploadCode
from serve_common.api.views import EventView, GoalStatus, HistoryView
from serve_common.clock import Clock
from serve_common.errors import BusUnavailable, FencedOut, LimitReached, NotLeading, StoreUnavailable
from serve_common.names import BackendTag, GoalId
from serve_common.protocol.reports import HostReport, ProxyReport
from serve_common.telemetry.request_traces import Cause, Value, current_cause, note, operation
from serve_controller.core.audit import audit_values
from serve_controller.core.autoscaling.values import ScalingDecision, ScalingStatus
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.commands import decide
from serve_controller.core.commands.changes import Accepted
from serve_controller.core.dirty_set import EVERYTHING, DirtySet, dirty_by_changes
from serve_controller.core.events import audit_event, get_events
from serve_controller.core.objects import Goal, ObjectChanges
from serve_controller.core.observed import GateKey, GateSample, ObservedState
from serve_controller.core.reconcile import (
    Action,
    PublishSnapshot,
    ReconcilePlan,
    RetractSnapshot,
    SendHostGoal,
    reconcile,
)
from serve_controller.core.restored import (
    EPOCH_MARGIN,
    NO_CLAIMS,
    Claims,
    claims_complete_at,
    get_leader_claims,
    overtake,
    restored_event,
)
from serve_controller.core.scaling import scaling_events
from serve_controller.ports import ControllerBus, HistoryEntry, Store
from serve_controller.shell.boundary import Boundary, Telemetry
from serve_controller.shell.observations import EventLog, TermObservations
from serve_controller.shell.rollout_traces import trace_rollouts

_log = structlog.get_logger()

BUS_RETRY_S: Final = 0.5
STORE_RETRY_S: Final = 0.5

T = TypeVar("T")


class Term:
    """State and behavior of a leader during one term.

    Commands and plans share this object because there is one state-changing operation at a time, and both need the same
    lock around *read the checkpoint, decide, record, take the new checkpoint*. Everything here is dropped when the term
    ends; the next leader starts from what was recorded.
    """

    def __init__(
        self,
        *,
        epoch: int,
        checkpoint: Checkpoint,
        store: Store,
        bus: ControllerBus,
        clock: Clock,
        boundary: Boundary,
        telemetry: Telemetry,
        regain: Callable[[int], Awaitable[int]],
        claims: Claims = NO_CLAIMS,
        is_store_unavailable: Callable[[], bool] = lambda: False,
    ) -> None:
        """``checkpoint`` was loaded after leadership of ``epoch`` was gained.

        ``regain`` begins a new epoch above a number; ``claims`` are those of this process's former terms.
        ``is_store_unavailable`` returns whether the last request to the store outside of this term failed.
        """
        self._is_store_away = is_store_unavailable
        self.epoch = epoch
        self.checkpoint = checkpoint
        self.is_store_available = True
        self.on_change: Callable[[], None] = lambda: None
        """Called to request a plan soon."""
        self.on_goals: Callable[[Collection[GoalId]], None] = lambda _: None
        """Called with goals that were recorded, to wake the callers that wait for them."""
        self.on_reload: Callable[[], None] = lambda: None
        """Called when the checkpoint was reloaded: any goal may have ended."""
        self._observations = TermObservations(clock.now(), telemetry.message_refused, claims)
        self._observations.on_round_trip(clock.now(), clock.now())
        self._store = store
        self._bus = bus
        self._event_log = EventLog(bus)
        self._clock = clock
        self._boundary = boundary
        self._telemetry = telemetry
        self._regain = regain
        self.goals_ended: Counter[GoalStatus] = Counter()
        """Goals that ended in this term, by status."""
        self.autoscaling: dict[BackendTag, ScalingStatus] = {}
        """The autoscaler's latest result for each backend that it follows; maintained by `shell.autoscaler`."""
        self._scalings: dict[BackendTag, ScalingDecision] = {}
        """Decisions of the autoscaler that no plan has applied yet."""
        self._cause: Cause | None = None
        """The span of the first command since the last plan, if it is traced."""
        self._turn = asyncio.Lock()
        self._is_checkpoint_certain = True
        self._is_behind = False
        """The store lacks numbers that other processes have seen, and the counters are yet to be raised."""
        self._is_over = False

    @property
    def claims(self) -> Claims:
        """The highest numbers that this term gave or received."""
        return self._observations.claims.with_those(get_leader_claims(self.checkpoint, self.epoch))

    @property
    def observed(self) -> ObservedState:
        """The state as last observed."""
        return self._observations.observed

    @property
    def events(self) -> Reversible[EventView]:
        """The latest events, the newest last."""
        return self._event_log.events

    def end(self) -> None:
        """End the term: a command that still waits for its turn is refused and begins no new epoch."""
        self._is_over = True

    # -- observations --------------------------------------------------------------------------------------------------

    def on_report(self, report: HostReport | ProxyReport) -> None:
        """Queue a report; the next cycle folds it in."""
        self._observations.on_report(report, self._clock.now())
        self.on_change()

    def on_bus_lost(self) -> None:
        """The bus is unavailable: from now on silence means nothing."""
        self._observations.on_bus_break(None)
        self.on_change()

    def on_bus_restored(self) -> None:
        """The bus is available again: silence counts from now on."""
        self._observations.on_bus_break(self._clock.now())
        self.on_change()

    def on_round_trip(self, started_at: float) -> None:
        """The round trip over the bus that began at ``started_at`` ended: silence counts up to that time."""
        if self._observations.on_round_trip(started_at, self._clock.now()):
            self.on_change()

    def on_bucket_entries(self, entries: Mapping[str, tuple[int, int | None]], *, whole: bool) -> None:
        """Fold in entries of the bucket, or with ``whole`` its whole content."""
        self._observations.on_bucket_entries(entries, whole=whole)
        self.on_change()

    def on_gate_sample(self, key: GateKey, sample: GateSample) -> None:
        """An external gate of a rollout was asked: the next plan goes by what came of it."""
        self._observations.on_gate_sample(self.checkpoint, key, sample)
        self.on_change()

    def scale(self, decisions: Mapping[BackendTag, ScalingDecision]) -> None:
        """Apply the autoscaler's decisions with the next plan; they replace its former ones for the same backends."""
        for tag, decision in decisions.items():
            backend = self.checkpoint.backends.get(tag)
            if backend is not None and backend.num_wanted != decision.target:
                self._scalings[tag] = decision
                self.on_change()
            else:
                self._scalings.pop(tag, None)

    # -- commands and plans --------------------------------------------------------------------------------------------

    async def execute(self, command: Command[Any], request: bytes, principal: str = "") -> CommandReply:
        """Decide a command, record it, and only then return the reply.

        ``request`` is the encoded command and ``principal`` its sender, for the audit log. Raises a `CommandRefused`
        (nothing changed), `StoreUnavailable` (it may have been recorded: the caller retries) or `FencedOut`.
        """
        if self._is_store_away():
            # Otherwise each would wait for its own attempt to time out, and the last of a queue for minutes.
            raise StoreUnavailable("Postgres does not answer; nothing was changed")
        async with self._turn:
            await self._make_certain()
            if self.observed.bucket is None or self._has_claims_ahead():
                # An id given now might belong to a lost goal, and the caller would wait for that one.
                raise NotLeading("this controller has yet to hear what was done before it led; try again")
            now = self._clock.now()
            accepted = decide(self.checkpoint, command, now)
            if accepted.changes:
                before, after = self.checkpoint, self.checkpoint.applied(accepted.changes)
                entry = self._history_entry(command, accepted, request, principal, now)
                audit_events = [
                    audit_event(
                        now,
                        verb=entry.verb,
                        subject=accepted.subject,
                        principal=principal,
                        goal_id=accepted.goal_id,
                    )
                ]
                note("muster.subject", accepted.subject)
                await self._record("record_command", accepted.changes, after, [entry], audit_events)
                self._cause = self._cause or current_cause()
                self._observations.dirty_sets.add(dirty_by_changes(before, after, accepted.changes))
        self.on_change()
        return accepted.reply

    def _history_entry(
        self, command: Command[Any], accepted: Accepted, request: bytes, principal: str, now: float
    ) -> HistoryEntry:
        old, new = audit_values(self.checkpoint, accepted.changes)
        return HistoryEntry(
            at=now,
            principal=principal,
            verb=command.verb,
            subject=accepted.subject,
            goal_id=accepted.goal_id,
            # Always JSON, or the database would refuse the whole change.
            request=request.decode("utf-8", "replace") if request.strip() else "{}",
            old=None if old is None else msgspec.json.encode(old).decode(),
            new=None if new is None else msgspec.json.encode(new).decode(),
        )

    async def note_upload(self, command: UploadCode, request: bytes, principal: str) -> None:
        """Record an upload in the audit log. Raises as `execute` does."""
        async with self._turn:
            await self._make_certain()
            entry = HistoryEntry(
                at=self._clock.now(),
                principal=principal,
                verb=command.verb,
                subject=command.digest,
                goal_id=None,
                request=request.decode(),
            )
            await self._record("record_command", ObjectChanges(), self.checkpoint, [entry], [])

    async def read_history(self, limit: int, subject: str | None, before: int | None) -> list[HistoryView]:
        """A page of the audit log, the newest first. Raises `StoreUnavailable`."""
        return await self._track_store(self._store.read_history(limit, subject, before))

    async def run_cycle(self) -> float | None:
        """Make one plan, record it, perform it. Returns when the next one is due at the latest, or None.

        Raises `FencedOut` when another controller leads; transient errors are logged and retried later.
        """
        with ExitStack() as traced:
            return await self._run_cycle(traced)

    async def _run_cycle(self, traced: ExitStack) -> float | None:
        scalings: dict[BackendTag, ScalingDecision] = {}
        try:
            async with self._turn:
                await self._make_certain()
                wait_until = await self._overtake()
                if wait_until is not None:
                    return wait_until if wait_until < math.inf else None
                scalings, self._scalings = self._scalings, {}
                started_at = self._clock.now()
                plan = self._plan(scalings)
                if plan.changes or plan.actions:  # others are not worth a span
                    cause, self._cause = self._cause, None
                    seconds = self._clock.now() - started_at
                    traced.enter_context(
                        operation("reconcile", _counts(plan, self.epoch), after=cause, seconds_ago=seconds)
                    )
                if plan.changes:
                    scaled = scaling_events(self.checkpoint, plan.checkpoint, scalings, self._clock.now())
                    await self._record("record_plan", plan.changes, plan.checkpoint, [], scaled)
                    self.on_change()
        except StoreUnavailable as error:
            self._scalings = {**scalings, **self._scalings}
            self._observations.dirty_sets.add(EVERYTHING)
            _log.warning("plan_not_recorded", error=str(error))
            return self._clock.now() + STORE_RETRY_S
        self._observations.dirty_sets.add(plan.dirty_set)
        self._observations.due(plan.due)
        if plan.changes or plan.dirty_set.goals:
            self._event_log.publish_progress(self.checkpoint, self.observed, self._clock.now())
        return await self._perform_all(plan.actions)

    def _plan(self, scalings: Mapping[BackendTag, ScalingDecision]) -> ReconcilePlan:
        now = self._clock.now()
        dirty_set = self._observations.fold(self.checkpoint, now)
        conflicts = self._observations.pop_conflicts(now)
        if conflicts:
            _log.warning("identity_conflict", about=[f"{event.kind} {event.subject}" for event in conflicts])
            self.notify(conflicts)
        numbers = {tag: decision.target for tag, decision in scalings.items()}
        plan = reconcile(self.checkpoint, self.observed, self.epoch, now, dirty_set, scalings=numbers)
        self._telemetry.plan_made(self._clock.now() - now)
        for fault in plan.faults:
            _log.error("not_reconciled", about=fault.about, error=fault.error)
        return plan

    async def _record(
        self,
        effect: str,
        changes: ObjectChanges,
        after: Checkpoint,
        history: list[HistoryEntry],
        first_events: list[EventView],
    ) -> None:
        """Make changes durable, then visible. If the outcome is unknown, the checkpoint is reloaded before the next."""
        before = self.checkpoint
        self._is_checkpoint_certain = False
        await self._boundary.cross(
            effect, lambda: self._track_store(self._store.record(self.epoch, changes, history))
        )
        self.checkpoint = after
        self._is_checkpoint_certain = True
        trace_rollouts(before, changes)
        self.notify([*first_events, *get_events(before, after, changes, self._clock.now())])
        goals = [value for value in changes.puts if isinstance(value, Goal)]
        self.goals_ended.update(goal.status for goal in goals if goal.status is not GoalStatus.PENDING)
        self.on_goals([goal.goal_id for goal in goals])

    async def _perform_all(self, actions: Sequence[Action]) -> float | None:
        """Perform a plan's actions in order. Returns when the next plan is due at the latest, or None.

        What they stand for is recorded. One that fails is no loss: it is checked again, and the next plan repeats it.
        """
        for number, action in enumerate(actions):
            try:
                await self._perform(action)
            except LimitReached as error:
                # A retry cannot succeed, and this action must not block the others.
                _log.error("action_impossible", action=type(action).__name__, error=str(error))
            except BusUnavailable as error:
                _log.warning("plan_not_performed", error=str(error))
                self._observations.dirty_sets.add(_dirty_set_of_actions(actions[number:]))
                return self._clock.now() + BUS_RETRY_S
        return self._observations.next_at()

    async def _perform(self, action: Action) -> None:
        match action:
            case PublishSnapshot():
                revision = await self._boundary.cross(
                    "publish_snapshot", lambda: self._bus.publish(action.key, action.snapshot)
                )
                self._observations.on_bucket_entries(
                    {action.key: (revision, action.snapshot.snapshot_id)}, whole=False
                )
                self.on_change()
            case RetractSnapshot():
                revision = self._observations.get_revision(action.key)
                await self._boundary.cross(
                    "retract_snapshot", lambda: self._bus.retract(action.key, revision)
                )
                self._observations.retracted(action.key)
            case SendHostGoal():
                goal = action.goal
                await self._boundary.cross("send_host_goal", lambda: self._bus.send_goal(goal))
                self._observations.sent(goal.host_id, (goal.epoch, goal.generation), self._clock.now())

    async def _make_certain(self) -> None:
        if self._is_over:
            raise FencedOut(f"the term of epoch {self.epoch} is over")
        if not self._is_checkpoint_certain:
            # A write whose response was lost may still be in progress: a new epoch fences it.
            await self._start_epoch(above=0)

    async def _start_epoch(self, *, above: int) -> None:
        self._is_checkpoint_certain = False
        self._observations.claims = (
            self.claims
        )  # the store may have been restored to a state before some of them
        self.epoch = await self._track_store(self._regain(above))
        self.checkpoint = await self._track_store(self._store.load())
        self._is_checkpoint_certain = True
        self._observations.dirty_sets.add(EVERYTHING)
        self.on_reload()

    # -- a store that was restored to an earlier state -----------------------------------------------------------------

    def _has_claims_ahead(self) -> bool:
        """Whether any process has reported numbers that this leader has not given yet."""
        self._observations.issued = get_leader_claims(self.checkpoint, self.epoch)
        self._observations.take_in(self.checkpoint)
        return self._observations.claims.are_ahead_of(self._observations.issued)

    async def _overtake(self) -> float | None:
        """Raise the counters above all claims. Returns until when to wait before any plan, or None.

        A plan made before the bucket is known, or while other processes have seen numbers that are not given yet, would
        give some of them again.
        """
        has_claims_ahead = self._has_claims_ahead()
        if self.observed.bucket is None:
            return math.inf
        if not has_claims_ahead:
            self._is_behind = False
            return None
        if not self._is_behind:
            # A leader that lost its lease unnoticed receives such numbers too; the store detects that.
            await self._start_epoch(above=0)
            if not self._has_claims_ahead():
                return None
            self._is_behind = True
            _log.warning(
                "store_is_behind",
                issued=str(self._observations.issued),
                claims=str(self._observations.claims),
            )
        now = self._clock.now()
        over_at = claims_complete_at(self.checkpoint, self.observed, now)
        if over_at is None or now < over_at:
            return over_at or math.inf
        await self._start_epoch(above=self._observations.claims.epoch + EPOCH_MARGIN)
        if self._has_claims_ahead():
            draft = overtake(self.checkpoint, self.observed, self._observations.claims, self.epoch, now)
            event = restored_event(draft, now)
            await self._record("record_plan", draft.changes(), draft.checkpoint(), [], [event])
            _log.error("store_was_restored", epoch=self.epoch, reason=event.message)
        self._is_behind = False
        return None

    async def _track_store(self, call: Awaitable[T]) -> T:
        try:
            result = await call
        except StoreUnavailable:
            self.is_store_available = False
            raise
        self.is_store_available = True
        return result

    # -- events --------------------------------------------------------------------------------------------------------

    def notify(self, events: Sequence[EventView]) -> None:
        """Publish events that follow from no recorded change."""
        self._event_log.notify(events, self.checkpoint, self.observed)

    def remember(self, events: Sequence[EventView]) -> None:
        """Prepend events of earlier terms, the oldest first."""
        self._event_log.remember(events)


def _dirty_set_of_actions(actions: Sequence[Action]) -> DirtySet:
    """What the next plan must reconcile because these actions were not performed."""
    return DirtySet(
        hosts=frozenset(a.goal.host_id for a in actions if isinstance(a, SendHostGoal)),
        keys=frozenset(a.key for a in actions if not isinstance(a, SendHostGoal)),
    )


def _counts(plan: ReconcilePlan, epoch: int) -> dict[str, Value]:
    """Attributes of the span of ``plan``."""
    actions = plan.actions
    return {
        "muster.epoch": epoch,
        "muster.changes": len(plan.changes.puts) + len(plan.changes.deletes),
        "muster.snapshots": sum(isinstance(action, PublishSnapshot | RetractSnapshot) for action in actions),
        "muster.host_goals": sum(isinstance(action, SendHostGoal) for action in actions),
        "muster.faults": len(plan.faults),
    }
