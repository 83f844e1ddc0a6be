"""Runs the batches of one function and one instance: executes the queue's decisions and distributes results."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Final, final

import msgspec
import structlog
from opentelemetry import context as otel_context
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, set_span_in_context

from muster.batching.calls import (
    Arguments,
    BatchCancelled,
    BatchedCall,
    Bound,
    NoBatchResult,
    SingleCall,
    StreamedCall,
    WrongBatchResult,
)
from muster.batching.queue import BatchQueue, BatchRules
from muster.context import base_context, batch_contexts
from serve_common.errors import DeadlineExceeded, LimitReached
from serve_common.runtime.request_context import RequestContext, request_context
from serve_common.runtime.tasks import OwnedTask, TaskOwner, cancellations
from serve_common.telemetry.catalogue.replicas import BATCH_SECONDS, BATCH_SIZE, BATCH_WAIT_SECONDS
from serve_common.telemetry.log_lines import RateLimitedLogger
from serve_common.telemetry.metrics import process_metrics
from serve_common.telemetry.request_traces import (
    Value,
    get_traceparent,
    get_tracestate,
    parse_span_context,
    process_tracer,
)
from serve_common.telemetry.trace_context import may_be_sampled, parse_traceparent


def start_batch_span(function_name: str, contexts: Sequence[RequestContext | None]) -> Span | None:
    """Start a span for the batch of these requests and enter it in the running task; None when none is traced.

    Its parent is the first of the requests that is traced. The others are links: a span has one parent, and a batch
    works for many requests.
    """
    tracer = process_tracer()
    if tracer is None:
        return None
    parents: list[SpanContext] = []
    for request in contexts:
        if request is not None and may_be_sampled(request.traceparent):
            parent = parse_traceparent(request.traceparent)
            if parent is not None and tracer.sampler.decide(parent, parent.trace_id):
                parents.append(parse_span_context(parent, request.tracestate, is_remote=False))
    if not parents:
        return None
    attributes: dict[str, Value] = {"muster.batch_size": len(contexts), "code.function.name": function_name}
    links = [Link(parent) for parent in parents[1:]]
    span = tracer.start(f"batch {function_name}", SpanKind.INTERNAL, parents[0], attributes, links=links)
    otel_context.attach(set_span_in_context(span))
    return span


def below(span: Span, context: RequestContext | None) -> RequestContext | None:
    """``context`` with ``span`` as the parent of calls that the batch makes."""
    if context is None:
        return None
    return msgspec.structs.replace(
        context, traceparent=get_traceparent(span), tracestate=get_tracestate(span)
    )


def end_batch_span(span: Span, failure: BaseException | None) -> None:
    """End the span of a batch, with ``failure`` as its error if there is one."""
    tracer = process_tracer()
    if tracer is None:
        return
    if failure is not None:
        span.set_attribute("error.type", type(failure).__qualname__)
    tracer.end(span, None if failure is None else f"{type(failure).__qualname__}: {failure}")


_log = structlog.get_logger(__name__)


@final
class RunningBatch:
    """Calls that are processed together.

    A batch ends in exactly one place (the ``finally`` of `_run`), whatever the user's function does, and every call in
    it is settled there. A batch can be slow; it cannot be stuck.
    """

    __slots__ = (
        "_arguments",
        "_calls",
        "_function",
        "_has_started",
        "_is_abandoned",
        "_live_calls",
        "_on_end",
        "_progress",
        "_task",
        "started_at",
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
        self._live_calls = set(calls)
        self._on_end = on_end
        self._progress: asyncio.Event | None = None
        self._task: OwnedTask | None = None
        self._has_started = self._is_abandoned = False
        self.started_at: float | None = None
        """When the function was called, by `time.monotonic`; None before, and when all callers left first."""

    def start(self, tasks: TaskOwner) -> None:
        """Start as a task of ``tasks``; ``on_end`` is called when the function has ended."""
        for call in self._calls:
            call.running = self
        self._task = tasks.start(self._run(), "run")

    def on_caller_left(self, call: BatchedCall) -> None:
        """Remove ``call``, whose caller left; the function is cancelled once all callers have left."""
        self._live_calls.discard(call)
        self.check_capacity()
        if self._live_calls or self._is_abandoned or self._task is None:
            return
        self._is_abandoned = True
        if self._has_started:
            self._task.cancel()

    def check_capacity(self) -> None:
        """Wake the batch: a slow caller has taken a step, or left."""
        if self._progress is not None:
            self._progress.set()

    async def _run(self) -> None:
        self._has_started = True
        failure: BaseException | None = None
        span: Span | None = None
        try:
            if not self._is_abandoned:  # all callers may have left since the decision
                self.started_at = time.monotonic()
                wanted = [call for call in self._calls if call in self._live_calls]
                span = start_batch_span(self._function.__qualname__, [call.context for call in wanted])
                await self._work(wanted, span)
        except asyncio.CancelledError as error:
            if self._is_abandoned:
                return  # cancelled because no caller is left
            if not cancellations():
                failure = error  # the function's own
                return
            failure = BatchCancelled(f"{self._function.__qualname__} was cancelled")
            failure.__cause__ = error
            raise  # cancelled by the closing of the event loop
        except BaseException as error:  # noqa: BLE001 - even SystemExit is for the callers, not for the event loop
            if not self._live_calls:
                _log.warning("unwanted_batch_failed", function=self._function.__qualname__, error=repr(error))
            failure = error
        finally:
            if span is not None:
                end_batch_span(span, failure)
            for call in self._calls:
                if not call.is_done:
                    call.fail(
                        failure or BatchCancelled(f"{self._function.__qualname__} ended without an answer")
                    )
            failure = None  # its traceback holds this frame
            self._calls = []
            self._live_calls.clear()
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
            await self._distribute_steps(outcome, calls)
            return
        results = self._checked(await outcome, len(calls), "returned")
        for call, result in zip(calls, results, strict=True):
            assert isinstance(call, SingleCall)
            call.succeed(result)

    async def _distribute_steps(self, steps: AsyncGenerator[Any, Any], calls: list[BatchedCall]) -> None:
        streams = [call for call in calls if isinstance(call, StreamedCall)]
        try:
            async for step in steps:
                values = self._checked(step, len(streams), "yielded")
                for stream, value in zip(streams, values, strict=True):
                    stream.give(value)
                if all(stream.is_done for stream in streams):
                    return
                while any(stream.is_slow for stream in streams):
                    self._progress = asyncio.Event()
                    await self._progress.wait()
        finally:
            await steps.aclose()
        for stream in streams:
            if not stream.is_done:
                stream.end()

    def _checked(self, results: Any, wanted: int, verb: str) -> Sequence[Any]:
        """Return ``results`` when there is one for each call; otherwise raise `WrongBatchResult`."""
        name = self._function.__qualname__
        if isinstance(results, str | bytes | Mapping | AbstractSet) or not hasattr(results, "__len__"):
            kind = type(results).__name__
            raise NoBatchResult(
                f"{name} {verb} a value of type {kind} for a batch of {wanted}; it must be a list"
            )
        if len(results) != wanted:
            raise WrongBatchResult(
                "Batched function doesn't preserve batch size. "
                f"The input list has length {wanted} but the {verb} list has length {len(results)}."
            )
        checked: Sequence[Any] = results
        return checked


def shared_context(contexts: Sequence[RequestContext | None]) -> RequestContext | None:
    """The request context for calls that a batch makes: for a single request its own.

    For several: what they have in common, the trace of the first, and the latest deadline, because until then a caller
    waits.
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


WAITING_MAX: Final = 10_000
"""Most calls that may wait in one queue. A replica's limit of concurrent requests is far below it."""
MISFIT_INTERVAL_S: Final = 60.0
_FUNCTIONS_MAX: Final = 100
"""Most functions with metrics of their own."""

_SIZE: Final = process_metrics.distribution(BATCH_SIZE, _FUNCTIONS_MAX)
_WAIT: Final = process_metrics.distribution(BATCH_WAIT_SECONDS, _FUNCTIONS_MAX)
_SECONDS: Final = process_metrics.distribution(BATCH_SECONDS, _FUNCTIONS_MAX)


@final
class Batcher:
    """Queues calls and runs batches. Methods run on the event loop it was created on, except `rules_changed`.

    Why it has no task that loops: calls, timers and ended batches each trigger one check of the queue. When no call
    waits, there is no task and no timer.

    Every check runs in a context that belongs to no request (`base_context`), so that nothing of one caller is visible
    to the others.
    """

    def __init__(self, function: Callable[..., Any], arguments: Arguments, rules: BatchRules) -> None:
        self.loop = asyncio.get_running_loop()
        self._function = function
        self._labels = (function.__qualname__,)
        self._arguments = arguments
        self._rules = rules
        self._queue: BatchQueue[BatchedCall] = BatchQueue(rules)
        self._running: set[RunningBatch] = set()
        self._tasks = TaskOwner(f"batch.{function.__name__}")
        self._base_context = base_context.copy()
        self._is_check_scheduled = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at: float | None = None
        self._misfits = RateLimitedLogger(_log.warning, MISFIT_INTERVAL_S)

    def submit(
        self,
        kind: type[SingleCall | StreamedCall],
        instance: Any,
        arguments: Bound,
    ) -> Any:
        """Queue a call and return it. Raises `LimitReached` when too many wait."""
        if len(self._queue) >= WAITING_MAX:
            raise LimitReached(f"{WAITING_MAX} calls wait for a batch of {self._function.__qualname__}")
        call = kind(
            loop=self.loop,
            item=self._arguments.item(arguments),
            arrived_at=time.monotonic(),
            instance=instance,
            arguments=arguments,
            context=request_context.get(),
        )
        if self._queue.add(call):
            self._schedule_check()
        return call

    def leave(self, call: BatchedCall) -> None:
        """Remove ``call``: its caller left, or has its whole result."""
        call.leave()
        if call.running is not None:
            call.running.on_caller_left(call)
        else:
            self._queue.withdraw(call)
            self._schedule_check()  # another call may be first now, or a timer may be obsolete

    def rules_changed(self) -> None:
        """Apply changed rules; may be called from any thread."""
        self.loop.call_soon_threadsafe(self._apply_rules, context=self._base_context)

    def _apply_rules(self) -> None:
        self._queue.rules_changed()
        self._schedule_check()

    def _schedule_check(self) -> None:
        """Evaluate the queue in the next loop iteration, so that calls of the same iteration are batched together."""
        if not self._is_check_scheduled:
            self._is_check_scheduled = True
            self.loop.call_soon(self._check, context=self._base_context)

    def _check(self) -> None:
        self._is_check_scheduled = False
        while True:
            decision = self._queue.decide(time.monotonic(), running=len(self._running))
            for call in decision.unsized:
                assert call.size_error is not None
                call.fail(call.size_error)
            for call in decision.expired:
                call.fail(DeadlineExceeded(f"no batch of {self._function.__qualname__} began in time"))
            if decision.batch is None:
                break
            self._run(decision.batch)
        if self._queue.last_size_error is not None:
            error, self._queue.last_size_error = self._queue.last_size_error, None
            self._misfits.log(
                time.monotonic(),
                "batch_size_fn_failed",
                function=self._function.__qualname__,
                error=repr(error),
                effect="the items were not batched together",
            )
        self._set_timer(decision.check_again_at)

    def _run(self, calls: list[BatchedCall]) -> None:
        _SIZE.observe(len(calls), self._labels)
        _WAIT.observe(time.monotonic() - calls[0].arrived_at, self._labels)
        batch = RunningBatch(self._function, self._arguments, calls, on_end=self._ended)
        self._running.add(batch)
        batch.start(self._tasks)

    def _ended(self, batch: RunningBatch) -> None:
        self._running.discard(batch)
        if batch.started_at is not None:
            _SECONDS.observe(time.monotonic() - batch.started_at, self._labels)
        if len(self._queue):
            self._schedule_check()

    def _set_timer(self, check_again_at: float | None) -> None:
        if self._timer is not None:
            if check_again_at == self._timer_at:
                return
            self._timer.cancel()
            self._timer = None
        self._timer_at = check_again_at
        if check_again_at is not None:
            delay_s = check_again_at - time.monotonic()
            self._timer = self.loop.call_later(
                max(delay_s, 0.0), self._check_by_timer, context=self._base_context
            )

    def _check_by_timer(self) -> None:
        self._timer = self._timer_at = None
        self._check()
