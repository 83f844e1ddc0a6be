"""The user side of a replica: runs each request in a task, on a loop that user code may block."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, Final, final

import structlog
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import PlainTextResponse

from serve_common.errors import (
    BadField,
    LimitReached,
    RequestFailed,
    ServeError,
    TransientError,
    UserCodeRaised,
)
from serve_common.protocol.frames import RequestKind
from serve_common.runtime.request_context import disconnect_propagation
from serve_replica_host.replica.io.request import (
    BodyPiece,
    Drop,
    Ended,
    Failed,
    IoEvent,
    ReplicaRequest,
    SocketReceived,
    UserEvent,
    WholeResponseEvent,
    Writable,
    is_cancellation,
)
from serve_replica_host.replica.io.response_frames import DirectResponses
from serve_replica_host.replica.telemetry.traces import Traces, error_line
from serve_replica_host.replica.user.asgi import LEAVE_S, AsgiSocket, CallerGone
from serve_replica_host.replica.user.code import UserCode, enter_request, enter_trace
from serve_replica_host.replica.user.request_kinds import RequestKinds, log_raised, make_reader

_log = structlog.get_logger(__name__)


def is_reported_to_caller(error: ServeError) -> bool:
    """True when ``error`` is reported to the caller as a failure of its own request.

    A missing deployment, or invalid arguments, are errors of the user's code instead.

    Why such an error keeps its status: a 503 tells the caller to retry and a 504 that it took too long, whichever
    deployment of the chain was overloaded or slow. What the user's code raises by itself is its own failure.
    """
    return error.is_of_call and isinstance(error, RequestFailed | LimitReached | TransientError)


def build_failure(exchange: ReplicaRequest, error: ServeError, body: bytes = b"") -> Failed:
    """Log an error that `is_reported_to_caller`, and build its outcome; ``body`` as in `Failed`."""
    _log.warning(
        "call_failed",
        request_id=exchange.head.request_id,
        error_code=error.error_code,
        error=error_line(error),
    )
    status: int = getattr(error, "status", error.status_hint)
    return Failed(exchange, error.error_code, status, str(error), body)


_TASK_NAME: Final = "request"


@final
class RequestTasks:
    """Owns running tasks, and logs those that fail with an exception. For one loop, on its thread.

    Why not `TaskOwner`: a name, a set entry, a callback and two iterations of the loop for each request are a large
    part of what a quick request costs. Here a task takes its first step when it is started, as Python 3.12's eager
    tasks do, and one that has then ended, as most have, needs to be neither kept nor watched. It is a real task
    throughout: the current one, with a context of its own, and it can be cancelled.
    """

    def __init__(self) -> None:
        self._running_tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._first_step: tuple[Callable[..., object], Context | None] | None = None

    def start(self, coro: Coroutine[Any, Any, None]) -> asyncio.Task[None] | None:
        """Run ``coro`` until it first waits; returns None if it has ended by then."""
        loop = self._loop
        if loop is None:
            loop = self._loop = asyncio.get_running_loop()
        if asyncio.current_task(loop) is not None:
            # A task cannot step inside another one's step.
            task = asyncio.Task(coro, loop=loop, name=_TASK_NAME)
            return self._track(task)
        # A new task passes its first step to `call_soon`; here it is intercepted and run at once.
        loop.__dict__["call_soon"] = self._capture_first_step
        try:
            task = asyncio.Task(coro, loop=loop, name=_TASK_NAME)
        finally:
            del loop.__dict__["call_soon"]
        assert self._first_step is not None, "a task schedules its first step"
        step, context = self._first_step
        self._first_step = None
        if context is None:
            step()
        else:
            context.run(step)
        if task.done():
            self._report(task)
            return None
        return self._track(task)

    async def close(self, timeout_s: float) -> None:
        """Cancel all tasks, and wait for them at most ``timeout_s``; remaining ones are logged."""
        tasks = list(self._running_tasks)
        for task in tasks:
            task.cancel()
        if not tasks:
            return
        _, running = await asyncio.wait(tasks, timeout=timeout_s)
        if running:
            _log.error("requests_did_not_stop", count=len(running), timeout_s=timeout_s)

    def _capture_first_step(
        self, step: Callable[..., object], *_: Any, context: Context | None = None
    ) -> None:
        self._first_step = (step, context)

    def _track(self, task: asyncio.Task[None]) -> asyncio.Task[None]:
        self._running_tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._running_tasks.discard(task)
        self._report(task)

    def _report(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        failure = task.exception()
        if failure is not None:
            _log.error("task_failed", task=_TASK_NAME, exc_info=failure)


_CLOSE_TIMEOUT_S: Final = 1.0


@final
class UserExecutor:
    """Runs the user's code for each exchange; all methods run on the user loop.

    Why the bus side never waits for it: while user code blocks this loop, the replica still refuses, cancels and
    drains.
    """

    def __init__(
        self,
        code: UserCode,
        io_queue: Callable[[IoEvent], object],
        direct: DirectResponses | None = None,
        traces: Traces | None = None,
    ) -> None:
        """``direct`` sends complete responses, instead of ``io_queue``. ``traces`` is None if tracing is off."""
        self._traces = traces
        self._io_queue = io_queue
        self._direct = direct
        self._kinds = RequestKinds(code, io_queue)
        self._finish = self._end
        self._tasks = RequestTasks()
        self._running = 0
        self._idle: asyncio.Event | None = None
        """Set when nothing runs any more; None while no task waits for that."""

    def take(self, item: UserEvent) -> None:
        """Process an item of the bus side."""
        if type(item) is ReplicaRequest:
            self._start(item)
        elif type(item) is BodyPiece:
            make_reader(item.exchange, self._io_queue).add(item.data, last=item.last)
        elif type(item) is SocketReceived:
            if item.exchange.socket is not None:
                item.exchange.socket.feed(item)
        elif type(item) is Writable:
            if item.exchange.writable is not None:
                item.exchange.writable.set()
        elif type(item) is Drop:
            self._drop(item)

    def log_requests(self, *, enabled: bool) -> None:
        """Log a line for each request that ends from now on, or none."""
        self._finish = self._end_and_log if enabled else self._end

    async def wait_idle(self) -> None:
        """Wait until no user code runs for any request, not even after its response was sent."""
        if self._running:
            if self._idle is None:
                self._idle = asyncio.Event()
            await self._idle.wait()
        if self._direct is not None:
            self._direct.flush()

    async def close(self) -> None:
        """Cancel running requests."""
        await self._tasks.close(_CLOSE_TIMEOUT_S)

    def _start(self, exchange: ReplicaRequest) -> None:
        self._running += 1
        if (
            exchange.is_dropped
        ):  # the caller is gone, or the deadline has passed: the user's code is not called
            self._end(Ended(exchange))
            return
        if exchange.head.kind is RequestKind.WEBSOCKET:
            exchange.socket = AsgiSocket(exchange, self._io_queue)
        exchange.work = self._tasks.start(self._serve(exchange))

    def _drop(self, drop: Drop) -> None:
        exchange = drop.exchange
        if exchange.writable is not None:
            exchange.writable.set()
        if exchange.reader is not None:
            exchange.reader.leave()
        work = exchange.work
        if work is None or work.done():
            return
        if isinstance(exchange.socket, AsgiSocket) and exchange.has_started:
            # An application is notified as ASGI specifies, and then has some time to end by itself.
            exchange.socket.leave(drop.close_code, drop.reason)
            asyncio.get_running_loop().call_later(LEAVE_S, _cancel, exchange.reply, work)
            return
        _cancel(exchange.reply, work)
        if not exchange.has_started:  # then `_serve` never runs, and cannot report its end
            self._end(Ended(exchange))

    async def _serve(self, exchange: ReplicaRequest) -> None:
        """Run the user's code; sends exactly one outcome that ends the work to the bus side."""
        exchange.has_started = True
        outcome: IoEvent = Ended(exchange)
        try:
            enter_request(exchange)
            if self._traces is not None:
                enter_trace(exchange, self._traces)
            outcome = await self._kinds.handle(exchange)
        except HTTPException as error:
            handle = PlainTextResponse(error.detail, error.status_code, dict(error.headers or {}))
            outcome = WholeResponseEvent(exchange, error.status_code, handle.raw_headers, bytes(handle.body))
        except BadField as error:
            outcome = Failed(exchange, error.error_code, error.status_hint, str(error))
        except BaseException as error:
            if is_cancellation(exchange, error):
                raise
            if isinstance(error, ServeError) and is_reported_to_caller(error):
                outcome = build_failure(exchange, error)
            else:
                if not (exchange.is_dropped and isinstance(error, CallerGone | ClientDisconnect)):
                    log_raised(exchange, error)
                outcome = _raised(exchange, error)
        finally:
            if exchange.trace is not None:
                exchange.trace.code_ended(*_get_failure(outcome))
            self._finish(outcome)

    def _end(self, outcome: IoEvent) -> None:
        self._running -= 1
        if self._idle is not None and not self._running:
            self._idle.set()
            self._idle = None
        if type(outcome) is WholeResponseEvent and self._direct is not None:
            self._direct.send(outcome)
        else:
            self._io_queue(outcome)

    def _end_and_log(self, outcome: IoEvent) -> None:
        self._end(outcome)
        log_request(outcome, time.monotonic())


_access_log: Final = logging.getLogger("ray.serve")


def log_request(outcome: IoEvent, now: float) -> None:
    """Log a request that ``outcome`` ends as Ray Serve does: method, path or method of the class, status, duration."""
    exchange = outcome.exchange
    head = exchange.head
    is_http = head.kind in (RequestKind.HTTP, RequestKind.WEBSOCKET)
    if isinstance(outcome, WholeResponseEvent | Failed):
        status: int | str = outcome.status
    else:
        status = exchange.written_status or exchange.response_status
    if exchange.is_dropped and head.kind is not RequestKind.WEBSOCKET:
        status = "CANCELLED"
    elif isinstance(outcome, Failed) and not is_http:
        status = "ERROR"
    elif not is_http or not status:
        status = "OK"
    _access_log.info(
        "%s %s %s %.1fms",
        head.method if head.kind is RequestKind.HTTP else "WEBSOCKET" if is_http else "CALL",
        head.path if is_http else (head.call.method_name if head.call is not None else "") or "__call__",
        status,
        1000 * (now - exchange.started_at),
    )


def _raised(exchange: ReplicaRequest, error: BaseException) -> Failed:
    return Failed(exchange, UserCodeRaised.error_code, UserCodeRaised.status_hint, error_line(error))


def _get_failure(outcome: IoEvent) -> tuple[int, str, str]:
    """The status, 0 if unknown; and the error code and message of a failure, else empty."""
    if isinstance(outcome, WholeResponseEvent):
        return outcome.status, "", ""
    if isinstance(outcome, Failed):
        return outcome.status, outcome.error_code, outcome.message
    return 0, "", ""


def _cancel(key: bytes, work: asyncio.Task[Any]) -> None:
    """Cancel the task of a request, and the handle calls that its threads wait for."""
    if not work.done():
        disconnect_propagation.leave(key)
        work.cancel()
