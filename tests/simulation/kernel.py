"""Virtual time, and coroutines that take it.

Why not asyncio: nothing here ever really waits. A coroutine that asks for time is put aside and gone on with by an
event, so a simulated minute costs milliseconds and the same seed gives the same trace.
"""

from __future__ import annotations

import heapq
import types
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Final, TypeVar

T = TypeVar("T")

START: Final = 1_000_000.0
"""When every world begins."""


class Sleep:
    """What a coroutine asks for: to be gone on with after so many seconds."""

    __slots__ = ("seconds",)

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds


@types.coroutine
def sleep(seconds: float) -> Generator[Sleep | SimLock, None, None]:
    """Let virtual time pass."""
    yield Sleep(seconds)


@types.coroutine
def _wait_for(lock: SimLock) -> Generator[SimLock, None, None]:
    yield lock


class SimLock:
    """The lock of a `Term` without an event loop."""

    def __init__(self) -> None:
        self._is_held = False
        self._waiting: deque[Callable[[], None]] = deque()

    async def __aenter__(self) -> None:
        while self._is_held:
            await _wait_for(self)
        self._is_held = True

    async def __aexit__(self, *_: object) -> None:
        self._is_held = False
        if self._waiting:
            self._waiting.popleft()()

    def park(self, go_on: Callable[[], None]) -> None:
        """Call ``go_on`` once the lock is free."""
        self._waiting.append(go_on)


class Kernel:
    """What happens when: events in the order of their times, and of their making."""

    def __init__(self) -> None:
        self.time = START
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._count = 0

    def at(self, time: float, event: Callable[[], object]) -> None:
        """Let ``event`` happen at ``time``."""
        self._count += 1
        heapq.heappush(self._events, (time, self._count, event))

    def after(self, delay_s: float, event: Callable[[], object]) -> None:
        """Let ``event`` happen in ``delay_s``."""
        self._count += 1
        heapq.heappush(self._events, (self.time + delay_s, self._count, event))

    def run_until(self, done: Callable[[], bool], limit_s: float) -> bool:
        """Let events happen until ``done`` or until so many virtual seconds have passed."""
        end = self.time + limit_s
        events = self._events
        while not done():
            if not events or events[0][0] > end:
                self.time = end
                return done()
            time, _, event = heapq.heappop(events)
            self.time = max(self.time, time)
            event()
        return True


class Process:
    """Runs coroutines of one process that may die, or stand still while time passes for all others."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._coroutines: dict[int, Coroutine[Any, Any, Any]] = {}
        self._count = 0
        self._backlog: list[Callable[[], None]] = []
        self.stalled_until = float("-inf")

    def when_running(self, event: Callable[[], object]) -> None:
        """Let ``event`` happen now, or when the process goes on."""
        if self._kernel.time >= self.stalled_until:
            event()
            return
        self._backlog.append(lambda: self.when_running(event))

    def stall(self, seconds: float) -> None:
        """Stand still, as after SIGSTOP."""
        self.stalled_until = max(self.stalled_until, self._kernel.time + seconds)
        self._kernel.at(self.stalled_until, self._go_on)

    def _go_on(self) -> None:
        if self._kernel.time < self.stalled_until:
            return
        backlog, self._backlog = self._backlog, []
        for event in backlog:
            event()

    def kill(self) -> None:
        """Everything that was under way is gone."""
        self._backlog.clear()
        self.stalled_until = float("-inf")
        coroutines, self._coroutines = self._coroutines, {}
        for coroutine in coroutines.values():
            if coroutine.cr_running is False:
                coroutine.close()

    def spawn(
        self, coroutine: Coroutine[Any, Any, T], on_end: Callable[[T | None, BaseException | None], None]
    ) -> int:
        """Run a coroutine; ``on_end`` gets what it returned or raised. Returns a number for `cancel`."""
        self._count += 1
        self._coroutines[self._count] = coroutine
        self._step(self._count, on_end)
        return self._count

    def cancel(self, number: int) -> None:
        """Stop one coroutine where it is; one that has ended is no error."""
        coroutine = self._coroutines.pop(number, None)
        if coroutine is not None and not coroutine.cr_running:
            coroutine.close()

    def _step(self, number: int, on_end: Callable[[Any, BaseException | None], None]) -> None:
        coroutine = self._coroutines.get(number)
        if coroutine is None:
            return
        try:
            asked = coroutine.send(None)
        except StopIteration as stop:
            self._coroutines.pop(number, None)
            on_end(stop.value, None)
            return
        except BaseException as error:
            self._coroutines.pop(number, None)
            on_end(None, error)
            return

        def go_on() -> None:
            self.when_running(lambda: self._step(number, on_end))

        match asked:
            case Sleep():
                self._kernel.after(asked.seconds, go_on)
            case SimLock():
                asked.park(lambda: self._kernel.after(0.0, go_on))
            case _:
                raise AssertionError(f"a coroutine of the simulation asked for {asked!r}")


def run_now(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never asks for time."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    coroutine.close()
    raise AssertionError("a twin asked for time")
