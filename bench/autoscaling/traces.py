"""The loads that the policies are compared on.

Why generated before anything runs: every policy then meets exactly the same requests. A trace is a rate for every
second; arrivals are Poisson with that rate and service times lognormal, both from a fixed seed. Callers are independent
and do not wait for each other (open loop): the hard case, as a queue grows without limit while replicas are too few.
"""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

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
        draw = np.random.default_rng([seed, number])
        replicas = shape(draw)
        replicas = replicas[: max(int(len(replicas) * scale), 1)]
        traces.append(_trace(name, about, num_replicas, replicas, draw))
    return traces


def _trace(name: str, about: str, num_replicas: int, replicas: Rates, draw: np.random.Generator) -> Trace:
    """``replicas``: for each second, how many replicas' worth of requests are ongoing if none has to wait."""
    counts = draw.poisson(replicas * TARGET / SERVICE_S)
    seconds = np.repeat(np.arange(len(replicas), dtype=np.float64), counts)
    arrivals = np.sort(seconds + draw.random(len(seconds)))
    services = draw.lognormal(-(_SERVICE_SIGMA**2) / 2, _SERVICE_SIGMA, len(seconds)) * SERVICE_S
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


def _heavy_tail(draw: np.random.Generator) -> Rates:
    rates = np.full(2400, 2.0)
    at = 0.0
    while (at := at + 20 + draw.exponential(70)) < len(rates) - 10:
        rates[int(at) : int(at) + 10] += min(3.0 * (draw.pareto(1.5) + 1), 100.0)
    return rates


def _threshold(draw: np.random.Generator) -> Rates:
    noise = np.repeat(draw.normal(0, 0.03, 240), 15)
    return 10.0 * (1 + noise)
