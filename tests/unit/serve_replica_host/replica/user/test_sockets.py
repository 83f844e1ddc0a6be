"""WebSockets inside a replica: accept, refuse, messages both ways under credit, and every way to end one."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect
from structlog.testing import capture_logs

from serve_common.direct.link import DirectLink
from serve_common.protocol.frames import (
    MESSAGE_PART_BYTES_MAX,
    WINDOW_MESSAGES,
    AliveHead,
    CancelHead,
    CloseHead,
    CreditHead,
    MessageHead,
    ProbeHead,
    RequestKind,
    ResponseHead,
)
from serve_replica_host.replica.io import slots as quiet_sockets
from serve_replica_host.replica.user import asgi as sockets
from tests.support.replica_rig import Request, Rig
from tests.support.waiting import eventually


def rig_of(endpoint: Any) -> Rig:
    return Rig(application=Starlette(routes=[WebSocketRoute("/ws", endpoint)]))


def open_socket(rig: Rig, path: str = "/app/ws", **options: Any) -> Request:
    return rig.begin(path, kind=RequestKind.WEBSOCKET, method="GET", **options)


async def connect(rig: Rig, *, gives_credit: bool = True) -> Request:
    request = open_socket(rig, gives_credit=gives_credit)
    head, _ = await request.frame()
    assert isinstance(head, ResponseHead)
    assert head.status == 101
    return request


async def echo(socket: WebSocket) -> None:
    await socket.accept()
    while True:
        message = await socket.receive()
        if message["type"] == "websocket.disconnect":
            return
        if message.get("text") is not None:
            await socket.send_text(message["text"])
        else:
            await socket.send_bytes(message["bytes"])


async def test_text_and_bytes_go_both_ways_and_the_clients_close_frees_the_slot() -> None:
    rig = rig_of(echo)
    request = await connect(rig)

    request.send(MessageHead(1, True, True), "grüße".encode())
    request.send(MessageHead(2, False, True), b"\xff\x00")
    request.send(MessageHead(3, True, True), b"")
    frames = [await request.frame() for _ in range(3)]
    request.send(CloseHead(1001, "away"))
    await rig.idle()

    assert frames == [
        (MessageHead(1, True, True), "grüße".encode()),
        (MessageHead(2, False, True), b"\xff\x00"),
        (MessageHead(3, True, True), b""),
    ]
    assert request.is_silent
    assert rig.metrics.answered == [101]


async def test_the_scope_names_subprotocols_and_the_accept_chooses_one() -> None:
    seen: list[dict[str, Any]] = []

    async def endpoint(socket: WebSocket) -> None:
        seen.append(dict(socket.scope))
        await socket.accept("b", headers=[(b"X-Own", b"1")])
        await socket.close(3000, "bye")

    rig = rig_of(endpoint)
    request = open_socket(
        rig, headers=[(b"sec-websocket-protocol", b"a, b"), (b"sec-websocket-protocol", b"c")]
    )

    accepted, _ = await request.frame()
    closed, _ = await request.frame()
    await rig.idle()

    assert isinstance(accepted, ResponseHead)
    assert accepted.headers == [(b"x-own", b"1"), (b"sec-websocket-protocol", b"b")]
    assert closed == CloseHead(3000, "bye", 1)
    assert seen[0]["subprotocols"] == ["a", "b", "c"]
    assert (seen[0]["type"], seen[0]["scheme"], seen[0]["root_path"]) == ("websocket", "ws", "/app")


async def test_a_close_before_the_accept_is_a_403_and_an_unknown_path_too() -> None:
    async def endpoint(socket: WebSocket) -> None:
        await socket.close()

    rig = rig_of(endpoint)
    for path in ("/app/ws", "/app/other"):
        answer = await open_socket(rig, path).answer()
        assert (answer.status, answer.body) == (403, b"")
    await rig.idle()


async def test_an_application_may_refuse_with_an_answer_of_its_own() -> None:
    async def endpoint(socket: WebSocket) -> None:
        await socket.send_denial_response(JSONResponse({"why": "no"}, 401))

    rig = rig_of(endpoint)
    answer = await open_socket(rig).answer()
    await rig.idle()

    assert (answer.status, answer.body) == (401, b'{"why":"no"}')


async def test_code_that_is_no_application_takes_no_websockets() -> None:
    async def handler(request: Any) -> str:
        return "ok"

    rig = Rig(handler)
    answer = await open_socket(rig).answer()

    assert answer.status == 403
    assert b"takes no WebSockets" in answer.body


async def test_a_client_that_is_gone_is_a_disconnect_with_1006_after_what_it_had_said() -> None:
    told: list[Any] = []

    async def endpoint(socket: WebSocket) -> None:
        await socket.accept()
        try:
            while True:
                told.append(await socket.receive_text())
        except WebSocketDisconnect as end:
            told.append(end.code)

    rig = rig_of(endpoint)
    request = await connect(rig)
    request.send(MessageHead(1, True, True), b"last word")
    request.send(CancelHead())
    await rig.idle()

    assert told == ["last word", 1006]


async def test_writing_to_a_client_that_is_gone_raises_and_nothing_is_logged() -> None:
    raised: list[str] = []
    gone = asyncio.Event()

    async def endpoint(socket: WebSocket) -> None:
        await socket.accept()
        await gone.wait()
        try:
            await socket.send_text("too late")
        except WebSocketDisconnect as error:
            raised.append(type(error).__name__)
            raise

    rig = rig_of(endpoint)
    request = await connect(rig)
    with capture_logs() as logs:
        request.send(CloseHead(1000, ""))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        gone.set()
        await rig.idle()

    assert raised == ["WebSocketDisconnect"]
    assert logs == []


async def test_an_application_that_does_not_hear_the_end_is_ended_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("serve_replica_host.replica.user.executor.LEAVE_S", 0.01)

    async def endpoint(socket: WebSocket) -> None:
        await socket.accept()
        await asyncio.Event().wait()

    rig = rig_of(endpoint)
    request = await connect(rig)
    request.send(CloseHead(1000, ""))

    await rig.idle()

    assert rig.bus_side.in_flight == 0


async def test_an_application_that_returns_closes_with_1000() -> None:
    async def returns(socket: WebSocket) -> None:
        await socket.accept()

    request = await connect(rig_of(returns))
    assert await request.frame() == (CloseHead(1000, "", 1), b"")


async def test_large_messages_are_cut_and_put_together_again() -> None:
    rig = rig_of(echo)
    request = await connect(rig)
    content = bytes(range(256)) * (MESSAGE_PART_BYTES_MAX // 256) * 5

    for at in range(5):
        piece = content[at * MESSAGE_PART_BYTES_MAX :][:MESSAGE_PART_BYTES_MAX]
        request.send(MessageHead(at + 1, False, at == 4), piece)
    frames = [await request.frame() for _ in range(5)]
    request.send(CloseHead(1000, ""))
    await rig.idle()

    assert b"".join(body for _, body in frames) == content
    assert [head.last for head, _ in frames if isinstance(head, MessageHead)] == [False] * 4 + [True]


@pytest.mark.parametrize(
    ("messages", "code"),
    [
        pytest.param(
            [(MessageHead(n, False, False), b"x" * 60) for n in (1, 2)], 1009, id="beyond the limit"
        ),
        pytest.param([(MessageHead(1, True, True), b"\xff")], 1007, id="no UTF-8"),
    ],
)
async def test_a_message_that_cannot_be_taken_closes_and_both_ends_hear_why(
    messages: list[tuple[MessageHead, bytes]], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "MESSAGE_BYTES_MAX", 100)
    codes: list[int] = []

    async def endpoint(socket: WebSocket) -> None:
        await socket.accept()
        try:
            await socket.receive_bytes()
        except WebSocketDisconnect as end:
            codes.append(end.code)

    rig = rig_of(endpoint)
    request = await connect(rig)
    for head, body in messages:
        request.send(head, body)

    closed, _ = await request.frame()
    await rig.idle()

    assert isinstance(closed, CloseHead)
    assert closed.code == code
    assert codes == [code]


async def test_an_application_that_talks_waits_for_the_clients_credit_and_one_that_listens_gives_it() -> None:
    said = 0

    async def endpoint(socket: WebSocket) -> None:
        nonlocal said
        await socket.accept()
        for _ in range(WINDOW_MESSAGES * 2):
            await socket.send_bytes(b"x" * 60_000)
            said += 1
        for _ in range(WINDOW_MESSAGES):
            await socket.receive_bytes()
        await socket.close()

    rig = rig_of(endpoint)
    request = await connect(rig, gives_credit=False)
    for _ in range(WINDOW_MESSAGES):
        await request.frame()
    await eventually(lambda: said >= WINDOW_MESSAGES)
    await asyncio.sleep(0.02)
    assert request.is_silent
    assert WINDOW_MESSAGES <= said < WINDOW_MESSAGES * 2
    request.allow(WINDOW_MESSAGES)
    for _ in range(WINDOW_MESSAGES):
        await request.frame()
    had = request.credit
    for sequence in range(1, WINDOW_MESSAGES + 1):
        request.send(MessageHead(sequence, False, True), b"y")

    closed, _ = await request.frame()

    assert closed == CloseHead(1000, "", 2 * WINDOW_MESSAGES + 1)
    assert request.credit == had + WINDOW_MESSAGES
    await rig.idle()


async def test_a_lost_message_is_asked_for_once_and_one_that_comes_twice_is_dropped() -> None:
    rig = rig_of(echo)
    request = await connect(rig)
    request.send(MessageHead(2, True, True), b"b")
    request.send(MessageHead(3, True, True), b"c")
    gap, _ = await request.frame()
    assert isinstance(gap, AliveHead)
    assert (gap.received, gap.has_gap) == (1, True)

    for number, text in ((1, b"a"), (2, b"b"), (1, b"a"), (2, b"b"), (3, b"c")):
        request.send(MessageHead(number, True, True), text)
    assert [(await request.frame())[1] for _ in range(3)] == [b"a", b"b", b"c"]
    request.send(CloseHead(1000, ""))
    await rig.idle()


async def test_a_close_waits_for_the_messages_before_it() -> None:
    rig = rig_of(echo)
    request = await connect(rig)
    request.send(CloseHead(1000, "", 2))
    gap, _ = await request.frame()
    assert isinstance(gap, AliveHead)
    assert (gap.received, gap.has_gap) == (1, True)
    request.send(MessageHead(1, True, True), b"a")
    assert (await request.frame())[1] == b"a"
    request.send(CloseHead(1000, "", 2))
    await rig.idle()


async def test_messages_that_a_router_did_not_get_are_sent_again_while_they_are_not_allowed_away() -> None:
    rig = rig_of(echo)
    request = await connect(rig)
    for number in (1, 2, 3):
        request.send(MessageHead(number, True, True), b"%d" % number)
    first = [await request.frame() for _ in range(3)]
    request.expected = 2
    request.send(ProbeHead(1.0, 2, has_lost=True))
    alive, *again = [await request.frame() for _ in range(3)]
    assert alive[0] == AliveHead(4, WINDOW_MESSAGES + 1)
    assert again == first[1:]
    request.send(CloseHead(1000, ""))
    await rig.idle()


async def test_the_deadline_does_not_end_an_open_socket_and_credit_for_nothing_does_no_harm() -> None:
    rig = rig_of(echo)
    request = await connect(rig)
    exchange = next(iter(rig.bus_side._exchanges.values()))
    exchange.deadline = 0.0
    rig.bus_side.sweep()
    request.send(CreditHead(5))
    request.send(MessageHead(1, True, True), b"still here")

    assert await request.frame() == (MessageHead(1, True, True), b"still here")
    request.send(CloseHead(1000, ""))
    await rig.idle()


def closed_after(messages: int) -> tuple[CloseHead, bytes]:
    """The close of a drain, after so many messages."""
    return CloseHead(1012, "the replica is being replaced", messages + 1), b""


class Drain:
    """A drain that begins now, by a clock of its own."""

    def __init__(self, rig: Rig) -> None:
        self._side, self._now = rig.bus_side, 1_000_000.0
        self._started_at = self._now
        self._side._now = lambda: self._now
        for exchange in self._side._exchanges.values():
            exchange.last_seen_at = self._now
            exchange.deadline = self._now + 60
        self._side.start_drain()
        self._side.sweep()

    def checks(self, *times_s: float, heard: bool = True) -> None:
        """Let it look at its sockets at these times, when their routers have probed half a second before."""
        for time_s in times_s:
            self._now = self._started_at + time_s
            for exchange in self._side._exchanges.values():
                if heard:
                    exchange.last_seen_at = max(exchange.last_seen_at, self._now - 0.5)
            self._side.sweep()


async def test_a_drain_closes_a_socket_that_has_been_quiet_for_a_second_and_both_ends_hear_why() -> None:
    told: list[Any] = []

    async def endpoint(socket: WebSocket) -> None:
        await socket.accept()
        told.append(await socket.receive())

    rig = rig_of(endpoint)
    request = await connect(rig)
    drain = Drain(rig)

    drain.checks(0.9)
    assert request.is_silent
    drain.checks(quiet_sockets.IDLE_S)

    assert await request.frame() == closed_after(0)
    await rig.idle()
    assert told == [{"type": "websocket.disconnect", "code": 1012, "reason": "the replica is being replaced"}]
    assert rig.metrics.answered == [101]


class CutLink:
    """Ended, and not because its router has left it."""

    has_parted = False


async def test_a_drain_closes_no_socket_whose_router_was_not_heard_since_its_link_was_cut() -> None:
    rig = rig_of(echo)
    request = await connect(rig)
    drain = Drain(rig)
    drain.checks(0.9)
    rig.bus_side.link_lost(cast(DirectLink, CutLink()))
    drain.checks(1.0, 2.5, 4.0, heard=False)
    assert request.is_silent

    drain.checks(4.5)

    assert await request.frame() == closed_after(0)
    await rig.idle()


async def test_a_drain_leaves_sockets_that_talk_in_either_direction_and_those_that_are_not_open_yet() -> None:
    says = asyncio.Event()

    async def endpoint(socket: WebSocket) -> None:
        if socket.query_params.get("waits"):
            await socket.receive()
            await asyncio.Event().wait()
        await socket.accept()
        if socket.query_params.get("listens"):
            while True:
                await socket.receive_text()
        while True:
            await says.wait()
            says.clear()
            await socket.send_text("tick")

    rig = rig_of(endpoint)
    requests = [open_socket(rig, query=query) for query in ("", "listens=1", "waits=1")]
    talks, listens, waits = requests
    for request in (talks, listens):
        assert isinstance((await request.frame())[0], ResponseHead)
    drain = Drain(rig)

    for second in range(1, 4):
        says.set()
        assert await talks.frame() == (MessageHead(second, True, True), b"tick")
        listens.send(MessageHead(second, True, True), b"tock")
        drain.checks(second * 0.9)
    assert all(request.is_silent for request in requests)

    drain.checks(10.0)
    assert await talks.frame() == closed_after(3)
    assert listens.is_silent  # its client spoke last, and may wait for an answer
    assert waits.is_silent
    for request in requests:
        request.send(CancelHead())
    await rig.user_executor.close()
    await rig.idle()


async def test_a_socket_whose_client_waits_for_an_answer_is_not_quiet_until_it_has_it() -> None:
    has_thought = asyncio.Event()

    async def endpoint(socket: WebSocket) -> None:
        await socket.accept()
        while True:
            question = await socket.receive_text()
            await has_thought.wait()
            await socket.send_text(question + "!")

    rig = rig_of(endpoint)
    request = await connect(rig)
    request.send(MessageHead(1, True, True), b"well")
    drain = Drain(rig)
    drain.checks(1.5, 3.0, 10.0)
    assert request.is_silent

    has_thought.set()
    assert await request.frame() == (MessageHead(1, True, True), b"well!")
    drain.checks(11.0, 11.9)
    assert request.is_silent
    drain.checks(12.1)
    assert await request.frame() == closed_after(1)
    await rig.idle()


async def test_a_socket_whose_client_has_not_taken_all_yet_is_not_quiet() -> None:
    async def endpoint(socket: WebSocket) -> None:
        await socket.accept()
        for _ in range(WINDOW_MESSAGES + 1):
            await socket.send_text("x")
        await socket.receive()

    rig = rig_of(endpoint)
    request = await connect(rig, gives_credit=False)
    for _ in range(WINDOW_MESSAGES):
        await request.frame()
    drain = Drain(rig)

    drain.checks(2.0, 4.0)
    assert request.is_silent
    request.allow(WINDOW_MESSAGES)
    assert await request.frame() == (MessageHead(WINDOW_MESSAGES + 1, True, True), b"x")
    drain.checks(4.1, 5.2)

    assert isinstance((await request.frame())[0], CloseHead)
    await rig.idle()


async def test_a_drain_that_is_cut_off_from_nats_closes_no_socket_until_it_is_back_for_a_second() -> None:
    rig = rig_of(echo)
    request = await connect(rig)
    drain = Drain(rig)
    rig.bus_side.bus_lost()
    drain.checks(2.0, 4.0)
    rig.bus_side.bus_joined()
    drain.checks(4.1, 5.0)
    assert request.is_silent

    drain.checks(5.2)

    assert isinstance((await request.frame())[0], CloseHead)
    await rig.idle()


async def test_a_router_that_missed_the_close_of_a_drain_is_told_it_again() -> None:
    rig = rig_of(echo)
    request = await connect(rig)
    drain = Drain(rig)
    drain.checks(1.0)
    closed = await request.frame()
    request.send(ProbeHead(1.0, 1, has_lost=True))
    assert type((await request.frame())[0]) is AliveHead
    assert await request.frame() == closed
    await rig.idle()
    request.send(ProbeHead(1.0, 1, has_lost=True))
    assert type((await request.frame())[0]) is AliveHead
    assert await request.frame() == closed
