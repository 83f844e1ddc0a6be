"""Crashes before and after every effect.

BEFORE: nothing happened. AFTER: it happened, and the one who did it never learned. A crash is a BaseException, so no
``except Exception`` can swallow it, and a plan says whether it fired: a fault test must prove its fault.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")


class Crash(BaseException):
    """The process is gone."""


@dataclass
class CrashingBoundary:
    """Counts effects; crashes at those in ``plan`` (number of the effect, and whether after it)."""

    plan: frozenset[tuple[int, bool]] = frozenset()
    fired: list[tuple[int, str, bool]] = field(default_factory=list)
    count: int = 0
    names: list[str] = field(default_factory=list)

    async def cross(self, effect: str, perform: Callable[[], Awaitable[T]]) -> T:
        number = self.count
        self.count += 1
        self.names.append(effect)
        if (number, False) in self.plan:
            self.fired.append((number, effect, False))
            raise Crash
        result = await perform()
        if (number, True) in self.plan:
            self.fired.append((number, effect, True))
            raise Crash
        return result
