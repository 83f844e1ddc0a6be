"""Clients that send a steady stream of requests over several proxies, and what came of every one.

They stand for a load balancer in front of the proxies, and do what `deploy/ingress/haproxy.cfg` has HAProxy do: a
connection stays with its proxy until one of them ends it; a proxy that refuses connections is left out until it takes
one again. They connect anew when the proxy said ``Connection: close`` or had closed a connection before anything was
sent on it. What was sent is never sent again: whatever goes wrong from there on is a failed request.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import statistics
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Self

import aiohttp
import msgspec

REQUESTS_PER_S = 300
REQUESTS_MIN = 600
"""So many are sent in every scenario, however long a slow machine takes for them."""
CLIENTS = 24
WITHOUT_KEEP_ALIVE = 4
"""So many of the clients use each connection once."""
WINDOW_S_MIN = 3.0
SHORT_WORK_S = 0.005
"""What the model takes for most requests: they are to be in flight, and not to cost anything."""
LONG_EVERY = 20
LONG_WORK_S = 0.25
"""A GET and a POST of so many requests take this long: some are in flight whenever something is told to leave."""
_ANSWER_TIMEOUT_S = 30.0
_LOOK_AGAIN_S = 0.1


class Answer(msgspec.Struct, frozen=True, gc=False):
    """A request that was answered as it should be."""

    number: int
    """In the order in which they were sent."""
    sent_at: float
    """The loop's time."""
    over_s: float
    """From sending to the whole answer, less what the model itself was asked to take."""
    port: int
    version: str
    configuration: str
    pid: str
    host: str


class Connection:
    """A kept-alive connection to one proxy."""

    def __init__(self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.port = port
        self._reader = reader
        self._writer = writer
        self.is_retained = True
        """Until the proxy said that it closes."""

    @classmethod
    async def open(cls, port: int) -> Self:
        """Raises ConnectionRefusedError when nobody listens."""
        return cls(port, *await asyncio.open_connection("127.0.0.1", port))

    @property
    def is_usable(self) -> bool:
        """As far as is known before something is sent."""
        return self.is_retained and not self._reader.at_eof()

    async def ask(
        self, method: str, target: str, body: bytes, headers: Mapping[str, str] = MappingProxyType({})
    ) -> tuple[int, bytes]:
        """Status and body. Raises OSError or EOFError when no whole answer came."""
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        head = f"{method} {target} HTTP/1.1\r\nHost: loaded\r\n{lines}Content-Length: {len(body)}\r\n\r\n"
        self._writer.write(head.encode() + body)
        answered = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        self.is_retained = "\r\nconnection: close\r\n" not in answered
        length = int(answered.partition("\r\ncontent-length: ")[2].partition("\r\n")[0])
        return int(answered.split(maxsplit=2)[1]), await self._reader.readexactly(length)

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


class Balancer:
    """Gives connections to proxies in turn, leaving out those that are away."""

    def __init__(self, ports: Sequence[int]) -> None:
        self.ports = ports
        self.refused = 0
        """Connections that were opened to another proxy instead."""
        self._turn = itertools.cycle(ports)
        self._away: set[int] = set()

    async def connection(self) -> Connection:
        """To a proxy that takes one."""
        while True:
            port = next(self._turn)
            if port not in self._away:
                try:
                    return await Connection.open(port)
                except ConnectionRefusedError:
                    self.refused += 1
                    self._away.add(port)
            assert len(self._away) < len(self.ports), "no proxy takes connections"

    async def look_after(self) -> None:
        """For ever: take back those that answer."""
        while True:
            for port in list(self._away):
                with contextlib.suppress(ConnectionRefusedError):
                    await (await Connection.open(port)).close()
                    self._away.remove(port)
            await asyncio.sleep(_LOOK_AGAIN_S)


class SteadyLoad:
    """GET and POST (without Idempotency-Key) in turn on one route, at `REQUESTS_PER_S`."""

    def __init__(self, route: str, ports: Sequence[int]) -> None:
        self.answers: list[Answer] = []
        self.failures: list[str] = []
        self.balancer = Balancer(ports)
        self._route = route
        self._sent = 0
        self._under_way: set[int] = set()
        """Numbers of requests."""
        self._loop = asyncio.get_running_loop()
        self._begun_at = self._ended_at = self._loop.time()
        self._answered = asyncio.Event()
        self._is_over = False

    @classmethod
    @contextlib.asynccontextmanager
    async def running(cls, route: str, ports: Sequence[int]) -> AsyncIterator[Self]:
        """Under way, with a second of it behind us; every request ends before this does."""
        self = cls(route, ports)
        async with asyncio.TaskGroup() as tasks:
            caring = tasks.create_task(self.balancer.look_after())
            async with asyncio.TaskGroup() as clients:
                try:
                    for number in range(CLIENTS):
                        clients.create_task(self._client(number))
                    await self.more(REQUESTS_PER_S)
                    yield self
                    await asyncio.sleep(max(0.0, self._begun_at + WINDOW_S_MIN - self.now()))
                    await self.until(lambda: len(self.answers) + len(self.failures) >= REQUESTS_MIN)
                finally:
                    self._is_over = True
            caring.cancel()
        self._ended_at = self._loop.time()

    def now(self) -> float:
        """To compare with `Answer.sent_at`."""
        return self._loop.time()

    def since(self, moment: float) -> list[Answer]:
        """To what was sent from then on."""
        return [answer for answer in self.answers if answer.sent_at >= moment]

    async def until(self, is_so: Callable[[], bool], *, timeout_s: float = 60.0) -> None:
        """Look after every answer."""
        async with asyncio.timeout(timeout_s):
            while not is_so():
                self._answered.clear()
                await self._answered.wait()

    async def more(self, count: int) -> list[Answer]:
        """The answers to the next requests, once all of these have ended: what is slow is not left out."""
        numbers = range(self._sent, self._sent + count)
        await self.until(
            lambda: self._sent >= numbers.stop and all(number not in numbers for number in self._under_way)
        )
        return [answer for answer in self.answers if answer.number in numbers]

    def result(self, scenario: str) -> str:
        """One line of figures. Asserts that none failed."""
        taken_s = self._ended_at - self._begun_at
        assert not self.failures, f"{scenario}: {len(self.failures)} failed: {Counter(self.failures)}"
        count = len(self.answers)
        assert {answer.port for answer in self.answers} == set(self.balancer.ports)
        centiles = statistics.quantiles((answer.over_s * 1000 for answer in self.answers), n=100)
        line = (
            f"{scenario}: 0 of {count} requests failed in {taken_s:.1f} s ({count / taken_s:.0f}/s); "
            f"p50 {centiles[49]:.0f} ms, p99 {centiles[98]:.0f} ms over the model's own time"
        )
        print(line)
        return line

    async def _client(self, number: int) -> None:
        connection: Connection | None = None
        chance = random.Random(number)
        due = self._begun_at + number / REQUESTS_PER_S
        try:
            while not self._is_over:
                # Varied, lest all clients stay in step with each other and with the system.
                await asyncio.sleep(max(0.0, due + chance.uniform(0, 0.02) - self.now()))
                if connection is None or not connection.is_usable or number < WITHOUT_KEEP_ALIVE:
                    if connection is not None:
                        await connection.close()
                    connection = await self.balancer.connection()
                if not await self._query(connection):
                    await connection.close()
                    connection = None
                due += CLIENTS / REQUESTS_PER_S
        finally:
            if connection is not None:
                await connection.close()

    async def _query(self, connection: Connection) -> bool:
        """Whether the connection may be used again."""
        number, self._sent = self._sent, self._sent + 1
        method = ("GET", "POST")[number % 2]
        body = b"" if method == "GET" else f"request {number}".encode()
        work_s = LONG_WORK_S if number % LONG_EVERY in (7, 8) else SHORT_WORK_S
        sent_at = self.now()
        self._under_way.add(number)
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                status, answer = await connection.ask(method, f"{self._route}?work_s={work_s}", body)
            who, _, echo = answer.partition(b"\n\n")
            if status != 200 or echo != body:
                self.failures.append(f"{method} on port {connection.port}: {status} {answer[:300]!r}")
            else:
                over_s = self.now() - sent_at - work_s
                whose = who.decode().split("\n")
                self.answers.append(Answer(number, sent_at, over_s, connection.port, *whose))
            return True
        except (OSError, EOFError, TimeoutError) as error:
            self.failures.append(f"{method} on port {connection.port}: {error!r}")
            return False
        finally:
            self._under_way.remove(number)
            self._answered.set()


@contextlib.asynccontextmanager
async def counted_requests(url: str, answers: Counter[str], every_s: float) -> AsyncIterator[None]:
    """Two clients that ask ``url`` again and again; ``answers`` counts how that ended, ``200`` being good."""

    async def ask(session: aiohttp.ClientSession) -> None:
        while True:
            try:
                async with session.get(url) as answer:
                    text = await answer.text()
                    status = str(answer.status)
                    answers[status if status == "200" else f"{status} {text[:120]}"] += 1
            except (aiohttp.ClientError, TimeoutError) as error:
                answers[f"{type(error).__name__}: {error}"] += 1
            await asyncio.sleep(every_s)

    timeout = aiohttp.ClientTimeout(total=_ANSWER_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session, asyncio.TaskGroup() as tasks:
        asking = [tasks.create_task(ask(session)) for _ in range(2)]
        try:
            yield
        finally:
            for task in asking:
                task.cancel()


def error_code(body: bytes) -> str:
    """The code of an error that a proxy answered; the beginning of ``body`` where it is something else."""
    try:
        return str(msgspec.json.decode(body)["error"]["code"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return repr(body[:100])
