"""``python -m tests.simulation``: many seeds, every single crash of a story, and pairs of crashes of a shorter one.

Why a runner beside the tests: a defect that shows in one run of ten thousand is found by whoever lets this run for an
hour, and a seed that failed is told again, with its whole trace, by ``SEED=… SEEDS=1``.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor

import structlog

from tests.simulation.clients import Step
from tests.simulation.crashes import CrashPoint
from tests.simulation.runs import Outcome, run_seed
from tests.simulation.scenario import (
    ABORT_STORY,
    PAIR_STORY,
    PROMOTION_STORY,
    ROLLOUT_STORY,
    STORY,
    effects_of,
    run_story,
)

CHUNK = 25
TRACE_SHOWN = 60


def quiet() -> None:
    """What the controllers log is of no interest by the thousand."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


def digests(seeds: Iterable[int]) -> list[str]:
    """What tells one trace from another, of each seed."""
    quiet()
    return [run_seed(seed).digest for seed in seeds]


def _seeds(chunk: list[int]) -> list[Outcome]:
    return [_lean(run_seed(seed)) for seed in chunk]


def _singles(chunk: list[frozenset[CrashPoint]]) -> list[Outcome]:
    return [_lean(run_story(STORY, points)) for points in chunk]


def _pairs(chunk: list[frozenset[CrashPoint]]) -> list[Outcome]:
    return [_lean(run_story(PAIR_STORY, points)) for points in chunk]


def _rollout_singles(chunk: list[frozenset[CrashPoint]]) -> list[Outcome]:
    return [_lean(run_story(ROLLOUT_STORY, points)) for points in chunk]


def _promotion_pairs(chunk: list[frozenset[CrashPoint]]) -> list[Outcome]:
    return [_lean(run_story(PROMOTION_STORY, points)) for points in chunk]


def _abort_pairs(chunk: list[frozenset[CrashPoint]]) -> list[Outcome]:
    return [_lean(run_story(ABORT_STORY, points)) for points in chunk]


def _lean(outcome: Outcome) -> Outcome:
    """What need not go from one process to another stays behind."""
    return outcome if outcome.violations else outcome.without_trace()


def _chunks(items: Iterable[object]) -> list[list[object]]:
    found = iter(items)
    return list(iter(lambda: list(itertools.islice(found, CHUNK)), []))


def _sweep(
    pool: ProcessPoolExecutor, title: str, run: Callable[..., list[Outcome]], items: Iterable[object]
) -> list[Outcome]:
    begun, failed, count, virtual_s = time.monotonic(), [], 0, 0.0
    for outcomes in pool.map(run, _chunks(items)):
        for outcome in outcomes:
            count += 1
            virtual_s += outcome.virtual_s
            if outcome.violations:
                failed.append(outcome)
                print(f"  FAILED {outcome.name}: {outcome.violations[0][:600]}", flush=True)
    took_s = time.monotonic() - begun
    print(
        f"{title}: {count} in {took_s:.1f} s ({count / max(took_s, 1e-9):.0f}/s, "
        f"{virtual_s / 3600:.1f} simulated hours), {len(failed)} failed",
        flush=True,
    )
    return failed


def _points(story: list[Step]) -> list[CrashPoint]:
    return [(number, after) for number in range(effects_of(story)) for after in (False, True)]


def main() -> int:
    """0 when every promise was kept."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=2000, help="how many; 1 shows the trace")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--no-crashes", action="store_true", help="leave out the sweeps of crashes")
    options = parser.parse_args()
    quiet()
    if options.seeds == 1:
        outcome = run_seed(options.seed)
        print("\n".join(outcome.trace))
        print(f"{outcome.name}: {outcome.digest} {outcome.violations or 'kept every promise'}")
        return 1 if outcome.violations else 0
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, mp_context=context, initializer=quiet) as pool:
        seeds = range(options.seed, options.seed + options.seeds)
        failed = _sweep(pool, "seeds", _seeds, seeds)
        if not options.no_crashes:
            for title, run, story in (
                ("", _singles, STORY),
                (" in rollouts", _rollout_singles, ROLLOUT_STORY),
            ):
                singles = (frozenset({point}) for point in _points(story))
                failed += _sweep(pool, f"single crashes{title}", run, singles)
            for title, run, story in (
                ("", _pairs, PAIR_STORY),
                (" in a promotion", _promotion_pairs, PROMOTION_STORY),
                (" in an abort", _abort_pairs, ABORT_STORY),
            ):
                pairs = (frozenset(pair) for pair in itertools.combinations(_points(story), 2))
                failed += _sweep(pool, f"pairs of crashes{title}", run, pairs)
    for outcome in failed[:3]:
        print(f"\n{outcome.name}, the end of its trace:")
        print("\n".join(outcome.trace[-TRACE_SHOWN:]))
    return 1 if failed else 0
