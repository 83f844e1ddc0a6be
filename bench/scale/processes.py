"""The controller and the simulator as child processes that end with the benchmark, however that ends.

Why the controller is not supervised: the benchmark kills it and decides the moment at which it starts again.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final, final

import msgspec
import psutil

from bench.scale.servers import Servers
from bench.scale.sizes import Size
from bench.scale.tally import Tally
from muster.embedded.options import CHECKOUT
from serve_common.runtime import guardian
from serve_common.runtime.child_process import describe_exit

_STOP_S: Final = 5.0
_ANSWER_S: Final = 10.0


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
    """Of a process that runs; raises `ProcessLost`."""
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
            self._argv = [sys.executable, "-m", "bench.scale.profiled_controller", str(profile)]
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
        await self.tally()

    async def tally(self) -> Tally:
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
        return msgspec.json.decode(line, type=Tally)

    async def stop(self) -> None:
        """End it; it may have ended already."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            await _stop(self._process)
