"""What comes in as JSON and what an error reads like.

Why apart from answering: a plan holds a request within a request, and both must be refused in the same words.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from serve_common.errors import BadField, ServeError
from serve_common.wires.admin import COMMANDS, VERBS, ErrorView
from serve_common.wires.commands import Request
from serve_common.wires.unreadable import UNREADABLE

_AT_PATH: Final = re.compile(r" - at `\$?\.?(?P<path>[^`]*)`$")
_OF_FIELD: Final = re.compile(
    r"^Object (contains unknown|missing required) field `(?P<name>[^`]*)`", re.DOTALL
)


def parse_request(verb: str, payload: bytes) -> Request:
    """The request in ``payload``. Raises `BadField` with the path of what is wrong.

    An empty payload means ``{}`` for queries only. Who may not send a command could have one sent without a content,
    by what publishes on others' behalf (JetStream does), so a command must say what it is about.
    """
    request_type, _reply_type = VERBS[verb]
    if not payload.strip() and verb in COMMANDS:
        raise BadField("request", f"is empty; {verb} needs a JSON object{_required(request_type)}")
    try:
        return msgspec.json.decode(payload or b"{}", type=request_type)
    except msgspec.ValidationError as error:
        text = str(error)
        found = _AT_PATH.search(text)
        text = _AT_PATH.sub("", text)
        named = _OF_FIELD.match(text)
        path = [] if found is None or not found["path"] else [found["path"]]
        path += [] if named is None else [named["name"]]
        # What the caller wrote comes back in the message, so it is cut.
        raise BadField(".".join(path)[:200] or "request", text[:300]) from error
    except UNREADABLE as error:
        raise BadField("request", f"is not JSON: {error}") from error


def _required(request_type: type[Request]) -> str:
    names = [field.encode_name for field in msgspec.structs.fields(request_type) if field.required]
    return f" with {', '.join(names)}" if names else ""


def error_view(error: ServeError) -> ErrorView:
    """An error as it is sent."""
    field = error.field if isinstance(error, BadField) else ""
    return ErrorView(code=error.error_code, message=str(error), field=field)
