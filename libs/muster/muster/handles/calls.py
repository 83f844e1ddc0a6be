"""One call by a handle, shared by the caller's and the router's thread; its response, whole or streamed; its span."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Protocol, final
from weakref import WeakKeyDictionary

import msgspec
from opentelemetry.trace import SpanContext, SpanKind, format_trace_id, get_current_span

from muster.handles.pickles import BODY_BYTES_MAX, Sent, join_arguments, unpickle
from muster.handles.wakeups import Waker, Wakers
from serve_common.dispatch.calls import Call
from serve_common.dispatch.errors import ResponseUnusable, get_error_type
from serve_common.errors import ServeError
from serve_common.names import BackendTag, ReplicaTag
from serve_common.protocol.frames import CallHead, Headers
from serve_common.runtime.request_context import RequestContext, disconnect_propagation, request_context
from serve_common.runtime.tasks import OwnedTask
from serve_common.telemetry.request_traces import (
    RequestTrace,
    Tracer,
    Value,
    cut,
    get_traceparent,
    get_tracestate,
)
from serve_common.telemetry.trace_context import TraceParent, may_be_sampled

_LENGTH_BYTES: Final = 4
_NOTHING: Final = memoryview(b"")


@final
class ItemReader:
    """Splits pieces into items, each prefixed by its length (4 bytes, big endian).

    Without I/O: NATS may cut a response anywhere, so a test cuts it at every place.
    """

    __slots__ = ("_at", "_needed_bytes", "_parts", "_parts_bytes", "_view")

    def __init__(self) -> None:
        self._view = _NOTHING
        self._at = 0
        self._parts: list[memoryview] = []
        """Pieces of an incomplete item; joined once, when it is complete."""
        self._parts_bytes = 0
        self._needed_bytes = 0

    @property
    def is_between_items(self) -> bool:
        """True when no part of a further item has arrived."""
        return not self._parts and self._at == len(self._view)

    def feed(self, piece: memoryview) -> None:
        """Add the next piece; only after `next_item` has returned None."""
        if self._parts:
            self._parts.append(piece)
            self._parts_bytes += len(piece)
            if self._parts_bytes < self._needed_bytes:
                return
            piece = memoryview(b"".join(self._parts))
            self._parts = []
        self._view, self._at = piece, 0

    def next_item(self) -> memoryview | None:
        """Return the next item; None when more must be fed first. Raises `ResponseUnusable` if it is too large."""
        view, at = self._view, self._at
        left_bytes = len(view) - at
        needed_bytes = _LENGTH_BYTES
        if left_bytes >= _LENGTH_BYTES:
            needed_bytes += int.from_bytes(view[at : at + _LENGTH_BYTES], "big")
            if needed_bytes > BODY_BYTES_MAX + _LENGTH_BYTES:
                raise ResponseUnusable(f"an item of {needed_bytes} bytes; at most {BODY_BYTES_MAX} are taken")
            if left_bytes >= needed_bytes:
                self._at = at + needed_bytes
                return view[at + _LENGTH_BYTES : at + needed_bytes]
        if left_bytes:
            self._parts = [view[at:]]
            self._parts_bytes, self._needed_bytes = left_bytes, needed_bytes
            self._view, self._at = _NOTHING, 0
        return None


BUFFERED_BYTES_MAX: Final = 1024 * 1024
"""Most bytes that may wait to be read before backpressure is applied to the replica."""


@final
class NothingYet:
    """Type of `NOTHING_YET`: no item has arrived yet."""


@final
class NoMore:
    """Type of `NO_MORE`: all items were read."""


NOTHING_YET: Final = NothingYet()
NO_MORE: Final = NoMore()


@final
class ItemStream:
    """Items of one response.

    `put`, `end`, `wait_capacity` and `notify_capacity` are for the router's thread, the rest for the reader's.

    Why two counters of bytes: each thread writes only its own, so neither needs a lock.
    """

    def __init__(self, request_capacity: Callable[[], None]) -> None:
        """The reader calls ``request_capacity`` when it has read while the router waits for capacity."""
        self.wakers: Final = Wakers()
        self.is_ended = False
        self._failure: Exception | None = None
        self._pieces: deque[memoryview] = deque()
        self._put_bytes = 0
        self._taken_bytes = 0
        self._capacity: asyncio.Event | None = None
        self._request_capacity = request_capacity
        self._reader = ItemReader()

    # -- the router's thread --

    def put(self, piece: bytes | memoryview) -> None:
        """Append a received piece."""
        if piece:
            self._put_bytes += len(piece)
            self._pieces.append(memoryview(piece))
            self.wakers.wake()

    def end(self, failure: Exception | None) -> None:
        """End the stream; ``failure`` is raised after the items before it."""
        if not self.is_ended:
            self._failure = failure
            self.is_ended = True
            self.wakers.wake()

    async def wait_capacity(self) -> None:
        """Wait while more than `BUFFERED_BYTES_MAX` wait to be read."""
        while self._put_bytes - self._taken_bytes > BUFFERED_BYTES_MAX:
            capacity = self._capacity = asyncio.Event()
            if (
                self._put_bytes - self._taken_bytes > BUFFERED_BYTES_MAX
            ):  # the reader checks for the event after it has read
                await capacity.wait()
        self._capacity = None

    def notify_capacity(self) -> None:
        """Wake `wait_capacity`, which checks the capacity again."""
        if self._capacity is not None:
            self._capacity.set()

    # -- the reader's thread --

    @property
    def has_data(self) -> bool:
        """True when `next_item` would make progress."""
        return bool(self._pieces) or self.is_ended

    def next_item(self) -> Any:
        """Return the next item, `NOTHING_YET` or `NO_MORE`; raises the failure of `end`, and `ResponseUnusable`."""
        while True:
            item = self._reader.next_item()
            if item is not None:
                return unpickle(item)
            is_ended = self.is_ended  # read before checking for pieces: none arrives after it is set
            if self._pieces:
                piece = self._pieces.popleft()
                self._taken_bytes += len(piece)
                self._reader.feed(piece)
                if self._capacity is not None:
                    self._request_capacity()
            elif not is_ended:
                return NOTHING_YET
            elif self._failure is not None:
                failure, self._failure = self._failure, None
                self._reader = (
                    ItemReader()
                )  # the end follows, as of a generator that failed, also within an item
                raise failure.with_traceback(None)
            elif not self._reader.is_between_items:
                raise ResponseUnusable("the stream ended within an item")
            else:
                return NO_MORE


def start_call(
    tracer: Tracer, context: RequestContext | None, endpoint: str, method_name: str
) -> tuple[RequestTrace | None, str]:
    """Start the trace of a new call, if it is sampled, and return it with the traceparent to send in either case.

    A call outside of any trace starts a new one. Why the current span comes before the request's context: the code's
    own OpenTelemetry spans, if it makes any, are nearer to the call than the request's span.
    """
    known = "" if context is None else context.traceparent
    if known and not may_be_sampled(known) and tracer.sampler.respects_parent:
        return None, known
    current = get_current_span().get_span_context()
    parent: TraceParent | SpanContext
    if current.is_valid and (
        context is None or not known or format_trace_id(current.trace_id) == context.trace_id
    ):
        parent = current
    else:  # a span of another trace is stale; the request's context is authoritative
        parent = tracer.decide(known)
        if not parent.is_sampled:
            return None, parent.header
    attributes: dict[str, Value] = {
        "muster.endpoint_tag": endpoint,
        "rpc.method": cut(method_name or "__call__"),
    }
    if context is not None:
        attributes["muster.request_id"] = context.request_id
    tracestate = "" if context is None else context.tracestate
    span = tracer.start(
        f"handle {endpoint}", SpanKind.CLIENT, parent, attributes, tracestate=tracestate, is_remote=False
    )
    return (RequestTrace(tracer, span) if span.is_recording() else None), get_traceparent(span)


def get_headers(trace: RequestTrace | None) -> Headers:
    """Headers for the part of a trace that a request's head cannot carry: its tracestate."""
    tracestate = "" if trace is None else get_tracestate(trace.span)
    return [(b"tracestate", tracestate.encode())] if tracestate else []


def end_call_span(trace: RequestTrace, failure: ServeError | None) -> None:
    """End the trace of a call, with ``failure`` as its error if there is one."""
    if failure is None:
        trace.end()
    else:
        trace.span.set_attribute("error.type", get_error_type(failure))
        trace.end(str(failure))


class ArgumentSource(Protocol):
    """Where an argument comes from that is not there yet: another call, or a Ray object."""

    outcome: CallOutcome | None
    """Set once, by any thread."""

    def add_done_waker(self, waker: Waker) -> None:
        """Call ``waker`` once there is an outcome, immediately if there is one; it may be called twice."""


class ArgumentSources(msgspec.Struct, frozen=True):
    """Arguments of which some are not there yet."""

    args: Sequence[Sent | ArgumentSource]
    kwargs: Mapping[str, Sent | ArgumentSource]

    def awaited(self) -> list[ArgumentSource]:
        """The sources of arguments that were not there when the call was made."""
        return [value for value in (*self.args, *self.kwargs.values()) if not isinstance(value, Sent)]

    def joined(self) -> bytes:
        """The body, once all responses have arrived; they are passed on as received, without being unpickled here."""
        return join_arguments(
            [_sent(value) for value in self.args], {name: _sent(value) for name, value in self.kwargs.items()}
        )


class CallOutcome(msgspec.Struct, frozen=True):
    """How a call ended: one field is set; neither means a stream that ended without failure."""

    body: bytes | memoryview | None = None
    failure: ServeError | None = None


@final
class HandleCall:
    """A call from its creation to its outcome.

    Why no lock: only the router's thread writes the outcome, once, and all other threads only read it.
    """

    __slots__ = (
        "__weakref__",
        "body",
        "code_versions",
        "deadline",
        "endpoint",
        "head",
        "is_cancelled",
        "is_repeatable",
        "items",
        "on_done",
        "outcome",
        "post",
        "replica",
        "request_id",
        "routed",
        "shard_key",
        "sources",
        "trace",
        "traceparent",
        "wait_until",
        "wakers",
        "work",
    )

    def __init__(
        self,
        *,
        endpoint: str,
        head: CallHead,
        body: bytes,
        sources: ArgumentSources | None,
        shard_key: str,
        is_repeatable: bool,
        deadline: float,
        request_id: str,
        traceparent: str,
        trace: RequestTrace | None = None,
        code_versions: Mapping[BackendTag, int] | None,
        post: Callable[[HandleCall], None],
        replica: ReplicaTag | None = None,
    ) -> None:
        """``endpoint`` ending with ``/`` is the application's ingress; ``deadline`` is by `time.monotonic`.

        With ``replica`` it is sent to that one, and to no other.

        ``post`` hands the call to the router's thread, which then does the next step for it.
        """
        self.endpoint: Final = endpoint
        self.head: Final = head
        self.body = body
        self.sources = sources
        self.shard_key: Final = shard_key
        self.is_repeatable: Final = is_repeatable
        self.deadline: Final = deadline
        self.request_id: Final = request_id
        self.traceparent: Final = traceparent
        self.trace: Final = trace
        """Trace of a sampled call, else None; owned by the router once the call is posted."""
        self.code_versions: Final = code_versions
        self.post: Final = post
        self.replica: Final = replica
        self.items: Final = ItemStream(lambda: post(self)) if head.stream else None
        self.wakers: Final = Wakers()
        self.on_done: Callable[[HandleCall], object] | None = None
        """Removes the call from those under way of its request."""
        self.is_cancelled = False
        """Set by any thread; the outcome follows."""
        self.outcome: CallOutcome | None = None
        # Owned by the router:
        self.routed: Call | None = None
        self.work: OwnedTask | None = None
        self.wait_until = 0.0
        """By the router's clock, while it waits for the bucket, its endpoint or its sources."""

    def copy(self, body: bytes, post: Callable[[HandleCall], None]) -> HandleCall:
        """An equal call for another replica; without a trace and without sources, whose values are in ``body``."""
        return HandleCall(
            endpoint=self.endpoint,
            head=self.head,
            body=body,
            sources=None,
            shard_key="",
            is_repeatable=False,
            deadline=self.deadline,
            request_id=self.request_id,
            traceparent=self.traceparent,
            code_versions=None,
            post=post,
        )

    # -- any thread --

    @property
    def is_done(self) -> bool:
        """True once there is an outcome."""
        return self.outcome is not None

    def cancel(self) -> None:
        """Cancel the call; does nothing when it has an outcome."""
        if self.outcome is None and not self.is_cancelled:
            self.is_cancelled = True
            self.post(self)

    def add_done_waker(self, waker: Waker) -> None:
        """Call ``waker`` once there is an outcome, immediately if there is one; it may be called twice."""
        self.wakers.add(waker)
        if self.outcome is not None:
            waker()

    # -- the router's thread --

    def finish(self, outcome: CallOutcome) -> None:
        """Set the outcome; does nothing when there is one."""
        if self.outcome is not None:
            return
        self.outcome = outcome
        self.body = b""
        self.sources = self.routed = self.work = None
        if self.trace is not None:
            end_call_span(self.trace, outcome.failure)
        if self.on_done is not None:
            self.on_done(self)
        if self.items is not None:
            self.items.end(outcome.failure)
        self.wakers.wake()

    def fail(self, error: ServeError) -> None:
        """End the call with ``error``."""
        self.finish(CallOutcome(failure=error))


_calls_by_task: Final[WeakKeyDictionary[asyncio.Task[object], set[HandleCall]]] = WeakKeyDictionary()


def bind_to_request(call: HandleCall) -> None:
    """Cancel ``call`` with the request that the running task works on, whether the call is awaited or not.

    In a thread that works on a request, the call is cancelled when the request's caller disconnects.
    """
    context = request_context.get()
    if context is None:
        return
    try:
        task = asyncio.current_task()
    except RuntimeError:  # a plain function's thread
        key = context.key
        if key:
            call.on_done = partial(disconnect_propagation.forget, key)
            disconnect_propagation.watch(key, call)
        return
    if task is None:
        return
    task_calls = _calls_by_task.get(task)
    if task_calls is None:
        task_calls = _calls_by_task[task] = set()
        task.add_done_callback(_on_task_done)
    task_calls.add(call)
    call.on_done = task_calls.discard


def _on_task_done(task: asyncio.Task[object]) -> None:
    task_calls = _calls_by_task.pop(task, None)
    if task_calls and task.cancelled():
        for call in list(task_calls):
            call.cancel()


def _sent(value: Sent | ArgumentSource) -> Sent:
    if isinstance(value, Sent):
        return value
    assert value.outcome is not None
    assert value.outcome.body is not None
    return Sent(bytes(value.outcome.body))
