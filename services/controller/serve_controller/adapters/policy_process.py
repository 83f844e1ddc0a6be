"""One process in which users' policy functions run, as its parent sees it.

Why so little is passed on: what users write may read its environment and its open files, and the controller's hold the
passwords of everything.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import deque
from collections.abc import Mapping
from typing import Final, final

import msgspec
import structlog

from serve_common.tasks import TaskOwner
from serve_controller.policy_child import PolicyReply, PolicyRequest
from serve_controller.ports import PolicyFailed

_log = structlog.get_logger(__name__)

START_TIMEOUT_S: Final = 10.0
"""Of a process to be there, and of an import."""
_LINE_BYTES_MAX: Final = 1024 * 1024
_OUTPUT_LINE_LENGTH_MAX: Final = 1_000
_OUTPUT_LINES_MAX: Final = 100
"""That are logged of one process between two calls."""
_LAST_LINES: Final = 20
_STACK_WAIT_S: Final = 1.0
"""At most: the stack is there as soon as the process gets its turn."""
_FRAME: Final = '  File "'
_PASSED_ON: Final = (
    "PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "VIRTUAL_ENV", "LD_LIBRARY_PATH",
    "PYTHONPATH", "PYTHONPYCACHEPREFIX", "PYTHONDONTWRITEBYTECODE",
)  # fmt: skip
"""Of the environment: nothing that may be a secret."""
_ONE_THREAD: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Numerical libraries would reserve address space for as many threads as there are CPUs."""


@final
class PolicyProcess:
    """One process of `serve_controller.policy_child`."""

    def __init__(self, process: asyncio.subprocess.Process, app_dir: str) -> None:
        self._process = process
        self._app_dir = app_dir
        self._last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._lines_left = _OUTPUT_LINES_MAX
        self._has_told_stack = asyncio.Event()
        self.is_in_step = True
        """False once an answer is owed that nobody waits for any more."""

    @classmethod
    async def start(cls, app_dir: str, tasks: TaskOwner) -> PolicyProcess:
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", "serve_controller.policy_child", app_dir,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=child_environment(os.environ),
                cwd="/",
                start_new_session=True,
                limit=_LINE_BYTES_MAX,
            )  # fmt: skip
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
        return self._process.returncode is not None

    async def ended(self) -> None:
        """Wait until it is gone."""
        await self._process.wait()

    def kill(self) -> None:
        """End it and what it has started."""
        self.is_in_step = False
        if self._process.returncode is None:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:
                _log.debug("policy_process_was_gone", pid=self._process.pid)

    async def ask(self, request: PolicyRequest, timeout_s: float, what: str) -> PolicyReply:
        """Its answer; raises `PolicyFailed` when it gives none in time. It must not be asked again after that."""
        self.is_in_step = False
        self._lines_left = _OUTPUT_LINES_MAX
        stdin = self._process.stdin
        assert stdin is not None
        try:
            async with asyncio.timeout(timeout_s):
                stdin.write(msgspec.json.encode(request) + b"\n")
                await stdin.drain()
                reply = await self._read_reply(what)
        except TimeoutError as error:
            where = await self._where_it_hangs()
            raise PolicyFailed(f"{where}{what} took more than {timeout_s:g} s") from error
        except OSError as error:
            raise PolicyFailed(f"{what}: {await self._end_told()}") from error
        self.is_in_step = True
        return reply

    async def _read_reply(self, what: str) -> PolicyReply:
        stdout = self._process.stdout
        assert stdout is not None
        try:
            line = await stdout.readuntil()
            return msgspec.json.decode(line, type=PolicyReply)
        except asyncio.IncompleteReadError as error:
            raise PolicyFailed(f"{what}: {await self._end_told()}") from error
        except (asyncio.LimitOverrunError, msgspec.DecodeError) as error:
            raise PolicyFailed(f"{what}: its process answers what cannot be read") from error

    async def _end_told(self) -> str:
        """How it ended, and what it said last."""
        code = await self._process.wait()
        how = (
            f"its process ended with status {code}"
            if code >= 0
            else f"its process was killed by signal {-code}"
        )
        return "\n".join([*self._last_lines, how])

    async def _where_it_hangs(self) -> str:
        """The stack of what it does now, as lines; empty when it does not say so quickly."""
        if self._process.returncode is not None:
            return ""
        self._last_lines.clear()
        self._has_told_stack.clear()
        self._process.send_signal(signal.SIGUSR1)
        try:
            async with asyncio.timeout(_STACK_WAIT_S):
                await self._has_told_stack.wait()
        except TimeoutError:
            _log.debug("policy_process_tells_no_stack", pid=self._process.pid)
        stack = [line for line in self._last_lines if line.startswith(_FRAME) and not _is_ours(line)]
        return "".join(f"{line}\n" for line in ["Stack (most recent call first):", *stack]) if stack else ""

    async def _log_output(self) -> None:
        """What the user's code prints; too much of it is left out."""
        stderr = self._process.stderr
        assert stderr is not None
        rest = ""
        while piece := await stderr.read(4096):
            *lines, rest = (rest + piece.decode(errors="replace")).split("\n")
            rest = rest[-_OUTPUT_LINE_LENGTH_MAX:]
            for line in lines:
                self._note_line(line)
        if rest:
            self._note_line(rest)
        await self._process.wait()

    def _note_line(self, line: str) -> None:
        line = line[:_OUTPUT_LINE_LENGTH_MAX]
        self._last_lines.append(line)
        if _is_ours(line):  # below all that is the user's
            self._has_told_stack.set()
        self._lines_left -= 1
        if self._lines_left >= 0:
            _log.info("policy_output", app_dir=self._app_dir, line=line)


def _is_ours(line: str) -> bool:
    return line.startswith(_FRAME) and "policy_child" in line


def child_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """What of the controller's environment a policy may see."""
    passed_on = {name: variables[name] for name in _PASSED_ON if name in variables}
    return {**passed_on, **dict.fromkeys(_ONE_THREAD, "1"), "PYTHONUNBUFFERED": "1"}
