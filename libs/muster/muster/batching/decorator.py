"""The decorator `batch`, with Ray Serve's names and defaults.

Why the result is a plain function: checks whether a handler is async, and other decorators, work with it.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, Final, Protocol, TypeVar, cast, overload

from muster.batching.batches import Batcher
from muster.batching.calls import Arguments, SingleCall, StreamedCall
from muster.batching.queue import BatchRules, BatchSizeFn
from muster.per_instance import PerInstance

WAIT_S_MAX: Final = 86_400.0

S = TypeVar("S")
S_contra = TypeVar("S_contra", contravariant=True)
T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class BatchSettings(Protocol):
    """Settings of a batched function that may change while it runs, for all instances of its class at once."""

    def set_max_batch_size(self, new_max_batch_size: int) -> None:
        """Set the largest batch size. Raises ValueError below 1."""

    def set_batch_wait_timeout_s(self, new_batch_wait_timeout_s: float) -> None:
        """Set the seconds that the first item of a batch may wait. Raises ValueError below 0."""

    def get_max_batch_size(self) -> int:
        """The current largest batch size."""

    def get_batch_wait_timeout_s(self) -> float:
        """The current number of seconds that the first item of a batch may wait."""


class BatchedFunction(BatchSettings, Protocol[T_contra, R_co]):
    """A batched function, which takes one item where the batch function takes a list."""

    def __call__(self, item: T_contra, /) -> R_co:
        """The result for one item: awaitable, or an async generator when the batch function is one."""


class BatchedMethod(BatchSettings, Protocol[S_contra, T_contra, R_co]):
    """A batched method."""

    def __call__(self, instance: S_contra, item: T_contra, /) -> R_co:
        """The result for one item."""

    def __get__(self, instance: Any, owner: Any = None, /) -> BatchedFunction[T_contra, R_co]:
        """The method of one instance; each instance has a queue of its own."""


class BatchedAny(BatchSettings, Protocol):
    """A batched function of several arguments."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The result for one item."""

    def __get__(self, instance: Any, owner: Any = None, /) -> BatchedAny:
        """The method of one instance."""


class BatchDecorator(Protocol):
    """`batch` with its options."""

    @overload
    def __call__(
        self, _func: Callable[[list[T]], Coroutine[Any, Any, Sequence[R | Exception]]], /
    ) -> BatchedFunction[T, Coroutine[Any, Any, R]]: ...
    @overload
    def __call__(
        self, _func: Callable[[S, list[T]], Coroutine[Any, Any, Sequence[R | Exception]]], /
    ) -> BatchedMethod[S, T, Coroutine[Any, Any, R]]: ...
    @overload
    def __call__(
        self, _func: Callable[[list[T]], AsyncIterator[Sequence[Any]]], /
    ) -> BatchedFunction[T, AsyncGenerator[Any, None]]: ...
    @overload
    def __call__(
        self, _func: Callable[[S, list[T]], AsyncIterator[Sequence[Any]]], /
    ) -> BatchedMethod[S, T, AsyncGenerator[Any, None]]: ...
    @overload
    def __call__(self, _func: Callable[..., Any], /) -> BatchedAny: ...


@overload
def batch(
    _func: Callable[[list[T]], Coroutine[Any, Any, Sequence[R | Exception]]],
    /,
) -> BatchedFunction[T, Coroutine[Any, Any, R]]: ...
@overload
def batch(
    _func: Callable[[S, list[T]], Coroutine[Any, Any, Sequence[R | Exception]]],
    /,
) -> BatchedMethod[S, T, Coroutine[Any, Any, R]]: ...
@overload
def batch(
    _func: Callable[[list[T]], AsyncIterator[Sequence[Any]]],
    /,
) -> BatchedFunction[T, AsyncGenerator[Any, None]]: ...
@overload
def batch(
    _func: Callable[[S, list[T]], AsyncIterator[Sequence[Any]]],
    /,
) -> BatchedMethod[S, T, AsyncGenerator[Any, None]]: ...
@overload
def batch(
    _func: None = None,
    /,
    max_batch_size: int = 10,
    batch_wait_timeout_s: float = 0.01,
    max_concurrent_batches: int = 1,
    batch_size_fn: Callable[[list[Any]], float] | None = None,
) -> BatchDecorator: ...
@overload
def batch(
    _func: Callable[..., Any],
    /,
    max_batch_size: int = 10,
    batch_wait_timeout_s: float = 0.01,
    max_concurrent_batches: int = 1,
    batch_size_fn: Callable[[list[Any]], float] | None = None,
) -> BatchedAny: ...
def batch(
    _func: Callable[..., Any] | None = None,
    /,
    max_batch_size: int = 10,
    batch_wait_timeout_s: float = 0.01,
    max_concurrent_batches: int = 1,
    batch_size_fn: BatchSizeFn | None = None,
) -> Any:
    """Make a function of a list of items callable with one item; concurrent calls are combined into batches.

    The function or method is ``async def``, takes a list and returns a list of the same length; a caller passes one
    item and gets its own result. With several arguments each becomes a list. Each instance has its own queue::

        class Model:
            @serve.batch(max_batch_size=32, batch_wait_timeout_s=0.005)
            async def predict(self, images: list[Image]) -> list[str | Exception]:
                return self.network(images)

            async def __call__(self, request: Request) -> str:
                return await self.predict(await read_image(request))

    A batch runs when it has ``max_batch_size`` items, or when its first item has waited for ``batch_wait_timeout_s``
    seconds (0: items that arrive together), and at most ``max_concurrent_batches`` run at the same time; later items
    make the next batch, in the order of arrival. ``batch_size_fn(items)`` may count something other than items, such
    as tokens; it gets the first argument of each call. An item that alone exceeds ``max_batch_size`` makes a batch of
    its own. When ``batch_size_fn`` raises for an item, only that item's caller gets the exception; when it raises for
    items together, they are not batched together.

    One item may fail alone: an exception as its result is raised at that caller only. An exception that the function
    raises is raised at all callers. A list of another length, or no list, raises `WrongBatchResult` at all.

    A caller that is cancelled leaves its batch: while waiting, its item never reaches the function; when all callers
    of a running batch are gone, the function is cancelled. An item whose request's deadline passes while it waits
    fails with `DeadlineExceeded` and never reaches the function.

    An ``async def`` with ``yield`` makes streams: it yields lists with one value per item, and each caller iterates
    over its own values with ``async for``. ``StopIteration`` (or ``StopAsyncIteration``) as a value ends one caller's
    stream, an exception as a value fails it; later values in its place are ignored. A slow caller holds up the batch,
    so that memory stays bounded.

    Inside the function `get_request_context` has what all items have in common (for a batch of one: everything; else
    the latest deadline and the trace of the first), `get_batch_request_contexts` the contexts of all items in order,
    and `get_multiplexed_model_id` the model, because a batch never mixes models. Other context variables of callers
    are not visible.

    ``set_max_batch_size``, ``set_batch_wait_timeout_s`` and the getters of the decorated function change and return
    these settings for all instances.

    Raises TypeError for a function that cannot be batched, ValueError for an invalid limit.
    """
    rules = BatchRules(
        max_batch_size=_whole("max_batch_size", max_batch_size),
        batch_wait_timeout_s=_seconds("batch_wait_timeout_s", batch_wait_timeout_s),
        max_concurrent_batches=_whole("max_concurrent_batches", max_concurrent_batches),
        batch_size_fn=batch_size_fn,
    )
    if batch_size_fn is not None and not callable(batch_size_fn):
        raise TypeError(f"batch_size_fn must be a callable or None, got {type(batch_size_fn)}")
    if _func is None:
        return functools.partial(_decorate, rules=rules)
    return _decorate(_func, rules)


def _decorate(function: Callable[..., Any], rules: BatchRules) -> Any:
    is_stream = inspect.isasyncgenfunction(function)
    if not is_stream and not inspect.iscoroutinefunction(function):
        if not callable(function):
            raise TypeError("@serve.batch can only be used to decorate functions or methods.")
        raise TypeError("Functions decorated with @serve.batch must be 'async def'")
    # A decorated function may be decorated again with other options.
    rules = BatchRules(
        max_batch_size=rules.max_batch_size,
        batch_wait_timeout_s=rules.batch_wait_timeout_s,
        max_concurrent_batches=rules.max_concurrent_batches,
        batch_size_fn=rules.batch_size_fn,
    )
    arguments = Arguments(function)
    batchers: PerInstance[Batcher] = PerInstance(functools.partial(Batcher, function, arguments, rules))

    def submit(kind: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Batcher, Any]:
        instance = None
        if arguments.has_instance:
            if not args:
                raise TypeError(f"{function.__qualname__}() is a method and was called without an instance")
            instance, *rest = args
            args = tuple(rest)
        bound = arguments.bind(args, kwargs)
        batcher = batchers.of(instance)
        return batcher, batcher.submit(kind, instance, bound)

    async def single(*args: Any, **kwargs: Any) -> Any:
        batcher, call = submit(SingleCall, args, kwargs)
        try:
            return await call.future
        except BaseException:
            batcher.leave(call)
            raise

    def stream(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        # The call waits for its batch from here on, as in Ray Serve, and not from the first step on.
        batcher, call = submit(StreamedCall, args, kwargs)
        stream = steps(batcher, call)
        # A stream that is dropped before its first step never comes to its `finally`, and its batch would wait for it.
        dropped = weakref.finalize(stream, _leave, asyncio.get_running_loop(), batcher, call)
        dropped.atexit = False
        return stream

    async def steps(batcher: Batcher, call: StreamedCall) -> AsyncGenerator[Any, None]:
        try:
            while True:
                try:
                    step = await call.next_step()
                except StopAsyncIteration:
                    return
                yield step
        finally:
            batcher.leave(call)

    return _with_settings(functools.wraps(function)(stream if is_stream else single), rules, batchers)


def _leave(loop: asyncio.AbstractEventLoop, batcher: Batcher, call: StreamedCall) -> None:
    if not call.is_done and not loop.is_closed():
        loop.call_soon_threadsafe(batcher.leave, call)


def _with_settings(wrapper: Any, rules: BatchRules, batchers: PerInstance[Batcher]) -> BatchedAny:
    def set_max_batch_size(new_max_batch_size: int) -> None:
        rules.max_batch_size = _whole("max_batch_size", new_max_batch_size)
        notify_batchers()

    def set_batch_wait_timeout_s(new_batch_wait_timeout_s: float) -> None:
        rules.batch_wait_timeout_s = _seconds("batch_wait_timeout_s", new_batch_wait_timeout_s)
        notify_batchers()

    def notify_batchers() -> None:
        for batcher in batchers.all():
            batcher.rules_changed()

    def get_max_batch_size() -> int:
        return rules.max_batch_size

    def get_batch_wait_timeout_s() -> float:
        return rules.batch_wait_timeout_s

    wrapper.set_max_batch_size = set_max_batch_size
    wrapper.set_batch_wait_timeout_s = set_batch_wait_timeout_s
    wrapper.get_max_batch_size = get_max_batch_size
    wrapper.get_batch_wait_timeout_s = get_batch_wait_timeout_s
    # Ray Serve's own names of the getters
    wrapper._get_max_batch_size = get_max_batch_size  # noqa: SLF001 - code that is ported calls it
    wrapper._get_batch_wait_timeout_s = get_batch_wait_timeout_s  # noqa: SLF001 - as above
    return cast("BatchedAny", wrapper)


def _whole(name: str, value: Any) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        integer = "an integer" if name == "max_concurrent_batches" else "integer"  # Ray Serve's words
        raise TypeError(f"{name} must be {integer} >= 1, got {value}")
    if value < 1:
        error = TypeError if name == "max_concurrent_batches" else ValueError  # as in Ray Serve
        raise error(f"{name} must be an integer >= 1, got {value}")
    return value


def _seconds(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a float >= 0, got {value}")
    if not 0 <= value <= WAIT_S_MAX:
        limit = f" and <= {WAIT_S_MAX:g}" if value > 0 else ""
        raise ValueError(f"{name} must be a float >= 0{limit}, got {value}")
    return float(value)
