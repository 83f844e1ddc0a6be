"""What a router is told of the bucket by a real NATS server, within one account and across two."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.js.api import KeyValueConfig
from nats.js.kv import KeyValue

from serve_common.nats import bucket_watch
from serve_common.nats.bucket_watch import BucketWatch, Entries
from serve_common.nats.client import close_nats, connect_nats
from serve_common.protocol.subjects import Subjects
from serve_common.runtime.settings import BusSettings
from serve_controller.adapters.jetstream import SnapshotBucket, bucket_config
from tests.support.servers.nats_server import NatsServer, until_known

SUBJECTS = Subjects()
STREAM = f"KV_{SUBJECTS.bucket}"
INFO, GET = f"$JS.API.STREAM.INFO.{STREAM}", f"$JS.API.DIRECT.GET.{STREAM}"
ROUTER = f"""
  {{ user: router, password: x, permissions {{
    publish: {{ allow: ["{INFO}", "{GET}"] }}, subscribe: {{ allow: ["{SUBJECTS.snapshots}", "_INBOX_router.>"] }}
  }} }}
"""
"""May do what reading the bucket needs, and nothing else."""
ONE_ACCOUNT = f"""
accounts {{
  MUSTER {{ jetstream: enabled, users: [ {{ user: controller, password: x }} {ROUTER} ] }}
}}
"""
TWO_ACCOUNTS = f"""
accounts {{
  CONTROL {{
    jetstream: enabled
    users: [ {{ user: controller, password: x }} ]
    exports: [
      {{ stream: "{SUBJECTS.snapshots}" }}
      {{ service: "{GET}", response_type: stream }}
      {{ service: "{INFO}" }}
    ]
  }}
  DATA {{
    users: [ {ROUTER} ]
    imports: [
      {{ stream: {{ account: CONTROL, subject: "{SUBJECTS.snapshots}" }} }}
      {{ service: {{ account: CONTROL, subject: "{GET}" }} }}
      {{ service: {{ account: CONTROL, subject: "{INFO}" }} }}
    ]
  }}
}}
"""


@pytest.fixture(params=[ONE_ACCOUNT, TWO_ACCOUNTS], ids=["one_account", "two_accounts"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[NatsServer]:
    with NatsServer(tmp_path, config=request.param) as server:
        yield server


async def connected(server: NatsServer, user: str, **callbacks: Callable[[], None]) -> Client:
    settings = BusSettings(
        servers=[server.url], user=user, password="x", inbox_prefix=f"_INBOX_{user}", subject_prefix="serve"
    )
    return await connect_nats(settings, name=user, deadline_s=20.0, **callbacks)


class Stack:
    """A bucket that the test writes, and a router that is told what is in it."""

    def __init__(self, server: NatsServer, writer: Client, router: Client) -> None:
        self.server, self.writer, self.router = server, writer, router
        self.context = writer.jetstream(timeout=1)
        self.held: dict[str, tuple[int, bytes | None]] = {}
        self.wholes: list[dict[str, tuple[int, bytes | None]]] = []
        self.news = asyncio.Event()
        self.watch = BucketWatch(router, SUBJECTS, self._on_message)
        self.bucket: KeyValue

    def _on_message(self, entries: Entries, whole: bool) -> None:
        if whole:
            self.wholes.append(dict(entries))
            self.held = dict(entries)
        else:
            for key, (revision, value) in entries.items():
                assert revision > self.held.get(key, (0, None))[0], (
                    "an older change was told after a newer one"
                )
                self.held[key] = (revision, value)
        self.news.set()

    async def make_bucket(self) -> None:
        self.bucket = await self.context.create_key_value(bucket_config(SUBJECTS))

    async def until(self, holds: Callable[[], object]) -> None:
        async with asyncio.timeout(30):
            while not holds():
                self.news.clear()
                await self.news.wait()

    async def until_held(self, values: dict[str, bytes | None]) -> None:
        await self.until(lambda: {key: value for key, (_, value) in self.held.items()} == values)


@contextlib.asynccontextmanager
async def running(server: NatsServer, *, filled: int = 0) -> AsyncIterator[Stack]:
    def reconnected() -> None:
        stack.watch.reopen()

    router = await connected(server, "router", on_reconnect=reconnected)
    writer = await connected(server, "controller")
    stack = Stack(server, writer, router)
    try:
        await stack.make_bucket()
        for number in range(filled):
            await writer.publish(f"$KV.{SUBJECTS.bucket}.backends.a.d{number}", b"%d" % number)
        await until_known(writer)
        stack.watch.start()
        yield stack
    finally:
        await stack.watch.close()
        await close_nats(router)
        await close_nats(writer)


async def test_all_pages_are_told_at_once_then_each_change_and_deletion(server: NatsServer) -> None:
    count = 2 * bucket_watch._PAGE_MESSAGES + 1
    async with running(server, filled=count) as stack:
        values: dict[str, bytes | None] = {f"backends.a.d{n}": b"%d" % n for n in range(count)}
        await stack.until_held(values)
        assert len(stack.wholes) == 1
        await stack.bucket.put("backends.a.d1", b"new")
        await stack.bucket.put("endpoints.a.d1", b"")
        await stack.bucket.delete("backends.a.d2")
        await stack.bucket.purge("backends.a.d3")
        values |= {
            "backends.a.d1": b"new",
            "endpoints.a.d1": b"",
            "backends.a.d2": None,
            "backends.a.d3": None,
        }
        await stack.until_held(values)
        assert len(stack.wholes) == 1, "no change was missed"


async def test_what_is_told_while_everything_changes_is_never_older_and_in_the_end_complete(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    chance = random.Random(seed)
    monkeypatch.setattr(bucket_watch, "_PAGE_MESSAGES", 7)
    values: dict[str, bytes | None] = {f"backends.a.d{n}": b"%d" % n for n in range(100)}
    async with running(server, filled=len(values)) as stack:
        for number in range(1_500):
            key = f"backends.a.d{chance.randrange(120)}"
            if chance.random() < 0.1:
                await stack.bucket.delete(key)
                values[key] = None
            else:
                await stack.bucket.put(key, b"v%d" % number)
                values[key] = b"v%d" % number
            if number % 300 == 0:
                stack.watch.reopen()
        await stack.until_held(values)
    for whole in stack.wholes:
        assert len(whole) >= 100, "a key was left out while everything was read"


async def test_a_bucket_that_is_lost_and_made_anew_is_read_anew(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_watch, "POSITION_CHECK_S", 0.1)
    async with running(server, filled=5) as stack:
        await stack.until(lambda: len(stack.held) == 5)
        await stack.context.delete_key_value(SUBJECTS.bucket)
        await stack.make_bucket()
        # As many messages as before, so that by its numbers it looks like the old one.
        for number in range(5):
            await stack.bucket.put(f"backends.b.d{number}", b"b")
        await stack.until_held({f"backends.b.d{number}": b"b" for number in range(5)})


async def test_a_purged_bucket_is_told_as_it_is(server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_watch, "POSITION_CHECK_S", 0.1)
    async with running(server, filled=3) as stack:
        await stack.until(lambda: len(stack.held) == 3)
        await stack.context.purge_stream(STREAM, subject=f"$KV.{SUBJECTS.bucket}.backends.a.d2")
        await stack.until_held({"backends.a.d0": b"0", "backends.a.d1": b"1"})
        await stack.bucket.put("backends.a.d2", b"again")
        await stack.until_held({"backends.a.d0": b"0", "backends.a.d1": b"1", "backends.a.d2": b"again"})
        await stack.context.purge_stream(STREAM)
        await stack.until_held({})


async def test_a_server_that_is_killed_and_loses_everything(server: NatsServer) -> None:
    async with running(server, filled=3) as stack:
        await stack.until(lambda: len(stack.held) == 3)
        server.kill()
        server.start()
        await stack.until(lambda: len(stack.wholes) == 2)
        assert len(stack.held) == 3
        server.kill()
        server.forget()
        server.start()
        await asyncio.wait_for(until_made(stack), 30)
        await stack.bucket.put("backends.a.d7", b"7")
        await stack.until_held({"backends.a.d7": b"7"})


async def until_made(stack: Stack) -> None:
    while True:
        try:
            return await stack.make_bucket()
        except NatsError:  # what was sent while the connection broke has no answer
            await asyncio.sleep(0.01)


async def test_a_change_that_was_lost_on_the_way_is_found_by_the_next_one(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_watch, "POSITION_CHECK_S", 60.0)
    hear = BucketWatch._on_message
    lost = [False]

    async def lose(watch: BucketWatch, message: Msg) -> None:
        if lost[0] and message.data == b"lost":
            lost[0] = False
            return
        await hear(watch, message)

    monkeypatch.setattr(BucketWatch, "_on_message", lose)
    async with running(server, filled=3) as stack:
        await stack.until(lambda: len(stack.held) == 3)
        lost[0] = True
        await stack.bucket.put("backends.a.d0", b"lost")
        await stack.bucket.put("backends.a.d1", b"next")
        await stack.until_held({"backends.a.d0": b"lost", "backends.a.d1": b"next", "backends.a.d2": b"2"})
        assert not lost[0]


async def test_answers_of_jetstream_that_somebody_sends_to_the_routers_change_nothing(
    server: NatsServer,
) -> None:
    """NATS never checks reply subjects, so who may ask may let the server answer to all routers."""
    async with running(server, filled=3) as stack:
        await stack.until(lambda: len(stack.held) == 3)
        attacker = await connected(server, "router")
        for key in ("backends.a.d0", "backends.a.d2", "backends.x.y"):
            into = SUBJECTS.snapshots.replace(">", key)
            for asked in ({"seq": 1}, {"seq": 2}, {"seq": 1, "next_by_subj": ">", "batch": 9}, {"seq": 99}):
                await attacker.publish(GET, json.dumps(asked).encode(), reply=into)
            await attacker.publish(INFO, b"", reply=into)
        await until_known(attacker)
        await close_nats(attacker)
        await stack.bucket.put("backends.a.d1", b"new")
        await stack.until_held({"backends.a.d0": b"0", "backends.a.d1": b"new", "backends.a.d2": b"2"})
        assert len(stack.wholes) == 1


async def test_the_controller_brings_an_older_bucket_up_to_date_and_loses_nothing(server: NatsServer) -> None:
    writer = await connected(server, "controller")
    context = writer.jetstream(timeout=20)
    bucket = await context.create_key_value(KeyValueConfig(bucket=SUBJECTS.bucket, max_bytes=1 << 20))
    await bucket.put("backends.a.d1", b'{"snapshot_id":7,"epoch":1,"content":null}')
    before = (await context.stream_info(STREAM)).config
    told: asyncio.Queue[dict[str, tuple[int, int | None]]] = asyncio.Queue()

    class Leader:
        def __call__(self, entries: object, *, whole: bool) -> None:
            assert isinstance(entries, dict)
            told.put_nowait(entries)

    leading = SnapshotBucket(writer, SUBJECTS, Leader())
    leading.watch()
    assert await asyncio.wait_for(told.get(), 30) == {"backends.a.d1": (1, 7)}
    info = await context.stream_info(STREAM)
    assert info.config.allow_direct
    assert info.config.republish is not None
    assert info.config.republish.dest == SUBJECTS.snapshots
    assert info.config.evolve(republish=None, allow_direct=before.allow_direct) == before
    updated = json.loads((await writer.request(INFO)).data)
    leading.reopen()
    await asyncio.wait_for(told.get(), 30)
    assert json.loads((await writer.request(INFO)).data)["config"] == updated["config"]
    await leading.stop_watching()
    await close_nats(writer)
