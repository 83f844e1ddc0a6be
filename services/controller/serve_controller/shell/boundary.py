"""The one crossing between what is decided and the outside; and crash mode, which ends the process at one."""

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


_log = structlog.get_logger()

AT: Final = "MUSTER_CRASH_AT"
PROBABILITY: Final = "MUSTER_CRASH_PROBABILITY"
SEED: Final = "MUSTER_CRASH_SEED"
_NTH_MAX: Final = 1_000_000
_SEED_MAX: Final = 2**32 - 1
_SEND_S: Final = 0.02
"""What was handed to NATS leaves the process a moment later; a crash *after* a message must find it sent."""


class CrashPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One place to die at."""

    effect: str
    is_after: bool
    nth: int = 1
    """Of this process' effects of that name."""

    def __str__(self) -> str:
        return f"{'after' if self.is_after else 'before'}:{self.effect}:{self.nth}"


class CrashMode(msgspec.Struct, frozen=True, kw_only=True):
    """When to die; at least one of the two is given."""

    at: CrashPoint | None
    probability: float
    """Before, and again after, each effect; 0 to 1."""
    seed: int


def read_crash_mode(environment: Environment) -> CrashMode | None:
    """What the environment asks for, or None. Raises `BadField` naming the variable."""
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
    """End at once, as by ``kill -9``: nothing is closed, released or written any more."""
    os.kill(os.getpid(), signal.SIGKILL)
    os._exit(137)  # the first process of a container cannot kill itself


def kill_after(flush: Callable[[], None]) -> Callable[[], None]:
    """`kill_this_process` after ``flush``: log lines leave by a thread, and the last one says where the end was."""

    def die() -> None:
        flush()
        kill_this_process()

    return die


class CrashingBoundary:
    """A boundary that does not let every effect through alive."""

    def __init__(self, inner: Boundary, mode: CrashMode, die: Callable[[], None] = kill_this_process) -> None:
        """``die`` does not return in a real process."""
        self._inner = inner
        self._mode = mode
        self._die = die
        self._draw = random.Random(mode.seed).random  # noqa: S311 - repeatable is what it must be
        self._begun: Counter[str] = Counter()
        self._done: Counter[str] = Counter()
        _log.warning(
            "crash_mode_is_on",
            message="this controller kills itself on purpose; never set this where it matters",
            at=None if mode.at is None else str(mode.at),
            probability=mode.probability,
            seed=mode.seed,
        )

    async def cross(self, effect: str, perform: Callable[[], Awaitable[T]]) -> T:
        """See `Boundary.cross`. What failed has not happened: there is no after."""
        self._begun[effect] += 1
        before = CrashPoint(effect=effect, is_after=False, nth=self._begun[effect])
        if self._is_to_die_at(before):
            self._crash(before)
        result = await self._inner.cross(effect, perform)
        self._done[effect] += 1
        after = CrashPoint(effect=effect, is_after=True, nth=self._done[effect])
        if self._is_to_die_at(after):
            await asyncio.sleep(_SEND_S)
            self._crash(after)
        return result

    def _is_to_die_at(self, point: CrashPoint) -> bool:
        is_drawn = self._mode.probability > 0 and self._draw() < self._mode.probability
        return is_drawn or point == self._mode.at

    def _crash(self, point: CrashPoint) -> None:
        _log.error("crash_mode_kills", boundary=str(point))
        self._die()
