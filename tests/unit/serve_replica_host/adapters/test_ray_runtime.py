"""What waits for the thread that calls Ray: in which order it runs, and what of it never does."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from pathlib import Path
from unittest.mock import Mock

import msgspec
import pytest
from ray.exceptions import RuntimeEnvSetupError

from serve_common.config.backend import RayActorOptions
from serve_common.names import BackendTag, ReplicaTag, replica_tag
from serve_common.protocol.reports import ReplicaGoal
from serve_common.runtime.settings import BusSettings
from serve_replica_host.adapters.metrics_files import MetricsFiles
from serve_replica_host.adapters.ray_runtime import RayRuntime
from serve_replica_host.adapters.ray_session import (
    SESSIONS_MAX,
    RayResources,
    absolute_app_dir,
    actor_options,
    describe_end,
    describe_needs,
    fits_spare,
    remove_old_sessions,
)
from serve_replica_host.adapters.ray_thread import RayActorHandle, RayThread, SparePool, Urgency
from serve_replica_host.core.events import Placed, ProcessEnded, ReplicaEvent
from serve_replica_host.replica.telemetry.remote import Hello
from tests.support.replica_rig import build_goal
from tests.unit.serve_replica_host.adapters.test_ray_process import SETTINGS

WITHIN_S = 30.0
BACKEND = BackendTag("default/app")


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
    return build_goal(ordinal=ordinal)


BUS = BusSettings(servers=[], user="", inbox_prefix="i", subject_prefix="serve")


@pytest.fixture
def events() -> list[ReplicaEvent]:
    return []


@pytest.fixture
def runtime(tmp_path: Path, events: list[ReplicaEvent]) -> RayRuntime:
    """Without a Ray: nothing here gets that far."""
    settings = msgspec.structs.replace(SETTINGS, temp_dir=str(tmp_path))
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


class Actor:
    """An actor of which only the calls that were sent are known."""

    def __init__(self, sent: list[str]) -> None:
        self._sent = sent

    def __getattr__(self, name: str) -> Actor:
        self._sent.append(name)
        return self

    def remote(self, *_arguments: object) -> Future[None]:
        return Future()


@pytest.mark.parametrize("first", ["its process", "its resources"])
async def test_a_replica_is_constructed_only_once_the_host_was_told_of_its_process(
    runtime: RayRuntime, events: list[ReplicaEvent], monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """Whoever hears of its end before would not know whose metrics to retire."""
    sent: list[str] = []
    wanted = goal(1)
    spare = RayActorHandle(Actor(sent), wanted, bus=BUS, futures=[])
    monkeypatch.setattr(RayActorHandle, "watch", lambda *_arguments: None)
    monkeypatch.setattr(runtime, "_emit", events.append)
    runtime._actors[wanted.replica_tag] = spare
    steps = [lambda: runtime._identify(spare, Hello(42)), lambda: runtime._place(spare)]

    for step in steps if first == "its process" else reversed(steps):
        assert sent == []
        step()

    assert sent == ["start"]
    assert events == [Placed(wanted.replica_tag, 42)]


# Which of the actors that wait becomes a replica, and when missing ones are started.


class World:
    """A pool whose actors are plain values."""

    def __init__(self, *, spares_max: int, starts_max: int = 2) -> None:
        self.made: list[RayActorHandle] = []
        self.pool = SparePool(self._create, spares_max=spares_max, starts_max=starts_max)

    def _create(self) -> RayActorHandle:
        held = RayActorHandle(actor=len(self.made), futures=[])
        self.made.append(held)
        return held

    def ready(self, *numbers: int) -> None:
        for number in numbers:
            self.made[number].pid = 100 + number
            self.pool.on_ready(self.made[number])


def test_half_of_the_spares_wait_at_first_and_as_many_as_replicas_run_later() -> None:
    world = World(spares_max=4, starts_max=10)
    world.pool.refill()
    assert world.pool.waiting == 2

    taken = [world.pool.take() for _ in range(3)]
    world.pool.refill()
    assert world.pool.waiting == 3
    for held in taken[:2]:
        world.pool.on_ended(held)
    assert world.pool.take()
    world.pool.refill()
    assert world.pool.waiting == 2


def test_a_pool_is_filled_a_few_at_a_time() -> None:
    world = World(spares_max=8)

    world.pool.refill()
    assert len(world.made) == 2
    world.pool.refill()
    assert len(world.made) == 2
    world.ready(0)
    assert len(world.made) == 3
    world.ready(1, 2, 3)
    assert (len(world.made), world.pool.waiting) == (4, 4)


def test_one_that_is_ready_is_taken_before_one_that_starts() -> None:
    world = World(spares_max=4)
    world.pool.refill()
    world.ready(1)

    assert world.pool.take() is world.made[1]
    assert world.pool.take() is world.made[0]
    assert world.pool.waiting == 0


def test_an_empty_pool_starts_one_on_the_spot_whatever_else_starts() -> None:
    world = World(spares_max=0)

    taken = [world.pool.take() for _ in range(5)]

    assert taken == world.made
    world.pool.refill()
    assert len(world.made) == 5


def test_what_replicas_wait_for_starts_before_the_pool_is_filled_again() -> None:
    world = World(spares_max=4)
    world.pool.refill()
    world.ready(0, 1)
    for _ in range(4):
        world.pool.take()

    world.pool.refill()
    assert len(world.made) == 4  # two replicas' processes start already
    world.ready(2)
    assert len(world.made) == 5


def test_one_that_ends_is_forgotten_and_replaced_at_the_next_filling() -> None:
    world = World(spares_max=4)
    world.pool.refill()
    world.ready(0)

    world.pool.on_ended(world.made[0])
    world.pool.on_ended(world.made[1])
    assert world.pool.waiting == 0
    assert len(world.made) == 2
    world.pool.refill()
    assert world.pool.waiting == 2


def test_the_end_of_one_that_was_taken_changes_nothing() -> None:
    world = World(spares_max=1)
    world.pool.refill()
    world.ready(0)
    taken = world.pool.take()

    world.pool.on_ended(taken)
    world.pool.refill()

    assert (len(world.made), world.pool.waiting) == (2, 1)


# What Ray is asked for, and what is said when a replica's process has ended.


@pytest.mark.parametrize(("is_cluster", "num_cpus", "cpus"), [(True, 8, 8), (True, None, 2), (False, 8, 2)])
def test_a_host_on_a_cluster_reports_the_cpus_that_it_was_given(
    monkeypatch: pytest.MonkeyPatch, *, is_cluster: bool, num_cpus: int | None, cpus: int
) -> None:
    total = {"CPU": 2.0, "GPU": 1.0, "node:1": 1.0}
    monkeypatch.setattr("serve_replica_host.adapters.ray_session.ray.cluster_resources", lambda: total)
    resources = RayResources(lambda *_: None)
    resources.open(is_cluster=is_cluster, num_cpus=num_cpus)
    resources.poll()
    assert resources.whole == {"CPU": float(cpus), "GPU": 1.0}


@pytest.mark.parametrize(("num_cpus", "asked"), [(8, 0), (None, 1.0)])
def test_a_cluster_is_asked_for_no_cpus_where_the_host_was_given_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_cpus: int | None, asked: float
) -> None:
    settings = msgspec.structs.replace(
        SETTINGS, temp_dir=str(tmp_path), address="127.0.0.1:6379", num_cpus=num_cpus
    )
    runtime = RayRuntime(
        settings, lambda _: None, files=MetricsFiles(tmp_path), write_lines=lambda _lines: None
    )
    created: list[dict[str, object]] = []
    monkeypatch.setattr(runtime, "_create", lambda **options: created.append(options) or Held([]))
    for unused in ("_place", "_loop"):
        monkeypatch.setattr(runtime, unused, Mock())
    wanted = goal(1)
    runtime._pending_starts[wanted.replica_tag] = wanted, BUS
    runtime._start(wanted.replica_tag)
    assert [options["num_cpus"] for options in created] == [asked]


def test_only_what_was_asked_for_reaches_ray() -> None:
    assert actor_options(RayActorOptions()) == {"num_cpus": 1.0, "num_gpus": 0.0}
    assert actor_options(
        RayActorOptions(
            num_cpus=0.5, num_gpus=1, memory=1e9, resources={"tpu": 2}, runtime_env={"env_vars": {"A": "b"}}
        )
    ) == {
        "num_cpus": 0.5,
        "num_gpus": 1,
        "memory": 1e9,
        "resources": {"tpu": 2},
        "runtime_env": {"env_vars": {"A": "b"}},
    }


@pytest.mark.parametrize(
    ("options", "fits"),
    [
        (RayActorOptions(), True),
        (RayActorOptions(num_cpus=0), True),
        (RayActorOptions(num_cpus=1.5), True),
        (RayActorOptions(num_cpus=2), False),
        (RayActorOptions(num_gpus=0.1), False),
        (RayActorOptions(memory=1), False),
        (RayActorOptions(resources={"tpu": 1}), False),
        (RayActorOptions(runtime_env={"env_vars": {"A": "b"}}), False),
    ],
)
def test_only_a_replica_of_cpus_alone_can_be_an_actor_that_waits(
    options: RayActorOptions, fits: bool
) -> None:
    assert fits_spare(options) is fits


def test_needs_are_said_in_words() -> None:
    assert (
        describe_needs(RayActorOptions(num_cpus=4, num_gpus=0.5, resources={"tpu": 2}))
        == "4 CPU, 0.5 GPU, 2 tpu"
    )
    assert describe_needs(RayActorOptions(num_cpus=0)) == "nothing"


def test_a_relative_app_dir_begins_at_the_root() -> None:
    assert absolute_app_dir("examples", "/srv") == "/srv/examples"
    assert absolute_app_dir("/apps", "/srv") == "/apps"
    assert absolute_app_dir("", "/srv") == ""


def test_an_end_is_one_line() -> None:
    page = (
        "The actor died. The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR "
        "Worker exit detail: Worker unexpectedly exits. End of file. Some common causes include: (1) a (2) b"
    )

    assert describe_end(42, RuntimeError(page)).startswith(
        "the replica's process 42 ended unasked (SYSTEM_ERROR: Worker unexpectedly exits); "
    )
    assert describe_end(0, RuntimeError("no node")) == "the replica's process ended: no node"
    node = RuntimeError(
        "The actor died because its node has died. Node Id: ab The actor's node was terminated"
    )
    assert describe_end(42, node, "10.0.0.2").startswith(
        "the replica's process 42 on 10.0.0.2 ended with its machine"
    )
    killed = RuntimeError("died. The actor is dead because it was killed by `ray.kill`.")
    assert describe_end(42, killed) == "the replica's process 42 was killed by its host"
    failed = RuntimeEnvSetupError("x" * 5000 + "\nERROR: No matching distribution found for nonesuch\n")
    text = describe_end(0, failed)
    assert text.startswith("its runtime_env could not be set up: …x")
    assert text.endswith("xx\nERROR: No matching distribution found for nonesuch")
    assert len(text) < 2000


def test_only_the_newest_sessions_of_ray_are_kept(tmp_path: Path) -> None:
    for day in range(1, 8):
        (tmp_path / f"session_2026-01-0{day}_00-00-00_1_1").mkdir(parents=True)
    (tmp_path / "session_latest").symlink_to(tmp_path / "session_2026-01-01_00-00-00_1_1")

    remove_old_sessions(tmp_path)

    kept = sorted(path.name for path in tmp_path.glob("session_2*"))
    assert len(kept) == SESSIONS_MAX
    assert kept[-1].startswith("session_2026-01-07")
