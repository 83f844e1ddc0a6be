"""``python -m bench.capture_cost``: what it costs to capture 1 % of all requests, with their bodies.

One stack, whose capture is switched on and off again and again. Why by CPU time of the whole stack, nats-server and
JetStream included: what is captured is redacted and published after the caller has its response, so the rate of one
busy client may not show it. Why pairs: a machine gets slower and faster while we measure.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from pathlib import Path
from statistics import median
from typing import Final

import msgspec

from bench.measure import Served
from bench.meters import Meter
from bench.muster_stack import MODELS_DIR, deploy_all
from bench.wrk import find_wrk, run_wrk
from muster.client import connect_stack
from muster.client.admin import AdminClient
from muster.embedded import EmbeddedStack
from serve_common.api.commands import SetCapture
from tests.support.identities import admin_address
from tests.support.servers.reserved_port import ANY_PORTS

CONNECTIONS: Final = 64
_SHARE: Final = 0.01
_WITHIN_S: Final = 60.0
_RESAMPLES: Final = 10_000


class Pair(msgspec.Struct, frozen=True):
    """Microseconds of CPU of the whole stack for one request, and requests/s."""

    cpu_us: float
    cpu_us_off: float
    rate: float
    rate_off: float

    @property
    def ratio(self) -> float:
        """Of CPU, with captures over without."""
        return self.cpu_us / self.cpu_us_off


async def measure_captures(pairs: int, seconds: int) -> list[Pair]:
    """So many pairs of runs of so many seconds, in turn one or the other first."""
    wrk = find_wrk()
    with tempfile.TemporaryDirectory(prefix="mc-", ignore_cleanup_errors=True) as directory:
        async with EmbeddedStack(Path(directory), ANY_PORTS) as stack:
            address = admin_address(stack.record)
            await deploy_all(address, [Served.NOOP], str(MODELS_DIR))
            url = f"{stack.record.http_url}/{Served.NOOP.value}"
            async with connect_stack(address) as reached:

                async def run(share: float) -> tuple[float, float]:
                    await _set(reached.admin, share)
                    async with Meter.of_stack(stack.record.stack_id).watching() as usage:
                        figures = await run_wrk(wrk, url, connections=CONNECTIONS, seconds=seconds)
                    assert not figures.errors, figures
                    cpu_s = sum(each.cpu_s for each in usage.values())
                    return cpu_s * 1e6 / figures.requests, figures.requests_per_s

                await run(_SHARE)  # warms up
                found = []
                for number in range(pairs):
                    shares = (0.0, _SHARE) if number % 2 else (_SHARE, 0.0)
                    by_share = {share: await run(share) for share in shares}
                    (cpu_us, rate), (cpu_us_off, rate_off) = by_share[_SHARE], by_share[0.0]
                    found.append(Pair(cpu_us, cpu_us_off, rate, rate_off))
                return found


async def _set(admin: AdminClient, share: float) -> None:
    reply = await admin.call(SetCapture(endpoint=Served.NOOP.value, share=share, bodies=share > 0))
    if reply.goal_id is not None:
        await admin.wait_for_goal(reply.goal_id, deadline_s=_WITHIN_S)


def interval(pairs: list[Pair]) -> tuple[float, float]:
    """The 90 % interval of the median ratio, by resampling."""
    rng = random.Random(0)
    ratios = [pair.ratio for pair in pairs]
    medians = sorted(median(rng.choices(ratios, k=len(ratios))) for _ in range(_RESAMPLES))
    return medians[_RESAMPLES // 20], medians[-_RESAMPLES // 20]


def main() -> None:
    """Measure and tell."""
    parser = argparse.ArgumentParser(prog="python -m bench.capture_cost", description=__doc__)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--seconds", type=int, default=4, help="of one run")
    options = parser.parse_args()
    pairs = asyncio.run(measure_captures(options.pairs, options.seconds))
    low, high = interval(pairs)
    print(
        f"capture of 1 % with bodies, c={CONNECTIONS}: {median(pair.ratio for pair in pairs):.4f} of the CPU for one "
        f"request without ({low:.4f}-{high:.4f}, 90 %, {len(pairs)} pairs), "
        f"{median(pair.cpu_us for pair in pairs):.1f} instead of {median(pair.cpu_us_off for pair in pairs):.1f} µs in "
        f"the whole stack; {median(pair.rate for pair in pairs):,.0f} instead of "
        f"{median(pair.rate_off for pair in pairs):,.0f} requests/s"
    )


if __name__ == "__main__":
    main()
