"""The same applications under Muster and under uvicorn: whatever a client can see must be the same.

What may differ is what servers say for themselves (`_SERVERS_OWN`), and whether an answer of unknown length is sent in
chunks. The WebSocket client is the `websockets` library, which checks the protocol by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any, NamedTuple

import aiohttp
import pytest
import pytest_asyncio
import websockets.asyncio.client
from websockets.exceptions import ConnectionClosed, InvalidStatus
from yarl import URL

from tests.support.paths import APPS
from tests.support.stacks.bare_stack import BareStack

pytestmark = [pytest.mark.timeout(240), pytest.mark.asyncio(loop_scope="module")]

APP_DIR = APPS / "asgi_app"
APPS = {"/star": "features:starlette_app", "/fast/api": "features:fastapi_app"}
HOST = "example.test:81"
MIB = 1024 * 1024
_SERVERS_OWN = {"date", "server", "connection", "keep-alive", "x-request-id", "transfer-encoding"}
_CHANCE, _CHANCE_BYTES = re.compile("[0-9a-f]{26}"), re.compile(b"(?<=--)[0-9a-f]{26}")
"""What Starlette draws anew to separate several ranges."""
_MULTIPART = (
    b'--cut\r\nContent-Disposition: form-data; name="note"\r\n\r\ngr\xc3\xbcn\r\n'
    b'--cut\r\nContent-Disposition: form-data; name="file"; filename="a b.bin"\r\n'
    b"Content-Type: application/x-b\r\n\r\n" + bytes(range(256)) * 400 + b"\r\n--cut--\r\n"
)


class Ask(NamedTuple):
    path: str
    method: str = "GET"
    headers: Mapping[str, str] = {}
    body: bytes | None = None
    is_chunked: bool = False

    def __str__(self) -> str:
        extra = " ".join(f"{name}: {value}" for name, value in self.headers.items())
        return f"{self.method} {self.path} {extra}{' chunked' if self.is_chunked else ''}"[:100].strip()


class Seen(NamedTuple):
    """What a client sees of an answer."""

    status: int
    reason: str
    headers: list[tuple[str, str]]
    content_length: str | None
    body: bytes


def post(path: str, body: bytes, content_type: str = "application/octet-stream", **options: Any) -> Ask:
    return Ask(path, options.pop("method", "POST"), {"Content-Type": content_type}, body, **options)


STAR: list[Ask] = [
    Ask("/"),
    Ask("/seen?a=1&a=2&b=%20+%C3%BC&c"),
    Ask("/seen", headers={"X-A": "1", "Accept": "text/html", "Cookie": "a=b; c=d", "User-Agent": "me"}),
    Ask("/seen/a%2Fb/%C3%BC/c%20d//e/../f"),
    *(Ask("/seen", method) for method in ("HEAD", "DELETE", "OPTIONS")),
    *(post("/seen", b"hi", "text/plain", method=method) for method in ("POST", "PUT", "PATCH", "DELETE")),
    post("/seen", b"hello", is_chunked=True),
    Ask("/params/007/a/b%2Fc"),
    Ask("/params/x/a"),
    Ask("/query?a=1&a=2&&b=&=c&d=%zz&e=%E2%82%AC"),
    Ask("/query", "POST"),
    post("/form", b"a=1&b=%20+&a=2&c=%C3%BC", "application/x-www-form-urlencoded"),
    post("/form", _MULTIPART, "multipart/form-data; boundary=cut"),
    post("/form", b"--cut\r\nbroken", "multipart/form-data; boundary=cut"),
    Ask("/cookies", headers={"Cookie": 'one=1; two="zw ei"; three'}),
    Ask("/repeated"),
    *(
        Ask(f"/status/{code}")
        for code in (200, 201, 202, 204, 206, 301, 304, 400, 404, 410, 429, 500, 503, 599)
    ),
    post("/status/204", b"hi"),
    Ask("/redirect"),
    Ask("/urls?x=1"),
    Ask("/slash"),
    Ask("/slash/"),
    Ask("/stream"),
    Ask("/stream?count=0"),
    Ask("/stream", "HEAD"),
    Ask("/big-stream"),
    Ask("/events"),
    Ask("/file"),
    Ask("/file", "HEAD"),
    *(
        Ask("/file", headers={"Range": value})
        for value in (
            "bytes=0-9",
            "bytes=-7",
            "bytes=20990-",
            "bytes=0-6,14-20",
            "bytes=9999999-",
            "pages=1",
            "bytes=5-2",
        )
    ),
    Ask("/file", headers={"Range": "bytes=0-6", "If-Range": '"fixed"'}),
    Ask("/file", headers={"Range": "bytes=0-6", "If-Range": '"other"'}),
    Ask("/static/file.txt"),
    Ask("/static/file.txt", headers={"If-Modified-Since": "Wed, 15 Nov 2023 00:00:00 GMT"}),
    Ask("/static/file.txt", headers={"If-None-Match": '"nothing"'}),
    Ask("/static/none.txt"),
    Ask("/static/../features.py"),
    Ask("/static/%2e%2e/features.py"),
    post("/upload", b""),
    post("/upload", b"x" * (3 * MIB)),
    post("/upload", os.urandom(3 * MIB), is_chunked=True),
    post("/unread", b"x" * 1000),
    post("/unread", b"x" * (2 * MIB)),
    Ask("/background?note=written"),
    Ask("/raises"),
    Ask("/refuses"),
    Ask("/handled"),
    Ask("/state"),
    Ask("/disconnected"),
    post("/disconnected", b"body"),
    Ask("/none"),
    Ask("/page"),
    Ask("/page", headers={"Accept-Encoding": "gzip"}),
    Ask("/page", "HEAD", {"Accept-Encoding": "gzip"}),
    Ask("/big-stream", headers={"Accept-Encoding": "gzip, br"}),
    Ask("/raw"),
    Ask("/raw/deeper"),
    Ask("/sub/inner/x%20y?z"),
    Ask("/sub/none"),
    Ask("/seen", headers={"Origin": "https://good.test"}),
    Ask("/seen", headers={"Origin": "https://bad.test"}),
    Ask(
        "/seen",
        "OPTIONS",
        {
            "Origin": "https://good.test",
            "Access-Control-Request-Method": "PUT",
            "Access-Control-Request-Headers": "X-A",
        },
    ),
    Ask("/seen", "OPTIONS", {"Origin": "https://bad.test", "Access-Control-Request-Method": "PUT"}),
    Ask("/only-there", headers={"Host": "other.test"}),
    Ask("/only-there"),
    Ask("/ws/echo"),
]
FAST: list[Ask] = [
    Ask("/items/5?q=abc&many=1&many=2"),
    Ask("/items/5?q=toolong&many=x"),
    Ask("/items/x"),
    Ask("/items/5", headers={"X-Token": "good"}),
    Ask("/items/5", headers={"X-Token": "bad"}),
    post("/items/", b'{"name": "lamp", "price": 2.5, "secret": 1}', "application/json"),
    post("/items/", b'{"name": "l", "price": 0}', "application/json"),
    post("/items/", b"{broken", "application/json"),
    post("/items/", b"", "application/json"),
    post("/items", b'{"name": "lamp", "price": 2.5}', "application/json"),
    Ask("/items/5", "DELETE"),
    Ask("/items/5", "PUT"),
    post("/upload", _MULTIPART, "multipart/form-data; boundary=cut"),
    post("/upload", b"", "multipart/form-data; boundary=cut"),
    Ask("/cookie", headers={"Cookie": "one=1"}),
    Ask("/pool"),
    Ask("/unlucky"),
    Ask("/raises"),
    Ask("/openapi.json"),
    Ask("/docs"),
    Ask("/none"),
]
CASES = [("/star", ask) for ask in STAR] + [("/fast/api", ask) for ask in FAST]


class Uvicorn:
    """The reference."""

    def __init__(self, app: str, root_path: str) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{listener.getsockname()[1]}"
        command = [
            *(sys.executable, "-m", "uvicorn", app, "--fd", str(listener.fileno()), "--root-path", root_path),
            # Its own five seconds may end just when a connection is used again.
            *("--timeout-keep-alive", "120"),
            *("--app-dir", str(APP_DIR), "--log-level", "critical", "--ws", "websockets-sansio"),
        ]
        environment = {**os.environ, "PYTHONHASHSEED": "0"}  # as in the replica: some answers list a set
        self._process = subprocess.Popen(command, pass_fds=[listener.fileno()], env=environment)
        listener.close()

    def end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Servers(NamedTuple):
    muster: str
    uvicorn: dict[str, str]
    session: aiohttp.ClientSession

    def addresses(self, route: str, path: str) -> list[str]:
        """Of both, Muster's first: its route is uvicorn's root path, which clients of uvicorn do not send."""
        return [f"{self.muster}{route}{path}", f"{self.uvicorn[route]}{path}"]


@contextlib.contextmanager
def running_uvicorns() -> Iterator[dict[str, str]]:
    servers = {route: Uvicorn(app, route) for route, app in APPS.items()}
    try:
        yield {route: server.address for route, server in servers.items()}
    finally:
        for server in servers.values():
            server.end()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def servers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Servers]:
    with running_uvicorns() as uvicorns:
        async with BareStack.running(tmp_path_factory.mktemp("asgi")) as stack:
            tags = {route: f"default/app{number}" for number, route in enumerate(APPS)}
            async with asyncio.TaskGroup() as group:  # if one does not start, none is left behind
                group.create_task(stack.add_proxies())
                for route, app in APPS.items():
                    group.create_task(stack.add_replica(f"{tags[route]}#0", app, app_dir=str(APP_DIR)))
            for route, tag in tags.items():
                await stack.put_endpoint(tag, route)
                await stack.put_backend(tag, [f"{tag}#0"])
            address = stack.proxies[0].url.removeprefix("http://")
            async with aiohttp.ClientSession(
                auto_decompress=False,
                skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent", "Content-Type"),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=30),
            ) as session:
                await until_it_answers(session, uvicorns.values())
                yield Servers(address, uvicorns, session)


async def until_it_answers(session: aiohttp.ClientSession, addresses: Any) -> None:
    give_up_at = time.monotonic() + 90
    for address in addresses:
        while True:
            try:
                async with session.get(f"http://{address}/pool"):
                    break
            except aiohttp.ClientError:
                assert time.monotonic() < give_up_at
                await asyncio.sleep(0.05)


async def seen(session: aiohttp.ClientSession, url: str, ask: Ask) -> Seen:
    async def chunks() -> AsyncIterator[bytes]:
        body = ask.body or b""
        for at in range(0, len(body), 70_001):
            yield body[at : at + 70_001]

    data = chunks() if ask.is_chunked else None if ask.body is None else io.BytesIO(ask.body)
    headers = {"Host": HOST, **ask.headers}
    target = URL(f"http://{url}", encoded=True)
    async with session.request(
        ask.method, target, headers=headers, data=data, allow_redirects=False
    ) as answer:
        fields = [(name.lower(), value) for name, value in answer.headers.items()]
        return Seen(
            answer.status,
            answer.reason or "",
            sorted(
                (
                    (name, _CHANCE.sub("chance", value))
                    for name, value in fields
                    if name not in _SERVERS_OWN | {"content-length"}
                ),
                key=lambda field: field[0],
            ),
            answer.headers.get("Content-Length"),
            _CHANCE_BYTES.sub(b"chance", await answer.read()),
        )


@pytest.mark.parametrize(("route", "ask"), CASES, ids=[f"{route} {ask}" for route, ask in CASES])
async def test_an_answer_is_the_same_as_uvicorns(servers: Servers, route: str, ask: Ask) -> None:
    muster, uvicorn = [await seen(servers.session, url, ask) for url in servers.addresses(route, ask.path)]
    assert muster._replace(content_length=None) == uvicorn._replace(content_length=None)
    if uvicorn.content_length is not None or ask.method == "HEAD":
        assert muster.content_length == uvicorn.content_length


async def test_what_an_answer_leaves_for_later_is_done(servers: Servers) -> None:
    for answers, notes in zip(
        servers.addresses("/star", "/background?note=later"),
        servers.addresses("/star", "/noted"),
        strict=True,
    ):
        assert (await seen(servers.session, answers, Ask("/background"))).body == b"later"
        await until_noted(servers.session, notes, b"later")


async def test_an_answer_that_breaks_off_breaks_off(servers: Servers) -> None:
    for url in servers.addresses("/star", "/breaks-off"):
        with pytest.raises(aiohttp.ClientError):
            await seen(servers.session, url, Ask("/breaks-off"))


# -- WebSockets --

Connection = websockets.asyncio.client.ClientConnection


async def both(servers: Servers, path: str, talk: Callable[[Connection], Any], **options: Any) -> list[Any]:
    """What each server made of it: what ``talk`` returns and how the connection ended, or the refusal."""
    results = []
    route = options.pop("route", "/star")
    for url in servers.addresses(route, path):
        result: list[Any] = []
        try:
            async with asyncio.timeout(30):
                async with websockets.asyncio.client.connect(
                    f"ws://{url}", additional_headers={"X-Mine": "1"}, max_size=8 * MIB, proxy=None, **options
                ) as connection:
                    result.append(await talk(connection))
                    await connection.wait_closed()
                    result += [connection.close_code, connection.close_reason, connection.subprotocol]
        except InvalidStatus as error:
            response = error.response
            headers = sorted(
                (name.lower(), value)
                for name, value in response.headers.raw_items()
                if name.lower() not in _SERVERS_OWN | {"content-length"}
            )
            body = bytes(response.body or b"")
            if not body:  # then it is the server itself that says of what kind nothing is
                headers = [(name, value) for name, value in headers if name != "content-type"]
            result += ["refused", response.status_code, headers, body]
        except ConnectionClosed as error:
            result += ["ended", error.rcvd, error.sent]
        results.append(result)
    return results


def assert_same(results: list[Any]) -> Any:
    muster, uvicorn = results
    assert muster == uvicorn
    return uvicorn


async def receive_all(connection: Connection) -> list[Any]:
    return [message async for message in connection]


async def test_messages_come_back_as_they_were_sent(servers: Servers) -> None:
    sent: list[str | bytes] = [
        "text",
        b"bytes",
        "",
        b"",
        "grün €",
        bytes(range(256)),
        "x" * 70_000,
        b"y" * 700_000,
    ]

    async def talk(connection: Connection) -> list[Any]:
        received = []
        for message in sent:
            await connection.send(message)
            received.append(await connection.recv())
        await connection.close(4321, "enough")
        return received

    assert assert_same(await both(servers, "/ws/echo", talk))[0] == sent


@pytest.mark.parametrize(
    "pieces", [["a", "", "b" * 70_000, "ü"], [b"1", b"2" * 600_000, b"3"]], ids=["text", "bytes"]
)
async def test_fragments_are_one_message(servers: Servers, pieces: list[Any]) -> None:
    async def talk(connection: Connection) -> Any:
        await connection.send(pieces)
        received = await connection.recv()
        await connection.close()
        return received

    assert assert_same(await both(servers, "/ws/echo", talk))[0] == pieces[0][:0].join(pieces)


async def test_pings_are_answered_also_between_fragments(servers: Servers) -> None:
    async def talk(connection: Connection) -> Any:
        async def pieces() -> AsyncIterator[str]:
            yield "first "
            await (await connection.ping(b"between"))
            yield "second"

        await (await connection.ping())
        await connection.send(pieces())
        received = await connection.recv()
        await connection.pong(b"unasked")
        await connection.send("after")
        await connection.close(1001)
        return received

    assert assert_same(await both(servers, "/ws/echo", talk))[0] == "first second"


async def test_a_hundred_messages_at_once_come_back_in_order(servers: Servers) -> None:
    async def talk(connection: Connection) -> list[Any]:
        async with asyncio.TaskGroup() as tasks:
            receiving = tasks.create_task(asyncio.wait_for(collect(connection, 300), 30))
            for number in range(300):
                await connection.send(str(number))
        await connection.close()
        return receiving.result()

    assert assert_same(await both(servers, "/ws/echo", talk))[0] == [str(number) for number in range(300)]


async def collect(connection: Connection, count: int) -> list[Any]:
    return [await connection.recv() for _ in range(count)]


async def test_a_large_message_goes_both_ways(servers: Servers) -> None:
    large = os.urandom(3 * MIB)

    async def talk(connection: Connection) -> list[Any]:
        await connection.send(large)
        return await receive_all(connection)

    assert assert_same(await both(servers, "/ws/large", talk))[0][1] == large


async def test_many_messages_are_sent_before_the_close(servers: Servers) -> None:
    result = assert_same(await both(servers, "/ws/many?count=500", receive_all))
    assert result == [[str(number) for number in range(500)], 1000, "enough", None]


@pytest.mark.parametrize("code", [1000, 1001, 1008, 1011, 3000, 4001, 4999])
async def test_the_servers_close_code_arrives(servers: Servers, code: int) -> None:
    path = f"/ws/closes?code={code}&reason=gr%C3%BCn"
    assert assert_same(await both(servers, path, drain))[1:3] == [code, "grün"]


async def drain(connection: Connection) -> list[Any]:
    received = []
    with contextlib.suppress(ConnectionClosed):
        while True:
            received.append(await connection.recv())
    return received


async def until_noted(session: aiohttp.ClientSession, url: str, *notes: bytes) -> None:
    """Until the application has noted one of these, which it does after its client has been answered."""
    async with asyncio.timeout(30):
        while True:
            body = (await seen(session, url, Ask("/noted"))).body
            if any(note in body for note in notes):
                return
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("code", [1000, 1001, 3000, 4001])
async def test_the_clients_close_code_arrives(servers: Servers, code: int) -> None:
    async def talk(connection: Connection) -> None:
        await connection.close(code, f"code {code}")

    assert_same(await both(servers, "/ws/echo", talk))
    for url in servers.addresses("/star", "/noted"):
        await until_noted(servers.session, url, f"closed {code} code {code}".encode())


async def test_a_client_that_vanishes_is_closed_as_abnormal(servers: Servers) -> None:
    async def talk(connection: Connection) -> None:
        connection.transport.abort()

    await both(servers, "/ws/echo", talk)
    for url in servers.addresses("/star", "/noted"):
        await until_noted(servers.session, url, b"closed 1006", b"closed 1005")


@pytest.mark.parametrize(("path", "code"), [("/ws/returns", 1000), ("/ws/raises", 1011)])
async def test_a_socket_that_the_application_forgot_is_closed(servers: Servers, path: str, code: int) -> None:
    muster, uvicorn = await both(servers, path, drain)
    assert muster[0] == uvicorn[0]
    assert muster[1] == code, "uvicorn drops the connection, which tells a client nothing"


@pytest.mark.parametrize("path", ["/ws/refuses", "/ws/denies", "/ws/none", "/seen"])
async def test_a_handshake_is_refused_in_the_same_way(servers: Servers, path: str) -> None:
    assert_same(await both(servers, path, drain))


@pytest.mark.parametrize("offered", [None, ["one"], ["one", "two"]])
async def test_the_subprotocol_is_the_applications_choice(servers: Servers, offered: Any) -> None:
    result = assert_same(await both(servers, "/ws/chooses", receive_all, subprotocols=offered))
    assert result[-1] == (offered[-1] if offered else None)


async def test_the_handshake_tells_the_application_the_same(servers: Servers) -> None:
    async def talk(connection: Connection) -> list[Any]:
        assert connection.response is not None
        assert connection.request is not None
        told = str((await receive_all(connection))[0])
        here = connection.request.headers["Host"]
        return [told.replace(here, "here"), connection.response.headers.get("X-Accepted")]

    assert assert_same(await both(servers, "/ws/seen/7?a=%C3%BC&b", talk))[0][1] == "yes"


async def test_fastapis_websockets_are_the_same(servers: Servers) -> None:
    async def talk(connection: Connection) -> list[Any]:
        await connection.send("hello")
        return await drain(connection)

    result = assert_same(await both(servers, "/ws/bob?token=t", talk, route="/fast/api"))
    assert result[:3] == [["bob t hello"], 4000, "done"]
    assert assert_same(await both(servers, "/ws/bob", talk, route="/fast/api"))[:2] == ["refused", 403]
