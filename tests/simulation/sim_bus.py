"""The bus: what controllers do on it, and the bucket that proxies and leaders watch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from serve_common.api.views import EventView
from serve_common.errors import BusUnavailable
from serve_common.names import BackendTag
from serve_common.protocol.reports import HostGoal
from serve_common.protocol.snapshots import BackendSnapshot, Snapshot
from serve_common.protocol.subjects import backend_key
from tests.simulation.kernel import sleep
from tests.support.control_loop.pure_host import carried

if TYPE_CHECKING:
    from tests.simulation.sim_controller import SimController
    from tests.simulation.sim_proxy import SimProxy
    from tests.simulation.world import World


M = TypeVar("M")
T = TypeVar("T")

ACKNOWLEDGED_WITHIN_S: Final = 2.0
BURST_S: Final = 0.2
LITTER: Final = BackendTag("gone/long-ago")


class SimBus:
    """One NATS."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.available = True
        self.bucket: dict[str, tuple[int, Snapshot]] = {}
        """Revision and value by key."""
        self.revision = 0
        self.is_hanging = False
        """Nothing comes through, and nobody is told: no connection breaks."""
        self._active: list[tuple[bool, Callable[[], object]]] = []
        """What came meanwhile, and whether it is of an ordered channel."""
        self._connection = 0
        """Counts how often it came back: what was under way on an older one is lost."""

    def _reach(self) -> None:
        if not self.available:
            raise BusUnavailable("the bus is down")

    def _read(self, message: M) -> M:
        try:
            return carried(message)
        except msgspec.ValidationError as error:
            self.world.check(False, f"nobody can read {message}: {error}")
            raise

    async def send_goal(self, goal: HostGoal) -> None:
        """See `ControllerBus.send_goal`."""
        self._reach()
        self.world.checks.on_goal_sent(goal)
        heard = self._read(goal)
        for host in self.world.hosts:
            if host.host_id == goal.host_id:
                self.world.send(lambda host=host: host.hear_goal(heard))

    async def publish(self, key: str, snapshot: Snapshot) -> int:
        """See `ControllerBus.publish`."""
        self._reach()
        self.world.checks.on_publish(key, snapshot)
        read = self._read(snapshot)

        def put() -> int:
            self.revision += 1
            self.bucket[key] = (self.revision, read)
            self._tell_watchers(key)
            return self.revision

        return await self._acknowledged(put)

    async def retract(self, key: str, revision: int) -> None:
        """See `ControllerBus.retract`."""
        self._reach()
        self.world.check(
            key not in self.world.store.checkpoint.snapshots, f"{key} was retracted and is recorded"
        )

        def delete() -> bool:
            held, _ = self.bucket.get(key, (0, None))
            if revision not in (0, held):
                return False
            self.revision += 1
            self.bucket.pop(key, None)
            self._tell_watchers(key)
            return True

        if not await self._acknowledged(delete):
            raise BusUnavailable(f"{key} has another revision than {revision}")

    async def _acknowledged(self, write: Callable[[], T]) -> T:
        """What a write to the bucket came to. While the bus hangs it waits there, and may be made late."""
        done: list[T] = []
        self.carry(lambda: done.append(write()), is_ordered=True)
        give_up_at = self.world.time + ACKNOWLEDGED_WITHIN_S
        while not done:
            if self.world.time >= give_up_at:
                raise BusUnavailable("no acknowledgement from the bucket")
            await sleep(0.05)
        return done[0]

    def round_trip(self, answer: Callable[[], object]) -> None:
        """Ask the bus for a sign of life; while it is away there is none."""
        if not self.available:
            return
        connection, faults, dice = self._connection, self.world.weather.faults, self.world.dice
        delay_s = dice.uniform(faults.delay_min_s, faults.delay_max_s)

        def come() -> None:
            if self._connection == connection:
                answer()

        self.carry(lambda: self.world.after(delay_s, lambda: self.carry(come)))

    def publish_event(self, subject_kind: str, subject: str, payload: bytes) -> None:
        """Nothing depends on events."""

    async def recent_events(self, limit: int) -> list[EventView]:
        """See `ControllerBus.recent_events`."""
        return []

    # -- watching ------------------------------------------------------------------------------------------------------

    def _tell_watchers(self, key: str) -> None:
        # A watch is ordered, and re-opened when it falls silent: late perhaps, never with a gap.
        revision, entry = self.revision, self.bucket.get(key)
        snapshot = None if entry is None else entry[1]
        for proxy in self.world.proxies:
            life = proxy.lives

            def tell_proxy(proxy: SimProxy = proxy, life: int = life) -> None:
                if proxy.lives == life:
                    proxy.hear({key: snapshot}, whole=False)

            self._in_order(f"{proxy.proxy_id} {life}", tell_proxy)
        snapshot_id = None if snapshot is None else snapshot.snapshot_id
        for controller in self.world.controllers:
            term = controller.term
            if term is None:
                continue

            def tell_term(controller: SimController = controller, term: object = term) -> None:
                if controller.term is term and controller.term is not None:
                    controller.term.on_bucket_entries({key: (revision, snapshot_id)}, whole=False)

            self._in_order(
                f"{controller.controller_id} {controller.terms}",
                lambda controller=controller, tell=tell_term: controller.process.when_running(tell),
            )

    def open_watch(self, proxy: SimProxy) -> None:
        """Hand a proxy everything, then every change."""
        if not self.available:
            return  # it opens the watch once the bus is there: see `come`
        life = proxy.lives
        if self.is_hanging:
            self.carry(lambda: self.open_watch(proxy) if proxy.lives == life else None)
            return
        whole = {key: snapshot for key, (_, snapshot) in self.bucket.items()}

        def tell() -> None:
            if proxy.lives == life:
                proxy.hear(whole, whole=True)

        self._in_order(f"{proxy.proxy_id} {life}", tell)

    def open_term_watch(self, controller: SimController) -> None:
        """Hand a leader everything, then every change."""
        if not self.available:
            return
        term = controller.term
        if self.is_hanging:
            self.carry(lambda: self.open_term_watch(controller) if controller.term is term else None)
            return
        entries: dict[str, tuple[int, int | None]] = {
            key: (revision, snapshot.snapshot_id) for key, (revision, snapshot) in self.bucket.items()
        }

        def tell() -> None:
            if term is not None and controller.term is term:
                term.on_bucket_entries(entries, whole=True)

        self._in_order(
            f"{controller.controller_id} {controller.terms}",
            lambda: controller.process.when_running(tell),
            extra_s=self.world.weather.faults.bucket_read_s,
        )

    def _in_order(self, watcher: str, tell: Callable[[], object], *, extra_s: float = 0.0) -> None:
        connection = self._connection
        self.world.in_order(
            watcher, lambda: tell() if self._connection == connection else None, extra_s=extra_s
        )

    # -- hanging -------------------------------------------------------------------------------------------------------

    def carry(self, event: Callable[[], object], *, is_ordered: bool = False) -> None:
        """Let ``event`` happen now, or when the bus goes on."""
        if self.is_hanging:
            self._active.append((is_ordered, event))
        else:
            event()

    def hang(self) -> None:
        """As after SIGSTOP: what is sent and what is under way stays where it is."""
        if self.available:
            self.is_hanging = True
            self.world.trace("the bus hangs")

    def thaw(self) -> None:
        """It goes on: everything that was held comes in a burst, and not in the order in which it was sent."""
        if not self.is_hanging:
            return
        self.is_hanging = False
        self.world.checks.led_since = self.world.time
        if self.world.checks.is_bucket_lost:
            self.world.checks.bucket_lost_at = self.world.time
        held, self._active = self._active, []
        self.world.trace(f"the bus goes on with {len(held)} messages")
        for is_ordered, event in held:
            self.world.after(0.0 if is_ordered else self.world.dice.uniform(0.0, BURST_S), event)

    # -- failing -------------------------------------------------------------------------------------------------------

    def go(self) -> None:
        """The bus is away; its clients notice, and what it held is lost."""
        self.available = self.is_hanging = False
        self._active.clear()
        self._connection += 1
        for controller in self.world.controllers:
            controller.notice_bus()

    def come(self) -> None:
        """The bus is back; watches are opened anew, and everybody reports."""
        if self.available:
            return
        self.available = True
        self.world.checks.led_since = self.world.time
        if self.world.checks.is_bucket_lost:
            self.world.checks.bucket_lost_at = self.world.time
        for controller in self.world.controllers:
            controller.notice_bus()
            self.open_term_watch(controller)
        for proxy in self.world.proxies:
            if proxy.is_up:
                self.open_watch(proxy)
                proxy.report()
        for host in self.world.hosts:
            if host.is_up:
                host.report()

    def litter(self) -> None:
        """Something is in the bucket that no checkpoint knows."""
        content = BackendSnapshot(
            backend_tag=LITTER, replicas=[], draining=[], max_concurrent_queries=1, max_queued_requests=1
        )
        self.revision += 1
        key = backend_key(LITTER)
        self.bucket[key] = (self.revision, Snapshot(snapshot_id=0, epoch=0, content=content))
        self._tell_watchers(key)

    def lose_bucket(self) -> None:
        """The bucket is gone, as when NATS lost its disk; revisions begin anew."""
        self.world.checks.bucket_lost_at = self.world.time
        self.bucket.clear()
        self.revision = 0
        for controller in self.world.controllers:
            self.open_term_watch(controller)
        for proxy in self.world.proxies:
            if proxy.is_up:
                self.open_watch(proxy)
