"""Decides how many replicas a backend shall have, from its load.

Why pure, with its memory passed through: the same function runs in the controller, in the simulation that compares it
(``tests/bench/autoscaling``) and in tests that try millions of loads; and every decision can be told from what it saw.

The rules, and where they are from. Names and defaults are Ray Serve's (2.60, ``ray/serve/autoscaling_policy.py``).

- How many are wanted: see `demand`. Factors scale the step: n + factor * (wanted - n), rounded up
  (``_apply_scaling_factors``). Two deviations. A step down of less than one replica is one replica, but its delay is as
  many times longer as the step is too small: Ray's takes one after each delay whatever the factor says, before that it
  took none at all. And a factor above 1 does not take more than is too many, which would only bring them back.
- Delays: as many as are wanted *when* `upscale_delay_s` is over are added; a mean that grows with its window would else
  be followed in many steps. After `downscale_delay_s` as many stay as were wanted at most *during* it: see `waits`.
  A delay counts as over a tenth early (of it and of the interval, 1 s at most), as looks are not quite punctual.
- A user's policy function replaces the wanted number; factors, delays and limits apply to it as in Ray Serve
  (``_apply_autoscaling_config``). Panic does not: it would overrule the function.
- Panic: as Knative's autoscaler (serving, ``pkg/autoscaler/scaling/autoscaler.go``): a short window at a multiple of
  the target adds at once, what it asks for is followed upwards until it is over, and meanwhile nothing is removed.
- One step up makes at most `look.STEP_MAX` times as many (times a factor above 1). A backlog in front of too few
  replicas grows with the time it takes to notice: where 1000 wait for one replica, 9 may be missing or 499. A policy
  function or a query says what it says, without this limit.
- While replicas start, requests pile up that they will work off: for still more only those count that replicas work on,
  and no new panic begins. This ends when all run (or after `STARTING_S`, since one that never starts must not
  stop the rest) and the window that is looked at began after that.
- Not knowing is not zero: with missing or old data nothing moves, and the time until the load is known again counts for
  no delay. Only limits hold at once, always.
- From zero to as many as are wanted at once; to zero only after `downscale_to_zero_delay_s` without any request.
"""

from __future__ import annotations

from typing import Final

import msgspec

from serve_common.autoscaling import AutoscalingConfig, QueryMeaning
from serve_controller.core.autoscaling.demand import read_demand, round_up, stale_after_s
from serve_controller.core.autoscaling.look import Look
from serve_controller.core.autoscaling.reasons import replicas_text, waiting_reason
from serve_controller.core.autoscaling.rules import grown, within
from serve_controller.core.autoscaling.values import (
    ScalingDecision,
    ScalingInput,
    ScalingState,
    Series,
    Verdict,
)
from serve_controller.core.autoscaling.waits import without_gap

STARTING_S: Final = 120.0
"""For how long replicas that start hold back others."""
WAKING_S: Final = 3.0
"""After a wake-up: for how long those who wait with other routers still count as having come at once."""
_ASLEEP: Final = "none is there, of which the query could give an average; a waiting request adds the first"


def decide_scaling(inputs: ScalingInput, series: Series, state: ScalingState, now: float) -> ScalingDecision:
    """How many replicas there shall be at ``now`` (seconds since 1970), by the newest of ``series``. Never raises."""
    if state.decided is not None and state.decided != inputs.num_replicas:
        state = msgspec.structs.replace(state, up_since=None, down_since=None, zero_since=None, fewer=())
    if inputs.asked_state is not None:
        state = msgspec.structs.replace(state, policy_state=inputs.asked_state)
    limited = within(inputs.num_replicas, inputs.config)
    num_replicas, inputs = inputs.num_replicas, msgspec.structs.replace(inputs, num_replicas=limited)
    state = _settled(inputs, state, now)
    demand = read_demand(inputs, series, now, is_starting=_is_starting(inputs, series, state))
    if isinstance(demand, str):
        decision = _unknown(inputs, state, demand)
        if not limited and _is_per_replica(inputs.config):
            decision = msgspec.structs.replace(decision, verdict=Verdict.STEADY, why=_ASLEEP)
    else:
        decision = Look(inputs, demand, _known(inputs.config, state, now), now).decide()
    return decision if limited == num_replicas else _limited(decision, num_replicas, limited, now)


def wake(inputs: ScalingInput, waiting: int, now: float, state: ScalingState) -> ScalingDecision:
    """From zero, because ``waiting`` requests wait with a router.

    Where none runs yet but some are already starting, more may still be asked for during `WAKING_S`: the requests
    that came together may wait with several routers. Later ones wait because replicas start.
    """
    config, num_replicas = inputs.config, inputs.num_replicas
    is_early = state.last_up_at is not None and now - state.last_up_at <= WAKING_S
    if num_replicas and (inputs.num_running or not is_early):
        return ScalingDecision(
            target=num_replicas,
            state=state,
            verdict=Verdict.STEADY,
            seen=None,
            wanted=None,
            why=f"{waiting_reason(waiting)} for {replicas_text(num_replicas)} that there are already",
        )
    if config.query is not None or config.policy.policy_function:
        wanted, why = 1.0, f"{waiting_reason(waiting)} and none is there"
    else:
        wanted = max(waiting, 1) / config.target_ongoing_requests
        why = f"{waiting_reason(waiting)} and none is there: {replicas_text(max(round_up(wanted), 1))} wanted"
    target = max(within(max(round_up(wanted), 1), config), num_replicas)
    at = now if state.last_up_at is None or not num_replicas else state.last_up_at
    return ScalingDecision(
        target=target,
        state=grown(state, target, at),
        verdict=Verdict.WOKEN,
        seen=None,
        wanted=wanted,
        why=why,
    )


def _is_per_replica(config: AutoscalingConfig) -> bool:
    return config.query is not None and config.query.meaning is QueryMeaning.PER_REPLICA


def _settled(inputs: ScalingInput, state: ScalingState, now: float) -> ScalingState:
    """Whether those that were added last are running by now."""
    if state.last_up_at is None or state.settled_at is not None:
        return state
    if inputs.num_running < inputs.num_replicas and now - state.last_up_at < STARTING_S:
        return state
    return msgspec.structs.replace(state, settled_at=now)


def _is_starting(inputs: ScalingInput, series: Series, state: ScalingState) -> bool:
    """Whether what is looked at goes back to when replicas were starting that had been decided on."""
    if state.last_up_at is None or not series:
        return False
    return state.settled_at is None or series[-1].at - inputs.config.look_back_period_s < state.settled_at


def _known(config: AutoscalingConfig, state: ScalingState, now: float) -> ScalingState:
    """The load is known again: since when it was not counts for nothing."""
    if state.known_at is not None:
        gap_s = max(now - state.known_at, 0.0)
        is_gap = state.is_unknown or gap_s > stale_after_s(config)
        state = without_gap(_not_ahead(state, now), now, gap_s if is_gap else 0.0)
    return msgspec.structs.replace(state, known_at=now, is_unknown=False)


def _not_ahead(state: ScalingState, now: float) -> ScalingState:
    """A clock that was set back must not make anything last longer."""
    if state.last_up_at is None or state.last_up_at <= now:
        return state
    return msgspec.structs.replace(
        state, last_up_at=now, settled_at=None if state.settled_at is None else min(state.settled_at, now)
    )


def _unknown(inputs: ScalingInput, state: ScalingState, problem: str) -> ScalingDecision:
    return ScalingDecision(
        target=inputs.num_replicas,
        state=msgspec.structs.replace(state, decided=inputs.num_replicas, is_unknown=True),
        verdict=Verdict.HELD,
        seen=None,
        wanted=None,
        why=f"held at {replicas_text(inputs.num_replicas)}: {problem}",
    )


def _limited(decision: ScalingDecision, num_replicas: int, limited: int, now: float) -> ScalingDecision:
    """Limits hold at once, whatever else was decided."""
    state, verdict = decision.state, decision.verdict
    name = "max_replicas" if limited < num_replicas else "min_replicas"
    why = f"{num_replicas} → {decision.target} replicas as {name} is {limited} now; {decision.why}"
    if limited > num_replicas:
        verdict = verdict if verdict is Verdict.PANIC else Verdict.UP
        if state.last_up_at != now:
            state = grown(state, decision.target, now)
    else:
        verdict = Verdict.DOWN
        state = msgspec.structs.replace(state, last_down_at=now)
    return msgspec.structs.replace(decision, state=state, verdict=verdict, why=why)
