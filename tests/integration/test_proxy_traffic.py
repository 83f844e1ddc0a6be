"""Shadows and shifts of traffic through a real proxy and a real nats-server."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from serve_common.config.endpoint import EndpointOptions
from serve_common.dispatch.shadows import SHADOWS_PER_BACKEND_MAX
from serve_common.names import BackendTag
from serve_common.protocol.subjects import backend_key
from tests.integration.proxy_stack import MIB, R0, TAG, NatsServer, Stack, running_stack

pytestmark = pytest.mark.integration

OLD, NEW = BackendTag(TAG), BackendTag("default/new")
N0 = "default/new#7"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path)
    server.start()
    yield server
    server.close()


@pytest.fixture
async def stack(server: NatsServer) -> AsyncIterator[Stack]:
    async with running_stack(server) as stack:
        yield stack


async def shadow_metric(stack: Stack, outcome: str) -> float:
    labels = f'{{backend_tag="{NEW}",endpoint_tag="{TAG}",outcome="{outcome}"}}'
    for line in (await stack.metrics()).splitlines():
        if line.startswith(f"serve_proxy_shadow_requests_total{labels}"):
            return float(line.split()[-1])
    return 0.0


async def until_shadows(stack: Stack, outcome: str, count: int) -> None:
    async with asyncio.timeout(30):
        while await shadow_metric(stack, outcome) < count:  # noqa: ASYNC110 - a metric tells nobody
            await asyncio.sleep(0.02)


async def test_a_shadow_sees_what_the_real_backend_sees_and_its_answers_are_dropped(stack: Stack) -> None:
    (real,) = await stack.serve(R0)
    shadow = await stack.add_replica(N0)
    await stack.put_backend(N0, tag=NEW)
    await stack.applied(await stack.put_endpoint(shadows={NEW: 1.0}))
    body = b"x" * (2 * MIB + 1)
    for path, sent, expected, outcome, count in (
        ("/echo?201", b"a", 201, "answered", 1),
        ("/echo/raise", b"b", 500, "error", 1),
        (f"/echo/big?{2 * MIB}", b"c", 200, "answered", 2),
        ("/echo", body, 200, "answered", 3),
    ):
        status, _, headers = await stack.get(
            path, "POST", data=iter_of(sent), headers={"X-Request-ID": "same"}
        )
        assert status == expected
        if "x-replica" in headers:
            assert headers["x-replica"] == R0
        await until_shadows(stack, outcome, count)  # copies are in no order among each other
    assert shadow.bodies == real.bodies
    assert [head.path for head in shadow.seen] == [head.path for head in real.seen]
    assert {head.request_id for head in shadow.seen} == {"same"}
    reply = await stack.client.request("serve.call.default.echo", b"by NATS", timeout=20)
    assert reply.data == b"by NATS"
    await until_shadows(stack, "answered", 4)
    await stack.applied(await stack.put_endpoint())
    await stack.get("/echo")
    assert len(shadow.seen) == 5


async def iter_of(body: bytes):
    for at in range(0, len(body), MIB):
        yield body[at : at + MIB]


async def test_a_shadow_that_hangs_or_dies_neither_delays_nor_fails_a_request(stack: Stack) -> None:
    await stack.serve(R0)
    shadow = await stack.add_replica(N0, limit=5)
    await stack.put_backend(N0, tag=NEW, limit=5, queue=0)
    await stack.applied(await stack.put_endpoint(shadows={NEW: 1.0}))
    shadow._work = lambda held: (
        None
    )  # never answers, and a single request that waited for it would fail the test
    statuses = [(await stack.get("/echo", "POST", data=b"x"))[0] for _ in range(300)]
    assert set(statuses) == {200}
    await until_shadows(stack, "skipped", 300 - SHADOWS_PER_BACKEND_MAX)
    await shadow.close()
    statuses = [(await stack.get("/echo", "POST", data=b"x"))[0] for _ in range(50)]
    assert set(statuses) == {200}
    await stack.put(backend_key(NEW), None)
    await until_shadows(stack, "failed", SHADOWS_PER_BACKEND_MAX)
    assert (await stack.get("/echo", "POST", data=b"x"))[0] == 200


async def test_a_header_selects_a_backend_that_has_no_weight_and_an_unknown_one_is_refused(
    stack: Stack,
) -> None:
    (old,) = await stack.serve(R0)
    new = await stack.add_replica(N0)
    await stack.put_backend(N0, tag=NEW)
    await stack.applied(
        await stack.put_endpoint(traffic={OLD: 1.0, NEW: 0.0}, options=EndpointOptions(backend_header="X-To"))
    )
    for value, serves in (("default/new", new), ("new", new), (OLD, old), ("", old)):
        before = len(serves.seen)
        status, _, _ = await stack.get("/echo", headers={"x-to": value})
        reply = await stack.client.request(
            "serve.call.default.echo", b"x", timeout=20, headers={"X-To": value}
        )
        assert (status, reply.data, len(serves.seen) - before) == (200, b"x", 2)
    message = "X-To: 'other' is no backend of endpoint 'default/echo'"
    status, body, _ = await stack.get("/echo", headers={"x-to": "other"})
    error = json.loads(body)["error"]
    assert (status, error["code"], error["message"]) == (400, "bad_field", message)
    reply = await stack.client.request("serve.call.default.echo", b"x", timeout=20, headers={"X-To": "other"})
    error = json.loads(reply.data)["error"]
    assert (error["code"], error["message"]) == ("bad_field", message)


async def test_a_shift_under_load_with_a_full_queue_loses_nothing(stack: Stack) -> None:
    (old,) = await stack.serve(R0, limit=2)
    new = await stack.add_replica(N0)
    await stack.put_backend(N0, tag=NEW, limit=2)
    statuses: Counter[tuple[int, str]] = Counter()
    is_over = False

    async def client() -> None:
        while not is_over:
            status, _, headers = await stack.get("/echo", "POST", data=b"x")
            statuses[status, headers.get("x-replica", "")] += 1

    async with asyncio.TaskGroup() as group:
        held = [group.create_task(stack.get("/echo/hold", "POST")) for _ in range(2)]
        await old.wait(lambda: len(old.held) == 2)
        for _ in range(16):
            group.create_task(client())
        await stack.queued(16)  # all wait for the old backend, which has no room
        await stack.applied(await stack.put_endpoint(traffic={NEW: 1.0}))
        await new.wait(lambda: len(new.seen) > 50)
        old.release()
        for share in (0.5, 0.0, 1.0, 0.5, 1.0):
            traffic = {OLD: 1 - share, NEW: share}
            seen = len(old.seen) + len(new.seen)
            await stack.applied(await stack.put_endpoint(traffic=traffic))
            both = (old, new) if share < 1 else (new, old)
            await both[0].wait(lambda seen=seen: len(old.seen) + len(new.seen) > seen + 50)
        # As a controller would after a shift: drain, stop, forget.
        await stack.applied(await stack.put_backend(draining=[R0], limit=2))
        await stack.came(old)
        await stack.applied(await stack.put_backend(limit=2))
        is_over = True
    assert [task.result()[0] for task in held] == [200, 200]
    assert {status for status, _ in statuses} == {200}
    assert {replica for _, replica in statuses} == {R0, N0}
    assert statuses.total() > 300
