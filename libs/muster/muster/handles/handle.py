"""Deployment handles, and the responses that `remote()` returns."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from typing import Any, Final, NoReturn, final

import msgspec

from muster.handles.calls import (
    NO_MORE,
    NOTHING_YET,
    ArgumentSources,
    CallOutcome,
    HandleCall,
    ItemStream,
    bind_to_request,
    start_call,
)
from muster.handles.options import HandleOptions, RequestCancelled, check_options, compute_deadline
from muster.handles.pickles import pickle_arguments, pickle_one, to_exception, unpickle
from muster.handles.runtime import runtime
from muster.handles.wakeups import check_not_on_loop, make_waiter, wait_in_thread
from serve_common.clock import SystemClock
from serve_common.dispatch.errors import ResponseUnusable
from serve_common.errors import ServeError
from serve_common.names import DEFAULT_APPLICATION, check_name
from serve_common.protocol.frames import CallHead
from serve_common.runtime.request_context import current_replica, request_context
from serve_common.telemetry.request_traces import process_tracer


class _Response:
    """Base of both kinds of responses."""

    def __init__(self, call: HandleCall) -> None:
        self._call = call

    @property
    def request_id(self) -> str:
        """The id of the request in the logs of all replicas."""
        return self._call.request_id

    def cancel(self) -> None:
        """Cancel the call: the replica's task is cancelled at once. Does nothing when the response has arrived."""
        self._call.cancel()

    def cancelled(self) -> bool:
        """True once the call has ended because it was cancelled."""
        outcome = self._call.outcome
        return outcome is not None and isinstance(outcome.failure, RequestCancelled)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be pickled; pass it to remote() as an argument by itself, "
            "or await it first when it stands within another value"
        )


@final
class DeploymentResponse(_Response):
    """The response of one call: ``await response``, any number of times, or ``response.result()``.

    Passed directly as an argument of another ``remote()``, it is awaited and replaced by its value. An exception of the
    deployment is raised here, with its remote traceback as a note; other failures raise a `ServeError`.
    """

    def __init__(self, call: HandleCall) -> None:
        """Created by `DeploymentHandle.remote`."""
        super().__init__(call)
        self._value: Any = None
        self._error: Exception | None = None
        self._is_read = False

    @property
    def call(self) -> HandleCall:
        """The underlying call; for `DeploymentHandle`."""
        return self._call

    def __await__(self) -> Generator[Any, None, Any]:
        call = self._call
        if call.outcome is None:
            waiter, waker = make_waiter()
            call.add_done_waker(waker)
            try:
                yield from waiter.__await__()
            except asyncio.CancelledError:
                call.cancel()
                raise
        return self._read()

    def result(self, timeout_s: float | None = None) -> Any:
        """Block until the response has arrived.

        Raises TimeoutError after ``timeout_s`` (the call goes on), and RuntimeError on the thread of a running event
        loop, which would wait for itself.
        """
        call = self._call
        if not wait_in_thread(call.wakers, lambda: call.outcome is not None, timeout_s):
            raise TimeoutError(f"no answer within {timeout_s:g} s")
        return self._read()

    def _read(self) -> Any:
        if not self._is_read:
            outcome = self._call.outcome
            assert outcome is not None
            self._take(outcome)
            self._is_read = True
        if self._error is not None:
            raise self._error.with_traceback(None)
        return self._value

    def _take(self, outcome: CallOutcome) -> None:
        if outcome.failure is not None:
            self._error = to_exception(outcome.failure)
            return
        assert outcome.body is not None
        try:
            self._value = unpickle(outcome.body)
        except ResponseUnusable as error:
            self._error = to_exception(error)


@final
class DeploymentResponseGenerator(_Response):
    """The items of a streamed response: ``async for`` on a loop, ``for`` in a plain thread; each item is read once.

    Dropping it before its end cancels the call.
    """

    def __init__(self, call: HandleCall, items: ItemStream) -> None:
        """Created by `DeploymentHandle.remote`."""
        super().__init__(call)
        self._items = items

    def __await__(self) -> NoReturn:
        raise TypeError("a streamed answer is not awaited: use `async for`, or `await anext(response)`")

    def result(self, timeout_s: float | None = None) -> NoReturn:  # noqa: ARG002 - the signature of DeploymentResponse
        """Raises TypeError: there is no single result."""
        raise TypeError("a streamed answer has no single result: use `for`, or `next(response)`")

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        while (item := self._next()) is NOTHING_YET:
            waiter, waker = make_waiter()
            self._items.wakers.add(waker)
            if self._items.has_data:
                continue
            try:
                await waiter
            except asyncio.CancelledError:
                self._call.cancel()
                raise
        if item is NO_MORE:
            raise StopAsyncIteration
        return item

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        check_not_on_loop()
        items = self._items
        while (item := self._next()) is NOTHING_YET:
            wait_in_thread(items.wakers, lambda: items.has_data, None)
        if item is NO_MORE:
            raise StopIteration
        return item

    def _next(self) -> Any:
        try:
            return self._items.next_item()
        except ServeError as error:
            raise to_exception(error) from None

    def __del__(self) -> None:
        self._call.cancel()


_DEFAULTS: Final = HandleOptions()
_clock: Final = SystemClock()


@final
class _Unset(msgspec.Struct, frozen=True):
    """Type of the default of an option that is not given."""


_UNSET: Any = _Unset()


@final
class DeploymentHandle:
    """Calls one deployment: ``handle.remote(…)`` calls ``__call__``, ``handle.method.remote(…)`` another method.

    Why it has names and options only: handles are pickled into replicas, kept over redeployments, and created by the
    thousand.
    """

    def __init__(
        self,
        deployment_name: str,
        app_name: str,
        options: HandleOptions = _DEFAULTS,
        *,
        post: Callable[[HandleCall], None] | None = None,
    ) -> None:
        """Use `get_deployment_handle` or `get_app_handle`. An empty ``deployment_name`` means the application's
        ingress. ``post`` takes calls instead of the process' router, in local testing mode.
        """
        self._post = post
        self._deployment_name = deployment_name
        self._app_name = app_name
        self._options = options
        self._endpoint = f"{app_name}/{deployment_name}"
        self._head = CallHead(options.method_name, options.model_id, options.stream)

    @property
    def deployment_name(self) -> str:
        """Name of the deployment; empty for the ingress of its application."""
        return self._deployment_name

    @property
    def app_name(self) -> str:
        """The application that the deployment belongs to."""
        return self._app_name

    def remote(self, *args: Any, **kwargs: Any) -> DeploymentResponse | DeploymentResponseGenerator:
        """Call the deployment with these arguments; returns at once.

        A `DeploymentResponse` passed directly as an argument is awaited and replaced by its value. Within a request the
        call inherits the request's id and deadline, and is cancelled with it.

        Raises what pickling the arguments raises, `LimitReached` when they are too large, and `BusUnavailable` when no
        stack is found.
        """
        options = self._options
        now = time.monotonic()
        unix_now = 0.0 if options.absolute_slo_ms is None else _clock.now()
        context = request_context.get()
        replica = current_replica()
        body, sources = _build_body(args, kwargs)
        post = runtime().post if self._post is None else self._post
        traceparent = "" if context is None else context.traceparent
        tracer = process_tracer()
        trace = None
        if tracer is not None:
            trace, traceparent = start_call(tracer, context, self._endpoint, options.method_name)
        call = HandleCall(
            endpoint=self._endpoint,
            head=self._head,
            body=body,
            sources=sources,
            shard_key=options.shard_key,
            is_repeatable=options.is_repeatable,
            deadline=compute_deadline(options, None if context is None else context.deadline, now, unix_now),
            request_id=uuid.uuid4().hex if context is None else context.request_id,
            traceparent=traceparent,
            trace=trace,
            code_versions=None if replica is None else replica.peer_versions,
            post=post,
        )
        bind_to_request(call)
        post(call)
        if sources is not None:
            for source in sources.calls():
                source.add_done_waker(lambda: post(call))
        return (
            DeploymentResponse(call) if call.items is None else DeploymentResponseGenerator(call, call.items)
        )

    def options(
        self,
        *,
        method_name: str = _UNSET,
        multiplexed_model_id: str = _UNSET,
        stream: bool = _UNSET,
        shard_key: str = _UNSET,
        session_id: str = _UNSET,
        timeout_s: float | None = _UNSET,
        relative_slo_ms: float | None = _UNSET,
        absolute_slo_ms: float | None = _UNSET,
        idempotent: bool = _UNSET,
        _prefer_local_routing: bool = _UNSET,
    ) -> DeploymentHandle:
        """Return a handle for the same deployment with changed options; others stay. Raises `BadField`.

        ``shard_key``: calls with the same key go to the same backend and replica; ``session_id`` is Ray Serve's name
        for it. ``timeout_s``, ``relative_slo_ms`` and ``absolute_slo_ms`` (since 1970): the response must start by
        then; the earliest counts. ``idempotent``: the call may be sent again when its replica dies.
        """
        overrides = {
            "method_name": method_name,
            "model_id": multiplexed_model_id,
            "stream": stream,
            "shard_key": shard_key if shard_key is not _UNSET else session_id,
            "timeout_s": timeout_s,
            "relative_slo_ms": relative_slo_ms,
            "absolute_slo_ms": absolute_slo_ms,
            "is_repeatable": idempotent,
        }
        changed = {name: value for name, value in overrides.items() if value is not _UNSET}
        options = check_options(msgspec.structs.replace(self._options, **changed))
        return DeploymentHandle(self._deployment_name, self._app_name, options, post=self._post)

    def __getattr__(self, name: str) -> DeploymentHandle:
        if name.startswith("_"):
            raise AttributeError(name)
        handle = self.options(method_name=name)
        self.__dict__[name] = handle  # later lookups find it without __getattr__
        return handle

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        names = (self._deployment_name, self._app_name, self._options)
        if self._post is None:
            return DeploymentHandle, names
        _local_posts[id(self._post)] = self._post
        return _local_handle, (*names, id(self._post))

    def __repr__(self) -> str:
        method = f", method_name={self._options.method_name!r}" if self._options.method_name else ""
        return f"DeploymentHandle({self._endpoint!r}{method})"


_local_posts: Final[dict[int, Callable[[HandleCall], None]]] = {}
"""What handles of local testing mode were pickled with; such a pickle is of use in this process only."""


def _local_handle(deployment_name: str, app_name: str, options: HandleOptions, post: int) -> DeploymentHandle:
    return DeploymentHandle(deployment_name, app_name, options, post=_local_posts[post])


def get_deployment_handle(deployment_name: str, app_name: str | None = None) -> DeploymentHandle:
    """Return a handle for a deployment, which need not exist yet; ``application/deployment`` gives both names.

    ``app_name`` defaults to the own application in a replica, elsewhere to ``default``. Raises `BadField` for an
    invalid name.
    """
    if app_name is None and "/" in deployment_name:
        app_name, _, deployment_name = deployment_name.partition("/")
    if app_name is None:
        replica = current_replica()
        app_name = DEFAULT_APPLICATION if replica is None else replica.backend_tag.partition("/")[0]
    check_name(app_name, "app_name")
    return DeploymentHandle(check_name(deployment_name, "deployment_name"), app_name)


def get_app_handle(name: str) -> DeploymentHandle:
    """Return a handle for the ingress of an application: its only deployment, or the one that has a route.

    The ingress is resolved for each call. Raises `BadField` for an invalid name.
    """
    return DeploymentHandle("", check_name(name, "name"))


def _build_body(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bytes, ArgumentSources | None]:
    """The body, or the arguments to build it from once other calls have ended."""
    for value in args:
        if isinstance(value, DeploymentResponse | DeploymentResponseGenerator):
            break
    else:
        for value in kwargs.values():
            if isinstance(value, DeploymentResponse | DeploymentResponseGenerator):
                break
        else:
            return pickle_arguments(args, kwargs), None
    return b"", ArgumentSources(
        [_pickle_argument(value) for value in args],
        {name: _pickle_argument(value) for name, value in kwargs.items()},
    )


def _pickle_argument(value: Any) -> Any:
    if isinstance(value, DeploymentResponse):
        return value.call
    if isinstance(value, DeploymentResponseGenerator):
        raise TypeError("a streamed answer cannot be an argument of another call; read it first")
    return pickle_one(value)
