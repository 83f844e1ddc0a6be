"""The one thread that calls Ray.

Why one, and why it lives as long as the process: Ray's own processes ask the kernel to be killed when the *thread*
that started them ends, so a runtime that a pool's thread started dies with that thread. And Ray's calls block, a few
milliseconds each, which no event loop should wait for.

Why by urgency: on a busy machine a start or a kill takes Ray a tenth of a second and more. Behind a hundred of them a
health check would wait until its replica seems ill.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from enum import IntEnum
from typing import Any, TypeVar, final

import structlog

_log = structlog.get_logger(__name__)

T = TypeVar("T")


class Urgency(IntEnum):
    """Of calls that wait, those with the lowest come first; among equals, the first come."""

    CHECK = 0
    """Questions and notes, which take no time themselves."""
    ORDINARY = 1
    START = 2


@final
class RayThread:
    """Runs calls one after the other; a daemon, so that a Ray that hangs cannot keep the process alive."""

    def __init__(self) -> None:
        self._calls: queue.PriorityQueue[tuple[Urgency, int, Callable[[], None]]] = queue.PriorityQueue()
        self._number = itertools.count()
        threading.Thread(target=self._run, name="ray", daemon=True).start()

    def submit(self, call: Callable[..., T], *arguments: Any) -> Future[T]:
        """Run ``call``; its result or exception is in the future."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(call(*arguments))
            except Exception as error:  # noqa: BLE001 - it is handed to the caller
                future.set_exception(error)

        self._put(run, Urgency.ORDINARY)
        return future

    def post(self, call: Callable[..., None], *arguments: Any, urgency: Urgency = Urgency.ORDINARY) -> None:
        """Run ``call``, with nobody to wait for it; what it raises is logged."""

        def run() -> None:
            try:
                call(*arguments)
            except Exception as error:  # noqa: BLE001 - the thread must go on
                _log.error("ray_call_failed", call=call.__name__, exc_info=error)

        self._put(run, urgency)

    def _put(self, run: Callable[[], None], urgency: Urgency) -> None:
        self._calls.put((urgency, next(self._number), run))

    def _run(self) -> None:
        while True:
            _, _, run = self._calls.get()
            run()
