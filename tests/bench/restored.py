"""``python -m tests.bench.restored``: Postgres restored to 20 changes ago under load, and backups under changes.

Why beside `tests/integration/test_restored_store.py`, which runs the same once: here it is done several times over.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from tests.integration.loaded_stack import ROUTE, LoadedStack
from tests.integration.steady_load import SteadyLoad
from tests.integration.test_restored_store import backups_under_changes, restored_under_load

CONVERGED_WITHIN_S = 30.0


@contextlib.asynccontextmanager
async def _stack() -> AsyncIterator[LoadedStack]:
    with tempfile.TemporaryDirectory(prefix="mr-", ignore_cleanup_errors=True) as text:
        async with LoadedStack.running(Path(text)) as stack:
            yield stack


async def measure(rounds: int, backups: int) -> bool:
    """Tell; True when everything was as it was within `CONVERGED_WITHIN_S`. Raises when a request failed."""
    longest_s = 0.0
    for how in ("live", "stop and start") * rounds:
        async with _stack() as stack:
            line, took_s = await restored_under_load(stack, how=how)
            longest_s = max(longest_s, took_s)
            print(f"{line}; as it was {took_s:.1f} s after", flush=True)
    async with _stack() as stack:
        await stack.deployed("v1", 1)
        async with SteadyLoad.running(ROUTE, stack.http_ports) as load:
            print(await backups_under_changes(stack, backups, 0.2), flush=True)
        load.result("backups")
    return longest_s < CONVERGED_WITHIN_S


def main() -> int:
    """0: nothing failed, and it was quick enough; 1: it was not."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.restored", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--backups", type=int, default=60)
    options = parser.parse_args()
    return 0 if asyncio.run(measure(options.rounds, options.backups)) else 1


if __name__ == "__main__":
    sys.exit(main())
