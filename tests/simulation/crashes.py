"""Crashes before and after every effect.

BEFORE: nothing happened. AFTER: it happened, and the one who did it never learned. A crash is a BaseException, so no
``except Exception`` can swallow it, and a plan says whether it fired: a fault test must prove its fault.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from tests.simulation.kernel import sleep

T = TypeVar("T")

CrashPoint = tuple[int, bool]
"""Number of the effect among all of a world, and whether after it."""


class Crash(BaseException):
    """The process is gone."""


@dataclass
class CrashPlan:
    """Counts the effects of all controllers; knows at which of them to crash."""

    points: frozenset[CrashPoint] = frozenset()
    fired: list[tuple[int, str, bool]] = field(default_factory=list)
    count: int = 0

    def crash_if_due(self, number: int, effect: str, *, after: bool) -> None:
        """Raise `Crash` when the plan says so."""
        if (number, after) in self.points:
            self.fired.append((number, effect, after))
            raise Crash


class SimBoundary:
    """The boundary of one controller: each effect takes a moment, may find the process standing still, and may be the
    last that it does."""

    def __init__(
        self, plan: CrashPlan, delay_s: Callable[[str], float], trace: Callable[[str], None]
    ) -> None:
        self._plan = plan
        self._delay_s = delay_s
        self._trace = trace

    async def cross(self, effect: str, perform: Callable[[], Awaitable[T]]) -> T:
        """See `serve_controller.shell.boundary.Boundary.cross`."""
        number = self._plan.count
        self._plan.count += 1
        self._trace(effect)
        self._plan.crash_if_due(number, effect, after=False)
        delay_s = self._delay_s(effect)
        if delay_s > 0:
            await sleep(delay_s)
        result = await perform()
        self._plan.crash_if_due(number, effect, after=True)
        return result
