"""The page Try it: what it sends, and what it shows to those who may not call."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

import msgspec
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.testclient import TestClient

from muster.client.requests import AdminReply, StackAddress
from serve_common.api.views import EndpointView
from serve_common.clock import SystemClock
from serve_common.errors import TransientError
from serve_common.identities.roles import Role
from serve_common.runtime.settings import Environment
from serve_console.core.system import NOTHING_READ, System
from serve_console.settings import read_settings
from serve_console.shell.sessions import PersonSession, StackPort
from serve_console.web.shared import Renderer, Shared
from serve_console.web.try_it import TryPage

SCHEMA = {"openapi": "3.1.0", "info": {"title": "Shop <b>"}, "paths": {"/items/{id}": {"get": {
    "parameters": [{"name": "id", "in": "path", "required": True, "schema": {"type": "integer"}}]}}}}  # fmt: skip


class FakeCaller:
    def __init__(self) -> None:
        self.calls: list[tuple[str, bytes, Mapping[str, str], float]] = []
        self.schema: Any = None
        self.reply = AdminReply(
            body=b"<script>alert(1)</script>", headers={"Content-Type": "text/html", "X": "<i>"}
        )
        self.failure: Exception | None = None

    async def exchange(
        self, name: str, body: bytes, *, headers: Mapping[str, str], timeout_s: float
    ) -> AdminReply:
        self.calls.append((name, body, headers, timeout_s))
        if headers.get("X-Serve-Path") == "/openapi.json":
            return AdminReply(body=json.dumps(self.schema).encode())
        if self.failure is not None:
            raise self.failure
        return self.reply


class FakeStack:
    def __init__(self) -> None:
        self.address = StackAddress(urls=("nats://h:4222",))
        self.caller = FakeCaller()


class FakeHub:
    def __init__(self, system: System) -> None:
        self.system = system

    async def fresh(self) -> System:
        return self.system


class Bench:
    """The page with a fake stack."""

    def __init__(self, role: Role = Role.OPERATE) -> None:
        self.stack = FakeStack()
        self.session = PersonSession("ana", role, cast(StackPort, self.stack), proof="", now=0.0)
        endpoint = EndpointView(
            endpoint_tag="default/shop", route="/shop", methods=["GET", "POST"], traffic={"default/shop": 1.0}
        )
        settings = read_settings(
            Environment(
                {
                    "MUSTER_CONSOLE_USERS_FILE": "/none",
                    "MUSTER_CONSOLE_HTTP_URL": "http://h:8000",
                    "MUSTER_CONSOLE_TRACES_URL": "http://traces/{trace_id}",
                }
            )
        )

        async def find_session(_request: Request) -> PersonSession:
            return self.session

        shared = Shared(
            settings=settings,
            hub=cast(
                Any, FakeHub(msgspec.structs.replace(NOTHING_READ, endpoints={"default/shop": endpoint}))
            ),
            sessions=cast(Any, None),
            renderer=Renderer(settings),
            clock=SystemClock(),
            tasks=cast(Any, None),
            find_session=find_session,
        )
        self.client = TestClient(Starlette(routes=TryPage(shared).routes()))

    def send(self, files: dict[str, Any] | None = None, *, htmx: bool = False, **values: str) -> str:
        form = {"csrf": self.session.csrf, "name": "default/shop", "op": "any", "method": "POST", **values}
        headers = {"HX-Request": "true"} if htmx else {}
        reply = self.client.post("/try", data=form, files=files or {"none": b""}, headers=headers)
        assert reply.status_code == 200, reply.text
        return reply.text


def test_a_call_by_hand_is_sent_with_a_trace_and_its_response_is_shown_as_text() -> None:
    bench = Bench()
    text = bench.send(path="/a b", body='{"x":\r\n1}', headers="A: 1", timeout="5")
    name, body, headers, timeout_s = bench.stack.caller.calls[-1]
    assert (name, body, timeout_s) == ("default/shop", b'{"x":\n1}', 7.0)
    assert headers["X-Serve-Path"] == "/a%20b"
    assert (headers["A"], headers["Content-Type"]) == ("1", "application/json")
    version, trace_id, _, flags = headers["traceparent"].split("-")
    assert (version, flags) == ("00", "01")
    assert f'href="http://traces/{trace_id}"' in text
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert(1)" in text
    assert "http://h:8000/shop/a%20b" in text
    assert 'value="/a b"' in text  # the form is as it was


def test_an_operation_has_its_own_form() -> None:
    bench = Bench()
    bench.stack.caller.schema = SCHEMA
    text = bench.client.get("/try?name=default/shop").text
    assert "Read its OpenAPI schema" in text
    assert bench.stack.caller.calls == [], "opening a page must not send a model a request"
    text = bench.client.get("/try?name=default/shop&schema=1").text
    assert "Shop &lt;b&gt;" in text
    assert 'name="p0"' in text
    bench.send(op="GET /items/{id}", p0="7")
    assert bench.stack.caller.calls[-1][2]["X-Serve-Path"] == "/items/7"
    text = bench.send(op="GET /items/{id}", p0="x", htmx=True)
    assert 'href="#field-p0">id</a> must be a whole number' in text
    text = bench.send(op="GET /gone", p0="x", htmx=True)
    assert "load the page again" in text
    sent = [headers["X-Serve-Path"] for _, _, headers, _ in bench.stack.caller.calls]
    assert sent == ["/openapi.json", "/items/7"]


def test_a_script_gets_the_outcome_alone_and_a_line_to_be_read_aloud() -> None:
    text = Bench().send(htmx=True)
    assert "<html" not in text
    assert 'id="outcome-status" hx-swap-oob="innerHTML">Response 200 OK' in text


def test_a_file_is_the_body_and_one_that_is_too_large_is_not_sent() -> None:
    bench = Bench()
    bench.send({"file": ("a.png", b"\x89PNG", "image/png")})
    assert bench.stack.caller.calls[-1][1] == b"\x89PNG"
    count = len(bench.stack.caller.calls)
    text = bench.send({"file": ("big.bin", b"x" * 1_000_000, "a/b")})
    assert "messages carry 1 MiB" in text
    assert "--data-binary @big.bin" in text
    assert [path for _, _, path, _ in bench.stack.caller.calls[count:]] == []


def test_a_call_without_a_response_is_said_in_words() -> None:
    bench = Bench()
    bench.stack.caller.failure = TransientError("no proxy answers calls")
    text = bench.send(htmx=True)
    assert "No response" in text
    assert "no proxy answers calls" in text


def test_those_who_only_view_call_nothing() -> None:
    bench = Bench(Role.VIEW)
    text = bench.client.get("/try?name=shop").text
    assert "<fieldset" in text
    assert " disabled>" in text
    assert "may see endpoints, but not call them" in text
    assert "may not call" in bench.send()
    assert bench.stack.caller.calls == []


@pytest.mark.parametrize("query", ["", "?name=none", "?name=default/shop&op=%3Cscript%3E"])
def test_the_page_is_there_whatever_the_address_names(query: str) -> None:
    reply = Bench().client.get(f"/try{query}")
    assert reply.status_code == 200
    assert "<script>" not in reply.text


def test_a_form_without_the_token_is_refused() -> None:
    bench = Bench()
    assert bench.client.post("/try", data={"name": "default/shop", "csrf": "x"}).status_code == 403
    assert bench.stack.caller.calls == []
