"""User tracebacks as users want to read them: their own frames, without ours above.

Why: what a deploy prints when a constructor raises is the first thing a user of this system debugs with.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import importlib
import traceback
from pathlib import Path
from typing import Final

from serve_common.wires.host import ERROR_LENGTH_MAX

ERROR_LINE_LENGTH_MAX: Final = 1_000

_OURS: Final = str(Path(__file__).parent.parent)
_MACHINERY: Final = tuple(
    str(Path(module.__file__ or "").parent) for module in (asyncio, concurrent.futures, importlib)
)


def _is_machinery(filename: str) -> bool:
    return filename.startswith((_OURS, "<frozen ", *_MACHINERY))


def error_line(error: BaseException) -> str:
    """``ValueError: what it says``, on at most `ERROR_LINE_LENGTH_MAX` characters."""
    said = str(error)
    line = f"{type(error).__name__}: {said}" if said else type(error).__name__
    return line if len(line) <= ERROR_LINE_LENGTH_MAX else f"{line[: ERROR_LINE_LENGTH_MAX - 1]}…"


def user_traceback(error: BaseException) -> str:
    """The traceback of ``error`` and its causes from the user's first frame on; the end is kept if it is long."""
    told = traceback.TracebackException.from_exception(error, limit=-100)
    _trim(told, depth=0)
    text = "".join(told.format()).rstrip()
    return text if len(text) <= ERROR_LENGTH_MAX else "…" + text[-(ERROR_LENGTH_MAX - 1) :]


def _trim(told: traceback.TracebackException, depth: int) -> None:
    frames = list(told.stack)
    first = next((at for at, frame in enumerate(frames) if not _is_machinery(frame.filename)), len(frames))
    # Only above the user's code: a frame of asyncio below it says where the user's code waits.
    kept = [frame for frame in frames[first:] if not frame.filename.startswith((_OURS, "<frozen "))]
    told.stack = traceback.StackSummary.from_list(kept)
    for chained in (told.__cause__, told.__context__):
        if chained is not None and depth < 20:
            _trim(chained, depth + 1)
