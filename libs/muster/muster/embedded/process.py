"""One process of the stack: how it is started, known to be ready, and stopped."""

from __future__ import annotations

import asyncio
import enum
import signal
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import msgspec

STACK_MARK = "MUSTER_STACK_ID"
"""Variable in the environment of every process of a stack, by which its leftovers are known."""
PROCESS_MARK = "MUSTER_PROCESS"
"""Variable that names the process of the stack that this one descends from."""

Probe = Callable[[], Awaitable[str | None]]
"""None when ready, otherwise why not; raises `StackFailed` when waiting cannot help. Ends by itself in some seconds."""


class ProcessSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One process of the stack."""

    name: str
    argv: list[str]
    env: Mapping[str, str]
    """The whole environment, marks excepted."""
    cwd: Path
    log_path: Path
    """Where standard output and error go."""
    ready: Probe | None = None
    """None: ready as soon as it runs."""
    ready_timeout_s: float = 60.0
    """How long its first start may take."""
    depends_on: tuple[str, ...] = ()
    """First started when these are ready. Stopping goes through the list of processes from its end."""
    before_start: Callable[[], None] | None = None
    """Called before each start, when nothing of an earlier run is left."""
    stop_signal: signal.Signals = signal.SIGTERM
    stop_timeout_s: float = 3.0
    """How long after `stop_signal` it is killed."""
    restart_backoff_min_s: float = 0.2
    restart_backoff_max_s: float = 5.0


class Happened(enum.Enum):
    """What happens to a process."""

    STARTED = "started"
    READY = "ready"
    DIED = "died"
    STOPPED = "stopped"


class ProcessEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened to a process of the stack."""

    name: str
    happened: Happened
    pid: int
    restarts: int = 0
    """How often it was started again before."""
    detail: str = ""
    """With `DIED`: how it ended and when it is started again."""


OnEvent = Callable[[ProcessEvent], None]


class RunningProcess(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a process now."""

    name: str
    pid: int
    """Of the process itself (not of its guardian); 0 while it is down."""
    is_ready: bool
    restarts: int
    log: str


def describe_exit(code: int) -> str:
    """An exit code in words; codes above 128 tell a signal."""
    if code > 128:
        try:
            return f"killed by {signal.Signals(code - 128).name}"
        except ValueError:
            pass
    return f"exited with code {code}"


def backoff_s(crashes: int, low: float, high: float) -> float:
    """How long to wait before the next start after so many quick deaths in a row (0: the first, so at once)."""
    return 0.0 if crashes == 0 else min(high, low * 2.0 ** min(crashes - 1, 30))


_TIMEOUT_S = 2.0
_ANSWER_MAX = 4096


def http_probe(port: int, path: str) -> Probe:
    """Ready when ``GET path`` on the loopback's ``port`` answers 200; otherwise the answer's text is the reason."""

    async def probe() -> str | None:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                status, text = await _get(port, path)
        except (OSError, TimeoutError, ValueError) as error:
            return f"no answer from 127.0.0.1:{port}{path} ({str(error) or 'in time'})"
        return None if status == 200 else f"{path} answers {status}: {text.strip()[:200]}"

    return probe


async def http_text(port: int, path: str) -> str:
    """What ``GET path`` on the loopback's ``port`` answers. Raises OSError, TimeoutError or ValueError."""
    async with asyncio.timeout(_TIMEOUT_S):
        _, text = await _get(port, path)
    return text


async def _get(port: int, path: str) -> tuple[int, str]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(f"GET {path} HTTP/1.0\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n\r\n".encode())
        await writer.drain()
        answer = b""
        while len(answer) < _ANSWER_MAX and (part := await reader.read(_ANSWER_MAX)):
            answer += part
    finally:
        writer.close()
    head, _, body = answer.decode("utf-8", errors="replace").partition("\r\n\r\n")
    words = head.split(maxsplit=2)
    if len(words) < 2:
        raise ValueError("an answer that is no HTTP")
    return int(words[1]), body
