"""``python -m bench.scaling``: replicas follow a load of 1 to 50 clients and back, and wake from zero.

Without ``--nats`` it starts an embedded stack of its own, which has no Prometheus: loads are scraped. With it, it asks
a stack that runs already, such as the one of compose. It prints what happened second by second, and ends with 1 when a
request failed or replicas did not follow.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import math
import shlex
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import msgspec

from bench.scaling.clients import Asked, Clients, Poll, percentile_ms, rows, watch
from muster.client import StackAddress, connect_stack
from muster.client.admin import AdminClient
from muster.embedded import EmbeddedStack
from serve_common.api.commands import DeleteDeployment, Deploy, PauseAutoscaling, ResumeAutoscaling, Scale
from serve_common.api.queries import GetDeploymentInfo
from serve_common.api.views import GoalStatus
from serve_common.config.autoscaling import AutoscalingConfig
from serve_common.config.backend import BackendConfig, RayActorOptions, ReplicaConfig
from tests.support.identities import admin_address
from tests.support.servers.reserved_port import ANY_PORTS

NAME: Final = "waiting"
MODEL_DIR: Final = Path(__file__).parents[1] / "models"
INTERVAL_S: Final = 5.0
CONFIG: Final = AutoscalingConfig(
    min_replicas=1,
    max_replicas=30,
    target_ongoing_requests=2.0,
    metrics_interval_s=INTERVAL_S,
    look_back_period_s=15.0,
    upscale_delay_s=10.0,
    downscale_delay_s=30.0,
    downscale_to_zero_delay_s=10.0,
)


class Target(msgspec.Struct, frozen=True):
    """A stack to ask."""

    address: StackAddress
    http_url: str
    app_dir: str


@contextlib.asynccontextmanager
async def own_stack() -> AsyncIterator[Target]:
    """An embedded one, gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="muster-scaling-") as directory:
        async with EmbeddedStack(Path(directory), ANY_PORTS) as stack:
            record = stack.record
            yield Target(admin_address(record), record.http_url, str(MODEL_DIR))


async def deploy(admin: AdminClient, target: Target, scaling: AutoscalingConfig) -> None:
    """Make the deployment anew, and wait until it serves."""
    await admin.call(DeleteDeployment(name=NAME))
    reply = await admin.call(
        Deploy(
            name=NAME,
            route_prefix=f"/{NAME}",
            replica_config=ReplicaConfig(
                import_path="bench_models:Waiting",
                app_dir=target.app_dir,
                ray_actor_options=RayActorOptions(num_cpus=0.01),
            ),
            backend_config=BackendConfig(max_concurrent_queries=4, autoscaling_config=scaling),
        )
    )
    assert reply.goal_id is not None
    goal = await admin.wait_for_goal(reply.goal_id, deadline_s=60.0)
    assert goal.status is GoalStatus.SUCCEEDED, goal


async def step(
    admin: AdminClient, target: Target, config: AutoscalingConfig, high: int, high_s: float
) -> bool:
    """1 client, then ``high`` of them, then 1 again."""
    loop = asyncio.get_running_loop()
    await deploy(admin, target, config)
    polls: list[Poll] = []
    watching = loop.create_task(watch(admin, NAME, polls))
    async with Clients.asking(f"{target.http_url}/{NAME}") as clients:
        started_at = loop.time()
        clients.set(1)
        await asyncio.sleep(20.0)
        stepped_at = loop.time()
        clients.set(high)
        await asyncio.sleep(high_s)
        off_at = loop.time()
        clients.set(1)
        await asyncio.sleep(
            config.look_back_period_s + config.downscale_delay_s + 4 * config.metrics_interval_s
        )
    watching.cancel()
    print(f"\n1 → {high} clients at {stepped_at - started_at:.0f} s, back at {off_at - started_at:.0f} s")
    print("\n".join(rows(polls, clients.asked, started_at)))
    return judged(polls, clients.asked, stepped_at, off_at, high, config)


def judged(
    polls: list[Poll],
    asked: list[Asked],
    stepped_at: float,
    off_at: float,
    high: int,
    config: AutoscalingConfig,
) -> bool:
    """Say in a few lines whether replicas followed as they should."""
    failed = [a for a in asked if a.error]
    needed = high / config.target_ongoing_requests
    first = next((x.at - stepped_at for x in polls if x.at > stepped_at and x.decided > 1), None)
    enough = next((x.at - stepped_at for x in polls if x.at > stepped_at and x.running >= 0.9 * needed), None)
    settled = [a.took_s for a in asked if off_at - 10.0 < a.begun_at < off_at - 1.0]
    most = max(x.decided for x in polls)
    fell = next((x.at - off_at for x in polls if x.at > off_at and x.decided < needed / 2), None)
    print(f"requests {len(asked)}, failed {len(failed)} {[a.error for a in failed[:3]]}")
    print(f"first decision after {_s(first)} ({config.metrics_interval_s:g} s between evaluations)")
    print(f"nine tenths of {needed:g} replicas serve after {_s(enough)}; most that were decided: {most}")
    print(f"p99 of the last 10 s of the load: {percentile_ms(settled, 99):.0f} ms")
    print(f"less than half of them {_s(fell)} after the load was off; at the end {polls[-1].decided}")
    return (
        not failed
        and first is not None
        and first <= 2 * config.metrics_interval_s + 1.0
        and enough is not None
        and fell is not None
        and fell >= config.downscale_delay_s
        and polls[-1].decided == 1
    )


async def without_source(
    admin: AdminClient, target: Target, config: AutoscalingConfig, away: str, back: str, clients_count: int
) -> bool:
    """A steady load, while what loads are read from goes away and comes back: no wrong number at any moment."""
    loop = asyncio.get_running_loop()
    needed = math.ceil(clients_count / config.target_ongoing_requests)
    await deploy(admin, target, msgspec.structs.replace(config, initial_replicas=needed))
    polls: list[Poll] = []
    watching = loop.create_task(watch(admin, NAME, polls))
    marks: list[str] = []
    async with Clients.asking(f"{target.http_url}/{NAME}") as clients:
        started_at = loop.time()
        clients.set(clients_count)
        for command, wait_s in (("", 40.0), (away, 60.0), (back, 60.0)):
            if command:
                marks.append(f"{command!r} at {loop.time() - started_at:.0f} s")
                await asyncio.to_thread(subprocess.run, shlex.split(command), check=True, capture_output=True)
            await asyncio.sleep(wait_s)
    watching.cancel()
    print(f"\n{clients_count} clients; {', '.join(marks)}")
    print("\n".join(rows(polls, clients.asked, started_at)))
    decided = {poll.decided for poll in polls}
    sources = [source for source, _ in itertools.groupby(poll.source for poll in polls if poll.source)]
    failed = [a for a in clients.asked if a.error]
    print(
        f"requests {len(clients.asked)}, failed {len(failed)}; replicas decided: {sorted(decided)} ({needed} needed)"
    )
    print(f"read from: {' → '.join(sources)}")
    return not failed and all(needed - 1 <= each <= needed + 1 for each in decided)


async def from_zero(admin: AdminClient, target: Target, together: int) -> bool:
    """Scale to zero, ask once, and later ask so many at once."""
    loop = asyncio.get_running_loop()
    config = msgspec.structs.replace(CONFIG, min_replicas=0, max_replicas=4)
    await deploy(admin, target, msgspec.structs.replace(config, initial_replicas=0))
    start_s = await _start_s(admin)
    good = True
    async with Clients.asking(f"{target.http_url}/{NAME}") as clients:
        for count in (1, together):
            await _until_none(admin)
            begun_at = loop.time()
            asked = await asyncio.gather(*(clients.once() for _ in range(count)))
            failed = [a for a in asked if a.error]
            first, last = min(a.took_s for a in asked), max(a.took_s for a in asked)
            print(
                f"from zero, {count} at once: first answer after {first:.2f} s, last {last:.2f} s, "
                f"failed {len(failed)}; a replica's start takes {start_s:.2f} s"
            )
            good = good and not failed and first <= start_s + 0.1 + 0.5
            print(
                f"  scaled to zero again {await _until_none(admin) - begun_at:.0f} s after the first request"
            )
    return good


async def _start_s(admin: AdminClient) -> float:
    """How long a replica needs from the word to running."""
    loop = asyncio.get_running_loop()
    begun_at = loop.time()
    reply = await admin.call(Scale(backend_tag=NAME, num_replicas=1))
    assert reply.goal_id is not None
    await admin.wait_for_goal(reply.goal_id, deadline_s=60.0)
    took_s = loop.time() - begun_at
    await admin.call(ResumeAutoscaling(backend_tag=NAME))
    return took_s


async def _until_none(admin: AdminClient) -> float:
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(120.0):
        while (await admin.call(GetDeploymentInfo(name=NAME))).replicas:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.2)
    return loop.time()


def _s(seconds: float | None) -> str:
    return "never" if seconds is None else f"{seconds:.1f} s"


async def run(options: argparse.Namespace) -> bool:
    """All stories that were asked for."""
    if options.nats is None:
        own = own_stack()
    else:
        address = StackAddress(urls=(options.nats,), credentials_file=options.creds)
        own = contextlib.nullcontext(Target(address, options.http.rstrip("/"), options.app_dir))  # type: ignore[assignment]
    good = True
    async with own as target, connect_stack(target.address) as stack:
        admin = stack.admin
        if "step" in options.story:
            good = await step(admin, target, CONFIG, options.clients, options.seconds) and good
        if "zero" in options.story:
            good = await from_zero(admin, target, 100) and good
        if "source" in options.story:
            good = await without_source(admin, target, CONFIG, options.away, options.back, 20) and good
        await admin.call(PauseAutoscaling(backend_tag=NAME))
        await admin.call(DeleteDeployment(name=NAME))
    return good


def main() -> int:
    """The exit status: 0 when everything followed."""
    parser = argparse.ArgumentParser(prog="python -m bench.scaling", description=__doc__)
    parser.add_argument("--story", nargs="+", choices=["step", "zero", "source"], default=["step", "zero"])
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long the load is high")
    parser.add_argument("--nats", help="a stack that runs, such as nats://127.0.0.1:4222")
    parser.add_argument("--creds", help="NATS credentials file of an admin")
    parser.add_argument("--http", help="URL at which that stack takes requests")
    parser.add_argument("--away", default="", help="for the story 'source': what ends Prometheus")
    parser.add_argument("--back", default="", help="for the story 'source': what starts it again")
    parser.add_argument("--app-dir", help="directory bench/models, as that stack's replica hosts see it")
    options = parser.parse_args()
    return 0 if asyncio.run(run(options)) else 1


if __name__ == "__main__":
    sys.exit(main())
