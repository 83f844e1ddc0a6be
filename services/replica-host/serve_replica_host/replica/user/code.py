"""The user's class, function or ASGI application: imports, constructs, calls, starts and stops it; sets its context."""

from __future__ import annotations

import asyncio
import gc
import importlib
import inspect
import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, final

import cloudpickle  # type: ignore[import-untyped]  # it ships no hints
import msgspec
import structlog
from opentelemetry import context, trace
from starlette.types import ASGIApp, Message

from serve_common.config.backend import ReplicaConfig
from serve_common.errors import BadField
from serve_common.protocol.code import CodeCorrupt, check_code, strip_header
from serve_common.protocol.frames import CallHead, RequestKind
from serve_common.protocol.reports import ReplicaGoal, ReplicaRank
from serve_common.runtime.request_context import RequestContext, request_context
from serve_common.runtime.tasks import TaskOwner, cancellations
from serve_common.telemetry.request_traces import get_traceparent, get_tracestate, parse_span_context
from serve_common.telemetry.trace_context import (
    TraceParent,
    join_tracestate,
    may_be_sampled,
    parse_traceparent,
)
from serve_replica_host.replica.archives import unpacked_path
from serve_replica_host.replica.io.request import ReplicaRequest
from serve_replica_host.replica.telemetry.traces import Traces, error_line, user_traceback
from serve_replica_host.replica.user.threads import PlainThreads


class UserCodeUnusable(Exception):
    """The code cannot be served, wherever and however often it is started; the message has the reason."""


def add_to_path(app_dir: str) -> None:
    """Put ``app_dir`` first on ``sys.path``, unless it is empty. Raises NotADirectoryError."""
    if not app_dir:
        return
    if not Path(app_dir).is_dir():
        where = f"looked for on the machine {os.uname().nodename}"
        raise NotADirectoryError(
            f"app_dir {app_dir} is not a directory that the replica host can see ({where})"
        )
    if app_dir not in sys.path:
        sys.path.insert(0, app_dir)
        importlib.invalidate_caches()


def enter_archives(config: ReplicaConfig, code_dir: str) -> None:
    """Put the archives' files first on ``sys.path``, and go to the working directory."""
    paths = [str(unpacked_path(Path(code_dir, digest))) for digest in config.archives]
    sys.path[:0] = [path for path in paths if path not in sys.path]
    importlib.invalidate_caches()
    if config.working_dir:
        os.chdir(paths[-1])


def load_code(data: bytes, digest: str) -> tuple[Any, Sequence[Any], Mapping[str, Any]]:
    """The class or function of uploaded code, and its arguments. Unpickling runs code, here as in the constructor.

    Raises `UserCodeUnusable` for code of other versions or another digest, and whatever unpickling raises.
    """
    try:
        body = strip_header(check_code(data, digest), cloudpickle.__version__)
    except (BadField, CodeCorrupt) as error:
        raise UserCodeUnusable(str(error)) from None
    target, args, kwargs = pickle.loads(body)  # noqa: S301 - whoever deploys may run code here
    return target, args, kwargs


def _read(code_dir: str, digest: str) -> bytes:
    return Path(code_dir, digest).read_bytes()


def import_named(import_path: str) -> Any:
    """Import ``module:attribute``. Raises `UserCodeUnusable`, and any exception of the import."""
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
"""Seconds in which a lifespan must return after its last message."""


@final
class Lifespan:
    """The lifespan of an ASGI application; all methods run on the user loop.

    Why in a task of its own: an application's lifespan is one call that stays open between start-up and shutdown, and
    what it opened must be closed by the same task.
    """

    def __init__(self, application: ASGIApp) -> None:
        self.application = application
        self.state: dict[str, Any] = {}
        """State set by the start-up; each request gets a copy."""
        self._is_supported = True
        self._events: asyncio.Queue[Message] = asyncio.Queue()
        self._messages: asyncio.Queue[Message | None] = asyncio.Queue()
        self._failure: BaseException | None = None
        self._tasks = TaskOwner("lifespan")

    async def start(self) -> None:
        """Run the start-up. Raises its exception, or `UserCodeUnusable`."""
        self._tasks.start(self._run(), "run")
        self._events.put_nowait({"type": "lifespan.startup"})
        message = await self._messages.get()
        if message is None:
            # As in all ASGI servers: an application that raises before any lifespan message does not support it.
            self._is_supported = False
            if self._failure is not None and not isinstance(self._failure, Exception):
                raise self._failure  # such as SystemExit: not a lack of support
            if self._failure is not None:
                _log.info("lifespan_unsupported", error=error_line(self._failure))
        elif message["type"] == "lifespan.startup.failed":
            await self._wait_ended()
            if self._failure is not None:
                raise self._failure
            raise UserCodeUnusable(f"the application's start-up failed: {message.get('message', '')}")

    async def stop(self) -> None:
        """Run the shutdown, if the application has one; exceptions are logged."""
        if not self._is_supported:
            return
        self._is_supported = False
        self._events.put_nowait({"type": "lifespan.shutdown"})
        message = await self._messages.get()
        if message is not None:
            await self._wait_ended()
        if message is None or message["type"] != "lifespan.shutdown.complete":
            error_text = "" if self._failure is None else user_traceback(self._failure)
            _log.error("shutdown_failed", error=(message or {}).get("message", ""), traceback=error_text)

    async def _wait_ended(self) -> None:
        """Wait for the application's end: it may still raise after its last message."""
        try:
            async with asyncio.timeout(_END_TIMEOUT_S):
                await self._messages.get()
        except TimeoutError:
            _log.warning("lifespan_did_not_end", timeout_s=_END_TIMEOUT_S)
        await self._tasks.close(_END_TIMEOUT_S)

    async def _run(self) -> None:
        scope = {"type": "lifespan", "asgi": {"version": "3.0", "spec_version": "2.0"}, "state": self.state}
        try:
            await self.application(scope, self._events.get, self._messages.put)
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and cancellations():
                raise
            self._failure = error
        finally:
            self._messages.put_nowait(None)


_ASGI_ARGUMENTS: Final = ["scope", "receive", "send"]


@final
class Method:
    """A callable and its calling convention.

    Why an instance is kept for each method: `inspect` costs more than a whole request.
    """

    __slots__ = ("blocks", "function", "is_async", "takes_argument")

    def __init__(self, function: Callable[..., Any]) -> None:
        called = function if inspect.isroutine(function) else getattr(function, "__call__", function)  # noqa: B004 - the method itself is inspected
        self.function = function
        self.is_async = any(map(inspect.iscoroutinefunction, (function, called)))
        """True when calling it returns a coroutine."""
        is_generator = any(map(inspect.isgeneratorfunction, (function, called))) or any(
            map(inspect.isasyncgenfunction, (function, called, inspect.unwrap(called)))  # `batch` wraps one
        )
        self.blocks = not self.is_async and not is_generator
        """True when it may block while it is called, so it needs a thread."""
        self.takes_argument = _takes_argument(function)


def is_asgi(target: Any) -> bool:
    """True when ``target`` is an ASGI application: called with scope, receive and send."""
    is_instance = callable(target) and not inspect.isclass(target)
    return is_instance and list(_parameters(target) or ())[:3] == _ASGI_ARGUMENTS


def takes_nothing(function: Callable[..., Any]) -> bool:
    """True when ``function`` has no parameters."""
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
            return True  # the call itself raises the error
        return False
    return True


async def _instance(kind: type[Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """An instance of ``kind``, whose constructor may be async, as in Ray Serve."""
    if not inspect.iscoroutinefunction(kind.__init__):
        return kind(*args, **kwargs)
    instance = kind.__new__(kind, *args, **kwargs)
    await kind.__init__(instance, *args, **kwargs)
    return instance


THREADS_MAX: Final = 100
"""Maximum threads of one replica for plain functions; further calls are queued."""
ASGI_ATTRIBUTE: Final = "__muster_asgi__"
_NAMES_MAX: Final = 50
"""Methods that the error of a missing one lists."""


@final
class UserCode:
    """One constructed object or one function. All methods run on the user loop.

    This class is the whole contract with user code, the same as Ray Serve's. ``import_path`` names a class, whose
    instance takes requests in ``__call__`` and may have ``reconfigure(user_config)``, also with ``rank``, and
    ``check_health()``; or a function that takes requests; or an ASGI application. Each may be plain or async. A class
    whose ``__muster_asgi__`` is an ASGI application (or a function that returns one) handles HTTP by that; its other
    methods can be called by handles.
    """

    def __init__(
        self,
        target: Any,
        handler: Callable[..., Any] | None,
        max_concurrent_queries: int,
        asgi: Lifespan | None = None,
    ) -> None:
        """Use `construct`. ``handler`` gets requests without a method name; None if there is none."""
        self.target = target
        self.asgi = asgi
        """The ASGI application that handles HTTP and WebSockets; None when ``handler`` does."""
        self._methods = {} if handler is None else {"": Method(handler)}
        self._threads = _threads(max_concurrent_queries)
        self._reconfigure = method = getattr(target, "reconfigure", None)
        self.takes_rank = callable(method) and "rank" in inspect.signature(method).parameters
        """True when its ``reconfigure`` has a parameter for the rank, and so is called for each new one."""

    @classmethod
    async def construct(
        cls,
        goal: ReplicaGoal,
        app_dir: str,
        on_constructed: Callable[[Any], None] | None = None,
        code_dir: str = "",
    ) -> UserCode:
        """Import and construct, run an ASGI application's start-up, then reconfigure as `reconfigure` says.

        ``on_constructed`` is called with the object once its constructor has returned. ``code_dir`` has what was
        uploaded for it, by digest, with archives unpacked. Raises `UserCodeUnusable`, and what the user's code raises.
        """
        config = goal.replica_config
        init_args: Sequence[Any] = config.init_args
        init_kwargs: Mapping[str, Any] = config.init_kwargs
        add_to_path(app_dir)
        enter_archives(config, code_dir)
        if config.code:
            named, init_args, init_kwargs = load_code(_read(code_dir, config.code), config.code)
        else:
            named = import_named(config.import_path)
        target = named
        if inspect.isclass(named):
            # On the loop's thread, as everything but plain handlers: it may create futures, sessions, tasks.
            target = await _instance(named, init_args, init_kwargs)
        elif init_args or init_kwargs:
            raise UserCodeUnusable(
                f"{config.import_path} is not a class; it takes no init_args or init_kwargs"
            )
        if on_constructed is not None:
            on_constructed(target)
        application = _application(target)
        if application is None and not callable(target) and not inspect.isclass(named):
            raise UserCodeUnusable(f"{config.import_path} is neither a class nor a function")
        handler = target if callable(target) and application is not target else None
        asgi = None if application is None else Lifespan(application)
        code = cls(target, handler, goal.max_concurrent_queries, asgi)
        if asgi is not None:
            await asgi.start()
        await code.reconfigure(goal.user_config, goal.rank)
        return code

    @property
    def streams_bodies(self) -> bool:
        """True when HTTP requests may start with incomplete bodies; plain functions cannot wait for the rest."""
        handler = self._methods.get("")
        return self.asgi is not None or (handler is not None and not handler.blocks)

    def method(self, name: str) -> Method:
        """The method of the user's object named ``name``; empty for the request handler. Raises `BadField`."""
        found = self._methods.get(name)
        return self._find(name) if found is None else found

    async def call(self, *args: Any, method_name: str = "", **kwargs: Any) -> Any:
        """Call the named method, or the request handler. Raises its exceptions, and `BadField`."""
        method = self.method(method_name)
        if method.is_async:
            return await method.function(*args, **kwargs)
        if not method.blocks:
            return method.function(*args, **kwargs)
        return await self.run_plain(method.function, *args, **kwargs)

    async def run_plain(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``function`` in a thread with the context of this request.

        A thread cannot be cancelled: after a cancellation this still waits for the function, so that the request keeps
        its slot as long as it uses the machine.
        """
        result = await self._threads.run(function, *args, **kwargs)
        return await result if inspect.isawaitable(result) else result

    async def reconfigure(self, user_config: Any, rank: ReplicaRank | None = None) -> None:
        """Pass on a ``user_config`` that is not None, and ``rank`` where it is taken. Raises `UserCodeUnusable`."""
        if user_config is None and not self.takes_rank:
            return
        if (method := self._reconfigure) is None:
            raise UserCodeUnusable("user_config is set, but the code has no reconfigure(user_config)")
        await _await_result(method(user_config, rank=rank) if self.takes_rank else method(user_config))

    async def check_health(self) -> None:
        """Run the user's ``check_health``, and raise what it raises; without one, only the loop is checked."""
        method = getattr(self.target, "check_health", None)
        if method is not None:
            await _await_result(method())

    def resize(self, max_concurrent_queries: int) -> None:
        """Resize the thread pool; calls that run in the old one finish there."""
        old, self._threads = self._threads, _threads(max_concurrent_queries)
        old.close()

    async def stop(self) -> None:
        """Run an ASGI application's shutdown (exceptions are logged) and ``__del__``, which may raise."""
        if self.asgi is not None:
            await self.asgi.stop()
        if inspect.isfunction(destructor := getattr(type(self.target), "__del__", None)):
            # It would run again once discarded, or, where something still refers to the object, never.
            type(self.target).__del__ = lambda _: None
            await _await_result(destructor(self.target))

    def discard(self) -> None:
        """Release the user's object, so that what it holds ends before the process exits."""
        self.target = _discarded
        self.asgi = None
        self._methods = {"": Method(_discarded)}
        self._threads.close()
        gc.collect()

    def _find(self, name: str) -> Method:
        may_be_called = name == "__call__" or not name.startswith("__")
        function = getattr(self.target, name, None) if name and may_be_called else None
        if not callable(function):
            names = [known for known in dir(type(self.target)) if not known.startswith("_")][:_NAMES_MAX]
            what = type(self.target).__name__
            missing = f"Tried to call a method {name or '__call__'!r} that does not exist"
            if name in ("", "__call__") and self.asgi is not None:
                raise BadField("method_name", f"{missing}: {what} takes HTTP requests only")
            raise BadField("method_name", f"{missing}. Available methods: {names} of {what}")
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


async def _await_result(result: Any) -> None:
    if inspect.isawaitable(result):
        await result


_NO_CALL = CallHead()


def enter_request(exchange: ReplicaRequest) -> None:
    """Set the context of the running task to the request of ``exchange``."""
    head = exchange.head
    call = head.call or _NO_CALL
    request_context.set(
        RequestContext(
            request_id=head.request_id,
            traceparent=head.traceparent,
            endpoint_tag=head.endpoint_tag,
            route=head.route,
            deadline=exchange.deadline,
            model_id=call.model_id,
            key=exchange.reply,
        )
    )


def enter_trace(exchange: ReplicaRequest, traces: Traces) -> None:
    """Start the spans of ``exchange`` if it is traced, and make them current in the running task."""
    head, tracer = exchange.head, traces.tracer
    traceparent = head.traceparent
    if traceparent and not may_be_sampled(traceparent) and tracer.sampler.respects_parent:
        if tracer.must_enter_unsampled:
            _enter_unsampled(parse_traceparent(traceparent))
        return
    parent = tracer.decide(traceparent)
    if not parent.is_sampled:
        _change_context(traceparent=parent.header)
        if tracer.must_enter_unsampled:
            _enter_unsampled(parent)
        return
    call = head.call or _NO_CALL
    spans = exchange.trace = traces.start(
        parent,
        tracestate=join_tracestate(head.headers),
        kind=head.kind.name.lower(),
        method_name=call.method_name,
        request_id=head.request_id,
        started_at=exchange.started_at,
    )
    decided = get_traceparent(spans.user_code)
    _change_context(traceparent=decided, tracestate=get_tracestate(spans.user_code))
    if head.kind is RequestKind.HTTP or head.kind is RequestKind.WEBSOCKET:
        # Instrumentation of applications reads this header; the client's own would omit all spans between.
        head.headers[:] = [header for header in head.headers if header[0] != b"traceparent"]
        head.headers.append((b"traceparent", decided.encode()))
    _enter(spans.user_code)


def _enter_unsampled(parent: TraceParent | None) -> None:
    if parent is not None:
        _enter(trace.NonRecordingSpan(parse_span_context(parent)))


def _enter(span: trace.Span) -> None:
    """Make ``span`` current until the running task ends."""
    context.attach(trace.set_span_in_context(span))


def _change_context(**changes: str) -> None:
    request = request_context.get()
    if request is not None:
        request_context.set(msgspec.structs.replace(request, **changes))


def on_response_started() -> None:
    """Remove the deadline of the running task's request, because its response has started.

    Why: it bounds the time until then, and a stream may last for hours.
    """
    request = request_context.get()
    if request is not None and request.deadline is not None:
        request_context.set(msgspec.structs.replace(request, deadline=None))
