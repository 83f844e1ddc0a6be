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

_FOREIGN_BODY_MAX: Final = 2000


class UnknownError(ServeError):
    """An error whose code this version does not know: of a later service, or of the user's code."""

    def __init__(self, code: str, message: str) -> None:
        """``code`` is the word that came."""
        super().__init__(message)
        self.code = code


class _GatewayError(msgspec.Struct, frozen=True):
    """How proxies put it, over HTTP and over NATS alike: within problem details (RFC 9457)."""

    error: ErrorView


def _read_error(body: bytes) -> ErrorView:
    try:
        return msgspec.json.decode(body, type=_GatewayError).error
    except msgspec.ValidationError:
        return msgspec.json.decode(body, type=ErrorView)


def error_from_view(view: ErrorView) -> ServeError:
    """The error that was raised on the other side; an unknown code becomes an `UnknownError`."""
    kind = ERRORS_BY_CODE.get(view.code)
    if kind is None:
        return UnknownError(view.code, view.message or view.code)
    if kind is BadField:
        field, colon, reason = view.message.partition(": ")
        if view.field:
            return BadField(view.field, view.message.removeprefix(f"{view.field}: "))
        return BadField(field, reason) if colon else BadField("request", view.message)
    return kind(view.message or view.code)


def error_of(answer: Answer) -> ServeError | None:
    """The error that an answer bears, or None."""
    short = answer.headers.get(ERROR_HEADER)
    number = answer.headers.get(ERROR_CODE_HEADER)
    if short is None and number is None:
        return None
    said = short or f"error {number}"
    try:
        view = _read_error(answer.body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        # Not one of ours: what the user's code answered, or the micro library's own answer to an exception.
        text = answer.body[:_FOREIGN_BODY_MAX].decode(errors="replace").strip()
        return ServeError(f"{said}: {text}" if text else said)
    return error_from_view(view)


def read_reply(verb: str, answer: Answer, reply_type: Any) -> Any:
    """The reply to ``verb``; raises the error that the answer bears, or `ServeError` for what cannot be read."""
    error = error_of(answer)
    if error is not None:
        raise error
    try:
        return msgspec.json.decode(answer.body, type=reply_type)
    except msgspec.DecodeError as unreadable:
        raise ServeError(f"the answer to {verb} cannot be read: {unreadable}") from unreadable
