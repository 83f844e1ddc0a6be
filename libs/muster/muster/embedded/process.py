"""What one process of the stack is: how it is started, known to be ready, and stopped; and what happens to it.

Why values: the stack describes, the supervisor acts, the CLI prints; none needs to know the others.
"""

from __future__ import annotations

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
