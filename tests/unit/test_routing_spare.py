"""Spare requests in the router: they use what is left over and never keep a real one waiting."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from serve_common.names import BackendTag, ReplicaTag
from serve_common.protocol.snapshots import BackendSnapshot
from serve_common.routing.queues import RequestKey
from serve_common.routing.request_events import Dispatch, Queued, QueueFull, Refusal, SendTo
from serve_common.routing.router import Router

TAG = BackendTag("d/a")
R0, R1 = (ReplicaTag(f"d/a#{i}") for i in range(2))


def router_with(*replicas: ReplicaTag, limit: int = 1, queue: int = 10) -> Router:
    router = Router(TAG, random.Random(1).random, lambda: 0.0)
    router.apply(
        BackendSnapshot(
            backend_tag=TAG,
            replicas=list(replicas),
            draining=[],
            max_concurrent_queries=limit,
            max_queued_requests=queue,
        ),
        now=0.0,
    )
    return router


def key(number: int) -> RequestKey:
    return RequestKey(number)


def test_a_spare_request_takes_a_free_slot_and_otherwise_waits_behind_later_real_ones() -> None:
    router = router_with(R0)
    assert router.submit(key(1), 9, is_spare=True) == SendTo(R0)
    assert router.submit(key(2), 1, is_spare=True) == Queued()
    assert router.submit(key(3), 9) == Queued()
    assert router.finished(key(1)) == [Dispatch(key(3), R0)]
    assert router.finished(key(3)) == [Dispatch(key(2), R0)]
    assert router.in_flight == 1


def test_spare_requests_neither_meet_the_queues_limit_nor_use_it_up() -> None:
    router = router_with(queue=1)
    for i in range(10):
        assert router.submit(key(i), 9, is_spare=True) == Queued()
    assert (router.queue_depth, router.in_flight, router.has_waiting) == (0, 0, True)
    assert router.submit(key(10), 9) == Queued()
    assert router.submit(key(11), 9) == QueueFull(1)
    assert router.queue_depth == 1


def test_a_refused_spare_request_stays_spare() -> None:
    router = router_with(R0)
    router.submit(key(1), 1, is_spare=True)
    assert router.refused(key(1), R0, Refusal.BUSY, now=0.0) == ()
    router.submit(key(2), 9)
    assert router.reopen(1.0) == [Dispatch(key(2), R0)]
    assert router.finished(key(2)) == [Dispatch(key(1), R0)]


def test_spare_requests_expire_leave_and_drop_like_all_others() -> None:
    router = router_with()
    for i in range(4):
        router.submit(key(i), float(i), is_spare=i % 2 == 0)
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
            is_spare = event == "spare"
            outcome = router.submit(request, now + argument, is_spare=is_spare)
            if isinstance(outcome, QueueFull):
                assert not is_spare
                assert len(waiting - spare) == 5
                continue
            spare |= {request} if is_spare else set()
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
