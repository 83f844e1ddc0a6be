"""The one crossing between what is decided and the outside.

Why a seam: every effect goes through it, so one place gives the metric and the log line, and simulation can crash
before ("nothing happened") or after ("it happened, the caller never learned") each of them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, Protocol, TypeVar

from serve_common.errors import FencedOut
from serve_common.tracing.operations import part

T = TypeVar("T")

EFFECTS: Final = (
    "record_command",
    "record_plan",
    "publish_snapshot",
    "retract_snapshot",
    "send_host_goal",
    "reply",
)
"""Every effect that crosses the boundary. ``reply`` stands between what is recorded and its answer."""


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

    def message_refused(self, kind: str, sender: str, error: Exception) -> None:
        """A report could not be taken in; ``kind`` as of `RefusedMessages`."""
        ...


class OpenBoundary:
    """The boundary of production: performs, measures and reports, also as spans of the operation under way."""

    def __init__(self, telemetry: Telemetry, monotonic: Callable[[], float]) -> None:
        """``monotonic`` gives seconds for durations."""
        self._telemetry = telemetry
        self._monotonic = monotonic

    async def cross(self, effect: str, perform: Callable[[], Awaitable[T]]) -> T:
        """See `Boundary.cross`."""
        begun = self._monotonic()
        error: str | None = "interrupted"
        try:
            with part(effect):
                result = await perform()
            error = None
        except Exception as caught:
            error = type(caught).__name__
            raise
        finally:
            self._telemetry.effect_performed(effect, self._monotonic() - begun, error)
        return result


class LeadersBoundary:
    """Lets effects through only while this controller can be sure that it leads.

    Why: Postgres fences what is recorded, but nothing fences what goes onto the bus. A process that was stopped for
    longer than its lease must not go on with what it was about to do.
    """

    def __init__(self, inner: Boundary, is_sure: Callable[[], bool]) -> None:
        """``is_sure`` is `Leadership.is_sure`."""
        self._inner = inner
        self._is_sure = is_sure

    async def cross(self, effect: str, perform: Callable[[], Awaitable[T]]) -> T:
        """See `Boundary.cross`. Raises `FencedOut` instead of performing what may be another leader's to do."""
        if not self._is_sure():
            raise FencedOut(
                f"{effect}: this process stood still for as long as its lease; another one may lead"
            )
        return await self._inner.cross(effect, perform)
