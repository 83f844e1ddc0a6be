"""A small world on a virtual clock: one store, one bus, hosts, proxies and controllers, and faults from a seed.

The real code runs here: the controller's `Term`, `Admin` and core, the host's core, the proxies' table of snapshots.
What they touch is a twin. Nothing ever really waits, and the same seed gives the same trace.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

from serve_common.names import BackendTag, GoalId, ReplicaTag
from serve_common.protocol.reports import HostReport, ProxyReport
from serve_controller.shell.control_loop import Term
from tests.simulation.checks import Checks
from tests.simulation.clients import Client
from tests.simulation.crashes import CrashPlan, CrashPoint
from tests.simulation.kernel import START, Kernel
from tests.simulation.sim_bus import BURST_S, SimBus
from tests.simulation.sim_controller import SilentTelemetry, SimController
from tests.simulation.sim_host import SimHost
from tests.simulation.sim_proxy import SimProxy
from tests.simulation.weather import Faults, Weather
from tests.simulation.world_store import WorldStore, Writer
from tests.support.control_loop.pure_host import carried

TRACE_MAX = 20_000


class Violated(Exception):
    """A promise was broken; nothing after it is of interest."""


class World(Kernel):
    """Everything there is."""

    def __init__(
        self,
        *,
        seed: int = 0,
        faults: Faults | None = None,
        crashes: frozenset[CrashPoint] = frozenset(),
        term_class: type[Term] = Term,
        hosts: int = 3,
        proxies: int = 2,
        controllers: int = 1,
        cpus: float = 4.0,
    ) -> None:
        super().__init__()
        self.seed = seed
        self.dice = random.Random(f"world {seed}")
        self.weather = Weather(self, faults or Faults())
        self.crashes = CrashPlan(points=crashes)
        self.term_class = term_class
        self.cpus = cpus
        self.violations: list[str] = []
        self.stale_until = 0.0
        """Until then something may come that was sent before the calm."""
        self.restored_at = 0.0
        """When the store last went back."""
        self.lost_epoch = self.lost_snapshot = 0
        """The highest numbers that were given in what a restored store lost."""
        self.requests: Counter[BackendTag] = Counter()
        """Requests that proxies have brought to backends that take part in rollouts."""
        self.lost_goals: set[GoalId] = set()
        self.unseen_goals: set[GoalId] = set()
        """Those of them of which nothing had come to anybody: nobody can know that their ids were given."""
        self.lost_replicas: set[ReplicaTag] = set()
        self.is_loss_seen = False
        """Somebody beside the controllers has seen a number that the store lost when it went back."""
        self.traced: list[str] = []
        self._ordered_at: dict[str, float] = {}
        self.hosts: list[SimHost] = []
        self.proxies: list[SimProxy] = []
        self.controllers: list[SimController] = []
        self.clients: list[Client] = []
        self.store = WorldStore(self.now, self.after)
        self.bus = SimBus(self)
        self.checks = Checks(self)
        self.store.on_commit = self.checks.on_commit
        for _ in range(hosts):
            self.add_host()
        for _ in range(proxies):
            self.add_proxy()
        for number in range(1, controllers + 1):
            self.controllers.append(SimController(self, f"controller-{number}"))

    def now(self) -> float:
        """See `serve_common.clock.Clock`: the world is its controllers' clock."""
        return self.time

    def add_host(self) -> None:
        """One more host."""
        self.hosts.append(SimHost(self, f"host-{len(self.hosts) + 1}", self.cpus))

    def add_proxy(self) -> None:
        """One more proxy."""
        self.proxies.append(SimProxy(self, f"proxy-{len(self.proxies) + 1}"))

    # -- a store that goes back in time --------------------------------------------------------------------------------

    def _is_store_behind(self) -> bool:
        """Whether anybody outside has seen a number that the store has yet to give."""
        given = self.store.checkpoint.counters
        seen = [snapshot.snapshot_id for _, snapshot in self.bus.bucket.values()]
        seen += [proxy.applied for proxy in self.proxies if proxy.is_up]
        return max(seen, default=0) > given.snapshot or any(
            host.is_up and host.state.generation > given.generation for host in self.hosts
        )

    @property
    def is_restore_unnoticed(self) -> bool:
        """Whether some controller still takes the store for what it was before it went back."""
        return any(x.is_up and x.store.writes > self.store.writes for x in self.controllers)

    def who_knows(self, write: int) -> frozenset[Writer]:
        """The controllers that live and made, or read, the write of this number, before the store goes back to it."""
        return frozenset(
            (x.controller_id, x.lives) for x in self.controllers if x.is_up and x.store.writes >= write
        )

    def was_under_way(self, writer: Writer) -> bool:
        """Whether the write that is made now had begun when the store went back."""
        begun_at = [x.effect_begun_at for x in self.controllers if (x.controller_id, x.lives) == writer]
        return any(at < self.restored_at for at in begun_at)

    def save_store(self) -> Callable[[], None]:
        """Dump the store; what is returned restores it."""
        saved, judged = self.store.save(), self.checks.save()
        self.trace("the store is saved")

        def restore() -> None:
            lost = self.store.checkpoint
            self.trace(f"the store goes back: {lost.counters} was epoch {self.store.epoch}")
            self.lost_epoch = max(self.lost_epoch, self.store.epoch)
            self.lost_snapshot = max(self.lost_snapshot, lost.counters.snapshot)
            self.store.restore(saved)
            self.restored_at = self.time
            goals = {goal_id for goal_id in lost.goals if goal_id not in self.store.checkpoint.goals}
            self.lost_goals |= goals
            for tag, replicas in lost.replicas.items():
                self.lost_replicas |= set(replicas) - set(self.store.checkpoint.get_replicas(tag))
            self.is_loss_seen = self._is_store_behind()
            if not self.is_loss_seen:
                self.unseen_goals |= goals
            self.checks.go_back(judged)
            for client in self.clients:
                client.lose(self.lost_goals)

        return restore

    # -- judging -------------------------------------------------------------------------------------------------------

    def trace(self, text: str) -> None:
        """Remember what happened, for people and for the comparison of two runs."""
        if len(self.traced) < TRACE_MAX:
            self.traced.append(f"{self.time - START:8.3f} {text}")

    def check(self, holds: object, text: str | Callable[[], str]) -> None:
        """Note a broken promise, and stop there."""
        if not holds:
            said = text if isinstance(text, str) else text()
            self.violations.append(f"at {self.time - START:.3f} s: {said}")
            self.trace(f"VIOLATION {said}")
            raise Violated(said)

    # -- messages ------------------------------------------------------------------------------------------------------

    def send(self, deliver: Callable[[], object]) -> None:
        """A message: lost, doubled and late as the faults say, so also out of order."""
        faults = self.weather.faults
        if not self.bus.available or (faults.loss and self.dice.random() < faults.loss):
            return
        copies = 2 if faults.doubling and self.dice.random() < faults.doubling else 1
        for _ in range(copies):
            delay_s = self.dice.uniform(faults.delay_min_s, faults.delay_max_s)
            self.bus.carry(lambda delay_s=delay_s: self.after(delay_s, lambda: self.bus.carry(deliver)))

    def in_order(self, channel: str, deliver: Callable[[], object], *, extra_s: float = 0.0) -> None:
        """A message of an ordered channel: late perhaps, never lost. It takes ``extra_s`` longer than others."""
        faults = self.weather.faults
        at = self.time + extra_s + self.dice.uniform(faults.delay_min_s, faults.delay_max_s)
        at = max(at, self._ordered_at.get(channel, 0.0))
        self._ordered_at[channel] = at
        self.at(at, lambda: self.bus.carry(deliver, is_ordered=True))

    def tell_controllers(self, report: HostReport | ProxyReport) -> None:
        """A report for all controllers."""
        report = carried(report)
        for controller in self.controllers:
            if controller.term is not None:
                self.send(lambda controller=controller: controller.on_report(report))

    def tell_leader(self, leader: SimController, epoch: int) -> None:
        """A controller says to all that it leads."""
        for controller in self.controllers:
            if controller is not leader:
                self.send(lambda controller=controller: controller.on_leader_notice(epoch))
        for host in self.hosts:
            self.send(lambda host=host: host.on_leader_notice(epoch))
        for proxy in self.proxies:
            self.send(lambda proxy=proxy: proxy.report() if proxy.is_up else None)

    # -- the calm ------------------------------------------------------------------------------------------------------

    def calm(self) -> None:
        """Everything works again and nothing more goes wrong."""
        self.trace("calm")
        self.stale_until = max(self.stale_until, self.time + BURST_S + self.weather.faults.delay_max_s)
        self.weather.calm()
        self.store.available, self.store.loses_answers, self.store.late_writes_s = True, False, None
        self.bus.thaw()
        self.store.is_disk_full = False
        self.bus.come()
        for host in self.hosts:
            host.is_isolated = False
            host.release()
            if host.state.is_leaving:
                host.stop()
            host.come_back()
        for proxy in self.proxies:
            if not proxy.is_up or proxy.is_leaving:
                proxy.start()


__all__ = ["Faults", "SilentTelemetry", "World"]
