"""Plain NATS calls of endpoints: what a caller may say, and every kind of answer."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from nats.aio.msg import Msg

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
    """All messages of an answer in pieces, the empty or failed one that ends it included."""
    heard: asyncio.Queue[Msg] = asyncio.Queue()
    inbox = stack.client.new_inbox()
    subscription = await stack.client.subscribe(inbox, cb=heard.put)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    await stack.client.publish(SUBJECT, body, reply=inbox, headers={"X-Serve-Stream": "1", **named})
    messages: list[Msg] = []
    async with asyncio.timeout(30):
        while not messages or (messages[-1].data and not is_error(messages[-1])):
            messages.append(await heard.get())
    await subscription.unsubscribe()
    return messages


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
    assert len(messages) > 1
    assert is_error(messages[-1])
    assert parse_error(messages[-1])[0] in ("500", "502")


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
