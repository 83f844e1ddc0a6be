"""Letting go of a model, so that its memory is free before the next one is loaded.

Why not simply forget it: a model may have connections or processes to end (``aclose``), its ``__del__`` may take long
and must not hold up the event loop, and one that is part of a reference cycle stays until somebody looks for cycles.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import weakref
from typing import Any, Final

import structlog

from serve_common.tasks import cancellations

_log = structlog.get_logger(__name__)

CLOSE_TIMEOUT_S: Final = 30.0


async def close_model(model_id: str, held: list[Any]) -> None:
    """Close the only model in ``held`` and let go of it; ``held`` is empty afterwards.

    An ``aclose()`` or an async ``__del__`` is awaited; a plain ``__del__`` is called by Python itself, once, in a
    thread. What they raise is logged: nobody waits for it.
    """
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await _close(held[0])
    except BaseException as error:
        if isinstance(error, asyncio.CancelledError) and cancellations():
            raise
        _log.exception("model_not_closed", model_id=model_id, error=repr(error))
    if await asyncio.to_thread(_let_go, held):
        _log.info("model_still_referenced", model_id=model_id)


async def _close(model: Any) -> None:
    kind = type(model)
    if inspect.iscoroutinefunction(getattr(kind, "aclose", None)):
        await model.aclose()
    if inspect.iscoroutinefunction(getattr(kind, "__del__", None)):
        try:
            await model.__del__()
        finally:
            # Python will call it too, and a coroutine that nobody awaits would be all that came of it.
            with contextlib.suppress(TypeError):
                quiet = {"__slots__": (), "__del__": lambda _: None, "__module__": kind.__module__}
                model.__class__ = type(kind.__name__, (kind,), quiet)


def _let_go(held: list[Any]) -> bool:
    """True when somebody else still has it."""
    try:
        reference = weakref.ref(held[0])
    except TypeError:
        held.clear()
        return False
    held.clear()
    if reference() is not None:
        gc.collect()
    return reference() is not None
