"""Deployments for the tests of traces."""

from __future__ import annotations

from typing import Any

from opentelemetry import trace
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

import muster
from muster.handles import get_deployment_handle
from serve_common.telemetry.request_traces import current_trace_id

tracer = trace.get_tracer("trace_app")


class Front:
    """Does what the query says."""

    def __init__(self) -> None:
        self.back = get_deployment_handle("back")

    async def __call__(self, request: Any) -> Any:
        what = request.query_params.get("do", "chain")
        if what == "chain":
            return await self.back.remote(1)
        if what == "own":
            with tracer.start_as_current_span("own span") as span:
                span.set_attribute("digits", 3)
                return await self.back.plain.remote(1)
        if what == "raise":
            raise ValueError("no such digit")
        if what == "raise-behind":
            return await self.back.fail.remote()
        if what == "stream":
            return StreamingResponse(self.numbers())
        if what == "batch":
            return await self.back.batched.remote(request.query_params["n"])
        assert what == "see"
        trace.get_current_span().set_attribute("seen", "yes")
        return {
            "trace_id": current_trace_id(),
            "of_context": muster.get_request_context().trace_id,
            "header": request.headers.get("traceparent"),
            "tracestate": muster.get_request_context().tracestate,
            "is_recording": trace.get_current_span().is_recording(),
        }

    async def numbers(self) -> Any:
        async for number in self.back.options(stream=True).numbers.remote(3):
            yield f"{number}\n"


class Back:
    """Is called by handle."""

    async def __call__(self, value: Any) -> Any:
        return value

    def plain(self, value: Any) -> Any:
        with tracer.start_as_current_span("plain span"):
            return value

    async def fail(self) -> None:
        raise KeyError("nothing there")

    async def numbers(self, count: int) -> Any:
        for number in range(count):
            yield number

    @muster.batch(max_batch_size=2, batch_wait_timeout_s=20.0)
    async def batched(self, values: list[Any]) -> list[Any]:
        return values


async def hello(_request: Any) -> PlainTextResponse:
    return PlainTextResponse("hello")


async def broken(_request: Any) -> PlainTextResponse:
    raise RuntimeError("the page is broken")


async def echo(socket: WebSocket) -> None:
    await socket.accept()
    async for text in socket.iter_text():
        await socket.send_text(text)


pages = Starlette(routes=[Route("/hello", hello), Route("/broken", broken), WebSocketRoute("/echo", echo)])


@muster.ingress(pages)
class Pages:
    """An application."""
