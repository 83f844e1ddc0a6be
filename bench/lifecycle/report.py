"""What is concluded from the rounds (medians, ratios, whether the limits are kept), and how it is shown.

Why a limit is judged round by round: where it is relative to bare Ray, both belong to the same minute of the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import median

import msgspec

from bench.console import describe_machine, now_text, table
from bench.lifecycle.story import (
    DELETE,
    FIRST_DEPLOY,
    REDEPLOY,
    ROLL,
    SCALE_UP,
    STORY,
    BareRound,
    SystemRound,
)

_HEAD = [
    *("change", "Muster s", "(min-max)", "first answer", "Ray Serve s", "first answer"),
    *("of Serve", "bare Ray s", "limit", "is", "kept"),
]


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that was measured within a few minutes."""

    busy_before: float
    """Share of all processors that others used just before, 0 to 1."""
    load_before: float
    """The load average of the last minute before; counts the round before this one too."""
    bare: BareRound
    muster: SystemRound
    serve: SystemRound | None


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the acceptance."""

    text: str
    at_most: float
    judged: Callable[[float, BareRound], float]
    """Of Muster's seconds and bare Ray's round, the number that the limit is about."""
    unit: str


LIMITS = {
    FIRST_DEPLOY: Limit(
        text="≤ 0.8 s over 1 bare actor", at_most=0.8, judged=lambda s, bare: s - bare.first_s, unit=" s over"
    ),
    REDEPLOY: Limit(text="≤ 1.0 s", at_most=1.0, judged=lambda s, _bare: s, unit=" s"),
    SCALE_UP: Limit(
        text="≤ 1.5 times 8 bare actors", at_most=1.5, judged=lambda s, bare: s / bare.eight_s, unit=" times"
    ),
    ROLL: Limit(text="≤ 3.5 s", at_most=3.5, judged=lambda s, _bare: s, unit=" s"),
    DELETE: Limit(text="≤ 0.5 s", at_most=0.5, judged=lambda s, _bare: s, unit=" s"),
}
_BARE: dict[str, Callable[[BareRound], float]] = {
    FIRST_DEPLOY: lambda bare: bare.first_s,
    REDEPLOY: lambda bare: bare.another_s,
    SCALE_UP: lambda bare: bare.eight_s,
}


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One change: medians over the rounds, in seconds."""

    step: str
    muster_s: float
    muster_s_min: float
    muster_s_max: float
    muster_answered_s: float | None
    serve_s: float | None
    serve_answered_s: float | None
    bare_s: float | None
    """As many bare actors in the same state of Ray's pool of processes; None where there is nothing alike."""
    of_serve: float | None
    """Muster's time over Ray Serve's of the same round."""
    limit: str
    judged: float
    judged_unit: str
    is_kept: bool


def conclude(rounds: Sequence[Round]) -> list[Line]:
    """One line for each change of the story, in its order."""
    return [_line(change.step, rounds) for change in STORY]


def _line(step: str, rounds: Sequence[Round]) -> Line:
    limit, bare = LIMITS[step], _BARE.get(step)
    own = [_done(r.muster, step) for r in rounds]
    peers = [(r, r.serve) for r in rounds if r.serve is not None]
    judged = median(limit.judged(_done(r.muster, step), r.bare) for r in rounds)
    return Line(
        step=step,
        muster_s=median(own),
        muster_s_min=min(own),
        muster_s_max=max(own),
        muster_answered_s=_median(_answered(r.muster, step) for r in rounds),
        serve_s=_median(_done(serve, step) for _, serve in peers),
        serve_answered_s=_median(_answered(serve, step) for _, serve in peers),
        bare_s=None if bare is None else median(bare(r.bare) for r in rounds),
        of_serve=_median(_done(r.muster, step) / _done(serve, step) for r, serve in peers),
        limit=limit.text,
        judged=judged,
        judged_unit=limit.unit,
        is_kept=judged <= limit.at_most,
    )


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _done(measured: SystemRound, step: str) -> float:
    return next(taken.done_s for taken in measured.taken if taken.step == step)


def _answered(measured: SystemRound, step: str) -> float | None:
    return next(taken.answered_s for taken in measured.taken if taken.step == step)


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a later comparison needs."""

    taken_at: str
    """ISO 8601, UTC."""
    machine: str
    settle_s: float
    cpus: int
    """That each Ray was told to have."""
    lines: list[Line]
    rounds: list[Round]


def make_report(rounds: Sequence[Round], lines: Sequence[Line], cpus: int, settle_s: float) -> Report:
    """The whole report."""
    return Report(
        taken_at=now_text(),
        machine=describe_machine(),
        cpus=cpus,
        settle_s=settle_s,
        lines=list(lines),
        rounds=list(rounds),
    )


def render(report: Report) -> str:
    """The table, with what one needs to know to read it."""
    busy = ", ".join(f"{r.busy_before:.0%} (load {r.load_before:.1f})" for r in report.rounds)
    heading = [
        f"{report.taken_at} · {report.machine}",
        f"medians of {len(report.rounds)} rounds; each system fresh and warmed up; {report.cpus} CPUs for Ray",
        f"{report.settle_s:g} s between two changes",
        "from the call until it is done: goal SUCCEEDED; serve.run or serve.delete returned",
        f"busy with others before each round: {busy}",
        _requests("Muster", [r.muster for r in report.rounds]),
    ]
    peers = [r.serve for r in report.rounds if r.serve is not None]
    if peers:
        heading.append(_requests("Ray Serve", peers))
    rows = [_HEAD, *(_cells(line) for line in report.lines)]
    return "\n".join([*heading, "", table(rows, left=(0, 8))])


def _requests(name: str, rounds: Sequence[SystemRound]) -> str:
    failed, sent = sum(r.requests_failed for r in rounds), sum(r.requests for r in rounds)
    return f"{name}: {failed} of {sent} requests failed from the first answer until the deletion"


def _cells(line: Line) -> list[str]:
    return [
        line.step,
        _seconds(line.muster_s),
        f"{line.muster_s_min:.2f}-{line.muster_s_max:.2f}",
        _seconds(line.muster_answered_s),
        _seconds(line.serve_s),
        _seconds(line.serve_answered_s),
        _seconds(line.of_serve),
        _seconds(line.bare_s),
        line.limit,
        f"{line.judged:.2f}{line.judged_unit}",
        "yes" if line.is_kept else "NO",
    ]


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
