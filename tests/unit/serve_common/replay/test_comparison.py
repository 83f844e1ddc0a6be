"""Replays of synthetic versions: a small fault among random ids and timestamps is found, an equal version is not."""

from __future__ import annotations

import asyncio
import json
import random
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from muster.client.replay import ALL_REPEATS_MIN, Replay, ReplayTarget
from serve_common.protocol.captures import CapturedMessage, CapturedPair
from serve_common.replay.comparison import (
    FALSE_ALARM_PROBABILITY,
    Comparison,
    ComparisonResult,
    PathStatus,
)
from serve_common.replay.differences import DifferenceKind, ReplayedResponse, ResponseComparator

RUNS = 100
REQUESTS = 200
PLANTED = REQUESTS // 200
"""0.5 % of the requests."""

Answer = Callable[[int, ReplayTarget], ReplayedResponse]


def pair(number: int) -> CapturedPair:
    message = CapturedMessage()
    return CapturedPair(
        at=0.0,
        request_id=str(number),
        endpoint_tag="default/a",
        backend_tag="default/a",
        method="GET",
        path="/",
        request=message,
        status=200,
        response=message,
    )


def replay(
    seed: int, respond: Answer, requests: int = REQUESTS, *, tolerance: float = 1e-6
) -> ComparisonResult:
    comparison = Comparison(ResponseComparator(tolerance))

    async def send(one: CapturedPair, target: ReplayTarget) -> ReplayedResponse:
        return respond(int(one.request_id), target)

    rng = random.Random(f"order {seed}")
    asyncio.run(Replay(send, comparison, rng=rng.random).run([pair(n) for n in range(requests)]))
    return comparison.result()


def noisy_body(rng: random.Random, number: int) -> dict[str, object]:
    """A response with all sorts of noise, and a label that follows from the request."""
    body: dict[str, object] = {
        "id": str(uuid.UUID(int=rng.getrandbits(128))),
        "at": rng.random() * 1e9,
        "label": f"class {number * 7919 % 10}",
        "scores": [round(number % 97 / 97 + rng.random() * 1e-9, 12) for _ in range(3)],
        "seen": {"worker": rng.randrange(4), "cached": rng.random() < 0.1},
        "notes": ["x"] * rng.randrange(3),
    }
    if rng.random() < 0.02:
        body["warning"] = "slow"
    return body


def ok(body: object, status: int = 200) -> ReplayedResponse:
    return ReplayedResponse(status=status, content_type="application/json", body=json.dumps(body).encode())


@contextmanager
def printing(seed: int) -> Iterator[None]:
    try:
        yield
    except AssertionError:
        print(f"failed with seed {seed}")
        raise


def test_a_fault_in_half_a_percent_of_the_responses_is_found_in_every_run():
    for seed in range(RUNS):
        rng = random.Random(seed)
        planted = frozenset(rng.sample(range(REQUESTS), PLANTED))

        def respond(
            number: int, target: ReplayTarget, rng: random.Random = rng, planted: frozenset[int] = planted
        ) -> ReplayedResponse:
            body = noisy_body(rng, number)
            if target is ReplayTarget.NEW and number in planted:
                body["label"] = "class 10"
            return ok(body)

        with printing(seed):
            result = replay(seed, respond)
            assert result.status is PathStatus.DIFFERENT
            assert [one.path for one in result.paths if one.status is PathStatus.DIFFERENT] == ["$.label"]
            assert (result.paths[0].differing, result.paths[0].noisy) == (PLANTED, 0)
            assert int(result.paths[0].request_id) in planted


def test_an_equal_version_is_not_accused_in_any_run():
    for seed in range(RUNS):
        rng = random.Random(seed)
        with printing(seed):
            result = replay(seed, lambda number, _target, rng=rng: ok(noisy_body(rng, number)), 150)
            assert result.status is not PathStatus.DIFFERENT
            assert result.requests == 150


def test_a_fault_that_comes_at_random_is_found_by_its_rate():
    rng = random.Random(7)

    def respond(number: int, target: ReplayTarget) -> ReplayedResponse:
        body = noisy_body(rng, number)
        if target is ReplayTarget.NEW and rng.random() < 0.05:
            body["label"] = "class 10"
        return ok(body)

    [found] = [one for one in replay(7, respond, 1_000).paths if one.status is PathStatus.DIFFERENT]
    assert found.path == "$.label"


def test_a_fault_at_a_path_with_noise_is_found_by_its_excess():
    rng = random.Random(3)

    def respond(_number: int, target: ReplayTarget) -> ReplayedResponse:
        is_odd = rng.random() < (0.2 if target is ReplayTarget.NEW else 0.02)
        return ok({"label": "odd" if is_odd else "even"})

    result = replay(3, respond)
    assert result.paths[0].status is PathStatus.DIFFERENT
    assert 0 < result.paths[0].noisy < result.paths[0].differing


def test_what_is_random_at_a_path_hides_no_change_of_its_type():
    def respond(number: int, target: ReplayTarget) -> ReplayedResponse:
        return ok({"id": None if target is ReplayTarget.NEW else str(uuid.uuid4()), "n": number})

    [found] = [one for one in replay(1, respond, 30).paths if one.status is PathStatus.DIFFERENT]
    assert (found.path, found.kind) == ("$.id", DifferenceKind.TYPE)


def test_one_differing_request_of_three_is_enough_because_it_is_sent_again():
    result = replay(
        1, lambda number, target: ok({"a": 2 if number == 1 and target is ReplayTarget.NEW else 1}), 3
    )
    assert result.status is PathStatus.DIFFERENT
    assert (result.requests, result.paths[0].differing) == (3, 1)
    assert 0 < result.repeats < 24


def test_a_difference_that_does_not_come_again_stays_unknown_and_says_what_is_missing():
    seen = set[int]()

    def respond(number: int, target: ReplayTarget) -> ReplayedResponse:
        is_first = target is ReplayTarget.NEW and number == 1 and not seen
        if is_first:
            seen.add(number)
        return ok({"a": 2 if is_first else 1})

    result = replay(1, respond, 50)
    assert result.status is PathStatus.UNKNOWN
    assert result.paths[0].requests_needed is not None
    assert result.paths[0].requests_needed >= 10


def test_repeats_are_bounded():
    rng = random.Random(2)
    result = replay(2, lambda _n, _t: ok({"a": rng.random() < 0.3}), 100)
    assert result.repeats <= ALL_REPEATS_MIN


def test_nothing_compared_says_nothing():
    result = replay(1, lambda _n, _t: ok({}), 0)
    assert (result.status, result.requests, result.share_max, result.paths) == (None, 0, 1.0, [])


def test_requests_without_a_difference_bound_what_could_have_gone_unseen():
    result = replay(1, lambda _n, _t: ok({}), 1_000)
    assert result.share_max == pytest.approx(0.0069, abs=1e-4)
    assert (1 - result.share_max) ** 1_000 == pytest.approx(FALSE_ALARM_PROBABILITY)


def test_an_error_while_sending_ends_the_replay():
    async def send(_one: CapturedPair, _target: ReplayTarget) -> ReplayedResponse:
        raise ValueError("no")

    comparison = Comparison(ResponseComparator())
    with pytest.raises(ExceptionGroup):
        asyncio.run(Replay(send, comparison, rng=lambda: 0.1).run([pair(1)]))
