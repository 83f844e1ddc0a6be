"""What runs: nats-server and Postgres as in the embedded stack, the controller and the simulator as children.

All end with the benchmark, however that ends. Why the controller is not supervised: the benchmark kills it and decides
the moment at which it starts again. Why Postgres gets a few more settings: WAL is what a change is charged with, and
images of whole pages after a checkpoint, or a vacuum that happens to run, would charge one change with what belongs to
none.

``python -m bench.scale.processes FILE`` is the controller under a profiler.
"""

from __future__ import annotations

import asyncio
import contextlib
import cProfile
import itertools
import os
import signal
import sys
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import FrameType
from typing import Final, final

import msgspec
import psutil

from bench.scale.report import Size
from bench.scale.simulator import Counters
from muster.embedded import StatePaths
from muster.embedded.options import CHECKOUT
from muster.embedded.postgres import DATABASE, POSTGRES, SUPERUSER, EmbeddedPostgres
from muster.embedded.process import PROCESS_MARK, STACK_MARK
from muster.embedded.services import CONTROLLER, NATS, ServiceSpecs, nats_spec, prepare_nats
from muster.embedded.stack import choose_ports
from muster.embedded.supervisor import Supervisor
from muster.secrets import Secrets, generate
from serve_common.runtime import guardian
from serve_common.runtime.child_process import describe_exit
from tests.support.servers.reserved_port import ANY_PORTS

_QUIET_WAL: Final = (
    "--full_page_writes=off",
    "--autovacuum=off",
    "--checkpoint_timeout=1h",
    "--max_wal_size=16GB",
)
_STOP_S: Final = 5.0
_ANSWER_S: Final = 10.0


class Servers(msgspec.Struct, frozen=True, kw_only=True):
    """What runs where, and what a controller must be told to join in."""

    nats_url: str
    nats_monitor_url: str
    nats_pid: int
    controller_ops_url: str
    controller_environment: Mapping[str, str]
    """The whole one, as the embedded stack gives it."""
    secrets: Secrets
    logs: Path
    postgres_port: int

    def superuser_connection(self) -> dict[str, object]:
        """Arguments of `asyncpg.connect`."""
        return {
            "host": "127.0.0.1",
            "port": self.postgres_port,
            "user": SUPERUSER,
            "password": self.secrets.read("postgres_superuser_password"),
            "database": DATABASE,
        }


@asynccontextmanager
async def running_servers(directory: Path) -> AsyncIterator[Servers]:
    """Start both with new state in ``directory``, an absolute path; both are gone afterwards. Raises `StackFailed`."""
    paths = StatePaths(directory)
    for needed in (paths.root, paths.logs):
        needed.mkdir(mode=0o700, exist_ok=True)
    ports = choose_ports(ANY_PORTS, {}).by_use
    secrets = generate(paths.secrets)
    prepare_nats(paths, ANY_PORTS, secrets)
    postgres = EmbeddedPostgres(paths, ANY_PORTS, secrets, ports["postgres"])
    postgres.prepare()
    environment = {
        name: value for name, value in os.environ.items() if name not in (STACK_MARK, PROCESS_MARK)
    }
    database = postgres.spec(environment)
    database = msgspec.structs.replace(database, argv=[*database.argv, *_QUIET_WAL])
    services = ServiceSpecs(paths, ANY_PORTS, secrets, ports, paths.ray).all(environment)
    controller = next(spec for spec in services if spec.name == CONTROLLER)
    stack_id = uuid.uuid4().hex
    supervisor = Supervisor(stack_id, [nats_spec(paths, ports, environment), database], lambda _event: None)
    await supervisor.start()
    try:
        pids = {process.name: process.pid for process in supervisor.processes}
        assert pids.keys() == {NATS, POSTGRES}
        yield Servers(
            nats_url=f"nats://127.0.0.1:{ports['nats']}",
            nats_monitor_url=f"http://127.0.0.1:{ports['nats_monitor']}",
            nats_pid=pids[NATS],
            controller_ops_url=f"http://127.0.0.1:{ports['controller_ops']}",
            # The mark lets the supervisor end what is left of it, should we fail to.
            controller_environment={**controller.env, STACK_MARK: stack_id, PROCESS_MARK: CONTROLLER},
            secrets=secrets,
            logs=paths.logs,
            postgres_port=ports["postgres"],
        )
    finally:
        await supervisor.stop()


class ProcessLost(RuntimeError):
    """The controller or the simulator ended, or does not answer; nothing can be measured any more."""


def _die_with_parent() -> None:
    guardian.prctl(guardian.PR_SET_PDEATHSIG, int(signal.SIGKILL))


async def _spawn(
    argv: list[str], environment: Mapping[str, str] | None, log_path: Path, *, is_asked: bool
) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE if is_asked else asyncio.subprocess.DEVNULL
    with log_path.open("ab") as log:
        return await asyncio.create_subprocess_exec(
            *argv,
            env=environment,
            cwd=CHECKOUT,
            stdin=pipe,
            stdout=pipe if is_asked else log,
            stderr=log,
            start_new_session=True,  # Ctrl-C is for the benchmark, which ends them in order
            preexec_fn=_die_with_parent,
        )


async def _stop(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(_STOP_S):
            _ = await process.wait()
    except TimeoutError:
        process.kill()
        _ = await process.wait()


class Usage(msgspec.Struct, frozen=True):
    """What a process has used so far."""

    cpu_s: float
    rss_bytes: int


def usage_of(pid: int) -> Usage:
    """What a running process has used so far; raises `ProcessLost`."""
    try:
        process = psutil.Process(pid)
        times = process.cpu_times()
        return Usage(times.user + times.system, process.memory_info().rss)
    except psutil.NoSuchProcess as error:
        raise ProcessLost(f"process {pid} has ended") from error


@final
class Controller:
    """A real controller process, with the environment that the embedded stack gives it."""

    def __init__(self, servers: Servers, profile: Path | None = None) -> None:
        """``profile``: where it writes a profile at each SIGUSR1; profiling makes it about half as fast."""
        self.log_path = servers.logs / "controller.log"
        self._environment = servers.controller_environment
        self._argv = [sys.executable, "-m", "serve_controller"]
        if profile is not None:
            self._argv = [sys.executable, "-m", "bench.scale.processes", str(profile)]
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Returns once it is being executed; ask it something to know that it leads."""
        self._process = await _spawn(self._argv, self._environment, self.log_path, is_asked=False)

    async def kill(self) -> None:
        """End it by SIGKILL."""
        process = self._running()
        process.kill()
        _ = await process.wait()
        self._process = None

    async def stop(self) -> None:
        """End it in order; it may have ended already."""
        if self._process is not None:
            await _stop(self._process)

    def write_profile(self) -> None:
        """Let a profiled one write what it did since the last time."""
        self._running().send_signal(signal.SIGUSR1)

    @property
    def usage(self) -> Usage:
        """What it has used since it started; raises `ProcessLost`."""
        return usage_of(self._running().pid)

    def _running(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            ending = "" if self._process is None else f": {describe_exit(self._process.returncode or 0)}"
            raise ProcessLost(f"the controller does not run{ending}")
        return self._process


@final
class Simulator:
    """The process of `simulator.py`."""

    def __init__(self, servers: Servers, size: Size) -> None:
        self._log_path = servers.logs / "simulator.log"
        self._argv = [
            *(sys.executable, "-m", "bench.scale.simulator"),
            *("--nats-url", servers.nats_url, "--secrets", str(servers.secrets.directory)),
            *("--hosts", str(size.hosts), "--proxies", str(size.proxies)),
        ]
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Returns when it plays. Raises `ProcessLost`."""
        self._process = await _spawn(self._argv, None, self._log_path, is_asked=True)
        await self.counters()

    async def counters(self) -> Counters:
        """What it counted so far. Raises `ProcessLost`."""
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(_ANSWER_S):
                self._process.stdin.write(b"\n")
                await self._process.stdin.drain()
                line = await self._process.stdout.readline()
        except (OSError, TimeoutError) as error:
            raise ProcessLost(f"the simulator does not answer: {error!r}") from error
        if not line:
            raise ProcessLost("the simulator ended; its log says why")
        return msgspec.json.decode(line, type=Counters)

    async def stop(self) -> None:
        """End it; it may have ended already."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            await _stop(self._process)


def run_profiled(path: str) -> int:
    """Run the controller until it ends; each SIGUSR1 writes what was done since the last to ``path``.1, .2 and so on.

    Why on a signal: the profile of one phase (a deploy of everything, the steady state) is what tells something.
    """
    from serve_controller.__main__ import main

    numbers = itertools.count(1)
    profile = cProfile.Profile()

    def write(_number: int, _frame: FrameType | None) -> None:
        profile.disable()
        profile.dump_stats(f"{path}.{next(numbers)}")
        profile.clear()
        profile.enable()

    signal.signal(signal.SIGUSR1, write)
    profile.enable()
    return main()


if __name__ == "__main__":
    sys.exit(run_profiled(sys.argv[1]))
