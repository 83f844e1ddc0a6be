"""Zero, waking, panic and replicas that start: what the policy does where a load changes suddenly."""

from __future__ import annotations

import pytest

from serve_common.config.autoscaling import AutoscalingQuery
from serve_controller.core.autoscaling.values import ScalingDecisionKind
from tests.unit.autoscaling_rounds import Rounds


def targets(decisions):
    return [decision.target for decision in decisions]


# -- zero -----------------------------------------------------------------------------------------------------


def test_the_last_replica_goes_after_its_own_delay():
    backend = Rounds(1, min_replicas=0, downscale_delay_s=600, downscale_to_zero_delay_s=30)
    assert targets(backend.looks(0, 4)) == [1, 1, 1, 0]
    backend = Rounds(3, min_replicas=0, downscale_delay_s=20, downscale_to_zero_delay_s=40)
    assert targets(backend.looks(0, 5)) == [3, 3, 1, 1, 0]


def test_without_a_delay_of_its_own_the_last_replica_waits_as_the_others():
    backend = Rounds(2, min_replicas=0, downscale_delay_s=30)
    assert targets(backend.looks(0, 4)) == [2, 2, 2, 0]


@pytest.mark.parametrize("reading", [{"seen": 1e-6}, {"seen": 0, "queued": 0.01}, {"seen": 0, "burst": 0.01}])
def test_the_last_replica_stays_while_anything_is_seen(reading):
    backend = Rounds(1, min_replicas=0, downscale_delay_s=0)
    assert targets(backend.looks(times=20, **reading)) == [1] * 20


def test_at_zero_a_waiting_request_that_was_read_wakes_at_once():
    backend = Rounds(0, min_replicas=0)
    assert backend.look(0.0).verdict is ScalingDecisionKind.STEADY
    decision = backend.look(7.0, queued=7.0)
    assert (decision.verdict, decision.target) == (ScalingDecisionKind.WOKEN, 4)


def test_at_zero_what_a_leaving_replica_still_works_on_wakes_nothing():
    assert Rounds(0, min_replicas=0).look(1.0).target == 0


def test_waking_gives_those_who_wait_what_they_need_and_begins_the_delay_to_zero_anew():
    backend = Rounds(1, min_replicas=0, downscale_delay_s=30)
    backend.looks(0, 4)
    decision = backend.wake(9)
    assert (decision.verdict, decision.target) == (ScalingDecisionKind.WOKEN, 5)
    assert "9 requests wait" in decision.why
    assert targets(backend.looks(0, 5)) == [5, 5, 5, 0, 0]


def test_waking_keeps_to_the_limits():
    assert Rounds(0, min_replicas=0, max_replicas=3).wake(100).target == 3
    assert Rounds(0, min_replicas=0).wake(1).target == 1
    assert Rounds(0, min_replicas=0, query=AutoscalingQuery(promql="x", target=1)).wake(100).target == 1


def test_requests_that_wait_with_another_router_at_that_moment_count_but_later_ones_do_not():
    backend = Rounds(0, min_replicas=0, starts=False)
    assert backend.wake(2).target == 1
    backend.now += 1
    assert backend.wake(20).target == 10
    backend.now += 2.5
    assert backend.wake(2000).target == 10


# -- panic ----------------------------------------------------------------------------------------------------


def test_a_burst_adds_at_once_and_says_so():
    decision = Rounds(4, panic_threshold=2).look(9, burst=40)
    assert (decision.verdict, decision.target) == (ScalingDecisionKind.PANIC, 20)
    assert decision.why == "40 requests seen over 10 s, 5 times what 4 replicas should bear: 16 added at once"


def test_a_panic_adds_no_less_than_a_step_that_is_due():
    backend = Rounds(4, panic_threshold=2, upscale_delay_s=0, upscaling_factor=4)
    assert backend.look(20, burst=22).target == 28


def test_less_than_the_threshold_is_no_panic():
    assert Rounds(4, panic_threshold=2).look(9, burst=15.9).verdict is ScalingDecisionKind.WAITS_UP


def test_after_a_panic_nothing_is_removed_until_it_is_over():
    backend = Rounds(4, panic_threshold=2, panic_hold_s=60, downscale_delay_s=0)
    backend.look(9, burst=40)
    decisions = backend.looks(3, 6, burst=3)
    assert {d.verdict for d in decisions[:5]} == {ScalingDecisionKind.HELD}
    assert "held for 50 s more after a burst" in decisions[0].why
    assert decisions[5].target == 2


def test_a_query_and_a_policy_function_know_no_panic():
    query = AutoscalingQuery(promql="x", target=2)
    assert Rounds(4, panic_threshold=2, query=query).look(8, burst=80).target == 4
    assert Rounds(4, panic_threshold=2).look(8, burst=80, asked=4).target == 4


# -- replicas that start --------------------------------------------------------------------------------------


def test_a_queue_that_grows_while_replicas_start_is_no_reason_for_more():
    backend = Rounds(2, panic_threshold=2, starts=False)
    assert backend.look(30, queued=20, burst=30).target == 15
    found = [backend.look(10 + queued, queued=queued, burst=10 + queued) for queued in (100, 400, 900)]
    assert targets(found) == [15, 15, 15]
    assert "who only wait while replicas start are not counted" in found[-1].why


def test_a_step_that_was_cut_short_is_not_made_up_for_by_the_same_queue():
    backend = Rounds(1, upscale_delay_s=0)
    assert backend.look(405, queued=400).target == 10
    assert backend.look(405, queued=400).target == 10
    assert backend.look(45, queued=10).target == 18  # for the 35 in replicas


def test_requests_in_replicas_count_while_others_start():
    backend = Rounds(10, starts=False, upscale_delay_s=0)
    assert backend.look(22).target == 11
    assert backend.look(48).target == 24


def test_a_replica_that_never_starts_does_not_stop_the_others_for_ever():
    backend = Rounds(2, panic_threshold=2, starts=False)
    backend.look(30, queued=20, burst=30)
    assert max(targets(backend.looks(100, 30, queued=90, burst=100))) == 50
