"""Ray Serve's default policy, for the comparison only.

Written after reading Ray 2.60: ``serve/autoscaling_policy.py`` (scaling factors, delays, queue-length policy),
``serve/_private/router.py`` (gauges recorded each ``0.2 * look_back_period_s``, pushed each ``metrics_interval_s``),
``serve/_private/autoscaling_state.py`` (time-weighted mean from the first pushed point until now) and
``serve/_private/constants.py`` (control loop each 0.1 s, here each second). One router pushes here, with no delay.
"""

from __future__ import annotations

import math
from collections import deque

from bench.autoscaling.backend import Backend
from serve_common.config.autoscaling import AutoscalingConfig


class RayServePolicy:
    """Means of sampled gauges; a number that must be wanted for a delay; factors are left at 1."""

    tick_s = 1.0

    def __init__(self, config: AutoscalingConfig) -> None:
        self._config = config
        self._record_s = round(min(0.2 * config.look_back_period_s, config.metrics_interval_s))
        self._recorded: deque[tuple[float, int]] = deque()
        self._pushed: list[tuple[float, int]] = []
        self._since: float | None = None
        self._is_up = False

    def tick(self, backend: Backend) -> int:
        """Record, push and decide when each is due."""
        second = round(backend.now)
        if second % self._record_s == 0:
            counters = backend.counters()
            self._recorded.append((backend.now, counters.queued + counters.ongoing))
        if second % round(self._config.metrics_interval_s) == 0:
            while self._recorded and self._recorded[0][0] < backend.now - self._config.look_back_period_s:
                self._recorded.popleft()
            self._pushed = list(self._recorded)
        # Without a running replica the number that is decided on stays.
        desired = (
            math.ceil(self._mean(backend.now) / self._config.target_ongoing_requests)
            if backend.num_running
            else backend.target
        )
        decided = self._after_delay(desired, backend.target, backend.now)
        return min(max(decided, self._config.min_replicas), self._config.max_replicas)

    def _mean(self, now: float) -> float:
        if not self._pushed:
            return 0.0
        ends = [*(at for at, _ in self._pushed[1:]), max(now, self._pushed[-1][0] + 1e-3)]
        area = sum(value * (end - at) for (at, value), end in zip(self._pushed, ends, strict=True))
        return area / (ends[-1] - self._pushed[0][0])

    def _after_delay(self, desired: int, target: int, now: float) -> int:
        if desired == target:
            self._since = None
            return target
        is_up = desired > target
        if self._since is None or is_up != self._is_up:
            self._since, self._is_up = now, is_up
        delay_s = self._config.upscale_delay_s if is_up else self._config.downscale_delay_s
        if now - self._since + 1e-6 < delay_s:
            return target
        self._since = None
        return desired if is_up else max(desired, 1)
