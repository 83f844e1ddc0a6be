"""Responses of calls by handle: whole, streamed, and those of all replicas at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Generator, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, Final, Generic, NoReturn, final

from typing_extensions import TypeVar

from muster.handles.calls import NO_MORE, NOTHING_YET, CallOutcome, HandleCall, ItemStream
from muster.handles.object_refs import put_in_ray
from muster.handles.options import RequestCancelledError
from muster.handles.pickles import to_exception, unpickle
from muster.handles.wakeups import check_not_on_loop, make_waiter, wait_in_thread
from serve_common.dispatch.errors import ResponseUnusable
from serve_common.errors import PermanentError, ServeError

R = TypeVar("R", default=Any)
"""Type of the value, or of each item, of a response."""

_NO_STREAM_REF: Final = "a streamed response has no ObjectRef: read it, and pass its items on"


class _Response(Generic[R]):
    """Base of both kinds of responses."""

    def __init__(self, call: HandleCall) -> None:
        self._call = call
        self._cancel_requested = False

    @property
    def call(self) -> HandleCall:
        """The underlying call; for `DeploymentHandle`."""
        return self._call

    @property
    def by_reference(self) -> bool:
        """False: values travel as bytes, not as references to Ray objects."""
        return False

    @property
    def request_id(self) -> str:
        """The id of the request in the logs of all replicas."""
        return self._call.request_id

    def cancel(self) -> None:
        """Cancel the call: the replica's task is cancelled at once. A response that has arrived stays."""
        self._cancel_requested = True
        self._call.cancel()

    def cancelled(self) -> bool:
        """True after `cancel`, also of a call that has run to its end, and when its request was cancelled."""
        call = self._call
        if self._cancel_requested or call.is_cancelled:
            return True
        return call.outcome is not None and isinstance(call.outcome.failure, RequestCancelledError)

    def __reduce__(self) -> NoReturn:
        raise PermanentError(
            f"`{type(self).__name__}` is not serializable. If you are passing the `{type(self).__name__}` in a nested "
            "object (e.g. a list or dictionary) to a downstream deployment handle call, that is no longer supported. "
            f"Please only pass `{type(self).__name__}` objects as top level arguments, or await them first."
        )


@final
class DeploymentResponse(_Response[R]):
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

    def __await__(self) -> Generator[Any, None, R]:
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

    def result(self, timeout_s: float | None = None, *, _skip_asyncio_check: bool = False) -> R:
        """Block until the response has arrived.

        Raises TimeoutError after ``timeout_s`` seconds (the call goes on), and RuntimeError on the thread of a running
        event loop, which would wait for itself.
        """
        call = self._call
        if not _skip_asyncio_check:
            check_not_on_loop("`await response`")
        if not wait_in_thread(call.wakers, lambda: call.outcome is not None, timeout_s):
            raise TimeoutError(f"no answer within {timeout_s:g} s")
        return self._read()

    async def _to_object_ref(self) -> Any:
        """The value as a ``ray.ObjectRef`` of this process' Ray, for its tasks and actors; waits for the value."""
        return put_in_ray(await self)

    def _to_object_ref_sync(
        self, _timeout_s: float | None = None, *, _allow_running_in_asyncio_loop: bool = False
    ) -> Any:
        """As `_to_object_ref`, and waits as `result` does."""
        return put_in_ray(self.result(_timeout_s, _skip_asyncio_check=_allow_running_in_asyncio_loop))

    def _read(self) -> R:
        if not self._is_read:
            outcome = self._call.outcome
            assert outcome is not None
            self._take(outcome)
            self._is_read = True
        if self._error is not None:
            raise self._error.with_traceback(None)
        value: R = self._value
        return value

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
class DeploymentResponseGenerator(_Response[R]):
    """The items of a streamed response: ``async for`` on a loop, ``for`` in a plain thread; each item is read once.

    Dropping it before its end cancels the call.
    """

    def __init__(self, call: HandleCall, items: ItemStream) -> None:
        """Created by `DeploymentHandle.remote`."""
        super().__init__(call)
        self._items = items

    def __await__(self) -> NoReturn:
        raise TypeError(
            "`DeploymentResponseGenerator` cannot be awaited directly. Use `async for`, or `await anext(response)`"
        )

    def result(self, timeout_s: float | None = None, *, _skip_asyncio_check: bool = False) -> NoReturn:  # noqa: ARG002 - the signature of DeploymentResponse
        """Raises TypeError: there is no single result."""
        raise TypeError(
            "`DeploymentResponseGenerator` doesn't support `.result()`. Use `for`, or `next(response)`"
        )

    async def _to_object_ref_gen(self) -> NoReturn:
        raise RuntimeError(_NO_STREAM_REF)

    def _to_object_ref_gen_sync(self, *_: object, **__: object) -> NoReturn:
        raise RuntimeError(_NO_STREAM_REF)

    def __aiter__(self) -> AsyncIterator[R]:
        return self

    async def __anext__(self) -> R:
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
        value: R = item
        return value

    def __iter__(self) -> Iterator[R]:
        return self

    def __next__(self) -> R:
        check_not_on_loop("`async for` or `await response.__anext__()`")
        items = self._items
        while (item := self._next()) is NOTHING_YET:
            wait_in_thread(items.wakers, lambda: items.has_data, None)
        if item is NO_MORE:
            raise StopIteration
        value: R = item
        return value

    def _next(self) -> Any:
        try:
            return self._items.next_item()
        except ServeError as error:
            raise to_exception(error) from None

    def __del__(self) -> None:
        self._call.cancel()


@final
class DeploymentBroadcastResponse:
    """The responses of all replicas to one `DeploymentHandle.broadcast`, in no order."""

    def __init__(self, calls: Future[list[HandleCall]]) -> None:
        """Created by `DeploymentHandle.broadcast`."""
        self._calls = calls

    def results(self, *, timeout_s: float | None = None, return_exceptions: bool = False) -> list[Any]:
        """Block until all replicas have responded; one result for each.

        The first exception is raised, or, with ``return_exceptions``, all are returned in the place of results. Raises
        TimeoutError after ``timeout_s`` seconds (the calls go on), `NotFound` for an unknown deployment, and
        RuntimeError on the thread of a running event loop.
        """
        check_not_on_loop("`await response.results_async()`")
        end = _end(timeout_s)
        try:
            calls = self._calls.result(timeout_s)
        except FutureTimeoutError:
            raise TimeoutError(f"no answer within {timeout_s:g} s") from None
        results = []
        for call in calls:
            response = DeploymentResponse[Any](call)
            try:
                results.append(response.result(None if end is None else max(0.0, end - time.monotonic())))
            except Exception as error:
                if not return_exceptions or not call.is_done:
                    raise
                results.append(error)
        return results

    async def results_async(
        self, *, timeout_s: float | None = None, return_exceptions: bool = False
    ) -> list[Any]:
        """As `results`, for event loops; cancelling it cancels the calls."""
        _end(timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                calls = await asyncio.shield(asyncio.wrap_future(self._calls))
                responses = [DeploymentResponse[Any](call) for call in calls]
                return list(await asyncio.gather(*responses, return_exceptions=return_exceptions))
        except TimeoutError:
            raise TimeoutError(f"no answer within {timeout_s:g} s") from None

    def __repr__(self) -> str:
        return "DeploymentBroadcastResponse()"


def _end(timeout_s: float | None) -> float | None:
    if timeout_s is not None and timeout_s < 0:
        raise ValueError("timeout_s must be None or non-negative.")
    return None if timeout_s is None else time.monotonic() + timeout_s
