"""What goes wrong in a world, drawn from its seed before anything happens.

Why drawn beforehand: a fault must not depend on what the code under test does, or a mutant would also change the storm.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from serve_common.names import BackendTag
from serve_common.protocol.reports import HostReport, ProxyReport, ReplicaReport, ReplicaStatus
from serve_controller.core.autoscaling.values import ScalingDecision, ScalingDecisionKind, ScalingState
from serve_controller.shell.leadership import LEASE_TTL_S

if TYPE_CHECKING:
    from serve_controller.shell.control_loop import Term
    from tests.simulation.world import World


@dataclass(kw_only=True)
class Faults:
    """How bad the network and the processes are; all are probabilities or seconds."""

    loss: float = 0.0
    doubling: float = 0.0
    delay_min_s: float = 0.001
    delay_max_s: float = 0.002
    bucket_read_s: float = 0.0
    """How long a leader needs to read the whole bucket."""
    effect_max_s: float = 0.0
    """How long an effect of a controller may take."""
    stall: float = 0.0
    """Chance that a controller stands still just before an effect."""
    stall_max_s: float = 0.0
    has_deaths: bool = False
    """Hosts, proxies or replicas may die or fall silent: what serves may become less."""


class Weather:
    """The faults of one world, until the calm."""

    def __init__(self, world: World, faults: Faults) -> None:
        self.world, self.faults = world, faults
        self.dice = random.Random(f"weather {world.seed}")

    def calm(self) -> None:
        """From now on nothing goes wrong by itself."""
        self.faults = Faults(has_deaths=self.faults.has_deaths)

    def of_effect(self, effect: str) -> tuple[float, float]:
        """How long an effect takes, and how long the process stands still before it."""
        faults = self.faults
        delay_s = self.dice.uniform(0.0005, faults.effect_max_s) if faults.effect_max_s else 0.0
        if faults.stall and self.dice.random() < faults.stall:
            return max(delay_s, 0.001), self.dice.uniform(0.5, faults.stall_max_s)
        return delay_s, 0.0


def draw_faults(dice: random.Random) -> Faults:
    """How bad it is, in general."""
    if dice.random() < 0.2:
        return Faults()
    return Faults(
        loss=dice.choice([0.0, 0.0, 0.05, 0.2]),
        doubling=dice.choice([0.0, 0.2]),
        delay_max_s=dice.choice([0.002, 0.05, 0.5, 2.0]),
        bucket_read_s=dice.choice([0.0, 0.0, 0.5, 2.0]),
        effect_max_s=dice.choice([0.0, 0.01, 0.2]),
        stall=dice.choice([0.0, 0.0, 0.01, 0.03]),
        stall_max_s=dice.choice([2.0, 9.0]),
    )


def brew(world: World, dice: random.Random, until_s: float) -> list[str]:
    """Plan single mishaps within the next ``until_s``; each is over by then. Returns their names."""
    names = []
    for _ in range(dice.choice([0, 1, 2, 3, 5])):
        name = dice.choice(list(MISHAPS))
        begin_s = dice.uniform(0.1, until_s * 0.8)
        MISHAPS[name](world, dice, begin_s, until_s)
        names.append(name)
        if name in DEADLY:
            world.weather.faults.has_deaths = True
    return names


def brew_hang(world: World, dice: random.Random, until_s: float, mishaps: Collection[str]) -> float:
    """Let the bus hang once; returns when the storm may end at the earliest."""
    begin_s, length_s = dice.uniform(0.1, until_s * 0.8), dice.choice(HANGS_S)
    if "store goes back" in mishaps:
        # What was given while nothing came through, and lost with the store, nobody can know of; nor what a leader
        # tells a bus that hangs before it has noticed that it leads no more.
        begin_s = until_s + LEASE_TTL_S
    world.after(begin_s, world.bus.hang)
    world.after(begin_s + length_s, world.bus.thaw)
    return max(until_s, begin_s + length_s)


def brew_forger(world: World, dice: random.Random, mishaps: Collection[str], until_s: float) -> None:
    """Let somebody report in the names of hosts and proxies that live, whatever may do harm."""
    # What a store that went back has lost of whom ids belong to, a new leader cannot know.
    knows_records = "store goes back" not in mishaps
    lies: Lies = {}
    for _ in range(dice.choice([3, 10, 30])):
        seed = dice.random()
        world.after(
            dice.uniform(0.1, until_s),
            lambda seed=seed: _forge(world, random.Random(seed), knows_records, lies),
        )


Lies = dict[str, tuple[float, str]]
"""By the id that somebody reported under: when last, and which life of its holder that was."""


def _forge(world: World, dice: random.Random, knows_records: bool, lies: Lies) -> None:
    lie: HostReport | ProxyReport
    begun_at = world.time + dice.choice([-1_000.0, 0.0, 1_000.0])
    leaving = dice.random() < 0.3
    if dice.random() < 0.5:
        host = dice.choice(world.hosts)
        if not host.is_up or host.state.is_leaving:
            return
        tags = dice.choice([(), tuple(world.store.checkpoint.by_host.get(host.host_id, ()))])
        lie = HostReport(
            host_id=host.host_id,
            incarnation=FORGED,
            sequence=dice.choice([0, 1_000_000]),
            started_at=dice.choice([begun_at, host.born_at]),
            epoch=host.state.goal_epoch,
            generation=host.state.generation + dice.choice([0, 1]),
            resources={"CPU": dice.choice([0.0, host.cpus, 1_000.0])},
            replicas=[
                ReplicaReport(replica_tag=tag, status=dice.choice(list(ReplicaStatus)), config_version=9)
                for tag in tags
            ],
            leaving=leaving,
        )
        life = str(host.lives)
    else:
        proxy = dice.choice(world.proxies)
        if not proxy.is_up or proxy.is_leaving:
            return
        lie = ProxyReport(
            proxy_id=proxy.proxy_id,
            incarnation=FORGED,
            sequence=dice.choice([0, 1_000_000]),
            started_at=dice.choice([begun_at, proxy.born_at]),
            applied_snapshot_id=dice.choice([0, 1_000_000]),
            http_error=dice.choice(["", "forged"]),
            http_error_snapshot_id=dice.choice([0, 1_000_000]),
            leaving=leaving,
        )
        life = str(proxy.lives)
    for controller in world.controllers:
        term = controller.term
        if (
            term is not None
            and _holds(term, lie, life, world.time)
            and (knows_records or _is_heard(term, lie))
        ):
            controller.on_report(lie)
            lies[lie.host_id if isinstance(lie, HostReport) else lie.proxy_id] = world.time, life
    world.after(1.0, lambda: _check_forged(world, lies))


FORGED: Final = "forged"
_HEARD_S: Final = 2.5
"""Less than after what a controller lets somebody else take over."""


def _is_heard(term: Term, lie: HostReport | ProxyReport) -> bool:
    if isinstance(lie, HostReport):
        return lie.host_id in term.observed.hosts
    return lie.proxy_id in term.observed.proxies


def _holds(term: Term, lie: HostReport | ProxyReport, life: str, now: float) -> bool:
    """Whether the one in whose name it is lives, as far as this controller can know."""
    observed, known, record = term.observed, None, None
    if isinstance(lie, HostReport):
        known, record = observed.hosts.get(lie.host_id), term.checkpoint.hosts.get(lie.host_id)
    else:
        known, record = observed.proxies.get(lie.proxy_id), term.checkpoint.proxies.get(lie.proxy_id)
    if known is None:
        is_recorded = record is not None and bool(record.holder)
        return is_recorded and observed.since is not None and now - observed.since < _HEARD_S
    return known.report.incarnation == life and now - known.last_seen_at < _HEARD_S


def _check_forged(world: World, lies: Lies) -> None:
    """No lie is believed, but for one: a controller that stood still hears all that waited, the holder's own
    reports first. If those end with its leaving, the id was free.
    """
    lives = {
        host.host_id: str(host.lives) for host in world.hosts if host.is_up and not host.state.is_leaving
    }
    lives |= {one.proxy_id: str(one.lives) for one in world.proxies if one.is_up and not one.is_leaving}
    for controller in world.controllers:
        if controller.term is None:
            continue
        observed = controller.term.observed
        for name, one in [*observed.hosts.items(), *observed.proxies.items()]:
            if one.report.incarnation != FORGED:
                continue
            lied_at, life = lies[name]
            may_be = lives.get(name) != life and controller.process.stalled_until > lied_at
            world.check(may_be, "a forged report was believed")


def _kill_host(world: World, dice: random.Random, at_s: float, until_s: float) -> None:
    host = dice.choice(world.hosts)
    world.after(at_s, lambda: _stop_host(world, host))
    back_s = min(at_s + dice.choice([0.3, 4.0, 12.0]), until_s)
    world.after(back_s, host.come_back)


def _kill_host_for_good(world: World, dice: random.Random, at_s: float, until_s: float) -> None:
    host = world.hosts[0]
    host.is_gone_for_good = True
    world.after(at_s, lambda: _stop_host(world, host))


def _stop_host(world: World, host: object) -> None:
    host.stop()  # type: ignore[attr-defined]
    world.trace(f"{host.host_id} dies")  # type: ignore[attr-defined]


def _host_leaves(world: World, dice: random.Random, at_s: float, until_s: float) -> None:
    host = dice.choice(world.hosts)
    world.after(at_s, host.leave)
    world.after(min(at_s + 8.0, until_s), host.come_back)


def _isolate_host(world: World, dice: random.Random, at_s: float, until_s: float) -> None:
    host = dice.choice(world.hosts)
    world.after(at_s, lambda: setattr(host, "is_isolated", True))
    world.after(
        min(at_s + dice.choice([2.0, 6.0, 12.0]), until_s), lambda: setattr(host, "is_isolated", False)
    )


def _hang_host(world: World, dice: random.Random, at_s: float, until_s: float) -> None:
    host = dice.choice(world.hosts)
    ways = dice.choice([("is_hung",), ("is_numb",), ("is_hung", "is_numb")])
    for way in ways:
        world.after(at_s, lambda way=way: setattr(host, way, True))
    world.after(min(at_s + dice.choice([2.0, 40.0]), until_s), host.release)


def _kill_replicas(world: World, dice: random.Random, at_s: float, until_s: float) -> None:
    host = dice.choice(world.hosts)
    world.after(at_s, lambda: [host.kill_replica(tag) for tag in host.running()[:1]])


def _sicken_replica(world: World, dice: random.Random, at_s: float, until_s: float) -> None:
    host = dice.choice(world.hosts)
    world.after(at_s, lambda: [host.sicken(tag) for tag in host.running()[:1]])


def _kill_proxy(world: World, dice: random.Random, at_s: float, until_s: float) -> None:
    proxy = dice.choice(world.proxies)
    end = proxy.stop if dice.random() < 0.6 else proxy.leave
    back_s = min(at_s + dice.choice([0.2, 3.0, 7.0]), until_s)
    world.after(at_s, end)
    world.after(back_s, lambda: None if proxy.is_up else proxy.start())


def _new_proxy(world: World, dice: random.Random, at_s: float, until_s: float) -> None:
    world.after(at_s, world.add_proxy)


def _new_host(world: World, dice: random.Random, at_s: float, until_s: float) -> None:
    world.after(at_s, world.add_host)


def _kill_controller(world: World, dice: random.Random, at_s: float, until_s: float) -> None:
    world.after(at_s, dice.choice(world.controllers).crash)


def _stall_controller(world: World, dice: random.Random, at_s: float, until_s: float) -> None:
    controller, seconds = dice.choice(world.controllers), dice.choice([1.0, 6.0, 11.0])
    world.after(at_s, lambda: controller.process.stall(seconds))


def _store_away(world: World, dice: random.Random, at_s: float, until_s: float) -> None:
    way, value, back = dice.choice(
        [("available", False, True), ("loses_answers", True, False), ("late_writes_s", 0.4, None)]
    )
    world.after(at_s, lambda: setattr(world.store, way, value))
    back_s = min(at_s + dice.choice([0.3, 2.0, 7.0]), until_s)
    world.after(back_s, lambda: setattr(world.store, way, back))


def _fill_disk_of_store(world: World, dice: random.Random, at_s: float, until_s: float) -> None:
    world.after(at_s, lambda: setattr(world.store, "is_disk_full", True))
    back_s = min(at_s + dice.choice([0.3, 7.0, 30.0]), until_s)
    world.after(back_s, lambda: setattr(world.store, "is_disk_full", False))


def _bus_away(world: World, dice: random.Random, at_s: float, until_s: float) -> None:
    world.checks.is_silence_possible = True
    world.after(at_s, world.bus.go)
    world.after(min(at_s + dice.choice([0.2, 3.0, 10.0]), until_s), world.bus.come)


def _store_goes_back(world: World, dice: random.Random, at_s: float, until_s: float) -> None:
    back_s, is_away = min(at_s + dice.choice([0.5, 2.0, 5.0, 10.0]), until_s), dice.random() < 0.5
    again_s = min(back_s + dice.choice([0.5, 5.0, 10.0]), until_s) if dice.random() < 0.3 else None

    def save() -> None:
        restore = world.save_store()
        world.after(back_s - at_s, restore)
        if again_s is not None:  # from the same dump, perhaps before everything is as it was
            world.after(again_s - at_s, restore)
        if is_away:  # Postgres is stopped for it
            world.after(max(0.0, back_s - at_s - 0.3), lambda: setattr(world.store, "available", False))
            world.after(back_s - at_s, lambda: setattr(world.store, "available", True))

    world.after(at_s, save)


def _lose_bucket(world: World, dice: random.Random, at_s: float, until_s: float) -> None:
    world.checks.is_bucket_lost = True
    world.after(at_s, world.bus.lose_bucket)


def _litter(world: World, dice: random.Random, at_s: float, until_s: float) -> None:
    world.after(at_s, world.bus.litter)


def move_load(world: World, dice: random.Random, until_s: float) -> None:
    """Every leader's autoscaler is of a new opinion, again and again, within its limits or not."""
    for _ in range(12):
        tag, target = BackendTag(dice.choice(SCALED)), dice.randrange(6)
        decision = ScalingDecision(
            target=target,
            state=ScalingState(),
            verdict=ScalingDecisionKind.UP,
            seen=None,
            wanted=None,
            why="the load moved",
        )

        def scale(tag: BackendTag = tag, decision: ScalingDecision = decision) -> None:
            for controller in world.controllers:
                if controller.term is not None:
                    controller.term.scale({tag: decision})

        world.after(dice.uniform(0.0, until_s), scale)


HANGS_S: Final = (0.5, 1.5, 4.0, 12.0, 25.0)
SCALED: Final = ("default/a", "default/b", "shop/web", "shop/model", "default/x", "default/y")

Mishap = Callable[["World", random.Random, float, float], None]

MISHAPS: dict[str, Mishap] = {
    "host dies": _kill_host,
    "host dies for good": _kill_host_for_good,
    "host leaves": _host_leaves,
    "host is isolated": _isolate_host,
    "host hangs": _hang_host,
    "replica dies": _kill_replicas,
    "replica falls sick": _sicken_replica,
    "proxy dies": _kill_proxy,
    "proxy comes": _new_proxy,
    "host comes": _new_host,
    "controller dies": _kill_controller,
    "controller stands still": _stall_controller,
    "store is away": _store_away,
    "store goes back": _store_goes_back,
    "disk of the store is full": _fill_disk_of_store,
    "bus is away": _bus_away,
    "bucket is lost": _lose_bucket,
    "bucket is littered": _litter,
}
DEADLY = frozenset(
    {
        "host dies",
        "host dies for good",
        "host leaves",
        "host is isolated",
        "host hangs",
        "replica dies",
        "replica falls sick",
    }
)
