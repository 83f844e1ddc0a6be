"""What every system is asked, in which order it is measured, and what is concluded from it.

Why a table of loads: a load that a system cannot serve is left out there and nowhere else. Why interleaved: a machine
gets slower and faster while we measure; systems measured within seconds of one another are compared fairly although the
absolute figures drift. Hence also ratios within a round, and their median.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from enum import Enum
from statistics import median
from typing import Final

import msgspec

from bench.meters import Meter, Usage

BARE, FLOOR_A, FLOOR_B, FLOOR_C, MUSTER = "bare", "floor A", "floor B", "floor C", "Muster"
MUSTER_BODIES = "Muster, direct=bodies"
KIB, MIB = 1024, 1024 * 1024
WARM_UP_S = 1


class Served(Enum):
    """What a system serves; a system has a URL for each that it does."""

    NOOP = "noop"
    ECHO = "echo"
    UPLOAD = "upload"
    TOKENS = "tokens"
    PACED = "paced"
    CHAIN = "chain"
    UNCOUNTED = "uncounted"
    """The no-op, without metrics."""


class Kind(Enum):
    """How a load is made and what its rate counts."""

    REQUESTS = "req/s"
    """By wrk."""
    TRANSFER = "MiB/s"
    """One body at a time, as fast as it is taken."""
    TOKENS = "tokens/s"
    """As fast as they come; ``first_ms`` is the first one's."""
    PACED = "tokens/s, paced"
    """At the model's own pace, each with the time when it was made: the latencies are those of tokens."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the plan."""

    name: str
    path: Served
    kind: Kind = Kind.REQUESTS
    connections: int = 1
    body_bytes: int = 0
    tokens: int = 0
    """In each answer; of a paced one, in each second."""
    reference: str = BARE
    """The system that ratios are taken of."""


NOOP_CONNECTIONS: Final = (1, 16, 64, 256)


def noop_loads(connections: Sequence[int]) -> list[Load]:
    """The least that can be served."""
    return [
        Load(name=f"no-op c={count}", path=Served.NOOP, connections=count, reference=FLOOR_B)
        for count in connections
    ]


OTHER_LOADS: Final = [
    Load(name="echo 1 KiB c=16", path=Served.ECHO, connections=16, body_bytes=KIB),
    Load(name="echo 1 MiB c=4", path=Served.ECHO, connections=4, body_bytes=MIB),
    Load(name="echo 100 MiB", path=Served.ECHO, kind=Kind.TRANSFER, body_bytes=100 * MIB),
    Load(name="upload 100 MiB", path=Served.UPLOAD, kind=Kind.TRANSFER, body_bytes=100 * MIB),
    Load(name="tokens, 1 client", path=Served.TOKENS, kind=Kind.TOKENS, tokens=20_000),
    Load(name="tokens, 50 clients", path=Served.TOKENS, kind=Kind.TOKENS, connections=50, tokens=2_000),
    Load(name="paced tokens, 1", path=Served.PACED, kind=Kind.PACED, tokens=200),
    Load(name="paced tokens, 50", path=Served.PACED, kind=Kind.PACED, connections=50, tokens=50),
    Load(name="chain of two c=1", path=Served.CHAIN, connections=1, reference=MUSTER),
    Load(name="chain of two c=16", path=Served.CHAIN, connections=16, reference=MUSTER),
]
PROCESSES_SHOWN_FOR: Final = ("no-op c=64", "upload 100 MiB")
"""Loads whose cost is told by process; everything is in the JSON."""


class System(msgspec.Struct, frozen=True, kw_only=True):
    """Something that answers HTTP: at ``urls``, by the values of `Served`."""

    name: str
    urls: dict[str, str]
    stack_id: str = ""
    """Mark of its processes; empty: they are not measured."""
    metrics_urls: list[str] = []


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a load generator."""

    round: int
    load: Load
    system: System


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What one run of a load generator measured."""

    requests: int
    rate: float
    """In what `Load.kind` says."""
    errors: int
    p50_ms: float | None = None
    p99_ms: float | None = None
    first_ms: float | None = None
    """Median time to the first token."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """What a run came to."""

    run: Run
    figures: Figures
    warm_up_errors: int
    usage: dict[str, Usage] = {}
    """By process."""

    @property
    def errors(self) -> int:
        """Of the warm-up and of what was measured."""
        return self.figures.errors + self.warm_up_errors


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """The conclusion about one system under one load: medians over the rounds."""

    load: str
    system: str
    unit: str
    rate: float
    rate_min: float
    rate_max: float
    p50_ms: float | None
    p99_ms: float | None
    first_ms: float | None
    ratio: float | None
    """Its rate over that of the load's reference in the same round; None without a reference."""
    errors: int
    """Over all rounds, warm-up included."""


class ProcessLine(msgspec.Struct, frozen=True, kw_only=True):
    """What a process cost under one load: medians over the rounds."""

    load: str
    system: str
    process: str
    cpu_s: float
    cpu_us_per_request: float
    rss_bytes: float
    rss_growth_bytes: float
    """From the start of the run to its highest moment; the largest of all rounds."""


Generate = Callable[[Load, str, int], Awaitable[Figures]]
"""(load, URL, seconds)."""


def plan(systems: Sequence[System], loads: Sequence[Load], rounds: int) -> Iterator[Run]:
    """Every system that serves it, one after the other, under each load, in each round."""
    for number in range(rounds):
        for load in loads:
            for system in systems:
                if load.path.value in system.urls:
                    yield Run(round=number, load=load, system=system)


async def measure(run: Run, seconds: int, generate: Generate, meter: Meter | None) -> Sample:
    """Warm up and measure; errors of both count."""
    url = run.system.urls[run.load.path.value]
    warm_up = await generate(run.load, url, WARM_UP_S)
    if meter is None:
        return Sample(run=run, figures=await generate(run.load, url, seconds), warm_up_errors=warm_up.errors)
    async with meter.watching() as usage:
        figures = await generate(run.load, url, seconds)
    return Sample(run=run, figures=figures, warm_up_errors=warm_up.errors, usage=usage)


def conclude(samples: Sequence[Sample]) -> list[Line]:
    """One line for each system under each load, in the order in which they were measured."""
    rates = {
        (sample.run.round, sample.run.load.name): sample.figures.rate
        for sample in samples
        if sample.run.system.name == sample.run.load.reference
    }
    return [_line(name, load, group, rates) for (load, name), group in _groups(samples).items()]


def conclude_processes(samples: Sequence[Sample], loads: Sequence[str]) -> list[ProcessLine]:
    """What each process of each system cost under these loads."""
    lines = []
    for (load, system), group in _groups(samples).items():
        if load in loads:
            names = sorted({name for sample in group for name in sample.usage})
            lines += [_process_line(load, system, name, group) for name in names]
    return lines


def _groups(samples: Sequence[Sample]) -> Mapping[tuple[str, str], list[Sample]]:
    groups: dict[tuple[str, str], list[Sample]] = {}
    for sample in samples:
        groups.setdefault((sample.run.load.name, sample.run.system.name), []).append(sample)
    return groups


def _line(name: str, load: str, group: Sequence[Sample], rates: Mapping[tuple[int, str], float]) -> Line:
    own = [sample.figures.rate for sample in group]
    ratios = [sample.figures.rate / rate for sample in group if (rate := rates.get((sample.run.round, load)))]
    return Line(
        load=load,
        system=name,
        unit=group[0].run.load.kind.value,
        rate=median(own),
        rate_min=min(own),
        rate_max=max(own),
        p50_ms=_median(sample.figures.p50_ms for sample in group),
        p99_ms=_median(sample.figures.p99_ms for sample in group),
        first_ms=_median(sample.figures.first_ms for sample in group),
        ratio=median(ratios) if ratios else None,
        errors=sum(sample.errors for sample in group),
    )


def _process_line(load: str, system: str, name: str, group: Sequence[Sample]) -> ProcessLine:
    there = [(sample, sample.usage[name]) for sample in group if name in sample.usage]
    return ProcessLine(
        load=load,
        system=system,
        process=name,
        cpu_s=median(usage.cpu_s for _, usage in there),
        cpu_us_per_request=median(
            usage.cpu_s * 1e6 / max(sample.figures.requests, 1) for sample, usage in there
        ),
        rss_bytes=median(usage.rss_bytes for _, usage in there),
        rss_growth_bytes=max(usage.rss_growth_bytes for _, usage in there),
    )


def _median(values: Iterator[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
