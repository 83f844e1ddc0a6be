"""Cancels what a request has begun elsewhere when its caller leaves, for code that runs in threads.

Why beside the cancelling of tasks: a thread cannot be cancelled. What it waits for can be, and then it ends by itself.
It does not matter who made the thread: Muster, a framework, or the user's code with a copy of its context.
"""

from __future__ import annotations

import threading
from typing import Final, Protocol, final

LEFT_MAX: Final = 5_000
"""Callers that are remembered to have left: a thread may go on after the task of its request has ended."""


class Cancellable(Protocol):
    """Something that is under way."""

    def cancel(self) -> None:
        """Nobody wants it any more; may be called by any thread, and when it has ended."""


@final
class Departures:
    """Of all requests of this process, by `RequestContext.key`; callable from any thread."""

    def __init__(self) -> None:
        # Entered again when what is collected inside of it ends something.
        self._lock = threading.RLock()
        self._begun: dict[bytes, set[Cancellable]] = {}
        self._left: dict[bytes, None] = {}

    def __len__(self) -> int:
        """Requests that something is under way for."""
        return len(self._begun)

    def watch(self, key: bytes, begun: Cancellable) -> None:
        """Until `forget`, cancel ``begun`` when that request's caller leaves; at once when it has left."""
        with self._lock:
            has_left = key in self._left
            if not has_left:
                self._begun.setdefault(key, set()).add(begun)
        if has_left:
            begun.cancel()

    def forget(self, key: bytes, begun: Cancellable) -> None:
        """``begun`` has ended."""
        with self._lock:
            others = self._begun.get(key)
            if others is not None:
                others.discard(begun)
                if not others:
                    del self._begun[key]

    def leave(self, key: bytes) -> None:
        """The caller of that request has left; what its threads begin later is cancelled too."""
        with self._lock:
            self._left[key] = None
            if len(self._left) > LEFT_MAX:
                del self._left[next(iter(self._left))]
            begun = self._begun.pop(key, ())
        for one in begun:
            one.cancel()


departures: Final = Departures()
