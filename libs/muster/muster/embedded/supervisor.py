"""Keeps the processes of a stack alive, with bounded log files, and ends all of them together.

Why asyncio's subprocesses do not suffice: a stack must recover from ``kill -9`` of any of its processes, and leave
nothing behind after its own end, however it ends. Each process therefore has a guardian
(`serve_common.runtime.guardian`); the supervisor restarts guardians when they end, and kills what a killed guardian
left behind.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

import structlog

from muster.embedded.leftovers import kill_marked, reap_zombies
from muster.embedded.options import StackFailed, StartFailed
from muster.embedded.process import (
    PROCESS_MARK,
    STACK_MARK,
    Happened,
    OnEvent,
    ProcessEvent,
    ProcessSpec,
)
from muster.embedded.run_record import RunningProcess, describe_full_disk
from serve_common.runtime import guardian
from serve_common.runtime.child_process import ChildLink, ChildProcess, RestartBackoff, describe_exit
from serve_common.runtime.tasks import TaskOwner

_log = structlog.get_logger()

SIZE_MAX = 16 * 1024 * 1024
"""Largest size of one log file in bytes; one older file of this size is retained beside it."""


def rotate_at_start(path: Path) -> None:
    """Start a new log file, retaining the last run's as ``<name>.1``; if that fails, the old one is continued."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size:
            path.replace(_older(path))
    except OSError as error:
        _log.warning("log_not_rotated", path=str(path), error=str(error))


def open_log(path: Path) -> IO[bytes]:
    """Open a log for appending; /dev/null if that fails, because a log must not prevent a start."""
    try:
        return path.open("ab")
    except OSError as error:
        _log.warning("log_not_opened", path=str(path), error=str(error))
        return Path(os.devnull).open("ab")


def truncate_large_log(path: Path, size_max: int = SIZE_MAX) -> bool:
    """Move the content of a live log to ``<name>.1`` once it is longer than ``size_max``; returns whether it was.

    Its writers keep the file open for appending, so it is copied and truncated, not renamed. Lines written between the
    two are lost; in return, no process stands between a writer and its file. On a full disk the copy fails: then the
    content is dropped, as it may be what filled the disk.
    """
    try:
        if path.stat().st_size <= size_max:
            return False
        try:
            shutil.copyfile(path, _older(path))
        except OSError as error:
            _log.warning("log_not_kept", path=str(path), error=str(error))
            _older(path).unlink(missing_ok=True)
        with path.open("r+b") as file:
            file.truncate(0)
    except FileNotFoundError:
        return False
    return True


def last_lines(path: Path, count: int = 15, width: int = 300) -> str:
    """The last lines of a log for an error message; a note in parentheses when there are none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - count * 1024))
            lines = file.read().decode("utf-8", errors="replace").splitlines()
    except OSError as error:
        return f"(the log cannot be read: {error.strerror})"
    return "\n".join(line[:width] for line in lines[-count:]) or "(its log is empty)"


def _older(path: Path) -> Path:
    return path.with_name(f"{path.name}.1")


KILL_WAIT_S = 1.0
"""Seconds to wait for the end of a killed process."""
_FIRST_STARTS_MAX = 3
_PROBE_WAIT_S = 0.1

OnFirstStart = Callable[[BaseException | None], None]
"""Called when the process is ready (None), or with the reason why it will not be."""


class SupervisedProcess:
    """One process under supervision. It knows the life of this one; `Supervisor` knows the order of all."""

    def __init__(
        self,
        spec: ProcessSpec,
        stack_id: str,
        on_first_start: OnFirstStart,
        on_event: OnEvent,
    ) -> None:
        self.spec = spec
        self.was_ready = asyncio.Event()
        """Set permanently when the process is ready for the first time."""
        self.is_stopping = False
        self._stack_id = stack_id
        self._on_first_start = on_first_start
        self._on_event = on_event
        self._guardian: ChildProcess | None = None
        self._starting = asyncio.Lock()
        """Held while a guardian is started, so that `stop` finds either none or a complete one."""
        self._pid = 0
        self._is_ready = False
        self._restarts = 0

    @property
    def running(self) -> RunningProcess:
        """Current state of the process."""
        return RunningProcess(
            name=self.spec.name,
            pid=self._pid,
            is_ready=self._is_ready,
            restarts=self._restarts,
            log=str(self.spec.log_path),
        )

    async def supervise(self, needed: Sequence[asyncio.Event]) -> None:
        """Start the process once ``needed`` are set, and restart it whenever it dies, until `is_stopping`."""
        for event in needed:
            await event.wait()
        loop = asyncio.get_running_loop()
        first_deadline = loop.time() + self.spec.ready_timeout_s
        rotate_at_start(self.spec.log_path)
        backoff = RestartBackoff(self.spec.restart_backoff_min_s, self.spec.restart_backoff_max_s)
        while True:
            started_at = loop.time()
            try:
                code = await self._run_once(first_deadline)
            except OSError as error:  # a full disk or the process limit: possibly transient
                _log.error("process_cannot_start", process=self.spec.name, error=str(error))
                code = 127
            if self.is_stopping:
                return
            wait_s = backoff.on_ended(loop.time() - started_at)
            if not self.was_ready.is_set() and (
                backoff.crashes >= _FIRST_STARTS_MAX or loop.time() >= first_deadline
            ):
                if self.spec.is_awaited:
                    self._on_first_start(self._start_failed(describe_exit(code)))
                else:
                    self._emit(
                        Happened.DIED, f"{describe_exit(code)}; it stays away: see {self.spec.log_path}"
                    )
                    self._pid = 0
                return
            message = f"{describe_exit(code)}; starting it again in {wait_s:.1f} s"
            full = describe_full_disk(self.spec.log_path.parent)
            self._emit(Happened.DIED, message if full is None else f"{message} ({full})")
            self._pid = 0
            # A killed guardian could not clean up; any other has left nothing.
            await asyncio.to_thread(kill_marked, self._stack_id, self.spec.name)
            await asyncio.sleep(wait_s)
            self._restarts += 1

    async def stop(self, stop_deadline: float) -> None:
        """Stop the process in order; kill it and its descendants at ``stop_deadline`` (the loop's time)."""
        self.is_stopping = True
        async with self._starting:
            process = self._guardian
        if process is None or process.has_ended:
            return
        await process.stop(
            (signal.SIGTERM, stop_deadline - asyncio.get_running_loop().time()),
            (signal.SIGQUIT, KILL_WAIT_S),
            (signal.SIGKILL, KILL_WAIT_S),
        )
        self._is_ready = False
        self._emit(Happened.STOPPED)
        self._pid = 0

    async def _run_once(self, first_deadline: float) -> int:
        """Run the process until it ends; returns its exit code."""
        if self.spec.before_start is not None:
            await asyncio.to_thread(self.spec.before_start)
        async with self._starting:
            if self.is_stopping:
                return 0
            process = await self._spawn()
        self._emit(Happened.STARTED)
        watch = TaskOwner(
            f"readiness {self.spec.name}", on_failure=lambda _name, error: self._on_first_start(error)
        )
        watch.start(self._await_ready(process, first_deadline), name="probe")
        try:
            return await process.ended()
        finally:
            await watch.close(timeout_s=KILL_WAIT_S)
            self._is_ready = False

    async def _spawn(self) -> ChildProcess:
        spec = self.spec
        link = ChildLink()
        argv = guardian.command(
            spec.argv,
            report_fd=link.child_fd,
            stop_signal=spec.stop_signal,
            stop_timeout_s=spec.stop_timeout_s,
        )
        try:
            with open_log(spec.log_path) as log:
                process = await ChildProcess.start(
                    argv,
                    env={**spec.env, STACK_MARK: self._stack_id, PROCESS_MARK: spec.name},
                    link=link,
                    cwd=spec.cwd,
                    stdout=log,
                    stderr=log,
                )
            self._guardian = process
            self._pid = await link.read_number() or 0
        finally:
            link.close()
        return process

    async def _await_ready(self, process: ChildProcess, first_deadline: float) -> None:
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
            if self.spec.is_awaited and not self.was_ready.is_set() and loop.time() >= first_deadline:
                self._on_first_start(self._start_failed(f"not ready in time: {reason}"))
                return
            await asyncio.sleep(_PROBE_WAIT_S)
        if not process.has_ended:
            self._is_ready = True
            self._emit(Happened.READY)
            self.was_ready.set()
            self._on_first_start(None)

    def _start_failed(self, reason: str) -> StartFailed:
        spec = self.spec
        full = describe_full_disk(spec.log_path.parent)
        why = reason if full is None else f"{reason}; {full}"
        return StartFailed(
            f"{spec.name} did not start ({why}). The end of {spec.log_path}:\n{last_lines(spec.log_path)}"
        )

    def _emit(self, happened: Happened, detail: str = "") -> None:
        self._on_event(
            ProcessEvent(
                name=self.spec.name, happened=happened, pid=self._pid, restarts=self._restarts, detail=detail
            )
        )


STOP_TIMEOUT_S = 9.0
"""Seconds for the whole stack to stop; processes left then are killed."""
_SWEEP_S = 2.0


class Supervisor:
    """Owns the processes of one stack.

    Used from the main thread's event loop: the kernel ties a guardian to the thread that started it.
    """

    def __init__(self, stack_id: str, specs: Sequence[ProcessSpec], on_event: OnEvent) -> None:
        """``specs`` are in an order in which every process comes after those it depends on."""
        self._stack_id = stack_id
        self._supervised = {
            spec.name: SupervisedProcess(spec, stack_id, self._handle_first_start, on_event) for spec in specs
        }
        for position, spec in enumerate(specs):
            missing = set(spec.depends_on) - {earlier.name for earlier in specs[:position]}
            assert not missing, f"{spec.name} depends on {missing}, which must come before it"
        self._owner = TaskOwner("supervisor", on_failure=lambda _name, error: self._end_start(error))
        self._outcome: asyncio.Future[BaseException | None] | None = None
        """Outcome of the start: None once everything is ready, or the first failure."""

    @property
    def processes(self) -> list[RunningProcess]:
        """Current state of every process."""
        return [supervised.running for supervised in self._supervised.values()]

    async def start(self) -> None:
        """Start all processes in order; return when all are ready.

        Raises `StartFailed` with the end of the log of the process that failed; everything is stopped then. Afterwards
        processes that die are restarted until `stop`.
        """
        self._outcome = asyncio.get_running_loop().create_future()
        guardian.prctl(guardian.PR_SET_CHILD_SUBREAPER, 1)
        for supervised in self._supervised.values():
            needed = [self._supervised[name].was_ready for name in supervised.spec.depends_on]
            self._owner.start(supervised.supervise(needed), name=supervised.spec.name)
        self._owner.start(self._sweep(), name="sweep")
        failure = await self._outcome
        if failure is not None:
            await self.stop()
            raise failure

    async def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Stop every process, the last one first; kill those left after ``timeout_s``. Idempotent."""
        stop_deadline = asyncio.get_running_loop().time() + timeout_s
        self._end_start(StartFailed("it was stopped before everything was ready"))
        for supervised in self._supervised.values():
            supervised.is_stopping = True
        for supervised in reversed(self._supervised.values()):
            await supervised.stop(stop_deadline)
        await self._owner.close(timeout_s=KILL_WAIT_S)
        count = kill_marked(self._stack_id)  # in no thread: an interpreter that ends starts none
        if count:
            _log.warning("leftovers_killed", stack_id=self._stack_id, count=count)
        guardian.prctl(guardian.PR_SET_CHILD_SUBREAPER, 0)

    def _handle_first_start(self, failure: BaseException | None) -> None:
        if failure is not None or all(
            supervised.was_ready.is_set()
            for supervised in self._supervised.values()
            if supervised.spec.is_awaited
        ):
            self._end_start(failure)

    def _end_start(self, failure: BaseException | None) -> None:
        if self._outcome is not None and not self._outcome.done():
            self._outcome.set_result(failure)

    async def _sweep(self) -> None:
        """Bound the size of logs, and reap zombies."""
        zombies: frozenset[int] = frozenset()
        while True:
            await asyncio.sleep(_SWEEP_S)
            zombies = await asyncio.to_thread(reap_zombies, zombies)
            for supervised in self._supervised.values():
                try:
                    await asyncio.to_thread(truncate_large_log, supervised.spec.log_path)
                except OSError as error:
                    _log.warning("log_not_cut", path=str(supervised.spec.log_path), error=str(error))
