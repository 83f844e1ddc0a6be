"""Knative's pod autoscaler (KPA), for the comparison only.

Written after reading Knative serving's ``pkg/autoscaler/scaling/autoscaler.go`` (``Scale``), ``pkg/autoscaler/
aggregation`` (buckets of one second) and the defaults in ``config/core/configmaps/autoscaler.yaml``: tick 2 s, stable
window 60 s, panic window a tenth of it, panic threshold 200 %, rates of change 1000 up and 2 down, no scale-down delay.
The target is what the others aim at (its ``container-concurrency-target-percentage`` is left out). Requests that wait
in its activator count as ongoing. Means of seconds are exact here.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final

from bench.autoscaling.backend import Backend, Counters

STABLE_S: Final = 60
PANIC_S: Final = 6
PANIC_THRESHOLD: Final = 2.0
MAX_SCALE_UP_RATE: Final = 1000.0
MAX_SCALE_DOWN_RATE: Final = 2.0


class KnativePolicy:
    """A stable and a panic window."""

    tick_s = 1.0

    def __init__(
        self, *, target: float, min_replicas: int, max_replicas: int, scale_down_delay_s: float
    ) -> None:
        self._target, self._min, self._max = target, min_replicas, max_replicas
        self._delay_s = scale_down_delay_s
        self._samples: deque[Counters] = deque(maxlen=STABLE_S + 1)
        self._panic_at: float | None = None
        self._most_in_panic = 0
        self._recent: deque[tuple[float, int]] = deque()

    def tick(self, backend: Backend) -> int:
        """Sample each second, decide every other one."""
        self._samples.append(backend.counters())
        if round(backend.now) % 2 or len(self._samples) < 2:
            return backend.target
        now, ready = backend.now, max(backend.num_running, 1)
        most, least = math.ceil(MAX_SCALE_UP_RATE * ready), math.floor(ready / MAX_SCALE_DOWN_RATE)
        by_stable = math.ceil(self._mean(STABLE_S) / self._target)
        by_panic = math.ceil(self._mean(PANIC_S) / self._target)
        desired = min(max(by_stable, least), most)
        if by_panic / ready >= PANIC_THRESHOLD:
            self._panic_at = now
        elif self._panic_at is not None and self._panic_at + STABLE_S < now:
            self._panic_at, self._most_in_panic = None, 0
        if self._panic_at is not None:
            self._most_in_panic = max(self._most_in_panic, desired, min(max(by_panic, least), most))
            desired = self._most_in_panic
        if self._delay_s:
            while self._recent and self._recent[0][0] <= now - self._delay_s:
                self._recent.popleft()
            while self._recent and self._recent[-1][1] <= desired:
                self._recent.pop()
            self._recent.append((now, desired))
            desired = self._recent[0][1]
        return min(max(desired, self._min), self._max)

    def _mean(self, window_s: int) -> float:
        last = self._samples[-1]
        first = self._samples[max(len(self._samples) - 1 - window_s, 0)]
        spent = last.queued_s + last.ongoing_s - first.queued_s - first.ongoing_s
        return max(spent, 0.0) / (last.at - first.at)
