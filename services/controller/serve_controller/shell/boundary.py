"""The one crossing between what is decided and the outside.

Why a seam: every effect goes through it, so one place gives the metric and the log line, and simulation can crash
before ("nothing happened") or after ("it happened, the caller never learned") each of them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

T = TypeVar("T")


class Boundary(Protocol):
    """Lets one effect through."""

    async def cross(self, effect: str, perform: Callable[[], Awaitable[T]]) -> T:
        """Perform the effect of that name; what it raises is raised."""
        ...


class Telemetry(Protocol):
    """Told what the controller does, as it happens."""

    def effect_performed(self, effect: str, seconds: float, error: str | None) -> None:
        """An effect crossed the boundary."""
        ...

    def plan_made(self, seconds: float) -> None:
        """A plan was made by the core."""
        ...


class OpenBoundary:
    """The boundary of production: performs, measures and reports."""

    def __init__(self, telemetry: Telemetry, monotonic: Callable[[], float]) -> None:
        """``monotonic`` gives seconds for durations."""
        self._telemetry = telemetry
        self._monotonic = monotonic

    async def cross(self, effect: str, perform: Callable[[], Awaitable[T]]) -> T:
        """See `Boundary.cross`."""
        begun = self._monotonic()
        error: str | None = "interrupted"
        try:
            result = await perform()
            error = None
        except Exception as caught:
            error = type(caught).__name__
            raise
        finally:
            self._telemetry.effect_performed(effect, self._monotonic() - begun, error)
        return result
