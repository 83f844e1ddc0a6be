"""One process under supervision: started, watched until ready, started again when it dies, and stopped.

Why apart from the supervisor: that one knows the order of all; this one knows the life of one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

from muster.embedded import leftovers, logfiles
from muster.embedded.disk_room import disk_is_full
from muster.embedded.errors import StackFailed, StartFailed
from muster.embedded.process import (
    PROCESS_MARK,
    STACK_MARK,
    Happened,
    OnEvent,
    ProcessEvent,
    ProcessSpec,
    RunningProcess,
    backoff_s,
    describe_exit,
)
from serve_common import guardian
from serve_common.tasks import TaskOwner

_log = structlog.get_logger()

KILL_WAIT_S = 1.0
"""How long the end of something that was killed is waited for."""
_STABLE_S = 10.0
"""A process that lived this long is started again at once; one that died sooner waits."""
_FIRST_STARTS_MAX = 3
_PROBE_WAIT_S = 0.1

OnFirstStart = Callable[[BaseException | None], None]
"""Told that the process got ready (None) or why it will not."""


class Charge:
    """One process under supervision."""

    def __init__(
        self,
        spec: ProcessSpec,
        stack_id: str,
        on_first_start: OnFirstStart,
        on_event: OnEvent,
    ) -> None:
        self.spec = spec
        self.was_ready = asyncio.Event()
        """Set once and for all by the first time that it is ready."""
        self.is_stopping = False
        self._stack_id = stack_id
        self._on_first_start = on_first_start
        self._on_event = on_event
        self._guardian: asyncio.subprocess.Process | None = None
        self._starting = asyncio.Lock()
        """Held while a guardian comes into being, so that `stop` finds either none or a whole one."""
        self._pid = 0
        self._is_ready = False
        self._restarts = 0

    @property
    def running(self) -> RunningProcess:
        """What is known of it now."""
        return RunningProcess(
            name=self.spec.name,
            pid=self._pid,
            is_ready=self._is_ready,
            restarts=self._restarts,
            log=str(self.spec.log_path),
        )

    async def keep(self, needed: Sequence[asyncio.Event]) -> None:
        """Start it once what it needs is ready, and again whenever it dies, until it is to stop."""
        for event in needed:
            await event.wait()
        loop = asyncio.get_running_loop()
        first_deadline = loop.time() + self.spec.ready_timeout_s
        logfiles.rotate_at_start(self.spec.log_path)
        crashes = 0
        while True:
            started_at = loop.time()
            try:
                code = await self._run_once(first_deadline)
            except OSError as error:  # a full disk, no more processes: it may get better
                _log.error("process_cannot_start", process=self.spec.name, error=str(error))
                code = 127
            if self.is_stopping:
                return
            crashes = 0 if loop.time() - started_at >= _STABLE_S else crashes + 1
            if not self.was_ready.is_set() and (
                crashes >= _FIRST_STARTS_MAX or loop.time() >= first_deadline
            ):
                self._on_first_start(self._start_failed(describe_exit(code)))
                return
            # The first quick death is most often a `kill -9`, not a loop: it is answered at once.
            wait_s = backoff_s(
                max(0, crashes - 1), self.spec.restart_backoff_min_s, self.spec.restart_backoff_max_s
            )
            told = f"{describe_exit(code)}; starting it again in {wait_s:.1f} s"
            full = disk_is_full(self.spec.log_path.parent)
            self._tell(Happened.DIED, told if full is None else f"{told} ({full})")
            self._pid = 0
            # A guardian that was killed could not clean up; one that was not has left nothing.
            await asyncio.to_thread(leftovers.kill_marked, self._stack_id, self.spec.name)
            await asyncio.sleep(wait_s)
            self._restarts += 1

    async def stop(self, give_up_at: float) -> None:
        """Stop it in order; kill it and all that is below it at ``give_up_at`` (the loop's time)."""
        self.is_stopping = True
        async with self._starting:
            process = self._guardian
        if process is None or process.returncode is not None:
            return
        loop = asyncio.get_running_loop()
        for number, deadline in (
            (signal.SIGTERM, give_up_at),
            (signal.SIGQUIT, max(give_up_at, loop.time()) + KILL_WAIT_S),
            (signal.SIGKILL, max(give_up_at, loop.time()) + 2 * KILL_WAIT_S),
        ):
            _signal(process, number)
            if await _ended(process, deadline - loop.time()):
                break
        self._is_ready = False
        self._tell(Happened.STOPPED)
        self._pid = 0

    async def _run_once(self, first_deadline: float) -> int:
        """Run it until it ends; its exit code."""
        if self.spec.before_start is not None:
            await asyncio.to_thread(self.spec.before_start)
        async with self._starting:
            if self.is_stopping:
                return 0
            process = await self._spawn()
        self._tell(Happened.STARTED)
        watch = TaskOwner(
            f"readiness {self.spec.name}", on_failure=lambda _name, error: self._on_first_start(error)
        )
        watch.start(self._await_ready(process, first_deadline), name="probe")
        try:
            return await process.wait()
        finally:
            await watch.close(timeout_s=KILL_WAIT_S)
            self._is_ready = False

    async def _spawn(self) -> asyncio.subprocess.Process:
        spec = self.spec
        reading, writing = os.pipe()
        arguments = [
            *(sys.executable, "-I", "-S", str(Path(guardian.__file__))),
            *("--parent", str(os.getpid()), "--report-fd", str(writing)),
            *(
                "--stop-signal",
                str(int(spec.stop_signal)),
                "--stop-timeout-s",
                str(spec.stop_timeout_s),
                "--",
            ),
        ]
        try:
            with logfiles.open_log(spec.log_path) as log:
                process = await asyncio.create_subprocess_exec(
                    *arguments,
                    *spec.argv,
                    env={**spec.env, STACK_MARK: self._stack_id, PROCESS_MARK: spec.name},
                    cwd=spec.cwd,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(writing,),
                    start_new_session=True,  # Ctrl-C in the terminal is for the supervisor alone
                )
        finally:
            os.close(writing)
        self._guardian = process
        with os.fdopen(reading) as report:
            self._pid = int(await asyncio.to_thread(report.readline) or "0")
        return process

    async def _await_ready(self, process: asyncio.subprocess.Process, first_deadline: float) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                reason = await self.spec.ready() if self.spec.ready is not None else None
            except StackFailed as error:
                _log.error("process_cannot_get_ready", process=self.spec.name, error=str(error))
                self._on_first_start(error)
                return
            if reason is None:
                break
            if not self.was_ready.is_set() and loop.time() >= first_deadline:
                self._on_first_start(self._start_failed(f"not ready in time: {reason}"))
                return
            await asyncio.sleep(_PROBE_WAIT_S)
        if process.returncode is None:
            self._is_ready = True
            self._tell(Happened.READY)
            self.was_ready.set()
            self._on_first_start(None)

    def _start_failed(self, reason: str) -> StartFailed:
        spec = self.spec
        full = disk_is_full(spec.log_path.parent)
        why = reason if full is None else f"{reason}; {full}"
        return StartFailed(
            f"{spec.name} did not start ({why}). The end of {spec.log_path}:\n"
            f"{logfiles.last_lines(spec.log_path)}"
        )

    def _tell(self, happened: Happened, detail: str = "") -> None:
        self._on_event(
            ProcessEvent(
                name=self.spec.name, happened=happened, pid=self._pid, restarts=self._restarts, detail=detail
            )
        )


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has just ended: waiting for it returns at once
        process.send_signal(number)


async def _ended(process: asyncio.subprocess.Process, timeout_s: float) -> bool:
    try:
        async with asyncio.timeout(max(0.0, timeout_s)):
            _ = await process.wait()
    except TimeoutError:
        return False
    return True
