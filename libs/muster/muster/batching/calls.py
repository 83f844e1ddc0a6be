"""One call of a batch function from its caller's side: merging its arguments, its result and errors."""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, final

from muster.batching.queue import NO_DEADLINE, WaitingCall
from muster.per_instance import is_method
from serve_common.errors import ServeError
from serve_common.runtime.request_context import RequestContext, is_program_replica

_VARIADIC: Final = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

Bound = tuple[Any, ...] | dict[str, Any]
"""The arguments of one call: a single positional one as a tuple, which is the usual case; otherwise by name."""


@final
class Arguments:
    """Binds and merges the arguments of one batch function's calls.

    A call is bound when it is made: one with wrong arguments must fail its own caller and no other.
    """

    __slots__ = ("_bind", "_first", "_function_name", "_parameters", "_takes_one", "has_instance")

    def __init__(self, function: Callable[..., Any]) -> None:
        """Raises TypeError for a function whose arguments cannot be batched."""
        self._function_name = function.__qualname__
        parameters = list(inspect.signature(function).parameters.values())
        self.has_instance = is_method(function, parameters)
        """True when the first argument of calls is the instance."""
        if self.has_instance:
            parameters = parameters[1:]
        for parameter in parameters:
            if parameter.kind in _VARIADIC:
                raise TypeError(
                    f"{self._function_name} cannot be batched with {parameter}: "
                    "it must name its parameters, as each becomes a list"
                )
        self._bind = inspect.Signature(parameters).bind
        self._parameters = {parameter.name: parameter for parameter in parameters}
        self._first = parameters[0].name if parameters else ""
        self._takes_one = bool(parameters) and parameters[0].kind is not inspect.Parameter.KEYWORD_ONLY
        for parameter in parameters[1:]:
            self._takes_one &= parameter.default is not inspect.Parameter.empty

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Bound:
        """Bind the arguments of one call, without the instance; raises TypeError as the function itself would."""
        if self._takes_one and len(args) == 1 and not kwargs:
            return args
        try:
            return self._bind(*args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"{self._function_name}() {error}") from None

    def item(self, bound: Bound) -> Any:
        """The item of a call, passed to ``batch_size_fn``: its first argument."""
        return bound[0] if isinstance(bound, tuple) else bound.get(self._first)

    def merge(self, calls: Sequence[Bound]) -> tuple[list[Any], dict[str, Any]]:
        """Merge calls into positional and named arguments of the batch function: one list per parameter.

        A parameter that no call passes keeps its default; if only some pass it, the lists have the default for the
        others.
        """
        single = [bound[0] for bound in calls if isinstance(bound, tuple)]
        if len(single) == len(calls):
            return [single], {}
        named = [{self._first: bound[0]} if isinstance(bound, tuple) else bound for bound in calls]
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for name, parameter in self._parameters.items():
            if not any(name in bound for bound in named):
                continue
            values = [bound.get(name, parameter.default) for bound in named]
            if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
                args.append(values)
            else:
                kwargs[name] = values
        return args, kwargs


BUFFERED_STEPS_MAX: Final = 64
"""Steps of a stream that may wait for their caller; beyond that the whole batch waits."""

_STREAM_ENDS: Final = (StopIteration, StopAsyncIteration)


class Running(Protocol):
    """The batch that a call is in."""

    def on_caller_left(self, call: BatchedCall) -> None:
        """The caller of ``call`` left."""

    def check_capacity(self) -> None:
        """A slow caller has taken a step."""


class BatchedCall(WaitingCall):
    """A waiting call with its arguments, request context and batch.

    Why two kinds, `SingleCall` and `StreamedCall`: a caller with one result needs only a future; a stream needs a
    bounded buffer of steps between a batch that runs ahead and a caller that may be slow.
    """

    __slots__ = ("arguments", "context", "instance", "running")

    def __init__(
        self,
        *,
        item: Any,
        arrived_at: float,
        instance: Any,
        arguments: Bound,
        context: RequestContext | None,
    ) -> None:
        deadline = None if context is None else context.deadline
        if deadline is None or deadline <= arrived_at:
            # Calls after the request's deadline come from a response that goes on, such as a stream or WebSocket.
            deadline = NO_DEADLINE
        group = "" if context is None else context.model_id
        super().__init__(item=item, group=group, arrived_at=arrived_at, deadline=deadline)
        self.instance = instance
        self.arguments = arguments
        self.context = context
        self.running: Running | None = None
        """The batch that the call is in; set when it starts."""

    @property
    def is_done(self) -> bool:
        """True when the whole result is delivered, or its caller left."""
        raise NotImplementedError

    def fail(self, error: BaseException) -> None:
        """Raise ``error`` at the caller; does nothing when the call is settled."""
        raise NotImplementedError

    def leave(self) -> None:
        """The caller left."""
        raise NotImplementedError


@final
class SingleCall(BatchedCall):
    """A call with one result."""

    __slots__ = ("future",)

    def __init__(self, *, loop: asyncio.AbstractEventLoop, **fields: Any) -> None:
        super().__init__(**fields)
        self.future: asyncio.Future[Any] = loop.create_future()

    @property
    def is_done(self) -> bool:
        """True when it has its result, or its caller was cancelled."""
        return self.future.done()

    def succeed(self, result: Any) -> None:
        """Return ``result`` to the caller; an exception as a result is raised there, but in a program's replica."""
        if isinstance(result, BaseException) and not is_program_replica():
            self.fail(result)
        elif not self.future.done():
            self.future.set_result(result)

    def fail(self, error: BaseException) -> None:
        """Raise ``error`` at the caller."""
        if not self.future.done():
            self.future.set_exception(to_raisable(error))

    def leave(self) -> None:
        """The caller no longer waits for the result."""
        if not self.future.cancel() and not self.future.cancelled():
            # Set at the moment the caller was cancelled; asyncio would report the exception as never retrieved.
            self.future.exception()


@final
class StreamedCall(BatchedCall):
    """A call with a streamed result."""

    __slots__ = ("_error", "_has_caller_left", "_is_ended", "_loop", "_steps", "_waiter")

    def __init__(self, *, loop: asyncio.AbstractEventLoop, **fields: Any) -> None:
        super().__init__(**fields)
        self._loop = loop
        self._steps: deque[Any] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._error: BaseException | None = None
        self._is_ended = self._has_caller_left = False

    @property
    def is_done(self) -> bool:
        """True when the stream has ended, or its caller left."""
        return self._is_ended or self._has_caller_left

    @property
    def is_slow(self) -> bool:
        """True when the caller must take a step before another one may be added."""
        return not self.is_done and len(self._steps) >= BUFFERED_STEPS_MAX

    def give(self, step: Any) -> None:
        """Add a step; StopIteration and StopAsyncIteration end the stream, another exception fails it."""
        if self.is_done:
            return
        if isinstance(step, _STREAM_ENDS) or (isinstance(step, type) and issubclass(step, _STREAM_ENDS)):
            self.end()
        elif isinstance(step, BaseException):
            self.fail(step)
        else:
            self._steps.append(step)
            self._wake()

    def end(self) -> None:
        """End the stream."""
        self._is_ended = True
        self._wake()

    def fail(self, error: BaseException) -> None:
        """Raise ``error`` at the caller after the steps already added."""
        if not self.is_done:
            self._error = to_raisable(error)
            self.end()

    def leave(self) -> None:
        """The caller wants no more steps."""
        self._has_caller_left = True
        self._steps.clear()

    async def next_step(self) -> Any:
        """Wait for the next step. Raises StopAsyncIteration at the end, or what the stream failed with."""
        while not self._steps:
            if self._is_ended:
                raise StopAsyncIteration if self._error is None else self._error
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        was_behind = self.is_slow
        step = self._steps.popleft()
        if was_behind and self.running is not None:
            self.running.check_capacity()
        return step

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def to_raisable(error: BaseException) -> BaseException:
    """``error``, or an equivalent RuntimeError for exceptions that a coroutine must not raise."""
    if isinstance(error, StopIteration | StopAsyncIteration | GeneratorExit | asyncio.CancelledError):
        stand_in = RuntimeError(f"the batch function failed with {type(error).__name__}: {error}")
        stand_in.__cause__ = error
        return stand_in
    return error


# Why their own types: a caller can distinguish a function that broke the rules of batching from one that failed.


class WrongBatchResult(ServeError, RuntimeError):
    """The batch function returned or yielded something that cannot be distributed to its callers."""

    error_code = "wrong_batch_result"


class NoBatchResult(WrongBatchResult, TypeError):
    """The batch function returned or yielded no list; in Ray Serve that is a TypeError."""


class BatchCancelled(RuntimeError):
    """The batch function was cancelled, though callers were waiting: its event loop is being closed."""
