"""HTTP options that change while a proxy serves, and middlewares of users around real requests."""

from __future__ import annotations

import asyncio
import io
import json
import os
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest

from serve_common.config.backend import HttpOptions
from serve_common.protocol.subjects import HTTP_KEY
from serve_proxy.wiring import Proxy
from tests.support.servers.nats_server import NatsServer
from tests.support.stacks.proxy_stack import MIB, R0, Stack, make_settings, running_stack

MODULE = """
import asyncio
import threading

from aiohttp import web

imported_in = threading.current_thread().name

def signing(name):
    async def middleware(request, handler):
        response = await handler(request)
        if not response.prepared:
            response.headers["X-Signed"] = response.headers.get("X-Signed", "") + name
        return response
    return middleware

outer, inner = signing("o"), signing("i")

async def guard(request, handler):
    if request.headers.get("Authorization") != "secret":
        raise web.HTTPUnauthorized(text="who are you", headers={"WWW-Authenticate": "Basic"})
    return await handler(request)

async def reads(request, handler):
    body = await request.read()
    response = await handler(request)
    if not response.prepared:
        response.headers["X-Length"] = str(len(body))
    return response

async def rewrites(request, handler):
    return await handler(request.clone(rel_url="/echo/rewritten?418"))

async def returns_nothing(request, handler):
    await handler(request)

async def fails(request, handler):
    if "after" in request.path_qs:
        await handler(request)
    if "refused" in request.path_qs:
        raise ConnectionRefusedError("the auth service is away")
    raise ValueError("a defect")

async def breaks(request, handler):
    response = web.StreamResponse()
    await response.prepare(request)
    await response.write(b"first")
    raise ValueError("a defect")

async def hangs(request, handler):
    await asyncio.sleep(60)
"""


@pytest.fixture
def directory(tmp_path: Path, monkeypatch) -> Iterator[Path]:
    """Where middlewares are looked for."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    directory = tmp_path / "middlewares"
    directory.mkdir()
    (directory / "live_http_middlewares.py").write_text(MODULE)
    yield directory
    sys.modules.pop("live_http_middlewares", None)


@pytest.fixture
async def stack(server: NatsServer, directory: Path) -> AsyncIterator[Stack]:
    async with running_stack(server, middleware_dir=str(directory)) as stack:
        yield stack


def named(*names: str) -> list[str]:
    return [f"live_http_middlewares:{name}" for name in names]


async def use(stack: Stack, *names: str, **options) -> None:
    snapshot_id = await stack.put_http(middlewares=named(*names), **options)
    await stack.applied(snapshot_id)
    assert not stack.reports[-1].http_error


async def test_timeout_and_body_limit_hold_for_requests_that_arrive_after_the_change(stack: Stack) -> None:
    (replica,) = await stack.serve(R0)
    async with asyncio.TaskGroup() as group:
        early = group.create_task(stack.get("/echo/hold", "POST", data=b"early"))
        await replica.wait(lambda: len(replica.held) == 1)
        await use(stack, request_timeout_s=0.3)
        status, body, _ = await stack.get("/echo/hold2")
        assert (status, json.loads(body)["error"]["code"]) == (504, "deadline_exceeded")
        await use(stack, request_timeout_s=20.0, body_bytes_max=1000)
        status, body, _ = await stack.get("/echo", "POST", data=b"x" * 1001)
        assert (status, json.loads(body)["error"]["code"]) == (413, "body_too_large")
        assert (await stack.get("/echo", "POST", data=b"x" * 1000))[0] == 200
        assert not early.done()
        replica.release()
    assert early.result()[:2] == (200, b"released")
    reply = await stack.client.request("serve.call.default.echo", b"x", timeout=20)
    assert reply.data == b"x"
    assert replica.seen[-1].timeout_s <= 20.0
    await stack.applied(await stack.put(HTTP_KEY, None))  # back to what the environment says
    assert (await stack.get("/echo", "POST", data=b"x" * 1001))[0] == 200


async def test_the_first_middleware_is_the_outermost_and_the_answer_passes_through_all(stack: Stack) -> None:
    await stack.serve(R0)
    assert "X-Signed" not in (await stack.get("/echo"))[2]
    await use(stack, "outer", "inner")
    status, body, headers = await stack.get("/echo", "POST", data=b"hi", headers={"X-Request-ID": "mine"})
    assert (status, body, headers["X-Signed"], headers["X-Request-ID"]) == (200, b"hi", "io", "mine")
    assert (await stack.get("/nowhere"))[2]["X-Signed"] == "io"
    assert "X-Signed" not in (await stack.get("/-/healthz"))[2]
    status, streamed, _ = await stack.get(f"/echo/big?{2 * MIB}")
    assert (status, len(streamed)) == (200, 2 * MIB)
    await stack.until_shown('code="200",endpoint_tag="default/echo",method="POST"} 1.0')
    await use(stack)
    assert "X-Signed" not in (await stack.get("/echo"))[2]
    assert sys.modules["live_http_middlewares"].imported_in == "import_middlewares"


async def test_a_middleware_may_refuse_read_and_rewrite(stack: Stack) -> None:
    (replica,) = await stack.serve(R0)
    await use(stack, "guard", "reads")
    status, body, headers = await stack.get("/echo", "POST", data=b"hi")
    assert (status, body, headers["WWW-Authenticate"]) == (401, b"who are you", "Basic")
    assert headers["X-Request-ID"]
    assert not replica.seen
    body = os.urandom(3 * MIB)  # more than what the library would let a middleware read by itself
    secret = {"Authorization": "secret", "Expect": "100-continue"}
    status, _, headers = await stack.get("/echo/raise", "POST", data=io.BytesIO(body), headers=secret)
    assert (status, replica.bodies[-1]) == (500, body)
    assert headers["X-Length"] == str(len(body))
    status, body, _ = await stack.get("/echo", "POST", data=io.BytesIO(bytes(11 * MIB)), headers=secret)
    assert (status, json.loads(body)["error"]["code"]) == (413, "body_too_large")
    await use(stack, "rewrites")
    assert (await stack.get("/elsewhere"))[0] == 418
    assert replica.seen[-1].path == "/echo/rewritten"


@pytest.mark.parametrize(
    ("middleware", "path", "status", "code"),
    [
        ("fails", "/echo", 500, "middleware_failed"),
        ("fails", "/echo?after", 500, "middleware_failed"),
        ("fails", "/echo?refused", 500, "middleware_failed"),
        ("returns_nothing", "/echo", 500, "middleware_failed"),
        ("hangs", "/echo", 504, "deadline_exceeded"),
    ],
)
async def test_a_middleware_that_fails_is_an_error_of_that_request_and_logged_with_its_id(
    stack: Stack, capsys, middleware: str, path: str, status: int, code: str
) -> None:
    await stack.serve(R0)
    await use(stack, middleware, request_timeout_s=0.3 if middleware == "hangs" else 20.0)
    answered, body, _ = await stack.get(path, headers={"X-Request-ID": "of-this-one"})
    error = json.loads(body)["error"]
    assert (answered, error["code"], error["request_id"]) == (status, code, "of-this-one")
    assert "a defect" not in error["message"]
    logged = [line for line in capsys.readouterr().out.splitlines() if "middleware_failed" in line]
    assert len(logged) == 1
    assert "of-this-one" in logged[0]
    await stack.until_shown(f'code="{status}"')


async def test_a_middleware_that_fails_in_the_middle_of_an_answer_breaks_it_off(stack: Stack) -> None:
    await stack.serve(R0)
    await use(stack, "breaks")
    with pytest.raises(aiohttp.ClientError):
        await stack.get("/echo")
    await use(stack, "fails")
    status, streamed, _ = await stack.get(f"/echo/big-after?{2 * MIB}")
    assert (status, len(streamed)) == (200, 2 * MIB)  # too late to tell
    assert (await stack.get("/echo"))[0] == 500


async def test_what_cannot_be_imported_leaves_all_as_it_was_and_the_report_says_why(stack: Stack) -> None:
    await stack.serve(R0)
    await use(stack, "outer", request_timeout_s=9.0)
    snapshot_id = await stack.put_http(middlewares=["nowhere_at_all:x"], body_bytes_max=1)
    report = await stack.report(lambda report: report.applied_snapshot_id >= snapshot_id)
    assert report.http_error_snapshot_id == snapshot_id
    assert "nowhere_at_all:x: ModuleNotFoundError" in report.http_error
    status, body, headers = await stack.get("/echo", "POST", data=b"hi")
    assert (status, body, headers["X-Signed"]) == (200, b"hi", "o")
    await use(stack)
    assert stack.reports[-1].http_error_snapshot_id == 0


async def test_a_snapshot_is_applied_only_once_its_middlewares_are_there(
    stack: Stack, directory: Path
) -> None:
    await stack.serve(R0)
    fifo = directory / "gate"
    os.mkfifo(fifo)
    (directory / "slow_live_http.py").write_text(
        f"with open({str(fifo)!r}) as gate:\n    gate.read()\n" + MODULE
    )
    snapshot_id = await stack.put_http(middlewares=["slow_live_http:outer"])
    later = await stack.put_endpoint(route="/later")
    status = 404
    async with asyncio.timeout(30):
        while status == 404:  # no report tells of what comes behind the middlewares
            status, _, headers = await stack.get("/later")  # routing goes on, with what was in force
    assert (status, "X-Signed" in headers) == (200, False)
    assert all(report.applied_snapshot_id < snapshot_id for report in stack.reports)
    await asyncio.to_thread(fifo.write_text, "go")
    await stack.applied(later)
    assert (await stack.get("/later"))[2]["X-Signed"] == "o"


async def test_a_new_proxy_serves_nobody_without_the_middlewares_that_it_finds(
    server: NatsServer, directory: Path
) -> None:
    async with running_stack(server, middleware_dir=str(directory)) as stack:
        await stack.create_bucket()
        await stack.applied(await stack.put_endpoint())
        await stack.applied(await stack.put_http(middlewares=["nowhere_at_all:guard"]))
        # It served before, so it goes on.
        assert await is_ready(stack) == (200, "ok\n")
    async with running_stack(server, bus_wait_s=0.2) as stack:
        report = await stack.report(lambda report: report.applied_snapshot_id == 2)
        assert report.http_error_snapshot_id == 2
        status, body, _ = await stack.get("/echo")
        assert (status, json.loads(body)["error"]["code"]) == (503, "bus_unavailable")
        status, reason = await is_ready(stack)
        assert (status, "nowhere_at_all:guard" in reason) == (503, True)
        stack.snapshot_id = 2
        stack.bucket = await stack.client.jetstream().key_value(stack.subjects.bucket)
        await stack.applied(await stack.put_http(middlewares=[]))
        assert await is_ready(stack) == (200, "ok\n")


async def test_a_request_that_came_before_the_middlewares_passes_through_them(
    server: NatsServer, directory: Path
) -> None:
    async with running_stack(server) as stack:
        await stack.create_bucket()
        for put in (stack.put_endpoint(), stack.put_backend(R0), stack.put_http(middlewares=named("guard"))):
            await put
    server.kill()
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        proxy = Proxy(make_settings(server, HttpOptions(), middleware_dir=str(directory)), on_failure=print)
        address = await proxy.start()
        async with aiohttp.ClientSession() as session:
            early = group.create_task(session.get(f"http://{address}/echo"))
            while not proxy.http.in_flight:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            server.start()
            async with await early as response:
                assert response.status == 401
        await proxy.close()


async def is_ready(stack: Stack) -> tuple[int, str]:
    async with stack.session.get(f"http://127.0.0.1:{stack.proxy.operations.port}/readyz") as response:
        return response.status, await response.text()
