"""Text of users and their programs as a page may show it: without what only a terminal understands."""

from __future__ import annotations

import re
from typing import Final

_LINE_ENDS: Final = re.compile(r"\r\n?|[\x85\u2028\u2029]")
_ESCAPES: Final = re.compile(
    r"\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?"  # a title, a link and the like, up to its end
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"  # a colour, a movement
    r"|\ufffd\[[0-9;]*[mK]"  # what the controller leaves of a colour
    r"|\x1b[ -/]*[0-~]?"
)
_CONTROLS: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def strip_escapes(text: str) -> str:
    """Text without escape sequences, control characters and overrides of its direction; a newline ends each line."""
    if text.isprintable() and "\ufffd" not in text:
        return text
    return _CONTROLS.sub("", _ESCAPES.sub("", _LINE_ENDS.sub("\n", text)))


def clean_text(text: str, most: int = 20_000) -> str:
    """The same, with a sign in place of each control character, and cut after ``most``."""
    text = _ESCAPES.sub("", _LINE_ENDS.sub("\n", text[: most + 1000]))
    text = _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text)
    return text if len(text) <= most else f"{text[: most - 1]}…"
