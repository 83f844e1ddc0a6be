"""Events on a real NATS server: heard at once, kept for a while, and never in anybody's way."""

from __future__ import annotations

import asyncio
import json
import random
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest
from nats.aio.subscription import Subscription
from nats.js.api import StreamConfig
from structlog.testing import capture_logs

from muster.client.requests import Feed, StackAddress, listen_to_stack
from serve_common.api.views import EventView
from serve_common.clock import SystemClock
from serve_common.errors import BusUnavailable
from serve_common.nats.client import close_nats, join_log_sink
from serve_common.nats.connection import BusConnection
from serve_common.nats.options import BusOptions
from serve_common.protocol.reports import LogFilter, ReplayRecentLogs
from serve_common.protocol.subjects import Subjects
from serve_common.telemetry.log_forwarder import LogForwarder, NatsLogSink
from serve_common.telemetry.log_lines import encode_line
from serve_controller.adapters import jetstream as event_stream
from serve_controller.adapters.jetstream import EventStream, recent_events
from tests.support.servers.nats_server import NatsServer, connected, until_known


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


async def test_what_is_no_event_is_left_out(side: Side) -> None:
    side.events.start()
    side.events.publish_event("goal", "g7", b'{"goal_id": "g7", "status": "pending"}')
    side.tell("g8", "succeeded", kind="goal")
    assert [each.subject for each in await side.kept(1)] == ["g8"]


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


async def test_the_newest_events_wait_while_nats_is_away_and_then_go_out(server: NatsServer) -> None:
    side = Side(server)
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


async def test_a_server_that_lost_everything_gets_its_stream_again(server: NatsServer) -> None:
    side = Side(server)
    await side.open()
    side.events.start()
    side.tell("before")
    await side.kept(1)
    await side.lose_server()
    server.forget()
    side.tell("meanwhile")
    await side.regain_server()
    assert [view.subject for view in await side.kept(1)] == ["meanwhile"]
    await side.close()


# Log lines over a real bus: published, recalled, and followed while NATS goes and comes back.

SUBJECTS = Subjects()


@pytest.fixture
async def relays(server: NatsServer) -> AsyncIterator[dict[str, LogForwarder]]:
    """Of a replica over the data plane's connection, and of a host over nats-py."""
    relays = {kind: LogForwarder(None, {"service": kind}, SystemClock()) for kind in ("replica", "host")}
    bus = BusConnection(BusOptions(servers=[server.url]), random.Random(1))
    await bus.connect(20)
    replica = NatsLogSink(relays["replica"], SUBJECTS, "replica", "default/a#1")
    replica.join(bus)
    client = await connected(server, SUBJECTS)
    host = NatsLogSink(relays["host"], SUBJECTS, "host", "h1")
    await join_log_sink(host, client)
    await bus.flush(20)
    await until_known(client)
    yield relays
    await replica.close()
    await host.close()
    await bus.close()
    await close_nats(client)


def say(relay: LogForwarder, message: str, **fields: Any) -> None:
    relay.offer(encode_line({"message": message, "level": "info", **fields}))


async def hear(feed: Feed, is_enough: Callable[[set[tuple[str, str]]], bool]) -> set[tuple[str, str]]:
    """Subjects and messages, until it is enough."""
    heard: set[tuple[str, str]] = set()
    async with asyncio.timeout(30):
        while not is_enough(heard):
            piece = await feed.receive()
            assert piece is not None
            # What was lost while NATS was away is told of in a line without a message.
            lines = [json.loads(line) for line in piece.payload.splitlines()]
            heard |= {(piece.subject, line["message"]) for line in lines if "message" in line}
    return heard


async def test_lines_are_followed_over_a_restart_of_nats(
    server: NatsServer, relays: dict[str, LogForwarder]
) -> None:
    wanted = {("serve.log.replica.default.a.1", "before"), ("serve.log.host.h1", "before")}
    async with listen_to_stack(StackAddress(urls=(server.url,)), [SUBJECTS.logs()]) as feed:
        for relay in relays.values():
            say(relay, "before")
        assert await hear(feed, lambda heard: len(heard) == 2) == wanted
        server.kill()
        server.start()

        async def go_on() -> None:
            while True:
                for relay in relays.values():
                    say(relay, "after")
                await asyncio.sleep(0.2)

        async with asyncio.TaskGroup() as group:
            going = group.create_task(go_on())
            heard = await hear(
                feed, lambda heard: len({subject for subject, said in heard if said == "after"}) == 2
            )
            going.cancel()
    assert {subject for subject, _ in heard} == {subject for subject, _ in wanted}


async def test_what_was_said_before_is_told_to_who_asks_and_to_nobody_else(
    server: NatsServer, relays: dict[str, LogForwarder]
) -> None:
    for kind, relay in relays.items():
        for number in range(300):
            say(relay, f"{kind} {number}", level=("info", "error")[number % 2])
        relay.flush()
    address = StackAddress(urls=(server.url,))
    asked = ReplayRecentLogs(token="t1", limit=2, filter=LogFilter(level="warning"))
    async with listen_to_stack(address, [SUBJECTS.recalled_log("t1")]) as feed:
        await feed.publish(SUBJECTS.log_replay, b"no question")
        await feed.publish(SUBJECTS.log_replay, msgspec.json.encode(asked))
        assert await hear(feed, lambda heard: len(heard) == 4) == {
            (f"serve.log.recalled.t1.{kind}", f"{kind} {number}") for kind in relays for number in (297, 299)
        }


async def test_a_nats_that_does_not_answer_is_one_error_and_no_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muster.client.nats._CONNECT_S", 0.5)
    with capture_logs() as logs, pytest.raises(BusUnavailable, match="Connect call failed"):
        async with listen_to_stack(StackAddress(urls=("nats://127.0.0.1:1",)), [SUBJECTS.logs()]):
            pass
    assert logs == []
