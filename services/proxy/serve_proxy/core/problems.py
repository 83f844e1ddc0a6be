"""What goes wrong with a request, as the client is told: one JSON form for every error.

Why one place: a client, a dashboard and a foreign NATS caller must be able to tell the same cases apart.
"""

from __future__ import annotations

from typing import Final

import msgspec

from serve_common.dispatch.errors import MethodNotAllowed, ReplicaError
from serve_common.errors import (
    BadField,
    DeadlineExceeded,
    LimitReached,
    NoReplicaAvailable,
    ServeError,
    TransientError,
)

RETRY_AFTER_S: Final = 1


class BodyTooLarge(LimitReached):
    """The body is larger than `HttpOptions.body_bytes_max`."""

    error_code = "body_too_large"
    status_hint = 413


class BodyTooSlow(DeadlineExceeded):
    """The client did not send its body in time."""

    error_code = "body_too_slow"
    status_hint = 408


class BadRequest(BadField):
    """The bytes of the request are not what HTTP allows."""

    error_code = "bad_request"
    status_hint = 400


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
