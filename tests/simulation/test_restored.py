"""A store that is restored to a state of 20 changes ago: who serves is not lost, and one truth is everywhere."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import msgspec
import pytest

from serve_common.api import commands as c
from serve_common.errors import NotLeading
from serve_common.names import BackendTag
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.restored import ADOPTED_CONFIG_VERSION
from serve_controller.shell.leadership import LEASE_TTL_S
from tests.simulation.calm import check_converged, why_not_calm
from tests.simulation.clients import Client, Step
from tests.simulation.runs import SETTLE_S
from tests.simulation.scenario import application, deploy
from tests.simulation.world import Violated, World

BEFORE = [
    Step(deploy("a", "v1", num=2, request_id="r1")),
    Step(application("v1", "web", "model", request_id="r2")),
    Step(c.CreateEndpoint(endpoint="e", traffic={"a": 1.0}, route="/e")),
]
LOST = [
    Step(deploy("a", "v2", num=3, request_id="r3", config=1)),
    Step(deploy("b", "v1", num=1, request_id="r4")),
    Step(application("v2", "web", "cache", request_id="r5")),
    Step(c.SetTraffic(endpoint="e", weights={"b": 1.0})),
    Step(c.SetHttpOptions(options={"request_timeout_s": 5.0})),
    Step(deploy("a", "v3", num=1, request_id="r6", config=2)),
    Step(c.DeleteEndpoint(endpoint="e")),
    *(
        Step(c.UpdateBackendConfig(backend_tag="a", config={"num_replicas": 1 + number % 3}))
        for number in range(10)
    ),
    Step(deploy("a", "v1", num=2, request_id="r7", config=3)),
    Step(c.DeleteDeployment(name="b")),
    Step(deploy("d", "v1", num=1, request_id="r8")),
]
RECONFIGURED = [[Step(deploy("a", "v1", num=2, request_id=f"c{n}", config=10 + n))] for n in range(3)]
"""The replicas of the dump are given a configuration that is lost, and serve on."""
ALWAYS = (BackendTag("default/a"), BackendTag("shop/web"))
"""What serves before and after."""
LIVE, STOPPED, BUCKET_LOST, TO_NOTHING = (
    "while it leads",
    "with a stop and start",
    "and the bucket lost",
    "to nothing",
)
CONVERGED_WITHIN_S = 30.0
LOOK_S = 0.01
NEWS_S = 0.05
"""So long may news of a new replica take while the old one leaves; what is refused waits for it."""


def _do(world: World, steps: list[Step]) -> None:
    client = Client(world, f"client-{len(world.clients)}", steps)
    world.clients.append(client)
    world.run_until(lambda: client.is_done, 300.0)
    assert client.is_done
    world.run_until(lambda: False, SETTLE_S)


class Watch:
    """Notes who had no replica that a proxy sends to and that takes what is sent, for longer than a request waits."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.served_at: dict[tuple[str, str], float] = {}
        self.unserved: set[str] = set()
        self._look()

    def _look(self) -> None:
        now, serving = self.world.time, {tag for host in self.world.hosts for tag in host.serving}
        for proxy in self.world.proxies:
            for tag in ALWAYS:
                if proxy.routed(tag) & serving:
                    self.served_at[proxy.proxy_id, tag] = now
                elif now - self.served_at.get((proxy.proxy_id, tag), 0.0) > NEWS_S:
                    self.unserved.add(f"{proxy.proxy_id} reaches no {tag} at {now}")
        self.world.after(LOOK_S, self._look)


def _restored(world: World, restore: Callable[[], None], how: str) -> None:
    if how != LIVE:
        world.controllers[0].crash()
    if how in (BUCKET_LOST, TO_NOTHING):
        world.bus.lose_bucket()
    restore()


def _converge(world: World) -> None:
    world.run_until(lambda: not why_not_calm(world), CONVERGED_WITHIN_S)
    world.check(not why_not_calm(world), lambda: f"not converged: {why_not_calm(world)}")
    world.run_until(lambda: False, SETTLE_S)
    check_converged(world)


@pytest.mark.parametrize("how", [LIVE, STOPPED, BUCKET_LOST, TO_NOTHING])
def test_a_restored_store_is_made_true_without_an_interruption(how: str) -> None:
    world = World(hosts=3)
    nothing = world.save_store()
    _do(world, BEFORE)
    restore = nothing if how == TO_NOTHING else world.save_store()
    _do(world, LOST)
    _restored(world, restore, how)
    watch = None if how == TO_NOTHING else Watch(world)
    with contextlib.suppress(Violated):
        _converge(world)
        _do(world, LOST)
        _converge(world)
    _assert_held(world, watch)


@pytest.mark.parametrize("how", [LIVE, STOPPED, BUCKET_LOST])
def test_one_dump_is_restored_again_and_again(how: str) -> None:
    """What was lost first and what was lost then must never be taken for one another."""
    world = World(hosts=3)
    _do(world, BEFORE)
    restore, watch = world.save_store(), Watch(world)
    with contextlib.suppress(Violated):
        for lost in (*RECONFIGURED, LOST, LOST, LOST):
            _do(world, lost)
            _restored(world, restore, how)
            _converge(world)
    _assert_held(world, watch)


@pytest.mark.parametrize("how", [LIVE, STOPPED])
@pytest.mark.parametrize("after_s", [0.02, 1.0, 4.0, 4.9, 5.2, 5.5, 6.0])
def test_a_store_is_restored_again_before_everything_is_as_it_was(how: str, after_s: float) -> None:
    world = World(hosts=3)
    _do(world, BEFORE)
    restore = world.save_store()
    _do(world, LOST)
    watch = Watch(world)
    with contextlib.suppress(Violated):
        for _ in range(3):
            _restored(world, restore, how)
            world.run_until(lambda: False, after_s)
        _converge(world)
    _assert_held(world, watch)


def _config_versions(checkpoint: Checkpoint) -> set[int]:
    return {v.config_version for b in checkpoint.backends.values() for v in b.versions()}


@pytest.mark.parametrize("after_s", [0.0, 0.2, 0.4])
def test_a_dump_that_is_made_while_the_store_is_made_true_is_as_good_as_any(after_s: float) -> None:
    """What was adopted then is in it, under the number that is below all others."""
    world = World(hosts=3)
    _do(world, BEFORE)
    restore = world.save_store()
    _do(world, LOST)
    watch = Watch(world)
    with contextlib.suppress(Violated):
        restore()
        world.run_until(lambda: ADOPTED_CONFIG_VERSION in _config_versions(world.store.checkpoint), 30.0)
        world.run_until(lambda: False, after_s)
        restore = world.save_store()
        assert ADOPTED_CONFIG_VERSION in _config_versions(world.store.checkpoint)
        _converge(world)
        for _ in range(2):
            _do(world, LOST)
            restore()
            _converge(world)
    _assert_held(world, watch)


def _assert_held(world: World, watch: Watch | None) -> None:
    assert world.violations == [], "\n".join(world.traced[-80:])
    assert world.store.checkpoint.counters.restored_epoch > 0, "the counters were raised"
    assert watch is None or sorted(watch.unserved) == []


def test_a_leader_whose_epoch_a_restored_store_gave_to_another_writes_nothing() -> None:
    """The store lost the very term, and no change: but for who leads, it is as the former leader left it."""
    world = World(controllers=2)
    _do(world, BEFORE)
    restore = world.save_store()
    former, other = world.controllers
    former.crash()
    world.run_until(lambda: False, LEASE_TTL_S)
    assert former.term is not None
    restore()
    former._renew = lambda _: None  # type: ignore[method-assign]  # it has yet to notice
    world.run_until(lambda: other.term is not None, LEASE_TTL_S)
    assert [None if x.term is None else x.term.epoch for x in world.controllers] == [2, 2]
    before, answers = world.store.checkpoint, []
    command = deploy("b", "v1", num=1, request_id="r")
    former.call(command.verb, msgspec.json.encode(command), answers.append)
    with contextlib.suppress(Violated):
        world.run_until(lambda: bool(answers), 10.0)
    assert world.violations == []
    assert isinstance(answers[0], NotLeading)
    assert world.store.checkpoint.backends == before.backends


def test_what_hosts_know_of_leaders_whose_terms_the_store_lost_is_a_claim() -> None:
    """They were told of them and of nothing else, and refuse the goals of all that led before."""
    world = World(hosts=2)
    _do(world, BEFORE)
    world.controllers[0].crash()
    for host in world.hosts:
        host.on_leader_notice(world.store.epoch + 5)
    _do(world, LOST)
    _converge(world)
    assert world.violations == []
    assert world.store.epoch > 5
