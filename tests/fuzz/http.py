"""Hostile pipelines to a whole proxy with a real replica behind it, beside h11 and uvicorn with the same application.

What must never differ is where one request ends and the next begins: that is what smuggling lives on. To refuse, or to
close, where a reference goes on is always allowed; to understand more than a reference needs an entry in `ALLOWED`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import psutil

from serve_common.config.backend import METHODS
from serve_common.names import BackendTag
from serve_common.runtime.request_context import set_replica_context
from serve_replica_host.replica.process import ReplicaProcess
from tests.fuzz import echo_app
from tests.fuzz.pipelines import (
    CLOSED,
    INCOMPLETE,
    REFUSED,
    Message,
    Pipeline,
    Reading,
    Uvicorn,
    draw,
    read_by_h11,
)
from tests.support.paths import ROOT
from tests.support.servers.nats_server import NatsServer
from tests.support.stacks.bare_runner import RunOrder, start_order
from tests.support.stacks.proxy_stack import R0, TAG, Stack, running_stack
from tests.support.stacks.replica_runner import NoMetrics
from tests.support.waiting import eventually

BATCH: Final = 200
AT_ONCE: Final = 24
_GUARD_S: Final = 60.0
"""Against what never ends; nothing is judged by it but that."""

ALLOWED: Final = {
    # What h11 says when it refuses: why that may be understood here all the same. Nothing of it is about framing.
    "Missing mandatory Host": "an application may do without; nothing is routed by it",
    "illegal request line": "more than one space, or white space at its end (RFC 9112, 3, lets a server be lenient)",
}
"""Refusals of h11 that the proxy need not share."""


class Client:
    """One connection to the proxy."""

    def __init__(self) -> None:
        self.statuses: list[int] = []
        self.says_close = False
        self.is_ended = False
        """The proxy has closed it."""
        self.has_left = False
        """In the middle of a request, where it had been answered all before."""

    async def run(self, address: tuple[str, int], pipeline: Pipeline, expected: Reading) -> None:
        """Send all, and read until the proxy closes; where a request is unfinished, until all others are answered."""
        reader, writer = await asyncio.open_connection(*address, limit=1 << 20)
        try:
            with contextlib.suppress(ConnectionError):
                at = 0
                for cut in (*pipeline.cuts, len(pipeline.sent)):
                    writer.write(pipeline.sent[at:cut])
                    at = cut
                    await writer.drain()
                    await asyncio.sleep(0)
            if pipeline.is_cut_off:
                return
            wanted = len(expected.methods) if expected.end == INCOMPLETE else 1 << 30
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                while len(self.statuses) < wanted:
                    await self._check_result(reader, expected)
                self.has_left = True
                return
            self.is_ended = True
        finally:
            writer.transport.abort()

    async def _check_result(self, reader: asyncio.StreamReader, expected: Reading) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        status = int(head[9:12])
        if status < 200:
            return
        self.says_close = b"\r\nconnection: close\r\n" in head
        if b"\r\ntransfer-encoding: chunked\r\n" in head:
            while size := int(await reader.readuntil(b"\r\n"), 16):
                await reader.readexactly(size + 2)
            await reader.readuntil(b"\r\n")
        else:
            length = int(head.partition(b"\r\ncontent-length: ")[2].partition(b"\r\n")[0] or 0)
            number = len(self.statuses)
            if expected.methods[number : number + 1] == ["HEAD"]:
                length = 0
            await reader.readexactly(length)
        self.statuses.append(status)


def difference(pipeline: Pipeline, reference: Reading, seen: list[Message], client: Client) -> str | None:
    """What is wrong with what the proxy made of a pipeline; None when nothing is. A name in brackets is allowed."""
    common = 0
    expected = [message for message in reference.messages if message.path not in pipeline.optional]
    seen = [message for message in seen if message.path not in pipeline.optional]
    for theirs, ours in zip(expected, seen, strict=False):
        if theirs != ours:
            return f"message {common} differs"
        common += 1
    if len(seen) > common:
        if reference.end == REFUSED:
            for said in ALLOWED:
                if said in reference.why:
                    return f"[{said}]"
            return f"understood {seen[common:]}, which was refused: {reference.why}"
        if pipeline.is_cut_off:
            return "saw a request that never came whole"
        if pipeline.keeps_alive and reference.end == CLOSED:
            return "[keeps a connection of HTTP/1.0]"
        return f"saw {seen[common:]} besides ({reference.end})"
    if pipeline.is_cut_off:
        return None  # who leaves is owed nothing
    if len(seen) < pipeline.good:
        return f"dropped good requests: {len(seen)} of {pipeline.good} are left"
    refused = bool(client.statuses) and client.statuses[-1] >= 400
    if len(seen) < len(expected):
        if refused or client.says_close or (client.is_ended and not client.statuses):
            return "[stricter]"
        return f"missed {len(expected) - len(seen)} requests and did not refuse them"
    if reference.end == REFUSED and not (refused or client.is_ended or client.has_left):
        return "neither refused nor closed"
    return None


class World:
    """A proxy, its replica, and the references."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        host, _, port = stack.url.removeprefix("http://").rpartition(":")
        self.address = host, int(port)
        self.reference_seen: echo_app.Seen = defaultdict(list)
        self.uvicorn = Uvicorn(echo_app.make_app(self.reference_seen))
        self.found: list[str] = []
        self.allowed: Counter[str] = Counter()
        self.messages = 0

    async def settled(self) -> None:
        """Until nothing is under way; raises TimeoutError when that never comes about."""
        proxy = self.stack.proxy
        await eventually(
            lambda: (
                not proxy.http.in_flight
                and not proxy.http.connections
                and not proxy._dispatcher.calls
                and not any(router.in_flight for router in proxy._ingress.routes.routers.values())
            ),
            within_s=_GUARD_S,
        )

    async def run(self, pipelines: list[Pipeline], seed: int) -> None:
        """One batch."""
        readings = [read_by_h11(pipeline) for pipeline in pipelines]
        clients = [Client() for _ in pipelines]
        limit = asyncio.Semaphore(AT_ONCE)

        async def one(index: int) -> None:
            async with limit:
                try:
                    async with asyncio.timeout(_GUARD_S):
                        await clients[index].run(self.address, pipelines[index], readings[index])
                except TimeoutError:
                    self.found.append(
                        f"seed {seed} pipeline {pipelines[index].number} {pipelines[index].kinds}: hangs, "
                        f"h11 {readings[index].end} {readings[index].why}, answered {clients[index].statuses}"
                    )

        async with asyncio.TaskGroup() as tasks:
            for index in range(len(pipelines)):
                tasks.create_task(one(index))
        await self.settled()
        for pipeline, by_h11, client in zip(pipelines, readings, clients, strict=True):
            number = pipeline.number
            seen = echo_app.SEEN.pop(number, [])
            self.messages += len(seen)
            by_uvicorn = await self.uvicorn.read(pipeline, self.reference_seen[number])
            del self.reference_seen[number]
            for name, reference in (("h11", by_h11), ("uvicorn", by_uvicorn)):
                told = difference(pipeline, reference, seen, client)
                if told is None:
                    continue
                if told.startswith("["):
                    self.allowed[f"{name} {told}"] += 1
                else:
                    self.found.append(
                        f"seed {seed} pipeline {number} {pipeline.kinds}: {name}: {told}; "
                        f"answered {client.statuses}"
                    )
            if any(status >= 500 and status not in (501, 503, 505) for status in client.statuses):
                self.found.append(f"seed {seed} pipeline {number} {pipeline.kinds}: {client.statuses}")


@contextlib.asynccontextmanager
async def running_world() -> AsyncIterator[World]:
    """Everything up; at its end nothing may be left."""
    root = str(ROOT)
    with tempfile.TemporaryDirectory() as directory, NatsServer(Path(directory)) as server:
        order = RunOrder(import_path="tests.fuzz.echo_app:app", app_dir=root, max_concurrent_queries=1000)
        replica = ReplicaProcess(start_order(server.url, R0, order), NoMetrics())
        error = await asyncio.to_thread(replica.start)
        assert error is None, error
        async with running_stack(server) as stack:
            await stack.serve()
            await stack.put_endpoint(methods=METHODS)
            await stack.applied(await stack.put_backend(R0, limit=1000))
            yield World(stack)
            assert not stack.proxy._ingress.routes.routers[BackendTag(TAG)].in_flight
        await asyncio.to_thread(replica.drain)
        set_replica_context(None)


async def fuzz(seed: int, first: int, count: int) -> World:
    """``count`` pipelines, the ``first`` one onwards; raises AssertionError when the proxy leaks."""
    async with running_world() as world:
        tasks, rss, at = 0, 0, 0
        for begin in range(first, first + count, BATCH):
            await world.run([draw(seed, n) for n in range(begin, min(begin + BATCH, first + count))], seed)
            at += BATCH
            if at >= count // 4 and not rss:
                gc.collect()
                tasks, rss = len(asyncio.all_tasks()), psutil.Process().memory_info().rss
        gc.collect()
        grown = psutil.Process().memory_info().rss - rss
        assert len(asyncio.all_tasks()) <= tasks + 4, "tasks are left behind"
        assert grown < 64 * 1024 * 1024, f"memory grew by {grown >> 20} MiB"
        assert world.stack.proxy.http.connections == 0
        assert not world.stack.is_failed
        return world


def main(seed: int, first: int, count: int) -> int:
    """A part of the long run, in a process of its own; the exit code is 1 when something was found."""
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    world = asyncio.run(fuzz(seed, first, count))
    for line in world.found[:20]:
        print(line, file=sys.stderr)
    told = f"{world.messages} requests understood, {len(world.found)} wrong, allowed: {dict(world.allowed)}"
    print(f"{count} pipelines, {told}")
    return 1 if world.found else 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:4])))
