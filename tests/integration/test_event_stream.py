"""Events on a real NATS server: heard at once, kept for a while, and never in anybody's way."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from nats.aio.subscription import Subscription
from nats.js.api import StreamConfig

from serve_common.api.views import EventView, GoalStatus, GoalView
from serve_common.names import GoalId
from serve_common.nats.client import close_nats
from serve_common.protocol.subjects import Subjects
from serve_common.runtime.clock import SystemClock
from serve_controller.adapters import jetstream as event_stream
from serve_controller.adapters.jetstream import EventStream, recent_events
from tests.integration.nats_server import NatsServer, connected, until_known

pytestmark = pytest.mark.integration


class Side:
    """The controller's connection, its events, and one who listens."""

    def __init__(self, server: NatsServer) -> None:
        self.server = server
        self.subjects = Subjects(f"t{uuid.uuid4().hex[:10]}")
        self.disconnected = asyncio.Event()
        self.reconnected = asyncio.Event()

    async def open(self) -> None:
        self.client = await connected(
            self.server, self.subjects, on_reconnect=self._came, on_disconnect=self.disconnected.set
        )
        self.listener = await connected(self.server, self.subjects)
        self.heard = await self.listener.subscribe(self.subjects.events)
        await until_known(self.listener)
        self.events = EventStream(self.client, self.subjects)

    async def close(self) -> None:
        await self.events.close()
        await close_nats(self.client)
        await close_nats(self.listener)

    def _came(self) -> None:
        self.events.reopen()
        self.reconnected.set()

    def tell(self, subject: str, message: str = "", kind: str = "replica") -> None:
        self.events.publish_event(kind, subject, msgspec.json.encode(event(subject, message, kind)))

    async def recent(self, limit: int = 1000) -> list[EventView]:
        return await recent_events(self.client, self.subjects, limit)

    async def kept(self, count: int) -> list[EventView]:
        """The events of the stream, once there are so many."""
        return await until(self.recent, lambda views: len(views) == count)

    async def lose_server(self) -> None:
        self.server.kill()
        async with asyncio.timeout(30):
            await self.disconnected.wait()

    async def regain_server(self) -> None:
        self.server.start()
        async with asyncio.timeout(30):
            await self.reconnected.wait()


def event(subject: str, message: str = "", kind: str = "replica") -> EventView:
    return EventView(at=1.5, kind=kind, subject=subject, message=message, state="running")


async def until(
    ask: Callable[[], Awaitable[list[EventView]]], check: Callable[[list[EventView]], bool]
) -> list[EventView]:
    async with asyncio.timeout(30):
        while not check(views := await ask()):  # noqa: ASYNC110 - the server tells nobody what it keeps
            await asyncio.sleep(0.02)
    return views


async def subjects_heard(subscription: Subscription, count: int) -> list[str]:
    return [(await subscription.next_msg(timeout=20)).subject for _ in range(count)]


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path_factory.mktemp("nats"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path)
    server.start()
    yield server
    if server.process is not None:
        server.kill()


@pytest.fixture
async def side(shared_server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Side]:
    # This server never goes, but may be slow: what is told before there is a stream is not kept.
    monkeypatch.setattr(event_stream, "_TIMEOUT_S", 20.0)
    side = Side(shared_server)
    await side.open()
    yield side
    await side.close()


async def test_events_are_heard_at_once_and_kept_with_limits(side: Side) -> None:
    side.events.start()
    side.tell("shop/digits#7", "started")
    side.tell("host-1", "came", kind="host")
    assert await subjects_heard(side.heard, 2) == [
        side.subjects.event("replica", "shop/digits#7"),
        side.subjects.event("host", "host-1"),
    ]
    assert side.subjects.event("replica", "shop/digits#7").endswith(".event.replica.shop.digits.7")
    assert await side.kept(2) == [
        event("shop/digits#7", "started"),
        event("host-1", "came", kind="host"),
    ]
    config = (await side.client.jetstream().stream_info(side.subjects.event_stream)).config
    assert config.subjects == [side.subjects.events]
    assert (config.max_msgs, config.max_bytes) == (10_000, 64 * 1024 * 1024)
    assert (config.max_age, config.max_msgs_per_subject) == (7 * 24 * 3600.0, 100)


async def test_progress_of_goals_is_kept_as_events_of_the_time_it_was_told(side: Side) -> None:
    side.events.start()
    clock = SystemClock()
    began = clock.now()
    for view in (
        GoalView(goal_id=GoalId("g7"), status=GoalStatus.PENDING, message="waits for 2 replicas"),
        GoalView(goal_id=GoalId("g7"), status=GoalStatus.FAILED, error="ValueError"),
    ):
        side.events.publish_event("goal", view.goal_id, msgspec.json.encode(view))
    first, second = await side.kept(2)
    assert (first.kind, first.subject, first.goal_id) == ("goal", "g7", "g7")
    assert (first.state, first.message) == ("pending", "waits for 2 replicas")
    assert (second.state, second.message) == ("failed", "ValueError")
    assert began - 1 < first.at <= second.at < clock.now() + 1


async def test_the_newest_events_are_read_the_oldest_first(side: Side) -> None:
    side.events.start()
    for number in range(700):
        side.tell(f"default/a#{number % 5}", str(number))
    # Of each of the five subjects a hundred are kept. What is read while they still come may begin earlier.
    kept = [str(n) for n in range(200, 700)]
    await until(side.recent, lambda views: [view.message for view in views] == kept)
    newest = await until(lambda: side.recent(3), bool)
    assert [view.message for view in newest] == ["697", "698", "699"]
    assert side.events.dropped == 0


async def test_a_stream_that_was_deleted_is_made_again(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "STREAM_CHECK_S", 0.0)
    side.events.start()
    side.tell("a")
    await side.kept(1)
    await side.client.jetstream().delete_stream(side.subjects.event_stream)
    assert await side.recent() == []
    side.tell("b")
    assert [view.subject for view in await side.kept(1)] == ["b"]


async def test_a_stream_that_somebody_made_with_other_limits_is_left_as_it_is(side: Side) -> None:
    manager = side.client.jetstream()
    theirs = StreamConfig(name=side.subjects.event_stream, subjects=[side.subjects.events], max_msgs=2)
    await manager.add_stream(theirs)
    side.events.start()
    for subject in "abc":
        side.tell(subject)
    await subjects_heard(side.heard, 3)
    await until(side.recent, lambda views: [view.subject for view in views] == ["b", "c"])
    assert (await manager.stream_info(side.subjects.event_stream)).config.max_msgs == 2


async def test_what_cannot_be_sent_is_dropped_and_harms_nothing_else(side: Side) -> None:
    side.events.start()
    side.tell("ok")
    for subject in ("", "a b", "*", ">", "a..b", "a\r\nPUB x 0", "ü", "\udcff"):
        side.events.publish_event("host", subject, b"{}")
    side.events.publish_event("host", "large", bytes(side.client.max_payload + 1))
    side.tell("end")
    heard = await subjects_heard(side.heard, 2)
    assert [subject.rpartition(".")[2] for subject in heard] == ["ok", "end"]
    assert side.events.dropped == 9
    assert not side.disconnected.is_set()


async def test_events_that_nobody_can_read_are_left_out(side: Side) -> None:
    side.events.start()
    side.events.publish_event("host", "a", b"nonsense")
    side.events.publish_event("goal", "g1", b'{"goal_id":"g1","status":"\xff"}')
    side.tell("b")
    await subjects_heard(side.heard, 3)
    assert [view.subject for view in await side.kept(1)] == ["b"]


async def test_before_there_is_a_stream_and_in_an_empty_one_there_are_no_events(side: Side) -> None:
    assert await side.recent() == []
    await side.client.jetstream().add_stream(event_stream.stream_config(side.subjects))
    assert await side.recent() == []


async def test_closing_sends_what_waits_and_drops_what_comes_later(side: Side) -> None:
    for number in range(50):
        side.tell(f"a{number}")  # not started yet, so that all of it waits
    await side.events.close()
    side.tell("late")
    await side.client.flush()
    assert len(await subjects_heard(side.heard, 50)) == 50
    assert side.events.dropped == 1


async def test_the_newest_events_wait_while_nats_is_away_and_then_go_out(own_server: NatsServer) -> None:
    side = Side(own_server)
    await side.open()
    side.events.start()
    side.tell("before")
    await side.kept(1)
    await side.lose_server()
    for number in range(event_stream.QUEUE_MAX + 7):
        side.tell(f"a{number}")
    assert side.events.dropped == 7
    async with asyncio.timeout(20):  # NATS is away for as long as we like
        assert await side.recent() == []
    await side.regain_server()
    newest = f"a{event_stream.QUEUE_MAX + 6}"
    views = await until(side.recent, lambda views: bool(views) and views[-1].subject == newest)
    assert [view.subject for view in views] == [f"a{n}" for n in range(7, event_stream.QUEUE_MAX + 7)]
    assert side.events.dropped == 7
    await side.close()


async def test_a_server_that_lost_everything_gets_its_stream_again(own_server: NatsServer) -> None:
    side = Side(own_server)
    await side.open()
    side.events.start()
    side.tell("before")
    await side.kept(1)
    await side.lose_server()
    own_server.forget()
    side.tell("meanwhile")
    await side.regain_server()
    assert [view.subject for view in await side.kept(1)] == ["meanwhile"]
    await side.close()


async def test_closing_while_nats_is_away_takes_little_time(own_server: NatsServer) -> None:
    side = Side(own_server)
    await side.open()
    side.events.start()
    await side.lose_server()
    side.tell("lost")
    async with asyncio.timeout(20):  # as above
        await side.events.close()
    await side.close()
