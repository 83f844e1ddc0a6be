"""Wakes waiters for results of another thread: tasks on any loop, or plain threads.

Why by mailbox: responses arrive in bursts, and each loop that waits for some of them is woken once for all of them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Final, final

from serve_common.runtime.threads import Mailbox

Waker = Callable[[], object]
"""May be called by any thread, and more than once."""


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


_mailboxes: Final[dict[asyncio.AbstractEventLoop, Mailbox[asyncio.Future[None]]]] = {}


def _get_mailbox(loop: asyncio.AbstractEventLoop) -> Mailbox[asyncio.Future[None]]:
    mailbox = _mailboxes.get(loop)
    if mailbox is None:
        for other in [known for known in list(_mailboxes) if known.is_closed()]:
            _mailboxes.pop(other, None)
        mailbox = _mailboxes[loop] = Mailbox(loop, _wake)
    return mailbox


def make_waiter() -> tuple[asyncio.Future[None], Waker]:
    """A future of the running loop, and a waker that resolves it from any thread."""
    loop = asyncio.get_running_loop()
    waiter: asyncio.Future[None] = loop.create_future()
    mailbox = _get_mailbox(loop)
    return waiter, lambda: mailbox.put(waiter)


@final
class Wakers:
    """Waiters for a single event, or for the next one of many."""

    __slots__ = ("_wakers",)

    def __init__(self) -> None:
        self._wakers: list[Waker] = []

    def add(self, waker: Waker) -> None:
        """Call ``waker`` at the next `wake`. The caller must then check once more whether it has happened meanwhile."""
        self._wakers.append(waker)

    def wake(self) -> None:
        """Call all wakers; must be called after the state that they check was set."""
        if self._wakers:
            # A waiter that is added after this line checks the state once more by itself.
            wakers, self._wakers = self._wakers, []
            for waker in wakers:
                waker()


def wait_in_thread(wakers: Wakers, has_happened: Callable[[], bool], timeout_s: float | None) -> bool:
    """Block until ``has_happened()``; False when ``timeout_s`` passed first. Callers `check_not_on_loop` before."""
    if has_happened():
        return True
    event = threading.Event()
    wakers.add(event.set)
    return has_happened() or event.wait(timeout_s)


def check_not_on_loop(instead: str) -> None:
    """Raise RuntimeError, which says what to do ``instead``, on the thread of a running loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise RuntimeError(
        f"Sync methods should not be called from within an `asyncio` event loop. Use {instead} instead."
    )
