"""A fast, steady load of every kind of request that matters when replicas die, and what came of each one.

Why beside `steady_load`: there everything has to succeed. Here a request that may not run twice may fail, but only
with the one answer that says so, only when a replica was killed under it, and it is counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import statistics
from collections import Counter, deque
from collections.abc import AsyncIterator, Sequence
from typing import Self

import msgspec

from tests.support.loads.steady_load import Balancer, Connection

REQUESTS_PER_S = 600
CLIENTS = 48
SHORT_WORK_S = 0.005
LONG_EVERY = 20
LONG_WORK_S = 0.25
KINDS = ("GET", "POST", "POST with a key", "GET", "POST")
"""In turn; a POST without an Idempotency-Key may not be sent twice."""
FRAGILE = "POST"
_ANSWER_TIMEOUT_S = 20.0
_RECENT = 400
_PAUSE_AFTER_FAILURE_S = 0.05


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A request that was not answered 200 with what it had sent."""

    kind: str
    ended_at: float
    what: str
    answer: str = ""
    """The beginning of what came instead."""
    client: int = 0
    """Whose it was; each has one request at a time."""

    @property
    def is_allowed(self) -> bool:
        """It had started on a replica that died, may not run twice, and says so."""
        return self.kind == FRAGILE and self.what == "502 replica_died"


class ChaosLoad:
    """Clients over several proxies, each with one request at a time."""

    def __init__(self, route: str, ports: Sequence[int], requests_per_s: float) -> None:
        self.failures: list[Failure] = []
        self.served: Counter[str] = Counter()
        """By kind."""
        self.latencies_s: list[float] = []
        """Less what the model itself was asked to take."""
        self.balancer = Balancer(ports)
        self.pids: deque[str] = deque(maxlen=_RECENT)
        """Of the processes that gave the last answers."""
        self.fragile_under_way = 0
        """Requests that were sent, have not been answered and may not run twice."""
        self._route = route
        self._requests_per_s = requests_per_s
        self._numbers = itertools.count()
        self._loop = asyncio.get_running_loop()
        self._begun_at = self._loop.time()
        self.taken_s = 0.0
        self._is_over = False

    @classmethod
    @contextlib.asynccontextmanager
    async def running(
        cls, route: str, ports: Sequence[int], *, requests_per_s: float = REQUESTS_PER_S
    ) -> AsyncIterator[Self]:
        """Under way; every request ends before this does."""
        self = cls(route, ports, requests_per_s)
        async with asyncio.TaskGroup() as tasks:
            caring = tasks.create_task(self.balancer.look_after())
            async with asyncio.TaskGroup() as clients:
                try:
                    for number in range(CLIENTS):
                        clients.create_task(self._client(number))
                    yield self
                finally:
                    self._is_over = True
                    self.taken_s = self._loop.time() - self._begun_at
            caring.cancel()

    @property
    def forbidden(self) -> list[Failure]:
        return [failure for failure in self.failures if not failure.is_allowed]

    @property
    def rate(self) -> float:
        """Requests that were answered in a second."""
        return (sum(self.served.values()) + len(self.failures)) / self.taken_s

    def line(self) -> str:
        """What came of it, in one line."""
        served = sum(self.served.values())
        centiles = statistics.quantiles((latency * 1000 for latency in self.latencies_s), n=100)
        lost = sum(failure.is_allowed for failure in self.failures)
        return (
            f"{served} requests served in {self.taken_s:.1f} s ({self.rate:.0f}/s), {len(self.forbidden)} failed, "
            f"{lost} that may not run twice lost with their replica; "
            f"p50 {centiles[49]:.0f} ms, p99 {centiles[98]:.0f} ms over the model's own time"
        )

    def now(self) -> float:
        return self._loop.time()

    async def _client(self, number: int) -> None:
        connection: Connection | None = None
        chance = random.Random(number)
        due = self._begun_at + number / self._requests_per_s
        try:
            while not self._is_over:
                # Varied, lest all clients stay in step with each other and with the system.
                await asyncio.sleep(max(0.0, due + chance.uniform(0, 0.02) - self.now()))
                if connection is None or not connection.is_usable:
                    if connection is not None:
                        await connection.close()
                    connection = await self.balancer.connection()
                if not await self._query(connection, number):
                    await connection.close()
                    connection = None
                    await asyncio.sleep(_PAUSE_AFTER_FAILURE_S)
                due += CLIENTS / self._requests_per_s
        finally:
            if connection is not None:
                await connection.close()

    async def _query(self, connection: Connection, client: int) -> bool:
        """Whether the connection may be used again."""
        number = next(self._numbers)
        kind = KINDS[number % len(KINDS)]
        body = b"" if kind == "GET" else f"request {number}".encode()
        work_s = LONG_WORK_S if number % LONG_EVERY in (6, 8) else SHORT_WORK_S
        key = {"Idempotency-Key": str(number)} if kind == "POST with a key" else {}
        sent_at = self.now()
        self.fragile_under_way += kind == FRAGILE
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                status, answer = await connection.ask(
                    kind.partition(" ")[0], f"{self._route}?work_s={work_s}", body, key
                )
            who, _, echo = answer.partition(b"\n\n")
            if status == 200 and echo == body:
                self.served[kind] += 1
                self.latencies_s.append(self.now() - sent_at - work_s)
                self.pids.append(who.decode().split("\n")[2])
            else:
                told = answer[:600].decode(errors="replace")
                self._fail(client, kind, f"{status} {_error_code(answer)}", told)
            return True
        except (OSError, EOFError, TimeoutError) as error:
            self._fail(client, kind, repr(error))
            return False
        finally:
            self.fragile_under_way -= kind == FRAGILE

    def _fail(self, client: int, kind: str, what: str, answer: str = "") -> None:
        self.failures.append(Failure(kind=kind, ended_at=self.now(), what=what, answer=answer, client=client))


def _error_code(answer: bytes) -> str:
    try:
        return str(msgspec.json.decode(answer)["error"]["code"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return repr(answer[:100])
