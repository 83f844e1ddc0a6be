"""One batch while the user's function works on it: its answers dealt out, and its end when nobody wants them.

Why a class per batch: it ends in exactly one place, whatever the user's function does, and everybody in it is settled
there. A batch can be slow; it cannot be stuck.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, final

import structlog

from muster.batching.arguments import Arguments
from muster.batching.calls import BatchedCall, SingleCall, StreamedCall
from muster.batching.errors import BatchCancelled, WrongBatchResult
from muster.batching.traces import begin_batch, below, end_batch
from muster.context import batch_contexts
from serve_common.request_context import RequestContext, request_context
from serve_common.tasks import OwnedTask, TaskOwner, cancellations
from serve_common.tracing.spans import Span

_log = structlog.get_logger(__name__)


@final
class RunningBatch:
    """Calls that are worked on together."""

    __slots__ = (
        "_arguments",
        "_calls",
        "_function",
        "_has_begun",
        "_is_unwanted",
        "_on_end",
        "_room",
        "_task",
        "_wanted",
        "began_at",
    )

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: Arguments,
        calls: list[BatchedCall],
        *,
        on_end: Callable[[RunningBatch], None],
    ) -> None:
        self._function = function
        self._arguments = arguments
        self._calls = calls
        self._wanted = set(calls)
        self._on_end = on_end
        self._room: asyncio.Event | None = None
        self._task: OwnedTask | None = None
        self._has_begun = self._is_unwanted = False
        self.began_at: float | None = None
        """When the function was called, by `time.monotonic`; None before, and for ever when nobody wanted it."""

    def start(self, tasks: TaskOwner) -> None:
        """Begin, as a task of ``tasks``; ``on_end`` is called when the function has ended."""
        for call in self._calls:
            call.running = self
        self._task = tasks.start(self._run(), "run")

    def left_by(self, call: BatchedCall) -> None:
        """``call`` wants no answer any more; when nobody does, the function is cancelled."""
        self._wanted.discard(call)
        self.has_room()
        if self._wanted or self._is_unwanted or self._task is None:
            return
        self._is_unwanted = True
        if self._has_begun:
            self._task.cancel()

    def has_room(self) -> None:
        """Somebody who was behind has taken a step, or is gone."""
        if self._room is not None:
            self._room.set()

    async def _run(self) -> None:
        self._has_begun = True
        failure: BaseException | None = None
        span: Span | None = None
        try:
            if not self._is_unwanted:  # all may have gone between the decision and now
                self.began_at = time.monotonic()
                wanted = [call for call in self._calls if call in self._wanted]
                span = begin_batch(self._function.__qualname__, [call.context for call in wanted])
                await self._work(wanted, span)
        except asyncio.CancelledError as error:
            if self._is_unwanted:
                return  # nobody waits, and that is why
            if not cancellations():
                failure = error  # the function's own
                return
            failure = BatchCancelled(f"{self._function.__qualname__} was cancelled")
            failure.__cause__ = error
            raise  # by whoever closes the event loop
        except BaseException as error:  # noqa: BLE001 - also a SystemExit is for the callers, not for the event loop
            if not self._wanted:
                _log.warning("unwanted_batch_failed", function=self._function.__qualname__, error=repr(error))
            failure = error
        finally:
            if span is not None:
                end_batch(span, failure)
            for call in self._calls:
                if not call.is_settled:
                    call.fail(
                        failure or BatchCancelled(f"{self._function.__qualname__} ended without an answer")
                    )
            failure = None  # its traceback holds this frame
            self._calls = []
            self._wanted.clear()
            self._on_end(self)

    async def _work(self, calls: list[BatchedCall], span: Span | None) -> None:
        contexts = [call.context for call in calls]
        shared = shared_context(contexts)
        request_context.set(shared if span is None else below(span, shared))
        batch_contexts.set(contexts)
        args, kwargs = self._arguments.merge([call.arguments for call in calls])
        if self._arguments.has_instance:
            args.insert(0, calls[0].instance)
        outcome = self._function(*args, **kwargs)
        if inspect.isasyncgen(outcome):
            await self._deal_steps(outcome, calls)
            return
        results = self._checked(await outcome, len(calls), "returned")
        for call, result in zip(calls, results, strict=True):
            assert isinstance(call, SingleCall)
            call.succeed(result)

    async def _deal_steps(self, steps: AsyncGenerator[Any, Any], calls: list[BatchedCall]) -> None:
        streams = [call for call in calls if isinstance(call, StreamedCall)]
        try:
            async for step in steps:
                values = self._checked(step, len(streams), "yielded")
                for stream, value in zip(streams, values, strict=True):
                    stream.give(value)
                if all(stream.is_settled for stream in streams):
                    return
                while any(stream.is_behind for stream in streams):
                    self._room = asyncio.Event()
                    await self._room.wait()
        finally:
            await steps.aclose()
        for stream in streams:
            if not stream.is_settled:
                stream.end()

    def _checked(self, results: Any, wanted: int, verb: str) -> Sequence[Any]:
        """``results`` when there is one for each call. Raises `WrongBatchResult`."""
        name = self._function.__qualname__
        if isinstance(results, str | bytes | Mapping | AbstractSet) or not hasattr(results, "__len__"):
            kind = type(results).__name__
            raise WrongBatchResult(
                f"{name} {verb} a value of type {kind} for a batch of {wanted}; it must be a list"
            )
        if len(results) != wanted:
            raise WrongBatchResult(f"{name} {verb} {len(results)} results for a batch of {wanted}")
        checked: Sequence[Any] = results
        return checked


def shared_context(contexts: Sequence[RequestContext | None]) -> RequestContext | None:
    """What a batch passes on to whatever it calls: of a single request everything.

    Of several what they have in common, the trace of the first, and the latest deadline, for until then somebody wants
    the answer.
    """
    known = [context for context in contexts if context is not None]
    if not known:
        return None
    first = known[0]
    if len(contexts) == 1:
        return first
    deadlines = [context.deadline for context in known]
    deadline = (
        None
        if None in deadlines or len(known) < len(contexts)
        else max(d for d in deadlines if d is not None)
    )
    return RequestContext(
        request_id=_common({context.request_id for context in known}),
        traceparent=first.traceparent,
        endpoint_tag=_common({context.endpoint_tag for context in known}),
        route=_common({context.route for context in known}),
        deadline=deadline,
        model_id=first.model_id,
    )


def _common(values: set[str]) -> str:
    return values.pop() if len(values) == 1 else ""
