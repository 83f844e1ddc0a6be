"""Protection of a failing backend: circuit breaker and retry budget; and the wake signal for one at zero replicas."""

from __future__ import annotations

from collections import deque
from typing import Final, final

from serve_common.config.backend import CircuitBreaker
from serve_common.protocol.reports import AGAIN_S
from serve_common.routing.queues import RequestKey

SOON_S: Final = 0.02
"""Seconds after a message about a single request until another may follow: the first reports that a replica is
needed, the second for how many requests."""


@final
class WakeSignal:
    """The last wake message, and when it was sent.

    Why not one per request: a burst of a thousand should cost a message or two, and a lost message no more than the
    time until the next one.
    """

    __slots__ = ("_sent_at", "_sent_waiting")

    def __init__(self) -> None:
        self._sent_waiting = 0
        self._sent_at = float("-inf")

    def is_due(self, now: float, waiting: int) -> bool:
        """Whether to send now that ``waiting`` requests wait, at least one."""
        since_s = now - self._sent_at
        return since_s >= AGAIN_S or (self._sent_waiting == 1 < waiting and since_s >= SOON_S)

    def record_sent(self, now: float, waiting: int) -> None:
        """Record that the message was sent."""
        self._sent_waiting, self._sent_at = waiting, now

    def rest(self) -> None:
        """Reset: no request waits."""
        self._sent_waiting, self._sent_at = 0, float("-inf")


_SAMPLES: Final = 10
"""Steps per window."""


@final
class RecentCounts:
    """Samples of two running totals within the last ``window_s`` seconds.

    Why samples and not single events: the path of a request then only increments a counter, and needs no clock.
    """

    __slots__ = ("_next_at", "_samples", "_seen", "_step_s", "_window_s")

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._step_s = window_s / _SAMPLES
        self._samples: deque[tuple[float, int, int]] = deque()
        self._seen = (0, 0)
        self._next_at = float("-inf")

    def tick(self, now: float, first: int, second: int) -> None:
        """Record the totals. To be called often: growth since the last call counts as of now."""
        if now >= self._next_at:
            samples = self._samples
            samples.append((now, *self._seen))
            self._next_at = now + self._step_s
            gone_at = now - self._window_s
            while samples[0][0] < gone_at:
                samples.popleft()
        self._seen = (first, second)

    def forget(self, first: int, second: int) -> None:
        """Count from these totals on."""
        self._samples.clear()
        self._seen = (first, second)
        self._next_at = float("-inf")

    def grown(self, now: float, first: int, second: int) -> tuple[int, int]:
        """By how much each total grew within the window that ends now."""
        self.tick(now, first, second)
        _, first_then, second_then = self._samples[0]
        return first - first_then, second - second_then


TRIAL_RETRY_S: Final = 1.0
"""Retry-after of callers while a trial runs, in seconds."""


@final
class Circuit:
    """A circuit breaker. Closed: all requests pass. Open: none, for a time. Then one is the trial, which decides.

    Why it counts only replicas that died or are silent: where a model answers 500, or works on a request until its
    deadline, that model or that request is at fault, and a client that sends twenty of those must not shut out the
    others. Hystrix and Envoy's outlier detection count every timeout, because they cannot tell a slow server from one
    that is gone; here the replica's process itself confirms that it still works on a request, whatever the user's code
    does.
    """

    __slots__ = (
        "_config",
        "_open_since",
        "_open_until",
        "_recent",
        "_trial",
        "failures",
        "is_open",
        "opened",
        "refused",
    )

    def __init__(self, config: CircuitBreaker) -> None:
        self.is_open = False
        """True from its opening until a trial's success."""
        self.failures = 0
        """Requests so far without a response because their replica died, lost them or was unresponsive."""
        self.opened = 0
        """How often it opened."""
        self.refused = 0
        """Requests that were refused."""
        self._config = config
        self._recent = RecentCounts(config.window_s)
        self._open_until = 0.0
        self._open_since = 0.0
        """When it last changed from closed to open."""
        self._trial: RequestKey | None = None

    def configure(self, config: CircuitBreaker, completed: int) -> None:
        """Use ``config`` from now on; an open circuit stays open unless ``config`` disables it."""
        if config == self._config:
            return
        if config.window_s != self._config.window_s:
            self._recent = RecentCounts(config.window_s)
            self._recent.forget(completed, self.failures)
        self._config = config
        if not config.failure_percent:
            self._close(completed)

    def tick(self, now: float, completed: int) -> None:
        """Record how many requests were answered so far; to be called often."""
        self._recent.tick(now, completed, self.failures)

    def fail(self, now: float, count: int, completed: int) -> None:
        """Count ``count`` requests without a response; ``completed`` is how many got one so far."""
        self._recent.tick(now, completed, self.failures)
        self.failures += count
        config = self._config
        if self.is_open or not config.failure_percent:
            return
        completed_now, failures = self._recent.grown(now, completed, self.failures)
        ended = completed_now + failures
        if ended >= config.requests_min and 100.0 * failures >= config.failure_percent * ended:
            self._open(now)

    def refuse(self, request: RequestKey, now: float) -> float | None:
        """None when ``request`` may pass, otherwise in how many seconds it is worth trying again.

        The first that passes when the circuit has been open for long enough is the trial.
        """
        if not self.is_open:
            return None
        if now < self._open_until:
            self.refused += 1
            return self._open_until - now
        if self._trial is not None:
            self.refused += 1
            return TRIAL_RETRY_S
        self._trial = request
        return None

    def ended(self, request: RequestKey, now: float | None, completed: int) -> None:
        """``request`` left the router: incomplete at ``now``, or, when that is None, with an answer."""
        if request != self._trial:
            return
        if now is None:
            self._close(completed)
        else:
            self._open(now)

    def withdrew(self, request: RequestKey) -> None:
        """``request`` left without a result; the next one may be the trial."""
        if request == self._trial:
            self._trial = None

    def reset_state(self, completed: int) -> None:
        """Reset: the replicas that failed are gone, and new ones have no record yet; ``completed`` as in `fail`."""
        self._close(completed)

    def forgive(self, since: float, completed: int) -> None:
        """Failures from ``since`` on were not the backend's fault: an opening since then is undone.

        A circuit that opened before allows a trial at once.
        """
        if not self.is_open or self._open_since >= since:
            self._close(completed)
        else:
            self._open_until, self._trial = 0.0, None

    def _open(self, now: float) -> None:
        if not self.is_open:
            self._open_since = now
        self.is_open = True
        self.opened += 1
        self._trial = None
        self._open_until = now + self._config.open_time_s

    def _close(self, completed: int) -> None:
        self.is_open = False
        self._trial = None
        # The failures that opened it must not open it again at the next failure.
        self._recent.forget(completed, self.failures)


WINDOW_S: Final = 10.0
ALWAYS: Final = 10
"""Retries within the window that are always allowed."""


@final
class RetryBudget:
    """Limits the retries of one router to a share of its requests within `WINDOW_S`.

    Why: when replicas die under their load, retries add to the load that kills them.
    """

    __slots__ = ("_recent", "percent", "refused", "spent")

    def __init__(self, percent: float) -> None:
        self.percent = percent
        self.spent = 0
        """Retries so far."""
        self.refused = 0
        """Retries that the budget did not allow."""
        self._recent = RecentCounts(WINDOW_S)

    def tick(self, now: float, requests: int) -> None:
        """Record how many requests the router got so far; to be called often."""
        self._recent.tick(now, requests, self.spent)

    def take(self, now: float, requests: int) -> bool:
        """True when one more retry is allowed; it then counts as made."""
        recent, spent = self._recent.grown(now, requests, self.spent)
        if spent >= ALWAYS and 100.0 * (spent + 1) > self.percent * recent:
            self.refused += 1
            return False
        self.spent += 1
        return True
