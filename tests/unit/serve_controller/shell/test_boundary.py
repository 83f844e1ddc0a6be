"""Crash mode: what the environment may ask for, and that the process dies exactly there."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys

import pytest
from structlog.testing import capture_logs

from serve_common.errors import BadField, FencedOut, StoreUnavailable
from serve_common.runtime.settings import Environment
from serve_controller.shell.boundary import (
    EFFECTS,
    CrashingBoundary,
    CrashMode,
    CrashPoint,
    LeadersBoundary,
    read_crash_mode,
)


def mode(**variables: str) -> CrashMode | None:
    return read_crash_mode(Environment({f"MUSTER_CRASH_{name}": value for name, value in variables.items()}))


def test_nothing_is_asked_for_by_default() -> None:
    assert mode() is None
    assert mode(AT="", PROBABILITY="", SEED="") is None


@pytest.mark.parametrize("effect", EFFECTS)
@pytest.mark.parametrize("when", ["before", "after"])
def test_every_effect_can_be_named(effect: str, when: str) -> None:
    asked = mode(AT=f"{when}:{effect}")
    assert asked is not None
    assert asked.at == CrashPoint(effect=effect, is_after=when == "after", nth=1)
    assert asked.probability == 0.0


def test_the_number_and_the_seed_are_taken_as_given() -> None:
    asked = mode(AT="after:record_plan:3", PROBABILITY="0.02", SEED="7")
    assert asked == CrashMode(
        at=CrashPoint(effect="record_plan", is_after=True, nth=3), probability=0.02, seed=7
    )
    assert str(asked.at) == "after:record_plan:3"


def test_without_a_seed_each_process_draws_its_own() -> None:
    seeds = {asked.seed for _ in range(5) if (asked := mode(PROBABILITY="0.5")) is not None}
    assert len(seeds) > 1


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("AT", "record_plan", "must read before:<effect> or after:<effect>"),
        ("AT", "during:record_plan", "must read before:<effect> or after:<effect>"),
        ("AT", "after:", "must read before:<effect> or after:<effect>"),
        ("AT", "after:lunch", "'lunch' is no effect; there are record_command, record_plan"),
        ("AT", "after:record_plan:0", "must be a whole number from 1 to"),
        ("AT", "after:record_plan:", "must be a whole number from 1 to"),
        ("AT", "after:record_plan:-1", "must be a whole number from 1 to"),
        ("AT", "after:record_plan:²", "must be a whole number from 1 to"),
        ("AT", "after:record_plan:2:2", "must be a whole number from 1 to"),
        ("AT", "after:record_plan:" + "9" * 5000, "must be a whole number from 1 to"),
        ("PROBABILITY", "often", "'often' is not a number"),
        ("PROBABILITY", "1.1", "must be between 0 and 1"),
        ("PROBABILITY", "-0.1", "must be between 0 and 1"),
        ("PROBABILITY", "nan", "must be between 0 and 1"),
        ("SEED", "7", "is of no use without MUSTER_CRASH_PROBABILITY"),
    ],
)
def test_what_cannot_be_is_refused_with_the_variable(name: str, value: str, reason: str) -> None:
    with pytest.raises(BadField) as refused:
        mode(**{name: value})
    assert refused.value.field == f"MUSTER_CRASH_{name}"
    assert reason in str(refused.value)
    assert len(str(refused.value)) < 300


def test_a_seed_that_is_no_number_is_refused() -> None:
    with pytest.raises(BadField, match="MUSTER_CRASH_SEED"):
        mode(PROBABILITY="0.5", SEED="x")


class Died(BaseException):
    """In place of the process' death."""


def die() -> None:
    raise Died


class Inner:
    """Lets everything through, and keeps what was performed."""

    def __init__(self, *, fails: bool = False) -> None:
        self.performed: list[str] = []
        self.fails = fails

    async def cross(self, effect, perform):
        if self.fails:
            raise StoreUnavailable("away")
        self.performed.append(effect)
        return await perform()


async def nothing() -> int:
    return 42


def crashing(inner: Inner, at: str | None = None, probability: str = "0", seed: int = 1) -> CrashingBoundary:
    asked = mode(PROBABILITY=probability, SEED=str(seed), **({} if at is None else {"AT": at}))
    assert asked is not None
    return CrashingBoundary(inner, asked, die)


async def test_before_means_that_it_did_not_happen_and_after_that_it_did() -> None:
    for at, performed in (("before:record_plan:2", 1), ("after:record_plan:2", 2)):
        inner = Inner()
        with capture_logs() as logs:
            boundary = crashing(inner, at)
            assert await boundary.cross("publish_snapshot", nothing) == 42
            assert await boundary.cross("record_plan", nothing) == 42
            with pytest.raises(Died):
                await boundary.cross("record_plan", nothing)
        assert inner.performed.count("record_plan") == performed
        assert [line["event"] for line in logs] == ["crash_mode_is_on", "crash_mode_kills"]
        assert logs[0]["at"] == logs[1]["boundary"] == at


async def test_what_failed_has_no_after() -> None:
    inner = Inner(fails=True)
    boundary = crashing(inner, "after:record_plan")
    with pytest.raises(StoreUnavailable):
        await boundary.cross("record_plan", nothing)
    inner.fails = False
    with pytest.raises(Died):
        await boundary.cross("record_plan", nothing)


async def test_the_same_seed_dies_at_the_same_place() -> None:
    async def place(seed: int) -> tuple[int, str]:
        inner = Inner()
        with capture_logs() as logs:
            boundary = crashing(inner, probability="0.05", seed=seed)
            with contextlib.suppress(Died):
                while True:
                    await boundary.cross("record_plan", nothing)
        return len(inner.performed), logs[-1]["boundary"]

    places = {seed: await place(seed) for seed in range(8)}
    assert places == {seed: await place(seed) for seed in range(8)}
    assert len(set(places.values())) > 4


def test_the_process_ends_as_by_kill_9_and_the_line_is_out() -> None:
    script = """
import asyncio, atexit
from serve_common.telemetry.logs import configure_logs
from serve_controller.shell.boundary import OpenBoundary
from serve_controller.shell.boundary import CrashMode, CrashPoint, CrashingBoundary, kill_after

class Silent:
    def effect_performed(self, effect, seconds, error): pass
    def plan_made(self, seconds): pass

async def nothing(): pass

logs = configure_logs("controller")
atexit.register(print, "cleaned up")
at = CrashPoint(effect="reply", is_after=False)
mode = CrashMode(at=at, probability=0.0, seed=1)
boundary = CrashingBoundary(OpenBoundary(Silent(), lambda: 0.0), mode, kill_after(logs.flush))
try:
    asyncio.run(boundary.cross("reply", nothing))
finally:
    print("went on")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert done.stdout == ""
    assert '"boundary": "before:reply:1"' in done.stderr.splitlines()[-1]


async def test_who_may_lead_no_more_performs_nothing() -> None:
    inner, is_sure = Inner(), True
    boundary = LeadersBoundary(inner, lambda: is_sure)
    assert await boundary.cross("retract_snapshot", nothing) == 42
    is_sure = False
    with pytest.raises(FencedOut, match="retract_snapshot"):
        await boundary.cross("retract_snapshot", nothing)
    assert inner.performed == ["retract_snapshot"]
