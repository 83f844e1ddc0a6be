"""Metrics of rollouts, which the leading controller exports."""

from __future__ import annotations

from typing import Final

from serve_common.telemetry.catalogue.specs import Exporter, MetricKind, MetricSpec


def _gauge(name: str, text: str, unit: str, labels: tuple[str, ...], *, when: str) -> MetricSpec:
    return MetricSpec(
        name=name,
        kind=MetricKind.GAUGE,
        text=text,
        unit=unit,
        labels=("backend_tag", *labels),
        when=when,
        exporters=(Exporter.CONTROLLER,),
    )


_ACTIVE: Final = "while it leads and a rollout is under way"
_COMPARED: Final = "while it leads and the step of a rollout is judged"

ROLLOUT_STEP: Final = _gauge(
    "serve_rollout_step", "Number of a rollout's present step, from 1.", "1", (), when=_ACTIVE
)
ROLLOUT_STEPS: Final = _gauge("serve_rollout_steps", "Number of its steps.", "1", (), when=_ACTIVE)
ROLLOUT_SHARE: Final = _gauge(
    "serve_rollout_traffic_share",
    "Share of the requests that the new version gets, 0 to 1; copies do not count.",
    "1",
    (),
    when=_ACTIVE,
)
ROLLOUT_STEP_SECONDS: Final = _gauge(
    "serve_rollout_step_seconds",
    "How long requests have gone by the present step; 0 while its replicas start.",
    "seconds",
    (),
    when=_ACTIVE,
)
ROLLOUT_PAUSED: Final = _gauge(
    "serve_rollout_paused", "1 while a person has paused it.", "1", (), when=_ACTIVE
)
ROLLOUT_GATE: Final = _gauge(
    "serve_rollout_gate",
    "1 for what a gate says of the new version: passed, failed, or unknown for lack of requests or of an answer.",
    "1",
    ("gate", "status"),
    when=f"{_COMPARED}; of external gates also in the last step",
)
ROLLOUT_COMPARED: Final = _gauge(
    "serve_rollout_compared_requests",
    "Requests of the present step that a gate has compared, of the canary and of its baseline.",
    "requests",
    ("gate", "version"),
    when=_COMPARED,
)
ROLLOUT_BAD: Final = _gauge(
    "serve_rollout_bad_requests",
    "Those of them that failed, were refused as wrong, or took too long, as the gate says.",
    "requests",
    ("gate", "version"),
    when=_COMPARED,
)
ROLLOUT_DECIDED: Final = _gauge(
    "serve_rollout_decided_timestamp_seconds",
    "When the last rollout was decided, and how: promoted, aborted or superseded; since 1970.",
    "seconds",
    ("outcome",),
    when="while it leads, once one was decided, until the next",
)

ROLLOUT_METRICS: Final = (
    ROLLOUT_STEP,
    ROLLOUT_STEPS,
    ROLLOUT_SHARE,
    ROLLOUT_STEP_SECONDS,
    ROLLOUT_PAUSED,
    ROLLOUT_GATE,
    ROLLOUT_COMPARED,
    ROLLOUT_BAD,
    ROLLOUT_DECIDED,
)
