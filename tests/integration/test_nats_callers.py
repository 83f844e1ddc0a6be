"""Plain NATS calls of endpoints: what a caller may say, and every kind of answer."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import nats
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from serve_common.clock import SystemClock
from tests.support.stacks.proxy_stack import BIG_BYTES, Stack, serve_calls

SUBJECT = "serve.call.echo"


async def call(stack: Stack, body: bytes, **headers: str) -> Msg:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return await stack.client.request(SUBJECT, body, timeout=20, headers=named or None)


def parse_error(message: Msg) -> tuple[str, str]:
    """Code of the service error, and ours in the body."""
    assert message.headers is not None
    return message.headers["Nats-Service-Error-Code"], json.loads(message.data)["error"]["code"]


async def pieces(stack: Stack, body: bytes, **headers: str) -> list[Msg]:
    """All messages of an answer in pieces, the empty one that ends it included."""
    heard, subscription = await ask_for_pieces(stack, body, **headers)
    messages = [await next_message(heard)]
    while messages[-1].data:
        messages.append(await next_message(heard))
    await subscription.unsubscribe()
    return messages


async def ask_for_pieces(
    stack: Stack, body: bytes, subject: str = SUBJECT, **headers: str
) -> tuple[asyncio.Queue[Msg], Subscription]:
    heard: asyncio.Queue[Msg] = asyncio.Queue()
    inbox = stack.client.new_inbox()
    subscription = await stack.client.subscribe(inbox, cb=heard.put)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    await stack.client.publish(subject, body, reply=inbox, headers={"X-Serve-Stream": "1", **named})
    return heard, subscription


async def next_message(heard: asyncio.Queue[Msg]) -> Msg:
    async with asyncio.timeout(30):
        return await heard.get()


def is_error(message: Msg) -> bool:
    return bool(message.headers and "Nats-Service-Error-Code" in message.headers)


async def test_bytes_come_back_as_they_are_with_the_callers_request_id(stack: Stack) -> None:
    replica = await serve_calls(stack)
    body = bytes(range(256)) * 4
    answer = await call(stack, body, X_Request_ID="mine", traceparent="00-1-2-01")
    assert answer.data == body
    assert answer.headers is not None
    assert answer.headers["X-Request-ID"] == "mine"
    assert (replica.seen[0].request_id, replica.seen[0].traceparent) == ("mine", "00-1-2-01")
    large = await call(stack, b"x" * 900_000)
    assert large.data == b"x" * 900_000


async def test_a_call_waits_no_longer_than_its_caller_does(stack: Stack) -> None:
    replica = await serve_calls(stack)
    loop = asyncio.get_running_loop()
    for limit in (
        lambda: {"X_Serve_Relative_SLO_MS": "200"},
        lambda: {"x_request_timeout_seconds": "0.2"},
        lambda: {"X_Serve_Absolute_SLO_MS": str(int((SystemClock().now() + 0.2) * 1000))},
    ):
        replica.seen.clear()
        while not replica.seen:  # on a busy machine it may be too late already when it could be sent
            began = loop.time()
            assert parse_error(await call(stack, b"hold", **limit()))[0] == "504"
            assert 0.15 < loop.time() - began < 15
        assert replica.seen[0].timeout_s <= 0.2
    await call(stack, b"")  # what was sent before has come
    seen = len(replica.seen)
    assert parse_error(await call(stack, b"hold", X_Serve_Absolute_SLO_MS="1000"))[0] == "504"
    code, ours = parse_error(await call(stack, b"hold", X_Serve_Relative_SLO_MS="soon"))
    assert (code, ours) == ("400", "bad_request")
    await call(stack, b"")
    assert len(replica.seen) == seen + 1


async def test_what_goes_wrong_is_a_service_error(stack: Stack) -> None:
    await serve_calls(stack)
    assert parse_error(await call(stack, b"raise")) == ("500", "user_code_raised")
    assert parse_error(await call(stack, b"big")) == ("502", "answer_unusable")


async def test_a_large_answer_comes_in_pieces_to_who_wants_them(stack: Stack) -> None:
    await serve_calls(stack)
    messages = await pieces(stack, b"big", X_Request_ID="mine")
    assert sum(len(message.data) for message in messages) == BIG_BYTES
    first: dict[str, Any] = messages[0].headers or {}
    assert (first["X-Request-ID"], first["Content-Type"]) == ("mine", "text/big")
    assert all(message.headers is None for message in messages[1:])
    assert messages[-1].data == b""
    small = await pieces(stack, b"small")
    assert [message.data for message in small] == [b"small", b""]
    nothing = await pieces(stack, b"")
    assert [message.data for message in nothing] == [b""]
    assert nothing[0].headers is not None


async def test_an_answer_that_breaks_off_in_pieces_ends_in_an_error(stack: Stack) -> None:
    await serve_calls(stack)
    messages = await pieces(stack, b"break")
    assert len(messages) > 2
    assert parse_error(messages[-2])[0] in ("500", "502")
    assert is_error(messages[-1]), "who reads the end only must see that it is none"


async def test_every_error_in_pieces_has_an_end(stack: Stack) -> None:
    await serve_calls(stack)
    for subject, headers, code in (
        ("serve.call.nothing", {}, "404"),
        (SUBJECT, {"X_Serve_Relative_SLO_MS": "soon"}, "400"),
        (SUBJECT, {"X_Serve_Path": "echo"}, "400"),
    ):
        heard, subscription = await ask_for_pieces(stack, b"{}", subject, **headers)
        assert parse_error(await next_message(heard))[0] == code
        end = await next_message(heard)
        assert (end.data, is_error(end)) == (b"", True)
        await subscription.unsubscribe()


async def test_a_stream_lasts_longer_than_the_deadline_of_its_call(stack: Stack) -> None:
    replica = await serve_calls(stack)
    heard, _ = await ask_for_pieces(stack, b"drip", X_Serve_Relative_SLO_MS="5000")
    assert (await next_message(heard)).data == b"first"
    await asyncio.sleep(5.5)
    assert heard.empty()
    replica.drip(b"second")
    replica.drip(b"third", last=True)
    assert [(await next_message(heard)).data for _ in range(3)] == [b"second", b"third", b""]


async def test_a_stream_stops_when_its_caller_leaves(stack: Stack) -> None:
    replica = await serve_calls(stack)
    heard, subscription = await ask_for_pieces(stack, b"drip")
    await next_message(heard)
    await subscription.unsubscribe()
    await stack.client.flush()
    assert not replica.cancelled
    replica.drip(b"second")
    async with asyncio.timeout(10):
        await replica.wait(lambda: bool(replica.cancelled))
    await stack.until_shown('code="499"')


async def test_a_stream_whose_pieces_flow_stops_within_a_second_when_its_callers_connection_closes(
    stack: Stack,
) -> None:
    replica = await serve_calls(stack)
    caller = await nats.connect(stack.server.url)
    heard: asyncio.Queue[Msg] = asyncio.Queue()
    inbox = caller.new_inbox()
    await caller.subscribe(inbox, cb=heard.put)
    await caller.publish(SUBJECT, b"drip", reply=inbox, headers={"X-Serve-Stream": "1"})

    async def drip() -> None:
        while True:
            await asyncio.sleep(0.1)
            replica.drip(b"more")

    async with asyncio.TaskGroup() as tasks:
        dripping = tasks.create_task(drip())
        for _ in range(3):
            await next_message(heard)
        assert not replica.cancelled
        await caller.close()
        left_at = asyncio.get_running_loop().time()
        async with asyncio.timeout(10):
            await replica.wait(lambda: bool(replica.cancelled))
        dripping.cancel()
    assert asyncio.get_running_loop().time() - left_at < 1


async def test_a_silent_stream_stops_within_a_second_when_its_caller_takes_heartbeats(stack: Stack) -> None:
    replica = await serve_calls(stack)
    heard, subscription = await ask_for_pieces(stack, b"drip", X_Serve_Stream="heartbeat")
    assert (await next_message(heard)).data == b"first"
    for _ in range(2):
        beat = await next_message(heard)
        assert (beat.data, (beat.headers or {}).get("X-Serve-Heartbeat")) == (b"", "1")
    assert not replica.cancelled
    await subscription.unsubscribe()
    await stack.client.flush()
    left_at = asyncio.get_running_loop().time()
    await replica.wait(lambda: bool(replica.cancelled))
    assert asyncio.get_running_loop().time() - left_at < 5, "half a second where the machine has time"


async def test_a_stream_without_heartbeats_is_not_silent_for_longer_than_the_request_timeout(
    stack: Stack,
) -> None:
    replica = await serve_calls(stack)
    await stack.applied(await stack.put_http(request_timeout_s=2.0))
    heard, _ = await ask_for_pieces(stack, b"drip", X_Serve_Relative_SLO_MS="1900")
    assert (await next_message(heard)).data == b"first"
    assert parse_error(await next_message(heard)) == ("504", "deadline_exceeded")
    assert (await next_message(heard)).data == b""
    await replica.wait(lambda: bool(replica.cancelled))


async def test_a_call_says_method_path_and_query(stack: Stack) -> None:
    await serve_calls(stack)

    async def head(**headers: str) -> list[Any]:
        return json.loads((await call(stack, b"head", **headers)).data)

    assert await head() == ["POST", "", "/", "", ["content-type"]]
    assert await head(X_Serve_Method="PUT", X_Serve_Path="/items/a%20b", X_Serve_Query="q=1&q=2", X_Own="1") == [
        "PUT", "", "/items/a%20b", "q=1&q=2", ["x-own", "content-type"],
    ]  # fmt: skip
    assert (await head(X_Serve_Path="/items?q=%3F"))[2:4] == ["/items", "q=%3F"]
    for headers, field in (
        ({"X_Serve_Method": "BREW"}, "X-Serve-Method"),
        ({"X_Serve_Path": "items"}, "X-Serve-Path"),
        ({"X_Serve_Path": "/a b"}, "X-Serve-Path"),
        ({"X_Serve_Path": "/a#b"}, "X-Serve-Path"),
        ({"X_Serve_Path": "/\u00e4"}, "X-Serve-Path"),
        ({"X_Serve_Path": "/" + "a" * 9000}, "X-Serve-Path"),
        ({"X_Serve_Path": "/a?b", "X_Serve_Query": "c"}, "X-Serve-Query"),
    ):
        refused = await call(stack, b"head", **headers)
        assert parse_error(refused) == ("400", "bad_request"), headers
        assert field in json.loads(refused.data)["error"]["message"]


async def test_the_gateway_answers_into_inboxes_only(stack: Stack) -> None:
    await serve_calls(stack)
    heard: list[Msg] = []

    async def hear(message: Msg) -> None:
        heard.append(message)

    await stack.client.subscribe("serve.report.>", cb=hear)
    own = {message.subject for message in heard}
    for body in (b"{}", b"raise"):
        await stack.client.publish(SUBJECT, body, reply="serve.report.host.victim")
    await call(stack, b"")  # what was sent before has been handled
    await stack.client.flush()
    assert {message.subject for message in heard} - own <= {"serve.report.proxy.proxy-1"}
