"""Muster's own policy, fed as in the controller: counters scraped each 5 s, rates over windows, a look each interval.

Why the windows are not exact here: Prometheus' ``rate`` reaches from the first to the last sample inside of them.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from bench.autoscaling.backend import Backend, Counters
from serve_common.config.autoscaling import AutoscalingConfig
from serve_controller.core.autoscaling.policy import decide_scaling
from serve_controller.core.autoscaling.values import LoadSample, ScalingInput, ScalingState

SCRAPE_S: Final = 5
_SCRAPED_AFTER_S: Final = 2
"""The scrapes' phase: a look finds samples of this age less than `SCRAPE_S`."""


class MusterPolicy:
    """`decide_scaling` with the state it keeps."""

    tick_s = 1.0

    def __init__(self, config: AutoscalingConfig) -> None:
        self._config = config
        self._state = ScalingState()
        self._samples: deque[Counters] = deque(maxlen=int(config.look_back_period_s / SCRAPE_S) + 2)
        self.reasons: list[tuple[float, str]] = []
        """Why it moved, and when."""

    def tick(self, backend: Backend) -> int:
        """Scrape and look when the time has come."""
        second = round(backend.now)
        if second % SCRAPE_S == SCRAPE_S - _SCRAPED_AFTER_S:
            self._samples.append(backend.counters())
        if second % round(self._config.metrics_interval_s) or len(self._samples) < 2:
            return backend.target
        inputs = ScalingInput(
            config=self._config, num_replicas=backend.target, num_running=backend.num_running
        )
        decision = decide_scaling(inputs, [self._reading(backend.now)], self._state, backend.now)
        self._state = decision.state
        if decision.target != backend.target:
            self.reasons.append((backend.now, decision.why))
        return decision.target

    def _reading(self, now: float) -> LoadSample:
        queued, ongoing = self._rates(now - self._config.look_back_period_s)
        return LoadSample(
            at=self._samples[-1].at,
            seen=queued + ongoing,
            queued=queued,
            burst=sum(self._rates(now - self._config.panic_window_s)),
        )

    def _rates(self, since: float) -> tuple[float, float]:
        last = self._samples[-1]
        first = next((sample for sample in self._samples if sample.at > since), last)
        if first is last:
            first = self._samples[-2]
        seconds = last.at - first.at
        # Differences of large sums of floats may come out a little below nothing.
        return (
            max(last.queued_s - first.queued_s, 0.0) / seconds,
            max(last.ongoing_s - first.ongoing_s, 0.0) / seconds,
        )
