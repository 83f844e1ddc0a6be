"""The boundary that every effect on the outside crosses; and crash mode, which kills the process there.

Every effect crosses it, so one place produces the metric and the span, and simulation can crash before ("nothing
happened") or after ("it happened, the caller never learned") each of them.

Crash mode is part of the product because surviving crashes is the core of what is promised, and only a real process
that dies as by ``kill -9`` proves it with the real database and the real bus. Only the environment can enable it:

- ``MUSTER_CRASH_AT=after:record_plan:3`` crashes once the third plan was recorded, ``before:publish_snapshot`` instead
  of the first publication. `EFFECTS` lists the effects.
- ``MUSTER_CRASH_PROBABILITY=0.02`` crashes with that probability before, and again after, each effect.
  ``MUSTER_CRASH_SEED`` repeats the random numbers, and with them the point at which every life of the process ends:
  leave it out under a supervisor.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Final, Protocol, TypeVar

import msgspec
import structlog

from serve_common.errors import BadField, FencedOut
from serve_common.runtime.settings import Environment
from serve_common.telemetry.request_traces import part

T = TypeVar("T")

EFFECTS: Final = (
    "record_command",
    "record_plan",
    "publish_snapshot",
    "retract_snapshot",
    "send_host_goal",
    "reply",
)
"""Every effect that crosses the boundary. ``reply`` comes between recording a command and sending its reply."""


class Boundary(Protocol):
    """Lets one effect through."""

    async def cross(self, effect: str, perform: Callable[[], Awaitable[T]]) -> T:
        """Perform the effect of that name; its errors are raised."""
        ...


class Telemetry(Protocol):
    """Notified of what the controller does, as it happens."""

    def effect_performed(self, effect: str, seconds: float, error: str | None) -> None:
        """An effect crossed the boundary."""
        ...

    def plan_made(self, seconds: float) -> None:
        """A plan was made by the core."""
        ...

    def message_refused(self, kind: str, sender: str, error: Exception) -> None:
        """A message was refused; ``kind`` is one of `RefusedMessages`."""
        ...


class OpenBoundary:
    """The boundary of production: performs and measures effects, also as spans of the current operation."""

    def __init__(self, telemetry: Telemetry, monotonic: Callable[[], float]) -> None:
        """``monotonic`` gives seconds for durations."""
        self._telemetry = telemetry
        self._monotonic = monotonic

    async def cross(self, effect: str, perform: Callable[[], Awaitable[T]]) -> T:
        """Perform the effect and report its duration and error."""
        started_at = self._monotonic()
        error: str | None = "interrupted"
        try:
            with part(effect):
                result = await perform()
            error = None
        except Exception as caught:
            error = type(caught).__name__
            raise
        finally:
            self._telemetry.effect_performed(effect, self._monotonic() - started_at, error)
        return result


class LeadersBoundary:
    """Lets effects through only while this controller can be sure that it leads.

    Why: Postgres fences what is recorded, but nothing fences messages on the bus. A process that was suspended for
    longer than its lease must not continue with what it was about to send.
    """

    def __init__(self, inner: Boundary, is_sure: Callable[[], bool]) -> None:
        """``is_sure`` is `Leadership.is_sure`."""
        self._inner = inner
        self._is_sure = is_sure

    async def cross(self, effect: str, perform: Callable[[], Awaitable[T]]) -> T:
        """Perform the effect, or raise `FencedOut` when another controller may lead."""
        if not self._is_sure():
            raise FencedOut(
                f"{effect}: this process stood still for as long as its lease; another one may lead"
            )
        return await self._inner.cross(effect, perform)


_log = structlog.get_logger()

AT: Final = "MUSTER_CRASH_AT"
PROBABILITY: Final = "MUSTER_CRASH_PROBABILITY"
SEED: Final = "MUSTER_CRASH_SEED"
_NTH_MAX: Final = 1_000_000
_SEED_MAX: Final = 2**32 - 1
_SEND_S: Final = 0.02
"""Seconds to let the NATS client flush, so that a crash *after* a message happens once it is sent."""


class CrashPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One point at which to crash."""

    effect: str
    is_after: bool
    nth: int = 1
    """Which of this process' effects of that name, from 1."""

    def __str__(self) -> str:
        return f"{'after' if self.is_after else 'before'}:{self.effect}:{self.nth}"


class CrashMode(msgspec.Struct, frozen=True, kw_only=True):
    """When to crash; ``at``, ``probability`` or both are set."""

    at: CrashPoint | None
    probability: float
    """Probability of a crash before, and again after, each effect; 0 to 1."""
    seed: int


def read_crash_mode(environment: Environment) -> CrashMode | None:
    """Read crash mode from the environment, or None. Raises `BadField` naming the variable."""
    at = environment.optional(AT)
    probability = environment.optional(PROBABILITY)
    if at is None and probability is None:
        if environment.optional(SEED) is not None:
            raise BadField(SEED, f"is of no use without {PROBABILITY}")
        return None
    return CrashMode(
        at=None if at is None else _parse_point(at),
        probability=0.0 if probability is None else _parse_probability(probability),
        seed=environment.integer(SEED, secrets.randbelow(_SEED_MAX + 1), 0, _SEED_MAX),
    )


def _parse_point(text: str) -> CrashPoint:
    when, _, rest = text.partition(":")
    effect, has_number, number = rest.partition(":")
    if when not in ("before", "after") or not effect:
        raise BadField(
            AT, f"{text[:80]!r} must read before:<effect> or after:<effect>, and may end with :<number>"
        )
    if effect not in EFFECTS:
        raise BadField(AT, f"{effect[:80]!r} is no effect; there are {', '.join(EFFECTS)}")
    if not has_number:
        return CrashPoint(effect=effect, is_after=when == "after")
    # isdecimal alone lets other scripts' digits through, and a very long number is refused by int itself.
    if not (number.isascii() and number.isdecimal() and len(number) <= 7 and 1 <= int(number) <= _NTH_MAX):
        raise BadField(AT, f"{number[:80]!r} must be a whole number from 1 to {_NTH_MAX}")
    return CrashPoint(effect=effect, is_after=when == "after", nth=int(number))


def _parse_probability(text: str) -> float:
    try:
        value = float(text)
    except ValueError as error:
        raise BadField(PROBABILITY, f"{text[:40]!r} is not a number") from error
    if not 0.0 <= value <= 1.0:
        raise BadField(PROBABILITY, f"is {value:g}; it must be between 0 and 1")
    return value


def kill_this_process() -> None:
    """End at once, as by ``kill -9``: nothing is closed, released or written."""
    os.kill(os.getpid(), signal.SIGKILL)
    os._exit(137)  # the first process of a container cannot kill itself


def kill_after(flush: Callable[[], None]) -> Callable[[], None]:
    """Return `kill_this_process` preceded by ``flush``: a thread sends the log, and its last line names the point."""

    def die() -> None:
        flush()
        kill_this_process()

    return die


class CrashingBoundary:
    """A boundary that kills the process at some effects."""

    def __init__(self, inner: Boundary, mode: CrashMode, die: Callable[[], None] = kill_this_process) -> None:
        """``die`` does not return in a real process."""
        self._inner = inner
        self._mode = mode
        self._die = die
        self._rand = random.Random(mode.seed).random  # noqa: S311 - repeatable is what it must be
        self._started: Counter[str] = Counter()
        self._done: Counter[str] = Counter()
        _log.warning(
            "crash_mode_is_on",
            message="this controller kills itself on purpose; never set this where it matters",
            at=None if mode.at is None else str(mode.at),
            probability=mode.probability,
            seed=mode.seed,
        )

    async def cross(self, effect: str, perform: Callable[[], Awaitable[T]]) -> T:
        """Perform the effect, and crash before or after it. A failed effect has no after."""
        self._started[effect] += 1
        before = CrashPoint(effect=effect, is_after=False, nth=self._started[effect])
        if self._should_crash(before):
            self._crash(before)
        result = await self._inner.cross(effect, perform)
        self._done[effect] += 1
        after = CrashPoint(effect=effect, is_after=True, nth=self._done[effect])
        if self._should_crash(after):
            await asyncio.sleep(_SEND_S)
            self._crash(after)
        return result

    def _should_crash(self, point: CrashPoint) -> bool:
        is_random = self._mode.probability > 0 and self._rand() < self._mode.probability
        return is_random or point == self._mode.at

    def _crash(self, point: CrashPoint) -> None:
        _log.error("crash_mode_kills", boundary=str(point))
        self._die()
