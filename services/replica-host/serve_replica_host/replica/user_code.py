"""The user's class or function: imported, constructed, called.

Why apart: this is the whole contract with user code, the same as Ray Serve's. ``import_path`` names a class, whose
instance takes requests in ``__call__`` and may have ``reconfigure(user_config)`` and ``check_health()``, or a function
that takes requests. Each may be plain or async.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import gc
import importlib
import inspect
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, final

from serve_common.wires.host import ReplicaGoal

THREADS_MAX: Final = 100
"""Of one replica for plain functions; what exceeds it waits for a thread."""


class UserCodeUnusable(Exception):
    """What the import path names cannot be served; the message says why."""


@final
class UserCode:
    """One constructed class or one function. All methods run on the user loop."""

    def __init__(self, target: Any, handler: Callable[..., Any], max_concurrent_queries: int) -> None:
        """Use `construct`."""
        self._target = target
        self._handler = handler
        self._is_async = _is_async(handler)
        self._takes_request = _takes_argument(handler)
        self._threads = _threads(max_concurrent_queries)

    @classmethod
    async def construct(cls, goal: ReplicaGoal, app_dir: str) -> UserCode:
        """Import and construct, then reconfigure when there is a user_config.

        Raises `UserCodeUnusable` and whatever the user's code raises.
        """
        config = goal.replica_config
        named = _import(config.import_path, app_dir)
        target = named
        if inspect.isclass(named):
            # On the loop's thread, as everything that is not a plain handler: it may make futures, sessions, tasks.
            target = named(*config.init_args, **config.init_kwargs)
        elif config.init_args or config.init_kwargs:
            raise UserCodeUnusable(
                f"{config.import_path} is not a class; it takes no init_args or init_kwargs"
            )
        if not callable(target):
            what = "has no __call__" if inspect.isclass(named) else "is neither a class nor a function"
            raise UserCodeUnusable(f"{config.import_path} {what}")
        code = cls(target, target, goal.max_concurrent_queries)
        if goal.user_config is not None:
            await code.reconfigure(goal.user_config)
        return code

    async def call(self, argument: Any) -> Any:
        """What the user's code returns for ``argument``; raises what it raises.

        A plain function runs in a thread. Cancelling cannot stop a thread: then this ends when the function does,
        so that the request keeps its slot as long as it really uses the machine.
        """
        arguments = (argument,) if self._takes_request else ()
        if self._is_async:
            return await self._handler(*arguments)
        call = functools.partial(contextvars.copy_context().run, self._handler, *arguments)
        result = await _outcome(self._threads.submit(call))
        return await result if inspect.isawaitable(result) else result

    async def reconfigure(self, user_config: Any) -> None:
        """Apply ``user_config``; raises `UserCodeUnusable` when the code cannot be reconfigured."""
        method = getattr(self._target, "reconfigure", None)
        if method is None:
            raise UserCodeUnusable("user_config is set, but the code has no reconfigure(user_config)")
        await _finished(method(user_config))

    async def check_health(self) -> None:
        """Raises what the user's ``check_health`` raises; without one, that this runs is the check."""
        method = getattr(self._target, "check_health", None)
        if method is not None:
            await _finished(method())

    def resize(self, max_concurrent_queries: int) -> None:
        """Use as many threads from now on; what runs in the old ones finishes there."""
        old, self._threads = self._threads, _threads(max_concurrent_queries)
        old.shutdown(wait=False)

    def discard(self) -> None:
        """Let go of the user's object, so that its ``__del__`` runs before the process ends."""
        self._target = self._handler = _discarded
        self._threads.shutdown(wait=False, cancel_futures=True)
        gc.collect()


def _discarded(*_: Any) -> None:
    raise UserCodeUnusable("the replica has stopped")


def _threads(max_concurrent_queries: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(max_concurrent_queries, THREADS_MAX), thread_name_prefix="user")


async def _outcome(work: Future[Any]) -> Any:
    try:
        return await asyncio.wrap_future(work)
    except asyncio.CancelledError:
        while not work.done():
            await asyncio.wait([asyncio.wrap_future(work)])
        raise


async def _finished(result: Any) -> None:
    if inspect.isawaitable(result):
        await result


def _import(import_path: str, app_dir: str) -> Any:
    if app_dir:
        if not Path(app_dir).is_dir():
            raise UserCodeUnusable(f"app_dir {app_dir} is not a directory that the replica host can see")
        if app_dir not in sys.path:
            sys.path.insert(0, app_dir)
            importlib.invalidate_caches()
    module_name, _, attribute = import_path.partition(":")
    found: Any = importlib.import_module(module_name)
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise UserCodeUnusable(f"{module_name} ({_origin(module_name)}) has no {attribute}")
        found = getattr(found, part)
    return found


def _origin(module_name: str) -> str:
    return getattr(sys.modules.get(module_name), "__file__", None) or "built in"


def _is_async(handler: Callable[..., Any]) -> bool:
    if inspect.iscoroutinefunction(handler):
        return True
    return not inspect.isroutine(handler) and inspect.iscoroutinefunction(getattr(handler, "__call__", None))  # noqa: B004 - it is the method that is asked about


def _takes_argument(handler: Callable[..., Any]) -> bool:
    try:
        signature = inspect.signature(handler)
    except (TypeError, ValueError):  # some built-in callables have none
        return True
    try:
        signature.bind(object())
    except TypeError:
        try:
            signature.bind()
        except TypeError:
            return True  # let the call itself say what is wrong
        return False
    return True
