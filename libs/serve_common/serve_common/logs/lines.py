"""Makes log lines: one JSON object each, of a bounded length, whatever was to be said.

Why it never fails: a log call must not raise in the code that logs, least of all in a user's.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

TEXT_LENGTH_MAX: Final = 16 * 1024
"""Characters of one message or one traceback."""
_FIELD_LENGTH_MAX: Final = 2 * 1024
_FIELDS_MAX: Final = 64
_LINE_BYTES_MAX: Final = 60 * 1024


def timestamp(at: float) -> str:
    """``at``, in seconds since 1970, as all log lines have it."""
    return f"{datetime.fromtimestamp(at, tz=UTC).replace(tzinfo=None).isoformat(timespec='microseconds')}Z"


def cut(text: str, length_max: int = TEXT_LENGTH_MAX) -> str:
    """At most so many characters, and how many are missing."""
    if len(text) <= length_max:
        return text
    return f"{text[:length_max]}… ({len(text) - length_max} more characters)"


def encode_line(fields: Mapping[str, Any]) -> bytes:
    """``fields`` as a line; what JSON does not know is told by its ``str``."""
    try:
        line = msgspec.json.encode(fields, enc_hook=_told)
    except Exception:  # noqa: BLE001 - a value's own methods ran, or text was no text
        line = _encode_hard(fields)
    if len(line) > _LINE_BYTES_MAX:
        line = _encode_hard(fields)
    return line + b"\n"


def whole_or_short(text: str) -> bytes:
    """A finished line as bytes; of one that is too long for a message, what it begins with."""
    line = text.encode(errors="backslashreplace")
    if len(line) <= _LINE_BYTES_MAX:
        return line
    return encode_line({"event": "long_log_line", "begins": cut(text, _FIELD_LENGTH_MAX)})


def user_fields(extra: Mapping[str, Any], taken: Container[str]) -> dict[str, Any]:
    """A log call's own fields, beside the ones that are ``taken`` already."""
    fields: dict[str, Any] = {}
    for name, value in extra.items():
        if len(fields) >= _FIELDS_MAX:
            fields["extra_left_out"] = len(extra) - _FIELDS_MAX
            break
        fields[f"extra_{name}" if name in taken else name] = value
    return fields


def dropped_line(at: float, ids: Mapping[str, str], count: int, why: str) -> bytes:
    """The line that stands for those that were left out until ``at``, in seconds since 1970."""
    return encode_line(
        {
            "event": "log_lines_dropped",
            "count": count,
            "reason": why,
            **ids,
            "level": "warning",
            "timestamp": timestamp(at),
        }
    )


def _told(value: Any) -> str:
    return cut(str(value), _FIELD_LENGTH_MAX)


def _encode_hard(fields: Mapping[str, Any]) -> bytes:
    """Every value as short text, none of which can be refused; the whole never exceeds a line's length by much."""
    told: dict[str, str] = {}
    left = _LINE_BYTES_MAX // 6  # what a character can become when it is escaped
    for name, value in fields.items():
        try:
            text = value if isinstance(value, str) else repr(value)
        except Exception as error:  # noqa: BLE001 - the user's __repr__
            text = f"<{type(value).__name__} that cannot be told: {type(error).__name__}>"
        told[str(name)] = text = cut(text, min(_FIELD_LENGTH_MAX, max(left, 0)))
        left -= len(text)
    return json.dumps(told).encode()
