"""The user's class, function or ASGI application: imported, constructed, called.

Why apart: this is the whole contract with user code, the same as Ray Serve's. ``import_path`` names a class, whose
instance takes requests in ``__call__`` and may have ``reconfigure(user_config)`` and ``check_health()``; or a function
that takes requests; or an ASGI application. Each may be plain or async. A class whose ``__muster_asgi__`` is an ASGI
application (or a function that returns one) answers HTTP by that; its other methods can be called by handles.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable
from typing import Any, Final, final

from serve_common.errors import BadField
from serve_common.wires.host import ReplicaGoal
from serve_replica_host.replica.import_path import UserCodeUnusable, import_named
from serve_replica_host.replica.lifespan import Lifespan
from serve_replica_host.replica.methods import Method, is_asgi, takes_nothing
from serve_replica_host.replica.plain_threads import PlainThreads

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
