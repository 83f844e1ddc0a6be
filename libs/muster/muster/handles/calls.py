"""One call by a handle, between the thread that made it and the router's.

Why no lock: the router's thread alone writes the outcome, once, and everybody else only reads it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, final
from weakref import WeakKeyDictionary

import msgspec

from muster.handles.pickles import Sent, join_arguments
from muster.handles.streams import ItemStream
from muster.handles.traces import end_call
from muster.handles.wakeups import Waker, Wakers
from serve_common.departures import departures
from serve_common.dispatch.calls import Call
from serve_common.errors import ServeError
from serve_common.names import BackendTag
from serve_common.request_context import request_context
from serve_common.tasks import OwnedTask
from serve_common.tracing.request_trace import RequestTrace
from serve_common.wires.frames import CallHead


class Sources(msgspec.Struct, frozen=True):
    """Arguments of which some are answers of other calls, that may still be under way."""

    args: Sequence[Sent | HandleCall]
    kwargs: Mapping[str, Sent | HandleCall]

    def calls(self) -> list[HandleCall]:
        """The calls whose answers are waited for."""
        return [value for value in (*self.args, *self.kwargs.values()) if isinstance(value, HandleCall)]

    def joined(self) -> bytes:
        """The body, once all answers are there; they are passed on as they came, without being unpickled here."""
        return join_arguments(
            [_sent(value) for value in self.args], {name: _sent(value) for name, value in self.kwargs.items()}
        )


class Outcome(msgspec.Struct, frozen=True):
    """How a call ended; either is set, except for a stream, which ended well when neither is."""

    body: bytes | memoryview | None = None
    failure: ServeError | None = None


@final
class HandleCall:
    """A call from its making to its outcome. What is in the constructor is never changed."""

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
        sources: Sources | None,
        shard_key: str,
        is_repeatable: bool,
        deadline: float,
        request_id: str,
        traceparent: str,
        trace: RequestTrace | None = None,
        code_versions: Mapping[BackendTag, int] | None,
        post: Callable[[HandleCall], None],
    ) -> None:
        """``endpoint`` ends with ``/`` when the application's ingress is meant; ``deadline`` is `time.monotonic`'s.

        ``post`` brings the call to the router's thread, which then looks at what is to be done for it.
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
        """For a call that is traced; the router's once the call is posted."""
        self.code_versions: Final = code_versions
        self.post: Final = post
        self.items: Final = ItemStream(lambda: post(self)) if head.stream else None
        self.wakers: Final = Wakers()
        self.on_done: Callable[[HandleCall], object] | None = None
        """Takes it from the calls under way of its request."""
        self.is_cancelled = False
        """Set by any thread; the outcome follows."""
        self.outcome: Outcome | None = None
        # The router's:
        self.routed: Call | None = None
        self.work: OwnedTask | None = None
        self.wait_until = 0.0
        """By the router's clock, while it waits for the bucket, its endpoint or its sources."""

    # -- any thread --

    @property
    def is_done(self) -> bool:
        """True once there is an outcome."""
        return self.outcome is not None

    def cancel(self) -> None:
        """Nobody wants the answer any more; does nothing when it is there."""
        if self.outcome is None and not self.is_cancelled:
            self.is_cancelled = True
            self.post(self)

    def when_done(self, waker: Waker) -> None:
        """Call ``waker`` once there is an outcome, at once when there is one; it may be called twice."""
        self.wakers.add(waker)
        if self.outcome is not None:
            waker()

    # -- the router's thread --

    def finish(self, outcome: Outcome) -> None:
        """The call has ended; does nothing when it had."""
        if self.outcome is not None:
            return
        self.outcome = outcome
        self.body = b""
        self.sources = self.routed = self.work = None
        if self.trace is not None:
            end_call(self.trace, outcome.failure)
        if self.on_done is not None:
            self.on_done(self)
        if self.items is not None:
            self.items.end(outcome.failure)
        self.wakers.wake()

    def fail(self, error: ServeError) -> None:
        """The call has failed."""
        self.finish(Outcome(failure=error))


_families: Final[WeakKeyDictionary[asyncio.Task[object], set[HandleCall]]] = WeakKeyDictionary()


def bind_to_request(call: HandleCall) -> None:
    """When the running task works on a request, cancelling it cancels ``call`` too, awaited or not.

    In a thread that works on one, its caller's leaving does.
    """
    context = request_context.get()
    if context is None:
        return
    try:
        task = asyncio.current_task()
    except RuntimeError:  # a plain function's thread
        key = context.key
        if key:
            call.on_done = partial(departures.forget, key)
            departures.watch(key, call)
        return
    if task is None:
        return
    family = _families.get(task)
    if family is None:
        family = _families[task] = set()
        task.add_done_callback(_leave)
    family.add(call)
    call.on_done = family.discard


def _leave(task: asyncio.Task[object]) -> None:
    family = _families.pop(task, None)
    if family and task.cancelled():
        for call in list(family):
            call.cancel()


def _sent(value: Sent | HandleCall) -> Sent:
    if isinstance(value, Sent):
        return value
    assert value.outcome is not None
    assert value.outcome.body is not None
    return Sent(bytes(value.outcome.body))
