"""Deployment handles, and how they are found by name."""

from __future__ import annotations

import asyncio
import time
import uuid
import warnings
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any, Final, Generic, final

import msgspec
from typing_extensions import TypeVar

from muster.handles.calls import ArgumentSources, HandleCall, bind_to_request, start_call
from muster.handles.object_refs import ObjectRefSource, is_object_ref
from muster.handles.options import (
    HandleOptions,
    ReplicaSelection,
    check_options,
    check_serialization,
    compute_deadline,
)
from muster.handles.pickles import pickle_arguments, pickle_one
from muster.handles.responses import (
    DeploymentBroadcastResponse,
    DeploymentResponse,
    DeploymentResponseGenerator,
)
from muster.handles.runtime import is_running, runtime
from serve_common.clock import SystemClock
from serve_common.dispatch.admission import Endpoint
from serve_common.errors import BadField, NotFound, ServeError
from serve_common.names import DeploymentID, ReplicaTag, check_name
from serve_common.protocol.frames import CallHead
from serve_common.runtime.request_context import current_replica, request_context
from serve_common.telemetry.request_traces import process_tracer

T = TypeVar("T", default=Any)
"""The deployment's class, for annotations such as ``DeploymentHandle[Model]``."""

FIND_TIMEOUT_S: Final = 20.0
"""Seconds that a search for a deployment may take; its own limits end it before."""


class DeploymentNotFound(NotFound, KeyError):
    """There is no deployment of that name in that application; Ray Serve raises KeyError."""

    __str__ = Exception.__str__  # that of KeyError shows the message in quotes


_DEFAULTS: Final = HandleOptions()
_clock: Final = SystemClock()


@final
class _Unset(msgspec.Struct, frozen=True):
    """Type of the default of an option that is not given."""


_UNSET: Any = _Unset()


@final
class DeploymentHandle(Generic[T]):
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
        """Use `get_deployment_handle` or `get_app_handle`.

        ``post`` takes calls instead of the process' router, in local testing mode.
        """
        self._post = post
        self._has_started = False
        self._deployment_name = deployment_name
        self._app_name = app_name
        self._options = options
        self._endpoint = f"{app_name}/{deployment_name}"
        self._head = CallHead(options.method_name, options.model_id, options.stream)

    @property
    def deployment_name(self) -> str:
        """Name of the deployment."""
        return self._deployment_name

    @property
    def app_name(self) -> str:
        """The application that the deployment belongs to."""
        return self._app_name

    @property
    def deployment_id(self) -> DeploymentID:
        """Both names, as Ray Serve has them."""
        return DeploymentID(self._deployment_name, self._app_name)

    @property
    def is_initialized(self) -> bool:
        """True once the router that all handles of this process share was started, by a call or `_init`."""
        return self._post is not None or is_running()

    def _init(
        self, *, _prefer_local_routing: bool = False, _run_router_in_separate_loop: bool = True
    ) -> None:
        """Start the router now instead of with the first call. It runs on a thread of its own in any case.

        Raises RuntimeError for a handle that was initialized or has called already.
        """
        if self._has_started:
            raise RuntimeError("Handle has already been initialized.")
        if not _run_router_in_separate_loop:
            raise BadField(
                "_run_router_in_separate_loop", "must be true: one router serves the whole process"
            )
        _warn_of_locality(_prefer_local_routing)
        if self._post is None:
            runtime()
        self._has_started = True

    def running_replicas_populated(self) -> bool:
        """Whether the router knows running replicas of the deployment; false before it was started."""
        if self._post is not None or not is_running():
            return self._post is not None
        count = runtime().submit(lambda router: router.count_replicas(self._endpoint))
        return count.result(FIND_TIMEOUT_S) > 0

    def remote(self, *args: Any, **kwargs: Any) -> DeploymentResponse | DeploymentResponseGenerator:
        """Call the deployment with these arguments; returns at once.

        A `DeploymentResponse` or ``ray.ObjectRef`` passed directly as an argument is awaited and replaced by its
        value. Within a request the call inherits the request's id and deadline, and is cancelled with it.

        Raises what pickling the arguments raises, `LimitReached` when they are too large, and `BusUnavailable` when no
        stack is found.
        """
        return self._call(args, kwargs)

    def _call(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], replica: ReplicaTag | None = None
    ) -> DeploymentResponse | DeploymentResponseGenerator:
        options = self._options
        now = time.monotonic()
        unix_now = 0.0 if options.absolute_slo_ms is None else _clock.now()
        context = request_context.get()
        own = current_replica()
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
            request_id=str(uuid.uuid4()) if context is None else context.request_id,
            traceparent=traceparent,
            trace=trace,
            code_versions=None if own is None else own.peer_versions,
            post=post,
            replica=replica,
        )
        bind_to_request(call)
        post(call)
        self._has_started = True
        if sources is not None:
            for source in sources.awaited():
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
        request_serialization: str = _UNSET,
        response_serialization: str = _UNSET,
        _prefer_local_routing: bool = _UNSET,
        _by_reference: bool = _UNSET,
    ) -> DeploymentHandle[T]:
        """Return a handle for the same deployment with changed options; others stay. Raises `BadField`.

        ``shard_key``: calls with the same key go to the same backend and replica; ``session_id`` is Ray Serve's name
        for it. ``timeout_s``, ``relative_slo_ms`` and ``absolute_slo_ms`` (since 1970): the response must start by
        then; the earliest counts. ``idempotent``: the call may be sent again when its replica dies.

        Values travel by value and pickled: ``_by_reference`` and serializations have no effect. Replicas are not chosen
        by their machine: ``_prefer_local_routing=True`` warns.
        """
        check_serialization("request_serialization", request_serialization, _UNSET)
        check_serialization("response_serialization", response_serialization, _UNSET)
        _warn_of_locality(_prefer_local_routing not in (_UNSET, False))
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

    def broadcast(self, method_name: str, *args: Any, **kwargs: Any) -> DeploymentBroadcastResponse:
        """Call a method on every running replica once; returns at once.

        Whatever a replica has in flight, it gets the call too, and runs it when one of its slots is free; a call that
        its replica refuses or loses fails and goes to no other. For rare tasks, such as clearing caches. Raises as
        `remote` does, `BadField` for an invalid name; an unknown deployment raises `NotFound` in the response.
        """
        if self._post is not None:  # local testing mode: the one replica
            [call] = [self.options(method_name=method_name, stream=False).remote(*args, **kwargs).call]
            done: Future[list[HandleCall]] = Future()
            done.set_result([call])
            return DeploymentBroadcastResponse(done)
        options = check_options(msgspec.structs.replace(self._options, method_name=method_name, stream=False))
        unsent: list[HandleCall] = []
        call = (
            DeploymentHandle(self._deployment_name, self._app_name, options, post=unsent.append)
            .remote(*args, **kwargs)
            .call
        )
        running = runtime()
        return DeploymentBroadcastResponse(
            running.submit(lambda router: router.broadcast(call, running.post))
        )

    @asynccontextmanager
    async def choose_replica(self, *_: Any, **__: Any) -> AsyncGenerator[ReplicaSelection]:
        """Choose a replica for one `dispatch` within the block; other choices of this process count it as busier.

        The arguments are Ray Serve's, for routers of one's own, and have no effect. Waits for a replica to run. Raises
        `NotFound` and `NoReplicaAvailable`, and NotImplementedError in local testing mode, as there.
        """
        if self._post is not None:
            raise NotImplementedError("choose_replica() is not there in local testing mode")
        running = runtime()
        replica = await asyncio.wrap_future(running.submit(lambda router: router.choose(self._endpoint)))
        try:
            yield ReplicaSelection(replica_id=replica, endpoint=self._endpoint, options=self._options)
        finally:
            await asyncio.wrap_future(running.submit(lambda router: router.release(replica)))

    def dispatch(
        self, selection: ReplicaSelection, *args: Any, **kwargs: Any
    ) -> DeploymentResponse | DeploymentResponseGenerator:
        """As `remote`, at the replica that `choose_replica` has chosen, with the options of the handle that chose it.

        It waits there for a slot. A call whose replica has gone meanwhile fails with `ReplicaUnavailableError` and
        goes to no other. Raises ValueError for a replica of another deployment, RuntimeError for a second call with one
        selection, and as `remote` does.
        """
        if selection.endpoint != self._endpoint:
            raise ValueError(
                f"Cannot dispatch a selection created for a different deployment. This handle is for "
                f"{self._endpoint}, but the selection was created for {selection.endpoint}."
            )
        if selection.is_dispatched:
            raise RuntimeError(
                f"ReplicaSelection for {selection.replica_id} has already been dispatched. Each selection can only be "
                "dispatched once."
            )
        selection.is_dispatched = True
        handle = DeploymentHandle(self._deployment_name, self._app_name, selection.options)
        return handle._call(args, kwargs, ReplicaTag(selection.replica_id))

    def shutdown(self) -> None:
        """Do nothing: a handle has nothing of its own. `muster.disconnect` ends the router of this process."""

    async def shutdown_async(self) -> None:
        """As `shutdown`."""

    def __getattr__(self, name: str) -> DeploymentHandle:
        if name.startswith("__"):  # what Python and libraries look for in any object
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

    def __eq__(self, other: object) -> bool:
        """Handles of one deployment with the same options are equal: Ray Serve gives the same object."""
        return isinstance(other, DeploymentHandle) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def _identity(self) -> tuple[str, HandleOptions, int]:
        return self._endpoint, self._options, id(self._post)

    def __repr__(self) -> str:
        return f"DeploymentHandle(deployment={self._deployment_name!r})"


def _warn_of_locality(is_wanted: bool) -> None:  # noqa: FBT001 - its only argument
    if is_wanted:
        warnings.warn(
            "_prefer_local_routing has no effect in Muster: replicas are chosen by their load, whatever their machine",
            UserWarning,
            stacklevel=3,
        )


_local_posts: Final[dict[int, Callable[[HandleCall], None]]] = {}
"""What handles of local testing mode were pickled with; such a pickle is of use in this process only."""


def _local_handle(deployment_name: str, app_name: str, options: HandleOptions, post: int) -> DeploymentHandle:
    return DeploymentHandle(deployment_name, app_name, options, post=_local_posts[post])


def get_deployment_handle(
    deployment_name: str,
    app_name: str | None = None,
    _check_exists: bool = True,  # noqa: FBT001, FBT002 - Ray Serve's signature
    _record_telemetry: bool = True,  # noqa: FBT001, FBT002 - as above
) -> DeploymentHandle:
    """Return a handle for a deployment; ``application/deployment`` gives both names.

    ``app_name`` defaults to the own application in a replica, and must be given elsewhere. Waits for the routing state,
    at most 10 s, and raises `DeploymentNotFound` (a `NotFound` and KeyError) when there is no such deployment; without
    ``_check_exists`` it returns at once, and the first call raises. Raises `BadField` for an invalid name, and
    `BusUnavailable` when NATS does not answer.
    """
    if app_name is None and "/" in deployment_name:
        app_name, _, deployment_name = deployment_name.partition("/")
    check_name(deployment_name, "deployment_name")
    if app_name is None:
        replica = current_replica()
        if replica is None:
            raise ServeError(
                "Please specify an application name when getting a deployment handle outside of a Serve application."
            )
        app_name = replica.backend_tag.partition("/")[0]
    check_name(app_name, "app_name")
    if _check_exists and _find(f"{app_name}/{deployment_name}") is None:
        raise DeploymentNotFound(f"Deployment(name='{deployment_name}', app='{app_name}') does not exist.")
    return DeploymentHandle(deployment_name, app_name)


def get_app_handle(name: str) -> DeploymentHandle:
    """Return a handle for the deployment that is the ingress of an application now.

    Waits for the routing state, at most 10 s. Raises `NotFound` for an unknown application, and for one with several
    deployments with a route and no ingress, `BadField` for an invalid name, and `BusUnavailable` when NATS does not
    answer.
    """
    found = _find(f"{check_name(name, 'name')}/")
    if found is None:
        raise NotFound(f"Application '{name}' does not exist.")
    return DeploymentHandle(found.tag.partition("/")[2], name)


def _find(endpoint: str) -> Endpoint | None:
    return runtime().submit(lambda router: router.find(endpoint)).result(FIND_TIMEOUT_S)


_AWAITED: Final = frozenset({"DeploymentResponse", "DeploymentResponseGenerator", "ObjectRef"})
"""Names of the types of arguments that may have to be waited for; Ray may not be imported here."""


def _build_body(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bytes, ArgumentSources | None]:
    """The body, or the arguments to build it from once other calls have ended."""
    for value in args:
        if type(value).__name__ in _AWAITED:
            break
    else:
        for value in kwargs.values():
            if type(value).__name__ in _AWAITED:
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
        raise RuntimeError(  # noqa: TRY004 - Ray Serve's type
            "Streaming deployment handle results cannot be passed to downstream handle calls: read a streamed response "
            "first, and pass on what it has"
        )
    if is_object_ref(value):
        return ObjectRefSource(value)
    return pickle_one(value)
