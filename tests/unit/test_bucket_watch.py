"""What a listener is told of a bucket, whatever order the library tells it in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
from nats.aio.client import Client
from nats.errors import TimeoutError as NatsTimeoutError
from nats.js.kv import KeyValue

from serve_common.adapters import bucket_watch
from serve_common.adapters.bucket_watch import BucketWatch, Entries

Told = tuple[dict[str, tuple[int, bytes | None]], bool]


class Watcher:
    """Tells these entries; None is its word that it has told everything."""

    def __init__(self, entries: Sequence[KeyValue.Entry | None]) -> None:
        self.left = [*entries]

    async def updates(self, timeout: float) -> KeyValue.Entry | None:
        if not self.left:
            await asyncio.sleep(timeout)
            raise NatsTimeoutError
        return self.left.pop(0)

    async def stop(self) -> None:
        return


class Bucket:
    """Of so many messages; each watch of it tells the next of these."""

    def __init__(self, messages: int, *watches: Sequence[KeyValue.Entry | None]) -> None:
        self.watches = [*watches]
        self._state = SimpleNamespace(last_seq=messages, messages=messages)

    async def status(self) -> Any:
        return SimpleNamespace(stream_info=SimpleNamespace(state=self._state))

    async def watchall(self) -> Watcher:
        return Watcher(self.watches.pop(0))


def entry(key: str, revision: int, *, pending: int) -> KeyValue.Entry:
    return KeyValue.Entry("b", key, b"%d" % revision, revision, pending, None, None)


@asynccontextmanager
async def watching(bucket: Bucket) -> AsyncIterator[asyncio.Queue[Told]]:
    told: asyncio.Queue[Told] = asyncio.Queue()

    def hear(entries: Entries, whole: bool) -> None:
        told.put_nowait((dict(entries), whole))

    async def opened() -> KeyValue:
        return cast("KeyValue", bucket)

    watch = BucketWatch(cast("Client", None), "b", hear, opened)
    watch.start()
    try:
        yield told
    finally:
        await watch.close()


async def next_of(told: asyncio.Queue[Told]) -> Told:
    async with asyncio.timeout(30):
        return await told.get()


TWO = [entry("k1", 1, pending=1), entry("k2", 2, pending=0)]
BOTH = {"k1": (1, b"1"), "k2": (2, b"2")}


async def test_what_the_bucket_holds_is_told_at_once_and_changes_one_by_one() -> None:
    async with watching(Bucket(2, [*TWO, None, entry("k1", 3, pending=0)])) as told:
        assert await next_of(told) == (BOTH, True)
        assert await next_of(told) == ({"k1": (3, b"3")}, False)


async def test_the_word_that_this_is_everything_is_not_believed_before_anything_came() -> None:
    async with watching(Bucket(2, [None, *TWO, entry("k1", 3, pending=0)])) as told:
        assert await next_of(told) == (BOTH, True)
        assert await next_of(told) == ({"k1": (3, b"3")}, False)


async def test_an_empty_bucket_is_told_as_empty() -> None:
    async with watching(Bucket(0, [None])) as told:
        assert await next_of(told) == ({}, True)


async def test_what_does_not_come_is_looked_for_by_a_new_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_watch, "_TIMEOUT_S", 0.1)
    bucket = Bucket(2, [None], [*TWO, None])
    async with watching(bucket) as told:
        assert await next_of(told) == (BOTH, True)
    assert bucket.watches == []
