"""WebSockets through a whole proxy: handshakes, messages and closes in both directions, and every way to break one."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import WSMsgType

from serve_common.dispatch.sockets import MESSAGE_BYTES_MAX
from serve_common.protocol.frames import FRAME_BODY_BYTES_MAX, WINDOW_MESSAGES, ErrorHead, RequestKind
from serve_proxy.http import websockets as http_sockets
from serve_replica_host.replica.io import slots as quiet_sockets
from serve_replica_host.replica.process import ReplicaProcess
from tests.support.servers.nats_server import NatsServer
from tests.support.stacks.bare_runner import RunOrder, start_order
from tests.support.stacks.fake_replica import FakeReplica, Held
from tests.support.stacks.proxy_stack import MIB, R0, TAG, Stack, running_stack
from tests.support.stacks.raw_peers import raw_connection, running_replica
from tests.support.waiting import eventually

KEY = b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
UPGRADE = b"Connection: Upgrade\r\nUpgrade: websocket\r\n"


@pytest.fixture
async def stack(server: NatsServer) -> AsyncIterator[Stack]:
    async with running_stack(server) as stack:
        yield stack
        proxy = stack.proxy
        routers = proxy._ingress.routes.routers.values()
        await eventually(
            lambda: (
                not proxy.http.in_flight
                and not len(proxy._requests.sockets)
                and not proxy._dispatcher.calls
                and not any(router.in_flight for router in routers)
            )
        )


async def closed(replica: FakeReplica, held: Held) -> tuple[int, str]:
    await replica.wait(lambda: held.closed is not None)
    assert held.closed is not None
    return held.closed


async def test_messages_go_both_ways_and_keep_their_kind(stack: Stack) -> None:
    (replica,) = await stack.serve(R0)
    async with stack.session.ws_connect(stack.url + "/echo/ws/?a=b", headers={"X-Request-ID": "mine"}) as ws:
        assert ws._response.headers["x-replica"] == R0
        assert ws._response.headers["X-Request-ID"] == "mine"
        await ws.send_str("grüß")
        assert await ws.receive_str() == "grüß"
        await ws.send_bytes(b"\xff\x00")
        assert await ws.receive_bytes() == b"\xff\x00"
        await ws.send_str("")
        assert await ws.receive_str() == ""
        await ws.ping(b"p")
        (held,) = replica.sockets
        await ws.close(code=4001, message=b"enough")
    assert await closed(replica, held) == (4001, "enough")
    assert (held.head.kind, held.head.method, held.head.scheme) == (RequestKind.WEBSOCKET, "GET", "ws")
    assert (held.head.path, held.head.query, held.head.request_id) == ("/echo/ws/", "a=b", "mine")
    names = [name for name, _ in held.head.headers]
    assert b"upgrade" not in names
    assert b"connection" not in names
    assert b"sec-websocket-key" in names
    await stack.until_shown(f'serve_proxy_requests_total{{code="101",endpoint_tag="{TAG}",method="GET"}} 1.0')


@pytest.mark.parametrize("size", [0, 125, 126, 65536, FRAME_BODY_BYTES_MAX + 1, MESSAGE_BYTES_MAX])
async def test_messages_of_any_allowed_size_go_both_ways_whole(stack: Stack, size: int) -> None:
    (replica,) = await stack.serve(R0)
    async with stack.session.ws_connect(stack.url + "/echo/ws", max_msg_size=0) as ws:
        await ws.send_bytes(bytes(size))
        assert await ws.receive_bytes() == bytes(size)
    assert len(replica.sockets[0].messages) == 1


MASKED = b"\x81\x82abcd" + bytes(byte ^ key for byte, key in zip(b"hi", b"ab", strict=True))


@pytest.mark.parametrize("size", [1, 7, 1000], ids=["byte by byte", "in parts", "at once"])
@pytest.mark.parametrize(
    "unmasked", [b"\x81\x02hi", b"\x89\x00", b"\x88\x02\x03\xe8", b"\x82\x7e\x01\x00" + bytes(256)]
)
async def test_frames_that_are_not_masked_are_refused_with_1002(
    stack: Stack, unmasked: bytes, size: int
) -> None:
    """RFC 6455, 5.1. What came before is heard, and what comes behind is not."""
    (replica,) = await stack.serve(R0)
    long = b"\x82\xfe\x01\x00abcd" + bytes(256)
    sent = MASKED + long + MASKED + unmasked + MASKED
    async with asyncio.timeout(30), raw_connection(stack.url) as (reader, writer):
        head = b"GET /echo/ws HTTP/1.1\r\nHost: h\r\nSec-WebSocket-Version: 13\r\n" + KEY + UPGRADE + b"\r\n"
        whole = head + sent if size > len(sent) else head
        writer.write(whole)
        for at in range(0, len(sent) if whole is head else 0, size):
            writer.write(sent[at : at + size])
            await asyncio.sleep(0.001)
        assert b" 101 " in await reader.readuntil(b"\r\n\r\n")
        answers = await reader.read()  # until the proxy has closed it
    assert answers.endswith(b"\x88\x02\x03\xea")
    (held,) = replica.sockets
    assert await closed(replica, held) == (1002, "a client's frames must be masked")
    assert [len(message) for _, message in held.messages] == [2, 256, 2]


async def send_nonsense(ws: aiohttp.ClientWebSocketResponse) -> None:
    ws._writer.transport.write(b"\xff\xff\xff\xff")


@pytest.mark.parametrize(
    ("code", "send"),
    [
        (1009, lambda ws: ws.send_bytes(bytes(MESSAGE_BYTES_MAX + 1))),
        (1007, lambda ws: ws._writer.send_frame(b"\xff\xfe", WSMsgType.TEXT)),
        (1002, send_nonsense),
    ],
    ids=["too large", "text that is no UTF-8", "no frame"],
)
async def test_what_may_not_be_sent_closes_with_its_code(
    stack: Stack, code: int, send: Callable[[Any], Awaitable[None]]
) -> None:
    (replica,) = await stack.serve(R0)
    async with stack.session.ws_connect(stack.url + "/echo/ws", max_msg_size=0) as ws:
        await send(ws)
        message = await ws.receive(timeout=20)
        assert (message.type, message.data) == (WSMsgType.CLOSE, code)
    assert (await closed(replica, replica.sockets[0]))[0] == code
    assert not replica.sockets[0].messages


async def test_the_replica_may_close_with_a_code_and_a_reason(stack: Stack) -> None:
    (replica,) = await stack.serve(R0)
    for said, heard in ((4010, 4010), (1000, 1000), (1012, 1012), (1005, 1000), (1006, 1011), (77, 1011)):
        async with stack.session.ws_connect(stack.url + "/echo/ws") as ws:
            held = replica.sockets[-1]
            replica.say(held, b"last", is_text=True)
            replica.close_socket(held, said, "ü" * 100)
            assert await ws.receive_str() == "last"
            message = await ws.receive(timeout=20)
            assert (message.type, message.data) == (WSMsgType.CLOSE, heard)
            assert message.extra == "ü" * 61


async def test_a_refusal_is_an_ordinary_answer_and_the_connection_goes_on(stack: Stack) -> None:
    await stack.serve(R0)
    with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
        await stack.session.ws_connect(stack.url + "/echo/ws-refuse")
    assert caught.value.status == 403
    with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
        await stack.session.ws_connect(stack.url + "/nowhere")
    assert caught.value.status == 404
    status, head = await handshake(
        stack,
        b"GET /echo/ws-refuse HTTP/1.1\r\nHost: h\r\n" + UPGRADE + KEY + b"Sec-WebSocket-Version: 13\r\n\r\n"
        b"GET /echo HTTP/1.1\r\nHost: h\r\n\r\n",
        answers=2,
    )
    assert status == 200, head


@pytest.mark.parametrize(
    ("lines", "status", "names"),
    [
        (KEY + b"Sec-WebSocket-Version: 8\r\n", 426, b"sec-websocket-version: 13"),
        (KEY, 426, b"sec-websocket-version: 13"),
        (b"Sec-WebSocket-Version: 13\r\n", 400, b"application/problem+json"),
        (b"Sec-WebSocket-Key: short\r\nSec-WebSocket-Version: 13\r\n", 400, b"application/problem+json"),
        (KEY + KEY + b"Sec-WebSocket-Version: 13\r\n", 400, b"application/problem+json"),
    ],
)
async def test_a_bad_handshake_is_refused_before_anybody_is_asked(stack: Stack, lines, status, names) -> None:
    (replica,) = await stack.serve(R0)
    request = b"GET /echo/ws HTTP/1.1\r\nHost: h\r\n" + UPGRADE + lines + b"\r\n"
    found, head = await handshake(stack, request)
    assert found == status
    assert names in head.lower()
    assert not replica.seen


async def handshake(stack: Stack, request: bytes, *, answers: int = 1) -> tuple[int, bytes]:
    async with raw_connection(stack.url) as (reader, writer):
        writer.write(request)
        for _ in range(answers):
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            await reader.readexactly(length)
    return int(head.split()[1]), head


async def test_the_replica_chooses_one_of_the_protocols_that_were_offered(stack: Stack) -> None:
    await stack.serve(R0)
    async with stack.session.ws_connect(stack.url + "/echo/ws-protocol?b", protocols=("a", "b")) as ws:
        assert ws.protocol == "b"
    async with stack.session.ws_connect(stack.url + "/echo/ws", protocols=("a", "b")) as ws:
        assert ws.protocol is None
    with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
        await stack.session.ws_connect(stack.url + "/echo/ws-protocol?c", protocols=("a", "b"))
    assert caught.value.status == 502


async def test_a_client_that_vanishes_cancels_at_the_replica(stack: Stack) -> None:
    (replica,) = await stack.serve(R0, limit=1)
    ws = await stack.session.ws_connect(stack.url + "/echo/ws")
    ws._response.connection.transport.abort()
    await replica.wait(lambda: bool(replica.cancelled) or replica.sockets[0].closed is not None)
    assert (await stack.get("/echo"))[0] == 200
    await ws.close()


async def test_a_replica_that_dies_closes_with_1011(stack: Stack) -> None:
    (replica,) = await stack.serve(R0)
    async with stack.session.ws_connect(stack.url + "/echo/ws") as ws:
        await ws.send_str("x")
        assert await ws.receive_str() == "x"
        await replica.close()
        await stack.put_backend()
        message = await ws.receive(timeout=20)
        assert (message.type, message.data) == (WSMsgType.CLOSE, 1011)


async def test_a_frame_that_is_lost_for_good_closes_with_1011_and_is_never_passed_over(stack: Stack) -> None:
    (replica,) = await stack.serve(R0)
    async with stack.session.ws_connect(stack.url + "/echo/ws") as ws:
        held = replica.sockets[0]
        held.sequence += 1
        replica.say(held, b"x", is_text=False)
        await replica.wait(lambda: replica.probes > 0)  # it is asked for what is missing
        replica.send(held, ErrorHead("request_failed", 502, "a part of the answer was lost", 0))
        message = await ws.receive(timeout=20)
        assert (message.type, message.data) == (WSMsgType.CLOSE, 1011)


async def test_a_replica_that_takes_nothing_holds_up_the_client(stack: Stack) -> None:
    (replica,) = await stack.serve(R0)
    ws = await stack.session.ws_connect(stack.url + "/echo/ws-deaf")
    sent = 0

    async def send() -> None:
        nonlocal sent
        while True:
            await ws.send_bytes(bytes(MIB))
            sent += 1

    sending = asyncio.get_running_loop().create_task(send())
    await replica.wait(lambda: replica.sockets[0].frames == WINDOW_MESSAGES)
    await asyncio.sleep(0.2)
    assert replica.sockets[0].frames == WINDOW_MESSAGES
    assert sent < 100
    sending.cancel()
    replica.close_socket(replica.sockets[0], 1000)
    ws._response.connection.transport.abort()
    await ws.close()


async def test_a_client_that_takes_nothing_holds_up_the_replica(stack: Stack) -> None:
    (replica,) = await stack.serve(R0)
    ws = await stack.session.ws_connect(stack.url + "/echo/ws-big?16000000", max_msg_size=0)
    held = replica.sockets[0]
    for _ in range(10):
        replica.say(held, bytes(4 * MIB), is_text=False)
    assert held.to_send
    got = 0
    while got < 16_000_000 + 40 * MIB:
        got += len(await ws.receive_bytes(timeout=20))
    assert not held.to_send
    await ws.close()


async def test_a_client_that_answers_no_ping_is_cut_off(stack: Stack, monkeypatch) -> None:
    monkeypatch.setattr(http_sockets, "HEARTBEAT_S", 0.2)
    (replica,) = await stack.serve(R0)
    ws = await stack.session.ws_connect(stack.url + "/echo/ws", autoping=False)
    await replica.wait(lambda: bool(replica.cancelled) or replica.sockets[0].closed is not None)
    await ws.close()


async def test_a_socket_outlives_the_request_timeout(server: NatsServer) -> None:
    async with running_stack(server, request_timeout_s=2.0) as stack:
        await stack.serve(R0)
        async with stack.session.ws_connect(stack.url + "/echo/ws") as ws:
            await asyncio.sleep(2.2)
            await ws.send_str("still")
            assert await ws.receive_str() == "still"


async def test_a_drain_closes_sockets_with_1001_after_their_grace(server: NatsServer) -> None:
    async with running_stack(server, drain_timeout_s=6.0) as stack:  # half of it is the grace
        (replica,) = await stack.serve(R0)
        ws = await stack.session.ws_connect(stack.url + "/echo/ws")
        async with asyncio.TaskGroup() as group:
            drain = group.create_task(stack.proxy.drain())
            await stack.report(lambda report: report.leaving)
            await ws.send_str("still")
            assert await ws.receive_str() == "still"
            message = await ws.receive(timeout=20)
            assert (message.type, message.data) == (WSMsgType.CLOSE, 1001)
        assert (await closed(replica, replica.sockets[0]))[0] == 1001
        assert drain.done()


async def test_middlewares_see_the_upgrade_and_may_refuse_it(server: NatsServer, tmp_path: Path) -> None:
    (tmp_path / "socket_guard.py").write_text(
        "from aiohttp import web\n"
        "async def guard(request, handler):\n"
        "    if request.headers.get('Upgrade') == 'websocket' and 'X-Key' not in request.headers:\n"
        "        return web.Response(status=401)\n"
        "    return await handler(request)\n"
    )
    async with running_stack(server, middleware_dir=str(tmp_path)) as stack:
        await stack.serve(R0)
        await stack.applied(await stack.put_http(middlewares=["socket_guard:guard"], request_timeout_s=2.0))
        with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
            await stack.session.ws_connect(stack.url + "/echo/ws")
        assert caught.value.status == 401
        async with stack.session.ws_connect(stack.url + "/echo/ws", headers={"X-Key": "k"}) as ws:
            await asyncio.sleep(2.2)  # beyond the time that middlewares get for an answer to begin
            await ws.send_str("in")
            assert await ws.receive_str() == "in"
        await stack.until_shown('code="101"')


async def test_nats_may_go_away_for_a_moment_without_ending_idle_sockets(stack: Stack) -> None:
    (replica,) = await stack.serve(R0)
    async with stack.session.ws_connect(stack.url + "/echo/ws") as ws:
        await ws.send_str("before")
        assert await ws.receive_str() == "before"
        stack.server.kill()
        stack.server.start()
        await eventually(lambda: stack.proxy._bus.reconnects and replica._bus.reconnects)
        for bus in (stack.proxy._bus, replica._bus):
            await bus.flush(20)  # the server knows what each of them listens to
        await ws.send_str("after")
        assert await ws.receive_str(timeout=20) == "after"


SOCKET_APP = """
from starlette.applications import Starlette
from starlette.routing import WebSocketRoute

said_goodbye = []

async def echo(socket):
    await socket.accept()
    while (message := await socket.receive())["type"] != "websocket.disconnect":
        await socket.send_text(message["text"])
    said_goodbye.append(message["code"])

app = Starlette(routes=[WebSocketRoute("/ws", echo)])
"""


@pytest.fixture
async def replica(server: NatsServer, tmp_path: Path) -> AsyncIterator[ReplicaProcess]:
    """A real one, in this process; draining it is the test's."""
    (tmp_path / "socket_app.py").write_text(SOCKET_APP)
    order = start_order(server.url, R0, RunOrder(import_path="socket_app:app", app_dir=str(tmp_path)))
    goal = msgspec.structs.replace(order.goal, graceful_shutdown_timeout_s=30.0)
    async with running_replica(msgspec.structs.replace(order, goal=goal), drains=False) as process:
        yield process


async def test_a_replica_that_is_replaced_closes_quiet_sockets_with_1012_and_lets_the_others_talk(
    stack: Stack, replica: ReplicaProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        quiet_sockets, "IDLE_S", 2.0
    )  # of which a busy machine must leave a moment to talk in
    await stack.serve()
    await stack.applied(await stack.put_backend(R0))
    url = stack.url + "/echo/ws"
    async with stack.session.ws_connect(url) as quiet, stack.session.ws_connect(url) as busy:
        for ws in (quiet, busy):
            await ws.send_str("x")
            assert await ws.receive_str() == "x"
        drain = asyncio.get_running_loop().create_task(asyncio.to_thread(replica.drain))
        started_at = time.monotonic()
        closing = asyncio.get_running_loop().create_task(quiet.receive(timeout=20))
        while not closing.done() or time.monotonic() - started_at < 2.5:
            await busy.send_str("still")
            assert await busy.receive_str() == "still"
            await asyncio.sleep(0.1)
        message = await closing
        assert (message.type, message.data) == (WSMsgType.CLOSE, 1012)
        assert message.extra == "the replica is being replaced"
        assert not drain.done()
        message = await busy.receive(timeout=20)
        assert (message.type, message.data) == (WSMsgType.CLOSE, 1012)
    await asyncio.wait_for(drain, 30)
    assert sys.modules["socket_app"].said_goodbye == [1012, 1012]
