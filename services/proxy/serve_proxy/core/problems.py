"""Errors of requests as clients receive them: one JSON format for every error, or Ray Serve's text.

Why one place: a client, a dashboard and a foreign NATS caller must be able to distinguish the same cases. The format is
that of RFC 9457, problem details, so that libraries which know it show the text without knowing Muster. Endpoints of
programs that were written for Ray Serve have its plain text, as clients compare it.
"""

from __future__ import annotations

import math
from http import HTTPStatus
from typing import Final

import msgspec

from serve_common.config.backend import ErrorFormat
from serve_common.dispatch.errors import (
    BackPressureError,
    CircuitOpen,
    MethodNotAllowed,
    NoRoute,
    ReplicaError,
)
from serve_common.errors import (
    BadField,
    BusUnavailable,
    DeadlineExceeded,
    LimitReached,
    NoReplicaAvailable,
    ServeError,
    TransientError,
)

RETRY_AFTER_S: Final = 1
_RETRYABLE_CODES: Final = frozenset(
    kind.error_code
    for kind in (NoReplicaAvailable, BackPressureError, CircuitOpen, TransientError, BusUnavailable)
)
"""Codes of replica errors that get a Retry-After: a downstream deployment was full or unreachable."""


class ProxyDraining(BusUnavailable):
    """This proxy is draining and accepts no long-lived connection; another proxy will."""

    error_code = "draining"


class BodyTooLarge(LimitReached):
    """The body is larger than `HttpOptions.body_bytes_max`."""

    error_code = "body_too_large"
    status_hint = 413


class BodiesFull(TransientError):
    """The memory limit of this proxy for request bodies is reached."""

    error_code = "bodies_full"

    def __init__(self) -> None:
        super().__init__("the bodies of other requests take all the memory that this proxy has for them")


class BodyTooSlow(DeadlineExceeded):
    """The client did not send its body in time."""

    error_code = "body_too_slow"
    status_hint = 408


class HeadTooSlow(DeadlineExceeded):
    """The client did not send the head of its request in time."""

    error_code = "head_too_slow"
    status_hint = 408


class BadRequest(BadField):
    """The request is not valid HTTP."""

    error_code = "bad_request"
    status_hint = 400


class UnknownCoding(BadField):
    """The body has a transfer coding other than chunked, which is not supported."""

    error_code = "unknown_coding"
    status_hint = 501


class UpgradeRefused(BadField):
    """A WebSocket handshake that violates RFC 6455, or is of an unsupported version."""

    error_code = "bad_handshake"
    status_hint = 400

    def __init__(
        self, field: str, reason: str, *, status: int = 400, headers: tuple[tuple[str, str], ...] = ()
    ) -> None:
        """``headers`` of the response list what is supported."""
        super().__init__(field, reason)
        self.status = status
        self.headers = headers


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """An error as it is sent to the client."""

    status: int
    code: str
    message: str
    headers: tuple[tuple[str, str], ...] = ()
    text: str | None = None
    """Body of the response as plain text; None for problem details."""


class _Error(msgspec.Struct, frozen=True):
    code: str
    message: str
    request_id: str


class _Body(msgspec.Struct, frozen=True):
    type: str
    title: str
    status: int
    detail: str
    code: str
    request_id: str
    error: _Error


PROBLEM_TYPE: Final = "application/problem+json"
TEXT_TYPE: Final = "text/plain; charset=utf-8"


def build_problem(
    error: ServeError,
    error_format: ErrorFormat = ErrorFormat.PROBLEM,
    request_id: str = "",
    limit_s: float = 0.0,
) -> Problem:
    """The problem sent to the client for ``error``.

    Plain text names the request, and its time limit in seconds, where these are given and above 0.
    """
    problem = _build_details(error)
    if isinstance(error, NoRoute):
        error_format = error.error_format
    if error_format is ErrorFormat.PROBLEM:
        return problem
    is_known = bool(request_id) and limit_s > 0
    return _build_text(
        problem, error, f"{request_id} timed out after {round(limit_s, 2)}s" if is_known else ""
    )


def _build_text(problem: Problem, error: ServeError, timed_out: str) -> Problem:
    """As Ray Serve's proxy sends it (``ray/serve/_private/http_util.py``, ``get_http_response_status``)."""
    status, text = problem.status, problem.message
    match status:
        case 500 | 502:
            status, text = 500, "Internal Server Error"
        case 504:
            status, text = 408, f"Request {timed_out or f'timed out: {text}'}."
        case 503 if problem.code != BackPressureError.error_code:
            text = f"The deployment is unavailable: {text}."
    is_delay_configured = isinstance(error, BackPressureError) and error.retry_after_s is not None
    headers = tuple(pair for pair in problem.headers if pair[0] != "Retry-After" or is_delay_configured)
    return msgspec.structs.replace(problem, status=status, headers=headers, text=text)


def _build_details(error: ServeError) -> Problem:
    headers: tuple[tuple[str, str], ...] = ()
    if isinstance(error, ReplicaError):
        if error.code in _RETRYABLE_CODES:
            headers = (("Retry-After", str(RETRY_AFTER_S)),)
        return Problem(status=error.status, code=error.code, message=str(error), headers=headers)
    status = error.status_hint
    if isinstance(error, MethodNotAllowed):
        headers = (("Allow", error.allowed),)
    elif isinstance(error, NoReplicaAvailable | TransientError):
        status = getattr(error, "status", status)
        retry_after_s = getattr(error, "retry_after_s", None)
        seconds = RETRY_AFTER_S if retry_after_s is None else math.ceil(retry_after_s)
        headers = (("Retry-After", str(seconds)),)
    elif isinstance(error, UpgradeRefused):
        status, headers = error.status, error.headers
    return Problem(status=status, code=error.error_code, message=str(error), headers=headers)


def encode_problem(problem: Problem, request_id: str) -> tuple[str, bytes]:
    """Content type and body.

    In problem details ``error`` repeats the rest, for clients that know only Muster's own format.
    """
    if problem.text is not None:
        return TEXT_TYPE, problem.text.encode("utf-8", "replace")
    return PROBLEM_TYPE, msgspec.json.encode(
        _Body(
            type=f"urn:muster:problem:{problem.code}",
            title=_title(problem.status),
            status=problem.status,
            detail=problem.message,
            code=problem.code,
            request_id=request_id,
            error=_Error(problem.code, problem.message, request_id),
        )
    )


def _title(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Error"
