"""The router's state machine, case by case; every order of events is in the property test."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_common.names import BackendTag, ReplicaTag
from serve_common.protocol.reports import AGAIN_S
from serve_common.protocol.snapshots import BackendSnapshot
from serve_common.routing.circuit import SOON_S, WakeSignal
from serve_common.routing.queues import (
    Dispatch,
    Queued,
    QueuedSeconds,
    QueueFull,
    Refusal,
    RequestKey,
    RequestQueue,
    SendTo,
)
from serve_common.routing.router import Router

TAG = BackendTag("d/a")
R0, R1, R2 = (ReplicaTag(f"d/a#{i}") for i in range(3))


def backend(
    *replicas: ReplicaTag, draining=(), limit: int = 1, queue: int = 10, can_wake: bool = False
) -> BackendSnapshot:
    return BackendSnapshot(
        backend_tag=TAG,
        replicas=list(replicas),
        draining=list(draining),
        max_concurrent_queries=limit,
        max_queued_requests=queue,
        can_wake=can_wake,
    )


@pytest.fixture
def router() -> Router:
    draws = itertools.cycle([0.1, 0.6, 0.3, 0.9])
    return Router(TAG, lambda: next(draws), lambda: 0.0)


def key(number: int) -> RequestKey:
    return RequestKey(number)


def test_before_the_first_snapshot_requests_wait_and_then_go_out_by_deadline(router: Router) -> None:
    assert router.submit(key(1), deadline=30) == Queued()
    assert router.submit(key(2), deadline=20) == Queued()
    assert router.submit(key(3), deadline=20) == Queued()
    applied = router.apply(backend(R0, limit=2), 0.0)
    assert applied.dispatches == [Dispatch(key(2), R0), Dispatch(key(3), R0)]
    assert router.finished(key(2)) == [Dispatch(key(1), R0)]
    assert (router.queue_depth, router.in_flight) == (0, 2)


def test_a_full_queue_refuses_but_never_a_request_that_was_admitted_before(router: Router) -> None:
    router.apply(backend(R0, queue=1), 0.0)
    assert router.submit(key(1), 9) == SendTo(R0)
    assert router.submit(key(2), 9) == Queued()
    assert router.submit(key(3), 9) == QueueFull(1)
    assert router.submit(key(4), 9, is_admitted=True) == Queued()
    assert router.cancelled(key(3)) == ()


def test_minus_one_is_no_limit_and_zero_lets_nobody_wait(router: Router) -> None:
    router.apply(backend(R0, queue=-1), 0.0)
    router.submit(key(0), 9)
    assert all(router.submit(key(i), 9) == Queued() for i in range(1, 3000))
    router.drop()
    router.apply(backend(R0, queue=0), 0.0)
    assert router.submit(key(1), 9) == SendTo(R0)
    assert router.submit(key(2), 9) == QueueFull(0)


def test_a_refused_request_keeps_its_place_and_prefers_another_replica(router: Router) -> None:
    router.apply(backend(R0), 0.0)
    assert router.submit(key(1), 9) == SendTo(R0)
    router.submit(key(2), 9)
    assert router.refused(key(1), R0, Refusal.BUSY, now=0.0) == ()
    dispatches = router.apply(backend(R0, R1), 0.0).dispatches
    assert dispatches == [Dispatch(key(1), R1), Dispatch(key(2), R0)]


def test_a_busy_replica_is_tried_again_when_a_slot_there_is_given_back(router: Router) -> None:
    router.apply(backend(R0, limit=3), 0.0)
    for i in (1, 2):
        router.submit(key(i), 9)
    assert router.refused(key(2), R0, Refusal.BUSY, now=0.0) == ()
    assert router.submit(key(3), 9) == Queued()
    assert router.cancelled(key(1)) == [Dispatch(key(2), R0), Dispatch(key(3), R0)]


def test_a_busy_replica_is_tried_again_after_a_pause_that_grows(router: Router) -> None:
    router.apply(backend(R0), 0.0)
    router.submit(key(1), 99)
    now, pauses = 0.0, []
    for _ in range(7):
        assert router.refused(key(1), R0, Refusal.BUSY, now) == ()
        refused_at = now
        while not router.reopen(now):
            now += 0.01
        pauses.append(now - refused_at)
    assert pauses == sorted(pauses)
    assert pauses[0] <= 0.031
    assert 0.25 < pauses[-1] <= 0.32
    router.finished(key(1))
    router.submit(key(2), 99)
    router.refused(key(2), R0, Refusal.BUSY, now)
    assert router.reopen(now + 0.021) == [Dispatch(key(2), R0)]  # an answer made the pause short again


def test_a_silent_replica_is_put_aside_and_keeps_what_it_has(router: Router) -> None:
    router.apply(backend(R0, limit=2), 0.0)
    router.submit(key(1), 9)
    router.quarantine(R0, now=0.0)
    assert router.submit(key(2), 9) == Queued()
    assert router.requests_at(R0) == {key(1)}
    assert router.reopen(0.4) == ()
    assert router.reopen(0.5) == [Dispatch(key(2), R0)]
    router.quarantine(R0, now=1.0)
    assert not router.reopen(1.9)
    assert router.submit(key(3), 9) == Queued()
    assert router.finished(key(1)) == [Dispatch(key(3), R0)]  # it has answered, so it lives


def test_a_resting_replica_is_not_tried_again_for_an_answer(router: Router) -> None:
    router.apply(backend(R0, limit=3), 0.0)
    for i in (1, 2):
        router.submit(key(i), 9)
    router.refused(key(2), R0, Refusal.DRAINING, now=0.0)
    assert router.finished(key(1)) == ()
    assert router.apply(backend(R0, limit=3), 0.0).dispatches == [Dispatch(key(2), R0)]


def test_a_dead_replica_loses_what_it_had_once(router: Router) -> None:
    router.apply(backend(R0, R1, limit=2), 0.0)
    placed = {i: router.submit(key(i), 9).replica for i in range(1, 5)}
    at_r0 = [key(i) for i, replica in placed.items() if replica == R0]
    assert list(router.replica_gone(R0, 0.0, router.requests_at(R0))) == at_r0
    assert router.replica_gone(R0, 0.0, router.requests_at(R0)) == []
    assert router.finished(at_r0[0]) == ()
    assert router.in_flight == 2
    assert router.submit(at_r0[0], 9) == Queued()  # R1 is full and R0 is aside


def test_a_snapshot_moves_replicas_to_draining_and_drops_those_it_does_not_name(router: Router) -> None:
    router.apply(backend(R0, R1, limit=1), 0.0)
    placed = {router.submit(key(i), 9).replica: key(i) for i in (1, 2)}
    applied = router.apply(backend(R2, draining=(R0,)), 0.0)
    assert applied.lost == [placed[R1]]
    assert router.requests_at(R0) == {placed[R0]}
    assert router.submit(key(3), 9) == SendTo(R2)
    assert router.submit(key(4), 9) == Queued()
    assert router.finished(placed[R0]) == ()  # a slot of a draining replica is of no use


def test_a_lower_limit_takes_nothing_away_and_a_higher_one_lets_the_waiting_go(router: Router) -> None:
    router.apply(backend(R0, limit=3), 0.0)
    for i in range(5):
        router.submit(key(i), 9)
    assert router.apply(backend(R0, limit=1), 0.0).lost == []
    assert router.finished(key(0)) == ()
    assert router.finished(key(1)) == ()
    assert router.finished(key(2)) == [Dispatch(key(3), R0)]
    assert router.apply(backend(R0, limit=2), 0.0).dispatches == [Dispatch(key(4), R0)]


def test_expired_requests_leave_the_queue(router: Router) -> None:
    router.submit(key(1), 5)
    router.submit(key(2), 7)
    router.submit(key(3), 6)
    router.cancelled(key(3))
    assert router.expire(6.5) == [key(1)]
    assert router.expire(7) == [key(2)]
    assert (router.queue_depth, router.in_flight) == (0, 0)


def test_dropping_a_backend_returns_everything_and_forgets_it(router: Router) -> None:
    router.apply(backend(R0), 0.0)
    for i in (1, 2, 3):
        router.submit(key(i), 10 - i)
    dropped = router.drop()
    assert (list(dropped.waiting), list(dropped.lost)) == ([key(3), key(2)], [key(1)])
    assert (router.queue_depth, router.in_flight) == (0, 0)


def test_a_queue_whose_requests_leave_from_the_middle_does_not_grow() -> None:
    queue = RequestQueue()
    queue.push(key(0), 0.0, 0)
    for i in range(1, 10_000):
        queue.push(key(i), float(i), i)
        assert queue.discard(key(i))
    assert len(queue) == 1
    assert len(queue._heap) < 200
    assert queue.pop() == key(0)


# Spare requests in the router: they use what is left over and never keep a real one waiting.


def router_with(*replicas: ReplicaTag, limit: int = 1, queue: int = 10) -> Router:
    router = Router(TAG, random.Random(1).random, lambda: 0.0)
    router.apply(backend(*replicas, limit=limit, queue=queue), now=0.0)
    return router


def test_a_spare_request_takes_a_free_slot_and_otherwise_waits_behind_later_real_ones() -> None:
    router = router_with(R0)
    assert router.submit(key(1), 9, is_shadow=True) == SendTo(R0)
    assert router.submit(key(2), 1, is_shadow=True) == Queued()
    assert router.submit(key(3), 9) == Queued()
    assert router.finished(key(1)) == [Dispatch(key(3), R0)]
    assert router.finished(key(3)) == [Dispatch(key(2), R0)]
    assert router.in_flight == 1


def test_spare_requests_neither_meet_the_queues_limit_nor_use_it_up() -> None:
    router = router_with(queue=1)
    for i in range(10):
        assert router.submit(key(i), 9, is_shadow=True) == Queued()
    assert (router.queue_depth, router.in_flight, router.has_waiting) == (0, 0, True)
    assert router.submit(key(10), 9) == Queued()
    assert router.submit(key(11), 9) == QueueFull(1)
    assert router.queue_depth == 1


def test_a_refused_spare_request_stays_spare() -> None:
    router = router_with(R0)
    router.submit(key(1), 1, is_shadow=True)
    assert router.refused(key(1), R0, Refusal.BUSY, now=0.0) == ()
    router.submit(key(2), 9)
    assert router.reopen(1.0) == [Dispatch(key(2), R0)]
    assert router.finished(key(2)) == [Dispatch(key(1), R0)]


def test_spare_requests_expire_leave_and_drop_like_all_others() -> None:
    router = router_with()
    for i in range(4):
        router.submit(key(i), float(i), is_shadow=i % 2 == 0)
    assert router.cancelled(key(2)) == ()
    assert not router.is_waiting(key(2))
    assert sorted(router.expire(1.0)) == [key(0), key(1)]
    assert router.drop().waiting == [key(3)]
    assert not router.has_waiting


events = st.lists(
    st.tuples(st.sampled_from(["submit", "spare", "finish", "cancel", "refuse"]), st.integers(0, 30)),
    max_size=80,
)


@given(events)
def test_no_spare_request_is_sent_while_a_real_one_waits(story) -> None:
    router = router_with(R0, R1, limit=2, queue=5)
    at: dict[RequestKey, ReplicaTag] = {}
    waiting: set[RequestKey] = set()
    spare: set[RequestKey] = set()
    now = 0.0

    def take(dispatches) -> None:
        for dispatch in dispatches:
            waiting.discard(dispatch.request)
            if dispatch.request in spare:
                assert not waiting - spare
            at[dispatch.request] = dispatch.replica

    for number, (event, argument) in enumerate(story):
        request = key(number)
        now += 0.01
        if event in ("submit", "spare"):
            is_shadow = event == "spare"
            outcome = router.submit(request, now + argument, is_shadow=is_shadow)
            if isinstance(outcome, QueueFull):
                assert not is_shadow
                assert len(waiting - spare) == 5
                continue
            spare |= {request} if is_shadow else set()
            waiting.add(request)
            if isinstance(outcome, SendTo):
                take([Dispatch(request, outcome.replica)])
        elif event == "refuse" and at:
            refused = sorted(at)[argument % len(at)]
            waiting.add(refused)
            take(router.refused(refused, at.pop(refused), Refusal.BUSY, now))
        elif event == "finish" and at:
            finished = sorted(at)[argument % len(at)]
            del at[finished]
            take(router.finished(finished))
        elif event == "cancel" and waiting:
            gone = sorted(waiting)[argument % len(waiting)]
            waiting.discard(gone)
            take(router.cancelled(gone))
        take(router.reopen(now))
        assert router.in_flight == len(at)
        assert router.queue_depth == len(waiting - spare)
        assert router.has_waiting == bool(waiting)


# How long requests waited in a router, and when it says that a sleeping backend is waited for.


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

    def apply(self, *replicas: ReplicaTag, **snapshot):
        return self.router.apply(backend(*replicas, **snapshot), self.now)

    def submit(self, wait_s: float = 100.0, *, is_shadow: bool = False):
        self._last += 1
        key = RequestKey(self._last)
        return key, self.router.submit(key, self.now + wait_s, is_shadow=is_shadow)

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
    case.submit(is_shadow=True)
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
            alarm.record_sent(now, waiting)
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
