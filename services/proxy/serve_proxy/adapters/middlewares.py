"""Middlewares of users: imported by name, checked, and put around a handler.

Why a thread of their own: an import may take seconds and must not hold up requests. It is a daemon, because one that
hangs can neither be ended nor may it keep the process from ending.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from aiohttp import web

from serve_proxy.shell.live_options import MiddlewareRefused

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
Middleware = Callable[[web.BaseRequest, Handler], Awaitable[web.StreamResponse]]
Middlewares = tuple[Middleware, ...]

NO_MIDDLEWARES: Final[Middlewares] = ()


def add_directory(directory: str) -> None:
    """Let modules in ``directory`` be imported, after all others."""
    if directory not in sys.path:
        sys.path.append(directory)


def compose(middlewares: Sequence[Middleware], handler: Handler) -> Handler:
    """``handler`` with ``middlewares`` around it, the first outermost."""
    for middleware in reversed(middlewares):
        handler = _around(middleware, handler)
    return handler


def _around(middleware: Middleware, handler: Handler) -> Handler:
    return lambda request: middleware(request, handler)


async def load_middlewares(paths: Sequence[str]) -> Middlewares:
    """Import what ``paths`` (``module:attribute``) name, in a thread. Raises `MiddlewareRefused` naming the path."""
    loop = asyncio.get_running_loop()
    loaded: asyncio.Future[Middlewares] = loop.create_future()

    def deliver(outcome: Middlewares | MiddlewareRefused) -> None:
        if loaded.done():
            return
        if isinstance(outcome, MiddlewareRefused):
            loaded.set_exception(outcome)
        else:
            loaded.set_result(outcome)

    def work() -> None:
        outcome: Middlewares | MiddlewareRefused
        try:
            importlib.invalidate_caches()  # files may have come since the last import
            outcome = tuple(_import(path) for path in paths)
        except MiddlewareRefused as error:
            outcome = error
        except Exception as error:  # noqa: BLE001 - whoever waits is told
            outcome = MiddlewareRefused(f"{', '.join(paths)}: {type(error).__name__}: {error}")
        # The loop may have ended in the meantime; then nobody wants to know.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(deliver, outcome)

    threading.Thread(target=work, name="import_middlewares", daemon=True).start()
    return await loaded


def _import(path: str) -> Middleware:
    module_name, _, attribute = path.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
        for name in attribute.split("."):
            found = getattr(found, name)
    except BaseException as error:
        # User code runs here, and what it raises, SystemExit included, is an answer like any other.
        raise MiddlewareRefused(f"{path}: {type(error).__name__}: {error}") from error
    reason = _why_none(found)
    if reason:
        raise MiddlewareRefused(f"{path}: {reason}; it must be `async def middleware(request, handler)`")
    middleware: Middleware = found
    return middleware


def _why_none(found: Any) -> str | None:
    """Why ``found`` cannot be a middleware; None when it can."""
    if inspect.isclass(found) or not callable(found):
        return "is a class" if inspect.isclass(found) else f"is of type {type(found).__name__}"
    if not inspect.iscoroutinefunction(found) and not inspect.iscoroutinefunction(type(found).__call__):
        return "is not async"
    try:
        inspect.signature(found).bind(None, None)
    except (TypeError, ValueError) as error:
        return f"cannot be called with a request and a handler ({error})"
    return None
