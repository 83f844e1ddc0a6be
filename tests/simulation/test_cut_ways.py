"""Both real ends of the data plane over a bus and a direct link that are cut at every frame of a set of stories.

The router's end is the real dispatcher, the replica's the real protocol with its user's code; only the ways between
them are lists. A cut loses what is on its way, in both directions, and each end learns of it as it would: the bus
reconnects, the link has ended. Whatever is cut when, each request is answered, runs once, and every byte is right.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from serve_common.direct.link import link_token
from serve_common.dispatch import timers as timing
from serve_common.dispatch.calls import RequestSpec
from serve_common.dispatch.dispatcher import Dispatcher
from serve_common.dispatch.request_body import RequestBody, UploadMemory
from serve_common.dispatch.routes import Routes
from serve_common.dispatch.sockets import SocketMessage
from serve_common.dispatch.timers import RequestTimers
from serve_common.dispatch.upstream import Outgoing
from serve_common.names import BackendTag, EndpointTag, ReplicaTag
from serve_common.nats.options import NotConnected
from serve_common.protocol.frames import (
    FRAME_BODY_BYTES_MAX,
    LinkHead,
    RequestKind,
    encode_frame,
)
from serve_common.protocol.snapshots import BackendSnapshot, EndpointSnapshot, Snapshot
from serve_common.protocol.subjects import Subjects, backend_key
from serve_common.runtime.settings import DirectMode
from serve_common.runtime.threads import Mailbox
from serve_replica_host.replica.io.protocol import ReplicaProtocol
from serve_replica_host.replica.user.code import Lifespan, UserCode
from serve_replica_host.replica.user.executor import UserExecutor
from tests.support.replica_rig import Tally

REPLICA = ReplicaTag("d/a#1")
INBOX = b"_INBOX_proxy.p."
KIB = 1024


class Way:
    """One direction of the bus or of a link: frames arrive in order, one for each turn of the loop, until it is cut."""

    def __init__(self, deliver: Callable[..., None]) -> None:
        self._deliver = deliver
        self._items: deque[tuple[Any, ...]] = deque()
        self._loop = asyncio.get_running_loop()
        self.passed = 0

    def put(self, *item: Any) -> None:
        self._items.append(item)
        self._loop.call_soon(self._next)

    def _next(self) -> None:
        if self._items:
            self.passed += 1
            self._deliver(*self._items.popleft())

    def cut(self) -> None:
        self._items.clear()


class Link:
    """One end of a link of lists; stands for `DirectLink`."""

    def __init__(self) -> None:
        self.is_open = True
        self.out: Way
        self.last_used_at = 0.0
        self.pending_bytes = 0

    last_received_at = float("inf")
    has_parted = False
    splices = False

    def send(
        self, token: bytes, head: Any, body: bytes | memoryview = b"", *, is_alone: bool = False
    ) -> bool:
        return self.send_frame(token, encode_frame(head, body))

    def send_frame(self, token: bytes, frame: bytes) -> bool:
        if self.is_open:
            self.out.put(token, frame)
        return self.is_open


class Plane:
    """One router, one replica, and the ways between them."""

    def __init__(self, application: Any, mode: DirectMode, *, has_link: bool = True) -> None:
        loop = asyncio.get_running_loop()
        self.is_connected = True
        self.receivers: dict[bytes, tuple[Any, Any]] = {}
        self.there = Way(self._at_replica)
        self.back = Way(self._at_router)
        self.cuts = 0
        routes = Routes(random.Random(1).random)
        self.outgoing = Outgoing(self, self, Subjects(), mode)
        self.dispatcher = Dispatcher(routes, self.outgoing, bus_wait_s=5.0)
        self.timers = RequestTimers(self.dispatcher, routes, self.outgoing)
        backend = BackendTag("d/a")
        contents = {
            "endpoints.d.a": EndpointSnapshot(
                endpoint_tag=EndpointTag("d/a"), route="/a", methods=["GET"], traffic={backend: 1.0}
            ),
            backend_key(backend): BackendSnapshot(
                backend_tag=backend,
                replicas=[REPLICA],
                draining=[],
                max_concurrent_queries=50,
                max_queued_requests=9,
            ),
        }
        snapshots = {
            key: Snapshot(snapshot_id=1, epoch=1, content=content) for key, content in contents.items()
        }
        self.dispatcher.update(snapshots, whole=True)
        self.endpoint = routes.endpoints[EndpointTag("d/a")]
        code = UserCode(application, None, 50, Lifespan(application))
        self.metrics = Tally()
        user_queue: Mailbox[Any] = Mailbox(loop, lambda item: self.executor.take(item))  # noqa: PLW0108 - made below
        self.replica = ReplicaProtocol(
            publish=self._publish_response,
            user_queue=user_queue.put,
            now=time.monotonic,
            metrics=self.metrics,
            max_concurrent_queries=50,
            streams_bodies=code.streams_bodies,
        )
        io_queue: Mailbox[Any] = Mailbox(loop, self.replica.handle_outcome)
        self.executor = UserExecutor(code, io_queue.put)
        self.replica.use_links(
            lambda _reply, _machine: LinkHead(),
            lambda _inbox: self.ends[1],  # type: ignore[arg-type,return-value]
        )
        self.ends: tuple[Link | None, Link | None] = (None, None)
        if mode is not DirectMode.OFF and has_link:
            self.open_link()

    # -- the bus --

    @property
    def is_responding(self) -> bool:
        return self.is_connected

    def publish(self, subject: Any, payload: bytes, reply: bytes = b"", _headers: Any = None) -> None:
        if not self.is_connected:
            raise NotConnected("away")
        self.there.put(subject, reply, payload)

    def _publish_response(self, subject: bytes, frame: bytes) -> None:
        if not self.is_connected:
            raise NotConnected("away")
        self.back.put(subject[-16:], frame)

    def _at_replica(self, subject: bytes, reply: bytes, payload: bytes) -> None:
        self.replica.handle_bus_frame(subject, reply, payload, None)

    def _at_router(self, token: bytes, frame: bytes) -> None:
        receiver = self.receivers.get(token)
        if receiver is not None:
            receiver[0](frame, b"", None)

    def new_reply(self, on_reply: Any, on_no_responders: Any) -> tuple[bytes, bytes]:
        token = random.randbytes(8).hex().encode()
        self.receivers[token] = (on_reply, on_no_responders)
        return token, INBOX + token

    def replace(self, token: bytes, on_reply: Any) -> None:
        self.receivers[token] = (on_reply, lambda: None)

    def forget(self, token: bytes) -> None:
        self.receivers.pop(token, None)

    def deliver(self, token: bytes, payload: bytes) -> None:
        receiver = self.receivers.get(token)
        if receiver is not None:
            receiver[0](payload, b".", None)

    def cut_bus(self) -> None:
        """Both ends lose their connections, and have them again a moment later."""
        self.cuts += 1
        self.there.cut()
        self.back.cut()
        self.is_connected = False
        self.replica.bus_lost()
        asyncio.get_running_loop().call_later(0.002, self._join_bus)

    def _join_bus(self) -> None:
        self.is_connected = True
        self.replica.bus_joined()
        self.dispatcher.bus_reconnected()

    # -- the link --

    def open_link(self) -> None:
        router, replica = Link(), Link()
        router.out = Way(
            lambda token, frame: self.replica.handle_link_frame(replica, INBOX + token.hex().encode(), frame)  # type: ignore[arg-type]
        )
        replica.out = Way(lambda token, frame: self.deliver(token.hex().encode(), frame))
        self.ends = router, replica
        self.outgoing.links._links[REPLICA] = router  # type: ignore[assignment]

    def cut_link(self, *, replica_first: bool = False, opens_again: bool = True) -> None:
        """The link ends: what is on its way is lost, and each end learns of it, one before the other."""
        router, replica = self.ends
        if router is None or replica is None:
            return
        self.cuts += 1
        self.ends = None, None
        for end in (router, replica):
            end.out.cut()
            end.is_open = False

        def router_learns() -> None:
            self.outgoing.links._links.pop(REPLICA, None)
            self.dispatcher._pending_reconnect.link_lost(router)  # type: ignore[arg-type]
            if opens_again:
                self.open_link()

        def replica_learns() -> None:
            self.replica.link_lost(replica)  # type: ignore[arg-type]

        first, second = (replica_learns, router_learns) if replica_first else (router_learns, replica_learns)
        first()
        asyncio.get_running_loop().call_later(0.001, second)

    @property
    def frames(self) -> int:
        """Frames that have passed, on all ways."""
        ways = [self.there, self.back, *(end.out for end in self.ends if end is not None)]
        return sum(way.passed for way in ways)

    # -- requests --

    def spec(self, path: str, body: bytes = b"", **fields: Any) -> RequestSpec:
        return RequestSpec(
            **{
                "endpoint": self.endpoint,
                "method": "POST",
                "path": path,
                "route": "",
                "query": "",
                "headers": [],
                "body": body,
                "request_id": "r",
                "traceparent": "",
                "is_repeatable": False,
                "deadline": asyncio.get_running_loop().time() + 30,
                **fields,
            }
        )

    async def ask(self, path: str, body: bytes = b"", **fields: Any) -> tuple[int, bytes]:
        _, response = await self.dispatcher.send(self.spec(path, body, **fields))
        received = bytearray(response.body if response.stream is None else b"")
        if response.stream is not None:
            while (piece := await response.stream.read()) is not None:
                received += piece
        return response.status, bytes(received)


class App:
    """What the user's code does; counts what ran."""

    def __init__(self) -> None:
        self.runs = 0
        self.asgi = Starlette(
            routes=[
                Route("/a/echo", self.echo, methods=["POST"]),
                Route("/a/stream", self.stream, methods=["POST"]),
                Route("/a/whole", self.whole, methods=["POST"]),
                Route("/a/parts", self.parts, methods=["POST"]),
                Route("/a/sum", self.sum, methods=["POST"]),
                WebSocketRoute("/a/ws", self.socket),
            ]
        )

    async def echo(self, request: Request) -> Response:
        self.runs += 1
        return Response(await request.body())

    async def sum(self, request: Request) -> Response:
        self.runs += 1
        digest = hashlib.sha256()
        async for piece in request.stream():
            digest.update(piece)
            await asyncio.sleep(0)
        return Response(digest.hexdigest())

    async def stream(self, request: Request) -> Response:
        self.runs += 1
        body = await request.body()

        async def pieces() -> AsyncIterator[bytes]:
            for at in range(0, len(body), 50 * KIB):
                yield body[at : at + 50 * KIB]
                await asyncio.sleep(0)

        return StreamingResponse(pieces())

    async def whole(self, _request: Request) -> Response:
        self.runs += 1
        return Response(LONG)

    async def parts(self, _request: Request) -> Response:
        self.runs += 1

        async def pieces() -> AsyncIterator[bytes]:
            for at in range(0, len(LONG), 100 * KIB):
                yield LONG[at : at + 100 * KIB]

        return StreamingResponse(pieces())

    async def socket(self, socket: WebSocket) -> None:
        self.runs += 1
        await socket.accept()
        try:
            while True:
                message = await socket.receive_bytes()
                await socket.send_bytes(message[::-1])
        except WebSocketDisconnect:
            return


BODY = random.Random(7).randbytes(5 * FRAME_BODY_BYTES_MAX + 1_000)
LONG = 4 * BODY
"""Of more than two windows."""


async def tell_small(plane: Plane) -> None:
    assert await plane.ask("/a/echo", b"small") == (200, b"small")


async def tell_echo(plane: Plane) -> None:
    assert await plane.ask("/a/echo", BODY) == (200, BODY)


async def tell_stream(plane: Plane) -> None:
    assert await plane.ask("/a/stream", BODY) == (200, BODY)


async def tell_upload(plane: Plane) -> None:
    memory = UploadMemory()
    body = RequestBody(BODY[:100], memory, len(BODY))
    task = asyncio.get_running_loop().create_task(plane.ask("/a/sum", upload=body))
    for at in range(100, len(BODY), 90 * KIB):
        await body.wait_for_capacity()
        body.add(BODY[at : at + 90 * KIB])
        await asyncio.sleep(0)
    assert await task == (200, hashlib.sha256(BODY).hexdigest().encode())
    body.close()
    assert memory.buffered_bytes == 0


async def tell_socket(plane: Plane) -> None:
    call, response = await plane.dispatcher.send(plane.spec("/a/ws", kind=RequestKind.WEBSOCKET, scheme="ws"))
    socket = response.socket
    assert socket is not None
    messages = [b"hello", BODY[: FRAME_BODY_BYTES_MAX + 9], b"", b"bye"]
    for message in messages:
        assert await socket.send(message, is_text=False)
    for message in messages:
        assert await socket.receive() == SocketMessage(False, message[::-1])
    socket.close(1000, "")
    assert call.key not in plane.dispatcher.calls


STORIES: dict[str, Callable[[Plane], Awaitable[None]]] = {
    "small": tell_small,
    "echo": tell_echo,
    "stream": tell_stream,
    "upload": tell_upload,
    "socket": tell_socket,
}


async def run(story: str, mode: DirectMode, cut: Callable[[Plane], None] | None, at: int) -> tuple[int, int]:
    """Tell a story, and cut after frame number ``at``; how many frames passed, and how many cuts there were."""
    app = App()
    plane = Plane(app.asgi, mode)
    beat = asyncio.get_running_loop().create_task(plane.timers.run())
    if cut is not None:
        for way in (plane.there, plane.back, *(end.out for end in plane.ends if end is not None)):
            cut_at(plane, way, cut, at)
    async with asyncio.timeout(20):
        await STORIES[story](plane)
    frames = plane.frames
    assert app.runs == 1, "it ran once"
    if story == "socket" and plane.cuts:
        # The close may have been on its way; the replica learns of a router that is gone after a while.
        for exchange in list(plane.replica._exchanges.values()):
            plane.replica._responses.drop(exchange, 499)
    async with asyncio.timeout(20):
        await plane.replica.wait_idle()
        await plane.executor.wait_idle()
    assert not plane.dispatcher.calls
    assert plane.outgoing.retained.retained_bytes == 0
    plane.replica._slots.forget_old(float("inf"))
    assert plane.replica._responses._retained.retained_bytes == 0
    assert not plane.replica._links
    beat.cancel()
    await asyncio.wait([beat])
    return frames, plane.cuts


def cut_at(plane: Plane, way: Way, cut: Callable[[Plane], None], at: int, *, cuts: int = 0) -> None:
    """Cut when ``at`` frames have passed, all ways together, once, after ``cuts`` others."""
    deliver = way._deliver

    def watch(*item: Any) -> None:
        deliver(*item)
        if plane.frames >= at and plane.cuts == cuts:
            cut(plane)

    way._deliver = watch


CUTS: dict[str, Callable[[Plane], None]] = {
    "bus": Plane.cut_bus,
    "link": Plane.cut_link,
    "link, the replica learns first": lambda plane: plane.cut_link(replica_first=True),
    "link for good": lambda plane: plane.cut_link(opens_again=False),
    "both": lambda plane: (plane.cut_link(), plane.cut_bus())[0],
}


@pytest.mark.parametrize("mode", list(DirectMode))
@pytest.mark.parametrize("story", STORIES)
async def test_every_story_ends_well_wherever_its_ways_are_cut(
    story: str, mode: DirectMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "PROBE_AFTER_S", 0.05)
    frames, _ = await run(story, mode, None, 0)
    cuts = 0
    for name, cut in CUTS.items():
        if mode is DirectMode.OFF and name != "bus":
            continue
        for at in range(1, frames + 1):
            try:
                cuts += (await run(story, mode, cut, at))[1]
            except Exception as error:
                error.add_note(f"{name} was cut after frame {at} of {frames}")
                raise
    assert cuts >= frames, "the cuts were made"


@pytest.mark.parametrize("path", ["/a/whole", "/a/parts"])
@pytest.mark.parametrize("is_cut", [False, True])
async def test_a_response_that_began_over_the_bus_goes_on_over_a_link_that_opens(
    path: str, *, is_cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "PROBE_AFTER_S", 0.05)
    over_links = 0
    for at in range(1, 12):
        app = App()
        plane = Plane(app.asgi, DirectMode.BODIES, has_link=False)
        beat = asyncio.get_running_loop().create_task(plane.timers.run())
        ways: list[Way] = []

        def open_link(plane: Plane, ways: list[Way] = ways) -> None:
            if not plane.cuts:
                plane.cuts += 1
                plane.open_link()
                ways += [end.out for end in plane.ends if end is not None]
                if is_cut:
                    cut_at(plane, ways[1], Plane.cut_link, plane.frames + 2, cuts=1)

        cut_at(plane, plane.back, open_link, at)
        async with asyncio.timeout(20):
            assert await plane.ask(path) == (200, LONG), f"the link opened after frame {at}"
        assert app.runs == 1
        over_links += sum(way.passed for way in ways)
        beat.cancel()
        await asyncio.wait([beat])
    assert over_links > (5 if is_cut else 50)


@pytest.mark.parametrize("seed", range(20))
async def test_many_requests_at_once_survive_any_row_of_cuts(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "PROBE_AFTER_S", 0.05)
    chance = random.Random(seed)
    app = App()
    plane = Plane(app.asgi, chance.choice([DirectMode.BODIES, DirectMode.ALL]))
    loop = asyncio.get_running_loop()
    beat = loop.create_task(plane.timers.run())
    names = [chance.choice([*STORIES]) for _ in range(30)]
    tasks = [loop.create_task(_as_coroutine(STORIES[name], plane)) for name in names]
    async with asyncio.timeout(60):
        for _ in range(12):
            await asyncio.sleep(chance.random() * 0.02)
            if plane.is_connected:
                chance.choice(list(CUTS.values()))(plane)
            if plane.ends[0] is None and chance.random() < 0.7:
                plane.open_link()
        await asyncio.gather(*tasks)
    assert app.runs == len(tasks), "each ran once"
    assert not plane.dispatcher.calls
    beat.cancel()
    await asyncio.wait([beat])


async def test_requests_go_on_over_links_while_the_bus_is_away() -> None:
    app = App()
    plane = Plane(app.asgi, DirectMode.ALL)
    plane.is_connected = False
    plane.replica.bus_lost()
    for story in STORIES.values():
        await story(plane)
    assert app.runs == len(STORIES)
    task = asyncio.get_running_loop().create_task(plane.ask("/a/echo", BODY))
    await asyncio.sleep(0)
    plane.cut_link(opens_again=False)
    await asyncio.sleep(0.01)
    assert not task.done(), "neither way is there, so it waits"
    plane._join_bus()
    assert await task == (200, BODY)
    assert app.runs == len(STORIES) + 1


async def test_without_links_requests_wait_for_the_bus() -> None:
    plane = Plane(App().asgi, DirectMode.BODIES)
    plane.is_connected = False
    task = asyncio.get_running_loop().create_task(plane.ask("/a/echo", b"x"))
    await asyncio.sleep(0.01)
    assert not task.done()
    plane._join_bus()
    assert await task == (200, b"x")


async def _as_coroutine(story: Callable[[Plane], Awaitable[None]], plane: Plane) -> None:
    await story(plane)


def test_the_token_of_the_plane_is_one_of_links() -> None:
    assert link_token(INBOX + b"0123456789abcdef")
