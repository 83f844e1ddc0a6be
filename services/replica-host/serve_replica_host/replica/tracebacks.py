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
_IMPORT: Final = ("<frozen ", str(Path(importlib.__file__).parent))
_LOOPS: Final = tuple(str(Path(module.__file__ or "").parent) for module in (asyncio, concurrent.futures))


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
    above = (_OURS, *_IMPORT, *_LOOPS)
    first = next((at for at, frame in enumerate(frames) if not frame.filename.startswith(above)), len(frames))
    # A frame of asyncio below the user's code says where that code waits; importing says nothing anywhere.
    kept = [frame for frame in frames[first:] if not frame.filename.startswith((_OURS, *_IMPORT))]
    told.stack = traceback.StackSummary.from_list(kept)
    for chained in (told.__cause__, told.__context__):
        if chained is not None and depth < 20:
            _trim(chained, depth + 1)
