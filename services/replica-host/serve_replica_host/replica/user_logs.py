"""What user code says, by `logging` or by printing, as log lines of the replica that runs it.

Why in place of handlers of ours on every logger: the root logger hears all of them, and handlers that users add go on
working beside it. What a handler of theirs writes to standard output or error is caught there.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Mapping
from typing import Any, Final, final

from serve_common.logs.lines import cut, encode_line, timestamp, user_fields
from serve_common.logs.relay import LogRelay
from serve_common.ports import Clock
from serve_common.request_context import request_context
from serve_common.tracing.current import current_trace_id
from serve_replica_host.replica.caught_prints import CaughtPrints

_OF_RAY: Final = "_ray_timestamp_ns"
"""Stands in every record once Ray has been imported, which may be before this module or after it."""
_OF_RECORDS: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", _OF_RAY}
_OURS: Final = frozenset(
    ("timestamp", "level", "event", "logger", "message", "request_id", "trace_id", "exception", "stack")
)


@final
class UserLogs(logging.Handler):
    """Makes lines of what the process' user code says, and offers them to a relay."""

    def __init__(self, relay: LogRelay, ids: Mapping[str, str], clock: Clock) -> None:
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
