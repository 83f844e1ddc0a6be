"""Random stories in random storms; `make simulate` runs many more."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

import pytest

from tests.simulation.runs import run_seed
from tests.simulation.stories import COMMANDS
from tests.simulation.weather import MISHAPS
from tests.support.paths import ROOT

SEEDS = 120
"""More than any mutant of `test_mutants` needs until it shows."""
BLOCKS = 4


@pytest.mark.timeout(300)
@pytest.mark.parametrize("block", range(BLOCKS))
def test_no_storm_breaks_a_promise(block: int) -> None:
    size = SEEDS // BLOCKS
    outcomes = [run_seed(seed) for seed in range(block * size, (block + 1) * size)]
    assert [(o.name, o.violations) for o in outcomes if o.violations] == []
    assert sum(o.asked for o in outcomes) > size, "plans of everything must have been compared"
    happened = Counter(name for o in outcomes for name in o.mishaps)
    assert len(happened) > len(MISHAPS) // 2
    told = " ".join(line for o in outcomes for line in o.trace)
    assert sum(f" commits {verb} " in told for verb in COMMANDS) > len(COMMANDS) // 2, "some are rare"


@pytest.mark.timeout(500)
def test_the_same_seed_gives_the_same_trace_whatever_the_hashes_are() -> None:
    """Sets and hash tries have another order in another process; no decision may depend on it."""
    code = "from tests.simulation.sweeps import digests; print(digests(range(40, 50)))"
    told = [_python(code, hash_seed) for hash_seed in ("1", "2")]
    assert told[0] == told[1]
    assert len(told[0].split(",")) == 10


def _python(code: str, hash_seed: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    return done.stdout
