"""What HTTP/1.1 allows and forbids, told by bytes on a raw socket to a whole proxy with a replica behind it.

The table is `http_conformance_cases`. Every case also proves that nothing was smuggled: the good request that follows
in the same write is either answered as itself or not begun at all, and the replica saw nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

import pytest
import pytest_asyncio

from serve_common.config.backend import METHODS
from serve_common.names import BackendTag
from serve_common.protocol.subjects import HTTP_KEY
from tests.integration.http_conformance_cases import CASES, OK, Case, chunked, get, post
from tests.support.servers.nats_server import NatsServer
from tests.support.stacks.fake_replica import FakeReplica
from tests.support.stacks.proxy_stack import MIB, R0, Stack, running_stack
from tests.support.stacks.raw_peers import raw_connection
from tests.support.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")

HEADER_TIMEOUT_S = 0.5
KEEP_ALIVE_TIMEOUT_S = 1.0
_ANSWER_TIMEOUT_S = 30.0
_numbers = itertools.count()


class Answer(NamedTuple):
    version: bytes
    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes

    def __getitem__(self, name):  # type: ignore[override]
        """A header's value; None without it."""
        return next((value for key, value in self.headers if key == name), None)

    @property
    def says_close(self) -> bool:
        """In HTTP/1.0 what says nothing says that."""
        return self[b"connection"] == (b"close" if self.version == b"HTTP/1.1" else None)


class Client:
    """A connection on which bytes are sent, and read as strictly as any client may."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def answer(self, method: str = "GET") -> Answer:
        """The next final answer, which must come."""
        answer = await self.answer_or_end(method)
        assert answer is not None, "closed without an answer"
        return answer

    async def until_closed(self) -> list[Answer]:
        """All answers, up to the end of the connection."""
        answers = []
        while (answer := await self.answer_or_end()) is not None:
            answers.append(answer)
        return answers

    async def answer_or_end(self, method: str = "GET") -> Answer | None:
        """None when the connection ends in order before the answer's first byte."""
        while True:
            try:
                head = await self.reader.readuntil(b"\r\n\r\n")
            except ConnectionError:  # one end has noticed sooner than the other
                return None
            except asyncio.IncompleteReadError as error:
                if error.partial:
                    raise
                return None
            line, *lines = head[:-4].split(b"\r\n")
            version, status, _ = line.split(b" ", 2)
            assert version in (b"HTTP/1.1", b"HTTP/1.0"), line
            fields = [(name.lower(), value.strip()) for name, _, value in (x.partition(b":") for x in lines)]
            if status[:1] != b"1":
                return Answer(version, int(status), fields, await self._body(int(status), fields, method))

    async def _body(self, status: int, fields: list[tuple[bytes, bytes]], method: str) -> bytes:
        lengths = [value for name, value in fields if name == b"content-length"]
        codings = [value for name, value in fields if name == b"transfer-encoding"]
        assert len(lengths) + len(codings) <= 1, fields
        if method == "HEAD" or status in (204, 304):
            assert not codings or status != 204
            return b""
        if lengths:
            return await self.reader.readexactly(int(lengths[0]))
        if not codings:
            return await self.reader.read()
        assert codings == [b"chunked"]
        pieces = []
        while size := int(await self.reader.readuntil(b"\r\n"), 16):
            pieces.append((await self.reader.readexactly(size + 2))[:-2])
        assert await self.reader.readexactly(2) == b"\r\n"
        return b"".join(pieces)

    async def is_closed(self) -> bool:
        """True when nothing more comes and the connection ends."""
        try:
            return await self.reader.read(1) == b""
        except ConnectionError:
            return True


class World:
    """The proxy and its one replica."""

    def __init__(self, stack: Stack, replica: FakeReplica) -> None:
        self.stack = stack
        self.replica = replica

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        async with (
            raw_connection(self.stack.url, limit=MIB) as (reader, writer),
            asyncio.timeout(_ANSWER_TIMEOUT_S),
        ):
            yield Client(reader, writer)

    async def ask(self, sent: bytes) -> Answer:
        async with self.client() as client:
            client.writer.write(sent)
            return await client.answer()

    async def seen_since(self, count: int) -> list[str]:
        """What reached the replica; after a request of another connection has come back from there."""
        assert (await self.ask(get(target=b"/echo/fence"))).status == 200
        seen = [f"{head.method} {head.path}" for head in self.replica.seen[count:]]
        seen.remove("GET /echo/fence")
        return seen


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(shared_server: NatsServer) -> AsyncIterator[World]:
    async with running_stack(shared_server) as stack:
        (replica,) = await stack.serve(R0)
        await stack.applied(await stack.put_endpoint(methods=METHODS))
        yield World(stack, replica)
        router = stack.proxy._ingress.routes.routers[BackendTag("default/echo")]
        # every slot is given back
        await eventually(lambda: not router.in_flight)


def is_part_of(part: Sequence[str], whole: Sequence[str]) -> bool:
    """In the same order."""
    rest = iter(whole)
    return all(item in rest for item in part)


@pytest.mark.parametrize("is_known", [False, True], ids=["first", "known head"])
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
async def test_raw_requests_are_answered_and_nothing_is_smuggled(
    world: World, case: Case, *, is_known: bool
) -> None:
    """``is_known``: after requests of which the proxy remembers the head, mostly that of the case."""
    replica = world.replica
    target = f"/echo/next/{next(_numbers)}"
    method = case.sent.partition(b" ")[0].decode("latin-1")
    async with world.client() as client:
        for _ in range(2 if is_known else 0):
            client.writer.write(post(b"Content-Length: 2\r\n", b"hi") if method == "POST" else get())
            assert (await client.answer()).status == 200
        count, bodies = len(replica.seen), len(replica.bodies)
        is_followed = case.is_retained is not False or any(allowed != OK for allowed in case.answers)
        client.writer.write(case.sent + (get(target=target.encode()) if is_followed else b""))
        answers = [await client.answer(method) for _ in case.answers]
        statuses = [answer.status for answer in answers]
        assert all(status in allowed for status, allowed in zip(statuses, case.answers, strict=True)), answers
        following = await client.answer_or_end()
        if case.is_retained is not None:
            assert (following is not None) == case.is_retained, following
        if following is None:
            assert answers[-1].says_close, "it was not said that the connection ends"
        else:
            assert following.status == 200, following
    seen = [
        request  # without what a case that failed before may have left behind
        for request in await world.seen_since(count)
        if not request.startswith("GET /echo/next/") or request == f"GET {target}"
    ]
    if following is not None:
        assert seen.pop() == f"GET {target}"
    if all(allowed == OK for allowed in case.answers):
        assert seen == list(case.reached)
    else:
        assert is_part_of(seen, case.reached), seen
    if case.body is not None and statuses[0] == 200:
        assert replica.bodies[bodies] == case.body


async def test_there_are_as_many_cases_as_were_promised() -> None:
    names = [case.name for case in CASES]
    assert len(names) == len(set(names))
    assert len(names) >= 60


async def test_answers_to_pipelined_requests_come_in_order(world: World) -> None:
    bodies = [b"body %d" % number for number in range(20)]
    async with world.client() as client:
        client.writer.write(b"".join(post(b"Content-Length: %d\r\n" % len(b), b) for b in bodies))
        answers = [await client.answer() for _ in bodies]
    assert [answer.body for answer in answers] == bodies


async def test_a_request_may_come_byte_by_byte(world: World) -> None:
    async with world.client() as client:
        for byte in chunked(b"5;e\r\nhello\r\n0\r\nX: 1\r\n\r\n"):
            client.writer.write(bytes([byte]))
            await asyncio.sleep(0)
            await client.writer.drain()
        answer = await client.answer()
    assert (answer.status, answer.body) == (200, b"hello")


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        (b"NONSENSE\r\n\r\n", 400, "bad_request"),
        (get(b"X A: 1\r\n"), 400, "bad_request"),
        (get(b"X-A: " + b"a" * 100_000 + b"\r\n"), 431, "headers_too_large"),
        (b"GET /echo/case HTTP/1.1\r\nHost: a/b\r\n\r\n", 400, "bad_request"),
        (chunked(b"1\r\nx\r\n0\r\n\r\n", b"gzip, chunked"), 501, "unknown_coding"),
    ],
    ids=["no HTTP", "no header", "a huge header", "no Host", "no known coding"],
)
async def test_what_is_refused_for_its_form_is_told_so_like_any_other_error(
    world: World, sent: bytes, status: int, code: str
) -> None:
    async with world.client() as client:
        client.writer.write(sent)
        answer = await client.answer()
        assert await client.is_closed()
    assert (answer.version, answer.status) == (b"HTTP/1.1", status)
    assert (answer[b"server"], answer[b"connection"]) == (b"muster", b"close")
    assert answer[b"content-type"] == b"application/problem+json"
    problem = json.loads(answer.body)
    assert (problem["status"], problem["code"], problem["error"]["code"]) == (status, code, code)


async def test_what_follows_a_refused_upgrade_later_is_not_waited_for(world: World) -> None:
    count = len(world.replica.seen)
    async with world.client() as client:
        client.writer.write(post(b"Connection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 4\r\n", b"ha"))
        await asyncio.sleep(0.05)
        client.writer.write(b"lf" + get())
        answer = await client.answer()
        assert await client.is_closed()
    assert (answer.status, answer.body, answer.says_close) == (200, b"half", True)
    assert await world.seen_since(count) == ["POST /echo/case"]


async def test_a_connection_that_says_keep_alive_in_http_1_0_is_told_so(world: World) -> None:
    answer = await world.ask(get(b"Connection: keep-alive\r\n", version=b"HTTP/1.0"))
    assert answer[b"connection"] == b"keep-alive"


async def test_headers_of_one_connection_end_at_the_proxy(world: World) -> None:
    own = [
        b"TE: trailers",
        b"Trailer: x",
        b"Keep-Alive: 5",
        b"Proxy-Connection: close",
        b"Upgrade: h2c",
        b"X-One: 1",
    ]
    lines = b"".join(line + b"\r\n" for line in [*own, b"Connection: upgrade, x-one", b"X-Two: 2"])
    assert (await world.ask(get(lines))).status == 200
    names = {name for name, _ in world.replica.seen[-1].headers}
    assert not names & {line.partition(b":")[0].lower() for line in own} | names & {b"connection"}
    assert b"x-two" in names


async def test_the_host_of_an_absolute_target_counts_instead_of_the_header(world: World) -> None:
    await world.ask(get(b"X-A: 1\r\n", target=b"http://other.example:81/echo/case"))
    headers = world.replica.seen[-1].headers
    assert [value for name, value in headers if name == b"host"] == [b"other.example:81"]
    assert (b"x-a", b"1") in [(name, bytes(value)) for name, value in headers]


async def test_repeated_headers_are_kept_in_order(world: World) -> None:
    await world.ask(get(b"Cookie: a=1\r\nX-Many: 1\r\nX-Many: 2\r\nCookie: b=2\r\n"))
    headers = world.replica.seen[-1].headers
    assert [value for name, value in headers if name == b"x-many"] == [b"1", b"2"]
    assert [value for name, value in headers if name == b"cookie"] == [b"a=1", b"b=2"]


@pytest.mark.parametrize(
    "sent",
    [b"", b"G", b"GET /echo/ca", get()[:-2], b"\r\n", post(b"Content-Length: 5\r\n", b"he")[:-4]],
    ids=["nothing", "a letter", "half a line", "half a head", "an empty line", "half a head of a body"],
)
async def test_a_client_that_leaves_in_the_head_was_never_there(world: World, sent: bytes) -> None:
    count = len(world.replica.seen)
    async with world.client() as client:
        client.writer.write(sent)
        client.writer.write_eof()
        await client.reader.read()
    assert await world.seen_since(count) == []


@pytest.mark.parametrize(
    "sent",
    [post(b"Content-Length: 5\r\n", b"he"), chunked(b"5\r\nhe"), chunked(b"5\r\nhello\r\n")],
    ids=["of known length", "in a chunk", "before the last chunk"],
)
async def test_a_client_that_leaves_in_the_body_was_no_whole_request(world: World, sent: bytes) -> None:
    count = len(world.replica.bodies)
    async with world.client() as client:
        client.writer.write(sent)
        await client.writer.drain()
    await world.seen_since(len(world.replica.seen))
    assert world.replica.bodies[count:] == [b""], "only the request that was sent afterwards is whole"
    await world.replica.wait(lambda: not world.replica.held)


@contextlib.asynccontextmanager
async def impatient(world: World, **options: float) -> AsyncIterator[None]:
    """For what is to be cut off, and no longer: other requests would be too on a machine that is busy."""
    await world.stack.applied(await world.stack.put_http(**options))
    try:
        yield
    finally:
        await world.stack.applied(await world.stack.put(HTTP_KEY, None))


async def test_a_head_that_takes_too_long_is_cut_off(world: World) -> None:
    loop = asyncio.get_running_loop()
    count = len(world.replica.seen)
    async with (
        impatient(world, header_timeout_s=HEADER_TIMEOUT_S),
        world.client() as client,
        asyncio.TaskGroup() as tasks,
    ):
        began = loop.time()
        reading = tasks.create_task(client.answer_or_end())
        for byte in get(b"X-Slow: " + b"x" * 1000 + b"\r\n"):
            client.writer.write(bytes([byte]))
            await asyncio.sleep(0.02)
            if reading.done():
                break
        answer = await reading
        taken_s = loop.time() - began
    assert answer is None or answer.status == 408
    assert taken_s >= HEADER_TIMEOUT_S * 0.9, "as long as it sends it would else be waited for"
    assert await world.seen_since(count) == []


async def test_a_connection_that_is_idle_is_closed(world: World) -> None:
    loop = asyncio.get_running_loop()
    async with impatient(world, keep_alive_timeout_s=KEEP_ALIVE_TIMEOUT_S), world.client() as client:
        began = loop.time()
        client.writer.write(get())
        await client.answer()
        assert await client.is_closed()
        idle_s = loop.time() - began
    assert idle_s >= KEEP_ALIVE_TIMEOUT_S * 0.9


@pytest.mark.parametrize("more", [0, 40])
@pytest.mark.parametrize("parts", [1, 3, 1000], ids=["at once", "in three writes", "byte by byte"])
@pytest.mark.parametrize(
    "bad", [b"\0\0", b"GET / HTTP/1.1\r\nHost h\r\n\r\n", b"POST /echo HTTP/9.9\r\n\r\n"]
)
async def test_requests_before_one_that_is_not_understood_are_answered_in_order(
    world: World, bad: bytes, parts: int, more: int
) -> None:
    count, bodies = len(world.replica.seen), len(world.replica.bodies)
    good = [
        get(target=b"/echo/first"),
        post(b"Content-Length: 9\r\n", b"a\r\n\r\nb\r\n\r"),
        chunked(b"4\r\n\r\n\r\n\r\n0\r\n\r\n"),
        *(post(b"Content-Length: 3\r\n", b"%03d" % number) for number in range(more)),
    ]
    sent = b"".join(good)
    size = -(-len(sent) // parts)
    async with world.client() as client:
        for at in range(0, len(sent) if parts > 1 else 0, size):
            client.writer.write(sent[at : at + size])
            await client.writer.drain()
            await asyncio.sleep(0)
        client.writer.write(bad if parts > 1 else sent + bad + get(target=b"/echo/next"))
        answers = await client.until_closed()
    assert [answer.status for answer in answers] == [200] * len(good) + [400]
    assert [answer.body for answer in answers[:-1]] == world.replica.bodies[bodies : bodies + len(good)]
    assert await world.seen_since(count) == ["GET /echo/first", *["POST /echo/case"] * (len(good) - 1)]


@pytest.mark.parametrize("at", range(1, 6))
async def test_a_request_whose_end_comes_apart_is_answered_before_one_that_is_not_understood(
    world: World, at: int
) -> None:
    sent = post(b"Content-Length: 2\r\n", b"hi")
    async with world.client() as client:
        client.writer.write(get() + sent[:-at])
        await client.answer()  # so that the rest comes by itself
        client.writer.write(sent[-at:] + b"\0")
        answers = [await client.answer(), await client.answer()]
    assert (answers[0].status, answers[0].body, answers[1].status) == (200, b"hi", 400)


async def test_a_body_that_came_in_parts_takes_no_request_behind_it_along(world: World) -> None:
    sent = chunked(b"2\r\nhi\r\n0\r\n\r\n")
    async with world.client() as client:
        client.writer.write(get() + sent[:-2])
        await client.answer()  # so that the rest comes by itself
        behind = post(b"Content-Length: 2\r\n", b"ho") + get(target=b"/echo/last")
        client.writer.write(sent[-2:] + behind + b"\0")
        answers = await client.until_closed()
    assert [answer.status for answer in answers] == [200, 200, 200, 400]
    assert [answer.body for answer in answers[:-1]] == [b"hi", b"ho", b""]


async def test_what_looks_like_the_end_of_many_heads_is_a_body_all_the_same(world: World) -> None:
    body = b"\r\n\r\n" * 50_000
    async with world.client() as client:
        client.writer.write(post(b"Content-Length: %d\r\n" % len(body), body) + get())
        answers = [await client.answer(), await client.answer()]
    assert [(answer.status, answer.body) for answer in answers] == [(200, body), (200, b"")]


async def test_an_answer_that_breaks_off_cannot_be_taken_for_a_whole_one(world: World) -> None:
    async with world.client() as client:
        client.writer.write(get(target=b"/echo/break") + get())
        with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
            await client.answer()
        assert await client.is_closed()
