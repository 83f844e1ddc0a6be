"""``python -m bench.conflicts``: a minute of five clients with conflicting commands on a whole stack.

Why not in `make test`: it takes minutes. There runs a short storm (`tests/integration/test_storms.py`).
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from pathlib import Path

from muster.embedded import run_record as leftovers
from tests.support.loads import conflicts
from tests.support.stacks.loaded_stack import LoadedStack

CONSISTENT_WITHIN_S = 20.0


async def measure(options: argparse.Namespace) -> bool:
    """Tell; True when all is as promised."""
    with tempfile.TemporaryDirectory(prefix="mc-", ignore_cleanup_errors=True) as text:
        async with LoadedStack.running(Path(text)) as stack:
            storm = await conflicts.storm(stack, options.seconds, options.seed, kills=options.kills)
            stack_id = stack.stack_id
    print(storm.line())
    orphans = [process.pid for process in leftovers.find_marked(stack_id)]
    print(f"processes that are left: {orphans}")
    failed = set(storm.answers) - {"200"}
    is_well = storm.consistent_after_s <= CONSISTENT_WITHIN_S and not failed
    # A killed host and its requests take their time; that it comes to rest and leaves nothing holds all the same.
    return not orphans and not storm.wrong and (options.kills or is_well)


def main() -> int:
    """0: all as promised; 1: not."""
    parser = argparse.ArgumentParser(prog="python -m bench.conflicts", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long commands come")
    parser.add_argument("--kills", action="store_true", help="kill a host, a raylet and NATS meanwhile")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(32))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    is_well = asyncio.run(measure(options))
    print("as promised" if is_well else "NOT as promised")
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
