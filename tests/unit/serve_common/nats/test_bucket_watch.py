"""What a listener is told of a bucket, whatever order NATS tells it in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import msgspec
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from serve_common.nats import bucket_watch
from serve_common.nats.bucket_watch import BucketWatch, Entries
from serve_common.protocol.subjects import Subjects

Told = tuple[dict[str, tuple[int, bytes | None]], bool]
SUBJECTS = Subjects()
STREAM = f"KV_{SUBJECTS.bucket}"
SNAPSHOT = SUBJECTS.snapshots.removesuffix(">")
Callback = Callable[[Msg], Awaitable[None]]


class Subscription:
    def __init__(self, client: FakeClient, subject: str) -> None:
        self._client, self._subject = client, subject

    async def unsubscribe(self) -> None:
        del self._client.callbacks[self._subject]


class FakeClient:
    """As nats-py's, beside a stream; ``before_page`` is called before each answer to a direct get."""

    def __init__(self) -> None:
        self.callbacks: dict[str, Callback] = {}
        self.messages: dict[str, tuple[int, bytes]] = {}
        self.last = 0
        self.created = "2026-01-01T00:00:00Z"
        self.before_page: list[Callable[[], Awaitable[None]]] = []
        self.reads = 0
        self._inboxes = 0

    def new_inbox(self) -> str:
        self._inboxes += 1
        return f"_INBOX.{self._inboxes}"

    async def subscribe(self, subject: str, *, cb: Callback) -> Subscription:
        self.callbacks[subject] = cb
        return Subscription(self, subject)

    async def publish(self, subject: str, payload: bytes, *, reply: str) -> None:
        if "STREAM.INFO" in subject:
            state = {"last_seq": self.last, "num_subjects": len(self.messages)}
            await self._send(reply, {}, msgspec.json.encode({"created": self.created, "state": state}))
            return
        asked = msgspec.json.decode(payload)
        self.reads += asked["seq"] == 1
        if self.before_page:
            await self.before_page.pop(0)()
        left = sorted(
            (sequence, key, value)
            for key, (sequence, value) in self.messages.items()
            if sequence >= asked["seq"]
        )
        if not left:
            await self._send(reply, {"Status": "404"}, b"")
            return
        for sequence, key, value in left[: asked["batch"]]:
            await self._send(reply, {**self._headers(key, sequence, 0), "Nats-Num-Pending": "9"}, value)
        pending = len(left[asked["batch"] :])
        await self._send(reply, {"Status": "204", "Nats-Num-Pending": str(pending)}, b"")

    async def put(self, key: str, value: bytes, *, is_lost: bool = False) -> None:
        self.last += 1
        previous, _ = self.messages.get(key, (0, b""))
        self.messages[key] = (self.last, value)
        if not is_lost:
            await self.tell(key, self._headers(key, self.last, previous), value)

    async def tell(self, key: str, headers: dict[str, str], value: bytes) -> None:
        await self._send(SUBJECTS.snapshots, headers, value, subject=SNAPSHOT + key)

    def _headers(self, key: str, sequence: int, previous: int) -> dict[str, str]:
        return {
            "Nats-Stream": STREAM,
            "Nats-Subject": f"$KV.{SUBJECTS.bucket}.{key}",
            "Nats-Sequence": str(sequence),
            "Nats-Last-Sequence": str(previous),
        }

    async def _send(self, to: str, headers: dict[str, str], data: bytes, subject: str = "") -> None:
        if to in self.callbacks:
            await self.callbacks[to](Msg(cast("Any", self), subject or to, "", data, headers))


@asynccontextmanager
async def watching(client: FakeClient) -> AsyncIterator[asyncio.Queue[Told]]:
    told: asyncio.Queue[Told] = asyncio.Queue()

    def hear(entries: Entries, whole: bool) -> None:
        told.put_nowait((dict(entries), whole))

    watch = BucketWatch(cast("Client", client), SUBJECTS, hear)
    watch.start()
    try:
        yield told
    finally:
        await watch.close()
    assert client.callbacks == {}, "a subscription was left behind"


async def next_of(told: asyncio.Queue[Told]) -> Told:
    async with asyncio.timeout(30):
        return await told.get()


@pytest.fixture
async def client() -> FakeClient:
    client = FakeClient()
    await client.put("k1", b"1")
    await client.put("k2", b"2")
    return client


@pytest.fixture(autouse=True)
def never_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_watch, "POSITION_CHECK_S", 600.0)


BOTH = {"k1": (1, b"1"), "k2": (2, b"2")}


async def test_what_the_bucket_holds_is_told_at_once_and_changes_one_by_one(client: FakeClient) -> None:
    async with watching(client) as told:
        assert await next_of(told) == (BOTH, True)
        await client.put("k1", b"3")
        assert await next_of(told) == ({"k1": (3, b"3")}, False)


async def test_an_empty_bucket_is_told_as_empty() -> None:
    async with watching(FakeClient()) as told:
        assert await next_of(told) == ({}, True)


async def test_what_changes_while_pages_are_read_is_in_what_is_told(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_watch, "_PAGE_MESSAGES", 1)

    async def change_twice() -> None:
        await client.put("k2", b"3")  # before its page is read: both read and heard
        await client.put("k3", b"4")

    async def change_behind() -> None:
        await client.put("k1", b"5")  # after its page was read
        await client.put("k2", b"6")

    client.before_page = [nothing, change_twice, change_behind]
    async with watching(client) as told:
        assert await next_of(told) == ({"k1": (5, b"5"), "k2": (6, b"6"), "k3": (4, b"4")}, True)
        await client.put("k3", b"7")
        assert await next_of(told) == ({"k3": (7, b"7")}, False)
    assert client.reads == 1


async def nothing() -> None:
    return


async def test_nothing_is_told_of_a_read_during_which_a_change_was_lost(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_watch, "_PAGE_MESSAGES", 1)

    async def lose_one() -> None:
        # k2 is not where it was, and that it is elsewhere now was lost; the pages end before it is.
        left = client.messages.pop("k2")
        client.last += 1
        client.before_page.append(lambda: back(left))

    async def back(left: tuple[int, bytes]) -> None:
        del left
        client.messages["k2"] = (3, b"3")

    client.before_page = [nothing, lose_one]
    async with watching(client) as told:
        assert await next_of(told) == ({"k1": (1, b"1"), "k2": (3, b"3")}, True)


async def test_a_lost_change_is_found_by_the_next_one_and_nothing_is_told_before_it_is_read(
    client: FakeClient,
) -> None:
    async with watching(client) as told:
        assert await next_of(told) == (BOTH, True)
        await client.put("k1", b"3", is_lost=True)
        await client.put("k2", b"4")
        assert await next_of(told) == ({"k1": (3, b"3"), "k2": (4, b"4")}, True)


async def test_a_lost_last_change_is_found_by_a_look_at_the_stream(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_watch, "POSITION_CHECK_S", 0.01)
    async with watching(client) as told:
        assert await next_of(told) == (BOTH, True)
        await client.put("k1", b"3", is_lost=True)
        assert await next_of(told) == ({"k1": (3, b"3"), "k2": (2, b"2")}, True)


async def test_a_stream_made_anew_is_read_even_where_its_changes_seem_to_follow(client: FakeClient) -> None:
    async with watching(client) as told:
        assert await next_of(told) == (BOTH, True)
        client.messages.clear()
        client.last = 0
        await client.put("k3", b"new", is_lost=True)
        await client.put("k1", b"new", is_lost=True)
        await client.put("k1", b"newer")  # the third message, as if it were of the stream that had two
        assert await next_of(told) == ({"k1": (3, b"newer"), "k3": (1, b"new")}, True)


async def test_a_stream_made_anew_is_read_even_where_its_numbers_are_those_of_the_old(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_watch, "POSITION_CHECK_S", 0.01)
    async with watching(client) as told:
        assert await next_of(told) == (BOTH, True)
        client.messages = {"k1": (1, b"new"), "k4": (2, b"new")}
        client.created = "2026-01-02T00:00:00Z"
        assert await next_of(told) == ({"k1": (1, b"new"), "k4": (2, b"new")}, True)


async def test_what_is_said_again_or_is_not_of_the_bucket_is_left_out(client: FakeClient) -> None:
    async with watching(client) as told:
        assert await next_of(told) == (BOTH, True)
        again = client._headers("k1", 1, 0)
        await client.tell("k1", again, b"1")
        await client.tell("k2", again, b"1")  # somebody's direct get, answered on the subject of another key
        await client.tell("k2", {**again, "Nats-Stream": "other", "Nats-Sequence": "3"}, b"forged")
        await client.tell("k2", {}, b"forged")
        await client.put("k1", b"3")
        assert await next_of(told) == ({"k1": (3, b"3")}, False)
    assert client.reads == 1


async def test_what_was_purged_at_the_end_is_not_looked_for_again_and_again(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_watch, "POSITION_CHECK_S", 0.01)
    client.last = 9
    async with watching(client) as told:
        assert await next_of(told) == (BOTH, True)
        assert await next_of(told) == (BOTH, True)
        await asyncio.sleep(0.1)  # no proof, a chance to be wrong
        await client.put("k1", b"10")
        assert await next_of(told) == ({"k1": (10, b"10")}, False)


async def test_what_was_heard_of_a_stream_that_is_gone_does_not_hold_up_the_next(client: FakeClient) -> None:
    async def last_of_the_old() -> None:
        await client.tell("k1", client._headers("k1", 900, 1), b"old")

    client.before_page = [last_of_the_old]
    async with watching(client) as told:
        assert await next_of(told) == (BOTH, True)


async def test_more_changes_than_are_kept_while_everything_is_read_are_read_again(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_watch, "_BUFFERED_MAX", 3)

    async def flood() -> None:
        for number in range(10):
            await client.put("k1", b"%d" % number)

    client.before_page = [flood]
    async with watching(client) as told:
        assert await next_of(told) == ({"k1": (12, b"9"), "k2": (2, b"2")}, True)
    assert client.reads == 2
