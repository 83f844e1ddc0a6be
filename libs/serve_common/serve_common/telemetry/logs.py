"""Logs: one JSON event a line, with the same ids as metrics and spans; to standard error, and to the bus.

Why standard error: process managers keep it already. What goes over the bus is for live views, and may have gaps.
Both are written by the forwarder's thread, so that logging blocks on neither; a process that is killed loses the
lines of its last hundredths of a second.
"""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable
from typing import Any, Final, TextIO, cast, final

import structlog

from serve_common.clock import SystemClock
from serve_common.runtime.request_context import request_context
from serve_common.telemetry.log_forwarder import LogForwarder
from serve_common.telemetry.log_lines import StandardError, encode_text_line
from serve_common.telemetry.request_traces import current_trace_id

_LEVELS: Final = {
    "DEBUG": logging.DEBUG,
    "INFO": logging.INFO,
    "WARNING": logging.WARNING,
    "ERROR": logging.ERROR,
    "CRITICAL": logging.CRITICAL,
}


def log_level() -> int:
    """The level in MUSTER_LOG_LEVEL; INFO when it is unset or unknown."""
    return _LEVELS.get(os.environ.get("MUSTER_LOG_LEVEL", "").upper(), logging.INFO)


def configure_logs(service: str, **ids: str) -> LogForwarder:
    """Send all logs to standard error as JSON lines that bear ``service`` and ``ids``.

    The returned forwarder gets a sink once there is a bus.
    """
    lines_ids, clock = {"service": service, **ids}, SystemClock()
    forwarder = LogForwarder(StandardError(lines_ids, clock).write, lines_ids, clock)
    atexit.register(forwarder.flush)
    _configure(forwarder, service, ids)
    return forwarder


def configure_replica_logs(forwarder: LogForwarder, **ids: str) -> None:
    """Send this process' own logs to ``forwarder`` only; the user's get there by other means."""
    _configure(forwarder, "replica", ids)


def configure_child_logs(service: str, write: Callable[[bytes], None], **ids: str) -> LogForwarder:
    """Send all logs of a process that a service has started to ``write``, which takes whole lines."""
    forwarder = LogForwarder(write, {"service": service, **ids}, SystemClock())
    _configure(forwarder, service, ids)
    return forwarder


def _configure(forwarder: LogForwarder, service: str, ids: dict[str, str]) -> None:
    def add_ids(_logger: Any, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        event.setdefault("service", service)
        for name, value in ids.items():
            event.setdefault(name, value)
        context = request_context.get()
        if context is not None and context.request_id:
            event.setdefault("request_id", context.request_id)
        trace_id = current_trace_id()
        if trace_id:
            event.setdefault("trace_id", trace_id)
        return event

    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        add_ids,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    level = log_level()
    # It has the methods of a file that are used.
    file = cast("TextIO", _ForwardingFile(forwarder))
    structlog.configure(
        processors=[*shared, structlog.processors.JSONRenderer(ensure_ascii=False)],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        # One write per line: otherwise processes that share the stream would mix theirs.
        logger_factory=structlog.WriteLoggerFactory(file=file),
        cache_logger_on_first_use=True,
    )
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            structlog.processors.JSONRenderer(ensure_ascii=False),
        ],
    )
    handler = logging.StreamHandler(file)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(logging.WARNING, level))


@final
class _ForwardingFile:
    """Where finished lines are written to; never waits and never raises."""

    def __init__(self, forwarder: LogForwarder) -> None:
        self._forwarder = forwarder

    def write(self, text: str) -> int:
        self._forwarder.offer(encode_text_line(text))
        return len(text)

    def flush(self) -> None:
        """Do nothing: the forwarder's thread writes soon."""
