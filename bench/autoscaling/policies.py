"""What is compared: Muster's own policy, Ray Serve's and Knative's, which see the load in different ways.

Why each reads for itself: how often a load is read, over which window and how old it is then, is as much a part of
a policy as its formula.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final, Protocol

from bench.autoscaling.simulation import Backend, Counters
from serve_common.config.autoscaling import AutoscalingConfig
from serve_controller.core.autoscaling.policy import decide_scaling
from serve_controller.core.autoscaling.values import LoadSample, ScalingInput, ScalingState

SCRAPE_S: Final = 5
_SCRAPED_AFTER_S: Final = 2
"""The scrapes' phase: an evaluation finds samples of this age less than `SCRAPE_S`."""

STABLE_S: Final = 60
PANIC_S: Final = 6
PANIC_THRESHOLD: Final = 2.0
MAX_SCALE_UP_RATE: Final = 1000.0
MAX_SCALE_DOWN_RATE: Final = 2.0


class Policy(Protocol):
    """Something that scales a backend; made anew for each run."""

    tick_s: float
    """How often it is asked."""

    def tick(self, backend: Backend) -> int:
        """How many replicas there shall be; called at every multiple of ``tick_s``."""
        ...


class MusterPolicy:
    """`decide_scaling` with the state it keeps, fed as in the controller.

    Counters are scraped every 5 s and evaluated at each interval. The windows are not exact here: Prometheus' ``rate``
    reaches from the first to the last sample inside of them.
    """

    tick_s = 1.0

    def __init__(self, config: AutoscalingConfig) -> None:
        self._config = config
        self._state = ScalingState()
        self._samples: deque[Counters] = deque(maxlen=int(config.look_back_period_s / SCRAPE_S) + 2)
        self.reasons: list[tuple[float, str]] = []
        """Why it moved, and when."""

    def tick(self, backend: Backend) -> int:
        """Scrape and evaluate when each is due."""
        second = round(backend.now)
        if second % SCRAPE_S == SCRAPE_S - _SCRAPED_AFTER_S:
            self._samples.append(backend.counters())
        if second % round(self._config.metrics_interval_s) or len(self._samples) < 2:
            return backend.target
        inputs = ScalingInput(
            config=self._config, num_replicas=backend.target, num_running=backend.num_running
        )
        decision = decide_scaling(inputs, [self._sample(backend.now)], self._state, backend.now)
        self._state = decision.state
        if decision.target != backend.target:
            self.reasons.append((backend.now, decision.why))
        return decision.target

    def _sample(self, now: float) -> LoadSample:
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


class RayServePolicy:
    """Means of sampled gauges; a number that must be wanted for a delay; factors are left at 1.

    Written after reading Ray 2.60: ``serve/autoscaling_policy.py`` (scaling factors, delays, queue-length policy),
    ``serve/_private/router.py`` (gauges recorded each ``0.2 * look_back_period_s``, pushed each
    ``metrics_interval_s``),
    ``serve/_private/autoscaling_state.py`` (time-weighted mean from the first pushed point until now) and
    ``serve/_private/constants.py`` (control loop each 0.1 s, here each second). One router pushes here, with no delay.
    """

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


class KnativePolicy:
    """Knative's pod autoscaler (KPA): a stable and a panic window.

    Written after reading Knative serving's ``pkg/autoscaler/scaling/autoscaler.go`` (``Scale``), ``pkg/autoscaler/
    aggregation`` (buckets of one second) and the defaults in ``config/core/configmaps/autoscaler.yaml``: tick 2 s,
    stable window 60 s, panic window a tenth of it, panic threshold 200 %, rates of change 1000 up and 2 down, no
    scale-down delay. The target is what the others aim at (its ``container-concurrency-target-percentage`` is left
    out). Requests that wait in its activator count as ongoing. Means of seconds are exact here.
    """

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
