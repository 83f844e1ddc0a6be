"""External gates: what else than its requests decides whether a rollout's step passes.

Answers are soft state, as reports are: the shell samples them, and a plan goes by the last ones. A new leader asks
again, and a step that waited for an answer waits a little longer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import msgspec
from immutables import Map

from serve_common.config.external_gates import ExternalGate
from serve_common.protocol.gates import GateRequest, GateResponse
from serve_common.values import truncate
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.observed import GateKey, GateSample, ObservedState
from serve_controller.core.rollouts.judge import GateStatus
from serve_controller.core.rollouts.record import Rollout, baseline_tag, canary_tag

TEXT_LENGTH_MAX: Final = 300
_STALE_INTERVALS: Final = 3
"""An answer older than so many intervals counts for nothing: the one who gives it may have gone."""
_LATE_S: Final = 30.0
"""As well as so many seconds, for those that are slow to answer."""


class ExternalResult(msgspec.Struct, frozen=True, kw_only=True):
    """What an external gate's last answer comes to."""

    name: str
    status: GateStatus
    text: str
    """Why, for people."""


class DueGate(msgspec.Struct, frozen=True, kw_only=True):
    """A gate that is to be asked now."""

    key: GateKey
    gate: ExternalGate
    request: GateRequest
    in_force_at: float


def get_due_gates(
    checkpoint: Checkpoint, samples: Mapping[GateKey, GateSample], now: float
) -> Iterator[DueGate]:
    """All gates that are to be asked now, of rollouts whose requests go by their present step."""
    for tag in sorted(checkpoint.active_rollouts):
        rollout = checkpoint.rollouts[tag]
        if not rollout.samples_gates:
            continue
        for gate in rollout.config.gates:
            key = gate_key(rollout, gate)
            sample = _current(rollout, samples.get(key))
            # The first one waits as well: what a query looks back at is of the step before.
            if now < gate.every_s + (rollout.in_force_at if sample is None else sample.at):
                continue
            yield DueGate(
                key=key, gate=gate, request=_request(rollout, gate, now), in_force_at=rollout.in_force_at
            )


def gate_key(rollout: Rollout, gate: ExternalGate) -> GateKey:
    """By which its last answer is kept."""
    return rollout.backend_tag, rollout.goal_id, gate.name


def _request(rollout: Rollout, gate: ExternalGate, now: float) -> GateRequest:
    step = rollout.steps[rollout.step]
    return GateRequest(
        gate=gate.name,
        backend_tag=rollout.backend_tag,
        canary=canary_tag(rollout.backend_tag),
        baseline=baseline_tag(rollout.backend_tag),
        goal_id=rollout.goal_id,
        version=rollout.candidate.version,
        step=rollout.step,
        share=step.share,
        is_shadow=step.is_shadow,
        lasted_s=max(now - rollout.in_force_at, 0.0),
    )


def with_response(due: DueGate, known: GateSample | None, response: GateResponse, at: float) -> GateSample:
    """The sample after an answer; it counts bad ones in a row within the step."""
    passed, text = _judge(due.gate, response)
    failures = 0 if known is None or known.in_force_at != due.in_force_at else known.failures
    if passed is not None:
        failures = 0 if passed else failures + 1
    return GateSample(
        in_force_at=due.in_force_at,
        at=at,
        passed=passed,
        failures=failures,
        text=truncate(text, TEXT_LENGTH_MAX),
    )


def without_response(due: DueGate, known: GateSample | None, error: str, at: float) -> GateSample:
    """The sample after a question without an answer: neither good nor bad."""
    failures = 0 if known is None or known.in_force_at != due.in_force_at else known.failures
    text = truncate(f"no answer: {error}", TEXT_LENGTH_MAX)
    return GateSample(in_force_at=due.in_force_at, at=at, passed=None, failures=failures, text=text)


def _judge(gate: ExternalGate, response: GateResponse) -> tuple[bool | None, str]:
    """Whether an answer is good (None: it is none), and why."""
    value, base = response.value, response.baseline_value
    reason = f": {response.reason}" if response.reason else ""
    if value is None and gate.has_limits:
        return None, f"no answer: it has no value{reason}"
    if base is None and gate.has_ratio:
        return None, f"no answer: it has no value of the baseline{reason}"
    figures = "" if value is None else f"{value:.6g}"
    if base is not None:
        figures += f"; baseline: {base:.6g}"
    broken = "" if value is None else _broken_limit(gate, value, 0.0 if base is None else base)
    if broken:
        return False, f"{figures}, which must be {broken}{reason}"
    if response.passed is None and not gate.has_limits:
        return None, f"no answer: it says neither that it passed nor that it did not{reason}"
    passed = response.passed is not False
    return passed, f"{figures or ('passed' if passed else 'not passed')}{reason}"


def _broken_limit(gate: ExternalGate, value: float, base: float) -> str:
    if gate.at_least is not None and value < gate.at_least:
        return f"at least {gate.at_least:.6g}"
    if gate.at_most is not None and value > gate.at_most:
        return f"at most {gate.at_most:.6g}"
    if gate.min_ratio is not None and value < gate.min_ratio * base:
        return f"at least {gate.min_ratio:.6g} times the baseline's"
    if gate.max_ratio is not None and value > gate.max_ratio * base:
        return f"at most {gate.max_ratio:.6g} times the baseline's"
    return ""


def external_results(rollout: Rollout, observed: ObservedState, now: float) -> tuple[ExternalResult, ...]:
    """What the external gates of the step by which requests go say now."""
    return tuple(_result(rollout, gate, observed.gates, now) for gate in rollout.config.gates)


def _result(
    rollout: Rollout, gate: ExternalGate, samples: Map[GateKey, GateSample], now: float
) -> ExternalResult:
    sample = _current(rollout, samples.get(gate_key(rollout, gate)))
    if sample is None:
        return ExternalResult(name=gate.name, status=GateStatus.UNKNOWN, text="waits for its first answer")
    status, text = GateStatus.UNKNOWN, sample.text
    if sample.failures > gate.max_failures:
        status = GateStatus.FAILED
    elif sample.passed and now - sample.at > _STALE_INTERVALS * gate.every_s + _LATE_S:
        text = f"no answer since {now - sample.at:.0f} s"
    elif sample.passed:
        status = GateStatus.PASSED
    if sample.failures and status is not GateStatus.PASSED:
        text = f"{text} ({sample.failures} bad answers in a row; {gate.max_failures} may be)"
    return ExternalResult(name=gate.name, status=status, text=text)


def _current(rollout: Rollout, sample: GateSample | None) -> GateSample | None:
    """``sample`` if it is of the step by which requests go."""
    return sample if sample is not None and sample.in_force_at == rollout.in_force_at else None
