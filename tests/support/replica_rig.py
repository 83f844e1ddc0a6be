"""A replica without threads, NATS and Ray: both of its sides on one loop, and a router that plays by the protocol."""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from serve_common.config.backend import ReplicaConfig
from serve_common.names import BackendTag, replica_tag
from serve_common.protocol.frames import (
    FRAME_BODY_BYTES_MAX,
    UNKNOWN_BYTES,
    WINDOW_FRAMES,
    WINDOW_MESSAGES,
    BodyHead,
    CallHead,
    CreditHead,
    ErrorHead,
    Head,
    Headers,
    MessageHead,
    RequestHead,
    RequestKind,
    ResponseHead,
    decode_frame,
    encode_frame,
    split_body,
)
from serve_common.protocol.reports import ReplicaGoal
from serve_common.runtime.threads import Mailbox
from serve_replica_host.ports import Occupancy
from serve_replica_host.replica.io.protocol import ReplicaProtocol
from serve_replica_host.replica.user.code import Lifespan, UserCode
from serve_replica_host.replica.user.executor import UserExecutor

TIMEOUT_S = 30.0


def build_goal(import_path: str = "app:App", ordinal: int = 1, **changes: Any) -> ReplicaGoal:
    """The goal of the replica ``default/app#<ordinal>``."""
    backend = BackendTag("default/app")
    fields: dict[str, Any] = {
        "replica_tag": replica_tag(backend, ordinal),
        "backend_tag": backend,
        "replica_config": ReplicaConfig(import_path=import_path),
        "config_version": 1,
        "max_concurrent_queries": 10,
        "graceful_shutdown_timeout_s": 20.0,
        "health_check_period_s": 10.0,
        "health_check_timeout_s": 30.0,
        "start_timeout_s": 60.0,
    }
    return ReplicaGoal(**(fields | changes))


@contextmanager
def importable(directory: Path, **sources: str) -> Iterator[str]:
    """A directory of modules of user code, by name; what was imported of it is forgotten afterwards."""
    for name, source in sources.items():
        (directory / f"{name}.py").write_text(source)
    yield str(directory)
    for name in sources:
        sys.modules.pop(name, None)
    sys.path[:] = [entry for entry in sys.path if entry != str(directory)]


class Tally:
    """Metrics that remember statuses and refusals."""

    def __init__(self) -> None:
        self.answered: list[int] = []
        self.refused: list[str] = []

    def count_response(self, status: int, seconds: float) -> None:
        assert seconds >= 0
        self.answered.append(status)

    def count_refused(self, reason: str) -> None:
        self.refused.append(reason)

    def turn(self) -> None:
        raise AssertionError

    def write(self, occupancy: Occupancy) -> None:
        raise AssertionError


class NoRefusals(Tally):
    """Metrics of a replica that is expected to refuse nothing."""

    def count_refused(self, reason: str) -> None:
        raise AssertionError(reason)


class Rig:
    """One replica that serves ``handler`` or ``application``."""

    def __init__(self, handler: Any = None, application: Any = None) -> None:
        loop = asyncio.get_running_loop()
        asgi = None if application is None else Lifespan(application)
        self.code = UserCode(handler or application, handler, 8, asgi)
        self.metrics = NoRefusals()
        self.requests: dict[bytes, Request] = {}
        self._replies = itertools.count(1)
        user_queue: Mailbox[Any] = Mailbox(loop, lambda item: self.user_executor.take(item))  # noqa: PLW0108 - it is made below
        self.bus_side = ReplicaProtocol(
            publish=self._publish,
            user_queue=user_queue.put,
            now=time.monotonic,
            metrics=self.metrics,
            max_concurrent_queries=8,
            streams_bodies=self.code.streams_bodies,
        )
        io_queue: Mailbox[Any] = Mailbox(loop, self.bus_side.handle_outcome)
        self.user_executor = UserExecutor(self.code, io_queue.put)

    def _publish(self, subject: bytes, frame: bytes) -> None:
        head, body = decode_frame(frame)
        self.requests[subject].take(head, bytes(body))

    def begin(
        self,
        path: str = "/app",
        *,
        kind: RequestKind = RequestKind.HTTP,
        method: str = "POST",
        query: str = "",
        headers: Headers | None = None,
        first: bytes = b"",
        body_bytes: int = 0,
        gives_credit: bool = True,
        timeout_s: float = TIMEOUT_S,
        call: CallHead | None = None,
        route: str = "/app",
    ) -> Request:
        reply = b"_INBOX.%d" % next(self._replies)
        head = RequestHead(
            kind, method, path, route, query, headers or [], timeout_s, body_bytes, "default/app", "r1",
            call=call, client="10.0.0.1:5",
        )  # fmt: skip
        request = self.requests[reply] = Request(self, reply, gives_credit=gives_credit)
        request.send(head, first)
        return request

    async def call(self, path: str = "/app", *, body: bytes = b"", **options: Any) -> Answer:
        """A request with its body, in as many frames as it needs."""
        first, *rest = split_body(body)
        request = self.begin(path, first=bytes(first), body_bytes=len(body), **options)
        if rest:
            await request.upload(rest)
        return await request.answer()

    async def idle(self) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            await self.bus_side.wait_idle()
            await self.user_executor.wait_idle()


class Answer:
    """A whole answer."""

    def __init__(self, head: Head, body: bytes) -> None:
        self.head = head
        self.body = body
        assert isinstance(head, ResponseHead | ErrorHead), head
        self.status = head.status

    @property
    def headers(self) -> dict[bytes, bytes]:
        assert isinstance(self.head, ResponseHead)
        return dict(self.head.headers)


class Request:
    """One request from its router's point of view; checks that the replica keeps to its windows."""

    def __init__(self, rig: Rig, reply: bytes, *, gives_credit: bool) -> None:
        self._rig = rig
        self._reply = reply
        self._gives_credit = gives_credit
        self._frames: asyncio.Queue[tuple[Head, bytes]] = asyncio.Queue()
        self._credited = asyncio.Event()
        self.credit = WINDOW_FRAMES - 1
        self.allowed = WINDOW_FRAMES
        self.sequence = 0
        self.expected = 1

    def take(self, head: Head, body: bytes) -> None:
        if isinstance(head, CreditHead):
            self.credit += head.frames
            self._credited.set()
            return
        if isinstance(head, ResponseHead) and head.status == 101:
            self.allowed = WINDOW_MESSAGES + 1
        if isinstance(head, ResponseHead | BodyHead | MessageHead):
            self.allowed -= 1
            assert self.allowed >= 0, "the replica sends more than it may"
        if isinstance(head, BodyHead | MessageHead):
            assert head.sequence == self.expected
            self.expected += 1
            if self._gives_credit:
                self.allow(1)
        self._frames.put_nowait((head, body))

    def allow(self, frames: int) -> None:
        self.allowed += frames
        asyncio.get_running_loop().call_soon(self.send, CreditHead(frames))

    def send(self, head: Head, body: bytes | memoryview = b"") -> None:
        self._rig.bus_side.handle_frame(b"s", self._reply, encode_frame(head, body), None)

    async def upload(self, pieces: list[Any], *, ends: bool = True) -> None:
        for number, piece in enumerate(pieces, 1):
            await self.has_credit()
            self.sequence += 1
            self.credit -= 1
            self.send(BodyHead(self.sequence, ends and number == len(pieces)), piece)

    async def has_credit(self) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while self.credit <= 0:
                self._credited.clear()
                await self._credited.wait()

    async def frame(self) -> tuple[Head, bytes]:
        async with asyncio.timeout(TIMEOUT_S):
            return await self._frames.get()

    @property
    def is_silent(self) -> bool:
        return self._frames.empty()

    async def answer(self) -> Answer:
        head, body = await self.frame()
        while isinstance(head, ResponseHead) and not head.last:
            more, piece = await self.frame()
            if isinstance(more, ErrorHead):
                return Answer(more, body)
            assert isinstance(more, BodyHead)
            body += piece
            if more.last:
                break
        return Answer(head, body)


UNKNOWN = UNKNOWN_BYTES
PIECE = b"x" * FRAME_BODY_BYTES_MAX
