"""What keeps load from a backend that fails: its circuit, its retry budget; and what wakes one that sleeps."""

from __future__ import annotations

from collections import deque
from typing import Final, final

from serve_common.config.backend import CircuitBreaker
from serve_common.protocol.reports import AGAIN_S
from serve_common.routing.queues import RequestKey

SOON_S: Final = 0.02
"""After a message that told of one request alone, another may follow with what has come since: the first says that a
replica is needed, the second for how many requests."""


@final
class WakeSignal:
    """What was said last, and when."""

    __slots__ = ("_told", "_told_at")

    def __init__(self) -> None:
        self._told = 0
        self._told_at = float("-inf")

    def is_due(self, now: float, waiting: int) -> bool:
        """Whether to say now that so many wait, which must be at least one."""
        since_s = now - self._told_at
        return since_s >= AGAIN_S or (self._told == 1 < waiting and since_s >= SOON_S)

    def told(self, now: float, waiting: int) -> None:
        """It was said."""
        self._told, self._told_at = waiting, now

    def rest(self) -> None:
        """Nothing is to be said for now; the next time begins anew."""
        self._told, self._told_at = 0, float("-inf")


_SAMPLES: Final = 10
"""A window moves on in steps of this part of it."""


@final
class RecentCounts:
    """Two running totals as they were at some moments within the last ``window_s``."""

    __slots__ = ("_next_at", "_samples", "_seen", "_step_s", "_window_s")

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._step_s = window_s / _SAMPLES
        self._samples: deque[tuple[float, int, int]] = deque()
        self._seen = (0, 0)
        self._next_at = float("-inf")

    def look(self, now: float, first: int, second: int) -> None:
        """Take note of the totals. To be called often: what they grew by since the last look counts as of now."""
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
        self.look(now, first, second)
        _, first_then, second_then = self._samples[0]
        return first - first_then, second - second_then


TRIAL_RETRY_S: Final = 1.0
"""What callers are told to wait while a trial runs."""


@final
class Circuit:
    """Closed: all may pass. Open: nobody may, for a time. Then one may try, and the others wait for what it finds."""

    __slots__ = (
        "_config",
        "_ill_since",
        "_recent",
        "_shut_until",
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
        """Requests so far that got no answer because their replica died, lost them or was silent altogether."""
        self.opened = 0
        """How often it opened."""
        self.refused = 0
        """Requests that it did not let pass."""
        self._config = config
        self._recent = RecentCounts(config.window_s)
        self._shut_until = 0.0
        self._ill_since = 0.0
        """When it opened last after it had been closed."""
        self._trial: RequestKey | None = None

    def configure(self, config: CircuitBreaker, answered: int) -> None:
        """Go by ``config`` from now on; an open circuit stays open unless ``config`` wants none."""
        if config == self._config:
            return
        if config.window_s != self._config.window_s:
            self._recent = RecentCounts(config.window_s)
            self._recent.forget(answered, self.failures)
        self._config = config
        if not config.failure_percent:
            self._close(answered)

    def look(self, now: float, answered: int) -> None:
        """Take note of how many requests were answered so far; see `RecentCounts.look`."""
        self._recent.look(now, answered, self.failures)

    def fail(self, now: float, count: int, answered: int) -> None:
        """So many requests got no answer; ``answered`` is how many got one so far."""
        self._recent.look(now, answered, self.failures)
        self.failures += count
        config = self._config
        if self.is_open or not config.failure_percent:
            return
        answers, failures = self._recent.grown(now, answered, self.failures)
        ended = answers + failures
        if ended >= config.requests_min and 100.0 * failures >= config.failure_percent * ended:
            self._open(now)

    def refuse(self, request: RequestKey, now: float) -> float | None:
        """None when ``request`` may pass, otherwise in how many seconds it is worth trying again.

        The first that passes when the circuit has been open for long enough is the trial.
        """
        if not self.is_open:
            return None
        if now < self._shut_until:
            self.refused += 1
            return self._shut_until - now
        if self._trial is not None:
            self.refused += 1
            return TRIAL_RETRY_S
        self._trial = request
        return None

    def ended(self, request: RequestKey, now: float | None, answered: int) -> None:
        """``request`` left the router: unanswered at ``now``, or, when that is None, with an answer."""
        if request != self._trial:
            return
        if now is None:
            self._close(answered)
        else:
            self._open(now)

    def withdrew(self, request: RequestKey) -> None:
        """``request`` left without having shown anything; the next one may try."""
        if request == self._trial:
            self._trial = None

    def begin_anew(self, answered: int) -> None:
        """What has failed is gone, and what comes in its place has shown nothing yet; ``answered`` as in `fail`."""
        self._close(answered)

    def forgive(self, since: float, answered: int) -> None:
        """What failed from ``since`` on was no fault of the backend: an opening since then is taken back.

        One that had opened before lets a trial pass at once.
        """
        if not self.is_open or self._ill_since >= since:
            self._close(answered)
        else:
            self._shut_until, self._trial = 0.0, None

    def _open(self, now: float) -> None:
        if not self.is_open:
            self._ill_since = now
        self.is_open = True
        self.opened += 1
        self._trial = None
        self._shut_until = now + self._config.open_time_s

    def _close(self, answered: int) -> None:
        self.is_open = False
        self._trial = None
        # What opened it must not open it again at the next failure.
        self._recent.forget(answered, self.failures)


WINDOW_S: Final = 10.0
ALWAYS: Final = 10
"""Second sendings within the window that need no share of anything."""


@final
class RetryBudget:
    """Second sendings of one router, as a share of all that it was given within `WINDOW_S`."""

    __slots__ = ("_recent", "percent", "refused", "spent")

    def __init__(self, percent: float) -> None:
        self.percent = percent
        self.spent = 0
        """Second sendings so far."""
        self.refused = 0
        """Those that the budget did not allow."""
        self._recent = RecentCounts(WINDOW_S)

    def look(self, now: float, requests: int) -> None:
        """Take note of how many requests the router was given so far; see `RecentCounts.look`."""
        self._recent.look(now, requests, self.spent)

    def take(self, now: float, requests: int) -> bool:
        """True when one more second sending is allowed; it then counts as made."""
        recent, spent = self._recent.grown(now, requests, self.spent)
        if spent >= ALWAYS and 100.0 * (spent + 1) > self.percent * recent:
            self.refused += 1
            return False
        self.spent += 1
        return True
