"""A text stream that turns what is written to it into whole lines, each handed to a function.

Why for each thread apart: `print` writes its text and its newline one after the other, and lines of two threads must
not mix. What a terminal would overwrite after a carriage return (progress bars) is overwritten here as well.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterable
from typing import Any, Final, TextIO, final

UNENDED_LENGTH_MAX: Final = 64 * 1024
"""Characters that wait for the end of their line; what is longer is handed on as it is."""


@final
class CaughtPrints(io.TextIOBase):
    """In place of ``sys.stdout`` or ``sys.stderr``."""

    def __init__(self, original: TextIO, take: Callable[[str], None], on_flush: Callable[[], None]) -> None:
        """``take`` gets each line without its end. What is asked of the stream itself ``original`` answers."""
        self._original = original
        self._take = take
        self._on_flush = on_flush
        self._unended: dict[int, str] = {}
        self.buffer = _CaughtBytes(self)

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    @property
    def errors(self) -> str:  # type: ignore[override]
        return "backslashreplace"

    @property
    def name(self) -> Any:
        return getattr(self._original, "name", "<caught>")

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        thread = threading.get_ident()
        *whole, rest = text.split("\n")
        unended = self._unended.pop(thread, "") if self._unended else ""
        if whole:
            self._hand_on(unended + whole[0])
            for line in whole[1:]:
                self._hand_on(line)
            unended = ""
        unended += rest
        if "\r" in rest:
            # All but what a terminal would still show.
            unended = unended[unended.rstrip("\r").rfind("\r") + 1 :]
        if len(unended) > UNENDED_LENGTH_MAX:
            self._hand_on(unended)
        elif unended:
            self._unended[thread] = unended
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:  # type: ignore[override]
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        self._on_flush()

    def end(self) -> None:
        """Hand on what has no end."""
        while self._unended:
            _, unended = self._unended.popitem()
            self._hand_on(unended)

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return self._original.fileno()

    def close(self) -> None:
        """Nothing: who closes standard output means its own use of it."""

    def _hand_on(self, line: str) -> None:
        line = line.rstrip("\r").rpartition("\r")[2]
        if line:
            self._take(line)


@final
class _CaughtBytes(io.RawIOBase):
    """``sys.stdout.buffer``."""

    def __init__(self, text: CaughtPrints) -> None:
        self._text = text

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return len(data) if self._text.write(bytes(data).decode(errors="backslashreplace")) >= 0 else 0

    def fileno(self) -> int:
        return self._text.fileno()

    def flush(self) -> None:
        self._text.flush()

    def close(self) -> None:
        """As for `CaughtPrints`."""
