"""Shows what replicas print and log in the output of the program whose stack they run in, as Ray Serve does.

Only for a stack within the program: `muster logs` shows the lines of one that others started.
"""

from __future__ import annotations

import asyncio
import queue
import sys
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, final

from muster.client.requests import Feed, StackAddress, listen_to_stack
from serve_common.protocol.reports import read_line
from serve_common.protocol.subjects import Subjects
from serve_common.runtime.tasks import TaskOwner

_LAST_LINES_S: Final = 0.1
"""Seconds without a line after which, at the end, none is under way any more."""
_END_S: Final = 1.0
_WAITING_MAX: Final = 1_000
"""Most messages that wait to be written; those beyond are left out."""


@asynccontextmanager
async def show_replica_lines(address: StackAddress) -> AsyncIterator[None]:
    """Show lines for the block: prints where they were printed to, and log lines on standard error."""
    owner, writer = TaskOwner("replica_lines"), _Writer()
    async with listen_to_stack(address, [Subjects(address.subject_prefix).logs("replica")]) as feed:
        owner.start(_show(feed, writer), "show")
        try:
            yield
        finally:
            await owner.close(_END_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(_END_S):  # not for as long as replicas go on printing
                    while (message := await feed.receive(_LAST_LINES_S)) is not None:
                        writer.offer(message.payload)
            writer.close()


async def _show(feed: Feed, writer: _Writer) -> None:
    while (message := await feed.receive()) is not None:
        writer.offer(message.payload)


@final
class _Writer:
    """Writes on a thread of its own: a program's output that nobody reads must not stop what it asks of its stack."""

    def __init__(self) -> None:
        self._payloads: queue.Queue[bytes | None] = queue.Queue(_WAITING_MAX)
        self._thread = threading.Thread(target=self._run, name="muster-replica-lines", daemon=True)
        self._thread.start()

    def offer(self, payload: bytes | None) -> None:
        with suppress(queue.Full):
            self._payloads.put_nowait(payload)

    def close(self) -> None:
        self.offer(None)
        self._thread.join(_END_S)  # here, since an interpreter that ends starts no thread to wait in

    def _run(self) -> None:
        while (payload := self._payloads.get()) is not None:
            for data in payload.splitlines():
                _write(read_line(data))


def _write(line: Mapping[str, Any]) -> None:
    is_print = line.get("event") == "print" and line.get("logger") == "stdout"
    output = sys.stdout if is_print else sys.stderr
    if text := format_line(line):
        with suppress(OSError, ValueError):  # the program closed its output, or it is full
            output.write(text)
            output.flush()


def format_line(line: Mapping[str, Any]) -> str:
    """``(shop/Model#3) what it printed``, with a log line's level and traceback; empty for what is no user code's."""
    event, tag = line.get("event"), line.get("replica_tag")
    trace = line.get("exception") or line.get("traceback") or ""
    if event == "print":
        text = str(line.get("message", ""))
    elif event == "log":
        text = f"{str(line.get('level', '')).upper()} {line.get('message', '')}"
    elif trace:
        text = f"{str(line.get('level', '')).upper()} {event}"
    else:
        return ""
    parts = [*text.splitlines(), *str(trace).splitlines()] or [""]
    return "".join(f"({tag}) {part}\n" for part in parts)
