"""What the autoscaling policy decides, in the cases that operators ask about."""

from __future__ import annotations

import math
from typing import Any

import pytest

from serve_common.config.autoscaling import AutoscalingConfig, AutoscalingQuery, QueryMeaning
from serve_controller.core.autoscaling.demand import FEWER_MAX, largest_wanted, record_wanted
from serve_controller.core.autoscaling.policy import decide_scaling, wake
from serve_controller.core.autoscaling.values import (
    LoadSample,
    ScalingDecision,
    ScalingDecisionKind,
    ScalingInput,
    ScalingState,
)

BEGIN = 1_700_000_000.0


class Rounds:
    """A backend polled as the controller does it; its replicas run as soon as decided, unless ``starts`` is False."""

    def __init__(self, num_replicas: int, *, starts: bool = True, **config: Any) -> None:
        self.config = AutoscalingConfig(
            **{"min_replicas": 1, "max_replicas": 100, "panic_threshold": 0, **config}
        )
        self.num_replicas = self.num_running = num_replicas
        self.starts = starts
        self.state = ScalingState()
        self.now = BEGIN

    def inputs(self, asked: int | None = None) -> ScalingInput:
        return ScalingInput(
            config=self.config,
            num_replicas=self.num_replicas,
            num_running=self.num_running,
            policy_target=asked,
        )

    def look(self, seen: float | None, *, asked: int | None = None, **reading: Any) -> ScalingDecision:
        """One look at a load of ``seen``, and then a metrics interval passes."""
        newest = LoadSample(**{"at": self.now - 2, "seen": seen, **reading})
        return self.took(decide_scaling(self.inputs(asked), [newest], self.state, self.now))

    def looks(self, seen: float | None, times: int, **reading: Any) -> list[ScalingDecision]:
        return [self.look(seen, **reading) for _ in range(times)]

    def wake(self, waiting: int) -> ScalingDecision:
        return self.took(wake(self.inputs(), waiting, self.now, self.state), passing_s=0)

    def took(self, decision: ScalingDecision, passing_s: float | None = None) -> ScalingDecision:
        self.state, self.num_replicas = decision.state, decision.target
        self.num_running = self.num_replicas if self.starts else min(self.num_running, self.num_replicas)
        self.now += self.config.metrics_interval_s if passing_s is None else passing_s
        return decision


def targets(decisions):
    return [decision.target for decision in decisions]


# -- up -------------------------------------------------------------------------------------------------------


def test_more_are_added_when_more_were_wanted_for_the_whole_delay_and_not_before():
    backend = Rounds(2)
    assert targets(backend.looks(17.3, 4)) == [2, 2, 2, 9]


def test_while_it_waits_it_says_what_it_saw_and_how_long_it_still_waits():
    backend = Rounds(2)
    assert [d.why for d in backend.looks(17.3, 4)][1:] == [
        "17.3 requests seen over 30 s: 9 replicas wanted; waits 10 s of 30 s before adding",
        "17.3 requests seen over 30 s: 9 replicas wanted; waits 20 s of 30 s before adding",
        "17.3 requests seen over 30 s: 9 replicas wanted for 30 s: 7 added",
    ]


def test_a_single_look_at_less_begins_the_delay_anew():
    backend = Rounds(2)
    backend.looks(17, 3)
    backend.look(4)
    assert targets(backend.looks(17, 4)) == [2, 2, 2, 9]


def test_what_is_added_is_what_is_wanted_when_the_delay_is_over():
    backend = Rounds(2)
    assert targets([backend.look(seen) for seen in (6, 9, 14, 20)])[-1] == 10


def test_a_look_that_comes_a_moment_early_does_not_cost_another_interval():
    backend = Rounds(2)
    backend.looks(17, 3)
    backend.now -= 0.01
    assert backend.look(17).verdict is ScalingDecisionKind.UP


def test_float_noise_does_not_add_a_replica():
    assert Rounds(3, upscale_delay_s=0).look(0.1 * 3 * 20 + 1e-9).target == 3


def test_the_factor_scales_a_step_up():
    assert Rounds(4, upscale_delay_s=0, upscaling_factor=0.5).look(20).target == 7
    assert Rounds(4, upscale_delay_s=0, upscaling_factor=2).look(20).target == 16
    assert Rounds(4, upscale_delay_s=0, upscaling_factor=0.001).look(20).target == 5


def test_one_step_up_makes_at_most_ten_times_as_many():
    assert Rounds(1, upscale_delay_s=0).look(180).target == 10


def test_limits_hold_and_the_reason_says_so():
    decision = Rounds(2, max_replicas=5, upscale_delay_s=0).look(40)
    assert decision.target == 5
    assert "20 replicas wanted, max_replicas is 5" in decision.why
    assert decision.wanted == 20


# -- down -----------------------------------------------------------------------------------------------------


def test_after_the_delay_as_many_stay_as_were_wanted_at_most_during_it():
    backend = Rounds(10, downscale_delay_s=60)
    found = targets([backend.look(seen) for seen in (4, 4, 11, 4, 4, 4, 4, 4, 4, 4)])
    assert found == [10] * 6 + [6, 6, 6, 3]


def test_a_dip_at_the_end_of_the_delay_does_not_count():
    backend = Rounds(10, downscale_delay_s=60)
    backend.looks(14, 6)
    assert backend.look(1).target == 8


def test_one_look_at_which_all_were_wanted_begins_the_delay_anew():
    backend = Rounds(6, downscale_delay_s=60)
    backend.looks(9, 5)
    backend.look(11)
    assert targets(backend.looks(9, 7)) == [6] * 6 + [5]


def test_just_above_what_fewer_could_bear_no_replica_is_taken():
    backend = Rounds(3, downscale_delay_s=0)
    decision = backend.look(3.9)
    assert decision.verdict is ScalingDecisionKind.STEADY
    assert "fewer would have nothing to spare" in decision.why
    assert backend.look(3.7).target == 2


def test_a_small_factor_down_takes_one_replica_after_a_longer_delay():
    backend = Rounds(3, downscale_delay_s=60, downscaling_factor=0.25)
    # One too many: a quarter of a replica each 60 s is one in 240 s.
    assert targets(backend.looks(3.5, 25)) == [3] * 24 + [2]


def test_a_factor_down_scales_a_step_that_is_large_enough():
    backend = Rounds(22, downscale_delay_s=60, downscaling_factor=0.25)
    assert targets(backend.looks(3.5, 14))[5:] == [22, 17] + [17] * 5 + [14, 14]


def test_a_factor_above_one_does_not_take_more_than_is_too_many():
    assert Rounds(10, downscale_delay_s=0, downscaling_factor=2).look(11).target == 6


def test_a_number_that_somebody_else_set_gets_the_whole_delay():
    backend = Rounds(3, downscale_delay_s=60)
    backend.looks(5, 30)
    backend.num_replicas = backend.num_running = 20
    assert targets(backend.looks(5, 7)) == [20] * 6 + [3]


def test_the_memory_is_bounded_and_forgetting_only_delays():
    fewer = ()
    for step in range(500):
        fewer = record_wanted(fewer, 1000 - step, float(step))
        assert len(fewer) <= FEWER_MAX
    for delay_s in (0, 10, 100, 300, 490):
        exact = 1000 - (499 - delay_s)
        assert exact <= largest_wanted(fewer, 499.0, delay_s) <= exact + 40


# -- not knowing ----------------------------------------------------------------------------------------------


def test_missing_data_holds_with_the_reason():
    backend = Rounds(4, min_replicas=0, downscale_delay_s=0)
    decision = backend.look(None, missing="proxy-1 was not scraped")
    assert (decision.verdict, decision.target, decision.seen) == (ScalingDecisionKind.HELD, 4, None)
    assert decision.why == "held at 4 replicas: proxy-1 was not scraped"


@pytest.mark.parametrize("seen", [math.nan, math.inf, -1.0])
def test_what_no_load_can_be_counts_as_missing(seen):
    assert Rounds(4, downscale_delay_s=0).look(seen).verdict is ScalingDecisionKind.HELD


def test_an_old_reading_counts_as_missing():
    backend = Rounds(4, downscale_delay_s=0)
    assert backend.look(1, at=backend.now - 31).why == (
        "held at 4 replicas: the newest reading is 31 s old, more than 30 s"
    )
    assert backend.look(1, at=backend.now - 29).target == 1


def test_a_gap_neither_shortens_nor_restarts_a_delay():
    backend = Rounds(10, downscale_delay_s=60)
    backend.looks(5, 4)  # 30 s
    backend.looks(None, 50)
    assert targets(backend.looks(5, 4)) == [10, 10, 10, 3]
    backend = Rounds(2)
    backend.looks(17, 2)
    backend.looks(None, 50)
    assert targets(backend.looks(17, 3)) == [2, 2, 9]


def test_a_gap_of_a_single_look_counts_for_no_delay():
    backend = Rounds(2)
    backend.look(17)
    backend.look(None)
    assert targets(backend.looks(17, 4)) == [2, 2, 2, 9]


def test_a_pause_without_looks_counts_for_no_delay():
    backend = Rounds(10, downscale_delay_s=60)
    backend.looks(5, 2)
    backend.now += 3600
    assert backend.look(5).verdict is ScalingDecisionKind.WAITS_DOWN


# -- limits that changed --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seen", [None, 9.0])
def test_new_limits_hold_at_once_even_without_data(seen):
    decision = Rounds(4, min_replicas=6).look(seen)
    assert (decision.verdict, decision.target) == (ScalingDecisionKind.UP, 6)
    assert decision.why.startswith("4 → 6 replicas as min_replicas is 6 now; ")
    decision = Rounds(40, max_replicas=20).look(seen)
    assert (decision.verdict, decision.target) == (ScalingDecisionKind.DOWN, 20)


# -- queries and functions ------------------------------------------------------------------------------------


def test_a_query_in_all_is_divided_by_its_target():
    query = AutoscalingQuery(promql="x", target=100)
    decision = Rounds(4, query=query, upscale_delay_s=0).look(730)
    assert decision.target == 8
    assert "the query gave 730 in all, target 100" in decision.why


def test_a_query_per_replica_changes_the_number_by_its_ratio_to_the_target():
    query = AutoscalingQuery(promql="x", target=0.5, meaning=QueryMeaning.PER_REPLICA)
    assert Rounds(4, query=query, upscale_delay_s=0).look(0.7).target == 6


@pytest.mark.parametrize("seen", [None, 0.7])
def test_at_zero_an_average_per_replica_says_nothing_and_that_is_as_it_should_be(seen):
    query = AutoscalingQuery(promql="x", target=0.5, meaning=QueryMeaning.PER_REPLICA)
    asleep = Rounds(0, query=query, min_replicas=0).look(seen)
    assert (asleep.verdict, asleep.target) == (ScalingDecisionKind.STEADY, 0)
    starting = Rounds(2, query=query)
    starting.num_running = 0
    assert starting.look(seen).verdict is ScalingDecisionKind.HELD


def test_what_a_function_asks_for_waits_like_anything_else_and_keeps_to_the_limits():
    backend = Rounds(2, max_replicas=12)
    decisions = [backend.look(3, asked=40) for _ in range(4)]
    assert targets(decisions) == [2, 2, 2, 12]
    assert "the policy function asks for 40 replicas" in decisions[0].why


def test_a_function_that_asks_for_none_does_not_get_it_while_requests_are_seen():
    backend = Rounds(3, min_replicas=0, downscale_delay_s=0)
    assert backend.look(3, asked=0).target == 1
    assert backend.look(0, asked=0).target == 0


def test_what_a_function_asks_for_when_its_delay_is_over_is_what_stays_as_in_ray_serve():
    backend = Rounds(10, min_replicas=0, downscale_delay_s=20)
    assert targets([backend.look(9, asked=asked) for asked in (8, 8, 2.4)]) == [10, 10, 3]
    slowed = Rounds(10, downscale_delay_s=0, downscaling_factor=0.1)
    assert targets([slowed.look(9, asked=2) for _ in range(3)]) == [10 - 1, 9 - 1, 8 - 1]
    assert Rounds(3, upscale_delay_s=0, max_replicas=9).look(9, asked=3.2).target == 4


# Zero, waking, panic and replicas that start: what the policy does where a load changes suddenly.


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
