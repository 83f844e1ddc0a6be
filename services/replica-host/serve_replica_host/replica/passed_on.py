"""Failures that are not the user's code's own: what a call by handle ended with, and the code let through.

Why they keep their status: a 503 tells the caller to come again and a 504 that it took too long, whichever deployment
of the chain was overloaded or slow. What the user's code raises by itself stays its own failure.
"""

from __future__ import annotations

import structlog

from serve_common.errors import LimitReached, RequestFailed, ServeError, TransientError
from serve_replica_host.replica.exchange import Exchange, Failed
from serve_replica_host.replica.tracebacks import error_line

_log = structlog.get_logger(__name__)


def is_passed_on(error: ServeError) -> bool:
    """Whether the caller is told of ``error`` as of a failure of its own request.

    A missing deployment, or arguments that do not fit, are for whoever wrote the code.
    """
    return error.is_of_call and isinstance(error, RequestFailed | LimitReached | TransientError)


def failed_by(exchange: Exchange, error: ServeError, body: bytes = b"") -> Failed:
    """What ends a request by an error that `is_passed_on`; ``body`` as in `Failed`."""
    _log.warning(
        "call_failed",
        request_id=exchange.head.request_id,
        error_code=error.error_code,
        error=error_line(error),
    )
    status: int = getattr(error, "status", error.status_hint)
    return Failed(exchange, error.error_code, status, str(error), body)
