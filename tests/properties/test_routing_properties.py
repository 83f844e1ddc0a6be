"""The router under every order of events, next to a model that is too simple to be wrong."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
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

from serve_common.config.backend import CircuitBreaker, OutlierEjection, ReplicaPolicyName
from serve_common.names import BackendTag, ReplicaTag
from serve_common.protocol.snapshots import BackendProtection, BackendSnapshot
from serve_common.routing.queues import Dispatch, Queued, QueueFull, Refusal, RequestKey, SendTo
from serve_common.routing.replica_choice import (
    Affinity,
    Block,
    ReplicaSlots,
    choose_by_hash,
    score,
    stable_hash,
)
from serve_common.routing.replica_pool import LEAVING_S
from serve_common.routing.route_table import TrafficSplit
from serve_common.routing.router import Router

TAG = BackendTag("d/a")
REPLICAS = [ReplicaTag(f"d/a#{i}") for i in range(4)]
replicas = st.sampled_from(REPLICAS)
wishes = st.none() | st.builds(
    Affinity,
    st.none() | st.integers(1, 2),
    st.none() | st.integers(0, 2**64 - 1),
    st.sampled_from(["", "m1", "m2"]),
)
protections = st.builds(
    BackendProtection,
    replica_policy=st.sampled_from(ReplicaPolicyName),
    packing_num=st.integers(1, 3),
    outlier_ejection=st.builds(
        OutlierEjection,
        consecutive_failures=st.integers(0, 2),
        ejection_time_s=st.just(0.5),
        max_ejected_percent=st.sampled_from([0.0, 30.0, 50.0]),
    ),
    circuit_breaker=st.builds(CircuitBreaker, requests_min=st.integers(1, 3), failure_percent=st.just(50.0)),
)


ends = st.sampled_from(["finished", "finished", "cancelled", "failed", "unanswered"])


class RouterMachine(RuleBasedStateMachine):
    """The model: where each request is, what each replica may take, and who waits in which order."""

    requests = Bundle("requests")

    @initialize(seed=st.integers(0, 2**16))
    def make(self, seed):
        self.router = Router(TAG, random.Random(seed).random, lambda: self.now)
        self.now = 0.0
        self.last_key = 0
        self.arrivals = 0
        self.limit, self.queue_max = 100, 1000
        self.running: set[ReplicaTag] = set()
        self.draining: set[ReplicaTag] = set()
        self.blocked: set[ReplicaTag] = set()
        self.in_flight: dict[RequestKey, ReplicaTag] = {}
        self.waiting: dict[RequestKey, tuple[float, int]] = {}
        self.suspects: set[RequestKey] = set()
        self.order: dict[RequestKey, tuple[float, int]] = {}
        self.leaving: dict[ReplicaTag, float] = {}
        self.resting: set[ReplicaTag] = set()
        self.answered = 0
        self.failed = 0
        self.waited_s = 0.0
        self.apply(
            ["running", "running", "draining", "gone"], 2, 4, BackendProtection(), versions={}, can_wake=False
        )

    # -- helpers of the model --

    def at(self, replica):
        return {request for request, where in self.in_flight.items() if where == replica}

    def take(self, dispatches, *, may_be_unblocked=frozenset()):
        for dispatch in dispatches:
            assert isinstance(dispatch, Dispatch)
            assert dispatch.request == min(self.next_ones(), key=self.waiting.__getitem__), "queue order"
            assert dispatch.replica in self.running
            assert dispatch.replica not in self.blocked - may_be_unblocked
            assert len(self.at(dispatch.replica)) < self.limit
            del self.waiting[dispatch.request]
            self.in_flight[dispatch.request] = dispatch.replica

    def next_ones(self):
        """Those of the waiting of whom the first is next: suspects where another replica would be left."""
        suspects = {request for request in self.waiting if request in self.suspects}
        if suspects and self.may_risk_one():
            return suspects
        return self.waiting.keys() - suspects

    def may_risk_one(self):
        return sum(slots.is_healthy for slots in self.router.pool.replicas.values()) > 1

    # -- requests --

    @rule(
        target=requests,
        waits_s=st.lists(st.integers(0, 5), min_size=1, max_size=6),
        is_admitted=st.booleans(),
        is_suspect=st.sampled_from([False, False, True]),
        wish=wishes,
    )
    def submit(self, waits_s, is_admitted, is_suspect, wish):
        taken = (self.submit_one(wait_s, is_admitted, is_suspect, wish) for wait_s in waits_s)
        return multiple(*(request for request in taken if request is not None))

    def submit_one(self, wait_s, is_admitted, is_suspect, wish):
        self.last_key += 1
        request, deadline = RequestKey(self.last_key), self.now + wait_s
        if is_suspect:  # it was taken once
            is_admitted = True
            self.suspects.add(request)
        outcome = self.router.submit(
            request, deadline, is_admitted=is_admitted, is_suspect=is_suspect, affinity=wish
        )
        if isinstance(outcome, QueueFull):
            assert not is_admitted
            assert len(self.waiting) >= self.queue_max
            return None
        self.arrivals += 1
        self.order[request] = (deadline, self.arrivals)
        if isinstance(outcome, SendTo):
            assert not self.next_ones(), "nobody may overtake"
            self.waiting[request] = self.order[request]
            self.take([Dispatch(request, outcome.replica)])
        else:
            assert outcome == Queued()
            assert is_admitted or len(self.waiting) < self.queue_max
            self.waiting[request] = self.order[request]
        return request

    @rule(request=consumes(requests), how=ends)
    def end_any(self, request, how):
        self.end(request, how)

    @precondition(lambda self: self.in_flight and self.waiting)
    @rule(how=ends, data=st.data())
    def end_one_that_others_wait_for(self, how, data):
        self.end(data.draw(st.sampled_from(sorted(self.in_flight))), how)

    def end(self, request, how):
        replica = self.in_flight.pop(request, None)
        is_there = replica is not None or request in self.waiting
        self.waiting.pop(request, None)
        was_blocked = {replica} if replica else set()
        end = {
            "finished": self.router.finished,
            "cancelled": self.router.cancelled,
            "failed": lambda request: self.router.failed(request, self.now),
            "unanswered": lambda request: self.router.incomplete(request, self.now),
        }[how]
        self.answered += is_there and how in ("finished", "failed")
        self.failed += how == "unanswered" and replica is not None
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
        self.sync_resting()
        self.take(dispatches)

    # -- replicas --

    @rule(replica=replicas)
    def die(self, replica):
        lost = self.router.replica_gone(replica, self.now, self.router.requests_at(replica))
        assert set(lost) == self.at(replica)
        self.failed += len(lost)
        for request in lost:
            del self.in_flight[request]
        if replica in self.running | self.draining:
            self.blocked.add(replica)

    @rule(replica=replicas)
    def quarantine(self, replica):
        self.router.quarantine(replica, self.now)
        if replica in self.running | self.draining:
            self.blocked.add(replica)

    @rule(replica=replicas, models=st.frozensets(st.sampled_from(["m1", "m2"])))
    def hold(self, replica, models):
        assert self.router.hold(replica, models) == (
            replica in self.running | self.draining | {*self.leaving}
        )

    @rule(
        states=st.lists(st.sampled_from(["running", "running", "draining", "gone"]), min_size=4, max_size=4),
        limit=st.integers(1, 3),
        queue_max=st.integers(0, 4),
        protection=protections,
        versions=st.dictionaries(replicas, st.integers(1, 2)),
        can_wake=st.booleans(),
    )
    def apply(self, states, limit, queue_max, protection, versions, can_wake):
        by_state = {
            state: [r for r, s in zip(REPLICAS, states, strict=True) if s == state]
            for state in ("running", "draining", "gone")
        }
        self.limit, self.queue_max = limit, queue_max
        drained = self.draining | self.resting | {*self.leaving}
        self.running, self.draining = set(by_state["running"]), set(by_state["draining"])
        left = {
            r: self.leaving.get(r, self.now + LEAVING_S) for r in drained & {*by_state["gone"]} if self.at(r)
        }
        asked = {request for r in left.keys() - self.leaving for request in self.at(r)}
        self.leaving = left
        self.protection = protection
        applied = self.router.apply(
            BackendSnapshot(
                backend_tag=TAG,
                replicas=by_state["running"],
                draining=by_state["draining"],
                max_concurrent_queries=limit,
                max_queued_requests=queue_max,
                protection=protection,
                code_versions=versions,
                can_wake=can_wake,
            ),
            self.now,
        )
        assert self.router.is_scaled_to_zero == (can_wake and not self.running)
        self.sync_blocked()
        there = self.running | self.draining | {*self.leaving}
        expected = {r for r, where in self.in_flight.items() if where not in there}
        assert set(applied.leaving) == asked
        assert set(applied.lost) == expected
        assert len(applied.lost) == len(expected)
        self.failed += len(expected)
        for request in applied.lost:
            del self.in_flight[request]
        self.take(applied.dispatches)

    @precondition(lambda self: len(self.waiting) > 3)
    @rule()
    def drop(self):
        dropped = self.router.drop()
        in_order = sorted(self.waiting, key=lambda request: (request in self.suspects, self.waiting[request]))
        assert list(dropped.waiting) == in_order
        assert set(dropped.lost) == set(self.in_flight)
        self.waiting.clear()
        self.in_flight.clear()
        self.running, self.draining, self.blocked, self.leaving = set(), set(), set(), {}

    # -- time --

    @rule(seconds=st.sampled_from([0.01, 0.1, 1.0, 6.0]))
    def pass_time(self, seconds):
        self.now += seconds
        self.waited_s += seconds * len(self.waiting)
        due = {r for r, (deadline, _) in self.waiting.items() if deadline <= self.now}
        expired = self.router.expire(self.now)
        assert set(expired) == due
        assert len(expired) == len(due)
        for request in expired:
            del self.waiting[request]
        self.take(self.router.reopen(self.now), may_be_unblocked=frozenset(REPLICAS))
        self.router.tick(self.now)
        over = {r for r, until in self.leaving.items() if self.now >= until or not self.at(r)}
        lost = self.router.take_left(self.now)
        assert set(lost) == {request for r in over for request in self.at(r)}
        self.failed += len(lost)
        for request in lost:
            del self.in_flight[request]
        self.leaving = {r: until for r, until in self.leaving.items() if r not in over}
        assert self.router.pool.has_leaving == bool(self.leaving)
        self.sync_blocked()
        if seconds > 5:
            assert not self.blocked, "nobody is put aside for ever"
            assert not self.router.has_blocked

    def sync_blocked(self):
        """The model does not know the pauses: it asks, and the invariants below judge the answer."""
        self.blocked = {
            tag
            for tag, slots in self.router.pool.replicas.items()
            if slots.block is not None or slots.is_ejected
        }
        self.sync_resting()

    def sync_resting(self):
        """Which ones drain by their own word follows from pauses too."""
        self.resting = {
            tag for tag, slots in self.router.pool.replicas.items() if slots.block is Block.RESTING
        }

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
    def all_waiting_is_counted_to_the_second(self):
        assert abs(self.router.queued_seconds(self.now) - self.waited_s) < 1e-6
        waited_on_s = self.router.queued_seconds(self.now + 0.5) - self.router.queued_seconds(self.now)
        assert abs(waited_on_s - 0.5 * len(self.waiting)) < 1e-6

    @precondition(lambda self: hasattr(self, "router"))
    @invariant()
    def everything_that_ended_is_counted_once(self):
        assert self.router.completed == self.answered
        assert self.router.circuit.failures == self.failed

    @precondition(lambda self: hasattr(self, "router"))
    @invariant()
    def no_more_replicas_are_ejected_than_is_allowed(self):
        ejection = self.protection.outlier_ejection
        ejected = {tag for tag, slots in self.router.pool.replicas.items() if slots.is_ejected}
        assert ejected <= self.running
        assert len(ejected) * 100 <= len(self.running) * ejection.max_ejected_percent
        assert not ejected or ejection.consecutive_failures
        assert {slots.tag for slots in self.router.pool.outliers.ejected} == ejected

    @precondition(lambda self: hasattr(self, "router"))
    @invariant()
    def nobody_waits_while_a_replica_could_take_it(self):
        free = [r for r in self.running - self.blocked if len(self.at(r)) < self.limit]
        assert not (self.next_ones() and free)

    @precondition(lambda self: hasattr(self, "router"))
    @invariant()
    def suspects_wait_only_where_nobody_would_be_left(self):
        for slots in self.router.pool.replicas.values():
            if slots.requests & self.suspects:
                assert slots.tag in self.running | self.draining | {*self.leaving}
        if self.waiting and self.waiting.keys() <= self.suspects and self.may_risk_one():
            assert not self.router._open

    @precondition(lambda self: hasattr(self, "router"))
    @invariant()
    def the_list_of_open_replicas_is_right(self):
        opened = self.router._open
        assert [slots.position for slots in opened] == list(range(len(opened)))
        free = {r for r in self.running - self.blocked if len(self.at(r)) < self.limit}
        assert {slots.tag for slots in opened} == free


TestRouter = RouterMachine.TestCase
TestRouter.settings = settings(max_examples=40, stateful_step_count=50, deadline=None)


# Pinned keys: spread by weight, the same in every process, and moved only where they must.


hashes = st.integers(0, 2**64 - 1)
weights = st.dictionaries(
    st.sampled_from([BackendTag(f"d/{letter}") for letter in "abcde"]),
    st.floats(0, 1),
    min_size=1,
)


def slots_of(count: int) -> list[ReplicaSlots]:
    return [ReplicaSlots(ReplicaTag(f"d/a#{ordinal}")) for ordinal in range(count)]


@given(hashes, st.permutations(slots_of(6)), st.integers(1, 5))
def test_a_replica_that_goes_moves_its_own_keys_only_and_takes_them_back(key, replicas, left) -> None:
    pinned = choose_by_hash(key, replicas)
    without = choose_by_hash(key, replicas[:left])
    assert without is pinned or pinned not in replicas[:left]
    assert choose_by_hash(key, sorted(replicas, key=lambda slots: slots.tag)) is pinned


@given(hashes, weights, weights)
def test_a_key_moves_only_to_a_backend_whose_weight_grew_against_the_one_it_leaves(key, old, new) -> None:
    before, after = TrafficSplit(old).choose_for(key), TrafficSplit(new).choose_for(key)
    assert (before is None) == (max(old.values()) == 0)
    assert after is None or new[after] > 0
    if before is not None and after is not None and before != after and new.get(before):
        assert new[after] * old[before] >= old.get(after, 0.0) * new[before]


@given(hashes, weights)
def test_a_backend_that_is_left_out_moves_its_own_keys_only(key, traffic) -> None:
    split = TrafficSplit(traffic)
    pinned = split.choose_for(key)
    for tag in traffic:
        if tag != pinned:
            assert split.without([tag]).choose_for(key) == pinned


def test_keys_are_spread_over_backends_by_weight_and_over_replicas_evenly() -> None:
    split = TrafficSplit({BackendTag("d/a"): 0.7, BackendTag("d/b"): 0.2, BackendTag("d/c"): 0.1})
    replicas = slots_of(5)
    keys = [stable_hash(f"user-{number}") for number in range(20_000)]
    backends = [split.choose_for(key) for key in keys]
    for tag, share in (("d/a", 0.7), ("d/b", 0.2), ("d/c", 0.1)):
        assert backends.count(BackendTag(tag)) / len(keys) == pytest.approx(share, abs=0.012)
    # One backend's keys must not be those of some of its replicas only.
    mine = [key for key, tag in zip(keys, backends, strict=True) if tag == "d/a"]
    taken = [choose_by_hash(key, replicas) for key in mine]
    for slots in replicas:
        assert taken.count(slots) / len(mine) == pytest.approx(0.2, abs=0.015)


def test_a_small_shift_of_weight_moves_about_as_many_keys() -> None:
    a, b = BackendTag("d/a"), BackendTag("d/b")
    before, after = TrafficSplit({a: 0.9, b: 0.1}), TrafficSplit({a: 0.8, b: 0.2})
    keys = [stable_hash(f"user-{number}") for number in range(20_000)]
    moves = [(before.choose_for(key), after.choose_for(key)) for key in keys]
    assert moves.count((b, a)) == 0
    assert moves.count((a, b)) / len(keys) == pytest.approx(0.1, abs=0.01)


def test_hashes_are_the_same_in_every_process_and_each_bit_matters() -> None:
    assert stable_hash("user-1") == 0x9AAC_5A86_21EA_E188
    assert stable_hash("\ud800") != stable_hash("")  # what a header may hold is no reason to fail
    chance = random.Random(7)
    flips = []
    for _ in range(2_000):
        key, member = chance.getrandbits(64), chance.getrandbits(64)
        flipped = score(key, member) ^ score(key ^ 1 << chance.randrange(64), member)
        flips.append(flipped.bit_count())
    assert sum(flips) / len(flips) == pytest.approx(32, abs=0.5)
