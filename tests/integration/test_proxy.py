"""A whole proxy against a real nats-server and replicas that speak real frames."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
from typing import Any

import aiohttp
import nats
import pytest

from serve_common.errors import BusUnavailable
from serve_common.names import EndpointTag
from serve_common.nats.bucket_watch import BucketWatch
from serve_common.protocol.frames import FRAME_BODY_BYTES_MAX, RequestKind
from serve_common.protocol.subjects import endpoint_key
from serve_proxy.shell import reports
from tests.support.servers.nats_server import NatsServer
from tests.support.stacks.proxy_stack import MIB, R0, R1, TAG, Stack, running_stack
from tests.support.stacks.raw_peers import raw_connection
from tests.support.waiting import eventually

R2 = f"{TAG}#2"


async def test_requests_are_routed_and_errors_are_json(stack: Stack) -> None:
    (replica,) = await stack.serve(R0)
    status, body, headers = await stack.get(
        "/echo/a%2Fb?x=1", "POST", data=b"hi", headers={"X-Request-ID": "mine", "traceparent": "00-a-b-01"}
    )
    assert (status, body, headers["x-replica"], headers["X-Request-ID"]) == (200, b"hi", R0, "mine")
    head = replica.seen[-1]
    assert (head.method, head.path, head.query, head.route) == ("POST", "/echo/a%2Fb", "x=1", "/echo")
    assert (head.request_id, head.traceparent) == ("mine", "00-a-b-01")

    status, body, headers = await stack.get("/nowhere")
    error = json.loads(body)["error"]
    assert (status, error["code"], error["request_id"]) == (404, "no_route", headers["X-Request-ID"])
    assert "/nowhere" in error["message"]
    status, _, headers = await stack.get("/echo", "PUT")
    assert (status, headers["Allow"]) == (405, "GET, POST, HEAD")
    status, body, _ = await stack.get("/echo/raise")
    assert (status, json.loads(body)["error"]["message"]) == (500, "ValueError: no")
    assert (await stack.get("/-/routes"))[:2] == (200, b'{"/echo":"default/echo"}')
    status, _, headers = await stack.get("/-/healthz", headers={"X-Request-ID": "h"})
    assert (status, headers["X-Request-ID"]) == (200, "h")
    assert (await stack.get("/-/secret"))[0] == 404
    assert (await stack.get("/echo?418"))[0] == 418


async def test_what_headers_tell_the_proxy_reaches_the_replica_or_is_refused_by_name(stack: Stack) -> None:
    (replica,) = await stack.serve(R0)
    told = {"serve_multiplexed_model_id": "m1", "X-Serve-Relative-SLO-MS": "20000"}
    for data in (b"", iter_of(b"slow")):  # the short way and the long one
        assert (await stack.get("/echo", "POST", data=data, headers=told))[0] == 200
        head = replica.seen[-1]
        assert head.call is not None
        assert head.call.model_id == "m1"
        assert head.timeout_s <= 20.0
    status, body, headers = await stack.get("/echo", headers={"X-Request-Timeout-Seconds": "soon"})
    assert (status, headers["Content-Type"]) == (400, "application/problem+json")
    assert "x-request-timeout-seconds" in json.loads(body)["detail"]
    status, body, _ = await stack.get("/echo", headers={"X-Serve-Absolute-SLO-MS": "1000"})
    assert (status, json.loads(body)["code"]) == (504, "deadline_exceeded")
    assert len(replica.seen) == 2


async def iter_of(data: bytes):
    yield data


async def test_before_the_bucket_exists_the_proxy_is_not_ready_and_requests_wait(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = BucketWatch._get_state
    is_filled = False

    async def find_filled(watch: BucketWatch) -> Any:
        """What is empty says that there is no route, and between its making and the first entry this bucket is."""
        stream = await find(watch)
        if not is_filled:
            raise BusUnavailable("not yet")
        return stream

    monkeypatch.setattr(BucketWatch, "_get_state", find_filled)
    async with running_stack(server) as stack:
        ready = f"http://127.0.0.1:{stack.proxy.operations.port}/readyz"
        async with stack.session.get(ready) as response:
            assert response.status == 503
        status, _, headers = await stack.get("/-/healthz")
        assert (status, headers["Retry-After"]) == (503, "1")
        async with asyncio.TaskGroup() as group:
            early = group.create_task(stack.get("/echo", "POST", data=b"early"))
            await stack.add_replica(R0)
            await stack.create_bucket()
            await stack.put_endpoint()
            filled = await stack.put_backend(R0)
            assert not early.done()
            is_filled = True
            await stack.applied(filled)
        assert early.result()[:2] == (200, b"early")
        await stack.reachable()
        async with stack.session.get(ready) as response:
            assert response.status == 200


async def test_large_bodies_go_both_ways_in_pieces(stack: Stack) -> None:
    (replica,) = await stack.serve(R0)
    body = os.urandom(5 * MIB + 17)
    status, echoed, _ = await stack.get("/echo", "POST", data=io.BytesIO(body))
    assert (
        status == 200 or echoed
    )  # the echo answers in one frame only when it fits; the upload is what counts
    assert replica.bodies[-1] == body
    size = 9 * FRAME_BODY_BYTES_MAX + 5
    status, streamed, headers = await stack.get(f"/echo/big?{size}")
    assert (status, len(streamed), headers["Transfer-Encoding"]) == (200, size, "chunked")
    status, streamed, headers = await stack.get(f"/echo/big-sized?{size}")
    assert (status, len(streamed), headers["Content-Length"]) == (200, size, str(size))


async def test_a_body_that_is_too_large_is_refused_announced_or_not(stack: Stack) -> None:
    (replica,) = await stack.serve(R0)
    status, body, _ = await stack.get("/echo", "POST", data=io.BytesIO(bytes(11 * MIB)))
    assert (status, json.loads(body)["error"]["code"]) == (413, "body_too_large")
    assert not replica.seen

    async def chunks():
        for _ in range(11):
            yield bytes(MIB)

    status, body, _ = await stack.get("/echo", "POST", data=chunks())
    assert (status, json.loads(body)["error"]["code"]) == (413, "body_too_large")
    await replica.wait(lambda: replica.cancelled == ["/echo"])
    assert not replica.bodies
    status, _, _ = await stack.get(
        "/echo", "POST", data=io.BytesIO(b"x" * MIB), headers={"Expect": "100-continue"}
    )
    assert replica.bodies[-1] == b"x" * MIB


async def test_a_client_that_leaves_gives_its_slot_to_the_next(stack: Stack) -> None:
    (replica,) = await stack.serve(R0, limit=1)
    async with asyncio.TaskGroup() as group:
        leaving = group.create_task(stack.get("/echo/hold"))
        await replica.wait(lambda: len(replica.held) == 1)
        leaving.cancel()
    await replica.wait(lambda: replica.cancelled == ["/echo/hold"])
    assert (await stack.get("/echo"))[0] == 200


async def test_requests_wait_while_all_are_busy_and_a_full_queue_is_503(stack: Stack) -> None:
    (replica,) = await stack.serve(R0, limit=1, queue=1)
    async with asyncio.TaskGroup() as group:
        held = group.create_task(stack.get("/echo/hold"))
        await replica.wait(lambda: len(replica.held) == 1)
        waiting = group.create_task(stack.get("/echo"))
        await stack.queued()
        status, body, headers = await stack.get("/echo")
        assert (status, headers["Retry-After"]) == (503, "1")
        assert json.loads(body)["error"]["code"] == "queue_full"
        replica.release()
    assert held.result()[:2] == (200, b"released")
    assert waiting.result()[0] == 200


async def test_a_replica_that_dies_fails_over_what_may_run_twice(stack: Stack) -> None:
    (first,) = await stack.serve(R0)
    async with asyncio.TaskGroup() as group:
        repeatable = group.create_task(stack.get("/echo/hold"))
        fragile = group.create_task(stack.get("/echo/hold", "POST"))
        keyed = group.create_task(stack.get("/echo/hold", "POST", headers={"Idempotency-Key": "k"}))
        await first.wait(lambda: len(first.held) == 3)
        others = [await stack.add_replica(tag) for tag in (R1, R2)]
        await stack.applied(await stack.put_backend(R0, R1, R2))
        await first.close()
        assert (await fragile)[0] == 502
        assert json.loads(fragile.result()[1])["error"]["code"] == "replica_died"
        await eventually(lambda: sum(len(other.held) for other in others) >= 2)
        for other in others:
            other.release()
    assert [task.result()[0] for task in (repeatable, keyed)] == [200, 200]
    for _ in range(20):  # the dead one is not chosen again, or is found out and passed over
        assert (await stack.get("/echo", "POST"))[0] == 200


async def test_a_lost_answer_is_found_by_a_probe(stack: Stack) -> None:
    (replica,) = await stack.serve(R0)
    async with asyncio.TaskGroup() as group:
        lost = group.create_task(stack.get("/echo/hold", "POST"))
        await replica.wait(lambda: len(replica.held) == 1)
        replica.forget()
    assert lost.result()[0] == 502
    assert replica.probes > 0


async def test_a_rolling_replacement_under_load_loses_nothing(stack: Stack) -> None:
    (first,) = await stack.serve(R0, limit=4)
    is_over = False
    statuses: list[int] = []

    async def client() -> None:
        while not is_over:
            statuses.append((await stack.get("/echo", "POST", data=b"x"))[0])

    async with asyncio.TaskGroup() as group:
        for _ in range(8):
            group.create_task(client())
        for number in range(1, 6):
            tag = f"{TAG}#{number}"
            replica = await stack.add_replica(tag)
            await stack.applied(await stack.put_backend(tag, draining=[first.tag], limit=4))
            first.is_draining = True
            await stack.came(first)  # what was still on its way to it was refused
            assert not first.held
            await stack.applied(await stack.put_backend(tag, limit=4))
            await first.close()
            await replica.wait(lambda new=replica: len(new.seen) > 10)
            first = replica
        is_over = True
    assert set(statuses) == {200}
    assert len(statuses) > 50


async def test_nats_may_die_and_come_back(stack: Stack) -> None:
    (replica,) = await stack.serve(R0)
    async with asyncio.TaskGroup() as group:
        across = group.create_task(stack.get("/echo/hold", "POST"))
        await replica.wait(lambda: len(replica.held) == 1)
        stack.server.kill()
        async with asyncio.timeout(30):
            while (await stack.get("/-/healthz"))[0] == 200:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        during = group.create_task(stack.get("/echo", "POST", data=b"during"))
        await asyncio.sleep(0.1)
        assert not during.done()
        stack.server.start()
        assert (await during)[:2] == (200, b"during")
        await replica.wait(lambda: replica.probes > 0)
        replica.release(b"still here")
    assert across.result()[:2] == (200, b"still here")
    snapshot_id = None
    async with asyncio.timeout(30):
        while snapshot_id is None:
            with contextlib.suppress(nats.errors.Error):
                snapshot_id = await stack.put_endpoint(route="/moved")
    await stack.applied(snapshot_id)
    assert (await stack.get("/moved"))[0] == 200
    assert (await stack.get("/echo"))[0] == 404


async def test_without_nats_requests_get_503_after_a_bounded_wait(stack: Stack) -> None:
    await stack.serve(R0)
    stack.proxy._dispatcher._pending_reconnect._bus_wait_s = 0.2
    stack.server.kill()
    await eventually(lambda: not stack.proxy._bus.is_connected)
    status, body, headers = await stack.get("/echo", "POST")
    assert (status, headers["Retry-After"]) == (503, "1")
    assert json.loads(body)["error"]["code"] == "bus_unavailable"


async def test_an_endpoint_that_vanishes_answers_404_at_once_to_those_who_wait(stack: Stack) -> None:
    await stack.serve()
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(stack.get("/echo"))
        await stack.queued()
        await stack.put(endpoint_key(EndpointTag(TAG)), None)
        status, body, _ = await waiting
    assert status == 404
    assert "gone" in json.loads(body)["error"]["message"]


async def test_any_nats_client_can_call_an_endpoint(stack: Stack) -> None:
    (replica,) = await stack.serve(R0)
    reply = await stack.client.request("serve.call.default.echo", b'{"a":1}', timeout=20)
    assert (reply.data, reply.headers["Content-Type"]) == (b'{"a":1}', "text/plain")
    head = replica.seen[-1]
    assert (head.method, head.path, head.route, head.kind) == ("POST", "/", "", RequestKind.HTTP)
    assert (b"content-type", b"application/json") in head.headers
    reply = await stack.client.request(
        "serve.call.echo", b"x", timeout=20, headers={"Content-Type": "text/x"}
    )
    assert (b"content-type", b"text/x") in replica.seen[-1].headers
    reply = await stack.client.request("serve.call.nobody", b"", timeout=20)
    assert reply.headers["Nats-Service-Error-Code"] == "404"
    assert "default/nobody" in reply.headers["Nats-Service-Error"]
    assert json.loads(reply.data)["error"]["code"] == "not_found"


async def test_reports_come_at_once_on_change_and_to_a_new_leader(server: NatsServer, monkeypatch) -> None:
    monkeypatch.setattr(reports, "REPORT_INTERVAL_S", 3600.0)
    async with running_stack(server) as stack:
        await stack.serve(R0)
        await stack.applied(await stack.put_backend(R0, R1))
        last = stack.reports[-1]
        assert last.address in stack.url
        sequences = [report.sequence for report in stack.reports]
        assert sequences == sorted(set(sequences))
        await stack.client.publish(stack.subjects.leader, b"{}")
        await stack.report(lambda report: report.sequence > last.sequence)


async def test_draining_finishes_what_is_in_flight_and_closes_the_rest(stack: Stack) -> None:
    (replica,) = await stack.serve(R0)
    async with asyncio.TaskGroup() as group:
        held = group.create_task(stack.get("/echo/hold"))
        await replica.wait(lambda: len(replica.held) == 1)
        draining = group.create_task(stack.proxy.drain())
        await stack.report(lambda report: report.leaving)
        async with stack.session.get(f"http://127.0.0.1:{stack.proxy.operations.port}/readyz") as response:
            assert (response.status, await response.text()) == (503, "draining\n")
        with pytest.raises(aiohttp.ClientConnectorError):
            async with aiohttp.ClientSession() as session, session.get(stack.url + "/echo"):
                pass
        await stack.proxy._bus.flush(20)
        with pytest.raises(nats.errors.NoRespondersError):
            await stack.client.request("serve.call.default.echo", b"", timeout=2)
        assert not draining.done()
        replica.release()
        status, _, headers = await held
        assert (status, headers["Connection"]) == (200, "close")


async def test_a_request_that_waits_to_be_read_when_its_connection_was_idle_for_too_long_is_answered(
    stack: Stack,
) -> None:
    await stack.serve(R0)
    async with raw_connection(stack.url) as (reader, writer):
        for is_late in (False, True):
            writer.write(b"POST /echo HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\nhi")
            if is_late:  # a process that stood still meets its timers before it reads
                (connection,) = stack.proxy.http._http.connections
                connection._next_keepalive_close_time = asyncio.get_running_loop().time()
                connection._process_keepalive()
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
            assert head.startswith(b"HTTP/1.1 200")
            assert await reader.readexactly(2) == b"hi"


async def test_a_slow_replica_is_a_504_and_is_told(server: NatsServer) -> None:
    async with running_stack(server, request_timeout_s=0.5) as stack:
        (replica,) = await stack.serve(R0)
        status, body, _ = await stack.get("/echo/hold")
        assert (status, json.loads(body)["error"]["code"]) == (504, "deadline_exceeded")
        await replica.wait(lambda: replica.cancelled == ["/echo/hold"])
