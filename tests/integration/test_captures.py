"""Captures: what a running proxy publishes of requests, and what is read of the stream that retains it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import msgspec
import pytest
from nats.js.errors import NotFoundError

from muster.client.captures import CaptureReader
from muster.client.nats import NatsRequests
from muster.client.requests import StackAddress
from serve_common.config.capture import CaptureConfig
from serve_common.names import EndpointTag
from serve_common.protocol.captures import BodyState, CapturedMessage, CapturedPair
from serve_controller.adapters.jetstream import EventStream, capture_stream_config
from serve_proxy.shell import captures
from tests.support.servers.nats_server import NatsServer
from tests.support.stacks.proxy_stack import R0, TAG, Stack, running_stack

ALL = CaptureConfig(share=1, bodies=True, redact=["$.user", "$..mail"], redact_headers=["x-team"])


@pytest.fixture
async def stack(shared_server: NatsServer) -> AsyncIterator[Stack]:
    """A proxy with one replica that echoes bodies, and the stream of captures."""
    async with running_stack(shared_server) as stack:
        await stack.serve(R0)
        jetstream = stack.client.jetstream()
        await jetstream.add_stream(capture_stream_config(stack.subjects))
        yield stack
        await jetstream.delete_stream(stack.subjects.capture_stream)
        await jetstream.delete_key_value(stack.subjects.bucket)


async def capture(stack: Stack, config: CaptureConfig | None) -> None:
    await stack.applied(await stack.put_endpoint(capture=config))


async def read(stack: Stack, limit: int = 100, tag: str = TAG) -> list[CapturedPair]:
    requests = NatsRequests(StackAddress(urls=(stack.server.url,)))
    try:
        return await CaptureReader(requests, stack.subjects, EndpointTag(tag)).read(limit)
    finally:
        await requests.close()


async def captured(stack: Stack, count: int = 1) -> list[CapturedPair]:
    """The captured requests, once there are so many."""
    async with asyncio.timeout(30):
        while len(pairs := await read(stack)) < count:  # noqa: ASYNC110 - a stream tells nobody
            await asyncio.sleep(0.02)
    assert len(pairs) == count
    return pairs


async def test_nothing_is_captured_unless_it_is_switched_on(stack: Stack) -> None:
    await stack.get("/echo", "POST", data=b"{}")
    await capture(stack, CaptureConfig(share=1))
    await stack.get("/echo/second", "POST", data=b"{}")
    [pair] = await captured(stack)
    await capture(stack, None)
    await stack.get("/echo", "POST", data=b"{}")
    await stack.until_shown('serve_proxy_captured_requests_total{outcome="published"} 1.0')
    assert (pair.path, pair.request.body, pair.request.body_bytes) == ("/second", b"", 2)
    assert pair.request.state is pair.response.state is BodyState.OFF
    assert await captured(stack) == [pair]


async def test_a_request_is_redacted_before_it_leaves_the_proxy(stack: Stack) -> None:
    await capture(stack, ALL)
    body = {"user": "s3cret", "n": 1, "to": [{"mail": "s3cret"}]}
    headers = {
        "Authorization": "Bearer s3cret", "Cookie": "id=s3cret", "X-Api-Key": "s3cret", "X-Team": "s3cret",
        "Content-Type": "application/json", "X-Other": "seen",
    }  # fmt: skip
    status, answer, _ = await stack.get("/echo/a?n=1&token=s3cret", "POST", json=body, headers=headers)
    assert (status, json.loads(answer)) == (200, body)  # its client gets all of it
    [pair] = await captured(stack)
    assert b"s3cret" not in msgspec.json.encode(pair)
    assert b"czNjcmV0" not in msgspec.json.encode(pair)
    assert (pair.endpoint_tag, pair.backend_tag, pair.method) == (TAG, TAG, "POST")
    assert (pair.path, pair.query, pair.status) == ("/a", "n=1&token=redacted", 200)
    assert json.loads(pair.request.body) == {"user": "redacted", "n": 1, "to": [{"mail": "redacted"}]}
    assert pair.response.body == pair.request.body
    shown = dict(pair.request.headers)
    assert shown["authorization"] == shown["cookie"] == shown["x-api-key"] == shown["x-team"] == "redacted"
    assert shown["x-other"] == "seen"


async def test_a_body_that_cannot_be_redacted_or_is_large_or_comes_in_pieces_is_left_out(
    stack: Stack,
) -> None:
    await capture(stack, ALL)
    await stack.get("/echo", "POST", data=b"user=s3cret")
    await stack.get("/echo", "POST", data=b'"' + b"x" * 70_000 + b'"')
    await stack.get("/echo/big?600000")
    plain, large, streamed = await captured(stack, 3)
    assert (plain.request.state, plain.request.body, plain.request.body_bytes) == (
        BodyState.NOT_JSON,
        b"",
        11,
    )
    assert (large.request.state, large.request.body, large.request.body_bytes) == (
        BodyState.TOO_LARGE, b"", 70_002,
    )  # fmt: skip
    assert streamed.response.state is BodyState.STREAMED


async def test_a_call_over_nats_is_captured_and_a_replayed_one_is_not(stack: Stack) -> None:
    await capture(stack, CaptureConfig(share=1, bodies=True))
    subject = stack.subjects.call(EndpointTag(TAG))
    await stack.client.request(subject, b"one", headers={"X-Serve-Replay": "1"}, timeout=30)
    await stack.client.request(subject, b"two", timeout=30)
    [pair] = await captured(stack)
    assert pair.request.body == pair.response.body == b"two"


async def test_without_nats_or_with_too_many_at_once_requests_go_on_and_captures_are_dropped(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captures, "WAITING_MAX", 0)
    await capture(stack, ALL)
    assert (await stack.get("/echo", "POST", data=b"{}"))[0] == 200
    await stack.until_shown('serve_proxy_captured_requests_total{outcome="dropped"} 1.0')
    assert await read(stack) == []


async def test_the_newest_of_an_endpoint_are_read_among_those_of_others(stack: Stack) -> None:
    message = CapturedMessage()

    def pair(tag: str, number: int) -> bytes:
        return msgspec.json.encode(
            CapturedPair(
                at=float(number), request_id=str(number), endpoint_tag=tag, backend_tag=tag, method="GET",
                path="/", request=message, status=200, response=message,
            )
        )  # fmt: skip

    jetstream = stack.client.jetstream()
    for number in range(60):
        tag = EndpointTag("default/other" if number % 3 else "default/mine")
        await jetstream.publish(stack.subjects.capture(tag), pair(tag, number))
    await jetstream.publish(stack.subjects.capture(EndpointTag("default/mine")), b"of a newer version")
    for limit in (1, 2, 7, 20, 21, 1000):
        found = [int(one.request_id) for one in await read(stack, limit, "default/mine")]
        assert found == list(range(0, 60, 3))[max(0, 21 - limit) :], limit
    assert await read(stack, 5, "default/nobody") == []


async def test_without_a_stream_there_is_nothing_to_read_and_the_leader_makes_one(stack: Stack) -> None:
    jetstream = stack.client.jetstream()
    await jetstream.delete_stream(stack.subjects.capture_stream)
    assert await read(stack) == []
    events = EventStream(stack.client, stack.subjects)
    events.start()
    try:
        async with asyncio.timeout(30):
            while True:
                try:
                    info = await jetstream.stream_info(stack.subjects.capture_stream)
                    break
                except NotFoundError:
                    await asyncio.sleep(0.02)
    finally:
        await events.close()
        await jetstream.delete_stream(stack.subjects.event_stream)
    assert info.config.max_bytes == 64 * 1024 * 1024
    assert info.config.max_age == 24 * 3600
