"""What `remote()` returns: the answer to be, for tasks and for plain threads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Generator, Iterator
from typing import Any, NoReturn, final

from muster.handles.calls import HandleCall, Outcome
from muster.handles.errors import RequestCancelled
from muster.handles.pickles import to_exception, unpickle
from muster.handles.streams import NO_MORE, NOTHING_YET, ItemStream
from muster.handles.wakeups import refuse_on_loop, wait_in_thread, waiter_here
from serve_common.dispatch.errors import AnswerUnusable
from serve_common.errors import ServeError


class _Response:
    """What both kinds of answers share."""

    def __init__(self, call: HandleCall) -> None:
        self._call = call

    @property
    def request_id(self) -> str:
        """The id under which logs of all replicas name the request."""
        return self._call.request_id

    def cancel(self) -> None:
        """Give the call up: the replica's task is cancelled at once. Does nothing when the answer is there."""
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
    """The answer of one call: ``await response``, any number of times, or ``response.result()``.

    Passed to another ``remote()`` as an argument by itself, it is waited for and replaced by its value there. What the
    deployment raised is raised here, with its remote traceback as a note; else a `ServeError`.
    """

    def __init__(self, call: HandleCall) -> None:
        """Made by `DeploymentHandle.remote`."""
        super().__init__(call)
        self._value: Any = None
        self._error: Exception | None = None
        self._is_read = False

    @property
    def call(self) -> HandleCall:
        """The call behind it; for `DeploymentHandle`."""
        return self._call

    def __await__(self) -> Generator[Any, None, Any]:
        call = self._call
        if call.outcome is None:
            waiter, waker = waiter_here()
            call.when_done(waker)
            try:
                yield from waiter.__await__()
            except asyncio.CancelledError:
                call.cancel()
                raise
        return self._read()

    def result(self, timeout_s: float | None = None) -> Any:
        """Block until the answer is there.

        Raises TimeoutError after ``timeout_s``, and goes on; RuntimeError on the thread of a running event loop, which
        would wait for itself.
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

    def _take(self, outcome: Outcome) -> None:
        if outcome.failure is not None:
            self._error = to_exception(outcome.failure)
            return
        assert outcome.body is not None
        try:
            self._value = unpickle(outcome.body)
        except AnswerUnusable as error:
            self._error = to_exception(error)


@final
class DeploymentResponseGenerator(_Response):
    """The items of a streamed answer: ``async for`` on a loop, ``for`` in a plain thread; each item is given once.

    Dropping it before its end cancels the call.
    """

    def __init__(self, call: HandleCall, items: ItemStream) -> None:
        """Made by `DeploymentHandle.remote`."""
        super().__init__(call)
        self._items = items

    def __await__(self) -> NoReturn:
        raise TypeError("a streamed answer is not awaited: use `async for`, or `await anext(response)`")

    def result(self, timeout_s: float | None = None) -> NoReturn:  # noqa: ARG002 - as of other answers
        """Raises TypeError: there is no single result."""
        raise TypeError("a streamed answer has no single result: use `for`, or `next(response)`")

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        while (item := self._next()) is NOTHING_YET:
            waiter, waker = waiter_here()
            self._items.wakers.add(waker)
            if self._items.has_news:
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
        refuse_on_loop()
        items = self._items
        while (item := self._next()) is NOTHING_YET:
            wait_in_thread(items.wakers, lambda: items.has_news, None)
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
