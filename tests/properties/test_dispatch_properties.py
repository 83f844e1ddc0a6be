"""The dispatcher under random stories of answers, losses, snapshots and callbacks that act on other requests.

Whatever happens, each request is told exactly one thing, once, or nothing when it was given up; and nothing is left.
"""

from __future__ import annotations

import asyncio
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from serve_common.config.backend import CircuitBreaker, OutlierEjection, ReplicaPolicyName
from serve_common.dispatch.calls import Call, Response
from serve_common.errors import ServeError
from serve_common.names import BackendTag, ReplicaTag
from serve_common.protocol.frames import BodyHead, CallHead, ErrorHead, RefusedHead, RequestHead, ResponseHead
from tests.support.proxy_world import BACKEND, World

REPLICAS = [ReplicaTag(f"d/a#{i}") for i in range(3)]
NEW = BackendTag("d/new")
N0 = ReplicaTag("d/new#7")

STEPS = (
    *("begin",) * 10,
    *("ok",) * 3,
    *("stream", "piece", "end", "busy", "draining", "unknown", "no_responders", "error", "abandon"),
    *("replicas", "drop", "traffic", "endpoint", "bus", "time", "rubbish"),
)


class Story:
    """One dispatcher, and all that was ever asked of it."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.world = World(limit=self.chance.randrange(1, 6), queue=self.chance.randrange(0, 6))
        self.world.routes._rng = self.chance.random
        self.told: dict[int, list[object]] = {}
        self.given_up: set[int] = set()
        self.live: dict[int, Call] = {}
        self.now = self.world.now
        self.world.dispatcher._loop = self.world.beat._loop = self  # type: ignore[assignment] - has `time`
        dispatcher = self.world.dispatcher
        for part in (dispatcher.lost_requests, dispatcher._changes, dispatcher._pending_reconnect):
            part._loop = self  # type: ignore[assignment]
        self.world.dispatcher._choosing._loop = self  # type: ignore[assignment]
        self.numbers = 0

    def time(self) -> float:
        return self.now

    def begin(self) -> None:
        if "d/a" not in self.world.routes.endpoints:
            return
        self.numbers += 1
        number, chance = self.numbers, self.chance
        self.told[number] = []
        ask = self.world.make_ask(
            repeatable=chance.random() < 0.7,
            timeout_s=self.now - self.world.now + chance.choice([0.0, 1.0, 60.0]),
            shard_key=chance.choice(["", "", "anna", "bob"]),
            backend_tag=chance.choice([None, None, None, BACKEND, NEW]),
            call=chance.choice([None, CallHead(model_id="m")]),
            code_versions=chance.choice([None, {BACKEND: 1}]),
        )

        def on_response(_call: Call, answer: Response) -> None:
            self.told[number].append(answer)
            self.act()

        def on_error(_call: Call, error: ServeError) -> None:
            self.told[number].append(error)
            self.live.pop(number, None)
            self.act()

        call = self.world.dispatcher.start(ask, on_response, on_error)
        if call.key in self.world.dispatcher.calls:
            self.live[number] = call

    def act(self) -> None:
        """What a callback does now and then."""
        if self.chance.random() < 0.2:
            self.begin()
        while self.chance.random() < 0.6:
            self.abandon()

    def abandon(self) -> None:
        if self.live:
            number = self.chance.choice(sorted(self.live))
            call = self.live.pop(number)
            if call.key in self.world.dispatcher.calls and not self.told[number]:
                self.given_up.add(number)
            self.world.dispatcher.abandon(call)

    def reply(self) -> bytes | None:
        """The reply subject of a request that was sent."""
        replies = [
            call.attempt.reply for call in self.world.dispatcher.calls.values() if call.attempt is not None
        ]
        return self.chance.choice(replies) if replies else None

    def step(self, step: str) -> None:
        world, chance = self.world, self.chance
        reply = self.reply()
        match step:
            case "begin":
                self.begin()
            case "abandon":
                self.abandon()
            case "replicas":
                world.limit, world.queue = chance.randrange(1, 6), chance.randrange(0, 6)
                states = [(tag, chance.choice("rrdg")) for tag in REPLICAS]
                world.put(
                    *(tag for tag, state in states if state == "r"),
                    draining=[tag for tag, state in states if state == "d"],
                    versions=chance.choice([None, {REPLICAS[0]: 1}]),
                    replica_policy=chance.choice(list(ReplicaPolicyName)),
                    retry_budget_percent=chance.choice([0.0, 100.0]),
                    outlier_ejection=OutlierEjection(consecutive_failures=chance.randrange(3)),
                    circuit_breaker=CircuitBreaker(
                        requests_min=3, failure_percent=chance.choice([0.0, 50.0])
                    ),
                )
            case "drop":
                world.drop_backend(chance.choice([BACKEND, NEW]))
            case "traffic":
                world.put(N0, backend=NEW)
                world.put_traffic(
                    chance.choice([{BACKEND: 1.0}, {NEW: 1.0}, {BACKEND: 0.5, NEW: 0.5}, {BACKEND: 0.0}])
                )
            case "endpoint":
                world.put_endpoint(None)
                world.put_endpoint()
            case "bus":
                world.bus.is_connected = not world.bus.is_connected
                if world.bus.is_connected:
                    world.dispatcher.bus_reconnected()
            case "time":
                self.now += chance.choice([0.01, 0.5, 2.0, 30.0])
                world.beat.tick(self.now)
            case _ if reply is not None and world.bus.is_connected:
                self.hear(step, reply)

    def hear(self, step: str, reply: bytes) -> None:
        world = self.world
        match step:
            case "ok":
                world.answer(reply, ResponseHead(self.chance.choice([200, 404, 500]), [], True, 0))
            case "stream":
                world.answer(reply, ResponseHead(200, [], False, 0))
            case "piece" | "end":
                world.answer(reply, BodyHead(self.chance.choice([1, 1, 2, 3]), step == "end"))
            case "busy" | "draining" | "unknown":
                world.answer(reply, RefusedHead(step, 0))
            case "no_responders":
                world.no_responders(reply)
            case "error":
                world.answer(reply, ErrorHead("user_code_raised", 500, "why", 0))
            case "rubbish":
                world.bus.receivers[reply.rpartition(b".")[2]][0](b"\xff", b"", None)


def assert_consistent(story: Story) -> None:
    world = story.world
    held = {call.key: call for call in world.dispatcher.calls.values()}
    for router in world.routes.routers.values():
        assert set(router._places) <= set(held), "a slot of a request that has ended"
        for request in router._places:
            assert held[request].router is router
            assert router.is_waiting(request) == (held[request].attempt is None)
        if router._open and router.queue_depth:
            waiting = [held[request] for request in router._places if router.is_waiting(request)]
            assert all(call.is_suspect for call in waiting), "nobody waits while a replica is open"
            assert not router._may_risk_one()
    for call in held.values():
        assert call.router is not None or call.key in world.dispatcher._pending
        if call.router is not None:
            assert call.key in call.router._places
    attempts = sum(call.attempt is not None for call in held.values())
    assert len(world.bus.receivers) == attempts + world.outgoing.receipts.late


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 2**32), st.lists(st.sampled_from(STEPS), min_size=20, max_size=80))
def test_every_request_is_told_one_thing_and_nothing_is_left(seed: int, steps: list[str]) -> None:
    async def run() -> None:
        story = Story(seed)
        for step in steps:
            story.step(step)
            assert_consistent(story)
        story.chance = random.Random(seed)
        while story.world.dispatcher.calls:  # callbacks may begin new ones
            story.world.dispatcher.close()
        story.world.assert_nothing_is_left()
        for number, told in story.told.items():
            assert len(told) == (0 if number in story.given_up else 1), (number, told)
        assert all(type(frame[2]) is not RequestHead or frame[1] for frame in story.world.bus.sent)

    asyncio.run(run())
