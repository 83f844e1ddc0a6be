"""What waits for the thread that calls Ray: in which order it runs, and what of it never does."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from serve_common.config.replica import ReplicaConfig
from serve_common.names import BackendTag, ReplicaTag, replica_tag
from serve_common.protocol.reports import ReplicaGoal
from serve_common.runtime.settings import BusSettings
from serve_replica_host.adapters.metrics_files import MetricsFiles
from serve_replica_host.adapters.ray_runtime import RayRuntime
from serve_replica_host.adapters.ray_session import RaySettings
from serve_replica_host.adapters.ray_thread import RayThread, Urgency
from serve_replica_host.core.events import ProcessEnded, ReplicaEvent

WITHIN_S = 30.0
BACKEND = BackendTag("default/a")


class Blocked:
    """A thread that is busy until it is let go."""

    def __init__(self, thread: RayThread) -> None:
        self._thread, self._go = thread, threading.Event()
        is_busy = threading.Event()
        thread.post(lambda: (is_busy.set(), self._go.wait(WITHIN_S), None)[2])
        assert is_busy.wait(WITHIN_S)

    def end(self) -> None:
        self._go.set()
        self._thread.submit(lambda: None).result(WITHIN_S)
        done = threading.Event()
        self._thread.post(done.set, urgency=Urgency.START)
        assert done.wait(WITHIN_S)


class Held:
    """As `RayActorHandle`, with itself as the actor; notes what it is told."""

    def __init__(self, told: list[str]) -> None:
        self.actor, self.told, self.check_health = self, told, self

    def remote(self) -> None:
        self.told.append("check")

    def watch(self, _reference: object, _on_done: object) -> None:
        pass


def goal(ordinal: int) -> ReplicaGoal:
    return ReplicaGoal(
        replica_tag=replica_tag(BACKEND, ordinal),
        backend_tag=BACKEND,
        replica_config=ReplicaConfig(import_path="a:A"),
        config_version=1,
        max_concurrent_queries=1,
        graceful_shutdown_timeout_s=5.0,
        health_check_period_s=10.0,
        health_check_timeout_s=10.0,
        start_timeout_s=10.0,
    )


BUS = BusSettings(servers=[], user="", inbox_prefix="i", subject_prefix="serve")


@pytest.fixture
def events() -> list[ReplicaEvent]:
    return []


@pytest.fixture
def runtime(tmp_path: Path, events: list[ReplicaEvent]) -> RayRuntime:
    """Without a Ray: nothing here gets that far."""
    settings = RaySettings(
        temp_dir=str(tmp_path),
        address=None,
        num_cpus=1,
        app_root="",
        metrics_dir="",
        host_id="h",
        spare_replicas=0,
    )
    return RayRuntime(settings, events.append, files=MetricsFiles(tmp_path), write_lines=lambda _lines: None)


def test_what_takes_no_time_overtakes_and_starts_come_last() -> None:
    thread, ran = RayThread(), list[str]()
    blocked = Blocked(thread)
    for number in range(3):
        thread.post(ran.append, f"start {number}", urgency=Urgency.START)
        thread.post(ran.append, f"kill {number}")
        thread.post(ran.append, f"check {number}", urgency=Urgency.CHECK)
    blocked.end()

    assert ran == [f"{kind} {number}" for kind in ("check", "kill", "start") for number in range(3)]


async def test_a_check_is_sent_before_the_kills_and_starts_that_wait(
    runtime: RayRuntime, events: list[ReplicaEvent], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = list[str]()
    monkeypatch.setattr(
        "serve_replica_host.adapters.ray_runtime.ray.kill", lambda *_, **__: told.append("kill")
    )
    runtime._loop.open()
    for ordinal in range(10):
        runtime._actors[replica_tag(BACKEND, ordinal)] = Held(told)  # type: ignore[assignment]
    blocked = Blocked(runtime._thread)
    for ordinal in range(9):
        runtime.kill(replica_tag(BACKEND, ordinal))
    runtime.check_health(replica_tag(BACKEND, 9))
    await asyncio.to_thread(blocked.end)

    assert told == ["check", *["kill"] * 9]
    await asyncio.sleep(0)
    assert [type(event).__name__ for event in events] == ["HealthCheckSent"]


async def test_one_kill_waits_however_often_it_is_asked_for(
    runtime: RayRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, tag = list[str](), replica_tag(BACKEND, 1)
    monkeypatch.setattr(
        "serve_replica_host.adapters.ray_runtime.ray.kill", lambda *_, **__: told.append("kill")
    )
    runtime._actors[tag] = Held(told)  # type: ignore[assignment]
    for _ in range(2):
        blocked = Blocked(runtime._thread)
        for _ in range(5):
            runtime.kill(tag)
            runtime.kill_by_force(tag)
        await asyncio.to_thread(blocked.end)

    assert told == ["kill", "kill"]


async def test_a_start_that_is_killed_while_it_waits_never_begins(
    runtime: RayRuntime, events: list[ReplicaEvent], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = list[ReplicaTag]()
    monkeypatch.setattr(runtime._spares, "take", lambda: begun.append(goal(1).replica_tag))
    blocked = Blocked(runtime._thread)
    runtime.start(goal(1), BUS)
    runtime.kill(goal(1).replica_tag)
    runtime.kill(goal(1).replica_tag)

    assert events == [ProcessEnded(goal(1).replica_tag, "it was not wanted any more before its start began")]
    await asyncio.to_thread(blocked.end)
    assert begun == []
