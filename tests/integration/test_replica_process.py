"""A replica's process in this one, with a real nats-server: what its code knows, and what it tells routers."""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from serve_common.direct.dialing import DirectLinks
from serve_common.direct.link import DirectLink, link_token
from serve_common.names import BackendTag, ReplicaTag, replica_tag
from serve_common.nats.connection import BusConnection, Inbox
from serve_common.nats.options import BusOptions
from serve_common.protocol.frames import (
    CallHead,
    CreditHead,
    ErrorHead,
    Head,
    RefusedHead,
    RequestHead,
    RequestKind,
    ResponseHead,
    decode_frame,
    encode_frame,
)
from serve_common.protocol.reports import ReplicaGoal, ReplicaRank
from serve_common.protocol.subjects import Subjects
from serve_common.runtime.request_context import current_replica
from serve_common.runtime.settings import DirectMode
from serve_replica_host.replica.process import ReplicaProcess
from tests.support.servers.nats_server import NatsServer
from tests.support.stacks.bare_runner import RunOrder, start_order
from tests.support.stacks.raw_peers import running_replica
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(180)

BACKEND = BackendTag("default/app")
TAG = replica_tag(BACKEND, 1)
DEADLINE_S = 40.0
"""Of each request: far more than any takes."""
SUBJECTS = Subjects()

APP = """
import threading
import time
from serve_common.runtime.request_context import current_replica
from serve_common.runtime.request_context import request_context

AT_IMPORT = current_replica()
GO = threading.Event()

class App:
    def __init__(self):
        self.at_construction = current_replica().servable_object

        self.reconfigured = []

    def reconfigure(self, user_config):
        self.reconfigured.append(user_config)

    async def __call__(self, request):
        return self.told()

    def plain(self, argument):
        return self.told() | {"argument": argument}

    def told(self):
        replica, request = current_replica(), request_context.get()
        return {
            "tag": replica.replica_tag, "code_version": replica.code_version, "peer_versions": replica.peer_versions,
            "self": replica.servable_object is self, "early": AT_IMPORT is replica,
            "at_construction": self.at_construction is None,
            "id": request.request_id, "endpoint": request.endpoint_tag, "route": request.route,
            "model": request.model_id, "left_s": request.deadline - time.monotonic(),
            "traceparent": request.traceparent,
        }

    async def get_reconfigured(self):
        return self.reconfigured

    async def block(self, seconds):
        time.sleep(seconds)
        return "blocked"

    async def block_until_told(self):
        return "blocked" if GO.wait(60) else "never told"

    def hold(self, models):
        current_replica().publish_models(models)

    def _secret(self):
        return "secret"

class Ranked(App):
    def reconfigure(self, user_config, rank):
        if user_config == "bad":
            raise ValueError("bad")
        self.reconfigured.append([user_config, rank and rank.rank])
"""


class Driver:
    """A router, and who made the replica."""

    def __init__(self, process: ReplicaProcess, goal: ReplicaGoal, connection: BusConnection) -> None:
        self.process = process
        self.goal = goal
        self.connection = connection
        self.inbox = Inbox(connection, f"t{random.randrange(10**9)}")
        self.link: DirectLink | None = None
        self.models: asyncio.Queue[tuple[ReplicaTag, list[str]]] = asyncio.Queue()
        connection.subscribe(SUBJECTS.all_models, self._take_models)

    def _take_models(self, subject: bytes, _reply: bytes, payload: bytes, _headers: bytes | None) -> None:
        tag = SUBJECTS.parse_models_replica(subject.decode())
        self.models.put_nowait((tag, msgspec.msgpack.decode(payload, type=list[str])))

    async def ask_again_and_again(self, number: int) -> int:
        """How many answers were as they must be."""
        right = 0
        for turn in range(60):
            size_bytes = (0, 10, 5_000, 100_000)[(number + turn) % 4]
            argument = msgspec.json.encode("x" * size_bytes)
            _, body = await self.call(argument, method_name="plain")
            right += msgspec.json.decode(body)["argument"] == "x" * size_bytes
        return right

    async def dial(self) -> None:
        """Send over a direct link from now on."""
        links = DirectLinks(DirectMode.ALL, self.inbox, self.connection.publish, lambda _link: None)
        links.dial(TAG, SUBJECTS.replica(TAG))
        await eventually(lambda: links.get(TAG))
        self.link = links.get(TAG)

    def send(
        self,
        body: bytes = b"",
        *,
        method_name: str = "",
        model_id: str = "",
        take: Callable[[bytes, bytes, bytes | None], None] = lambda *_: None,
    ) -> bytes:
        """Ask: by HTTP, or for a method. Returned is the token of the reply, which ``take`` is told."""
        token, reply = self.inbox.new_reply(take, lambda: None)
        kind = RequestKind.CALL if method_name else RequestKind.HTTP
        head = RequestHead(
            kind, "POST", "/app", "/app", "", [], DEADLINE_S, len(body), "default/app", "r7", traceparent="00-x",
            call=CallHead(method_name=method_name, model_id=model_id),
        )  # fmt: skip
        if self.link is None:
            self.connection.publish(SUBJECTS.replica(TAG), encode_frame(head, body), reply)
        else:
            self.link.send(link_token(reply), head, body)
        return token

    async def call(self, body: bytes = b"", **options: str) -> tuple[Head, bytes]:
        frames: asyncio.Queue[tuple[Head, bytes]] = asyncio.Queue()

        def take(payload: bytes, _reply: bytes, _headers: bytes | None) -> None:
            head, data = decode_frame(payload)
            if not isinstance(head, CreditHead):
                frames.put_nowait((head, bytes(data)))

        token = self.send(body, take=take, **options)
        try:
            return await asyncio.wait_for(frames.get(), DEADLINE_S)
        finally:
            self.inbox.forget(token)


WAYS = pytest.mark.parametrize("way", ["the bus", "a direct link"])


@pytest.fixture
def sockets_dir() -> Iterator[str]:
    """Short, as paths of sockets must be."""
    with tempfile.TemporaryDirectory(prefix="links-") as name:
        yield f"{name}/direct"


@pytest.fixture
async def driver(
    shared_server: NatsServer,
    tmp_path: Path,
    sockets_dir: str,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> AsyncIterator[Driver]:
    class_name = getattr(request, "param", "App")
    # What is told at once is not told by the way, and nothing is told twice.
    monkeypatch.setattr("serve_replica_host.replica.process.MODELS_INTERVAL_S", 3600.0)
    (tmp_path / "process_app.py").write_text(APP)
    code = RunOrder(
        import_path=f"process_app:{class_name}",
        app_dir=str(tmp_path),
        max_concurrent_queries=4,
        direct_dir=sockets_dir,
    )
    order = start_order(shared_server.url, TAG, code)
    goal = msgspec.structs.replace(order.goal, code_version=3, peer_versions={BackendTag("default/other"): 2})
    connection = BusConnection(
        BusOptions(servers=[shared_server.url], inbox_prefix="_INBOX_proxy"), random.SystemRandom()
    )
    try:
        async with running_replica(msgspec.structs.replace(order, goal=goal)) as process:
            await connection.connect(timeout_s=30)
            driver = Driver(process, goal, connection)
            await connection.flush(30)
            yield driver
    finally:
        await connection.close()


async def test_code_knows_its_replica_from_its_import_on_and_each_request_it_works_on(driver: Driver) -> None:
    head, body = await driver.call(model_id="m1")
    plain, plain_body = await driver.call(b"[1]", method_name="plain")

    assert isinstance(head, ResponseHead)
    told: dict[str, Any] = msgspec.json.decode(body)
    assert 0 < told.pop("left_s") <= DEADLINE_S
    assert told == {
        "tag": TAG, "code_version": 3, "peer_versions": {"default/other": 2}, "self": True, "early": True,
        "at_construction": True, "id": "r7", "endpoint": "default/app", "route": "/app", "model": "m1",
        "traceparent": "00-x",
    }  # fmt: skip
    assert isinstance(plain, ResponseHead)
    in_thread = msgspec.json.decode(plain_body)
    assert (in_thread["id"], in_thread["argument"]) == ("r7", [1])


async def test_a_reconfigure_renews_the_companions(driver: Driver) -> None:
    goal = msgspec.structs.replace(
        driver.goal, peer_versions={BackendTag("default/other"): 9}, config_version=2
    )

    assert await asyncio.to_thread(driver.process.reconfigure, goal) is None
    _, body = await driver.call()

    assert msgspec.json.decode(body)["peer_versions"] == {"default/other": 9}


def ranked(goal: ReplicaGoal, rank: int, user_config: object) -> ReplicaGoal:
    new = ReplicaRank(rank=rank, node_rank=0, local_rank=rank)
    return msgspec.structs.replace(goal, rank=new, world_size=rank + 1, user_config=user_config)


async def reconfigured(driver: Driver) -> object:
    _, body = await driver.call(method_name="get_reconfigured")
    return msgspec.json.decode(body)


async def test_a_new_rank_does_not_reconfigure_code_that_takes_none_again(driver: Driver) -> None:
    """Its reconfigure may load a model for minutes, and is for what the user changes."""
    for rank, user_config in [(0, "one"), (1, "one"), (2, "two"), (0, "two")]:
        goal = ranked(driver.goal, rank, user_config)
        assert await asyncio.to_thread(driver.process.reconfigure, goal) is None

    assert await reconfigured(driver) == ["one", "two"]


@pytest.mark.parametrize("driver", ["Ranked"], indirect=True)
async def test_a_rank_that_came_with_a_bad_user_config_is_told_with_the_next_good_one(driver: Driver) -> None:
    reconfigure = driver.process.reconfigure
    assert await asyncio.to_thread(reconfigure, ranked(driver.goal, 2, "good")) is None
    error = await asyncio.to_thread(reconfigure, ranked(driver.goal, 1, "bad"))
    assert error is not None
    assert "ValueError: bad" in error
    assert await asyncio.to_thread(reconfigure, ranked(driver.goal, 1, "good")) is None

    assert await reconfigured(driver) == [[None, None], ["good", 2], ["good", 1]]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent", "method_name: Tried to call a method 'absent' that does not exist"),
        ("_secret", "method_name: '_secret' is private"),
        ("__init__", "method_name: '__init__' is private"),
    ],
)
async def test_only_public_methods_can_be_called_and_the_error_names_them(
    driver: Driver, name: str, message: str
) -> None:
    head, _ = await driver.call(method_name=name)

    assert isinstance(head, ErrorHead)
    assert (head.status, head.message.partition(". ")[0]) == (400, message)


async def test_the_models_that_a_replica_holds_are_told_at_once(driver: Driver) -> None:
    await driver.call(b'["a","b"]', method_name="hold")
    assert await asyncio.wait_for(driver.models.get(), 20) == (TAG, ["a", "b"])

    await driver.call(b"[]", method_name="hold")
    assert await asyncio.wait_for(driver.models.get(), 20) == (TAG, [])
    assert current_replica() is not None


@WAYS
async def test_what_comes_while_user_code_blocks_its_loop_is_heard_at_once(driver: Driver, way: str) -> None:
    if way == "a direct link":
        await driver.dial()
    async with asyncio.TaskGroup() as tasks:
        blocking = [tasks.create_task(driver.call(method_name="block_until_told")) for _ in range(4)]
        await asyncio.sleep(0)  # they are sent before what follows
        refused, _ = await driver.call()
        assert not any(task.done() for task in blocking), "it was read although the user's loop is blocked"
        sys.modules["process_app"].GO.set()
    assert refused == RefusedHead("busy", 4)
    assert [task.result()[1] for task in blocking] == [b"blocked"] * 4

    refused_no_more, _ = await driver.call()
    assert isinstance(refused_no_more, ResponseHead)


async def test_a_link_that_ends_while_user_code_blocks_its_loop_is_closed_at_both_ends(
    driver: Driver,
) -> None:
    await driver.dial()
    assert driver.link is not None
    driver.send(method_name="block_until_told")
    listener = driver.process._io._listener  # type: ignore[union-attr]
    await eventually(lambda: driver.process._io.in_flight == 1)  # type: ignore[union-attr]
    driver.link.close()
    await eventually(lambda: not listener.open_links)  # type: ignore[union-attr]
    sys.modules["process_app"].GO.set()
    driver.link = None
    head, _ = await driver.call()
    assert isinstance(head, ResponseHead)


async def test_a_bus_that_goes_while_user_code_blocks_its_loop_is_joined_again(
    driver: Driver, shared_server: NatsServer
) -> None:
    for _ in range(2):
        reconnects = driver.connection.reconnects
        driver.send(b"0.5", method_name="block")
        await asyncio.sleep(0.1)
        await asyncio.to_thread(shared_server.kill)
        await asyncio.to_thread(shared_server.start)
        async with asyncio.timeout(60):
            while driver.connection.reconnects == reconnects:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            while True:
                try:
                    head, _ = await asyncio.wait_for(driver.call(), 0.5)
                except TimeoutError:
                    continue  # the replica is not back yet
                if head != RefusedHead(
                    "busy", 4
                ):  # as it says while it is back and its loop is still blocked
                    break
            assert isinstance(head, ResponseHead)


@WAYS
async def test_requests_and_long_bodies_of_many_callers_all_come_through(driver: Driver, way: str) -> None:
    """Frames are read in one thread and answers written in both: none may be lost, doubled or torn."""
    if way == "a direct link":
        await driver.dial()
    async with asyncio.timeout(120), asyncio.TaskGroup() as tasks:
        callers = [tasks.create_task(driver.ask_again_and_again(number)) for number in range(4)]
    assert [task.result() for task in callers] == [60] * 4
