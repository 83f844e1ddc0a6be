"""The logs of one replica: its own events, and what its user's code logs or prints."""

from __future__ import annotations

import io
import logging
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TextIO, final

from serve_common.names import BackendTag, ReplicaTag
from serve_common.nats.connection import BusConnection
from serve_common.ports import Clock
from serve_common.protocol.subjects import Subjects
from serve_common.runtime.clock import SystemClock
from serve_common.runtime.request_context import request_context
from serve_common.telemetry.log_forwarder import LogForwarder, NatsLogSink
from serve_common.telemetry.log_lines import StandardError, cut, encode_line, timestamp, user_fields
from serve_common.telemetry.logs import configure_replica_logs, log_level
from serve_common.telemetry.tracer import current_trace_id

UNENDED_LENGTH_MAX: Final = 64 * 1024
"""Characters that wait for the end of their line; what is longer is handed on as it is."""


@final
class CaughtPrints(io.TextIOBase):
    """In place of ``sys.stdout`` or ``sys.stderr``."""

    def __init__(self, original: TextIO, take: Callable[[str], None], on_flush: Callable[[], None]) -> None:
        """``take`` gets each line without its end. What is asked of the stream itself ``original`` answers."""
        self._original = original
        self._take = take
        self._on_flush = on_flush
        self._unended: dict[int, str] = {}
        self.buffer = _CaughtBytes(self)

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    @property
    def errors(self) -> str:  # type: ignore[override]
        return "backslashreplace"

    @property
    def name(self) -> Any:
        return getattr(self._original, "name", "<caught>")

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        thread = threading.get_ident()
        *whole, rest = text.split("\n")
        unended = self._unended.pop(thread, "") if self._unended else ""
        if whole:
            self._hand_on(unended + whole[0])
            for line in whole[1:]:
                self._hand_on(line)
            unended = ""
        unended += rest
        if "\r" in rest:
            # All but what a terminal would still show.
            unended = unended[unended.rstrip("\r").rfind("\r") + 1 :]
        if len(unended) > UNENDED_LENGTH_MAX:
            self._hand_on(unended)
        elif unended:
            self._unended[thread] = unended
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:  # type: ignore[override]
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        self._on_flush()

    def end(self) -> None:
        """Hand on what has no end."""
        while self._unended:
            _, unended = self._unended.popitem()
            self._hand_on(unended)

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return self._original.fileno()

    def close(self) -> None:
        """Nothing: who closes standard output means its own use of it."""

    def _hand_on(self, line: str) -> None:
        line = line.rstrip("\r").rpartition("\r")[2]
        if line:
            self._take(line)


@final
class _CaughtBytes(io.RawIOBase):
    """``sys.stdout.buffer``."""

    def __init__(self, text: CaughtPrints) -> None:
        self._text = text

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return len(data) if self._text.write(bytes(data).decode(errors="backslashreplace")) >= 0 else 0

    def fileno(self) -> int:
        return self._text.fileno()

    def flush(self) -> None:
        self._text.flush()

    def close(self) -> None:
        """As for `CaughtPrints`."""


LOG_SOCKET: Final = "MUSTER_LOG_SOCKET"
"""The variable that a host leaves to the processes that it starts: the path of its socket."""
HOST_ID: Final = "MUSTER_HOST_ID"
_SEND_TIMEOUT_S: Final = 10.0
"""Nobody waits for it but the thread that sends. A host that has no processor for a second or two has not gone."""
_SEND_BYTES: Final = 512 * 1024


def open_log_way() -> Callable[[bytes], None]:
    """Takes whole lines, on one thread at a time; what cannot be sent is written to standard error."""
    path = os.environ.get(LOG_SOCKET, "")
    to_stderr = own_stderr()
    if not path:
        return to_stderr
    try:
        out = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        out.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)
        out.settimeout(_SEND_TIMEOUT_S)
        out.connect(path)
    except OSError as error:  # such as of another user than the host's
        to_stderr(encode_line({"event": "no_log_socket", "reason": str(error), "level": "info"}))
        return to_stderr

    def to_host(lines: bytes) -> None:
        try:
            out.send(lines)
        except OSError:
            to_stderr(lines)

    return to_host


def own_stderr() -> Callable[[bytes], None]:
    """Takes whole lines; they end in a file of Ray's on this machine."""
    return StandardError({"service": "replica"}, SystemClock(), sys.stderr.fileno()).write


_OF_RAY: Final = "_ray_timestamp_ns"
"""Stands in every record once Ray has been imported, which may be before this module or after it."""
_OF_RECORDS: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", _OF_RAY}
_OURS: Final = frozenset(
    ("timestamp", "level", "event", "logger", "message", "request_id", "trace_id", "exception", "stack")
)


@final
class UserLogs(logging.Handler):
    """Makes lines of what the process' user code says, and offers them to a relay."""

    def __init__(self, relay: LogForwarder, ids: Mapping[str, str], clock: Clock) -> None:
        """``ids`` stand in every line."""
        super().__init__()
        self._relay = relay
        self._ids = dict(ids)
        self._clock = clock
        self._taken = _OURS | self._ids.keys()

    def catch(self, level: int) -> None:
        """Hear the root logger, and whatever is printed from now on."""
        root = logging.getLogger()
        root.handlers[:] = [self]
        root.setLevel(level)
        sys.stdout = CaughtPrints(sys.stdout, self._take_printed("stdout", "info"), self._flush_child)
        sys.stderr = CaughtPrints(sys.stderr, self._take_printed("stderr", "warning"), self._flush_child)

    def emit(self, record: logging.LogRecord) -> None:
        """As `logging.Handler`; never raises."""
        try:
            message = record.getMessage()
        except Exception as error:  # noqa: BLE001 - the user's arguments do not fit the user's text
            message = f"{record.msg!r} with arguments that do not fit: {error}"
        line = self._begin(record.created, record.levelname.lower(), "log", record.name, message)
        line["source"] = f"{record.pathname}:{record.lineno}"
        if record.exc_info and record.exc_info[1] is not None:
            line["exception"] = cut("".join(traceback.format_exception(record.exc_info[1])))
        if record.stack_info:
            line["stack"] = cut(record.stack_info)
        if not record.__dict__.keys() <= _OF_RECORDS:
            extra = {name: value for name, value in record.__dict__.items() if name not in _OF_RECORDS}
            line |= user_fields(extra, self._taken | {"source"})
        self._relay.offer(encode_line(line))

    def _take_printed(self, stream: str, level: str) -> Any:
        def take(text: str) -> None:
            self._relay.offer(encode_line(self._begin(self._clock.now(), level, "print", stream, text)))

        return take

    def _begin(self, at: float, level: str, event: str, logger: str, message: str) -> dict[str, Any]:
        line: dict[str, Any] = {
            "timestamp": timestamp(at),
            "level": level,
            "event": event,
            "logger": logger,
            "message": cut(message),
            **self._ids,
        }
        context = request_context.get()
        if context is not None:
            line["request_id"] = context.request_id
            trace_id = current_trace_id()
            if trace_id:
                line["trace_id"] = trace_id
        return line

    def _flush_child(self) -> None:
        """A process that user code has forked ends without a word, once it has flushed its streams."""
        if self._relay.is_in_forked_child:
            self._relay.flush()


def log_ids(replica_tag: ReplicaTag, backend_tag: BackendTag) -> dict[str, str]:
    """What every line of a replica's bears."""
    ids = {"replica_tag": str(replica_tag), "backend_tag": str(backend_tag)}
    host_id = os.environ.get(HOST_ID)
    if host_id:
        ids["host_id"] = host_id
    return ids


@final
class ReplicaLogs:
    """From its construction on, everything that this process says is a log line."""

    def __init__(
        self,
        replica_tag: ReplicaTag,
        backend_tag: BackendTag,
        way: Callable[[bytes], None] | None = None,
    ) -> None:
        """``way`` takes whole lines, on one thread at a time; None for the way to a host on this machine."""
        ids = log_ids(replica_tag, backend_tag)
        self._replica_tag = replica_tag
        clock = SystemClock()
        lines_ids = {"service": "replica", **ids}
        self._relay = LogForwarder(way or open_log_way(), lines_ids, clock)
        self._outlet: NatsLogSink | None = None
        configure_replica_logs(self._relay, **ids)
        UserLogs(self._relay, lines_ids, clock).catch(log_level())

    def join(self, bus: BusConnection, subjects: Subjects) -> None:
        """Publish from now on; on the connection's loop."""
        self._outlet = NatsLogSink(self._relay, bus, subjects, "replica", self._replica_tag)

    async def part(self) -> None:
        """Publish what was said so far, and nothing after that; on the connection's loop, before it is closed."""
        if self._outlet is not None:
            await self._outlet.close()

    def end(self) -> None:
        """Hand on everything that was said."""
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, CaughtPrints):
                stream.end()
        self._relay.flush()
