"""Text of users as pages may show it: without escape sequences and control characters."""

from __future__ import annotations

import re
from typing import Final

_ESCAPES: Final = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # colours, cursor
    r"|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?"  # titles, links
    r"|\x1b[ -/]*[0-~]?"
    r"|\ufffd\[[0-9;]*[mK]"  # what the controller leaves of a colour
    r"|\x9b[0-?]*[ -/]*[@-~]"
)
_CONTROLS: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def clean_text(text: str, most: int = 20_000) -> str:
    """Text without ANSI escapes, other control characters and overrides of its direction; cut after ``most``."""
    text = _ESCAPES.sub("", text[: most + 1000].replace("\r\n", "\n").replace("\r", "\n"))
    text = _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text)
    return text if len(text) <= most else f"{text[: most - 1]}…"
