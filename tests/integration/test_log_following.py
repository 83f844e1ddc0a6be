"""Log lines over a real bus: published, recalled, and followed while NATS goes and comes back."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from muster.client.address import StackAddress
from muster.client.requests import Feed, listen_to_stack
from serve_common.nats.client import NatsClientLogSink, close_nats
from serve_common.nats.connection import BusConnection
from serve_common.nats.options import BusOptions
from serve_common.protocol.logs import LogFilter, RecallLogs
from serve_common.protocol.subjects import Subjects
from serve_common.runtime.clock import SystemClock
from serve_common.telemetry.log_forwarder import LogForwarder, NatsLogSink
from serve_common.telemetry.log_lines import encode_line
from tests.integration.nats_server import NatsServer, connected, until_known

pytestmark = pytest.mark.integration
SUBJECTS = Subjects()


@pytest.fixture
def nats(tmp_path: Path) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path)
    server.start()
    yield server
    if server.process is not None:
        server.kill()


@pytest.fixture
async def relays(nats: NatsServer) -> AsyncIterator[dict[str, LogForwarder]]:
    """Of a replica over the data plane's connection, and of a host over nats-py."""
    relays = {kind: LogForwarder(None, {"service": kind}, SystemClock()) for kind in ("replica", "host")}
    bus = BusConnection(BusOptions(servers=[nats.url]), random.Random(1))
    await bus.connect(20)
    replica = NatsLogSink(relays["replica"], bus, SUBJECTS, "replica", "default/a#1")
    client = await connected(nats, SUBJECTS)
    host = NatsClientLogSink(relays["host"], SUBJECTS, "host", "h1")
    await host.join(client)
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
            piece = await feed.hear()
            assert piece is not None
            heard |= {(piece.subject, json.loads(line)["message"]) for line in piece.payload.splitlines()}
    return heard


async def test_lines_are_followed_over_a_restart_of_nats(
    nats: NatsServer, relays: dict[str, LogForwarder]
) -> None:
    wanted = {("serve.log.replica.default.a.1", "before"), ("serve.log.host.h1", "before")}
    async with listen_to_stack(StackAddress(urls=(nats.url,)), [SUBJECTS.logs()]) as feed:
        for relay in relays.values():
            say(relay, "before")
        assert await hear(feed, lambda heard: len(heard) == 2) == wanted
        nats.kill()
        nats.start()

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
    nats: NatsServer, relays: dict[str, LogForwarder]
) -> None:
    for kind, relay in relays.items():
        for number in range(300):
            say(relay, f"{kind} {number}", level=("info", "error")[number % 2])
        relay.flush()
    address = StackAddress(urls=(nats.url,))
    asked = RecallLogs(token="t1", limit=2, filter=LogFilter(level="warning"))
    async with listen_to_stack(address, [SUBJECTS.recalled_log("t1")]) as feed:
        await feed.publish(SUBJECTS.log_recall, b"no question")
        await feed.publish(SUBJECTS.log_recall, msgspec.json.encode(asked))
        assert await hear(feed, lambda heard: len(heard) == 4) == {
            (f"serve.log.recalled.t1.{kind}", f"{kind} {number}") for kind in relays for number in (297, 299)
        }
