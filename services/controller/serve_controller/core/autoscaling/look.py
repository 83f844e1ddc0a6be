"""One decision with a known load: wake, panic, more, fewer, or as many.

Why one object: all these rules look at the same few numbers; the rules themselves are told in `policy`.
"""

from __future__ import annotations

import math
from typing import Final, final

import msgspec

from serve_controller.core.autoscaling.demand import Demand, round_up
from serve_controller.core.autoscaling.reasons import (
    number_text,
    replicas_text,
    requests_text,
    waits_reason,
    wanted_reason,
)
from serve_controller.core.autoscaling.rules import grown, punctual, to_zero_delay_s, within
from serve_controller.core.autoscaling.values import ScalingDecision, ScalingInput, ScalingState, Verdict
from serve_controller.core.autoscaling.waits import largest_wanted, note_wanted, since_fewer_than

STEP_MAX: Final = 10.0
"""Times as many replicas after one step up at most."""


@final
class Look:
    """One decision with a known load."""

    def __init__(self, inputs: ScalingInput, demand: Demand, state: ScalingState, now: float) -> None:
        self._config, self._num_replicas = inputs.config, inputs.num_replicas
        self._demand, self._now = demand, now
        self._asked = inputs.asked is not None
        self._more = within(demand.more, inputs.config)
        self._keep = within(demand.keep, inputs.config)
        fewer = note_wanted(state.fewer, self._keep, now)
        self._state = msgspec.structs.replace(
            state,
            decided=self._num_replicas,
            up_since=(now if state.up_since is None else state.up_since)
            if self._more > self._num_replicas
            else None,
            fewer=fewer,
            down_since=since_fewer_than(fewer, self._num_replicas),
            zero_since=since_fewer_than(fewer, 1),
        )
        self._words = wanted_reason(demand.words, demand.more, self._more)

    def decide(self) -> ScalingDecision:
        """By the first rule that applies: wake, panic, more, fewer, as many."""
        if not self._num_replicas:
            return self._from_zero()
        burst = self._burst()
        if burst is not None:
            return burst
        if self._more > self._num_replicas:
            return self._upwards()
        if self._keep < self._num_replicas:
            return self._downwards()
        return self._stay(Verdict.STEADY, self._steady_words())

    def _from_zero(self) -> ScalingDecision:
        is_plain = self._config.query is None and not self._asked
        # A replica that is being stopped may still work on something; that alone needs no other one.
        if self._more and (self._demand.queued > 0 or not is_plain):
            return self._add(self._more, Verdict.WOKEN, f"{self._words} and none is there")
        return self._stay(Verdict.STEADY, f"{self._words}; there is none, and none waits")

    def _burst(self) -> ScalingDecision | None:
        demand, config, state = self._demand, self._config, self._state
        if demand.burst is None or not config.panic_threshold:
            return None
        settled_at = state.settled_at
        if state.last_up_at is not None and (
            settled_at is None or demand.at - config.panic_window_s < settled_at
        ):
            return None
        times = demand.burst / self._num_replicas
        if times >= config.panic_threshold:
            self._state = msgspec.structs.replace(state, panic_until=self._now + config.panic_hold_s)
        elif not self._is_panic():
            return None
        target = max(self._step(demand.burst), self._step_up())
        if target <= self._num_replicas:
            return None
        seen = number_text(demand.burst * config.target_ongoing_requests)
        return self._add(
            target,
            Verdict.PANIC,
            f"{requests_text(seen)} seen over {config.panic_window_s:g} s, {number_text(times)} times what "
            f"{replicas_text(self._num_replicas)} should bear: {target - self._num_replicas} added at once",
        )

    def _upwards(self) -> ScalingDecision:
        config, count = self._config, self._num_replicas
        assert self._state.up_since is not None
        waited_s = self._now - self._state.up_since
        if waited_s < punctual(config.upscale_delay_s, config):
            return self._stay(
                Verdict.WAITS_UP,
                waits_reason(self._words, waited_s, config.upscale_delay_s, "adding"),
            )
        target = self._step_up()
        return self._add(target, Verdict.UP, f"{self._words} for {waited_s:.0f} s: {target - count} added")

    def _step_up(self) -> int:
        """To how many a step up goes whose delay is over; as many as there are while none is due."""
        config, count, since = self._config, self._num_replicas, self._state.up_since
        if since is None or self._now - since < punctual(config.upscale_delay_s, config):
            return count
        factor = 1.0 if config.upscaling_factor is None else config.upscaling_factor
        return max(
            self._step(count + factor * (self._demand.counted - count)), min(count + 1, config.max_replicas)
        )

    def _step(self, wanted: float) -> int:
        """Towards ``wanted``, as far as one step may go."""
        count = round_up(wanted)
        if self._config.query is None and not self._asked:
            factor = max(self._config.upscaling_factor or 1.0, 1.0)
            count = min(count, round_up(STEP_MAX * factor * self._num_replicas))
        return within(count, self._config)

    def _downwards(self) -> ScalingDecision:
        config, count, state = self._config, self._num_replicas, self._state
        is_last = count == 1
        delay_s = to_zero_delay_s(config) if is_last else config.downscale_delay_s
        largest = largest_wanted(state.fewer, self._now, punctual(delay_s, config))
        rest = count if largest is None else within(largest, config)
        if not rest and not is_last and not self._may_be_none():
            rest = 1
        factor = 1.0 if config.downscaling_factor is None else config.downscaling_factor
        target = rest
        if factor < 1 and not is_last:
            cut = factor * (count - (rest if rest < count else self._keep))
            if cut < 1:
                delay_s /= cut
                is_over = self._down_for_s() >= punctual(delay_s, config)
                target = count - 1 if is_over and rest < count else count
            else:
                target = max(count - math.floor(cut + 1e-9), rest, 1)
        if target >= count:
            what = "removing the last one" if is_last else "removing"
            return self._stay(
                Verdict.WAITS_DOWN, waits_reason(self._words, self._down_for_s(), delay_s, what)
            )
        if self._is_panic():
            return self._stay(
                Verdict.HELD,
                f"{self._words}; held for {(state.panic_until or 0.0) - self._now:.0f} s more after a burst",
            )
        fewer = tuple(entry for entry in state.fewer if entry[0] <= target)
        if target > rest:  # the next part of the step has a delay of its own
            fewer = note_wanted((), self._keep, self._now)
        self._state = msgspec.structs.replace(
            state,
            decided=target,
            last_down_at=self._now,
            fewer=fewer,
            down_since=since_fewer_than(fewer, target),
        )
        return self._decision(
            target,
            Verdict.DOWN,
            f"{self._words}, never more than {rest} for {delay_s:.0f} s: {count - target} removed",
        )

    def _may_be_none(self) -> bool:
        idle_since = self._state.zero_since
        return idle_since is not None and self._now - idle_since >= punctual(
            to_zero_delay_s(self._config), self._config
        )

    def _down_for_s(self) -> float:
        return 0.0 if self._state.down_since is None else self._now - self._state.down_since

    def _is_panic(self) -> bool:
        return self._state.panic_until is not None and self._now < self._state.panic_until

    def _steady_words(self) -> str:
        if self._demand.more < self._num_replicas and self._keep == self._num_replicas:
            return f"{self._words} at least; {self._num_replicas} stay, fewer would have nothing to spare"
        waiting = round_up(self._demand.wanted) - self._demand.more
        if waiting > 0:
            return (
                f"{self._words}; {waiting} more for those who only wait while replicas start are not counted"
            )
        return self._words

    def _add(self, target: int, verdict: Verdict, why: str) -> ScalingDecision:
        self._state = grown(self._state, target, self._now)
        return self._decision(target, verdict, why)

    def _stay(self, verdict: Verdict, why: str) -> ScalingDecision:
        return self._decision(self._num_replicas, verdict, why)

    def _decision(self, target: int, verdict: Verdict, why: str) -> ScalingDecision:
        return ScalingDecision(
            target=target,
            state=self._state,
            verdict=verdict,
            seen=self._demand.seen,
            wanted=self._demand.wanted,
            why=why,
        )
