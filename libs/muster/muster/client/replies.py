"""Answers turned into values or raised as the errors they are: the inverse of what services send. Pure."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from muster.client.ports import Answer
from serve_common import errors
from serve_common.errors import BadField, ServeError
from serve_common.wires.admin import ErrorView

ERROR_HEADER: Final = "Nats-Service-Error"
ERROR_CODE_HEADER: Final = "Nats-Service-Error-Code"

ERRORS_BY_CODE: Final[dict[str, type[ServeError]]] = {
    kind.error_code: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, ServeError)
}
"""Every error that a service can send, by its stable word."""


def error_from_view(view: ErrorView) -> ServeError:
    """The error that was raised on the other side; an unknown code becomes a plain `ServeError` with the text."""
    kind = ERRORS_BY_CODE.get(view.code, ServeError)
    if kind is BadField:
        return BadField(view.field or "request", view.message.removeprefix(f"{view.field}: "))
    return kind(view.message or view.code)


def error_of(answer: Answer) -> ServeError | None:
    """The error that an answer bears, or None."""
    short = answer.headers.get(ERROR_HEADER)
    number = answer.headers.get(ERROR_CODE_HEADER)
    if short is None and number is None:
        return None
    try:
        return error_from_view(msgspec.json.decode(answer.body, type=ErrorView))
    except msgspec.DecodeError:
        # Not one of ours: a service of somebody else, or the micro library's own answer to an exception.
        return ServeError(short or f"error {number}")


def read_reply(verb: str, answer: Answer, reply_type: Any) -> Any:
    """The reply to ``verb``; raises the error that the answer bears, or `ServeError` for what cannot be read."""
    error = error_of(answer)
    if error is not None:
        raise error
    try:
        return msgspec.json.decode(answer.body, type=reply_type)
    except msgspec.DecodeError as unreadable:
        raise ServeError(f"the answer to {verb} cannot be read: {unreadable}") from unreadable
