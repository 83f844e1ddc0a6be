"""What goes wrong with a request, as the client is told: one JSON form for every error.

Why one place: a client, a dashboard and a foreign NATS caller must be able to tell the same cases apart.
"""

from __future__ import annotations

from typing import Final

import msgspec

from serve_common.errors import (
    BadField,
    DeadlineExceeded,
    LimitReached,
    NoReplicaAvailable,
    NotFound,
    RequestFailed,
    ServeError,
    TransientError,
)

RETRY_AFTER_S: Final = 1


class MethodNotAllowed(BadField):
    """The endpoint does not take this method."""

    error_code = "method_not_allowed"
    status_hint = 405

    def __init__(self, method: str, allowed: str) -> None:
        """``allowed`` is a list as the header `Allow` has it."""
        super().__init__("method", f"{method[:20]} is not allowed here; allowed: {allowed}")
        self.allowed = allowed


class BodyTooLarge(LimitReached):
    """The body is larger than `HttpOptions.body_bytes_max`."""

    error_code = "body_too_large"
    status_hint = 413


class HeadTooLarge(LimitReached):
    """The headers do not fit into one frame."""

    error_code = "headers_too_large"
    status_hint = 431


class BodyTooSlow(DeadlineExceeded):
    """The client did not send its body in time."""

    error_code = "body_too_slow"
    status_hint = 408


class BadRequest(BadField):
    """The bytes of the request are not what HTTP allows."""

    error_code = "bad_request"
    status_hint = 400


class AnswerUnusable(RequestFailed):
    """The replica's answer cannot be passed on."""

    error_code = "answer_unusable"


class ReplicaError(RequestFailed):
    """The replica says that the request failed, with its own code and status."""

    def __init__(self, error_code: str, status: int, message: str) -> None:
        super().__init__(message)
        self.code = error_code
        self.status = status if 400 <= status <= 599 else 500


class NoRoute(NotFound):
    """No endpoint has a route that matches."""

    error_code = "no_route"


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """An error as it leaves the proxy."""

    status: int
    code: str
    message: str
    headers: tuple[tuple[str, str], ...] = ()


class _Error(msgspec.Struct, frozen=True):
    code: str
    message: str
    request_id: str


class _Body(msgspec.Struct, frozen=True):
    error: _Error


def problem_of(error: ServeError) -> Problem:
    """What the client is told of ``error``."""
    if isinstance(error, ReplicaError):
        return Problem(status=error.status, code=error.code, message=str(error))
    headers: tuple[tuple[str, str], ...] = ()
    if isinstance(error, MethodNotAllowed):
        headers = (("Allow", error.allowed),)
    elif isinstance(error, NoReplicaAvailable | TransientError):
        headers = (("Retry-After", str(RETRY_AFTER_S)),)
    return Problem(status=error.status_hint, code=error.error_code, message=str(error), headers=headers)


def encode_problem(problem: Problem, request_id: str) -> bytes:
    """The body: ``{"error": {"code", "message", "request_id"}}``."""
    return msgspec.json.encode(_Body(_Error(problem.code, problem.message, request_id)))
