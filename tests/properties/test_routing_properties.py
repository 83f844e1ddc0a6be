"""The router under every order of events, next to a model that is too simple to be wrong."""

from __future__ import annotations

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from serve_common.names import BackendTag, ReplicaTag
from serve_common.routing.replica_choice import PowerOfTwoChoices, RandomChoice, RoundRobin
from serve_common.routing.request_queue import RequestKey
from serve_common.routing.router import Dispatch, Queued, QueueFull, Refusal, Router, SendTo
from serve_common.wires.snapshots import BackendSnapshot

TAG = BackendTag("d/a")
REPLICAS = [ReplicaTag(f"d/a#{i}") for i in range(4)]
replicas = st.sampled_from(REPLICAS)


class RouterMachine(RuleBasedStateMachine):
    """The model: where each request is, what each replica may take, and who waits in which order."""

    requests = Bundle("requests")

    @initialize(
        seed=st.integers(0, 2**16), policy=st.sampled_from([PowerOfTwoChoices, RoundRobin, RandomChoice])
    )
    def make(self, seed, policy):
        self.router = Router(TAG, random.Random(seed).random, policy())
        self.now = 0.0
        self.last_key = 0
        self.arrivals = 0
        self.limit, self.queue_max = 100, 1000
        self.running: set[ReplicaTag] = set()
        self.draining: set[ReplicaTag] = set()
        self.blocked: set[ReplicaTag] = set()
        self.in_flight: dict[RequestKey, ReplicaTag] = {}
        self.waiting: dict[RequestKey, tuple[float, int]] = {}
        self.order: dict[RequestKey, tuple[float, int]] = {}
        self.apply(["running", "running", "draining", "gone"], limit=2, queue_max=4)

    # -- helpers of the model --

    def at(self, replica):
        return {request for request, where in self.in_flight.items() if where == replica}

    def take(self, dispatches, *, may_be_unblocked=frozenset()):
        for dispatch in dispatches:
            assert isinstance(dispatch, Dispatch)
            assert dispatch.request == min(self.waiting, key=self.waiting.__getitem__), "queue order"
            assert dispatch.replica in self.running
            assert dispatch.replica not in self.blocked - may_be_unblocked
            assert len(self.at(dispatch.replica)) < self.limit
            del self.waiting[dispatch.request]
            self.in_flight[dispatch.request] = dispatch.replica

    # -- requests --

    @rule(
        target=requests,
        waits_s=st.lists(st.integers(0, 5), min_size=1, max_size=6),
        is_admitted=st.booleans(),
    )
    def submit(self, waits_s, is_admitted):
        taken = (self.submit_one(wait_s, is_admitted) for wait_s in waits_s)
        return multiple(*(request for request in taken if request is not None))

    def submit_one(self, wait_s, is_admitted):
        self.last_key += 1
        request, deadline = RequestKey(self.last_key), self.now + wait_s
        outcome = self.router.submit(request, deadline, is_admitted=is_admitted)
        if isinstance(outcome, QueueFull):
            assert not is_admitted
            assert len(self.waiting) >= self.queue_max
            return None
        self.arrivals += 1
        self.order[request] = (deadline, self.arrivals)
        if isinstance(outcome, SendTo):
            assert not self.waiting, "nobody may overtake"
            self.waiting[request] = self.order[request]
            self.take([Dispatch(request, outcome.replica)])
        else:
            assert outcome == Queued()
            assert is_admitted or len(self.waiting) < self.queue_max
            self.waiting[request] = self.order[request]
        return request

    @rule(request=consumes(requests), is_answered=st.booleans())
    def end_any(self, request, is_answered):
        self.end(request, is_answered)

    @precondition(lambda self: self.in_flight and self.waiting)
    @rule(is_answered=st.booleans(), data=st.data())
    def end_one_that_others_wait_for(self, is_answered, data):
        self.end(data.draw(st.sampled_from(sorted(self.in_flight))), is_answered)

    def end(self, request, is_answered):
        replica = self.in_flight.pop(request, None)
        self.waiting.pop(request, None)
        was_blocked = {replica} if replica else set()
        end = self.router.finished if is_answered else self.router.cancelled
        self.take(end(request), may_be_unblocked=was_blocked)
        self.sync_blocked()
        assert end(request) == (), "a slot is given back once"

    @precondition(lambda self: self.in_flight)
    @rule(reason=st.sampled_from(Refusal), data=st.data())
    def refuse_one(self, reason, data):
        request = data.draw(st.sampled_from(sorted(self.in_flight)))
        self.refuse(request, self.in_flight[request], reason)

    @rule(request=requests, replica=replicas, reason=st.sampled_from(Refusal))
    def refuse(self, request, replica, reason):
        is_there = self.in_flight.get(request) == replica
        if is_there:
            del self.in_flight[request]
            self.waiting[request] = self.order[request]
            self.blocked.add(replica)
        dispatches = self.router.refused(request, replica, reason, self.now)
        assert is_there or not dispatches
        self.take(dispatches)

    # -- replicas --

    @rule(replica=replicas)
    def die(self, replica):
        lost = self.router.replica_gone(replica, self.now)
        assert set(lost) == self.at(replica)
        for request in lost:
            del self.in_flight[request]
        if replica in self.running | self.draining:
            self.blocked.add(replica)

    @rule(replica=replicas)
    def put_aside(self, replica):
        self.router.put_aside(replica, self.now)
        if replica in self.running | self.draining:
            self.blocked.add(replica)

    @rule(
        states=st.lists(st.sampled_from(["running", "running", "draining", "gone"]), min_size=4, max_size=4),
        limit=st.integers(1, 3),
        queue_max=st.integers(0, 4),
    )
    def apply(self, states, limit, queue_max):
        by_state = {
            state: [r for r, s in zip(REPLICAS, states, strict=True) if s == state]
            for state in ("running", "draining", "gone")
        }
        self.limit, self.queue_max = limit, queue_max
        self.running, self.draining = set(by_state["running"]), set(by_state["draining"])
        self.blocked.clear()
        applied = self.router.apply(
            BackendSnapshot(
                backend_tag=TAG,
                replicas=by_state["running"],
                draining=by_state["draining"],
                max_concurrent_queries=limit,
                max_queued_requests=queue_max,
            )
        )
        expected = {r for r, where in self.in_flight.items() if where not in self.running | self.draining}
        assert set(applied.lost) == expected
        assert len(applied.lost) == len(expected)
        for request in applied.lost:
            del self.in_flight[request]
        self.take(applied.dispatches)

    @precondition(lambda self: len(self.waiting) > 3)
    @rule()
    def drop(self):
        dropped = self.router.drop()
        assert list(dropped.waiting) == sorted(self.waiting, key=self.waiting.__getitem__)
        assert set(dropped.lost) == set(self.in_flight)
        self.waiting.clear()
        self.in_flight.clear()
        self.running, self.draining, self.blocked = set(), set(), set()

    # -- time --

    @rule(seconds=st.sampled_from([0.01, 0.1, 1.0, 6.0]))
    def pass_time(self, seconds):
        self.now += seconds
        due = {r for r, (deadline, _) in self.waiting.items() if deadline <= self.now}
        expired = self.router.expire(self.now)
        assert set(expired) == due
        assert len(expired) == len(due)
        for request in expired:
            del self.waiting[request]
        self.take(self.router.reopen(self.now), may_be_unblocked=frozenset(REPLICAS))
        if seconds > 5:
            self.blocked.clear()
            assert not self.router.has_blocked, "nobody is put aside for ever"
        else:
            self.sync_blocked()

    def sync_blocked(self):
        """The model does not know the pauses: it asks, and the invariants below judge the answer."""
        self.blocked = {tag for tag, slots in self.router._replicas.items() if slots.block is not None}

    # -- what must always hold --

    @precondition(lambda self: hasattr(self, "router"))
    @invariant()
    def slots_equal_the_models(self):
        for replica in REPLICAS:
            assert self.router.requests_at(replica) == self.at(replica)
        assert self.router.in_flight == len(self.in_flight)
        assert self.router.queue_depth == len(self.waiting)
        assert all(self.router.is_waiting(request) for request in self.waiting)

    @precondition(lambda self: hasattr(self, "router"))
    @invariant()
    def nobody_waits_while_a_replica_could_take_it(self):
        free = [r for r in self.running - self.blocked if len(self.at(r)) < self.limit]
        assert not (self.waiting and free)

    @precondition(lambda self: hasattr(self, "router"))
    @invariant()
    def the_list_of_open_replicas_is_right(self):
        opened = self.router._open
        assert [slots.position for slots in opened] == list(range(len(opened)))
        free = {r for r in self.running - self.blocked if len(self.at(r)) < self.limit}
        assert {slots.tag for slots in opened} == free


TestRouter = RouterMachine.TestCase
TestRouter.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
