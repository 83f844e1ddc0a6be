"""What is told of a request whose head could not be read."""

from __future__ import annotations

from aiohttp.http_exceptions import HttpProcessingError, LineTooLong

from serve_common.dispatch.errors import HeadersTooLarge
from serve_proxy.core.problems import BadRequest, HeadTooSlow, Problem, problem_of

_REASON_LENGTH_MAX = 200


def problem_of_unread(error: BaseException | None, message: str | None) -> Problem | None:
    """What was wrong with it; None when ``error`` is of another kind. ``message`` says more than the library's own."""
    if isinstance(error, HeadTooSlow):
        return problem_of(error)
    if isinstance(error, LineTooLong):
        return problem_of(HeadersTooLarge("a line of the request's head is too long"))
    if isinstance(error, HttpProcessingError):
        reason = (message or str(error)).partition("\n")[0][:_REASON_LENGTH_MAX]
        return problem_of(BadRequest("request", reason))
    return None
