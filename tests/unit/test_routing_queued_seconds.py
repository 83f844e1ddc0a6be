"""How long requests waited in a router, and when it says that a sleeping backend is waited for."""

from __future__ import annotations

import pytest

from serve_common.names import BackendTag, ReplicaTag
from serve_common.protocol.reports import AGAIN_S
from serve_common.protocol.snapshots import BackendSnapshot
from serve_common.routing.circuit import SOON_S, WakeSignal
from serve_common.routing.queues import QueuedSeconds, RequestKey
from serve_common.routing.request_events import Queued, Refusal, SendTo
from serve_common.routing.router import Router

TAG = BackendTag("d/a")
R0, R1 = (ReplicaTag(f"d/a#{number}") for number in range(2))


class Case:
    """A router whose clock the test turns."""

    def __init__(self, *replicas: ReplicaTag, **snapshot) -> None:
        self.now = 1_000_000.0
        self.clock_reads = 0
        self.router = Router(TAG, lambda: 0.0, self._read_clock)
        self._last = 0
        self.apply(*replicas, **snapshot)
        self.clock_reads = 0

    def _read_clock(self) -> float:
        self.clock_reads += 1
        return self.now

    def apply(self, *replicas: ReplicaTag, draining=(), can_wake: bool = False, queue: int = 10):
        snapshot = BackendSnapshot(
            backend_tag=TAG,
            replicas=list(replicas),
            draining=list(draining),
            max_concurrent_queries=1,
            max_queued_requests=queue,
            can_wake=can_wake,
        )
        return self.router.apply(snapshot, self.now)

    def submit(self, wait_s: float = 100.0, *, is_spare: bool = False):
        self._last += 1
        key = RequestKey(self._last)
        return key, self.router.submit(key, self.now + wait_s, is_spare=is_spare)

    @property
    def seconds(self) -> float:
        return self.router.queued_seconds(self.now)


def test_who_gets_a_slot_at_once_waits_for_nothing_and_the_clock_is_not_even_read() -> None:
    case = Case(R0, R1)
    for _ in range(10):
        key, outcome = case.submit()
        assert type(outcome) is SendTo
        case.now += 1
        case.router.finished(key)
    assert case.clock_reads == 0
    assert case.seconds == 0


def test_who_still_waits_is_counted_and_who_went_stays_counted() -> None:
    case = Case(R0)
    first, _ = case.submit()
    case.submit()
    case.now += 5
    assert case.seconds == pytest.approx(5)
    case.submit()
    case.now += 0.05
    assert case.seconds == pytest.approx(5.1)
    case.router.finished(first)  # the second has its slot
    case.now += 1
    assert case.seconds == pytest.approx(6.1)


@pytest.mark.parametrize("end", ["cancelled", "expired", "dropped", "gone_late"])
def test_however_a_wait_ends_it_counts_no_further(end: str) -> None:
    case = Case(R0)
    case.submit()
    waiting, outcome = case.submit(wait_s=2.0)
    assert outcome == Queued()
    case.now += 2
    match end:
        case "cancelled":
            case.router.cancelled(waiting)
        case "expired":
            assert case.router.expire(case.now) == [waiting]
        case "dropped":
            case.router.drop()
        case "gone_late":
            case.router.finished(waiting)
    case.now += 10
    assert case.seconds == pytest.approx(2)


def test_a_refused_request_waits_again() -> None:
    case = Case(R0)
    key, _ = case.submit()
    case.now += 3
    case.router.refused(key, R0, Refusal.DRAINING, case.now)
    case.now += 0.5
    assert case.seconds == pytest.approx(0.5)


def test_copies_count_where_they_need_replicas_and_not_where_they_must_not_wake_any() -> None:
    case = Case(R0)
    case.submit()
    case.submit(is_spare=True)
    case.now += 2
    assert case.seconds == pytest.approx(2)
    case.apply(draining=[R0], can_wake=True)
    case.now += 10
    assert case.seconds == pytest.approx(2)
    case.submit()
    case.now += 1
    assert case.seconds == pytest.approx(3)
    case.apply(draining=[R0])  # somebody else woke it: the copy will get its slot too
    case.now += 1
    assert case.seconds == pytest.approx(5)


def test_a_reader_with_a_clock_that_is_a_little_behind_sees_no_fall() -> None:
    seconds = QueuedSeconds()
    seconds.note(100.0, 10)
    assert seconds.until(100.01) == pytest.approx(0.1)
    seconds.note(100.02, 0)
    assert seconds.until(100.015) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("replicas", "draining", "can_wake", "is_scaled_to_zero"),
    [((), (), True, True), ((), (R0,), True, True), ((R0,), (), True, False), ((), (), False, False)],
)
def test_a_backend_sleeps_when_it_was_scaled_to_zero_and_nothing_takes_requests(
    replicas, draining, can_wake: bool, is_scaled_to_zero: bool
) -> None:
    case = Case(*replicas, draining=draining, can_wake=can_wake)
    assert case.router.is_scaled_to_zero == is_scaled_to_zero
    case.router.drop()
    assert not case.router.is_scaled_to_zero


def told_at(alarm: WakeSignal, waiting_at: dict[float, int]) -> list[tuple[float, int]]:
    told = []
    for now, waiting in waiting_at.items():
        if alarm.is_due(now, waiting):
            alarm.told(now, waiting)
            told.append((now, waiting))
    return told


def test_a_burst_is_told_at_once_then_as_a_whole_and_then_once_a_second() -> None:
    steps = {10 + step * 0.001: min(step + 1, 100) for step in range(3500)}
    told = told_at(WakeSignal(), steps)
    assert [waiting for _, waiting in told] == pytest.approx([1, 21, 100, 100, 100], abs=1)
    assert [at for at, _ in told] == pytest.approx([10, 10.02, 11.02, 12.02, 13.02], abs=0.002)
    assert (SOON_S, AGAIN_S) == (0.02, 1.0)


def test_one_that_waits_alone_is_told_once_a_second() -> None:
    assert len(told_at(WakeSignal(), {10 + step * 0.025: 1 for step in range(121)})) == 4


def test_who_comes_and_goes_again_and_again_costs_no_message_each() -> None:
    alarm = WakeSignal()
    assert len(told_at(alarm, {10 + step * 0.1: 1 + step % 2 for step in range(20)})) == 3


def test_after_a_rest_the_next_one_is_told_at_once() -> None:
    alarm = WakeSignal()
    assert told_at(alarm, {10.0: 3, 10.5: 3}) == [(10.0, 3)]
    alarm.rest()
    assert told_at(alarm, {10.6: 1}) == [(10.6, 1)]
