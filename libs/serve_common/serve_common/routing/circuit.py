"""Keeps requests from a backend whose replicas die or fall silent, until one request shows that it is well again.

Why it looks at deaths and silence only: where a model answers 500, or works on a request until its deadline, that model
or that request is at fault, and one client may send twenty of those, which must not shut out the others. Hystrix and
Envoy's outlier detection count every time-out, for they cannot tell a slow server from one that is gone; here a
replica's process says by itself that it still works on a request, whatever the user's code does.
"""

from __future__ import annotations

from typing import Final, final

from serve_common.routing.recent_counts import RecentCounts
from serve_common.routing.request_queue import RequestKey
from serve_common.values.backend_config import CircuitBreaker

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
