"""The user's class, function or ASGI application: found, constructed, called, started up and shut down."""

from __future__ import annotations

import asyncio
import gc
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, final

import structlog
from starlette.types import ASGIApp, Message

from serve_common.errors import BadField
from serve_common.protocol.reports import ReplicaGoal
from serve_common.runtime.tasks import TaskOwner, cancellations
from serve_replica_host.replica.telemetry.traces import error_line, user_traceback
from serve_replica_host.replica.user.threads import PlainThreads


class UserCodeUnusable(Exception):
    """What the import path names cannot be served; the message says why."""


def import_named(import_path: str, app_dir: str) -> Any:
    """What ``module:attribute`` names, with ``app_dir`` put first on ``sys.path``; empty for none.

    Raises `UserCodeUnusable` and whatever importing raises.
    """
    if app_dir:
        if not Path(app_dir).is_dir():
            where = f"looked for on the machine {os.uname().nodename}"
            raise UserCodeUnusable(
                f"app_dir {app_dir} is not a directory that the replica host can see ({where})"
            )
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


_log = structlog.get_logger(__name__)

_END_TIMEOUT_S: Final = 5.0
"""For a lifespan that has said that it is done to really end."""


@final
class Lifespan:
    """One application; all methods run on the user loop."""

    def __init__(self, application: ASGIApp) -> None:
        self.application = application
        self.state: dict[str, Any] = {}
        """What the start-up left for requests; each gets a copy."""
        self._is_supported = True
        self._events: asyncio.Queue[Message] = asyncio.Queue()
        self._said: asyncio.Queue[Message | None] = asyncio.Queue()
        self._failure: BaseException | None = None
        self._tasks = TaskOwner("lifespan")

    async def start(self) -> None:
        """Returns when the application has started. Raises what its start-up raises, or `UserCodeUnusable`."""
        self._tasks.start(self._run(), "run")
        self._events.put_nowait({"type": "lifespan.startup"})
        said = await self._said.get()
        if said is None:
            # As every ASGI server has it: who raises before a word about lifespan does not know the protocol.
            self._is_supported = False
            if self._failure is not None and not isinstance(self._failure, Exception):
                raise self._failure  # that says no more than that it wants to end
            if self._failure is not None:
                _log.info("lifespan_unsupported", error=error_line(self._failure))
        elif said["type"] == "lifespan.startup.failed":
            await self._ended()
            if self._failure is not None:
                raise self._failure
            raise UserCodeUnusable(f"the application's start-up failed: {said.get('message', '')}")

    async def stop(self) -> None:
        """Run the shutdown, if the application has one; what it raises is logged."""
        if not self._is_supported:
            return
        self._is_supported = False
        self._events.put_nowait({"type": "lifespan.shutdown"})
        said = await self._said.get()
        if said is not None:
            await self._ended()
        if said is None or said["type"] != "lifespan.shutdown.complete":
            told = "" if self._failure is None else user_traceback(self._failure)
            _log.error("shutdown_failed", error=(said or {}).get("message", ""), traceback=told)

    async def _ended(self) -> None:
        """After its last word an application may still raise what it was about."""
        try:
            async with asyncio.timeout(_END_TIMEOUT_S):
                await self._said.get()
        except TimeoutError:
            _log.warning("lifespan_did_not_end", timeout_s=_END_TIMEOUT_S)
        await self._tasks.close(_END_TIMEOUT_S)

    async def _run(self) -> None:
        scope = {"type": "lifespan", "asgi": {"version": "3.0", "spec_version": "2.0"}, "state": self.state}
        try:
            await self.application(scope, self._events.get, self._said.put)
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and cancellations():
                raise
            self._failure = error
        finally:
            self._said.put_nowait(None)


_ASGI_ARGUMENTS: Final = ["scope", "receive", "send"]


@final
class Method:
    """A callable, and how to call it."""

    __slots__ = ("blocks", "function", "is_async", "takes_argument")

    def __init__(self, function: Callable[..., Any]) -> None:
        called = function if inspect.isroutine(function) else getattr(function, "__call__", function)  # noqa: B004 - it is the method that is asked about
        self.function = function
        self.is_async = any(map(inspect.iscoroutinefunction, (function, called)))
        """Calling it gives a coroutine."""
        is_generator = any(
            inspect.isgeneratorfunction(one) or inspect.isasyncgenfunction(one) for one in (function, called)
        )
        self.blocks = not self.is_async and not is_generator
        """It runs when it is called, for as long as it likes; so it needs a thread."""
        self.takes_argument = _takes_argument(function)


def is_asgi(target: Any) -> bool:
    """Whether ``target`` is an ASGI application: called with scope, receive and send."""
    if not callable(target) or inspect.isclass(target):
        return False
    return list(_parameters(target) or ())[:3] == _ASGI_ARGUMENTS


def takes_nothing(function: Callable[..., Any]) -> bool:
    """Whether ``function`` has no parameters at all."""
    return _parameters(function) == []


def _parameters(function: Callable[..., Any]) -> list[str] | None:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # some built-in callables have none
        return None


def _takes_argument(function: Callable[..., Any]) -> bool:
    try:
        signature = inspect.signature(function)
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


THREADS_MAX: Final = 100
"""Of one replica for plain functions; what exceeds it waits for a thread."""
ASGI_ATTRIBUTE: Final = "__muster_asgi__"


@final
class UserCode:
    """One constructed object or one function. All methods run on the user loop."""

    def __init__(
        self,
        target: Any,
        handler: Callable[..., Any] | None,
        max_concurrent_queries: int,
        asgi: Lifespan | None = None,
    ) -> None:
        """Use `construct`. ``handler`` takes what comes without a method's name; None when nothing does."""
        self.target = target
        self.asgi = asgi
        """The ASGI application that answers HTTP and WebSockets; None when ``handler`` does."""
        self._methods = {} if handler is None else {"": Method(handler)}
        self._threads = _threads(max_concurrent_queries)

    @classmethod
    async def construct(
        cls, goal: ReplicaGoal, app_dir: str, on_constructed: Callable[[Any], None] | None = None
    ) -> UserCode:
        """Import and construct, run an ASGI application's start-up, then reconfigure when there is a user_config.

        ``on_constructed`` is called with the object as soon as its constructor has returned.
        Raises `UserCodeUnusable` and whatever the user's code raises.
        """
        config = goal.replica_config
        named = import_named(config.import_path, app_dir)
        target = named
        if inspect.isclass(named):
            # On the loop's thread, as everything that is not a plain handler: it may make futures, sessions, tasks.
            target = named(*config.init_args, **config.init_kwargs)
        elif config.init_args or config.init_kwargs:
            raise UserCodeUnusable(
                f"{config.import_path} is not a class; it takes no init_args or init_kwargs"
            )
        if on_constructed is not None:
            on_constructed(target)
        application = _application(target)
        if application is None and not callable(target):
            what = "has no __call__" if inspect.isclass(named) else "is neither a class nor a function"
            raise UserCodeUnusable(f"{config.import_path} {what}")
        handler = target if callable(target) and application is not target else None
        asgi = None if application is None else Lifespan(application)
        code = cls(target, handler, goal.max_concurrent_queries, asgi)
        if asgi is not None:
            await asgi.start()
        if goal.user_config is not None:
            await code.reconfigure(goal.user_config)
        return code

    @property
    def streams_bodies(self) -> bool:
        """Whether HTTP requests may begin before their bodies are whole; plain functions cannot wait for the rest."""
        handler = self._methods.get("")
        return self.asgi is not None or (handler is not None and not handler.blocks)

    def method(self, name: str) -> Method:
        """The method of the user's object with that name; empty is what takes requests. Raises `BadField`."""
        found = self._methods.get(name)
        return self._find(name) if found is None else found

    async def call(self, *args: Any, method_name: str = "", **kwargs: Any) -> Any:
        """What the named method, or what takes requests, returns; raises what it raises, and `BadField`.

        One argument is left out where the code takes none.
        """
        method = self.method(method_name)
        if len(args) == 1 and not kwargs and not method.takes_argument:
            args = ()
        if method.is_async:
            return await method.function(*args, **kwargs)
        if not method.blocks:
            return method.function(*args, **kwargs)
        return await self.run_plain(method.function, *args, **kwargs)

    async def run_plain(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What ``function`` returns, called in a thread with the context of this request.

        Cancelling cannot stop a thread: then this ends when the function does, so that the request keeps its slot as
        long as it really uses the machine.
        """
        result = await self._threads.run(function, *args, **kwargs)
        return await result if inspect.isawaitable(result) else result

    async def reconfigure(self, user_config: Any) -> None:
        """Apply ``user_config``; raises `UserCodeUnusable` when the code cannot be reconfigured."""
        method = getattr(self.target, "reconfigure", None)
        if method is None:
            raise UserCodeUnusable("user_config is set, but the code has no reconfigure(user_config)")
        await _finished(method(user_config))

    async def check_health(self) -> None:
        """Raises what the user's ``check_health`` raises; without one, that this runs is the check."""
        method = getattr(self.target, "check_health", None)
        if method is not None:
            await _finished(method())

    def resize(self, max_concurrent_queries: int) -> None:
        """Use as many threads from now on; what runs in the old ones finishes there."""
        old, self._threads = self._threads, _threads(max_concurrent_queries)
        old.close()

    async def stop(self) -> None:
        """Run an ASGI application's shutdown; what it raises is logged."""
        if self.asgi is not None:
            await self.asgi.stop()

    def discard(self) -> None:
        """Let go of the user's object, so that its ``__del__`` runs before the process ends."""
        self.target = _discarded
        self.asgi = None
        self._methods = {"": Method(_discarded)}
        self._threads.close()
        gc.collect()

    def _find(self, name: str) -> Method:
        public = name == "__call__" or not name.startswith("_")
        function = getattr(self.target, name, None) if name and public else None
        if not callable(function):
            what = type(self.target).__name__
            asked = repr(name) if name else "__call__"
            reason = "is private" if not public else f"is no method of {what}"
            if name in ("", "__call__") and self.asgi is not None:
                reason = f"is no method of {what}, which takes HTTP requests only"
            raise BadField("method_name", f"{asked} {reason}")
        if name == "__call__" and self._methods.get("") is None:
            raise BadField("method_name", f"{type(self.target).__name__} takes HTTP requests only")
        method = self._methods[name] = Method(function)
        return method


async def _discarded(*_: Any) -> None:
    raise UserCodeUnusable("the replica has stopped")


def _application(target: Any) -> Any:
    """The ASGI application in ``target``; None when there is none."""
    ingress = getattr(target, ASGI_ATTRIBUTE, None)
    if ingress is not None:
        return ingress() if takes_nothing(ingress) else ingress
    return target if is_asgi(target) else None


def _threads(max_concurrent_queries: int) -> PlainThreads:
    return PlainThreads(min(max_concurrent_queries, THREADS_MAX))


async def _finished(result: Any) -> None:
    if inspect.isawaitable(result):
        await result
