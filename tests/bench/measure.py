"""What is measured in which order, and what is concluded from it.

Why interleaved: a machine gets slower and faster while we measure; systems measured within seconds of one another
are compared fairly although the absolute figures drift. Hence also ratios within a round, and their median.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from statistics import median

import msgspec

from tests.bench.wrk import WrkFigures

WARM_UP_S = 1


class System(msgspec.Struct, frozen=True, kw_only=True):
    """Something that answers HTTP at ``url``."""

    name: str
    url: str


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One run of the load generator."""

    round: int
    connections: int
    system: System


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """What a run measured."""

    run: Run
    figures: WrkFigures
    warm_up_errors: int

    @property
    def errors(self) -> int:
        """Of the warm-up and of what was measured."""
        return self.figures.errors + self.warm_up_errors


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """The conclusion about one system at one number of connections: medians over the rounds."""

    system: str
    connections: int
    requests_per_s: float
    requests_per_s_min: float
    requests_per_s_max: float
    p50_ms: float
    p99_ms: float
    ratio: float | None
    """Its requests/s over those of the reference in the same round; None without a reference."""
    errors: int
    """Over all rounds, warm-up included."""


Load = Callable[[str, int, int], Awaitable[WrkFigures]]
"""(url, connections, seconds)."""


def plan(systems: Sequence[System], connections: Sequence[int], rounds: int) -> Iterator[Run]:
    """Every system, one after the other, at each number of connections, in each round."""
    for number in range(rounds):
        for count in connections:
            for system in systems:
                yield Run(round=number, connections=count, system=system)


async def measure(run: Run, seconds: int, load: Load) -> Sample:
    """Warm up and measure; errors of both count."""
    warm_up = await load(run.system.url, run.connections, WARM_UP_S)
    figures = await load(run.system.url, run.connections, seconds)
    return Sample(run=run, figures=figures, warm_up_errors=warm_up.errors)


def conclude(samples: Sequence[Sample], reference: str) -> list[Line]:
    """One line for each system at each number of connections, in the order in which they were measured."""
    rates = {
        (sample.run.round, sample.run.connections): sample.figures.requests_per_s
        for sample in samples
        if sample.run.system.name == reference
    }
    groups: dict[tuple[int, str], list[Sample]] = {}
    for sample in samples:
        groups.setdefault((sample.run.connections, sample.run.system.name), []).append(sample)
    return [_line(name, count, group, rates) for (count, name), group in groups.items()]


def _line(name: str, count: int, group: Sequence[Sample], rates: dict[tuple[int, int], float]) -> Line:
    own = [sample.figures.requests_per_s for sample in group]
    ratios = [
        sample.figures.requests_per_s / rate
        for sample in group
        if (rate := rates.get((sample.run.round, sample.run.connections)))
    ]
    return Line(
        system=name,
        connections=count,
        requests_per_s=median(own),
        requests_per_s_min=min(own),
        requests_per_s_max=max(own),
        p50_ms=median(sample.figures.p50_ms for sample in group),
        p99_ms=median(sample.figures.p99_ms for sample in group),
        ratio=median(ratios) if ratios else None,
        errors=sum(sample.errors for sample in group),
    )
