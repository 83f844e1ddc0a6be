"""Values that people give and read: checks whose errors agree with one another, and texts that fit where they go."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from serve_common.errors import BadField

USER_CONFIG_BYTES_MAX: Final = 64 * 1024
"""Largest size of a user's JSON value: a whole host goal must fit into one NATS message (1 MiB by default)."""
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
NESTING_MAX: Final = 64
"""Deepest nesting of a user's value; a deeper one could pass here and fail in another process' decoder."""


def shown(value: float) -> str:
    """Format a number for people; JSON integers may be larger than any float."""
    try:
        return f"{value:g}"
    except OverflowError:
        return "far too large" if value > 0 else "far too small"


def check_between(value: float, low: float, high: float, field: str) -> None:
    """Raise `BadField` unless ``low <= value <= high``."""
    if not low <= value <= high:  # False for NaN too
        raise BadField(field, f"is {shown(value)}; it must be between {low:g} and {high:g}")


def check_import_path(path: str, field: str) -> None:
    """Raise `BadField` unless ``path`` has the form ``module:attribute``."""
    module, colon, attribute = path.partition(":")
    named = [*module.split("."), *attribute.split(".")]
    if len(path) > 512 or not colon or not all(part.isidentifier() for part in named):
        raise BadField(field, f"{path[:100]!r} must read module:attribute, such as digits:Digits")


def check_digest(value: str, field: str) -> str:
    """Return ``value`` if it can be a SHA-256; otherwise raise `BadField` naming ``field``."""
    if _DIGEST.fullmatch(value) is None:
        raise BadField(field, f"{value[:100]!r} is no SHA-256: 64 lower-case hexadecimal digits")
    return value


def check_size(value: Any, field: str) -> None:
    """Raise `BadField` for a user's value that is too large or nested too deeply."""
    _check_nesting(value, field)
    size = len(msgspec.json.encode(value))
    if size > USER_CONFIG_BYTES_MAX:
        raise BadField(field, f"is {size} bytes as JSON; at most {USER_CONFIG_BYTES_MAX} are allowed")


def _check_nesting(value: Any, field: str) -> None:
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > NESTING_MAX:
            raise BadField(field, f"is nested deeper than {NESTING_MAX} levels")
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]


def truncate(text: str, length_max: int) -> str:
    """At most ``length_max`` characters of ``text``: its beginning, and an ellipsis where the rest was."""
    return text if len(text) <= length_max else f"{text[: length_max - 1]}…"


def truncate_start(text: str, length_max: int) -> str:
    """As `truncate`, but its end, such as the exception below a traceback."""
    return text if len(text) <= length_max else f"…{text[-(length_max - 1) :]}"


def suggest(name: str, known: Iterable[str]) -> str:
    """``; did you mean …?`` for a misspelt name; empty when nothing known is like it."""
    import difflib  # noqa: PLC0415 - for errors only

    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
