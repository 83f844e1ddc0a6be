"""The host's loop with a runtime and a bus made of lists."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from serve_common.names import BackendTag, HostId, ReplicaTag
from serve_common.protocol.reports import HostGoal, HostReport, LeaderNotice, ReplicaGoal, ReplicaStatus
from serve_common.runtime.tasks import TaskOwner
from serve_replica_host.core.events import Constructed, Drained, Placed, ProcessEnded, ReplicaStartFailed
from serve_replica_host.shell import host
from serve_replica_host.shell.host import HostShell
from tests.support.replica_rig import build_goal

HOST = HostId("h")


class Runtime:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, ReplicaTag]] = []
        self.was_told = asyncio.Event()
        self.was_forced = asyncio.Event()
        self.resources = {"CPU": 2.0}

    def start(self, goal: ReplicaGoal) -> None:
        self.was_told.set()
        self.told.append(("start", goal.replica_tag))

    def reconfigure(self, goal: ReplicaGoal) -> None:
        self.told.append(("reconfigure", goal.replica_tag))

    def check_health(self, replica_tag: ReplicaTag) -> None:
        self.told.append(("check", replica_tag))

    def drain(self, replica_tag: ReplicaTag) -> None:
        self.told.append(("drain", replica_tag))

    def kill(self, replica_tag: ReplicaTag) -> None:
        self.told.append(("kill", replica_tag))

    def kill_by_force(self, replica_tag: ReplicaTag) -> None:
        self.told.append(("kill_by_force", replica_tag))
        self.was_forced.set()


class Reports:
    """Keeps reports, and can be waited on."""

    def __init__(self) -> None:
        self.is_connected = True
        self.all: list[HostReport] = []
        self._came = asyncio.Event()

    async def publish_report(self, payload: bytes) -> None:
        self.all.append(msgspec.json.decode(payload, type=HostReport))
        self._came.set()

    async def until(self, holds: Callable[[HostReport], Any]) -> HostReport:
        async with asyncio.timeout(30):
            while True:
                for report in self.all:
                    if holds(report):
                        return report
                self._came.clear()
                await self._came.wait()


class Metrics:
    """Remembers what was shown and retired."""

    def __init__(self) -> None:
        self.shown: Mapping[ReplicaStatus, int] = {}
        self.retired: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.starts: list[tuple[str, bool]] = []
        self.failures: list[tuple[str, ReplicaStatus]] = []
        self.refused: list[str] = []

    def count_start(self, backend_tag: BackendTag, seconds: float, *, was_spare: bool) -> None:
        assert seconds >= 0
        self.starts.append((backend_tag, was_spare))

    def count_failure(self, backend_tag: BackendTag, status: ReplicaStatus) -> None:
        self.failures.append((backend_tag, status))

    def show_replicas(self, counts: Mapping[ReplicaStatus, int]) -> None:
        self.shown = dict(counts)

    def message_refused(self, kind: str, sender: str, error: Exception) -> None:
        self.refused.append(kind)

    def retire_process(self, process: str) -> None:
        self.retired.put(process)


class World:
    """A running shell."""

    def __init__(self) -> None:
        self.runtime, self.reports, self.metrics = Runtime(), Reports(), Metrics()
        self.shell = HostShell(
            HOST,
            runtime=self.runtime,
            bus=self.reports,
            metrics=self.metrics,
            incarnation="i1",
            started_at=7.0,
            now=asyncio.get_running_loop().time,
        )

    def want(self, *replicas: ReplicaGoal, generation: int, epoch: int = 1) -> None:
        goal = HostGoal(host_id=HOST, epoch=epoch, generation=generation, replicas=list(replicas))
        self.shell.take_goal(msgspec.json.encode(goal))


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    tasks = TaskOwner("test")
    tasks.start(world.shell.run(), "run")
    yield world
    await tasks.close(1)


async def test_a_goal_is_performed_and_acknowledged_by_the_next_report(world: World) -> None:
    one = build_goal(ordinal=1)
    world.want(one, generation=3)

    report = await world.reports.until(lambda r: r.generation == 3)
    assert world.runtime.told == [("start", one.replica_tag)]
    assert report.replicas[0].status is ReplicaStatus.STARTING
    assert (report.incarnation, report.started_at, report.resources) == ("i1", 7.0, {"CPU": 2.0})

    world.shell.take_event(Placed(one.replica_tag, 42))
    world.shell.take_event(Constructed(one.replica_tag, 1))
    running = await world.reports.until(
        lambda r: r.replicas and r.replicas[0].status is ReplicaStatus.RUNNING
    )
    assert running.replicas[0].pid == 42
    assert world.metrics.shown == {ReplicaStatus.RUNNING: 1}


async def test_what_comes_in_one_turn_makes_one_report(world: World) -> None:
    await world.reports.until(lambda r: True)
    before = len(world.reports.all)

    for generation in range(1, 20):
        world.want(*(build_goal(ordinal=n) for n in range(generation)), generation=generation)
    await world.reports.until(lambda r: r.generation == 19)

    assert len(world.reports.all) == before + 1


async def test_reports_have_rising_sequences_and_a_leader_gets_one_at_once(world: World) -> None:
    await world.reports.until(lambda r: True)
    count = len(world.reports.all)

    world.shell.take_leader(msgspec.json.encode(LeaderNotice(controller_id="c", epoch=5)))
    await world.reports.until(lambda r: r.sequence > count)
    world.want(generation=99, epoch=4)
    await world.reports.until(lambda r: r.sequence > count + 1)

    sequences = [report.sequence for report in world.reports.all]
    assert sequences == sorted(set(sequences))
    assert world.reports.all[-1].generation == 0


async def test_messages_that_cannot_be_read_are_counted_and_change_nothing(world: World) -> None:
    for payload in (b"", b"{}", b"[1", b"\xff", b'{"host_id":1}'):
        world.shell.take_goal(payload)
        world.shell.take_leader(payload)

    assert sorted(world.metrics.refused) == ["host_goal"] * 5 + ["leader_notice"] * 5
    world.want(generation=1)
    await world.reports.until(lambda r: r.generation == 1)


async def test_an_ended_process_has_its_metrics_retired(world: World) -> None:
    one = build_goal(ordinal=1)
    world.want(one, generation=1)
    await world.reports.until(lambda r: r.generation == 1)
    world.shell.take_event(Placed(one.replica_tag, 42))
    world.shell.take_event(ProcessEnded(one.replica_tag, "gone"))
    await world.reports.until(lambda r: r.replicas and r.replicas[0].status is ReplicaStatus.FAILED)

    assert await asyncio.to_thread(world.metrics.retired.get, timeout=30) == "42"


async def test_what_a_process_writes_after_its_reported_end_is_retired_too(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray reports ends early. One process id is another replica's by then, whose metrics stay."""
    monkeypatch.setattr(host, "RETIRE_AGAIN_S", 0.0)
    one, two, three = (build_goal(ordinal=ordinal) for ordinal in (1, 2, 3))
    world.want(one, two, three, generation=1)
    await world.reports.until(lambda r: r.generation == 1)
    world.shell.take_event(Placed(one.replica_tag, 42))
    world.shell.take_event(ProcessEnded(one.replica_tag, "gone"))
    world.shell.take_event(Placed(two.replica_tag, 42))
    world.shell.take_event(Placed(three.replica_tag, 43))
    world.shell.take_event(ProcessEnded(three.replica_tag, "gone"))

    retired = [await asyncio.to_thread(world.metrics.retired.get, timeout=30) for _ in range(3)]
    assert sorted(retired) == ["42", "43", "43"]
    assert world.metrics.retired.empty()


async def test_starts_are_timed_and_failures_counted_once(world: World) -> None:
    one, two = build_goal(ordinal=1), build_goal(ordinal=2)
    world.want(one, two, generation=1)
    await world.reports.until(lambda r: r.generation == 1)
    world.shell.take_event(Placed(one.replica_tag, 42, was_spare=True))
    world.shell.take_event(Constructed(one.replica_tag, 1))
    world.shell.take_event(Placed(two.replica_tag, 43))
    world.shell.take_event(ReplicaStartFailed(two.replica_tag, "no"))
    await world.reports.until(
        lambda r: {held.status for held in r.replicas} == {ReplicaStatus.RUNNING, ReplicaStatus.FAILED}
    )
    world.shell.take_event(ProcessEnded(two.replica_tag, "gone"))
    world.shell.take_event(ProcessEnded(one.replica_tag, "killed"))
    await world.reports.until(lambda r: any(held.status is ReplicaStatus.DEAD for held in r.replicas))

    assert world.metrics.starts == [("default/app", True)]
    assert world.metrics.failures == [
        ("default/app", ReplicaStatus.FAILED),
        ("default/app", ReplicaStatus.DEAD),
    ]


async def test_leaving_drains_and_the_last_report_says_that_nothing_is_left() -> None:
    world = World()
    one = build_goal(ordinal=1)
    async with asyncio.TaskGroup() as group:
        ended = group.create_task(world.shell.run())
        world.want(one, generation=1)
        await world.reports.until(lambda r: r.generation == 1)
        world.shell.take_event(Placed(one.replica_tag, 42))
        world.shell.take_event(Constructed(one.replica_tag, 1))
        world.shell.leave(5.0)
        await world.reports.until(lambda r: r.leaving)
        assert not ended.done()
        assert ("drain", one.replica_tag) in world.runtime.told
        world.shell.take_event(Drained(one.replica_tag))
        world.shell.take_event(ProcessEnded(one.replica_tag, "killed"))

    assert world.reports.all[-1].leaving
    assert world.reports.all[-1].replicas == []


async def test_what_survives_its_kill_is_killed_by_force_and_logged(world: World) -> None:
    one = build_goal(ordinal=1)
    world.want(one, generation=1)
    await world.reports.until(lambda r: r.generation == 1)

    with capture_logs() as logs:
        world.shell.take_event(ReplicaStartFailed(one.replica_tag, "no model"))
        await asyncio.wait_for(world.runtime.was_forced.wait(), 30)

    assert world.runtime.told[-2:] == [("kill", one.replica_tag), ("kill_by_force", one.replica_tag)]
    assert any(line["event"] == "replica_survives_kill" for line in logs)


async def test_nothing_is_published_while_the_bus_is_away(world: World) -> None:
    await world.reports.until(lambda r: True)
    world.reports.is_connected = False
    count = len(world.reports.all)
    world.want(build_goal(ordinal=1), generation=1)
    await asyncio.wait_for(world.runtime.was_told.wait(), 30)
    await asyncio.sleep(0)
    assert len(world.reports.all) == count

    world.reports.is_connected = True
    world.shell.report_now()
    report = await world.reports.until(lambda r: r.generation == 1)
    assert report.sequence > count
