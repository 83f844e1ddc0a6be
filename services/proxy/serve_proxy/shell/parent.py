"""Supervises the proxy processes of one container, and stops them together.

Why processes: one Python process uses one core. Each child is a separate proxy to the controller, so the
children share no state that could fail together; the parent handles no request.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Callable
from typing import Final, Protocol, final

import structlog

from serve_common.runtime.child_process import RestartBackoff

_log = structlog.get_logger(__name__)

KILL_MARGIN_S: Final = 12.0
"""Seconds that a child may take beyond its drain timeout: closing has further timeouts."""


class Child(Protocol):
    """A proxy process started by a parent."""

    @property
    def operations_port(self) -> int | None:
        """Port of its operations server on the loopback interface; None before it listens."""
        ...

    async def ended(self) -> int:
        """Wait for its exit code; negative for the signal that killed it."""
        ...

    def stop(self) -> None:
        """Make it drain and exit; a second call makes it exit at once."""
        ...

    def kill(self) -> None:
        """Kill it."""
        ...


StartChild = Callable[[int], Awaitable[Child]]
"""Start the process with that number. Raises OSError when it cannot be started."""


@final
class Parent:
    """Runs ``count`` children, numbered from 1."""

    def __init__(self, start_child: StartChild, count: int, *, drain_timeout_s: float) -> None:
        """``drain_timeout_s`` is the children's; `KILL_MARGIN_S` after it they are killed."""
        self.children: dict[int, Child] = {}
        """Running children by number."""
        self._start_child = start_child
        self._count = count
        self._kill_after_s = drain_timeout_s + KILL_MARGIN_S
        self._stopping = asyncio.Event()
        self._kill: asyncio.TimerHandle | None = None
        self._exit_code = 0

    async def run(self) -> int:
        """Run until `stop` was called and all have exited; returns 0 when all of them drained cleanly.

        A child whose first run exits before it listens stops all of them: a restart would not help.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for number in range(1, self._count + 1):
                    # The group owns them until all have exited.
                    group.create_task(self._supervise(number), name=f"process {number}")
        finally:
            if self._kill is not None:
                self._kill.cancel()
            self._for_each_child(lambda child: child.kill())
        return self._exit_code

    def stop(self) -> None:
        """Make all children drain and exit; a second call makes them exit at once."""
        if self._kill is None:
            loop = asyncio.get_running_loop()
            self._kill = loop.call_later(self._kill_after_s, self._for_each_child, lambda child: child.kill())
        self._stopping.set()
        self._for_each_child(lambda child: child.stop())

    def readiness_error(self) -> str | None:
        """Which children are not running; None while all are."""
        missing = [str(n) for n in range(1, self._count + 1) if n not in self.children]
        return f"processes that do not run: {', '.join(missing)}" if missing else None

    async def _supervise(self, number: int) -> None:
        loop = asyncio.get_running_loop()
        backoff = RestartBackoff()
        has_listened = False
        while not self._stopping.is_set():
            started_at = loop.time()
            code, listened = await self._run_once(number)
            has_listened = has_listened or listened
            if self._stopping.is_set():
                return
            if code > 0 and not has_listened:
                _log.critical("proxy_process_cannot_start", process=number, code=code)
                self._exit_code = code
                self.stop()
                return
            lived_s = loop.time() - started_at
            wait_s = backoff.on_ended(lived_s)
            _log.warning(
                "proxy_process_ended", process=number, code=code, lived_s=round(lived_s, 1), again_in_s=wait_s
            )
            with contextlib.suppress(TimeoutError):  # not stopped meanwhile
                async with asyncio.timeout(wait_s):
                    await self._stopping.wait()

    async def _run_once(self, number: int) -> tuple[int, bool]:
        """Run a child once; returns its exit code, and whether it ever listened."""
        try:
            child = await self._start_child(number)
        except OSError as error:
            _log.error("proxy_process_not_started", process=number, reason=str(error))
            return 1, False
        self.children[number] = child
        if self._stopping.is_set():
            child.stop()
        code = await child.ended()
        del self.children[number]
        listened = child.operations_port is not None
        # A child that was killed by the stop signal before it listened had nothing to drain.
        is_clean = code == 0 or (code == -signal.SIGTERM and not listened)
        if self._stopping.is_set() and not is_clean:
            _log.warning("proxy_process_ended_badly", process=number, code=code)
            self._exit_code = self._exit_code or 1
        return code, listened

    def _for_each_child(self, action: Callable[[Child], None]) -> None:
        for child in list(self.children.values()):
            action(child)
