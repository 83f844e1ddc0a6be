"""Runs users' policy functions in child processes, one for each app_dir.

A function that never returns can be ended only with its process, and what it imports must meet neither the modules that
another app imports under the same name nor the controller's secrets.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Final, final

import msgspec
import structlog

from serve_common.config.autoscaling import AutoscalingContext, AutoscalingPolicy
from serve_common.runtime.child_process import ChildProcess, describe_exit
from serve_common.runtime.tasks import TaskOwner
from serve_controller.policy_child import PolicyReply, PolicyRequest
from serve_controller.ports import PolicyFailed, PolicyResult

_log = structlog.get_logger(__name__)

START_TIMEOUT_S: Final = 10.0
"""Timeout of the start of a process, and of an import, seconds."""
_LINE_BYTES_MAX: Final = 1024 * 1024
_OUTPUT_LINE_LENGTH_MAX: Final = 1_000
_OUTPUT_LINES_MAX: Final = 100
"""Most lines logged of one process between two calls."""
_LAST_LINES: Final = 20
_STACK_WAIT_S: Final = 1.0
"""Most seconds to wait for the stack, which is printed as soon as the process is scheduled."""
_FRAME: Final = '  File "'
_INHERITED: Final = (
    "PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "VIRTUAL_ENV", "LD_LIBRARY_PATH",
    "PYTHONPATH", "PYTHONPYCACHEPREFIX", "PYTHONDONTWRITEBYTECODE",
)  # fmt: skip
"""Environment variables passed on to the child; none of them may be a secret."""
_ONE_THREAD: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Numerical libraries would reserve address space for as many threads as there are CPUs."""


@final
class PolicyProcess:
    """One process of `serve_controller.policy_child`."""

    def __init__(self, process: ChildProcess, app_dir: str) -> None:
        self._process = process
        self._app_dir = app_dir
        self._last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._lines_left = _OUTPUT_LINES_MAX
        self._stack_printed = asyncio.Event()
        self.is_usable = True
        """False while a reply is pending, and for good once waiting for it was abandoned."""

    @classmethod
    async def start(cls, app_dir: str, tasks: TaskOwner) -> PolicyProcess:
        try:
            process = await ChildProcess.start(
                [sys.executable, "-P", "-m", "serve_controller.policy_child", app_dir],
                env=child_environment(os.environ),
                cwd=Path("/"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                line_bytes_max=_LINE_BYTES_MAX,
            )
        except OSError as error:
            raise PolicyFailed(f"a process for policies cannot be started: {error}") from error
        child = cls(process, app_dir)
        tasks.start(child._log_output(), f"output.{process.pid}")
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await child._read_reply("starting")
        except TimeoutError as error:
            child.kill()
            raise PolicyFailed(
                f"a process for policies did not start within {START_TIMEOUT_S:g} s"
            ) from error
        except BaseException:
            child.kill()
            raise
        return child

    @property
    def has_ended(self) -> bool:
        return self._process.has_ended

    async def ended(self) -> None:
        """Wait until the process has ended."""
        await self._process.ended()

    def kill(self) -> None:
        """Kill the process and its children."""
        self.is_usable = False
        self._process.kill_group()

    async def call(self, request: PolicyRequest, timeout_s: float, what: str) -> PolicyReply:
        """Send a request; returns the reply. Raises `PolicyFailed`, also on a timeout; unusable after that."""
        self.is_usable = False
        self._lines_left = _OUTPUT_LINES_MAX
        stdin = self._process.stdin
        try:
            async with asyncio.timeout(timeout_s):
                stdin.write(msgspec.json.encode(request) + b"\n")
                await stdin.drain()
                reply = await self._read_reply(what)
        except TimeoutError as error:
            where = await self._read_stack()
            raise PolicyFailed(f"{where}{what} took more than {timeout_s:g} s") from error
        except OSError as error:
            raise PolicyFailed(f"{what}: {await self._describe_end()}") from error
        self.is_usable = True
        return reply

    async def _read_reply(self, what: str) -> PolicyReply:
        try:
            line = await self._process.stdout.readuntil()
            return msgspec.json.decode(line, type=PolicyReply)
        except asyncio.IncompleteReadError as error:
            raise PolicyFailed(f"{what}: {await self._describe_end()}") from error
        except (asyncio.LimitOverrunError, msgspec.DecodeError) as error:
            raise PolicyFailed(f"{what}: its process answers what cannot be read") from error

    async def _describe_end(self) -> str:
        """How the process ended, and its last lines of output."""
        code = await self._process.ended()
        return "\n".join([*self._last_lines, f"its process has ended: {describe_exit(code)}"])

    async def _read_stack(self) -> str:
        """The current stack of the process as lines; empty when it does not print it in time."""
        if self._process.has_ended:
            return ""
        self._last_lines.clear()
        self._stack_printed.clear()
        self._process.send_signal(signal.SIGUSR1)
        try:
            async with asyncio.timeout(_STACK_WAIT_S):
                await self._stack_printed.wait()
        except TimeoutError:
            _log.debug("policy_process_tells_no_stack", pid=self._process.pid)
        stack = [line for line in self._last_lines if line.startswith(_FRAME) and not _is_ours(line)]
        return "".join(f"{line}\n" for line in ["Stack (most recent call first):", *stack]) if stack else ""

    async def _log_output(self) -> None:
        """Log the output of the user's code, up to a limit."""
        rest = ""
        while piece := await self._process.stderr.read(4096):
            *lines, rest = (rest + piece.decode(errors="replace")).split("\n")
            rest = rest[-_OUTPUT_LINE_LENGTH_MAX:]
            for line in lines:
                self._log_line(line)
        if rest:
            self._log_line(rest)
        await self._process.ended()

    def _log_line(self, line: str) -> None:
        line = line[:_OUTPUT_LINE_LENGTH_MAX]
        self._last_lines.append(line)
        if _is_ours(line):  # the frames of user code come before it
            self._stack_printed.set()
        self._lines_left -= 1
        if self._lines_left >= 0:
            _log.info("policy_output", app_dir=self._app_dir, line=line)


def _is_ours(line: str) -> bool:
    return line.startswith(_FRAME) and "policy_child" in line


def child_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The part of the controller's environment that a policy gets.

    It is small because user code can read its environment and its open files, and the controller's contain every
    password.
    """
    inherited = {name: variables[name] for name in _INHERITED if name in variables}
    return {**inherited, **dict.fromkeys(_ONE_THREAD, "1"), "PYTHONUNBUFFERED": "1"}


CALL_TIMEOUT_S: Final = 2.0
CHILDREN_MAX: Final = 8
_WAIT_S: Final = 10.0
"""Most seconds to wait for other functions of the same app_dir."""
_CLOSE_TIMEOUT_S: Final = 1.0


@final
class SubprocessPolicies:
    """A `PolicyRunner` with child processes."""

    def __init__(
        self, app_root: str, *, call_timeout_s: float = CALL_TIMEOUT_S, children_max: int = CHILDREN_MAX
    ) -> None:
        """A relative app_dir is resolved against ``app_root``. Starts nothing yet."""
        self._app_root = app_root
        self._call_timeout_s = call_timeout_s
        self._children_max = children_max
        self._workers: dict[str, _PolicyWorker] = {}
        """By app_dir, the most recently used last."""
        self._tasks = TaskOwner("policies")

    async def run(self, policy: AutoscalingPolicy, app_dir: str, context: AutoscalingContext) -> PolicyResult:
        """Call the function in the process of its app_dir. Raises `PolicyFailed`."""
        directory = str(Path(self._app_root, app_dir)) if app_dir else ""
        worker = self._workers.pop(directory, None) or _PolicyWorker(
            directory, self._tasks, self._call_timeout_s
        )
        self._workers[directory] = worker
        self._evict_idle()
        return await worker.run(policy, context)

    async def close(self) -> None:
        """Kill all processes."""
        children = [child for worker in self._workers.values() if (child := worker.end()) is not None]
        self._workers.clear()
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                for child in children:
                    await child.ended()
        except TimeoutError:
            _log.warning("policy_processes_not_ended", count=len(children))
        await self._tasks.close(_CLOSE_TIMEOUT_S)

    def _evict_idle(self) -> None:
        for directory, worker in list(self._workers.items()):
            if len(self._workers) <= self._children_max:
                return
            if not worker.is_busy:
                worker.end()
                del self._workers[directory]


@final
class _PolicyWorker:
    """One app_dir, and the process that has imported from it, if any."""

    def __init__(self, app_dir: str, tasks: TaskOwner, call_timeout_s: float) -> None:
        self._app_dir = app_dir
        self._tasks = tasks
        self._call_timeout_s = call_timeout_s
        self._waiting = 0
        self._lock = asyncio.Lock()
        self._child: PolicyProcess | None = None

    @property
    def is_busy(self) -> bool:
        return self._waiting > 0

    def end(self) -> PolicyProcess | None:
        """Kill its process, if any, and return it."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
        return child

    async def run(self, policy: AutoscalingPolicy, context: AutoscalingContext) -> PolicyResult:
        self._waiting += 1
        try:
            try:
                async with asyncio.timeout(_WAIT_S):
                    await self._lock.acquire()
            except TimeoutError as error:
                raise PolicyFailed(f"other policies in {self._app_dir} take too long") from error
            try:
                return await self._run(policy, context)
            except BaseException:
                if not (self._child is not None and self._child.is_usable):
                    self.end()
                raise
            finally:
                self._lock.release()
        finally:
            self._waiting -= 1

    async def _run(self, policy: AutoscalingPolicy, context: AutoscalingContext) -> PolicyResult:
        path = policy.policy_function
        child = await self._ensure_process()
        imported = await child.call(PolicyRequest(function=path), START_TIMEOUT_S, f"importing {path}")
        if imported.is_stale:
            self.end()
            child = await self._ensure_process()
            imported = await child.call(PolicyRequest(function=path), START_TIMEOUT_S, f"importing {path}")
        if imported.error:
            raise PolicyFailed(imported.error)
        request = PolicyRequest(function=path, context=context, kwargs=policy.policy_kwargs)
        reply = await child.call(request, self._call_timeout_s, path)
        if reply.is_stale:
            raise PolicyFailed(f"{path} was changed while it was asked")
        if reply.error:
            raise PolicyFailed(reply.error)
        return PolicyResult(num_replicas=reply.num_replicas, policy_state=reply.policy_state)

    async def _ensure_process(self) -> PolicyProcess:
        child = self._child
        if child is None or child.has_ended:
            self.end()
            child = self._child = await PolicyProcess.start(self._app_dir, self._tasks)
        return child
