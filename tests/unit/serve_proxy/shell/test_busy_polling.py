"""When a proxy stays awake for a response, and how seldom it tries again after polls in vain."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from serve_proxy.shell.busy_polling import PAUSE_MAX, POLL_S, BusyPolling


class Loop:
    """Runs what is scheduled when the test says so; the clock stands still otherwise."""

    def __init__(self) -> None:
        self.now = 100.0
        self.ready: list[Callable[[], None]] = []
        self.calls: list[Any] = []
        self.polling = BusyPolling(self.calls, self.ready.append, lambda: self.now)

    def send(self, *, is_direct: bool = True) -> Any:
        """A request that was sent, over a direct link or the bus."""
        attempt = SimpleNamespace(link=object() if is_direct else None)
        call = SimpleNamespace(status=0, attempt=attempt)
        self.calls.append(call)
        self.polling.expect(call)
        return call

    def answer(self, call: Any) -> None:
        call.status = 200
        self.calls.remove(call)

    def run(self) -> bool:
        """One iteration; whether the loop stays awake after it."""
        ready, self.ready[:] = list(self.ready), []
        for callback in ready:
            callback()
        return bool(self.ready)

    def send_in_vain(self) -> bool:
        """A request whose response comes too late; whether it was polled for."""
        call = self.send()
        is_polled = bool(self.ready)
        self.now += 2 * POLL_S
        assert not self.run()
        self.answer(call)
        return is_polled


def test_the_loop_stays_awake_until_the_response_is_there() -> None:
    loop = Loop()
    for _ in range(3):
        call = loop.send()
        assert loop.run()
        loop.now += POLL_S / 2
        assert loop.run()
        loop.answer(call)
        assert not loop.run()


def test_it_sleeps_when_the_time_is_over() -> None:
    loop = Loop()
    loop.send()
    loop.now += 0.9 * POLL_S
    assert loop.run()
    loop.now += 0.2 * POLL_S
    assert not loop.run()


def test_polls_in_vain_become_rare_and_one_that_pays_makes_them_frequent_again() -> None:
    loop = Loop()
    skipped, pauses = 0, list[int]()
    while len(pauses) < 12:
        if loop.send_in_vain():
            pauses.append(skipped)
            skipped = 0
        else:
            skipped += 1
    assert pauses == [0, 1, 2, 4, 8, 16, 32, 64, 128, PAUSE_MAX, PAUSE_MAX, PAUSE_MAX]
    for _ in range(PAUSE_MAX):
        assert not loop.send_in_vain()
    loop.answer(loop.send())
    assert not loop.run()
    assert [loop.send_in_vain() for _ in range(3)] == [True, False, True]


def test_only_a_single_request_over_a_link_is_polled_for() -> None:
    loop = Loop()
    loop.answer(loop.send(is_direct=False))
    assert not loop.ready
    first, second = loop.send(), loop.send()
    assert not loop.run(), "with two in flight the loop has other things to do"
    loop.answer(first)
    loop.answer(second)
    third = loop.send()
    assert loop.run(), "nothing was found to be in vain"
    loop.answer(third)


def test_a_request_that_has_ended_or_waits_is_not_polled_for() -> None:
    loop = Loop()
    call = SimpleNamespace(status=0, attempt=None)
    loop.calls.append(call)
    loop.polling.expect(call)  # type: ignore[arg-type]
    assert not loop.ready


def test_the_next_request_takes_over_a_poll_that_has_not_noticed_its_response() -> None:
    loop = Loop()
    loop.answer(loop.send())
    loop.now += POLL_S / 2
    last = loop.send()
    assert len(loop.ready) == 1
    loop.now += 0.9 * POLL_S
    assert loop.run()
    loop.answer(last)
    assert not loop.run()
