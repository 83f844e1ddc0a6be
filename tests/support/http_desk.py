"""An HTTP server of the proxy over a fake ingress, which keeps what is asked until the test answers it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import SimpleNamespace

from serve_common.config.backend import EndpointOptions, HttpOptions
from serve_common.dispatch.admission import RequestStats
from serve_common.dispatch.calls import Response
from serve_common.dispatch.request_body import UploadMemory
from serve_common.errors import NotFound
from serve_proxy.http.requests import HttpRequests
from serve_proxy.http.server import HttpServer

HOST = b"Host: h\r\n"


class FakeIngress:
    """Admits every path but /none; keeps what is asked until the test answers it."""

    is_open = True

    def __init__(self) -> None:
        self.is_draining = False
        self.memory = UploadMemory()
        self.routes = SimpleNamespace(unmatched=RequestStats())
        self.endpoint = SimpleNamespace(
            tag="d/a", route="/", stats=RequestStats(), options=EndpointOptions(), shadows=(), methods=()
        )
        self.begun: list[SimpleNamespace] = []
        self.asked: list[SimpleNamespace] = []
        self.abandoned: list[object] = []
        self.changed = asyncio.Event()

    def admit(self, _method: str, path: str):
        if path == "/none":
            raise NotFound("nothing is there")
        if path == "/bug":
            raise ZeroDivisionError
        return self.endpoint

    def start(self, spec, on_response, on_error):
        call = SimpleNamespace(spec=spec, on_response=on_response, on_error=on_error)
        self.begun.append(call)
        self.changed.set()
        return call

    async def send(self, spec):
        waiter = asyncio.get_running_loop().create_future()
        call = SimpleNamespace(spec=spec, waiter=waiter)
        self.asked.append(call)
        self.changed.set()
        return call, await waiter

    def answer(self, response: Response) -> None:
        """Answer the first request, whichever way it takes."""
        if self.begun:
            self.begun[0].on_response(self.begun[0], response)
        else:
            self.asked[0].waiter.set_result(response)

    def routing_error(self) -> str | None:
        return None

    def abandon(self, call) -> None:
        self.abandoned.append(call)
        self.changed.set()

    async def until(self, condition) -> None:
        async with asyncio.timeout(30):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


class Desk:
    """A listening server over a fake ingress."""

    def __init__(self, options: HttpOptions) -> None:
        self.ingress = FakeIngress()
        self.requests = HttpRequests(self.ingress, options, new_request_id=lambda: "made")
        self.server = HttpServer(self.requests, self.ingress)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, _, port = self.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        self.writers.append(writer)
        return reader, writer

    async def ask(
        self, line: bytes = b"GET /", headers: bytes = b"\r\n", *, is_fast: bool = True
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A new connection, whose first request has reached the ingress by the fast path, or by the other way."""
        reader, writer = await self.connect()
        writer.write(line + b" HTTP/1.1\r\n" + HOST + headers)
        await self.ingress.until(lambda: self.ingress.begun if is_fast else self.ingress.asked)
        return reader, writer

    async def start(self) -> None:
        self.writers: list[asyncio.StreamWriter] = []
        self.address = await self.server.start("127.0.0.1", 0)


@contextlib.asynccontextmanager
async def listening(desk: Desk) -> AsyncIterator[Desk]:
    await desk.start()
    yield desk
    for writer in desk.writers:
        writer.close()
    await desk.server.close(1.0)


def whole(body: bytes, *headers: tuple[bytes, bytes], status: int = 200) -> Response:
    return Response(status, list(headers), memoryview(body), None)


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    async with asyncio.timeout(30):
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {
            name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)
        }
        body = await reader.readexactly(int(headers.get("content-length", 0)))
    return int(head[0].split(" ")[1]), headers, body


async def goes_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """The connection serves another request, of a path that is not there."""
    writer.write(b"GET /none HTTP/1.1\r\n" + HOST + b"\r\n")
    assert (await read_answer(reader))[0] == 404
