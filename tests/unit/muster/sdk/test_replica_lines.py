"""Lines of replicas in the output of the program whose stack they run in."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from muster.client.requests import FeedMessage, StackAddress
from muster.sdk import replica_lines
from muster.sdk.replica_lines import format_line, show_replica_lines

TAG = {"replica_tag": "shop/Model#3"}


def line(**fields: Any) -> dict[str, Any]:
    return {"level": "info", "event": "print", "logger": "stdout", "message": "", **TAG, **fields}


class FakeFeed:
    """Delivers what it is given, and then nothing."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[FeedMessage] = asyncio.Queue()
        self.read = asyncio.Event()

    def put(self, *lines: dict[str, Any]) -> None:
        payload = b"\n".join(msgspec.json.encode(each) for each in lines)
        self.messages.put_nowait(FeedMessage("serve.log.replica.shop.Model.3", payload))

    async def receive(self, within_s: float | None = None) -> FeedMessage | None:
        try:
            async with asyncio.timeout(within_s):
                message = await self.messages.get()
        except TimeoutError:
            return None
        self.read.set()
        return message


async def test_prints_go_where_they_were_printed_to_until_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    feed = FakeFeed()
    asked: list[Sequence[str]] = []

    @asynccontextmanager
    async def listen(_address: StackAddress, subjects: Sequence[str]) -> AsyncIterator[FakeFeed]:
        asked.append(subjects)
        yield feed

    monkeypatch.setattr(replica_lines, "listen_to_stack", listen)
    async with show_replica_lines(StackAddress(urls=("nats://x",))):
        feed.put(line(message="one"), line(logger="stderr", message="to the other"))
        await feed.read.wait()
        feed.put(line(message="last"))  # under way as the program ends

    assert asked == [["serve.log.replica.>"]]
    assert capsys.readouterr() == (
        "(shop/Model#3) one\n(shop/Model#3) last\n",
        "(shop/Model#3) to the other\n",
    )


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"message": "a\nb"}, "(shop/Model#3) a\n(shop/Model#3) b\n"),
        ({"message": ""}, "(shop/Model#3) \n"),
        ({"event": "log", "logger": "ray.serve", "message": "ready"}, "(shop/Model#3) INFO ready\n"),
        (
            {"event": "user_code_raised", "level": "error", "traceback": "Traceback:\n  x"},
            "(shop/Model#3) ERROR user_code_raised\n(shop/Model#3) Traceback:\n(shop/Model#3)   x\n",
        ),
        ({"event": "replica_started"}, ""),
    ],
)
def test_each_line_names_its_replica(fields: dict[str, Any], text: str) -> None:
    assert format_line(line(**fields)) == text


async def test_an_output_that_blocks_stops_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    unblocked = threading.Event()
    monkeypatch.setattr(replica_lines, "_write", lambda _line: unblocked.wait(30))
    monkeypatch.setattr(replica_lines, "_END_S", 0.05)
    feed = FakeFeed()

    @asynccontextmanager
    async def listen(_address: StackAddress, _subjects: Sequence[str]) -> AsyncIterator[FakeFeed]:
        yield feed

    monkeypatch.setattr(replica_lines, "listen_to_stack", listen)
    async with asyncio.timeout(10):
        async with show_replica_lines(StackAddress(urls=("nats://x",))):
            for _ in range(3 * replica_lines._WAITING_MAX):
                feed.put(line(message="one"))
            await feed.read.wait()
    unblocked.set()
