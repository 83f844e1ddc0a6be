"""The logs of one replica: its own events, and the logs and prints of user code."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import logging.handlers
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, TextIO, final

from serve_common.clock import Clock, SystemClock
from serve_common.config.backend import LogEncoding, LoggingConfig
from serve_common.names import BackendTag, ReplicaTag
from serve_common.nats.connection import BusConnection
from serve_common.protocol.reports import ENCODING
from serve_common.protocol.subjects import Subjects
from serve_common.runtime.request_context import request_context
from serve_common.telemetry.log_forwarder import LogForwarder, NatsLogSink
from serve_common.telemetry.log_lines import StandardError, cut, encode_line, timestamp, user_fields
from serve_common.telemetry.logs import configure_replica_logs, log_level
from serve_common.telemetry.request_traces import current_trace_id

UNENDED_LENGTH_MAX: Final = 64 * 1024
"""Maximum characters of an unfinished line; longer ones are passed on as they are."""


@final
class CaughtPrints(io.TextIOBase):
    """Replaces ``sys.stdout`` or ``sys.stderr``.

    Why separately for each thread: `print` writes its text and its newline one after the other, and lines of two
    threads must not mix. What a terminal would overwrite after a carriage return (progress bars) is overwritten here as
    well.
    """

    def __init__(self, original: TextIO, take: Callable[[str], None], on_flush: Callable[[], None]) -> None:
        """``take`` receives each line without its newline. ``original`` provides the properties of the stream."""
        self._original = original
        self._take = take
        self._on_flush = on_flush
        self._unfinished: dict[int, str] = {}
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
        unfinished = self._unfinished.pop(thread, "") if self._unfinished else ""
        if whole:
            self._pass_on(unfinished + whole[0])
            for line in whole[1:]:
                self._pass_on(line)
            unfinished = ""
        unfinished += rest
        if "\r" in rest:
            # Drop what a terminal would have overwritten.
            unfinished = unfinished[unfinished.rstrip("\r").rfind("\r") + 1 :]
        if len(unfinished) > UNENDED_LENGTH_MAX:
            self._pass_on(unfinished)
        elif unfinished:
            self._unfinished[thread] = unfinished
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:  # type: ignore[override]
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        self._on_flush()

    def end(self) -> None:
        """Pass on unfinished lines."""
        while self._unfinished:
            _, unfinished = self._unfinished.popitem()
            self._pass_on(unfinished)

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return self._original.fileno()

    def close(self) -> None:
        """Does nothing: closing standard output must not affect other users of it."""

    def _pass_on(self, line: str) -> None:
        line = line.rstrip("\r").rpartition("\r")[2]
        if line:
            self._take(line)


@final
class _CaughtBytes(io.RawIOBase):
    """The ``buffer`` of `CaughtPrints`."""

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
        """Does nothing, as `CaughtPrints.close`."""


LOG_SOCKET: Final = "MUSTER_LOG_SOCKET"
"""Variable with the path of the host's log socket, for the processes that it starts."""
HOST_ID: Final = "MUSTER_HOST_ID"
_SEND_TIMEOUT_S: Final = 10.0
"""Seconds before a send fails; it blocks only the sending thread. A busy host may not read for a second or two."""
_SEND_BYTES: Final = 512 * 1024


def open_log_sender() -> Callable[[bytes], None]:
    """Return a function that sends whole lines, on one thread at a time; unsendable ones go to standard error.

    Why a socket: Ray redirects what its processes write to files of its own that nothing follows. Why datagrams: they
    need no connection that could break, and a line is never torn.
    """
    path = os.environ.get(LOG_SOCKET, "")
    to_stderr = open_stderr()
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


def open_stderr() -> Callable[[bytes], None]:
    """Return a function that writes whole lines to standard error, a file of Ray on this machine."""
    return StandardError({"service": "replica"}, SystemClock(), sys.stderr.fileno()).write


_RAY_ATTRIBUTE: Final = "_ray_timestamp_ns"
"""Attribute of every record once Ray has been imported, which may be before or after this module."""
_RECORD_ATTRIBUTES: Final = frozenset(vars(logging.makeLogRecord({}))) | {
    "message",
    "asctime",
    _RAY_ATTRIBUTE,
}
_RESERVED_FIELDS: Final = frozenset(
    (
        "timestamp",
        "level",
        "event",
        "logger",
        "message",
        "request_id",
        "trace_id",
        "exception",
        "stack",
        ENCODING,
    )
)
_JSON_ATTRIBUTES: Final = ("asctime", "levelname", "filename", "lineno", "process")
"""Attributes of every record in Ray Serve's JSON, besides its message."""
_LEVELLED: Final = ("ray.serve", "muster")
"""Loggers that ``log_level`` is for, with those below them."""
_RAY_LOGGER: Final = "ray"


_FILE_BYTES_MAX: Final = 100 * 1024 * 1024
_FORMER_FILES: Final = 5


@final
class LogFile(logging.handlers.RotatingFileHandler):
    """The file in `LoggingConfig.logs_dir`, with lines as Ray Serve writes them; a full disk fails no log call."""

    def __init__(self, directory: Path, backend_tag: str, ordinal: str) -> None:
        """Makes the directory. Raises OSError."""
        app, _, deployment = backend_tag.partition("/")
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"replica_{app}_{deployment}_{ordinal}.log"
        super().__init__(path, maxBytes=_FILE_BYTES_MAX, backupCount=_FORMER_FILES, errors="backslashreplace")
        self._component = f"{app}_{deployment}"
        self._ordinal = ordinal
        self._app = app
        self.attributes: tuple[str, ...] | None = None
        """Attributes of records in lines of JSON; None for lines of text."""

    def format(self, record: logging.LogRecord) -> str:
        context = request_context.get()
        request_id = "" if context is None else context.request_id
        asctime = logging.Formatter().formatTime(record)
        if self.attributes is None:
            text = super().format(record)  # with the traceback
            of_request = f"{request_id} " if request_id else ""
            return f"{record.levelname} {asctime} {self._component} {self._ordinal} {of_request}-- {text}"
        fields = {"component_name": "replica", "deployment": self._component, "replica": self._ordinal}
        message = record.getMessage()
        line: dict[str, Any] = {"asctime": asctime, "message": message, "application": self._app, **fields}
        for name in self.attributes:
            line.setdefault(name, getattr(record, name, None))
        extra = {name: value for name, value in vars(record).items() if name not in _RECORD_ATTRIBUTES}
        own = extra.pop("ray_serve_extra_fields", {})  # in Ray Serve these stand beside the others
        for name, value in (*extra.items(), *(own.items() if isinstance(own, dict) else ())):
            line.setdefault(name, value)
        if context is not None and request_id:
            line |= {"request_id": request_id, "route": context.route}
        if record.exc_info:
            line["exc_text"] = logging.Formatter().formatException(record.exc_info)
        return json.dumps(line, default=str)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """Does nothing: the line is in `muster logs`."""


@final
class UserLogs(logging.Handler):
    """Formats the logs and prints of user code as lines, and passes them to a `LogForwarder`.

    Why one handler on the root logger instead of handlers on every logger: the root logger gets all records, and
    handlers that users add go on working beside it. What those write to standard output or error is captured there.
    """

    def __init__(self, forwarder: LogForwarder, ids: Mapping[str, str], clock: Clock) -> None:
        """``ids`` are in every line."""
        super().__init__()
        self._forwarder = forwarder
        self._ids = dict(ids)
        self._clock = clock
        self._taken = _RESERVED_FIELDS | self._ids.keys()
        self._attributes: tuple[str, ...] = ()
        """Attributes of records that are fields of their lines."""
        self._formatter = logging.Formatter()
        self._form: dict[str, str] = {}
        """Fields that tell readers how to show a line."""
        self._file: LogFile | None = None

    def configure(self, config: LoggingConfig | None) -> None:
        """Follow ``config`` from now on; any thread may call it."""
        level = logging.getLevelNamesMapping()[config.log_level] if config is not None else logging.NOTSET
        for name in _LEVELLED:
            logging.getLogger(name).setLevel(level)
        attributes = () if config is None else config.additional_log_standard_attrs
        is_json = config is not None and config.encoding is LogEncoding.JSON
        self._form = {ENCODING: LogEncoding.JSON.value} if is_json else {}
        self._attributes = (*_JSON_ATTRIBUTES, *attributes) if is_json else attributes
        self._write_to(config.logs_dir if config is not None else "")
        if self._file is not None:
            self._file.attributes = self._attributes if is_json else None

    def _write_to(self, logs_dir: str) -> None:
        """Write to a file in ``logs_dir`` from now on, and to no other; to none if it is empty."""
        if self._file is not None:
            if logs_dir == str(Path(self._file.baseFilename).parent):
                return
            for name in _LEVELLED:
                logging.getLogger(name).removeHandler(self._file)
            with contextlib.suppress(OSError):  # a full disk
                self._file.close()
            self._file = None
        if not logs_dir:
            return
        try:
            file = LogFile(
                Path(logs_dir), self._ids["backend_tag"], self._ids["replica_tag"].rpartition("#")[2]
            )
        except OSError as error:
            logging.getLogger("muster").warning("logs_dir: no file can be written there: %s", error)
            return
        for name in _LEVELLED:
            logging.getLogger(name).addHandler(file)
        self._file = file

    def catch(self, level: int) -> None:
        """Capture the root logger, standard output and standard error from now on."""
        root = logging.getLogger()
        root.handlers[:] = [self]
        root.setLevel(level)
        # Ray's import gave it a handler of its own, whose text would be a print, without its level.
        ray = logging.getLogger(_RAY_LOGGER)
        ray.handlers[:] = []
        ray.propagate = True
        sys.stdout = CaughtPrints(sys.stdout, self._make_print_handler("stdout", "info"), self._flush_child)
        sys.stderr = CaughtPrints(
            sys.stderr, self._make_print_handler("stderr", "warning"), self._flush_child
        )

    def emit(self, record: logging.LogRecord) -> None:
        """Format and forward a record; never raises."""
        try:
            message = record.getMessage()
        except Exception as error:  # noqa: BLE001 - the user's arguments do not fit the user's text
            message = f"{record.msg!r} with arguments that do not fit: {error}"
        line = self._new_line(record.created, record.levelname.lower(), "log", record.name, message)
        line["source"] = f"{record.pathname}:{record.lineno}"
        for name in self._attributes:
            value = self._formatter.formatTime(record) if name == "asctime" else getattr(record, name, None)
            line.setdefault(name, value)
        if record.exc_info and record.exc_info[1] is not None:
            line["exception"] = cut("".join(traceback.format_exception(record.exc_info[1])))
        if record.stack_info:
            line["stack"] = cut(record.stack_info)
        if not record.__dict__.keys() <= _RECORD_ATTRIBUTES:
            extra = {name: value for name, value in record.__dict__.items() if name not in _RECORD_ATTRIBUTES}
            line |= user_fields(extra, self._taken | {"source"})
        self._forwarder.offer(encode_line(line))

    def _make_print_handler(self, stream: str, level: str) -> Any:
        def take(text: str) -> None:
            self._forwarder.offer(
                encode_line(self._new_line(self._clock.now(), level, "print", stream, text))
            )

        return take

    def _new_line(self, at: float, level: str, event: str, logger: str, message: str) -> dict[str, Any]:
        line: dict[str, Any] = {
            "timestamp": timestamp(at),
            "level": level,
            "event": event,
            "logger": logger,
            "message": cut(message),
            **self._ids,
            **self._form,
        }
        context = request_context.get()
        if context is not None:
            line["request_id"] = context.request_id
            trace_id = current_trace_id()
            if trace_id:
                line["trace_id"] = trace_id
        return line

    def _flush_child(self) -> None:
        """Flush lines in a forked child, which exits without further calls once it has flushed its streams."""
        if self._forwarder.is_in_forked_child:
            self._forwarder.flush()


def log_ids(replica_tag: ReplicaTag, backend_tag: BackendTag) -> dict[str, str]:
    """Fields of every log line of a replica."""
    ids = {"replica_tag": str(replica_tag), "backend_tag": str(backend_tag)}
    host_id = os.environ.get(HOST_ID)
    if host_id:
        ids["host_id"] = host_id
    return ids


@final
class ReplicaLogs:
    """Captures all output of this process as log lines, from construction on."""

    def __init__(
        self,
        replica_tag: ReplicaTag,
        backend_tag: BackendTag,
        way: Callable[[bytes], None] | None = None,
    ) -> None:
        """``way`` receives whole lines, on one thread at a time; None sends them to a host on this machine."""
        ids = log_ids(replica_tag, backend_tag)
        self._replica_tag = replica_tag
        clock = SystemClock()
        lines_ids = {"service": "replica", **ids}
        self._forwarder = LogForwarder(way or open_log_sender(), lines_ids, clock)
        self._sink: NatsLogSink | None = None
        configure_replica_logs(self._forwarder, **ids)
        self._users = UserLogs(self._forwarder, lines_ids, clock)
        self._users.catch(log_level())

    def configure(self, config: LoggingConfig | None) -> None:
        """Follow ``config`` from now on; any thread may call it."""
        self._users.configure(config)

    def join(self, bus: BusConnection, subjects: Subjects) -> None:
        """Publish from now on; on the connection's loop."""
        self._sink = NatsLogSink(self._forwarder, subjects, "replica", self._replica_tag)
        self._sink.join(bus)

    async def part(self) -> None:
        """Publish the lines so far, and none after that; on the connection's loop, before it is closed."""
        if self._sink is not None:
            await self._sink.close()

    def end(self) -> None:
        """Flush all output."""
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, CaughtPrints):
                stream.end()
        self._forwarder.flush()
