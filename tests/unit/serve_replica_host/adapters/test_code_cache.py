"""Fetching code before a replica starts: from the bucket, from the disk, and what is wrong with it."""

from __future__ import annotations

import asyncio
import io
import zipfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from nats.errors import NoRespondersError
from nats.js.errors import NotFoundError

from serve_common.errors import BusUnavailable
from serve_common.protocol.code import CodeCorrupt, digest_code
from serve_replica_host.adapters import code_cache
from serve_replica_host.adapters.code_cache import CodeCache, ReplicasWithCode
from serve_replica_host.core.events import ProcessEnded, ReplicaEvent, ReplicaStartFailed, Waits
from tests.support.replica_rig import build_goal
from tests.support.waiting import eventually

CODE = b"a" * 1000
DIGEST = digest_code(CODE)
WAIT_S = 30.0


class Bus:
    """The bucket as the host's connection reads it."""

    def __init__(self) -> None:
        self.pages: dict[tuple[str, int], bytes] = {}
        self.is_away = False
        self.is_lost = False
        """The whole bucket is gone."""
        self.reads = 0

    def put(self, data: bytes, digest: str | None = None, size: int = 300) -> None:
        parts = [data[at : at + size] for at in range(0, len(data), size)]
        self.pages.update({(digest or digest_code(data), at): part for at, part in enumerate(parts)})

    async def read_code_page(self, digest: str, page: int) -> tuple[bytes, int]:
        self.reads += 1
        await asyncio.sleep(0)
        if self.is_away:
            raise BusUnavailable("NATS is away")
        if self.is_lost:
            raise NoRespondersError
        if (digest, page) not in self.pages:
            raise NotFoundError
        return self.pages[digest, page], sum(known == digest for known, _ in self.pages)


def names(directory: Path) -> set[str]:
    return {entry.name for entry in directory.iterdir()}


class Runtime:
    """Records what reaches the runtime behind."""

    def __init__(self) -> None:
        self.resources = {"CPU": 2.0}
        self.started: list[str] = []
        self.killed: list[str] = []

    def start(self, goal: Any) -> None:
        self.started.append(goal.replica_tag)

    def kill(self, tag: str) -> None:
        self.killed.append(tag)

    def reconfigure(self, goal: Any) -> None: ...
    def check_health(self, tag: str) -> None: ...
    def drain(self, tag: str) -> None: ...
    def kill_by_force(self, tag: str) -> None: ...


@pytest.fixture
def bus(monkeypatch: pytest.MonkeyPatch) -> Bus:
    monkeypatch.setattr(code_cache, "RETRY_S", 0.01)
    return Bus()


@pytest.fixture
def cache(bus: Bus, tmp_path: Path) -> CodeCache:
    return CodeCache(tmp_path, bus)  # type: ignore[arg-type]


async def test_code_is_fetched_once_and_then_read_from_the_disk(cache: CodeCache, bus: Bus) -> None:
    bus.put(CODE)
    await asyncio.gather(*(cache.fetch(DIGEST) for _ in range(5)))
    assert cache.path(DIGEST).read_bytes() == CODE
    assert cache.path(DIGEST).stat().st_mode & 0o777 == 0o444
    assert bus.reads == 4


@pytest.mark.parametrize("at", [0, 500, 999])
async def test_code_with_one_byte_changed_is_never_kept(
    cache: CodeCache, bus: Bus, tmp_path: Path, at: int
) -> None:
    bus.put(CODE[:at] + b"b" + CODE[at + 1 :], DIGEST)
    with pytest.raises(CodeCorrupt, match=DIGEST):
        await cache.fetch(DIGEST)
    assert names(tmp_path) == set()


async def test_code_that_was_changed_on_the_disk_is_fetched_again(cache: CodeCache, bus: Bus) -> None:
    cache.path(DIGEST).write_bytes(CODE[:-1] + b"b")
    bus.put(CODE)
    await cache.fetch(DIGEST)
    assert cache.path(DIGEST).read_bytes() == CODE


@pytest.mark.parametrize("is_lost", [False, True], ids=["code", "bucket"])
async def test_missing_code_is_reported_and_waited_for(cache: CodeCache, bus: Bus, *, is_lost: bool) -> None:
    bus.is_lost = is_lost
    async with asyncio.TaskGroup() as group:
        group.create_task(cache.fetch(DIGEST))
        await eventually(lambda: cache.missing == {DIGEST}, within_s=WAIT_S)
        bus.is_away = True
        await asyncio.sleep(0.03)
        bus.is_away = bus.is_lost = False
        bus.put(CODE)
    assert not cache.missing


async def test_the_cache_is_bounded_and_keeps_what_runs(
    cache: CodeCache, bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code_cache, "CACHE_BYTES_MAX", 2000)
    digests = []
    for number in range(4):
        data = bytes([number]) * 1000
        bus.put(data)
        digests.append(digest_code(data))
        await cache.fetch(digests[-1])
    (tmp_path / "fetch-left").write_bytes(b"x")
    await cache.trim({digests[0]})
    assert names(tmp_path) == {digests[0], digests[3], "fetch-left"}
    cache.clean()
    assert not (tmp_path / "fetch-left").exists()


async def test_archives_are_unpacked_before_the_replica_starts_and_trimmed_with_their_files(
    cache: CodeCache, bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        archive.writestr("helper.py", b"x" * 100)
    data = target.getvalue()
    archived = digest_code(data)
    world = World(cache)
    goal = goal_with_code()
    config = msgspec.structs.replace(goal.replica_config, py_modules=(archived,), working_dir=archived)
    world.replicas.start(msgspec.structs.replace(goal, replica_config=config))
    bus.put(CODE)
    await eventually(lambda: cache.missing == {archived}, within_s=WAIT_S)
    assert world.runtime.started == []
    bus.put(data)
    await eventually(lambda: world.runtime.started == [goal.replica_tag], within_s=WAIT_S)
    assert (tmp_path / f"{archived}.files/helper.py").read_bytes() == b"x" * 100
    monkeypatch.setattr(code_cache, "CACHE_BYTES_MAX", 0)
    await cache.trim({archived})
    assert names(tmp_path) == {archived, f"{archived}.files"}
    await cache.trim(set())
    assert names(tmp_path) == set()
    await world.replicas.close(1)


async def test_a_replica_whose_archive_cannot_be_unpacked_fails_and_says_why(
    cache: CodeCache, bus: Bus
) -> None:
    world = World(cache)
    goal = goal_with_code(code="")
    config = msgspec.structs.replace(goal.replica_config, working_dir=DIGEST)
    bus.put(CODE)
    world.replicas.start(msgspec.structs.replace(goal, replica_config=config))
    await eventually(lambda: len(world.events) == 2, within_s=WAIT_S)
    assert isinstance(world.events[0], ReplicaStartFailed)
    assert DIGEST in world.events[0].error
    assert world.runtime.started == []


def goal_with_code(ordinal: int = 1, code: str = DIGEST) -> Any:
    goal = build_goal(ordinal=ordinal)
    return msgspec.structs.replace(
        goal, replica_config=msgspec.structs.replace(goal.replica_config, code=code)
    )


class World:
    def __init__(self, cache: CodeCache) -> None:
        self.runtime = Runtime()
        self.events: list[ReplicaEvent] = []
        self.replicas = ReplicasWithCode(self.runtime, cache, self.events.append)  # type: ignore[arg-type]


async def test_a_replica_starts_once_its_code_is_here(
    cache: CodeCache, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code_cache, "PATIENCE_S", 0.02)
    world = World(cache)
    world.replicas.start(goal_with_code(code=""))
    assert len(world.runtime.started) == 1
    world.replicas.start(goal_with_code())
    await eventually(lambda: world.events, within_s=WAIT_S)
    assert isinstance(world.events[0], Waits)
    assert DIGEST in world.events[0].reason
    assert len(world.runtime.started) == 1
    bus.put(CODE)
    await eventually(lambda: len(world.runtime.started) == 2, within_s=WAIT_S)
    world.replicas.kill(goal_with_code().replica_tag)
    assert world.runtime.killed == [goal_with_code().replica_tag]
    await world.replicas.close(1)


async def test_a_replica_with_changed_code_fails_and_says_why(cache: CodeCache, bus: Bus) -> None:
    bus.put(b"other", DIGEST)
    world = World(cache)
    world.replicas.start(goal_with_code())
    await eventually(lambda: len(world.events) == 2, within_s=WAIT_S)
    failed, ended = world.events
    assert isinstance(failed, ReplicaStartFailed)
    assert DIGEST in failed.error
    assert isinstance(ended, ProcessEnded)
    assert world.runtime.started == []


async def test_a_wait_for_code_ends_with_a_kill(cache: CodeCache, bus: Bus) -> None:
    world = World(cache)
    world.replicas.start(goal_with_code())
    world.replicas.kill(goal_with_code().replica_tag)
    assert [type(event) for event in world.events] == [ProcessEnded]
    bus.put(CODE)
    await asyncio.sleep(0.05)
    assert world.runtime.started == world.runtime.killed == []
    await world.replicas.close(1)
