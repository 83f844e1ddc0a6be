"""A store that is restored to a state of 20 changes ago: who serves is not lost, and one truth is everywhere."""

from __future__ import annotations

import pytest

from serve_common.names import BackendTag
from serve_common.wires import commands as c
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
ALWAYS = (BackendTag("default/a"), BackendTag("shop/web"))
"""What serves before and after."""
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


@pytest.mark.parametrize(
    "how", ["while it leads", "with a stop and start", "and the bucket lost", "to nothing"]
)
def test_a_restored_store_is_made_true_without_an_interruption(how: str) -> None:
    world = World(hosts=3)
    nothing = world.save_store()
    _do(world, BEFORE)
    restore = nothing if how == "to nothing" else world.save_store()
    _do(world, LOST)
    if how == "with a stop and start":
        world.controllers[0].crash()
    if how in ("and the bucket lost", "to nothing"):
        world.controllers[0].crash()
        world.bus.lose_bucket()
    restore()
    watch = None if how == "to nothing" else Watch(world)
    try:
        world.run_until(lambda: not why_not_calm(world), CONVERGED_WITHIN_S)
        world.check(not why_not_calm(world), lambda: f"not converged: {why_not_calm(world)}")
        world.run_until(lambda: False, SETTLE_S)
        check_converged(world)
        _do(world, LOST)
        world.run_until(lambda: not why_not_calm(world), CONVERGED_WITHIN_S)
        check_converged(world)
    except Violated:
        pass
    assert world.violations == [], "\n".join(world.traced[-80:])
    assert world.store.checkpoint.counters.restored_epoch > 0, "the counters were raised"
    assert watch is None or sorted(watch.unserved) == []
