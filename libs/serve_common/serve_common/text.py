"""Texts that are too long for where they go."""

from __future__ import annotations


def truncate(text: str, length_max: int) -> str:
    """At most ``length_max`` characters of ``text``: its beginning, and an ellipsis where the rest was."""
    return text if len(text) <= length_max else f"{text[: length_max - 1]}…"


def truncate_start(text: str, length_max: int) -> str:
    """As `truncate`, but its end, such as the exception below a traceback."""
    return text if len(text) <= length_max else f"…{text[-(length_max - 1) :]}"
