"""What the proxy's integration tests share: a nats-server of their own, and a proxy with what it needs around it.

Why the tests write the bucket themselves: a proxy must work from snapshots alone, whoever wrote them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import aiohttp
import msgspec
import nats

from serve_common.config.backend import EndpointOptions, HttpOptions
from serve_common.config.capture import CaptureConfig
from serve_common.names import BackendTag, EndpointTag, ProxyId
from serve_common.nats.client import close_nats
from serve_common.protocol.frames import BodyHead, ErrorHead, ResponseHead
from serve_common.protocol.reports import ProxyReport
from serve_common.protocol.snapshots import BackendSnapshot, EndpointSnapshot, HttpSnapshot, Snapshot
from serve_common.protocol.subjects import HTTP_KEY, Subjects, backend_key, endpoint_key
from serve_common.runtime.settings import BusSettings, OperationsSettings
from serve_controller.adapters.jetstream import bucket_config
from serve_proxy.settings import ProxySettings
from serve_proxy.wiring import Proxy
from tests.support.servers.nats_server import NatsServer
from tests.support.stacks.fake_replica import FakeReplica, Held
from tests.support.waiting import eventually

TAG = "default/echo"
R0, R1 = f"{TAG}#0", f"{TAG}#1"
MIB = 1024 * 1024
_LIMIT_S = 30.0
"""For what takes a moment on a quiet machine, and has no limit of its own on a busy one."""
BIG_BYTES = 3 * 1024 * 1024


class Stack:
    """NATS, a bucket that the test writes as a controller would, replicas, and one proxy in this process."""

    def __init__(self, server: NatsServer) -> None:
        self.server = server
        self.subjects = Subjects()
        self.snapshot_id = 0
        self.replicas: list[FakeReplica] = []
        self.reports: list[ProxyReport] = []
        self._reported = asyncio.Event()
        self.is_failed = False

    async def start(self, **options) -> None:
        self.client = await nats.connect(self.server.url, reconnect_time_wait=0.05, max_reconnect_attempts=-1)
        await self.client.subscribe(self.subjects.proxy_reports, cb=self._on_message)
        self.http_options = HttpOptions(
            request_timeout_s=options.pop("request_timeout_s", _LIMIT_S), body_bytes_max=10 * MIB
        )
        write_access = options.pop("write_access", None)
        settings = make_settings(self.server, self.http_options, **options)
        self.proxy = Proxy(settings, on_failure=self._fail, write_access=write_access)
        address = await self.proxy.start()
        self.url = address if "://" in address else f"http://{address}"
        self.session = aiohttp.ClientSession(auto_decompress=False, connector=aiohttp.TCPConnector(limit=0))

    def _fail(self) -> None:
        self.is_failed = True

    async def close(self) -> None:
        await self.session.close()
        await self.proxy.close()
        for replica in self.replicas:
            await replica.close()
        await close_nats(
            self.client
        )  # also while NATS is away: the library itself may then reconnect for ever

    async def create_bucket(self) -> None:
        self.bucket = await self.client.jetstream().create_key_value(bucket_config(self.subjects))

    async def put(self, key: str, content) -> int:
        self.snapshot_id += 1
        value = Snapshot(snapshot_id=self.snapshot_id, epoch=1, content=content)
        await self.bucket.put(key, msgspec.json.encode(value))
        return self.snapshot_id

    async def put_endpoint(
        self,
        tag: str = TAG,
        route: str | None = "/echo",
        methods=("GET", "POST", "HEAD"),
        traffic=None,
        shadows=None,
        options=None,
        capture: CaptureConfig | None = None,
    ) -> int:
        content = EndpointSnapshot(
            endpoint_tag=EndpointTag(tag),
            route=route,
            methods=list(methods),
            traffic=traffic or {BackendTag(TAG): 1.0},
            shadows=shadows or {},
            options=options or EndpointOptions(),
            capture=capture,
        )
        return await self.put(endpoint_key(EndpointTag(tag)), content)

    async def put_backend(
        self,
        *replicas: str,
        tag: str = TAG,
        draining=(),
        limit: int = 100,
        queue: int = 1000,
        can_wake: bool = False,
    ) -> int:
        content = BackendSnapshot(
            backend_tag=BackendTag(tag),
            replicas=list(replicas),
            draining=list(draining),
            max_concurrent_queries=limit,
            max_queued_requests=queue,
            can_wake=can_wake,
        )
        return await self.put(backend_key(BackendTag(tag)), content)

    async def put_http(self, **options) -> int:
        return await self.put(HTTP_KEY, HttpSnapshot(options=HttpOptions(**options)))

    async def add_replica(self, tag: str, **options) -> FakeReplica:
        replica = await FakeReplica(self.server.url, tag, **options).start()
        self.replicas.append(replica)
        return replica

    async def _on_message(self, message) -> None:
        self.reports.append(msgspec.json.decode(message.data, type=ProxyReport))
        self._reported.set()

    async def report(self, is_wanted) -> ProxyReport:
        """The first report, past or future, that ``is_wanted``."""
        async with asyncio.timeout(_LIMIT_S):
            while True:
                for report in self.reports:
                    if is_wanted(report):
                        return report
                self._reported.clear()
                await self._reported.wait()

    async def queued(self, count: int = 1, tag: str = TAG) -> None:
        """Until so many requests wait in the proxy; its queue tells nobody, so it is looked at."""
        router = self.proxy._ingress.routes.routers[BackendTag(tag)]
        await eventually(lambda: router.queue_depth >= count, within_s=_LIMIT_S)

    async def applied(self, snapshot_id: int) -> None:
        await self.report(lambda report: report.applied_snapshot_id >= snapshot_id)

    async def serve(self, *replicas: str, **backend) -> list[FakeReplica]:
        """Everything up: bucket, one endpoint, the given replicas, and the proxy knows."""
        started = [await self.add_replica(tag) for tag in replicas]
        await self.create_bucket()
        await self.put_endpoint()
        await self.applied(await self.put_backend(*replicas, **backend))
        await self.reachable()
        return started

    async def reachable(self) -> None:
        """Until requests can be sent and plain calls come: that is another connection than the one of reports."""
        async with asyncio.timeout(_LIMIT_S):
            while not self.proxy._bus.is_connected:  # noqa: ASYNC110 - only who was there at its making is told
                await asyncio.sleep(0.01)
            await self.proxy._bus.flush(_LIMIT_S)

    async def came(self, replica: FakeReplica) -> None:
        """Until all that the proxy has sent to ``replica`` has come there, and what that answered at once is back."""
        await self.proxy._bus.flush(_LIMIT_S)
        await replica.flush()  # behind what the server had for it
        await replica.flush()  # behind its answers
        await self.proxy._bus.flush(_LIMIT_S)

    async def metrics(self) -> str:
        url = f"http://127.0.0.1:{self.proxy.operations.port}/metrics"
        async with self.session.get(url) as response:
            return await response.text()

    async def until_shown(self, line: str) -> None:
        """Until the metrics have ``line`` somewhere: what lasts beyond its answer is counted after it."""
        async with asyncio.timeout(_LIMIT_S):
            while line not in await self.metrics():  # noqa: ASYNC110 - metrics tell nobody
                await asyncio.sleep(0.01)

    async def get(self, path: str, method: str = "GET", **options):
        async with self.session.request(method, self.url + path, **options) as response:
            return response.status, await response.read(), response.headers


def make_settings(server: NatsServer, http: HttpOptions, **options) -> ProxySettings:
    return ProxySettings(
        proxy_id=ProxyId("p1"),
        bus=BusSettings(
            servers=[server.url], user="", password="", inbox_prefix="_INBOX_proxy", subject_prefix="serve"
        ),
        operations=OperationsSettings(host="127.0.0.1", port=0),
        http_host="127.0.0.1",
        http_port=0,
        http=http,
        drain_timeout_s=options.pop("drain_timeout_s", _LIMIT_S),
        bus_wait_s=options.pop("bus_wait_s", _LIMIT_S),
        **options,
    )


@contextlib.asynccontextmanager
async def running_stack(server: NatsServer, **options) -> AsyncIterator[Stack]:
    """A stack on ``server``, which may still be starting."""
    stack = Stack(server)
    async with asyncio.timeout(_LIMIT_S):
        while True:
            try:
                await stack.start(**options)
                break
            except nats.errors.NoServersError:
                await asyncio.sleep(0.05)
    try:
        yield stack
    finally:
        await stack.close()
    assert not stack.is_failed
    assert not stack.proxy._dispatcher.calls


class CallReplica(FakeReplica):
    """Serves plain NATS calls, which bear no path: the body says what becomes of it.

    ``hold`` waits to be released, ``raise`` fails, ``big`` is answered with 3 MiB, ``drip`` with a first piece until
    `drip` sends more, ``head`` with what came beside it; else it echoes.
    """

    def _work(self, held: Held) -> None:
        match bytes(held.body):
            case b"hold":
                return
            case b"drip":
                self.send(held, ResponseHead(200, [], False, 0), b"first")
            case b"head":
                head = held.head
                names = [name.decode() for name, _ in head.headers]
                self._finish(
                    held, msgspec.json.encode([head.method, head.route, head.path, head.query, names])
                )
            case b"raise":
                self.send(held, ErrorHead("user_code_raised", 500, "ValueError: not this", 0))
                self.held.pop(held.reply, None)
            case b"big":
                self._stream(held, [(b"content-type", b"text/big")], bytes(BIG_BYTES))
            case b"break":
                self._stream(held, [], bytes(2 * BIG_BYTES))  # more than there is credit for
                self.send(held, ErrorHead("user_code_raised", 500, "broke off", 0))
                self.held.pop(held.reply, None)
            case body:
                self._finish(held, body)

    def drip(self, body: bytes, *, last: bool = False) -> None:
        """The next piece of each answer that drips."""
        for held in list(self.held.values()):
            self.send(held, BodyHead(held.sequence, last), body)
            held.sequence += 1
            if last:
                self.held.pop(held.reply)


async def serve_calls(stack: Stack) -> CallReplica:
    """Everything up, with one such replica behind ``default/echo``."""
    replica = CallReplica(stack.server.url, R0)
    await replica.start()
    stack.replicas.append(replica)
    await stack.serve()
    await stack.applied(await stack.put_backend(R0))
    return replica
