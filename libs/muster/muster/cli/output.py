"""Text for people on a terminal, lines for logs, JSON for programs: which goes where is decided here.

Results go to standard output and everything else to standard error, so that output can be piped. Only tables are
rendered by rich; texts that come from users (tracebacks, names) are never read as markup.
"""

from __future__ import annotations

import json
import sys
from types import TracebackType
from typing import Any, Self

import msgspec
import typer
from rich.console import Console
from rich.status import Status
from rich.text import Text

_PIPED_WIDTH = 200
"""Columns for tables that no terminal limits."""
_BRIEF_MAX = 160
_TRACEBACK_BEGINS = "Traceback (most recent call last):"


def print_json(value: Any) -> None:
    """One JSON document on standard output."""
    typer.echo(json.dumps(msgspec.to_builtins(value), indent=2, ensure_ascii=False))


def say(text: str) -> None:
    """A line of the result."""
    typer.echo(text)


def complain(text: str) -> None:
    """A line on standard error."""
    typer.echo(text, err=True)


def console() -> Console:
    """Standard output for tables."""
    return Console(width=None if sys.stdout.isatty() else _PIPED_WIDTH, highlight=False)


def brief(text: str) -> str:
    """A long text in one line: of a traceback the exception, which is its last line."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    if not lines:
        return ""
    first = lines[0].replace(_TRACEBACK_BEGINS, "").strip()
    words = first if len(lines) == 1 else f"{first} … {lines[-1]}".removeprefix(" … ")
    return words if len(words) <= _BRIEF_MAX else f"{words[: _BRIEF_MAX - 1]}…"


def short_name(tag: str) -> str:
    """A deployment's name as its user typed it: without the application ``default``."""
    return tag.removeprefix("default/")


class Progress:
    """What is waited for: a live line on a terminal, otherwise a line whenever it changes."""

    def __init__(self, title: str) -> None:
        """``title`` stands before every text."""
        self._title = title
        self._console = Console(stderr=True, highlight=False)
        self._status: Status | None = None
        self._last = ""

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._status = self._console.status(Text(self._title))
            self._status.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """There is something to show now; what is said after this is a line."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def say(self, text: str) -> None:
        """Show what is waited for now; the same text again is not repeated."""
        text = brief(text)
        if not text or text == self._last:
            return
        self._last = text
        line = f"{self._title}: {text}"
        if self._status is not None:
            self._status.update(Text(line))
        else:
            complain(line)
