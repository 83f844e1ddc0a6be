"""``python -m bench.chaos``: a minute of killed replicas and several rounds of ordered changes under full load.

Why not in `make test`: it takes minutes. There runs a short storm (`tests/integration/test_replica_chaos.py`).
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.support.loads import chaos
from tests.support.stacks.loaded_stack import LoadedStack


async def measure(options: argparse.Namespace) -> bool:
    """Tell; True when nothing failed that may not fail."""
    with tempfile.TemporaryDirectory(prefix="mc-", ignore_cleanup_errors=True) as text:
        async with LoadedStack.running(Path(text)) as stack:
            changed = await chaos.ordered_changes(stack, "changing", options.rounds, options.requests_per_s)
            _tell(f"ordered changes, {changed.cuts} connections to NATS cut", changed)
            killed = await chaos.killed_replicas(
                stack, "killed", options.seconds, options.requests_per_s, options.seed
            )
            in_flight = sum(kill.fragile_in_flight for kill in killed.kills)
            _tell(
                f"{len(killed.kills)} replicas killed, {in_flight} requests that may not run twice under way",
                killed,
            )
    rates_kept = min(changed.load.rate, killed.load.rate) >= options.requests_per_s_min
    if not rates_kept:
        print(f"fewer than {options.requests_per_s_min} requests/s came through")
    return rates_kept and not changed.load.failures and not killed.load.forbidden and not killed.lost_beyond()


def _tell(title: str, storm: chaos.Storm) -> None:
    print(f"{title}: {storm.load.line()}", flush=True)
    for what, count in Counter(f"{failure.kind}: {failure.what}" for failure in storm.load.failures).items():
        print(f"  {count} x {what}")
    for beyond in storm.lost_beyond():
        print(f"  {beyond}")


def main() -> int:
    """0: nothing failed that may not fail; 1: something did."""
    parser = argparse.ArgumentParser(prog="python -m bench.chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long replicas are killed")
    parser.add_argument("--rounds", type=int, default=3, help="of ordered changes")
    parser.add_argument("--requests-per-s", type=float, default=600.0)
    parser.add_argument("--requests-per-s-min", type=float, default=500.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(32))
    options = parser.parse_args()
    began = time.monotonic()
    print(f"seed {options.seed}", flush=True)
    is_well = asyncio.run(measure(options))
    print(f"{'as promised' if is_well else 'NOT as promised'}; took {time.monotonic() - began:.0f} s")
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
