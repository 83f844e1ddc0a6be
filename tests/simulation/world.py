"""A small world on a virtual clock: one store, one bus, hosts, proxies and controllers, and faults from a seed.

The controller's real shell (`Term`) and core run here; only what they touch is a twin. Nothing ever really waits:
twins never suspend, so a coroutine is run to its end with one ``send(None)``, and the same seed gives the same trace.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from serve_common.errors import BusUnavailable, CommandRefused, FencedOut, TransientError
from serve_common.names import ControllerId, HostId, ProxyId
from serve_common.wires.commands import AnyCommand as Command
from serve_common.wires.commands import CommandReply
from serve_common.wires.host import HostGoal, HostReport, ReplicaReport, ReplicaStatus
from serve_common.wires.proxy import ProxyReport
from serve_common.wires.snapshots import BackendSnapshot, EndpointSnapshot, Snapshot
from serve_common.wires.views import EventView
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.shell.leadership import LEASE_TTL_S
from serve_controller.shell.term import Term
from tests.simulation.crashes import Crash, CrashingBoundary
from tests.simulation.twins.memory_store import MemoryStore

T = TypeVar("T")
RESTART_S = 1.0


def run_now(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    coroutine.close()
    raise AssertionError("a twin suspended")


@dataclass(kw_only=True)
class Faults:
    """How bad the network is; all are probabilities or seconds."""

    loss: float = 0.0
    doubling: float = 0.0
    delay_min_s: float = 0.001
    delay_max_s: float = 0.002


class SilentTelemetry:
    def effect_performed(self, effect: str, seconds: float, error: str | None) -> None: ...

    def plan_made(self, seconds: float) -> None: ...


class SimHost:
    """A host by its contract: whole goals in, whole reports out. A replica whose code says so fails to start."""

    START_S = 0.4
    DRAIN_S = 0.2

    def __init__(self, world: World, host_id: str, cpus: float) -> None:
        self.world, self.host_id, self.cpus = world, HostId(host_id), cpus
        self.lives = 0
        self.is_up = False
        self.start()

    def start(self) -> None:
        self.lives += 1
        self.is_up = True
        self.ever_ran: set[str] = set()
        """In this life; what ran and ended must never be started again under the same tag."""
        self.number = (0, 0)
        self.replicas: dict[str, ReplicaReport] = {}
        self.wanted_config: dict[str, int] = {}
        self.ended: set[str] = set()
        self.sequence = 0
        self.born_at = self.world.time
        life = self.lives
        self.world.every(1.0, self.report, while_=lambda: self.is_up and self.lives == life)

    def stop(self) -> None:
        """The process is killed, and its replicas with it."""
        self.is_up = False
        self.replicas = {}

    def hear_goal(self, goal: HostGoal) -> None:
        if not self.is_up or (goal.epoch, goal.generation) < self.number:
            return
        self.number = (goal.epoch, goal.generation)
        wanted = {g.replica_tag: g for g in goal.replicas}
        for tag in list(self.replicas):
            if tag not in wanted:
                self._drain(tag)
        for tag, replica in wanted.items():
            if tag in self.ended:
                continue
            if tag not in self.replicas:
                self._start(
                    tag, replica.config_version, fails=replica.replica_config.import_path == "bad:Code"
                )
            elif self.wanted_config[tag] < replica.config_version:
                self.wanted_config[tag] = replica.config_version
                self.world.after(0.05, lambda tag=tag: self._configured(tag), self._alive(tag))
        self.report()

    def _start(self, tag: str, config_version: int, *, fails: bool) -> None:
        self.world.check(tag not in self.ever_ran, f"{tag} ran before and was started again")
        self.replicas[tag] = ReplicaReport(replica_tag=tag, status=ReplicaStatus.STARTING)
        self.wanted_config[tag] = config_version
        end = self._failed if fails else self._running
        self.world.after(self.START_S, lambda: end(tag), self._alive(tag))

    def _alive(self, tag: str) -> Callable[[], bool]:
        life = self.lives
        return lambda: self.is_up and self.lives == life and tag in self.replicas

    def _running(self, tag: str) -> None:
        if self.replicas[tag].status is ReplicaStatus.STARTING:
            self.ever_ran.add(tag)
            self.replicas[tag] = ReplicaReport(
                replica_tag=tag, status=ReplicaStatus.RUNNING, config_version=self.wanted_config[tag], pid=1
            )
            self.report()

    def _failed(self, tag: str) -> None:
        self.ended.add(tag)
        self.replicas[tag] = ReplicaReport(
            replica_tag=tag, status=ReplicaStatus.FAILED, error="RuntimeError: no"
        )
        self.report()

    def _configured(self, tag: str) -> None:
        if self.replicas[tag].status is ReplicaStatus.RUNNING:
            version = self.wanted_config[tag]
            self.replicas[tag] = msgspec.structs.replace(self.replicas[tag], config_version=version)
            self.report()

    def kill_replica(self, tag: str) -> None:
        """Its process dies by itself."""
        if tag in self.replicas:
            self.ended.add(tag)
            self.replicas[tag] = ReplicaReport(replica_tag=tag, status=ReplicaStatus.DEAD, error="killed")
            self.report()

    def _drain(self, tag: str) -> None:
        status = self.replicas[tag].status
        if status is ReplicaStatus.DRAINING:
            return
        if status in (ReplicaStatus.FAILED, ReplicaStatus.DEAD):
            del self.replicas[tag]
            return
        self.replicas[tag] = msgspec.structs.replace(self.replicas[tag], status=ReplicaStatus.DRAINING)
        self.ended.add(tag)
        self.world.after(
            self.DRAIN_S, lambda: (self.replicas.pop(tag, None), self.report()), self._alive(tag)
        )

    def report(self) -> None:
        if not self.is_up:
            return
        self.sequence += 1
        report = HostReport(
            host_id=self.host_id,
            incarnation=str(self.lives),
            sequence=self.sequence,
            started_at=self.born_at,
            epoch=self.number[0],
            generation=self.number[1],
            resources={"CPU": self.cpus},
            replicas=list(self.replicas.values()),
        )
        self.world.send(lambda: self.world.tell_controllers(report))

    def running(self) -> set[str]:
        return {tag for tag, r in self.replicas.items() if r.status is ReplicaStatus.RUNNING}


class SimProxy:
    """A proxy by its contract: takes newer snapshots only, says what it applied."""

    def __init__(self, world: World, proxy_id: str) -> None:
        self.world, self.proxy_id = world, ProxyId(proxy_id)
        self.snapshots: dict[str, Snapshot] = {}
        self.applied = 0
        self.sequence = 0
        world.every(1.0, self.report, while_=lambda: True)

    def hear(self, key: str, snapshot: Snapshot) -> None:
        known = self.snapshots.get(key)
        if known is not None and snapshot.snapshot_id < known.snapshot_id:
            return
        self.snapshots[key] = snapshot
        self.applied = max(self.applied, snapshot.snapshot_id)
        self.report()

    def report(self) -> None:
        self.sequence += 1
        report = ProxyReport(
            proxy_id=self.proxy_id, sequence=self.sequence, started_at=0.0, applied_snapshot_id=self.applied
        )
        self.world.send(lambda: self.world.tell_controllers(report))

    def routed(self, backend_tag: str) -> set[str]:
        """The replicas it would send new requests to, provided that the endpoint exists."""
        contents = [s.content for s in self.snapshots.values()]
        has_endpoint = any(isinstance(c, EndpointSnapshot) and backend_tag in c.traffic for c in contents)
        for content in contents:
            if isinstance(content, BackendSnapshot) and content.backend_tag == backend_tag and has_endpoint:
                return set(content.replicas)
        return set()


class SimBus:
    """The bus as the controller sees it: `HostLink` and `Publisher`."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.available = True
        self.bucket: dict[str, tuple[int, Snapshot]] = {}
        self.revision = 0

    def _reach(self) -> None:
        if not self.available:
            raise BusUnavailable("the bus is down")

    async def send_goal(self, goal: HostGoal) -> None:
        self._reach()
        for replica in goal.replicas:
            self.world.check(
                ("replica", replica.replica_tag) in self.world.store.rows,
                f"{replica.replica_tag} was sent to a host before it was recorded",
            )
        for host in self.world.hosts:
            if host.host_id == goal.host_id:
                self.world.send(lambda host=host: host.hear_goal(goal))

    async def publish(self, key: str, snapshot: Snapshot) -> int:
        self._reach()
        self.world.check(
            ("snapshot", key) in self.world.store.rows, f"{key} was published before it was recorded"
        )
        self.revision += 1
        self.bucket[key] = (self.revision, snapshot)
        for proxy in self.world.proxies:
            # The bucket's consumer is ordered and re-opened when it falls silent: late perhaps, never lost.
            self.world.deliver_in_order(proxy, key, snapshot)
        return self.revision

    def publish_event(self, subject_kind: str, subject: str, payload: bytes) -> None:
        """Nothing depends on events."""

    async def recent_events(self, limit: int) -> list[EventView]:
        return []

    def go(self) -> None:
        """The bus is away; its clients notice."""
        self.available = False
        self._tell(lambda term: term.bus_went())

    def come(self) -> None:
        """The bus is back."""
        self.available = True
        self._tell(lambda term: term.bus_came())

    def _tell(self, tell: Callable[[Term], None]) -> None:
        for controller in self.world.controllers:
            if controller.term is not None:
                tell(controller.term)

    async def retract(self, key: str) -> None:
        self._reach()
        self.bucket.pop(key, None)


class SimController:
    """One controller process: leads when it can, dies when the boundary says so, and is started anew."""

    def __init__(self, world: World, controller_id: str) -> None:
        self.world, self.controller_id = world, ControllerId(controller_id)
        self.term: Term | None = None
        self.is_up = True
        self.wake_at: float | None = None
        world.after(0.0, self.try_to_lead)

    def try_to_lead(self) -> None:
        if not self.is_up or self.term is not None:
            return
        store = self.world.store
        try:
            epoch = run_now(store.acquire_leadership(self.controller_id, LEASE_TTL_S))
            checkpoint = None if epoch is None else run_now(store.load())
        except TransientError:
            epoch = None
        if epoch is None:
            self.world.after(0.5, self.try_to_lead)
            return
        assert checkpoint is not None
        term = self.world.term_class(
            epoch=epoch,
            checkpoint=checkpoint,
            store=store,
            host_link=self.world.bus,
            publisher=self.world.bus,
            events=self.world.bus,
            clock=self.world,
            boundary=self.world.boundary,
            telemetry=SilentTelemetry(),
            regain=self._regain,
        )
        term.on_change = lambda: self._wake(0.002)
        self.term = term
        if not self.world.bus.available:
            term.bus_went()
        entries = {key: (revision, s.snapshot_id) for key, (revision, s) in self.world.bus.bucket.items()}
        term.hear_bucket(entries, whole=True)
        self.world.every(LEASE_TTL_S / 3, self._renew, while_=lambda: self.term is term)
        self._wake(0.0)

    async def _regain(self) -> int:
        epoch = await self.world.store.acquire_leadership(self.controller_id, LEASE_TTL_S)
        if epoch is None:
            raise FencedOut("another controller leads")
        return epoch

    def _renew(self) -> None:
        assert self.term is not None
        try:
            run_now(self.world.store.renew_leadership(self.controller_id, self.term.epoch, LEASE_TTL_S))
        except TransientError:
            return
        except FencedOut:
            self._lose()

    def _lose(self) -> None:
        self.term = None
        self.world.after(0.5, self.try_to_lead)

    def crash(self) -> None:
        self.term, self.is_up = None, False
        self.world.after(RESTART_S, self._restart)

    def _restart(self) -> None:
        self.is_up = True
        self.try_to_lead()

    def _wake(self, delay_s: float) -> None:
        at = self.world.time + delay_s
        if self.wake_at is None or at < self.wake_at:
            self.wake_at = at
            self.world.at(at, self._cycle)

    def _cycle(self) -> None:
        if self.wake_at is None or self.world.time < self.wake_at:
            return
        self.wake_at = None
        term = self.term
        if term is None:
            return
        try:
            look_again_at = run_now(term.run_cycle())
        except Crash:
            self.crash()
            return
        except FencedOut:
            self._lose()
            return
        self.world.after_cycle()
        self._wake(min(max((look_again_at or self.world.time + 5.0) - self.world.time, 0.002), 5.0))

    def execute(self, command: Command) -> CommandReply | None:
        """The reply, or None when the caller got none (and so knows nothing)."""
        if self.term is None:
            return None
        try:
            reply = run_now(self.term.execute(command, msgspec.json.encode(command)))
            return run_now(self.world.boundary.cross("reply", lambda: _returned(reply)))
        except Crash:
            self.crash()
        except (TransientError, FencedOut):
            pass
        return None


async def _returned(value: T) -> T:
    return value


@dataclass
class World:
    """Everything there is."""

    seed: int = 0
    faults: Faults = field(default_factory=Faults)
    boundary: CrashingBoundary = field(default_factory=CrashingBoundary)
    term_class: type[Term] = Term
    _time: float = 1_000_000.0
    is_stormy: bool = True
    """Deaths happen only before the calm."""

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._count = 0
        self._ordered_at: dict[int, float] = {}
        self.violations: list[str] = []
        self.store = MemoryStore(lambda: self._time)
        self.bus = SimBus(self)
        self.hosts: list[SimHost] = []
        self.proxies: list[SimProxy] = []
        self.controllers: list[SimController] = []
        self.after_cycle_checks: list[Callable[[], None]] = []

    @property
    def time(self) -> float:
        """Virtual seconds since 1970."""
        return self._time

    def now(self) -> float:
        """See `serve_common.ports.Clock`: the world is its controllers' clock."""
        return self._time

    def check(self, holds: bool, text: str) -> None:
        if not holds:
            self.violations.append(f"at {self._time - 1_000_000:.3f} s: {text}")

    def after_cycle(self) -> None:
        for check in self.after_cycle_checks:
            check()

    def at(self, time: float, event: Callable[[], object]) -> None:
        self._count += 1
        heapq.heappush(self._events, (float(time), self._count, event))

    def after(
        self, delay_s: float, event: Callable[[], object], if_: Callable[[], bool] = lambda: True
    ) -> None:
        self.at(self._time + delay_s, lambda: event() if if_() else None)

    def every(self, period_s: float, event: Callable[[], object], *, while_: Callable[[], bool]) -> None:
        def again() -> None:
            if while_():
                event()
                self.after(period_s, again)

        self.after(0.0, again)

    def send(self, deliver: Callable[[], object]) -> None:
        """A message: lost, doubled and late as the faults say."""
        if not self.bus.available or self.random.random() < self.faults.loss:
            return
        copies = 2 if self.random.random() < self.faults.doubling else 1
        for _ in range(copies):
            self.after(self.random.uniform(self.faults.delay_min_s, self.faults.delay_max_s), deliver)

    def deliver_in_order(self, proxy: SimProxy, key: str, snapshot: Snapshot) -> None:
        delay_s = self.random.uniform(self.faults.delay_min_s, self.faults.delay_max_s)
        at = max(self._time + delay_s, self._ordered_at.get(id(proxy), 0.0))
        self._ordered_at[id(proxy)] = at
        self.at(at, lambda: proxy.hear(key, snapshot))

    def tell_controllers(self, report: HostReport | ProxyReport) -> None:
        for controller in self.controllers:
            if controller.term is not None:
                controller.term.hear(report)

    def run_until(self, done: Callable[[], bool], limit_s: float) -> bool:
        """Let events happen until ``done`` or until so many virtual seconds have passed."""
        end = self._time + limit_s
        while not done():
            if not self._events or self._events[0][0] > end:
                self._time = end
                return done()
            time, _, event = heapq.heappop(self._events)
            self._time = max(self._time, time)
            event()
        return True

    def bucket_id(self, key: str) -> int:
        """The snapshot id that the bucket holds under a key; 0 for none."""
        return self.bus.bucket[key][1].snapshot_id if key in self.bus.bucket else 0

    def is_unsettled(self, checkpoint: Checkpoint) -> bool:
        """Whether something recorded has not reached the bucket or a proxy yet."""
        newest = max((r.snapshot.snapshot_id for r in checkpoint.snapshots.values()), default=0)
        behind = any(self.bucket_id(key) != r.snapshot.snapshot_id for key, r in checkpoint.snapshots.items())
        return behind or any(proxy.applied < newest for proxy in self.proxies)

    def execute(self, command: Command) -> CommandReply | None:
        """Send a command to whoever leads; raises `CommandRefused`."""
        for controller in self.controllers:
            if controller.term is not None:
                return controller.execute(command)
        return None


__all__ = ["CommandRefused", "Faults", "SimController", "SimHost", "SimProxy", "World", "run_now"]
