"""The loads that the policies are compared on, and a simulated backend that serves them.

Why a simulation: the same hours of load must meet every policy, request for request, and in seconds. Loads are
generated before anything runs. A trace is a rate for every second; arrivals are Poisson with that rate and service
times lognormal, both from a fixed seed. Callers are independent and do not wait for each other (open loop): the hard
case, as a queue grows without limit while replicas are too few. The backend is exact for what it models: requests begin
in the order in which they came, at the moment a place in a replica is free.
"""

from __future__ import annotations

import heapq
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

START_S: Final = 3.0
"""From the decision until a new replica takes requests."""
ONGOING_MAX: Final = 5
"""Requests that a replica works on at once (``max_ongoing_requests``)."""
LONG_WAIT_S: Final = 1.0
SERVICE_S: Final = 0.1
_SERVICE_SIGMA: Final = 0.5
"""Of the logarithm: a tenth of the requests takes more than 1.7 times the mean."""
TARGET: Final = 2.0
"""Ongoing requests per replica that every policy aims at."""
SEED: Final = 20_240_607

Rates = NDArray[np.float64]


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """One load: when requests come and how long each takes, in seconds."""

    name: str
    about: str
    length_s: float
    num_replicas: int
    """How many there are when it begins."""
    arrivals: NDArray[np.float64]
    services: NDArray[np.float64]


def make_traces(seed: int = SEED, scale: float = 1.0, only: str = "") -> list[Trace]:
    """All of them, or ``only`` one; ``scale`` shortens each."""
    shapes = [
        ("step", "1.2 → 14 replicas' worth, back after 20 min", 2, _step),
        ("ramp", "up to 20 over 10 min, 10 min there, down over 10 min", 1, _ramp),
        ("spike", "2, and twice 16 for 20 s", 2, _spike),
        ("diurnal", "a day of 1 to 15 in one hour", 1, _diurnal),
        ("on/off", "2 min at next to nothing, 2 min at 8", 1, _on_off),
        ("heavy tail", "2, and Pareto bursts of 10 s", 2, _heavy_tail),
        ("threshold", "10 ± 3 %, where 10 and 11 are as right", 10, _threshold),
    ]
    traces = []
    for number, (name, about, num_replicas, shape) in enumerate(shapes):
        if only not in ("", name):
            continue
        rng = np.random.default_rng([seed, number])
        replicas = shape(rng)
        replicas = replicas[: max(int(len(replicas) * scale), 1)]
        traces.append(_trace(name, about, num_replicas, replicas, rng))
    return traces


def _trace(name: str, about: str, num_replicas: int, replicas: Rates, rng: np.random.Generator) -> Trace:
    """``replicas``: for each second, how many replicas' worth of requests are ongoing if none has to wait."""
    counts = rng.poisson(replicas * TARGET / SERVICE_S)
    seconds = np.repeat(np.arange(len(replicas), dtype=np.float64), counts)
    arrivals = np.sort(seconds + rng.random(len(seconds)))
    services = rng.lognormal(-(_SERVICE_SIGMA**2) / 2, _SERVICE_SIGMA, len(seconds)) * SERVICE_S
    return Trace(
        name=name,
        about=about,
        length_s=float(len(replicas)),
        num_replicas=num_replicas,
        arrivals=arrivals,
        services=services,
    )


def _step(_rng: np.random.Generator) -> Rates:
    return np.concatenate([np.full(120, 1.2), np.full(1200, 14.0), np.full(1080, 1.2)])


def _ramp(_rng: np.random.Generator) -> Rates:
    return np.concatenate(
        [np.linspace(0.5, 20, 600), np.full(600, 20.0), np.linspace(20, 0.5, 600), np.full(600, 0.5)]
    )


def _spike(_rng: np.random.Generator) -> Rates:
    rates = np.full(2400, 2.0)
    rates[300:320] = rates[1200:1220] = 16.0
    return rates


def _diurnal(_rng: np.random.Generator) -> Rates:
    return 8.0 - 7.0 * np.cos(np.linspace(0, 2 * np.pi, 3600))


def _on_off(_rng: np.random.Generator) -> Rates:
    return np.tile(np.concatenate([np.full(120, 0.1), np.full(120, 8.0)]), 10)


def _heavy_tail(rng: np.random.Generator) -> Rates:
    rates = np.full(2400, 2.0)
    at = 0.0
    while (at := at + 20 + rng.exponential(70)) < len(rates) - 10:
        rates[int(at) : int(at) + 10] += min(3.0 * (rng.pareto(1.5) + 1), 100.0)
    return rates


def _threshold(rng: np.random.Generator) -> Rates:
    noise = np.repeat(rng.normal(0, 0.03, 240), 15)
    return 10.0 * (1 + noise)


class Backend:
    """Replicas and their common queue. Time only moves forward, in `advance`."""

    def __init__(self, trace: Trace, num_replicas: int) -> None:
        self.now = 0.0
        self.target = num_replicas
        self.num_running = num_replicas
        self.replica_seconds = 0.0
        """Of all that were decided on, those that start included: they take their room already."""
        self.most = num_replicas
        self.moves: list[tuple[float, int]] = []
        """When the number was changed, and by how many."""
        self.waits: list[float] = []
        """Of every request that has begun, how long it waited."""
        self._arrivals = trace.arrivals.tolist()
        self._services = trace.services.tolist()
        self._arrived_sums = np.concatenate([[0.0], np.cumsum(trace.arrivals)])
        self._arrivals_array: NDArray[np.float64] = trace.arrivals
        self._begun = 0
        self._begun_sum = 0.0
        self._ended = 0
        self._ended_sum = 0.0
        self._busy: list[float] = []
        """When each request that is worked on ends; a heap."""
        self._starting: list[float] = []
        """When each replica that starts will run; a heap."""

    def scale(self, target: int) -> None:
        """Have ``target`` replicas: more take `START_S`, fewer take no further request at once."""
        change = target - self.target
        if not change:
            return
        self.moves.append((self.now, change))
        self.target = target
        self.most = max(self.most, target)
        while len(self._starting) + self.num_running < target:
            heapq.heappush(self._starting, self.now + START_S)
        while self._starting and len(self._starting) + self.num_running > target:
            self._starting.remove(max(self._starting))
        self.num_running = min(self.num_running, target)

    def advance(self, until: float) -> None:
        """Let everything happen up to ``until``."""
        while self._starting and self._starting[0] <= until:
            self._work(heapq.heappop(self._starting))
            self.num_running += 1
        self._work(until)

    def _work(self, until: float) -> None:
        places = self.num_running * ONGOING_MAX
        busy, arrivals, services, begun = self._busy, self._arrivals, self._services, self._begun
        earliest, count = self.now, len(arrivals)
        while places and begun < count:
            begins_at = max(arrivals[begun], earliest)
            if begins_at >= until:
                break
            while busy and (busy[0] <= begins_at or len(busy) >= places):
                if busy[0] >= until:
                    break
                ended_at = heapq.heappop(busy)
                self._ended += 1
                self._ended_sum += ended_at
                begins_at = max(begins_at, ended_at)
            if len(busy) >= places:
                break
            earliest = begins_at
            heapq.heappush(busy, begins_at + services[begun])
            self.waits.append(begins_at - arrivals[begun])
            self._begun_sum += begins_at
            begun += 1
        while busy and busy[0] <= until:
            self._ended_sum += heapq.heappop(busy)
            self._ended += 1
        self._begun = begun
        self.replica_seconds += self.target * (until - self.now)
        self.now = until

    def counters(self) -> Counters:
        """What a scrape finds now."""
        arrived = int(np.searchsorted(self._arrivals_array, self.now, side="left"))
        arrived = max(arrived, self._begun)
        waited = arrived * self.now - float(self._arrived_sums[arrived])
        begun = self._begun * self.now - self._begun_sum
        ended = self._ended * self.now - self._ended_sum
        return Counters(
            at=self.now,
            queued_s=waited - begun,
            ongoing_s=begun - ended,
            queued=arrived - self._begun,
            ongoing=self._begun - self._ended,
        )


class Counters(msgspec.Struct, frozen=True, kw_only=True):
    """The two integrals that the load is measured with, and the gauges of the same moment."""

    at: float
    queued_s: float
    ongoing_s: float
    queued: int
    ongoing: int
