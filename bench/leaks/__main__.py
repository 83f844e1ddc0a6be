"""``python -m bench.leaks``: what 100,000 requests leave behind when a third of the clients leaves early.

Why not in `make test`: it takes minutes. There runs a twentieth of it (`tests/integration/test_leaks.py`).
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from pathlib import Path

from tests.support.loads import leaving_load
from tests.support.stacks.bare_stack import BareStack

RSS_GROWTH_MAX_BYTES = 16 * 1024 * 1024


async def measure(requests: int, seed: int, rounds: int) -> bool:
    """Tell; True when nothing was left."""
    is_clean = True
    with tempfile.TemporaryDirectory(prefix="mk-") as text:
        async with BareStack.running(Path(text)) as stack:
            await leaving_load.start(stack)
            warm_up = max(requests // 10, 1000)
            for number in range(rounds):
                part = requests // rounds
                outcome = await leaving_load.run(
                    stack, seed=seed + number, warm_up=warm_up if number == 0 else 0, requests=part
                )
                print("\n".join(outcome.lines()), flush=True)
                grown = [g for g in outcome.growths if g.rss_growth_bytes > RSS_GROWTH_MAX_BYTES / rounds]
                if number and grown:  # the first part may still fill what stays
                    print(f"grows: {', '.join(growth.name for growth in grown)}")
                if outcome.held() or outcome.unexpected or (number and grown):
                    is_clean = False
    return is_clean


def main() -> int:
    """0: nothing is left behind; 1: something is."""
    parser = argparse.ArgumentParser(prog="python -m bench.leaks", description=__doc__)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=4, help="look so often; memory must be flat over them")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(32))
    options = parser.parse_args()
    began = time.monotonic()
    is_clean = asyncio.run(measure(options.requests, options.seed, options.rounds))
    print(f"{'nothing' if is_clean else 'SOMETHING'} is left behind; took {time.monotonic() - began:.0f} s")
    return 0 if is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
