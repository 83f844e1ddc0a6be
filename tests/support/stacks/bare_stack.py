"""The data plane alone, as processes: nats-server, proxies and replicas, and a bucket that the test writes.

Why without controller, host and Ray: what is proved here is between a client's byte and the user's code, and must be
up within a second, several times in a run of the tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Self

import msgspec
import nats
from nats.js.kv import KeyValue

from serve_common.config.backend import METHODS
from serve_common.names import BackendTag, EndpointTag, ReplicaTag
from serve_common.protocol.reports import ProxyReport
from serve_common.protocol.snapshots import BackendSnapshot, EndpointSnapshot, Snapshot
from serve_common.protocol.subjects import Subjects, backend_key, endpoint_key
from serve_controller.adapters.jetstream import bucket_config
from tests.support.paths import ROOT
from tests.support.servers.nats_server import NatsServer
from tests.support.stacks.bare_runner import RunOrder

_STARTS_WITHIN_S = 120.0


class Runner:
    """A process of `bare_runner`."""

    def __init__(self, kind: str, name: str, process: asyncio.subprocess.Process) -> None:
        self.kind = kind
        self.name = name
        self.process = process
        self.url = ""
        """Of a proxy."""

    @classmethod
    async def start(cls, kind: str, url: str, name: str, order: RunOrder, log_path: Path) -> Self:
        with log_path.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tests.support.stacks.bare_runner"),
                *(kind, url, name, msgspec.json.encode(order).decode()),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                cwd=ROOT,
                env={
                    **os.environ,
                    "PYTHONHASHSEED": "0",
                    "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(ROOT)]),
                },
            )
        self = cls(kind, name, process)
        try:
            async with asyncio.timeout(_STARTS_WITHIN_S):
                greeting = await self._line()
            assert greeting.get("error") is None, greeting["error"]
            self.url = f"http://{greeting.get('address', '')}"
        except BaseException:
            await self.end()
            raise
        return self

    async def look(self) -> dict[str, Any]:
        """What is held inside now; see `bare_runner`."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"look\n")
        async with asyncio.timeout(_STARTS_WITHIN_S):
            return await self._line()

    async def end(self) -> None:
        """In order, or by force."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            async with asyncio.timeout(10):
                await self.process.wait()
        except TimeoutError:
            self.process.kill()
            await self.process.wait()

    def kill(self) -> None:
        self.process.kill()

    async def _line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            if line.startswith(b"{"):  # user code may print
                content: dict[str, Any] = json.loads(line)
                return content
        raise AssertionError(f"{self.kind} {self.name} ended with code {await self.process.wait()}")


class BareStack:
    """Started whole; replicas and proxies are added, the test says in the bucket what is to be used."""

    def __init__(self, server: NatsServer) -> None:
        self.server = server
        self.bucket: KeyValue
        self.runners: list[Runner] = []
        self._snapshot_id = 0
        self._applied: dict[str, int] = {}
        self._heard = asyncio.Event()

    @classmethod
    @contextlib.asynccontextmanager
    async def running(cls, directory: Path) -> AsyncIterator[Self]:
        server = NatsServer(directory)
        server.start()
        self = cls(server)
        async with contextlib.AsyncExitStack() as ending:
            ending.callback(server.kill)
            self.client = await nats.connect(server.url)
            ending.push_async_callback(self.client.close)
            ending.push_async_callback(self._end_runners)
            await self.client.subscribe(Subjects().proxy_reports, cb=self._on_message)
            self.bucket = await self.client.jetstream().create_key_value(bucket_config(Subjects()))
            yield self

    async def _end_runners(self) -> None:
        await asyncio.gather(*(runner.end() for runner in self.runners))

    @property
    def proxies(self) -> list[Runner]:
        return [runner for runner in self.runners if runner.kind == "proxy"]

    @property
    def replicas(self) -> list[Runner]:
        return [runner for runner in self.runners if runner.kind == "replica"]

    async def add_proxies(self, count: int = 1, **order: Any) -> list[Runner]:
        first = len(self.proxies) + 1
        async with asyncio.TaskGroup() as group:  # if one does not start, none is left behind
            starting = [
                group.create_task(
                    Runner.start(
                        "proxy", self.server.url, f"p{number}", RunOrder(**order), self._log(f"p{number}")
                    )
                )
                for number in range(first, first + count)
            ]
        started = [task.result() for task in starting]
        self.runners += started
        return started

    async def add_replica(self, tag: str, import_path: str, **order: Any) -> Runner:
        started = await Runner.start(
            "replica", self.server.url, tag, RunOrder(import_path=import_path, **order), self._log(tag)
        )
        self.runners.append(started)
        return started

    async def put_endpoint(self, tag: str, route: str) -> None:
        """All of its traffic goes to the backend of the same name."""
        content = EndpointSnapshot(
            endpoint_tag=EndpointTag(tag), route=route, methods=list(METHODS), traffic={BackendTag(tag): 1.0}
        )
        await self._put(endpoint_key(EndpointTag(tag)), content)

    async def put_backend(
        self, tag: str, replicas: Sequence[str], *, limit: int = 100, queue: int = 10_000
    ) -> None:
        """Returns when every proxy goes by it."""
        content = BackendSnapshot(
            backend_tag=BackendTag(tag),
            replicas=[ReplicaTag(replica) for replica in replicas],
            draining=[],
            max_concurrent_queries=limit,
            max_queued_requests=queue,
        )
        await self._put(backend_key(BackendTag(tag)), content)
        await self.applied()

    async def applied(self) -> None:
        """Until every proxy goes by all that was put."""
        async with asyncio.timeout(_STARTS_WITHIN_S):
            while any(self._applied.get(proxy.name, 0) < self._snapshot_id for proxy in self.proxies):
                self._heard.clear()
                await self._heard.wait()

    def _log(self, name: str) -> Path:
        return self.server.directory / f"{name.replace('/', '_')}.log"

    async def _put(self, key: str, content: EndpointSnapshot | BackendSnapshot) -> None:
        self._snapshot_id += 1
        value = Snapshot(snapshot_id=self._snapshot_id, epoch=1, content=content)
        await self.bucket.put(key, msgspec.json.encode(value))

    async def _on_message(self, message: Any) -> None:
        report = msgspec.json.decode(message.data, type=ProxyReport)
        self._applied[report.proxy_id] = report.applied_snapshot_id
        self._heard.set()
