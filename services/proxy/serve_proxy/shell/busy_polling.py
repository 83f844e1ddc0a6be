"""Keeps the loop awake while the only request in flight is about to be answered."""

from __future__ import annotations

from collections.abc import Callable, Sized
from typing import Final, final

from serve_common.dispatch.calls import Call

POLL_S: Final = 200e-6
"""Seconds for which the loop stays awake, as long as a Linux guest polls before it halts (`guest_halt_poll_ns`)."""
PAUSE_MAX: Final = 256
"""Most requests that are not polled for after polls in vain."""


@final
class BusyPolling:
    """Runs the loop without sleeping until the response to a request over a direct link is there, or `POLL_S` are over.

    Why: to wake a process that sleeps on another processor takes some 30 us in a virtual machine, which is more than
    the router's whole work for a small request. Measured with one client, the no-op takes a sixth less.

    Why it costs little: the loop does everything else meanwhile; with more requests in flight it hardly sleeps anyway,
    so only a single one is polled for; and a poll in vain, as for a model that takes its time or a machine whose
    processors are busy, doubles the number of requests after which the next one is tried. All methods run on the loop.
    """

    def __init__(
        self, calls: Sized, soon: Callable[[Callable[[], None]], object], now: Callable[[], float]
    ) -> None:
        """``calls`` are those in flight; ``soon`` is `call_soon` of the loop; ``now`` is `time.perf_counter`."""
        self._calls = calls
        self._soon = soon
        self._now = now
        self._call: Call | None = None
        """The one that is polled for; None while the loop may sleep."""
        self._until = 0.0
        self._skips = 0
        """Requests to come that are not polled for."""
        self._pause = 1
        """How many they will be after the next poll in vain."""

    def expect(self, call: Call) -> None:
        """``call`` was just sent, unless it waits or has ended."""
        attempt = call.attempt
        if attempt is None or attempt.link is None or len(self._calls) != 1:
            return
        if self._skips:
            self._skips -= 1
            return
        self._until = self._now() + POLL_S
        is_polling, self._call = self._call is not None, call
        if not is_polling:
            self._soon(self._poll)

    def _poll(self) -> None:
        call = self._call
        if call is None or call.status or call.attempt is None:
            self._call, self._pause = None, 1
        elif len(self._calls) != 1:
            self._call = None
        elif self._now() < self._until:
            self._soon(self._poll)
        else:
            self._call, self._skips = None, self._pause
            self._pause = min(2 * self._pause, PAUSE_MAX)
