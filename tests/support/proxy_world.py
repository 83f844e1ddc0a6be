"""A dispatcher against a bus made of lists, for tests of everything that goes through it."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import msgspec
import pytest

from serve_common.dispatch.calls import RequestSpec
from serve_common.dispatch.dispatcher import Dispatcher
from serve_common.dispatch.routes import Routes
from serve_common.dispatch.shadows import Shadows
from serve_common.dispatch.timers import RequestTimers
from serve_common.dispatch.upstream import Outgoing
from serve_common.errors import ServeError
from serve_common.names import BackendTag, EndpointTag, ReplicaTag
from serve_common.nats.options import NotConnected, OutboundFull
from serve_common.protocol.frames import RequestHead, ResponseHead, decode_frame, encode_frame
from serve_common.protocol.reports import Wake
from serve_common.protocol.snapshots import BackendProtection, BackendSnapshot, EndpointSnapshot, Snapshot
from serve_common.protocol.subjects import Subjects, backend_key

BACKEND = BackendTag("d/a")
R0, R1 = ReplicaTag("d/a#0"), ReplicaTag("d/a#1")
TIMEOUT_S = 60.0


class Bus:
    """Bus and replies in one; remembers what was published until a test takes it."""

    def __init__(self) -> None:
        self.is_connected = True
        self.is_full = False
        self.hangs = False
        self.sent: list[tuple[str, bytes, object, bytes]] = []
        self.wakes: list[Wake] = []
        self.receivers: dict[bytes, tuple] = {}
        self.tokens = 0

    @property
    def is_responding(self) -> bool:
        return self.is_connected and not self.hangs

    def publish(self, subject, payload, reply=b"", headers=None) -> None:
        if not self.is_connected:
            raise NotConnected("away")
        if self.is_full:
            raise OutboundFull("full")
        if isinstance(subject, str) and subject.startswith("serve.wake."):
            wake = msgspec.json.decode(payload, type=Wake)
            assert subject == Subjects().wake(wake.backend_tag)
            self.wakes.append(wake)
            return
        head, body = decode_frame(payload)
        self.sent.append((subject.decode(), reply, head, bytes(body)))

    def new_reply(self, on_reply, on_no_responders):
        self.tokens += 1
        token = b"%d" % self.tokens
        self.receivers[token] = (on_reply, on_no_responders)
        return token, b"inbox." + token

    def replace(self, token, on_reply) -> None:
        self.receivers[token] = (on_reply, lambda: None)

    def forget(self, token) -> None:
        self.receivers.pop(token, None)


class World:
    """A dispatcher with one endpoint whose backend has the given replicas.

    The loop's time stands still at `now`, so that what is due a moment later does not depend on how long a test takes.
    """

    def __init__(self, *, limit: int = 1, queue: int = 10, bus_wait_s: float = 5.0) -> None:
        loop = asyncio.get_running_loop()
        self.now = loop.time()
        loop.time = lambda: self.now
        self.bus = Bus()
        self.chance = 0.0
        self.routes = Routes(lambda: self.chance)
        outgoing = self.outgoing = Outgoing(self.bus, self.bus, Subjects())
        self.dispatcher = Dispatcher(self.routes, outgoing, bus_wait_s=bus_wait_s)
        self.beat = RequestTimers(self.dispatcher, self.routes, outgoing)
        self.shadows = Shadows(self.dispatcher, lambda: self.chance, loop.time)
        self.limit, self.queue = limit, queue
        self.snapshot_id = 0
        self.tasks: list[asyncio.Task] = []
        self.put_endpoint()
        self.put(R0)

    def put_endpoint(self, content: EndpointSnapshot | str | None = "") -> None:
        if content == "":
            content = EndpointSnapshot(
                endpoint_tag=EndpointTag("d/a"), route="/a", methods=["GET"], traffic={BACKEND: 1.0}
            )
        self._publish("endpoints.d.a", content)

    def put_traffic(self, traffic, shadows=None) -> None:
        self.put_endpoint(
            EndpointSnapshot(
                endpoint_tag=EndpointTag("d/a"),
                route="/a",
                methods=["GET"],
                traffic=traffic,
                shadows=shadows or {},
            )
        )

    def put(
        self,
        *replicas: ReplicaTag,
        draining=(),
        backend: BackendTag = BACKEND,
        versions=None,
        can_wake: bool = False,
        is_stopped: bool = False,
        **protection,
    ) -> None:
        self._publish(
            backend_key(backend),
            BackendSnapshot(
                backend_tag=backend,
                replicas=list(replicas),
                draining=list(draining),
                max_concurrent_queries=self.limit,
                max_queued_requests=self.queue,
                protection=BackendProtection(**protection),
                can_wake=can_wake,
                is_stopped=is_stopped,
                code_versions=versions or {},
            ),
        )

    def _publish(self, key, content) -> None:
        self.snapshot_id += 1
        snapshot = Snapshot(snapshot_id=self.snapshot_id, epoch=1, content=content)
        self.dispatcher.update({key: snapshot}, whole=False)

    def drop_backend(self, backend: BackendTag = BACKEND) -> None:
        self._publish(backend_key(backend), None)

    async def ask(self, body: bytes = b"", **fields):
        task = asyncio.get_running_loop().create_task(self._query(self.make_ask(body, **fields)))
        self.tasks.append(task)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return task

    def make_ask(
        self, body: bytes = b"", *, repeatable: bool = True, headers=(), timeout_s=TIMEOUT_S, **fields
    ) -> RequestSpec:
        return RequestSpec(
            endpoint=self.routes.endpoints[EndpointTag("d/a")],
            method="GET",
            path="/a",
            route="/a",
            query="",
            headers=list(headers),
            body=body,
            request_id="id",
            traceparent="",
            is_repeatable=repeatable,
            deadline=self.now + timeout_s,
            **fields,
        )

    async def _query(self, ask: RequestSpec):
        self.shadows.copy(ask)
        return await self.dispatcher.send(ask)

    def take(self, kind):
        """The next published frame, which must be of ``kind``: its replica, reply, head and body."""
        subject, reply, head, body = self.bus.sent.pop(0)
        assert type(head) is kind, head
        return subject.rpartition(".")[2], reply, head, body

    def answer(self, reply: bytes, head, body: bytes = b"") -> None:
        receiver = self.bus.receivers.get(reply.rpartition(b".")[2])
        if receiver is not None:
            receiver[0](encode_frame(head, body), b"", None)

    def no_responders(self, reply: bytes) -> None:
        receiver = self.bus.receivers.get(reply.rpartition(b".")[2])
        if receiver is not None:
            receiver[1]()

    def ok(self, reply: bytes, body: bytes = b"ok") -> None:
        self.answer(reply, ResponseHead(200, [], True, 0), body)

    def serve(self, body: bytes = b"ok") -> str:
        """Answer the request that is the next published frame; the ordinal of the replica that it went to."""
        replica, reply, _, _ = self.take(RequestHead)
        self.ok(reply, body)
        return replica

    async def served_by(self, body: bytes = b"", **fields) -> str:
        """The ordinal of the replica that a new request goes to, which answers it."""
        task = await self.ask(body, **fields)
        replica = self.serve()
        await task
        return replica

    async def stream(self, **fields):
        """Reply subject, call and response of a new request that is answered by a stream, of ``0`` so far."""
        task = await self.ask(**fields)
        reply = self.take(RequestHead)[1]
        self.answer(reply, ResponseHead(200, [], False, 0), b"0")
        return reply, *await task

    def look(self, after_s: float) -> None:
        self.beat.tick(self.now + after_s)

    def assert_nothing_is_left(self) -> None:
        assert not self.dispatcher.calls
        assert not self.shadows.in_flight
        assert len(self.bus.receivers) == self.outgoing.receipts.late
        assert all(router.in_flight == router.queue_depth == 0 for router in self.routes.routers.values())


@asynccontextmanager
async def emptied(world):
    """Yield ``world``, and check after the test that each of its requests has ended and left nothing."""
    yield world
    assert all(task.done() for task in world.tasks), "a handler still waits"
    world.assert_nothing_is_left()


async def failure(task) -> ServeError:
    with pytest.raises(ServeError) as caught:
        await task
    return caught.value
