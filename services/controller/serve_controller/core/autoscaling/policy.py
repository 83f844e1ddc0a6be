"""Decides the number of replicas of a backend from its load: wake, panic, scale up, scale down, or stay.

The policy is a pure function whose memory is passed through: the same code runs in the controller, in the simulation
that compares policies (``bench/autoscaling``) and in tests that try millions of loads, and every decision can be
explained by its inputs.

Names and defaults are those of Ray Serve 2.60 (``ray/serve/autoscaling_policy.py``). The rules and their sources:

- Wanted replicas: see `demand`. A factor scales the step: n + factor * (wanted - n), rounded up (Ray's
  ``_apply_scaling_factors``), with two deviations. A step down of less than one replica removes one, after the delay
  divided by the step (0.2 replicas: five times the delay). Ray removes one after each delay whatever the factor, and
  earlier versions removed none. And a factor above 1 does not remove more than the surplus, which would only be added
  again.
- Delays: a step up adds what is wanted *when* `upscale_delay_s` is over; otherwise a mean that grows with its window
  would be followed in many steps. A step down keeps the most that was wanted *during* `downscale_delay_s`: see
  `demand.largest_wanted`. A delay counts as over a tenth early (of it and of the interval, 1 s at most), because
  evaluations are not quite punctual.
- A user's policy function replaces the wanted number; factors, delays and limits apply to it exactly as in Ray Serve
  (``_apply_autoscaling_config``), also downwards. Panic does not: it would overrule the function.
- Panic, as in Knative's autoscaler (serving, ``pkg/autoscaler/scaling/autoscaler.go``): a load over a short window at a
  multiple of the target adds replicas at once; while the panic lasts its load is followed upwards, and nothing is
  removed.
- One step up multiplies the replicas by at most `STEP_MAX` (times a factor above 1). A backlog in front of too few
  replicas grows with the time until it is noticed: where 1000 requests wait for one replica, 9 replicas may be missing
  or 499. Policy functions and queries are not limited by this.
- While replicas start, requests pile up that these will work off. So only requests in replicas justify further ones,
  and no new panic begins, until all replicas run (or `STARTING_S` is over, since one that never starts must not block
  the others) and the window that is evaluated began after that.
- Unknown is not zero: with missing or stale data nothing moves, and the time until the load is known again counts for
  no delay. Only limits always apply at once.
- Scaling up from zero adds what is wanted at once; scaling down to zero needs `downscale_to_zero_delay_s` without any
  request.
"""

from __future__ import annotations

import math
from typing import Final, final

import msgspec

from serve_common.config.autoscaling import AutoscalingConfig, QueryMeaning
from serve_controller.core.autoscaling.demand import (
    Demand,
    format_delay,
    format_waiting,
    format_wanted,
    grown,
    largest_wanted,
    number_text,
    punctual,
    read_demand,
    record_wanted,
    replicas_text,
    requests_text,
    round_up,
    since_fewer_than,
    stale_after_s,
    to_zero_delay_s,
    within,
    without_gap,
)
from serve_controller.core.autoscaling.values import (
    ScalingDecision,
    ScalingDecisionKind,
    ScalingInput,
    ScalingState,
    Series,
)

STEP_MAX: Final = 10.0
"""Largest factor of one step up."""


@final
class ScalingEvaluation:
    """One decision with a known load."""

    def __init__(self, inputs: ScalingInput, demand: Demand, state: ScalingState, now: float) -> None:
        self._config, self._num_replicas = inputs.config, inputs.num_replicas
        self._demand, self._now = demand, now
        self._has_policy = inputs.policy_target is not None
        self._more = within(demand.more, inputs.config)
        self._keep = within(demand.keep, inputs.config)
        fewer = record_wanted(state.fewer, self._keep, now)
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
        self._reason = format_wanted(demand.load_text, demand.more, self._more)

    def decide(self) -> ScalingDecision:
        """Apply the first matching rule: wake, panic, scale up, scale down, stay."""
        if not self._num_replicas:
            return self._from_zero()
        burst = self._burst()
        if burst is not None:
            return burst
        if self._more > self._num_replicas:
            return self._upwards()
        if self._keep < self._num_replicas:
            return self._downwards()
        return self._stay(ScalingDecisionKind.STEADY, self._steady_reason())

    def _from_zero(self) -> ScalingDecision:
        is_plain = self._config.query is None and not self._has_policy
        # A stopping replica may still process requests; that alone needs no new one.
        if self._more and (self._demand.queued > 0 or not is_plain):
            return self._add(self._more, ScalingDecisionKind.WOKEN, f"{self._reason} and none is there")
        return self._stay(ScalingDecisionKind.STEADY, f"{self._reason}; there is none, and none waits")

    def _burst(self) -> ScalingDecision | None:
        demand, config, state = self._demand, self._config, self._state
        if demand.burst is None or not config.panic_threshold:
            return None
        stabilized_at = state.stabilized_at
        if state.last_up_at is not None and (
            stabilized_at is None or demand.at - config.panic_window_s < stabilized_at
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
            ScalingDecisionKind.PANIC,
            f"{requests_text(seen)} seen over {config.panic_window_s:g} s, {number_text(times)} times what "
            f"{replicas_text(self._num_replicas)} should bear: {target - self._num_replicas} added at once",
        )

    def _upwards(self) -> ScalingDecision:
        config, count = self._config, self._num_replicas
        assert self._state.up_since is not None
        waited_s = self._now - self._state.up_since
        if waited_s < punctual(config.upscale_delay_s, config):
            return self._stay(
                ScalingDecisionKind.WAITS_UP,
                format_delay(self._reason, waited_s, config.upscale_delay_s, "adding"),
            )
        target = self._step_up()
        return self._add(
            target, ScalingDecisionKind.UP, f"{self._reason} for {waited_s:.0f} s: {target - count} added"
        )

    def _step_up(self) -> int:
        """Target of a step up if its delay is over; the current number while none is due."""
        config, count, since = self._config, self._num_replicas, self._state.up_since
        if since is None or self._now - since < punctual(config.upscale_delay_s, config):
            return count
        factor = 1.0 if config.upscaling_factor is None else config.upscaling_factor
        return max(
            self._step(count + factor * (self._demand.counted - count)), min(count + 1, config.max_replicas)
        )

    def _step(self, wanted: float) -> int:
        """``wanted``, limited to what one step up may add."""
        count = round_up(wanted)
        if self._config.query is None and not self._has_policy:
            factor = max(self._config.upscaling_factor or 1.0, 1.0)
            count = min(count, round_up(STEP_MAX * factor * self._num_replicas))
        return within(count, self._config)

    def _downwards(self) -> ScalingDecision:
        if self._has_policy:
            return self._downwards_by_policy()
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
                ScalingDecisionKind.WAITS_DOWN, format_delay(self._reason, self._down_for_s(), delay_s, what)
            )
        if self._is_panic():
            return self._stay(
                ScalingDecisionKind.HELD,
                f"{self._reason}; held for {(state.panic_until or 0.0) - self._now:.0f} s more after a burst",
            )
        fewer = tuple(entry for entry in state.fewer if entry[0] <= target)
        if target > rest:  # the next part of the step waits for its own delay
            fewer = record_wanted((), self._keep, self._now)
        self._state = msgspec.structs.replace(
            state,
            decided=target,
            last_down_at=self._now,
            fewer=fewer,
            down_since=since_fewer_than(fewer, target),
        )
        return self._decision(
            target,
            ScalingDecisionKind.DOWN,
            f"{self._reason}, never more than {rest} for {delay_s:.0f} s: {count - target} removed",
        )

    def _downwards_by_policy(self) -> ScalingDecision:
        """As Ray Serve's ``_apply_delay_logic``: what the function asks for *when* the delay is over; 1 before 0."""
        config, count = self._config, self._num_replicas
        is_last = count == 1
        delay_s = to_zero_delay_s(config) if is_last else config.downscale_delay_s
        waited_s = self._down_for_s()
        if waited_s < punctual(delay_s, config):
            what = "removing the last one" if is_last else "removing"
            return self._stay(
                ScalingDecisionKind.WAITS_DOWN, format_delay(self._reason, waited_s, delay_s, what)
            )
        scaled = math.ceil(count + config.get_downscaling_factor() * (self._demand.wanted - count) - 1e-9)
        # A factor that rounds up to what runs removes one all the same.
        target = within(max(min(scaled, count - 1), 0 if is_last else 1, min(self._demand.keep, 1)), config)
        self._state = msgspec.structs.replace(
            self._state, decided=target, last_down_at=self._now, fewer=(), down_since=None, zero_since=None
        )
        return self._decision(
            target,
            ScalingDecisionKind.DOWN,
            f"{self._reason} for {waited_s:.0f} s: {count - target} removed",
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

    def _steady_reason(self) -> str:
        if self._demand.more < self._num_replicas and self._keep == self._num_replicas:
            return f"{self._reason} at least; {self._num_replicas} stay, fewer would have nothing to spare"
        waiting = round_up(self._demand.wanted) - self._demand.more
        if waiting > 0:
            return (
                f"{self._reason}; {waiting} more for those who only wait while replicas start are not counted"
            )
        return self._reason

    def _add(self, target: int, verdict: ScalingDecisionKind, why: str) -> ScalingDecision:
        self._state = grown(self._state, target, self._now)
        return self._decision(target, verdict, why)

    def _stay(self, verdict: ScalingDecisionKind, why: str) -> ScalingDecision:
        return self._decision(self._num_replicas, verdict, why)

    def _decision(self, target: int, verdict: ScalingDecisionKind, why: str) -> ScalingDecision:
        return ScalingDecision(
            target=target,
            state=self._state,
            verdict=verdict,
            seen=self._demand.seen,
            wanted=self._demand.wanted,
            why=why,
        )


STARTING_S: Final = 120.0
"""Seconds for which starting replicas delay further ones at most."""
WAKING_S: Final = 3.0
"""Seconds after a wake-up during which requests that wait with other routers count as simultaneous."""
_SCALED_TO_ZERO: Final = (
    "none is there, of which the query could give an average; a waiting request adds the first"
)


def decide_scaling(inputs: ScalingInput, series: Series, state: ScalingState, now: float) -> ScalingDecision:
    """Decide the number of replicas at ``now`` (seconds since 1970) from the newest of ``series``. Never raises."""
    if state.decided is not None and state.decided != inputs.num_replicas:
        state = msgspec.structs.replace(state, up_since=None, down_since=None, zero_since=None, fewer=())
    if inputs.new_policy_state is not None:
        state = msgspec.structs.replace(state, policy_state=inputs.new_policy_state)
    limited = within(inputs.num_replicas, inputs.config)
    num_replicas, inputs = inputs.num_replicas, msgspec.structs.replace(inputs, num_replicas=limited)
    state = _stabilized(inputs, state, now)
    demand = read_demand(inputs, series, now, is_starting=_is_starting(inputs, series, state))
    if isinstance(demand, str):
        decision = _unknown(inputs, state, demand)
        if not limited and _is_per_replica(inputs.config):
            decision = msgspec.structs.replace(
                decision, verdict=ScalingDecisionKind.STEADY, why=_SCALED_TO_ZERO
            )
    else:
        decision = ScalingEvaluation(inputs, demand, _known(inputs.config, state, now), now).decide()
    return decision if limited == num_replicas else _limited(decision, num_replicas, limited, now)


def wake(inputs: ScalingInput, waiting: int, now: float, state: ScalingState) -> ScalingDecision:
    """Scale up from zero, because ``waiting`` requests wait with a router.

    While replicas are starting and none runs, more may be added during `WAKING_S`: simultaneous requests may wait with
    several routers. Later requests wait because replicas are starting.
    """
    config, num_replicas = inputs.config, inputs.num_replicas
    is_early = state.last_up_at is not None and now - state.last_up_at <= WAKING_S
    if num_replicas and (inputs.num_running or not is_early):
        return ScalingDecision(
            target=num_replicas,
            state=state,
            verdict=ScalingDecisionKind.STEADY,
            seen=None,
            wanted=None,
            why=f"{format_waiting(waiting)} for {replicas_text(num_replicas)} that there are already",
        )
    if config.query is not None or config.policy.policy_function:
        wanted, why = 1.0, f"{format_waiting(waiting)} and none is there"
    else:
        wanted = max(waiting, 1) / config.target_ongoing_requests
        why = f"{format_waiting(waiting)} and none is there: {replicas_text(max(round_up(wanted), 1))} wanted"
    target = max(within(max(round_up(wanted), 1), config), num_replicas)
    at = now if state.last_up_at is None or not num_replicas else state.last_up_at
    return ScalingDecision(
        target=target,
        state=grown(state, target, at),
        verdict=ScalingDecisionKind.WOKEN,
        seen=None,
        wanted=wanted,
        why=why,
    )


def _is_per_replica(config: AutoscalingConfig) -> bool:
    return config.query is not None and config.query.meaning is QueryMeaning.PER_REPLICA


def _stabilized(inputs: ScalingInput, state: ScalingState, now: float) -> ScalingState:
    """Update `stabilized_at`: whether the replicas that were added last are running."""
    if state.last_up_at is None or state.stabilized_at is not None:
        return state
    if inputs.num_running < inputs.num_replicas and now - state.last_up_at < STARTING_S:
        return state
    return msgspec.structs.replace(state, stabilized_at=now)


def _is_starting(inputs: ScalingInput, series: Series, state: ScalingState) -> bool:
    """Whether the newest sample's window reaches back to when decided replicas were still starting."""
    if state.last_up_at is None or not series:
        return False
    return (
        state.stabilized_at is None or series[-1].at - inputs.config.look_back_period_s < state.stabilized_at
    )


def _known(config: AutoscalingConfig, state: ScalingState, now: float) -> ScalingState:
    """The load is known; a time in which it was not counts for no delay."""
    if state.known_at is not None:
        gap_s = max(now - state.known_at, 0.0)
        is_gap = state.is_unknown or gap_s > stale_after_s(config)
        state = without_gap(_not_ahead(state, now), now, gap_s if is_gap else 0.0)
    return msgspec.structs.replace(state, known_at=now, is_unknown=False)


def _not_ahead(state: ScalingState, now: float) -> ScalingState:
    """Cap times at ``now``: a clock that was set back must not prolong any delay."""
    if state.last_up_at is None or state.last_up_at <= now:
        return state
    return msgspec.structs.replace(
        state,
        last_up_at=now,
        stabilized_at=None if state.stabilized_at is None else min(state.stabilized_at, now),
    )


def _unknown(inputs: ScalingInput, state: ScalingState, problem: str) -> ScalingDecision:
    return ScalingDecision(
        target=inputs.num_replicas,
        state=msgspec.structs.replace(state, decided=inputs.num_replicas, is_unknown=True),
        verdict=ScalingDecisionKind.HELD,
        seen=None,
        wanted=None,
        why=f"held at {replicas_text(inputs.num_replicas)}: {problem}",
    )


def _limited(decision: ScalingDecision, num_replicas: int, limited: int, now: float) -> ScalingDecision:
    """Adjust a decision to changed limits, which apply at once."""
    state, verdict = decision.state, decision.verdict
    name = "max_replicas" if limited < num_replicas else "min_replicas"
    why = f"{num_replicas} → {decision.target} replicas as {name} is {limited} now; {decision.why}"
    if limited > num_replicas:
        verdict = verdict if verdict is ScalingDecisionKind.PANIC else ScalingDecisionKind.UP
        if state.last_up_at != now:
            state = grown(state, decision.target, now)
    else:
        verdict = ScalingDecisionKind.DOWN
        state = msgspec.structs.replace(state, last_down_at=now)
    return msgspec.structs.replace(decision, state=state, verdict=verdict, why=why)
