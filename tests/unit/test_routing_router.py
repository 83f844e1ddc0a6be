"""The router's state machine, case by case; every order of events is in the property test."""

from __future__ import annotations

import itertools

import pytest

from serve_common.names import BackendTag, ReplicaTag
from serve_common.protocol.snapshots import BackendSnapshot
from serve_common.routing.queues import RequestKey, RequestQueue
from serve_common.routing.request_events import Dispatch, Queued, QueueFull, Refusal, SendTo
from serve_common.routing.router import Router

TAG = BackendTag("d/a")
R0, R1, R2 = (ReplicaTag(f"d/a#{i}") for i in range(3))


def backend(*replicas: ReplicaTag, draining: tuple[ReplicaTag, ...] = (), limit: int = 1, queue: int = 10):
    return BackendSnapshot(
        backend_tag=TAG,
        replicas=list(replicas),
        draining=list(draining),
        max_concurrent_queries=limit,
        max_queued_requests=queue,
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
    assert list(router.replica_gone(R0, 0.0)) == at_r0
    assert router.replica_gone(R0, 0.0) == []
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
