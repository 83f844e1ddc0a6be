"""The changes that every system goes through, what is noted of them, and how they are seen to take effect over HTTP.

Why only the standard library: Ray Serve is measured by a Python of its own, in which nothing of Muster is installed.
"""

from __future__ import annotations

import http.client
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

REPLICAS = 8
REPLICA_CPUS = 0.1
"""Of one replica or bare actor: all versions of all replicas fit on two CPUs at once."""
SETTLE_S = 5.0
"""Default pause between two changes: what still stops of one, or is made ready for the next, is over by then."""
CHANGE_TIMEOUT_S = 120.0
POLL_S = 0.02
"""Times are that coarse."""
_REQUEST_TIMEOUT_S = 10.0
NAME, ROUTE = "noop", "/noop"
MODEL_DIR = Path(__file__).parents[1] / "models"

FIRST_DEPLOY = "first deploy"
REDEPLOY = "redeploy"
SCALE_UP = f"1 → {REPLICAS} replicas"
ROLL = f"rolling update of {REPLICAS}"
DELETE = f"delete of {REPLICAS}"


@dataclass(frozen=True)
class Change:
    """What is asked for. ``version`` None: that the deployment goes away."""

    step: str
    version: str | None
    num_replicas: int = 1


WARM_UP = (Change("warm-up", "v0"), Change("warm-up", None))
"""Not noted: brings everything up that a first change of all pays for once."""
STORY = (
    Change(FIRST_DEPLOY, "v1"),
    Change(REDEPLOY, "v2"),
    Change(SCALE_UP, "v2", REPLICAS),
    Change(ROLL, "v3", REPLICAS),
    Change(DELETE, None),
)


@dataclass(frozen=True)
class Taken:
    """How long one change took."""

    step: str
    done_s: float
    """From the call until the system said that it is done."""
    answered_s: float | None
    """From the call to the first HTTP answer of the new version, or to the first 404; None: nothing new to see."""


@dataclass(frozen=True)
class SystemRound:
    """One fresh system, warmed up, that went through the story once."""

    taken: list[Taken]
    requests: int
    """That were sent while the deployment was to serve (from its first answer until its deletion)."""
    requests_failed: int
    """Of those, how many got no 200."""


@dataclass(frozen=True)
class BareRound:
    """The same actors by nothing but Ray, in the same state of its pool of processes."""

    first_s: float
    """One actor in a warm Ray; a process may wait for it already."""
    another_s: float
    """One more."""
    eight_s: float
    """`REPLICAS` at once."""


class ResponseWatch:
    """Polls one address until it is left; sees when a change took effect, and whether requests fail meanwhile.

    Why a thread that asks every few milliseconds and nothing faster: the same for every system, it takes next to
    nothing of the processors that the measured system wants.
    """

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
        self._thread = threading.Thread(target=self._run, name="response-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(_REQUEST_TIMEOUT_S + 1.0)

    def expect(self, version: str | None) -> None:
        """Wait for a response of ``version``, or for a 404 where that is None."""
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
            if (
                expected is not None
                and not self._seen.is_set()
                and expected in ((status, None), (status, body))
            ):
                self._seen_at = time.monotonic()
                self._seen.set()
        connection.close()
