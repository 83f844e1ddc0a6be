"""Does everything that a dashboard shows: batches, models, streams, sockets, calls by handle, failures and waiting."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

import muster as serve


class Work:
    """The business end, which the application below shares."""

    @serve.batch(max_batch_size=4, batch_wait_timeout_s=0.01)
    async def batched(self, items: list[str]) -> list[str]:
        await asyncio.sleep(0.005)
        return items

    @serve.multiplexed(max_num_models_per_replica=1)
    async def model(self, model_id: str) -> str:
        await asyncio.sleep(0.002)
        return model_id


work = Work()


async def batch(request: Request) -> Response:
    return PlainTextResponse(await work.batched(request.query_params.get("item", "x")))


async def model(request: Request) -> Response:
    return PlainTextResponse(await work.model(request.query_params["id"]))


async def call(request: Request) -> Response:
    await serve.get_deployment_handle("quiet").answer.remote(0.05)
    return PlainTextResponse("called")


async def wait(request: Request) -> Response:
    await asyncio.sleep(float(request.query_params["s"]))
    return PlainTextResponse("waited")


async def fail(request: Request) -> Response:
    raise ValueError("as it was asked to")


async def stream(request: Request) -> Response:
    async def pieces() -> AsyncIterator[str]:
        for _ in range(20):
            yield "piece"
            await asyncio.sleep(0.05)

    return StreamingResponse(pieces())


async def socket(socket: WebSocket) -> None:
    await socket.accept()
    async for text in socket.iter_text():
        await socket.send_text(text)


application = Starlette(
    routes=[
        Route("/batch", batch),
        Route("/model", model),
        Route("/call", call),
        Route("/wait", wait),
        Route("/fail", fail),
        Route("/stream", stream),
        WebSocketRoute("/socket", socket),
    ]
)


@serve.ingress(application)
class Seen:
    """The application."""


class Quiet:
    """Is called by handle, gets copies as a shadow, and can die."""

    async def __call__(self, request: Request) -> str:
        if "die" in request.query_params:
            os._exit(1)
        await asyncio.sleep(0.01)
        return "quiet"

    async def answer(self, seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "answer"
