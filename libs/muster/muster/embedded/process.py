"""One process of the stack: how it is started, probed for readiness, and stopped.

Why values without behaviour: the stack describes processes, the supervisor runs them, the command line prints them;
none needs to know the others.
"""

from __future__ import annotations

import asyncio
import enum
import signal
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import msgspec

from serve_common.runtime.child_process import RESTART_WAIT_MAX_S, RESTART_WAIT_MIN_S

STACK_MARK = "MUSTER_STACK_ID"
"""Environment variable of every process of a stack, by which leftover processes are found."""
PROCESS_MARK = "MUSTER_PROCESS"
"""Environment variable with the name of the stack's process that this one descends from."""

Probe = Callable[[], Awaitable[str | None]]
"""Returns None when ready, else the reason; raises `StackFailed` when waiting cannot help. Takes at most seconds."""


class ProcessSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Specification of one process of the stack."""

    name: str
    argv: list[str]
    env: Mapping[str, str]
    """The whole environment, except `STACK_MARK` and `PROCESS_MARK`."""
    cwd: Path
    log_path: Path
    """File for standard output and error."""
    ready: Probe | None = None
    """Readiness probe; None: ready as soon as it runs."""
    ready_timeout_s: float = 60.0
    """Seconds for its first start."""
    is_awaited: bool = True
    """Whether the stack's start waits until it is ready, and fails with it."""
    depends_on: tuple[str, ...] = ()
    """Processes that must be ready before its first start. Processes are stopped in the reverse order of their list."""
    before_start: Callable[[], None] | None = None
    """Called before each start, when nothing of an earlier run is left."""
    stop_signal: signal.Signals = signal.SIGTERM
    stop_timeout_s: float = 3.0
    """Seconds between `stop_signal` and SIGKILL."""
    restart_backoff_min_s: float = RESTART_WAIT_MIN_S
    restart_backoff_max_s: float = RESTART_WAIT_MAX_S


class Happened(enum.Enum):
    """Kind of a `ProcessEvent`."""

    STARTED = "started"
    READY = "ready"
    DIED = "died"
    STOPPED = "stopped"


class ProcessEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a process of the stack."""

    name: str
    happened: Happened
    pid: int
    restarts: int = 0
    """Number of restarts so far."""
    detail: str = ""
    """With `DIED`: how it ended and when it will be restarted."""


OnEvent = Callable[[ProcessEvent], None]


_TIMEOUT_S = 2.0
_REPLY_BYTES_MAX = 4096


def http_probe(port: int, path: str) -> Probe:
    """A probe that is ready when ``GET path`` on the loopback's ``port`` returns 200; else the text is the reason."""

    async def probe() -> str | None:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                status, text = await _get(port, path)
        except (OSError, TimeoutError, ValueError) as error:
            return f"no answer from 127.0.0.1:{port}{path} ({str(error) or 'in time'})"
        return None if status == 200 else f"{path} answers {status}: {text.strip()[:200]}"

    return probe


async def http_text(port: int, path: str) -> str:
    """The body of ``GET path`` on the loopback's ``port``. Raises OSError, TimeoutError or ValueError."""
    async with asyncio.timeout(_TIMEOUT_S):
        _, text = await _get(port, path)
    return text


# No HTTP library: it is a few lines of protocol, with a server on this machine.
async def _get(port: int, path: str) -> tuple[int, str]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(f"GET {path} HTTP/1.0\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n\r\n".encode())
        await writer.drain()
        reply = b""
        while len(reply) < _REPLY_BYTES_MAX and (part := await reader.read(_REPLY_BYTES_MAX)):
            reply += part
    finally:
        writer.close()
    head, _, body = reply.decode("utf-8", errors="replace").partition("\r\n\r\n")
    tokens = head.split(maxsplit=2)
    if len(tokens) < 2:
        raise ValueError("an answer that is no HTTP")
    return int(tokens[1]), body
