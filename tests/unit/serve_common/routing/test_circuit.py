"""Ejection of replicas, the retry budget and the circuit: when each of them steps in, and that each of them ends."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_common.config.backend import CircuitBreaker, OutlierEjection, ReplicaPolicyName
from serve_common.names import BackendTag, ReplicaTag
from serve_common.protocol.snapshots import BackendProtection, BackendSnapshot
from serve_common.routing.circuit import ALWAYS, TRIAL_RETRY_S, WINDOW_S, Circuit, RecentCounts, RetryBudget
from serve_common.routing.queues import Dispatch, Queued, Refusal, RequestKey, SendTo
from serve_common.routing.replica_choice import Affinity, stable_hash
from serve_common.routing.router import Router

TAG = BackendTag("d/a")
R = [ReplicaTag(f"d/a#{i}") for i in range(4)]


class World:
    """A router with numbered requests."""

    protection: ClassVar[dict[str, Any]] = {}
    """What a snapshot sets unless it is told otherwise."""

    def __init__(self, **backend: Any) -> None:
        self.router = Router(TAG, random.Random(3).random, lambda: 0.0)
        self.last = 0
        self.apply(**backend)

    def apply(self, *, replicas=R, limit=100, versions=None, draining=(), **protection) -> list[Dispatch]:
        snapshot = BackendSnapshot(
            backend_tag=TAG,
            replicas=list(replicas),
            draining=list(draining),
            max_concurrent_queries=limit,
            max_queued_requests=100,
            protection=BackendProtection(**{**self.protection, **protection}),
            code_versions=versions or {},
        )
        return list(self.router.apply(snapshot, 0.0).dispatches)

    def submit(self, wish: Affinity | None = None) -> ReplicaTag | None:
        self.last += 1
        outcome = self.router.submit(RequestKey(self.last), 1e9, affinity=wish)
        return outcome.replica if isinstance(outcome, SendTo) else None

    def end(self, request: int) -> list[Dispatch]:
        return list(self.router.finished(RequestKey(request)))

    def take(self, count: int, wish: Affinity | None = None) -> list[ReplicaTag | None]:
        return [self.submit(wish) for _ in range(count)]


class EjectingWorld(World):
    """Each request goes to the replica that has had none for the longest time."""

    protection: ClassVar[dict[str, Any]] = {
        "replica_policy": ReplicaPolicyName.ROUND_ROBIN,
        "outlier_ejection": OutlierEjection(consecutive_failures=3, ejection_time_s=10.0),
    }

    def fail(self, replica: ReplicaTag, times: int, now: float = 0.0, how: str = "failed") -> None:
        """Let ``replica`` fail so many requests, and others answer what they get meanwhile."""
        while times:
            taken = self.submit()
            request = RequestKey(self.last)
            if taken == replica:
                times -= 1
                getattr(self.router, how)(request, now)
            else:
                assert taken is not None, "nobody is open"
                self.router.finished(request)

    def open_now(self) -> set[ReplicaTag]:
        taken = {self.submit() for _ in range(8)}
        for request in range(self.last - 7, self.last + 1):
            self.router.cancelled(RequestKey(request))
        return {tag for tag in taken if tag is not None}


# -- ejection --


@pytest.mark.parametrize("how", ["failed", "incomplete"])
def test_a_replica_that_fails_in_a_row_is_left_out_for_a_time(how: str) -> None:
    world = EjectingWorld()
    world.fail(R[0], 2, how=how)
    assert world.open_now() == set(R)
    world.fail(R[0], 1, how=how)
    assert world.open_now() == set(R[1:])
    assert (world.router.ejections, world.router.has_blocked) == (1, True)
    world.router.reopen(9.9)
    assert world.open_now() == set(R[1:])
    world.router.reopen(10.0)
    assert world.open_now() == set(R)
    assert not world.router.has_blocked


def test_an_answer_between_two_failures_begins_the_row_anew() -> None:
    world = EjectingWorld()
    for _ in range(5):
        world.fail(R[0], 2)
        while world.submit() != R[0]:
            world.router.cancelled(RequestKey(world.last))
        world.router.finished(RequestKey(world.last))
    assert world.open_now() == set(R)


def test_each_ejection_in_a_row_lasts_longer_up_to_ten_times_and_a_success_ends_the_row() -> None:
    world, now, times = EjectingWorld(), 0.0, []
    for _ in range(12):
        world.fail(R[0], 3, now)
        began = now
        while R[0] not in world.open_now():
            now += 5.0
            world.router.reopen(now)
        times.append(now - began)
    assert times == [10.0 * min(row, 10) for row in range(1, 13)]
    while world.submit() != R[0]:
        world.router.cancelled(RequestKey(world.last))
    world.router.finished(RequestKey(world.last))
    world.fail(R[0], 3, now)
    world.router.reopen(now + 10.0)
    assert world.open_now() == set(R)


def test_never_more_than_the_allowed_share_is_left_out() -> None:
    world = EjectingWorld()
    for replica in R[:3]:
        world.fail(replica, 3)
    assert world.open_now() == {R[2], R[3]}
    # With three replicas only one may be out: the one whose time ends first comes back.
    world.apply(replicas=R[:3])
    assert world.open_now() == {R[0], R[2]}
    world.apply(replicas=R[1:2])
    assert world.open_now() == {R[1]}
    world.fail(R[1], 9)
    assert world.open_now() == {R[1]}, "an only replica is never left out"


def test_what_waits_goes_out_when_an_ejection_ends() -> None:
    world = EjectingWorld(replicas=R[:2], limit=1)
    world.fail(R[0], 3)
    held, waiting = world.submit(), world.submit()
    assert (held, waiting) == (R[1], None)
    assert world.router.reopen(10.0) == [Dispatch(RequestKey(world.last), R[0])]


def test_zero_failures_eject_nobody_and_a_change_to_it_brings_all_back() -> None:
    world = EjectingWorld()
    world.fail(R[0], 3)
    world.apply(outlier_ejection=OutlierEjection(consecutive_failures=0))
    assert world.open_now() == set(R)
    world.fail(R[0], 50)
    assert world.open_now() == set(R)


def test_a_snapshot_neither_ends_an_ejection_nor_keeps_one_that_drains() -> None:
    world = EjectingWorld()
    world.fail(R[0], 3)
    world.apply()
    assert world.open_now() == set(R[1:])
    world.apply(replicas=R[1:], draining=R[:1])
    world.fail(R[1], 3)
    world.apply()
    assert world.open_now() == {R[0], R[2], R[3]}


def test_a_death_counts_with_all_that_it_took() -> None:
    world = EjectingWorld()
    for _ in range(12):
        world.submit()
    assert len(world.router.replica_gone(R[0], 0.0, world.router.requests_at(R[0]))) == 3
    world.router.reopen(5.0)
    assert world.open_now() == set(R[1:])


# -- the window --


@given(
    st.lists(st.tuples(st.floats(0.001, 4.0), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=60)
)
def test_a_window_counts_all_of_its_time_and_at_most_a_step_more(story) -> None:
    counts, now, first, second = RecentCounts(10.0), 0.0, 0, 0
    events: list[tuple[float, int, int]] = []
    for wait_s, more_first, more_second in story:
        now += wait_s
        counts.tick(now, first, second)
        events.append((now, more_first, more_second))
        first, second = first + more_first, second + more_second
        grown = counts.grown(now, first, second)
        for at, total in ((0, grown[0]), (1, grown[1])):
            inside = sum(event[at + 1] for event in events if event[0] > now - 9.0 + 4.0)
            around = sum(event[at + 1] for event in events if event[0] >= now - 11.0 - 4.0)
            assert inside <= total <= around
    assert len(counts._samples) <= 12


def test_what_comes_after_a_long_silence_is_all_recent() -> None:
    counts = RecentCounts(10.0)
    counts.tick(0.0, 5, 5)
    assert counts.grown(1000.0, 8, 6) == (3, 1)
    assert counts.grown(1005.0, 9, 6) == (4, 1)
    assert counts.grown(1016.0, 9, 6) == (0, 0)


# -- the retry budget --


def test_ten_second_sendings_are_always_allowed_and_then_a_share() -> None:
    budget = RetryBudget(20.0)
    assert [budget.take(0.0, requests=20) for _ in range(ALWAYS + 1)] == [True] * ALWAYS + [False]
    assert [budget.take(1.0, requests=60) for _ in range(3)] == [True, True, False]
    assert (budget.spent, budget.refused) == (12, 2)


def test_the_budget_comes_back_with_time() -> None:
    budget = RetryBudget(0.0)
    assert [budget.take(0.0, 100) for _ in range(ALWAYS + 1)].count(True) == ALWAYS
    assert not budget.take(WINDOW_S - 0.1, 200)
    assert budget.take(2 * WINDOW_S, 300)


@given(st.lists(st.tuples(st.floats(0.0, 1.0), st.integers(0, 20), st.integers(0, 20)), max_size=80))
def test_more_than_the_share_is_never_spent_within_a_window(story) -> None:
    budget, now, requests = RetryBudget(20.0), 0.0, 0
    arrivals: list[tuple[float, int]] = []
    spent: list[float] = []
    for wait_s, new, lost in story:
        now += wait_s
        budget.tick(now, requests)
        arrivals.append((now, new))
        requests += new
        for _ in range(lost):
            if budget.take(now, requests):
                spent.append(now)
        recent = sum(count for at, count in arrivals if at >= now - WINDOW_S - 2.0)
        taken = sum(at > now - WINDOW_S + 1.0 for at in spent)
        assert taken <= max(ALWAYS, 0.2 * recent)


# -- the circuit --

BREAKER = CircuitBreaker(failure_percent=50.0, requests_min=4, window_s=10.0, open_time_s=5.0)


def key(number: int) -> RequestKey:
    return RequestKey(number)


def test_too_few_requests_conclude_nothing() -> None:
    circuit = Circuit(BREAKER)
    circuit.fail(0.0, 3, completed=0)
    assert not circuit.is_open
    circuit.fail(1.0, 1, completed=4)
    assert circuit.is_open


def test_a_share_below_the_limit_opens_nothing_and_old_failures_are_forgotten() -> None:
    circuit = Circuit(BREAKER)
    circuit.fail(0.0, 4, completed=5)
    assert not circuit.is_open
    circuit.fail(30.0, 3, completed=9)
    assert not circuit.is_open
    circuit.fail(30.0, 1, completed=9)
    assert circuit.is_open


def opened() -> Circuit:
    circuit = Circuit(BREAKER)
    circuit.fail(0.0, 4, completed=0)
    assert circuit.is_open
    return circuit


def test_an_open_circuit_says_when_it_is_worth_trying_again_and_then_lets_one_try() -> None:
    circuit = opened()
    assert circuit.refuse(key(1), 1.0) == 4.0
    assert circuit.refuse(key(2), 5.0) is None
    assert circuit.refuse(key(3), 5.0) == TRIAL_RETRY_S
    circuit.ended(key(1), None, completed=1)  # of before it opened
    assert circuit.is_open
    circuit.ended(key(2), None, completed=2)
    assert not circuit.is_open
    circuit.fail(6.0, 3, completed=2)
    assert not circuit.is_open, "what opened it counts no more"
    assert (circuit.opened, circuit.refused, circuit.failures) == (1, 2, 7)


def test_a_trial_that_fails_shuts_it_again_and_one_that_is_given_up_lets_the_next_try() -> None:
    circuit = opened()
    assert circuit.refuse(key(1), 5.0) is None
    circuit.fail(6.0, 1, completed=0)
    circuit.ended(key(1), 6.0, completed=0)
    assert circuit.refuse(key(2), 10.9) == pytest.approx(0.1)
    assert circuit.refuse(key(2), 11.0) is None
    circuit.withdrew(key(2))
    assert circuit.refuse(key(3), 11.1) is None
    assert circuit.is_open


def test_a_config_that_wants_no_circuit_closes_it_and_one_with_another_window_starts_counting() -> None:
    circuit = opened()
    circuit.configure(CircuitBreaker(failure_percent=0.0), 10)
    assert not circuit.is_open
    circuit.fail(1.0, 1000, completed=10)
    assert not circuit.is_open
    circuit.configure(CircuitBreaker(failure_percent=50.0, requests_min=4, window_s=60.0), 1000)
    circuit.fail(2.0, 3, completed=1000)
    assert not circuit.is_open
    circuit.fail(3.0, 1, completed=1000)
    assert circuit.is_open


@given(st.lists(st.tuples(st.sampled_from(["try", "good", "bad", "gone", "wait"]), st.integers(0, 9))))
def test_at_most_one_tries_at_a_time_and_only_its_success_closes(story) -> None:
    circuit, now, last = opened(), 0.0, 0
    trial: int | None = None
    for event, number in story:
        if not circuit.is_open:
            break
        match event:
            case "wait":
                now += number / 2
            case "try":
                last += 1
                if circuit.refuse(key(last), now) is None:
                    assert trial is None
                    trial = last
            case "good" | "bad" | "gone":
                ended = last - number
                if event == "good":
                    circuit.ended(key(ended), None, 0)
                elif event == "bad":
                    circuit.ended(key(ended), now, 0)
                else:
                    circuit.withdrew(key(ended))
                assert circuit.is_open == (event != "good" or ended != trial or trial is None)
                trial = None if ended == trial else trial


@pytest.mark.parametrize("end", ["expire", "drop", "cancel", "die", "snapshot"])
def test_a_trial_never_stays_the_trial_when_it_is_gone(end: str) -> None:
    world = EjectingWorld(replicas=R[:1], limit=1, circuit_breaker=BREAKER)
    world.fail(R[0], 4, how="incomplete")
    router, request = world.router, RequestKey(1000)
    assert router.circuit.is_open
    if end in ("expire", "drop"):
        world.submit()  # so that the trial waits
    assert router.circuit.refuse(request, 5.0) is None
    router.submit(request, 6.0)
    match end:
        case "expire":
            assert router.expire(7.0) == [request]
        case "drop":
            router.drop()
        case "cancel":
            router.cancelled(request)
        case "die":
            assert router.replica_gone(R[0], 7.0, router.requests_at(R[0])) == [request]
        case "snapshot":
            world.apply(replicas=R[1:2], circuit_breaker=BREAKER)
    assert router.circuit.is_open
    assert router.circuit.refuse(RequestKey(1001), 20.0) is None


# -- a bus that hung --


def test_an_opening_that_came_from_the_bus_alone_is_taken_back() -> None:
    circuit = opened()
    circuit.forgive(0.0, completed=0)
    assert not circuit.is_open
    circuit.fail(1.0, 3, completed=0)
    assert not circuit.is_open, "what failed with the bus counts no more"


def test_a_circuit_that_was_open_before_the_bus_hung_lets_a_trial_pass_at_once() -> None:
    circuit = opened()
    assert circuit.refuse(key(1), 5.0) is None
    circuit.ended(key(1), 6.0, completed=0)  # the trial failed while the bus hung
    circuit.forgive(4.0, completed=0)
    assert circuit.is_open
    assert circuit.refuse(key(2), 6.1) is None, "the trial"
    assert circuit.refuse(key(3), 6.1) == TRIAL_RETRY_S


def test_who_was_ejected_while_the_bus_hung_comes_back_with_it_and_nobody_else_does() -> None:
    world = EjectingWorld()
    world.fail(R[0], 3, now=1.0)
    world.fail(R[1], 3, now=5.0, how="incomplete")
    world.fail(R[2], 2, now=5.0, how="incomplete")
    assert world.open_now() == {R[2], R[3]}
    world.router.forgive(4.0)
    assert world.open_now() == {R[1], R[2], R[3]}
    world.fail(R[2], 1, now=6.0)
    assert R[2] in world.open_now(), "its failures of that time are no part of a row"
    world.fail(R[1], 3, now=6.0)
    world.router.reopen(16.0)
    assert R[1] in world.open_now(), "the row of ejections does not count that one"


def test_what_waits_goes_out_when_who_was_ejected_comes_back() -> None:
    world = EjectingWorld(replicas=R[:2], limit=1)
    world.fail(R[0], 3, now=5.0, how="incomplete")
    assert world.submit() == R[1]
    assert world.submit() is None
    assert [dispatch.replica for dispatch in world.router.forgive(4.0)] == [R[0]]


# Replica policies as snapshots set them, and wishes that come before them: versions, pinned keys, models.


def shard(key: str) -> Affinity:
    return Affinity(shard_hash=stable_hash(key))


def test_round_robin_takes_all_in_turn_and_starts_with_the_next_when_one_is_full() -> None:
    world = World(replica_policy=ReplicaPolicyName.ROUND_ROBIN, limit=2)
    assert sorted(world.take(4)) == R
    assert sorted(world.take(4)) == R
    assert world.submit() is None
    assert len(world.end(3)) == 1


def test_fixed_packing_fills_a_batch_before_the_next_replica() -> None:
    world = World(replica_policy=ReplicaPolicyName.FIXED_PACKING, packing_num=3)
    taken = world.take(12)
    assert [len(set(taken[at : at + 3])) for at in range(0, 12, 3)] == [1, 1, 1, 1]
    assert sorted(set(taken)) == R
    assert world.take(3) == taken[:3]


def test_fixed_packing_leaves_a_row_that_cannot_go_on() -> None:
    world = World(replica_policy=ReplicaPolicyName.FIXED_PACKING, packing_num=3, limit=2)
    taken = world.take(8)
    assert [len(set(taken[at : at + 2])) for at in range(0, 8, 2)] == [1, 1, 1, 1]
    assert sorted(set(taken)) == R


def test_a_random_choice_is_even_and_power_of_two_is_more_so() -> None:
    spreads = {}
    for policy in (ReplicaPolicyName.RANDOM, ReplicaPolicyName.POWER_OF_TWO_CHOICES):
        counts = Counter(World(replica_policy=policy, limit=1000).take(400))
        assert len(counts) == 4
        spreads[policy] = max(counts.values()) - min(counts.values())
    assert spreads[ReplicaPolicyName.POWER_OF_TWO_CHOICES] < 6 < spreads[ReplicaPolicyName.RANDOM] < 80


def test_a_snapshot_changes_the_policy_at_once_and_keeps_an_unchanged_ones_memory() -> None:
    world = World(replica_policy=ReplicaPolicyName.FIXED_PACKING, packing_num=4)
    first = world.take(2)
    world.apply(replica_policy=ReplicaPolicyName.FIXED_PACKING, packing_num=4)
    assert world.take(2) == first  # the row goes on
    world.apply(replica_policy=ReplicaPolicyName.FIXED_PACKING, packing_num=2)
    taken = world.take(4)
    assert taken[0] == taken[1] != taken[2] == taken[3]
    world.apply(replica_policy=ReplicaPolicyName.ROUND_ROBIN)
    assert len(set(world.take(4))) == 4


def test_a_key_stays_with_its_replica_and_comes_back_to_it() -> None:
    world = World(limit=3)
    (home,) = {world.submit(shard("anna")) for _ in range(3)}
    second = world.submit(shard("anna"))  # home is full: nobody waits while another is free
    assert second not in (None, home)
    world.end(1)
    assert world.submit(shard("anna")) == home
    world.apply(replicas=[tag for tag in R if tag != home])
    assert world.submit(shard("anna")) == second
    world.apply()
    assert world.submit(shard("anna")) == home


@pytest.mark.parametrize("why", ["draining", "busy", "silent", "ejected"])
def test_a_pinned_replica_that_takes_nothing_is_passed_over_for_the_next_of_the_key(why: str) -> None:
    world = World(outlier_ejection=OutlierEjection(consecutive_failures=1))
    home = world.submit(shard("anna"))
    assert home is not None
    match why:
        case "draining":
            world.apply(replicas=[tag for tag in R if tag != home], draining=[home])
        case "busy":
            (dispatch,) = world.router.refused(RequestKey(1), home, Refusal.BUSY, 0.0)
            assert dispatch.replica != home
        case "silent":
            world.router.quarantine(home, 0.0)
        case "ejected":
            world.router.failed(RequestKey(1), 0.0)
    nexts = set(world.take(5, shard("anna")))
    assert len(nexts) == 1
    assert home not in nexts


def test_a_pinned_request_that_waits_takes_whatever_is_free_first() -> None:
    world = World(replicas=R[:2], limit=1)
    home, other = world.take(2, shard("anna"))
    assert world.submit(shard("anna")) is None
    assert world.end(2) == [Dispatch(RequestKey(3), other)]
    assert home != other


def test_the_preferred_version_is_taken_while_one_of_it_is_open() -> None:
    world = World(limit=2, versions={R[0]: 1, R[1]: 1, R[2]: 2, R[3]: 2})
    assert set(world.take(4, Affinity(code_version=2))) == {R[2], R[3]}
    assert set(world.take(4, Affinity(code_version=2))) == {R[0], R[1]}  # they are full
    assert world.router.submit(RequestKey(99), 9.0, affinity=Affinity(code_version=2)) == Queued()
    world.apply(limit=9)  # all run the same version now: no wish to fulfil, and none to fail
    assert len(set(world.take(8, Affinity(code_version=2)))) == 4


def test_a_key_is_pinned_among_the_replicas_of_its_version() -> None:
    versions = {R[0]: 1, R[1]: 1, R[2]: 2, R[3]: 2}
    world = World(versions=versions)
    for key in "abcdefgh":
        for version in (1, 2):
            (taken,) = set(world.take(3, Affinity(version, stable_hash(key))))
            assert versions[taken] == version


MODEL = Affinity(model_id="m")


def test_a_model_is_used_where_it_is_held_and_loaded_in_one_place_otherwise() -> None:
    world = World()
    (loading,) = set(world.take(10, MODEL))  # nobody holds it yet
    holder = next(tag for tag in R if tag != loading)
    assert world.router.hold(holder, frozenset({"m", "n"}))
    assert set(world.take(10, MODEL)) == {holder}
    world.router.hold(holder, frozenset({"n"}))
    assert set(world.take(10, MODEL)) == {loading}
    assert not world.router.hold(ReplicaTag("d/a#99"), frozenset({"m"}))


def test_different_models_are_loaded_in_different_places() -> None:
    world = World(limit=1000)
    places = Counter(world.submit(Affinity(model_id=f"m{number}")) for number in range(400))
    assert sorted(places) == R
    assert min(places.values()) > 60


def test_a_hot_model_spreads_to_replicas_that_have_far_less_to_do() -> None:
    world = World(limit=10)
    world.router.hold(R[1], frozenset({"m"}))
    assert set(world.take(5, MODEL)) == {R[1]}
    spread = world.submit(MODEL)
    assert spread != R[1]
    world.router.hold(spread, frozenset({"m"}))
    assert set(world.take(4, MODEL)) == {
        spread
    }  # it has less in flight than the other holder, and is not hot
    third = world.submit(MODEL)
    assert third not in (R[1], spread)


def test_a_hot_model_stays_where_it_is_when_all_others_are_as_busy() -> None:
    world = World(limit=10)
    world.take(20)  # five each
    world.router.hold(R[1], frozenset({"m"}))
    assert set(world.take(3, MODEL)) == {R[1]}


def test_a_key_comes_before_a_model() -> None:
    world = World()
    home = world.submit(shard("anna"))
    other = next(tag for tag in R if tag != home)
    world.router.hold(other, frozenset({"m"}))
    assert world.submit(Affinity(None, stable_hash("anna"), "m")) == home
