"""Who a request comes from, as an application sees it: what the proxy and its middlewares say, and nobody else.

Over the wire, to a real replica whose application reads headers as CGI and WSGI do: all upper case, with underscores.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from serve_common.names import BackendTag
from serve_common.runtime.settings import Environment
from serve_proxy.settings import read_settings
from tests.support.servers.nats_server import NatsServer
from tests.support.stacks.bare_runner import RunOrder, start_order
from tests.support.stacks.proxy_stack import R0, TAG, Stack, running_stack
from tests.support.stacks.raw_peers import raw_connection, running_replica

APP = """
import json

async def app(scope, receive, send):
    if scope["type"] == "lifespan":
        return
    environ = {"client": scope["client"][0], "scheme": scope["scheme"]}
    for name, value in scope["headers"]:
        key = name.decode().upper().replace("-", "_")
        environ[key] = environ[key] + "," + value.decode() if key in environ else value.decode()
    body = json.dumps(environ)
    await receive()
    if scope["type"] == "websocket":
        await send({"type": "websocket.accept"})
        await send({"type": "websocket.send", "text": body})
        await send({"type": "websocket.close"})
        return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body.encode()})
"""
MIDDLEWARE = """
async def passes(request, handler):
    return await handler(request)
"""
KEY = "shop-key-of-enough-characters"
SHADOW, S0 = BackendTag("default/shadow"), "default/shadow#9"
API_KEYS = "serve_proxy.middlewares.api_keys:api_keys"
RATE_LIMIT = "serve_proxy.middlewares.rate_limit:rate_limit"
FORGED = (
    "X-API-Key-Name: admin\r\nX_API_Key_Name: admin\r\nX-Api_Key-Name: admin\r\n"
    "X-Forwarded-For: 6.6.6.6\r\nX_Forwarded_For: 6.6.6.6\r\nForwarded: for=6.6.6.6\r\nX-Real-IP: 6.6.6.6\r\n"
    "X-Forwarded-Proto: https\r\nX-Forwarded-Host: bank.example\r\nX-Forwarded-Port: 6666\r\nX_Request_ID: forged\r\n"
    "Connection: {connection}X-API-Key-Name, X-Forwarded-For, X-Forwarded-Host, X-Own\r\nX-Own: 1\r\n"
)


@pytest.fixture(autouse=True)
async def replica(server: NatsServer, tmp_path: Path) -> AsyncIterator[None]:
    (tmp_path / "identity_app.py").write_text(APP)
    (tmp_path / "identity_middleware.py").write_text(MIDDLEWARE)
    order = start_order(server.url, R0, RunOrder(import_path="identity_app:app", app_dir=str(tmp_path)))
    async with running_replica(order):
        yield
    sys.modules.pop("identity_middleware", None)


async def serve(stack: Stack, *middlewares: str) -> Any:
    """Everything up; returns a shadow that remembers what it was sent."""
    await stack.serve()
    await stack.put_backend(R0)
    shadow = await stack.add_replica(S0)
    await stack.put_backend(S0, tag=SHADOW)
    await stack.put_http(middlewares=list(middlewares))
    await stack.applied(await stack.put_endpoint(shadows={SHADOW: 1.0}))
    return shadow


async def raw(stack: Stack, way: str, headers: str) -> dict[str, str]:
    """What the application saw of a request that took one way through the proxy."""
    async with raw_connection(stack.url) as (reader, writer):
        async with asyncio.timeout(30):
            lines = headers.format(connection="Upgrade, " if way == "socket" else "")
            if way == "socket":
                lines += "Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
                lines += "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
            if way == "upload":
                writer.write(f"POST /echo HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n{lines}\r\na".encode())
                await writer.drain()
                await asyncio.sleep(0.05)  # so that it is not whole at once
                writer.write(b"b")
            else:
                writer.write(f"GET /echo HTTP/1.1\r\nHost: h\r\n{lines}\r\n".encode())
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            if way == "socket":
                assert " 101 " in head, head
                _, length = await reader.readexactly(2)
                if length == 126:
                    length = int.from_bytes(await reader.readexactly(2))
                body = await reader.readexactly(length)
            else:
                length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
                body = await reader.readexactly(length)
                assert " 200 " in head, (head, body)
    seen: dict[str, str] = json.loads(body)
    return seen


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "keys").write_text(f"shop {KEY}\n")
    monkeypatch.setenv("MUSTER_API_KEYS_FILE", str(tmp_path / "keys"))
    monkeypatch.delitem(sys.modules, "serve_proxy.middlewares.api_keys", raising=False)


@pytest.mark.parametrize(
    "middlewares", [[], ["identity_middleware:passes"], [API_KEYS]], ids=["none", "any", "keys"]
)
async def test_no_header_of_a_client_takes_away_or_stands_in_for_what_the_proxy_says(
    server: NatsServer, tmp_path: Path, keys: None, middlewares: list[str]
) -> None:
    async with running_stack(server, middleware_dir=str(tmp_path)) as stack:
        shadow = await serve(stack, *middlewares)
        for number, way in enumerate(("short", "upload", "socket"), start=1):
            seen = await raw(stack, way, f"X-API-Key: {KEY}\r\n{FORGED}")
            # Without the middleware the header is the client's own, and it has itself asked for it to be left out.
            assert seen.get("X_API_KEY_NAME") == ("shop" if middlewares == [API_KEYS] else None), way
            scheme = "ws" if way == "socket" else "http"
            assert (seen["client"], seen["scheme"]) == ("127.0.0.1", scheme)
            told = {name: value for name, value in seen.items() if "FORWARDED" in name or "REAL" in name}
            assert told == {
                "X_FORWARDED_FOR": "127.0.0.1", "X_FORWARDED_PROTO": "http", "X_FORWARDED_HOST": "h"
            }, way  # fmt: skip
            assert "X_OWN" not in seen
            request_id = seen.pop(
                "X_REQUEST_ID"
            )  # which the replica adds, by what the proxy says of the request
            if way != "socket":  # of those no copies are made
                await shadow.wait(lambda number=number: len(shadow.seen) == number)
                assert request_id == shadow.seen[-1].request_id
                copied = {
                    bytes(name).decode(): bytes(value).decode() for name, value in shadow.seen[-1].headers
                }
                assert {name.upper().replace("-", "_"): value for name, value in copied.items()} == {
                    name: value for name, value in seen.items() if name.isupper()
                }


async def test_a_header_with_an_underscore_is_left_out_but_for_the_one_that_means_something_here(
    server: NatsServer,
) -> None:
    async with running_stack(server) as stack:
        await serve(stack)
        headers = "User_Agent: a\r\nX_Y: 1\r\nserve_multiplexed_model_id: m\r\nX-Y: 2\r\n"
        for way in ("short", "upload"):
            seen = await raw(stack, way, headers)
            assert (seen["X_Y"], seen["SERVE_MULTIPLEXED_MODEL_ID"]) == ("2", "m")
            assert "USER_AGENT" not in seen


@pytest.mark.parametrize("middlewares", [[], ["identity_middleware:passes"]], ids=["none", "any"])
async def test_as_many_load_balancers_are_believed_as_there_are(
    server: NatsServer, tmp_path: Path, middlewares: list[str]
) -> None:
    lines: list[bytes] = []
    async with running_stack(
        server, middleware_dir=str(tmp_path), forwarded_hops=2, write_access=lines.append
    ) as stack:
        await stack.serve()
        await stack.put_backend(R0)
        await stack.applied(await stack.put_http(middlewares=middlewares, access_log=True))
        forged = (
            "X-Forwarded-For: 6.6.6.6\r\nX-Forwarded-For: 9.9.9.9, 10.0.0.1\r\nX-Forwarded-Proto: https\r\n"
        )
        for way in ("short", "upload", "socket"):
            seen = await raw(stack, way, forged + "Connection: {connection}X-Forwarded-For\r\n")
            scheme = "wss" if way == "socket" else "https"
            assert (seen["client"], seen["scheme"]) == ("9.9.9.9", scheme), way
            assert seen["X_FORWARDED_FOR"] == "9.9.9.9, 10.0.0.1, 127.0.0.1"
            # One that came past the outer one is as good as a client.
            seen = await raw(stack, way, "X-Forwarded-For: 6.6.6.6\r\nConnection: {connection}x\r\n")
            assert (seen["client"], seen["X_FORWARDED_FOR"]) == ("127.0.0.1", "127.0.0.1")
    clients = [json.loads(line)["client"].partition(":")[0] for each in lines for line in each.splitlines()]
    assert sorted(clients) == ["127.0.0.1"] * 3 + ["9.9.9.9"] * 3


@pytest.mark.parametrize("hops", [0, 1])
async def test_a_rate_limit_counts_by_the_client_that_is_believed(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch, hops: int
) -> None:
    for name, value in {"PER_S": "0.001", "BURST": "1", "BY": "address"}.items():
        monkeypatch.setenv(f"MUSTER_RATE_LIMIT_{name}", value)
    monkeypatch.delitem(sys.modules, "serve_proxy.middlewares.rate_limit", raising=False)
    async with running_stack(server, forwarded_hops=hops) as stack:
        await serve(stack, RATE_LIMIT)
        told = [{"X-Forwarded-For": f"6.6.6.6, 10.0.0.{number}"} for number in (1, 2, 2)]
        statuses = [(await stack.get("/echo", headers=headers))[0] for headers in told]
        assert statuses == ([200, 200, 429] if hops else [200, 429, 429])


async def test_who_may_not_call_may_not_read_the_routes_either(server: NatsServer, keys: None) -> None:
    async with running_stack(server) as stack:
        await serve(stack)
        status, body, _ = await stack.get("/-/routes")
        assert (status, json.loads(body)) == (200, {"/echo": TAG})
        await stack.applied(await stack.put_http(middlewares=[API_KEYS]))
        assert (await stack.get("/-/routes"))[0] == 401
        assert (await stack.get("/-/healthz"))[0] == 200
        status, body, _ = await stack.get("/-/routes", headers={"X-API-Key": KEY})
        assert (status, json.loads(body)) == (200, {"/echo": TAG})


def test_there_is_one_setting_for_all_that_believe_load_balancers() -> None:
    known = {"MUSTER_NATS_PASSWORD": "x"}
    assert read_settings(Environment(known)).forwarded_hops == 0
    assert read_settings(Environment({**known, "MUSTER_FORWARDED_HOPS": "2"})).forwarded_hops == 2
