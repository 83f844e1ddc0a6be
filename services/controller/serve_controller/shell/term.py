"""One controller's term of leadership: decide → record → reply, and reconcile → record → perform.

Why one object for both: there is one state-changing operation at a time, and both kinds need the same guard around
*read the checkpoint, decide, record, take the new checkpoint*. Everything here is dropped when the term ends; the next
leader begins from what was recorded.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

import structlog

from serve_common.errors import BusUnavailable, FencedOut, LimitReached, StoreUnavailable
from serve_common.ports import Clock
from serve_common.wires.host import HostReport
from serve_common.wires.proxy import ProxyReport
from serve_controller.core.checkpoint import Changes, Checkpoint
from serve_controller.core.decide import Command, CommandReply, decide
from serve_controller.core.observed import (
    ObservedState,
    forget_silent,
    observe_break,
    observe_bucket,
    observe_host,
    observe_proxy,
    observe_sent,
)
from serve_controller.core.reconcile import (
    Action,
    Plan,
    PublishSnapshot,
    RetractSnapshot,
    SendHostGoal,
    reconcile,
)
from serve_controller.ports import HistoryEntry, HostLink, Publisher, Store
from serve_controller.shell.boundary import Boundary, Telemetry

_log = structlog.get_logger()
T = TypeVar("T")

INBOX_MAX = 50_000
"""Reports that wait to be folded in; beyond it the oldest are dropped, and the next reports say it again."""
STORE_RETRY_S = 0.5
BUS_RETRY_S = 0.5


class Term:
    """What a leader knows and does from the moment it leads."""

    def __init__(
        self,
        *,
        epoch: int,
        checkpoint: Checkpoint,
        store: Store,
        host_link: HostLink,
        publisher: Publisher,
        clock: Clock,
        boundary: Boundary,
        telemetry: Telemetry,
        regain: Callable[[], Awaitable[int]],
    ) -> None:
        """``checkpoint`` was loaded after leadership of ``epoch`` was gained; ``regain`` begins a new epoch."""
        self.epoch = epoch
        self.checkpoint = checkpoint
        self.observed = ObservedState(since=clock.now())
        self.is_store_available = True
        self.on_change: Callable[[], None] = lambda: None
        """Called when a plan should be made soon."""
        self.on_recorded: Callable[[], None] = lambda: None
        """Called when the checkpoint or what was heard changed, for those who wait for a goal."""
        self._store = store
        self._host_link = host_link
        self._publisher = publisher
        self._clock = clock
        self._boundary = boundary
        self._telemetry = telemetry
        self._regain = regain
        self._inbox: deque[tuple[float, HostReport | ProxyReport]] = deque(maxlen=INBOX_MAX)
        self._bucket: dict[str, tuple[int, int]] | None = None
        """Revision and snapshot id of each key."""
        self._turn = asyncio.Lock()
        self._is_checkpoint_certain = True
        self._is_over = False

    def end(self) -> None:
        """The term is over: a command that still waits for its turn is refused, and no new epoch is begun for it."""
        self._is_over = True

    def hear(self, report: HostReport | ProxyReport) -> None:
        """Take in a report; it is folded in by the next cycle."""
        self._inbox.append((self._clock.now(), report))
        self.on_change()

    def bus_went(self) -> None:
        """The bus is away: from now on silence says nothing about anybody."""
        self.observed = observe_break(self.observed, None)
        self.on_change()

    def bus_came(self) -> None:
        """The bus is back: from now on silence counts again."""
        self.observed = observe_break(self.observed, self._clock.now())
        self.on_change()

    def hear_bucket(self, entries: Mapping[str, tuple[int, int | None]], *, whole: bool) -> None:
        """Take in what the bucket holds: revision and snapshot id by key (None: the key is gone).

        ``whole`` says that ``entries`` is all of it; otherwise entries that are older than what is known (the echo of
        this leader's own writes) change nothing.
        """
        if whole:
            self._bucket = {}
        if self._bucket is None:
            return
        for key, (revision, snapshot_id) in entries.items():
            if not whole and revision <= self._bucket.get(key, (0, 0))[0]:
                continue
            if snapshot_id is None:
                self._bucket.pop(key, None)
            else:
                self._bucket[key] = (revision, snapshot_id)
        self.on_change()

    async def execute(self, command: Command, request: bytes) -> CommandReply:
        """Decide a command, record it, and only then return the reply.

        ``request`` is the command as it was sent, for the audit log. Raises a `CommandRefused` (nothing changed),
        `StoreUnavailable` (it may have been made: the caller tries again) or `FencedOut`.
        """
        async with self._turn:
            await self._make_certain()
            now = self._clock.now()
            accepted = decide(self.checkpoint, command, now)
            if accepted.changes:
                entry = HistoryEntry(
                    at=now,
                    verb=_verb(command),
                    subject=accepted.subject,
                    goal_id=accepted.goal_id,
                    request=request.decode("utf-8", "replace"),
                )
                after = self.checkpoint.applied(accepted.changes)
                await self._record("record_command", accepted.changes, after, [entry])
        self.on_change()
        return accepted.reply

    async def run_cycle(self) -> float | None:
        """Make one plan, record it, perform it. Returns when to look again at the latest, or None.

        Raises `FencedOut` when another controller leads; everything transient is logged, and tried again later.
        """
        try:
            async with self._turn:
                await self._make_certain()
                plan = self._plan()
                if plan.changes:
                    await self._record("record_plan", plan.changes, plan.checkpoint, [])
        except StoreUnavailable as error:
            _log.warning("plan_not_recorded", error=str(error))
            return self._clock.now() + STORE_RETRY_S
        try:
            for action in plan.actions:
                try:
                    await self._perform(action)
                except LimitReached as error:
                    # Trying again cannot help this one, and it must not hold up the others.
                    _log.error("action_impossible", action=type(action).__name__, error=str(error))
        except BusUnavailable as error:
            _log.warning("plan_not_performed", error=str(error))
            return self._clock.now() + BUS_RETRY_S
        return plan.look_again_at

    def _plan(self) -> Plan:
        now = self._clock.now()
        while self._inbox:
            heard_at, report = self._inbox.popleft()
            match report:
                case HostReport():
                    self.observed = observe_host(self.observed, report, heard_at)
                case ProxyReport():
                    self.observed = observe_proxy(self.observed, report, heard_at)
        bucket = None if self._bucket is None else {key: ids[1] for key, ids in self._bucket.items()}
        self.observed = forget_silent(observe_bucket(self.observed, bucket), now)
        plan = reconcile(self.checkpoint, self.observed, self.epoch, now)
        self._telemetry.plan_made(self._clock.now() - now)
        for fault in plan.faults:
            _log.error("not_reconciled", about=fault.about, error=fault.error)
        return plan

    async def _record(
        self, effect: str, changes: Changes, after: Checkpoint, history: list[HistoryEntry]
    ) -> None:
        """Make changes durable, then visible. When it is not known whether they are, read what is before going on."""
        self._is_checkpoint_certain = False
        await self._boundary.cross(
            effect, lambda: self._tried(self._store.record(self.epoch, changes, history))
        )
        self.checkpoint = after
        self._is_checkpoint_certain = True
        self.on_recorded()

    async def _make_certain(self) -> None:
        if self._is_over:
            raise FencedOut(f"the term of epoch {self.epoch} is over")
        if not self._is_checkpoint_certain:
            # A write whose answer was lost may still be under way: a new epoch makes it too late for good.
            self.epoch = await self._tried(self._regain())
            self.checkpoint = await self._tried(self._store.load())
            self._is_checkpoint_certain = True

    async def _tried(self, call: Awaitable[T]) -> T:
        try:
            result = await call
        except StoreUnavailable:
            self.is_store_available = False
            raise
        self.is_store_available = True
        return result

    async def _perform(self, action: Action) -> None:
        match action:
            case PublishSnapshot():
                revision = await self._boundary.cross(
                    "publish_snapshot", lambda: self._publisher.publish(action.key, action.snapshot)
                )
                self.hear_bucket({action.key: (revision, action.snapshot.snapshot_id)}, whole=False)
            case RetractSnapshot():
                await self._boundary.cross("retract_snapshot", lambda: self._publisher.retract(action.key))
                if self._bucket is not None:
                    self._bucket.pop(action.key, None)
            case SendHostGoal():
                goal = action.goal
                await self._boundary.cross("send_host_goal", lambda: self._host_link.send_goal(goal))
                number = (goal.epoch, goal.generation)
                self.observed = observe_sent(self.observed, goal.host_id, number, self._clock.now())


def _verb(command: Command) -> str:
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in type(command).__name__).lstrip("_")
