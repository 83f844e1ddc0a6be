"""A router of handles against a bus made of lists; what is sent is answered by the test."""

from __future__ import annotations

import asyncio
import pickle
import sys
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any

import msgspec
import pytest

from muster.handles import (
    DeploymentHandle,
    DeploymentResponse,
    DeploymentResponseGenerator,
    get_deployment_handle,
)
from muster.handles import handle as handle_module
from muster.handles.calls import HandleCall
from muster.handles.router import HandleRouter
from serve_common.dispatch.dispatcher import Dispatcher
from serve_common.dispatch.routes import Routes
from serve_common.dispatch.shadows import Shadows
from serve_common.dispatch.timers import RequestTimers
from serve_common.dispatch.upstream import Outgoing
from serve_common.names import BackendTag, EndpointTag, ReplicaTag, replica_tag
from serve_common.protocol.frames import BodyHead, Head, RequestHead, ResponseHead, decode_frame, encode_frame
from serve_common.protocol.reports import Wake
from serve_common.protocol.snapshots import BackendSnapshot, EndpointSnapshot, Snapshot
from serve_common.protocol.subjects import Subjects, backend_key, endpoint_key
from serve_common.runtime.threads import Mailbox


class Sent:
    """A request that reached a replica."""

    def __init__(self, world: World, subject: str, reply: bytes, head: RequestHead, body: bytes) -> None:
        self._world = world
        self.subject = subject
        self.reply = reply
        self.head = head
        self.body = body
        self._sequence = 0

    @property
    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        loaded: tuple[tuple[Any, ...], dict[str, Any]] = pickle.loads(self.body)
        return loaded

    def say(self, head: Head, body: bytes = b"") -> None:
        self._world.receivers[self.reply][0](encode_frame(head, body), b"", None)

    def answer(self, value: Any) -> None:
        self.say(ResponseHead(200, [], True, 0), pickle.dumps(value))

    def open(self, data: bytes = b"") -> None:
        self.say(ResponseHead(200, [], False, 0), data)

    def more(self, data: bytes, *, last: bool = False) -> None:
        self._sequence += 1
        self.say(BodyHead(self._sequence, last), data)


class World:
    """Bus, replies, bucket and router in one; to be made on a running loop."""

    def __init__(self) -> None:
        loop = self._loop = asyncio.get_running_loop()
        self.is_connected = True
        self.is_responding = True
        self.receivers: dict[bytes, tuple[Callable[..., None], Callable[[], None]]] = {}
        self._requests: asyncio.Queue[Sent] = asyncio.Queue()
        self.told: list[Head] = []
        """What was sent after the requests: credit, cancels, probes."""
        self.wakes: list[Wake] = []
        self._tokens = 0
        self._snapshot_id = 0
        self.routes = Routes(lambda: 0.0)
        outgoing = self.outgoing = Outgoing(self, self, Subjects())
        self.dispatcher = Dispatcher(self.routes, outgoing, bus_wait_s=5.0)
        self.beat = RequestTimers(self.dispatcher, self.routes, outgoing)
        self.router = HandleRouter(
            self.dispatcher, self.routes, Shadows(self.dispatcher, lambda: 0.0, loop.time)
        )
        self._mailbox: Mailbox[HandleCall] = Mailbox(loop, self.router.take)

    # -- a bus and its replies --

    def publish(
        self, subject: str | bytes, payload: bytes, reply: bytes = b"", headers: bytes | None = None
    ) -> None:
        if isinstance(subject, str) and subject.startswith("serve.wake."):
            self.wakes.append(msgspec.json.decode(payload, type=Wake))
            return
        head, body = decode_frame(payload)
        if isinstance(head, RequestHead):
            name = subject if isinstance(subject, str) else subject.decode()
            self._requests.put_nowait(Sent(self, name, reply, head, bytes(body)))
        else:
            self.told.append(head)

    def new_reply(
        self, on_reply: Callable[..., None], on_no_responders: Callable[[], None]
    ) -> tuple[bytes, bytes]:
        self._tokens += 1
        token = b"%d" % self._tokens
        self.receivers[token] = (on_reply, on_no_responders)
        return token, token

    def replace(self, token: bytes, on_reply: Callable[..., None]) -> None:
        self.receivers[token] = (on_reply, lambda: None)

    def forget(self, token: bytes) -> None:
        self.receivers.pop(token, None)

    # -- a runtime --

    def post(self, call: HandleCall) -> None:
        self._mailbox.put(call)

    def submit(self, question: Callable[[HandleRouter], Coroutine[Any, Any, Any]]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(question(self.router), self._loop)

    # -- a bucket --

    def deploy(
        self,
        *names: str,
        whole: bool = True,
        route: str | None = None,
        replicas: int = 1,
        can_wake: bool = False,
        is_ingress: bool = False,
    ) -> None:
        snapshots: dict[str, Snapshot | None] = {}
        for name in names:
            endpoint_tag, backend_tag = EndpointTag(name), BackendTag(name)
            endpoint = EndpointSnapshot(
                endpoint_tag=endpoint_tag,
                route=route,
                methods=["POST"],
                traffic={backend_tag: 1.0},
                is_ingress=is_ingress,
            )
            backend = BackendSnapshot(
                backend_tag=backend_tag,
                replicas=[replica_tag(backend_tag, number) for number in range(replicas)],
                draining=[],
                max_concurrent_queries=100,
                max_queued_requests=10 if can_wake else 0,
                can_wake=can_wake,
            )
            snapshots[endpoint_key(endpoint_tag)] = self._snapshot(endpoint)
            snapshots[backend_key(backend_tag)] = self._snapshot(backend)
        self.router.on_snapshots(snapshots, whole=whole)

    def _snapshot(self, content: EndpointSnapshot | BackendSnapshot) -> Snapshot:
        self._snapshot_id += 1
        return Snapshot(snapshot_id=self._snapshot_id, epoch=1, content=content)

    # -- for tests --

    @property
    def is_idle(self) -> bool:
        """True when nothing is held for any call."""
        return not self.dispatcher.calls and len(self.receivers) == self.outgoing.receipts.late

    async def sent(self) -> Sent:
        """The next request that reaches a replica."""
        return await asyncio.wait_for(self._requests.get(), 30)

    async def settle(self) -> None:
        """Let everything that is on its way between threads arrive."""
        for _ in range(5):
            await asyncio.sleep(0)

    def handle(self, name: str = "a", app_name: str = "default") -> DeploymentHandle:
        return get_deployment_handle(name, app_name, _check_exists=False)


TAG = ReplicaTag("default/a#0")


def make_world(monkeypatch: pytest.MonkeyPatch, *deployed: str) -> World:
    world = World()
    # Exceptions are those of a program that does not import Ray, whatever other tests of this process did.
    monkeypatch.delitem(sys.modules, "ray.exceptions", raising=False)
    monkeypatch.setattr(handle_module, "runtime", lambda: world)
    monkeypatch.setattr(handle_module, "is_running", lambda: True)
    if deployed:
        world.deploy(*deployed)
    return world


def call(handle: Any, *args: Any, **kwargs: Any) -> DeploymentResponse:
    response = handle.remote(*args, **kwargs)
    assert isinstance(response, DeploymentResponse)
    return response


def stream(handle: Any, *args: Any) -> DeploymentResponseGenerator:
    response = handle.options(stream=True).remote(*args)
    assert isinstance(response, DeploymentResponseGenerator)
    return response


def pickled_items(*values: Any) -> bytes:
    pickled = [pickle.dumps(value) for value in values]
    return b"".join(len(one).to_bytes(4, "big") + one for one in pickled)
