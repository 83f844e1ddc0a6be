"""The Ray runtime apart from its host: neither outlives the other, and user code gets into the one only."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import psutil
import pytest

from serve_common.config.backend import RayActorOptions
from serve_common.protocol.reports import ReplicaGoal, ReplicaStatus
from tests.support.servers.nats_server import NatsServer
from tests.support.servers.ray_cluster import HOST, HostOnCluster
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(300)

APP = """
from __future__ import annotations

import inspect
import os
import time


class Steady:
    def __call__(self, request):
        return "here"


class Spins:
    def __call__(self, request):
        while True:
            pass


class Bomb(Exception):
    \"\"\"Whoever unpickles it says who that was.\"\"\"

    def __reduce__(self):
        place = os.environ["BOMB"]
        return exec, (f"import os; open({place!r}, 'a').write(f'{{os.getpid()}}\\\\n')",)


class Hostile:
    \"\"\"Its actor answers the host's calls with objects of its own, which Ray's driver unpickles.\"\"\"

    def __init__(self):
        from ray._private.worker import global_worker

        (actor,) = global_worker.actors.values()
        words = inspect.unwrap(type(actor).check_health).__globals__  # Ray has wrapped it for traces of its own
        self.checks = 0
        self.encode, words["encode"] = words["encode"], self.answer
        self.started = actor._get_process
        actor._get_process = self.raise_bomb

    def answer(self, outcome):
        return self.encode(outcome) if self.checks < 3 else Bomb()

    def raise_bomb(self):
        self.checks += 1
        if self.checks == 2:
            raise Bomb
        return self.started()

    def __call__(self, request):
        return "here"
"""


class Place:
    """A directory, a nats-server, and hosts one after the other."""

    def __init__(self, directory: Path, server: NatsServer) -> None:
        self.directory = directory
        self.bomb = directory / "bomb"
        self._server = server

    def went_off(self) -> list[str]:
        """In which processes."""
        return self.bomb.read_text().split() if self.bomb.exists() else []

    @classmethod
    @asynccontextmanager
    async def made(cls) -> AsyncIterator[Place]:
        directory = Path(tempfile.mkdtemp(prefix="mp", dir="/tmp"))  # short: Ray puts unix sockets below it
        (directory / "apps").mkdir()
        (directory / "apps" / "far_app.py").write_text(APP)
        try:
            with NatsServer(directory) as server:
                yield cls(directory, server)
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    @asynccontextmanager
    async def host(self) -> AsyncIterator[HostOnCluster]:
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("MUSTER_", "RAY_", "PROMETHEUS_"))
        } | {
            "MUSTER_NATS_URL": self._server.url,
            "MUSTER_NATS_PASSWORD": "anyone",
            "MUSTER_REPLICA_NATS_PASSWORD": "anyone",
            "MUSTER_HOST_ID": HOST,
            "MUSTER_OPS_PORT": "0",
            "MUSTER_RAY_TEMP_DIR": str(self.directory / "ray"),
            "MUSTER_NUM_CPUS": "2",
            "MUSTER_SPARE_REPLICAS": "1",
            "MUSTER_DRAIN_TIMEOUT_S": "5",
            "BOMB": str(self.bomb),
        }
        async with HostOnCluster.running(self.directory, environment, self._server.url) as host:
            yield host


def goal(host: HostOnCluster, attribute: str) -> ReplicaGoal:
    replica = host.replica(attribute)
    options = RayActorOptions(num_cpus=0.1)
    config = msgspec.structs.replace(replica.replica_config, ray_actor_options=options)
    return msgspec.structs.replace(replica, replica_config=config, health_check_period_s=0.5)


def runtime_of(host: HostOnCluster) -> psutil.Process:
    (runtime,) = [
        child
        for child in psutil.Process(host.process.pid).children(recursive=True)
        if child.cmdline()[1:3] == ["-m", "serve_replica_host.ray_main"]
    ]
    return runtime


async def until_gone(processes: list[psutil.Process]) -> None:
    await eventually(lambda: not any(map(_is_alive, processes)), within_s=60)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def said(host: HostOnCluster, event: str) -> list[dict[str, object]]:
    return [line for line in host.said() if line["event"] == event]


async def test_a_host_and_its_runtime_end_together_and_leave_nothing() -> None:
    async with Place.made() as place:
        async with place.host() as host:
            await host.run(goal(host, "Steady"))
            family = psutil.Process(host.process.pid).children(recursive=True)
            assert len(family) > 4  # the runtime, Ray's two servers, workers
            os.kill(runtime_of(host).pid, signal.SIGKILL)
            async with asyncio.timeout(60):
                assert await host.process.wait() == 1
            (failed,) = said(host, "host_failed")
            assert "the Ray runtime is gone, and all replicas with it: killed by SIGKILL" in str(failed)
            await until_gone(family)
        # As it is started anew: the same directory, other processes. One of its replicas is busy with user code.
        async with place.host() as host:
            spinning = goal(host, "Spins")
            await host.run(spinning)
            calling = asyncio.create_task(host.call(spinning.replica_tag))  # noqa: TID251 - ends below
            family = psutil.Process(host.process.pid).children(recursive=True)
            os.kill(host.process.pid, signal.SIGKILL)
            await host.process.wait()
            await until_gone(family)
            calling.cancel()
            await asyncio.gather(calling, return_exceptions=True)


async def test_what_a_replica_has_unpickled_runs_in_the_runtime_and_never_in_the_host() -> None:
    async with Place.made() as place, place.host() as host:
        hostile, steady = goal(host, "Hostile"), goal(host, "Steady")
        await host.run(hostile, steady)
        runtime = runtime_of(host)
        await eventually(lambda: str(runtime.pid) in place.went_off(), within_s=60)
        await host.goal(steady)
        await host.until(lambda report: len(report.replicas) == 1)
        assert str(host.process.pid) not in place.went_off()
        assert host.process.returncode is None
        report = await host.until(lambda _report: True)
        assert report.replicas[0].status is ReplicaStatus.RUNNING
        # What the host knows is not there to be found.
        environment = runtime.environ()
        assert not [name for name in environment if "PASSWORD" in name]
        assert not [
            mapped.path for mapped in psutil.Process(host.process.pid).memory_maps() if "/ray/" in mapped.path
        ]
