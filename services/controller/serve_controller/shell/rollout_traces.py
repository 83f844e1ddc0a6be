"""Rollouts as traces: one for each rollout, with a span for each step and one for the whole.

A step lasts for minutes or days and may end under another leader than it began under, so its span is made when it is
over, from what is recorded, and the trace's id follows from the rollout's goal.
"""

from __future__ import annotations

import hashlib
from typing import Final, NamedTuple

from serve_common.names import BackendTag
from serve_common.telemetry.request_traces import Tracer, Value, cut, process_tracer, record_past
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.objects import ObjectChanges
from serve_controller.core.rollouts.record import Rollout, RolloutOutcome

_ALWAYS_SAMPLED: Final = "0" * 15 + "1"
"""The half of the id that samplers go by: so small that any share of traces has it."""


def get_rollout_trace_id(rollout: Rollout) -> str:
    """Id of the trace of a rollout, of 32 hexadecimal digits."""
    name = f"{rollout.goal_id} {rollout.backend_tag} {rollout.started_at}"
    return hashlib.blake2b(name.encode(), digest_size=8).hexdigest() + _ALWAYS_SAMPLED


def trace_rollouts(before: Checkpoint, changes: ObjectChanges) -> None:
    """Make the spans of what recorded changes have ended; does nothing while tracing is off."""
    tracer = process_tracer()
    if tracer is None:
        return
    for rollout in changes.puts:
        if isinstance(rollout, Rollout):
            known = before.rollouts.get(BackendTag(rollout.backend_tag))
            if known is not None and known.goal_id == rollout.goal_id:
                _trace(tracer, known, rollout)


def _trace(tracer: Tracer, known: Rollout, rollout: Rollout) -> None:
    for passed in rollout.passed[len(known.passed) :]:
        attributes: dict[str, Value] = {"muster.requests": passed.requests, "muster.reason": cut(passed.why)}
        _span(
            tracer, rollout, f"step {passed.step}", _Period(known.in_force_at, passed.passed_at), attributes
        )
    if rollout.outcome is None or known.outcome is not None or rollout.decided_at is None:
        return
    error = rollout.reason if rollout.outcome is RolloutOutcome.ABORTED else None
    if known.is_in_force:
        name = f"step {known.steps[known.step]}"
        _span(tracer, rollout, name, _Period(known.in_force_at, rollout.decided_at, error), {})
    whole: dict[str, Value] = {
        "muster.version": rollout.candidate.version or "",
        "muster.outcome": rollout.outcome.value,
        "muster.reason": cut(rollout.reason),
    }
    name = f"rollout {rollout.backend_tag}"
    _span(tracer, rollout, name, _Period(rollout.started_at, rollout.decided_at, error), whole)


class _Period(NamedTuple):
    """When something began and ended, seconds since 1970, and the error that it ended with."""

    start_s: float
    end_s: float
    error: str | None = None


def _span(tracer: Tracer, rollout: Rollout, name: str, period: _Period, attributes: dict[str, Value]) -> None:
    attributes |= {"muster.backend_tag": rollout.backend_tag, "muster.goal_id": rollout.goal_id}
    record_past(
        tracer,
        name,
        trace_id=get_rollout_trace_id(rollout),
        start_s=period.start_s,
        end_s=period.end_s,
        attributes=attributes,
        error=period.error,
    )
