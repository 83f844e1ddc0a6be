"""Runs the batches of one function and one instance: the queue's decisions, carried out on the event loop.

Why it has no loop of its own: calls, timers and batches that end each make it look at the queue once. When nobody
waits there is no task and no timer.

Everything that makes it look runs in a context that belongs to no request, so that nothing of one caller is seen by
the others.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Final, final

import structlog

from muster.batching.arguments import Arguments, Bound
from muster.batching.calls import BatchedCall, SingleCall, StreamedCall
from muster.batching.queue import BatchQueue, BatchRules
from muster.batching.running import RunningBatch
from muster.context import before_requests
from serve_common.bus.quiet_log import QuietLog
from serve_common.errors import DeadlineExceeded, LimitReached
from serve_common.measures import measures
from serve_common.metrics_catalogue.replicas import BATCH_SECONDS, BATCH_SIZE, BATCH_WAIT_SECONDS
from serve_common.request_context import request_context
from serve_common.tasks import TaskOwner

_log = structlog.get_logger(__name__)

WAITING_MAX: Final = 10_000
"""Calls that may wait in one queue. A replica's limit of concurrent requests is far below it."""
MISFIT_INTERVAL_S: Final = 60.0
_FUNCTIONS_MAX: Final = 100
"""That are measured one by one."""

_SIZE: Final = measures.distribution(BATCH_SIZE, _FUNCTIONS_MAX)
_WAIT: Final = measures.distribution(BATCH_WAIT_SECONDS, _FUNCTIONS_MAX)
_SECONDS: Final = measures.distribution(BATCH_SECONDS, _FUNCTIONS_MAX)


@final
class Batcher:
    """All methods run on the event loop that it was made on, except `look_soon`."""

    def __init__(self, function: Callable[..., Any], arguments: Arguments, rules: BatchRules) -> None:
        self.loop = asyncio.get_running_loop()
        self._function = function
        self._labels = (function.__qualname__,)
        self._arguments = arguments
        self._rules = rules
        self._queue: BatchQueue[BatchedCall] = BatchQueue(rules)
        self._running: set[RunningBatch] = set()
        self._tasks = TaskOwner(f"batch.{function.__name__}")
        self._nobodys_context = before_requests.copy()
        self._will_look = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at: float | None = None
        self._misfits = QuietLog(_log.warning, MISFIT_INTERVAL_S)

    def submit(
        self,
        kind: type[SingleCall | StreamedCall],
        instance: Any,
        arguments: Bound,
    ) -> Any:
        """A call that waits from now on. Raises `LimitReached`."""
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
            self._look_later()
        return call

    def leave(self, call: BatchedCall) -> None:
        """The caller of ``call`` is gone, or has all that it wants."""
        call.leave()
        if call.running is not None:
            call.running.left_by(call)
        else:
            self._queue.withdraw(call)
            self._look_later()  # the next one may be first now, or a timer may be for nothing

    def rules_changed(self) -> None:
        """Go by the rules as they are now; may be called in any thread."""
        self.loop.call_soon_threadsafe(self._apply_rules, context=self._nobodys_context)

    def _apply_rules(self) -> None:
        self._queue.rules_changed()
        self._look_later()

    def _look_later(self) -> None:
        """Look when everybody who is about to call has done so: what comes together is batched together."""
        if not self._will_look:
            self._will_look = True
            self.loop.call_soon(self._look, context=self._nobodys_context)

    def _look(self) -> None:
        self._will_look = False
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
        if self._queue.last_misfit_error is not None:
            error, self._queue.last_misfit_error = self._queue.last_misfit_error, None
            self._misfits.log(
                time.monotonic(),
                "batch_size_fn_failed",
                function=self._function.__qualname__,
                error=repr(error),
                effect="the items were not batched together",
            )
        self._set_timer(decision.look_again_at)

    def _run(self, calls: list[BatchedCall]) -> None:
        _SIZE.observe(len(calls), self._labels)
        _WAIT.observe(time.monotonic() - calls[0].arrived_at, self._labels)
        batch = RunningBatch(self._function, self._arguments, calls, on_end=self._ended)
        self._running.add(batch)
        batch.start(self._tasks)

    def _ended(self, batch: RunningBatch) -> None:
        self._running.discard(batch)
        if batch.began_at is not None:
            _SECONDS.observe(time.monotonic() - batch.began_at, self._labels)
        if len(self._queue):
            self._look_later()

    def _set_timer(self, look_again_at: float | None) -> None:
        if self._timer is not None:
            if look_again_at == self._timer_at:
                return
            self._timer.cancel()
            self._timer = None
        self._timer_at = look_again_at
        if look_again_at is not None:
            delay_s = look_again_at - time.monotonic()
            self._timer = self.loop.call_later(
                max(delay_s, 0.0), self._look_by_timer, context=self._nobodys_context
            )

    def _look_by_timer(self) -> None:
        self._timer = self._timer_at = None
        self._look()
