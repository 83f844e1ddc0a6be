"""Sees over HTTP when a change has taken effect, and whether requests fail meanwhile.

Why a thread that asks every few milliseconds and nothing faster: the same for every system, it takes next to nothing
of the processors that the measured system wants.
"""

from __future__ import annotations

import http.client
import threading
import time
from types import TracebackType
from typing import Self

POLL_S = 0.02
"""Times are that coarse."""
_REQUEST_TIMEOUT_S = 10.0


class AnswerWatch:
    """Asks one address until it is left."""

    def __init__(self, port: int, path: str) -> None:
        self.requests = 0
        """That were sent while `must_serve`."""
        self.requests_failed = 0
        self.must_serve = False
        """From now on everything but a 200 is a failure."""
        self._port, self._path = port, path
        self._expected: tuple[int, bytes | None] | None = None
        self._seen = threading.Event()
        self._seen_at = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="answer-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(_REQUEST_TIMEOUT_S + 1.0)

    def expect(self, version: str | None) -> None:
        """Look out for an answer of ``version``, or for a 404."""
        self._seen.clear()
        self._expected = (404, None) if version is None else (200, version.encode())

    def seen_at(self, timeout_s: float) -> float:
        """When (`time.monotonic`) what is expected was first seen; blocks. Raises `TimeoutError`."""
        if not self._seen.wait(timeout_s):
            raise TimeoutError(f"{self._expected} was not answered within {timeout_s:g} s")
        return self._seen_at

    def _run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=_REQUEST_TIMEOUT_S)
        while not self._stop.wait(POLL_S):
            must_serve = self.must_serve
            try:
                connection.request("GET", self._path)
                response = connection.getresponse()
                status, body = response.status, response.read()
            except (OSError, http.client.HTTPException):
                connection.close()
                status, body = 0, b""
            if must_serve and self.must_serve:
                self.requests += 1
                self.requests_failed += status != 200
            expected = self._expected
            if expected is not None and not self._seen.is_set() and self._matches(expected, status, body):
                self._seen_at = time.monotonic()
                self._seen.set()
        connection.close()

    def _matches(self, expected: tuple[int, bytes | None], status: int, body: bytes) -> bool:
        return status == expected[0] and (expected[1] is None or body == expected[1])
