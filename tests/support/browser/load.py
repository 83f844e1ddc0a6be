"""Requests from a thread of their own, while a browser is driven."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import httpx


class ThreadLoad:
    """One request after the other, and how each ended."""

    def __init__(self, url: str, pause_s: float) -> None:
        self._url, self._pause_s = url, pause_s
        self._over = threading.Event()
        self.ends: list[str] = []
        """Statuses, or errors."""

    @property
    def failures(self) -> list[str]:
        """All but those with status 200."""
        return [end for end in self.ends if end != "200"]

    def run(self) -> None:
        """Until `end`."""
        with httpx.Client(timeout=30) as client:
            while not self._over.wait(self._pause_s):
                try:
                    self.ends.append(str(client.get(self._url).status_code))
                except httpx.HTTPError as error:
                    self.ends.append(repr(error))

    def end(self) -> None:
        """Send no more."""
        self._over.set()


@contextlib.contextmanager
def under_load(url: str, *, threads: int = 2, pause_s: float = 0.02) -> Iterator[ThreadLoad]:
    """While the block runs."""
    load = ThreadLoad(url, pause_s)
    running = [threading.Thread(target=load.run) for _ in range(threads)]
    for thread in running:
        thread.start()
    try:
        yield load
    finally:
        load.end()
        for thread in running:
            thread.join(40)
