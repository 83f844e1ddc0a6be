"""``python -m bench.restored``: Postgres restored to 20 changes ago under load, and backups under changes.

Why beside `tests/integration/test_restored_store.py`, which restores twice: here one dump is restored many times over
into one running stack, while its leader lives, with a stop and start, and again before everything is as it was.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from tests.integration.test_restored_store import (
    LIVE,
    STOP_AND_START,
    backups_under_changes,
    configurations,
    restored_under_load,
    twenty_changes,
)
from tests.support.loads.steady_load import SteadyLoad
from tests.support.stacks.loaded_stack import ROUTE, LoadedStack

CONVERGED_WITHIN_S = 30.0


@contextlib.asynccontextmanager
async def _stack() -> AsyncIterator[LoadedStack]:
    with tempfile.TemporaryDirectory(prefix="mr-", ignore_cleanup_errors=True) as text:
        async with LoadedStack.running(Path(text)) as stack:
            yield stack


async def measure(restores: int, backups: int) -> bool:
    """Tell; True when everything was as it was within `CONVERGED_WITHIN_S`. Raises when a request failed."""
    longest_s = 0.0
    losses = [configurations(1), configurations(2), *(twenty_changes() for _ in range(restores))]
    for how, times in ((LIVE, 1), (STOP_AND_START, 1), (LIVE, 2)):
        async with _stack() as stack:
            took_s = await restored_under_load(stack, losses, how=how, times=times)
            longest_s = max(longest_s, *took_s)
            print(f"as it was after {', '.join(f'{s:.1f}' for s in took_s)} s", flush=True)
    async with _stack() as stack:
        await stack.deployed("v1", 1)
        async with SteadyLoad.running(ROUTE, stack.http_ports) as load:
            print(await backups_under_changes(stack, backups, 0.2), flush=True)
        load.result("backups")
    return longest_s < CONVERGED_WITHIN_S


def main() -> int:
    """0: nothing failed, and it was quick enough; 1: it was not."""
    parser = argparse.ArgumentParser(prog="python -m bench.restored", description=__doc__)
    parser.add_argument(
        "--restores", type=int, default=3, help="after 20 changes; two more after new configurations"
    )
    parser.add_argument("--backups", type=int, default=60)
    options = parser.parse_args()
    return 0 if asyncio.run(measure(options.restores, options.backups)) else 1


if __name__ == "__main__":
    sys.exit(main())
