"""Captured requests that are sent again for a rollout: old ones, each once, as long as the step needs them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import msgspec
import pytest

from serve_common.api.commands import RolloutAction
from serve_common.config.rollout import RolloutConfig, check_rollout_config
from serve_common.errors import BadField, BusUnavailable
from serve_common.names import BackendTag, EndpointTag
from serve_common.protocol.captures import CapturedMessage, CapturedPair
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.rollouts.judge import GateStatus, results
from serve_controller.core.rollouts.replays import get_replays, is_needed
from serve_controller.ports import CapturedRequest
from serve_controller.shell import capture_replays
from serve_controller.shell.capture_replays import CaptureReplays
from tests.support.control_loop.rollout_world import BASELINE, CANARY, TAG, RolloutWorld
from tests.support.control_loop.traffic import model

STEPS = ("shadow 10%", "50%", "100%")
ALPHA = RolloutConfig().false_abort_probability / 2
"""Of the first step."""


def pair(at: float, method: str = "GET") -> CapturedPair:
    return CapturedPair(
        at=at,
        request_id="r",
        endpoint_tag=TAG,
        backend_tag=TAG,
        method=method,
        path="/",
        request=CapturedMessage(),
        status=200,
        response=CapturedMessage(),
    )


class FakeCaptures:
    def __init__(self, *pairs: CapturedPair | None) -> None:
        self.pairs = pairs
        self.sent: list[CapturedPair] = []
        self.failures = 0

    async def find(self, endpoint_tag: EndpointTag, sequence: int) -> CapturedRequest | None:
        assert endpoint_tag == TAG
        if sequence > len(self.pairs):
            return None
        return CapturedRequest(sequence=sequence, pair=self.pairs[sequence - 1])

    async def send(self, _endpoint_tag: EndpointTag, pair: CapturedPair, _timeout_s: float) -> None:
        if self.failures:
            self.failures -= 1
            raise BusUnavailable("away")
        self.sent.append(pair)


@pytest.fixture
def world() -> RolloutWorld:
    world = RolloutWorld(model(), rate=0.0)
    world.start(steps=STEPS, max_difference_increase=0.02, replays_captures=True)
    world.run_to_step(0)
    return world


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("PAUSE_S", "_CHECK_EVERY_S", "_RETRY_S"):
        monkeypatch.setattr(capture_replays, name, 0.001)
    return


async def replayed(captures: FakeCaptures, checkpoint: Checkpoint | None, seconds: float = 0.1) -> None:
    replays = CaptureReplays(captures, lambda: checkpoint, lambda: 0.0)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(seconds):
            await replays.run()


async def test_each_old_request_is_sent_once_and_only_safe_ones(world: RolloutWorld) -> None:
    step_at = world.rollout.in_force_at
    old = [pair(step_at - 9), pair(step_at - 8, "POST"), None, pair(step_at - 7)]
    captures = FakeCaptures(*old, pair(step_at + 1), pair(step_at + 2))
    await replayed(captures, world.loop.checkpoint)
    assert captures.sent == [old[0], old[3]]


async def test_a_request_that_cannot_be_sent_is_left_out_and_the_next_one_is_sent(
    world: RolloutWorld,
) -> None:
    old = [pair(1.0), pair(2.0)]
    captures = FakeCaptures(*old)
    captures.failures = 1
    await replayed(captures, world.loop.checkpoint)
    assert captures.sent == [old[1]]


async def test_nothing_is_sent_by_a_standby_or_while_it_is_paused(world: RolloutWorld) -> None:
    captures = FakeCaptures(pair(1.0))
    await replayed(captures, None)
    world.do(RolloutAction.PAUSE)
    await replayed(captures, world.loop.checkpoint)
    assert captures.sent == []


def test_a_step_needs_them_until_it_has_shown_all_that_it_must(world: RolloutWorld) -> None:
    [rule] = get_replays(world.loop.checkpoint)
    assert is_needed(world.loop.checkpoint, rule)
    world.traffic.differing = {CANARY: 0.0, BASELINE: 0.0}
    world.traffic._rate = 3000.0
    for _ in range(200):
        rollout = world.loop.checkpoint.rollouts[BackendTag(TAG)]
        if rollout.step > 0:
            break
        statuses = {one.status for one in results(rollout.gates, rollout.config, ALPHA)}
        assert is_needed(world.loop.checkpoint, rule) is (GateStatus.UNKNOWN in statuses)
        world.run(0.25)
    assert rollout.step > 0
    assert not is_needed(world.loop.checkpoint, rule)
    assert get_replays(world.loop.checkpoint) == []


def test_methods_that_change_something_need_a_word_of_their_own() -> None:
    world = RolloutWorld(model(), rate=0.0)
    world.start(steps=STEPS, max_difference_increase=0.02, replays_captures=True, replays_all_methods=True)
    world.run_to_step(0)
    [rule] = get_replays(world.loop.checkpoint)
    assert rule.is_unsafe
    plain = RolloutWorld(model(), rate=0.0)
    plain.start(steps=STEPS, max_difference_increase=0.02)
    plain.run_to_step(0)
    assert get_replays(plain.loop.checkpoint) == []
    with pytest.raises(BadField, match="replays_captures"):
        check_rollout_config(RolloutConfig(steps=STEPS, replays_captures=True))
    with pytest.raises(BadField, match="replays_all_methods: needs replays_captures"):
        check_rollout_config(RolloutConfig(steps=STEPS, replays_all_methods=True))
    config = RolloutConfig(steps=STEPS, replays_captures=True, max_difference_increase=0.02)
    assert msgspec.structs.asdict(check_rollout_config(config))["replays_captures"]
