"""Load of every kind on the deployments of `seen_app`: batches, models, calls, streams, sockets, failures, queues.

Why all at once: a dashboard's panel has data only while what it shows happens.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final

import aiohttp

from muster.client.admin import AdminClient
from serve_common.api.commands import (
    ChangeReply,
    ControlRollout,
    Deploy,
    RolloutAction,
    ShadowTraffic,
    StartRollout,
)
from serve_common.api.views import GoalStatus
from serve_common.config.autoscaling import AutoscalingConfig
from serve_common.config.backend import BackendConfig, RayActorOptions, ReplicaConfig
from serve_common.config.rollout import RolloutConfig
from serve_common.names import GoalId
from tests.support.paths import APPS

APP_DIR: Final = APPS / "seen_app"
SLOTS, QUEUED_MAX, BURST = 4, 8, 40
_CHANGE_LIMIT_S: Final = 120.0
_DEATH_EVERY_S: Final = 5.0


async def deploy(admin: AdminClient) -> None:
    """One that scales by its load, one that is called, one that sleeps until it is asked; and two rollouts."""
    scaled = AutoscalingConfig(
        max_replicas=2, metrics_interval_s=1, look_back_period_s=3, upscale_delay_s=0, downscale_delay_s=600
    )
    asleep = AutoscalingConfig(min_replicas=0, metrics_interval_s=1, look_back_period_s=3)
    seen = BackendConfig(
        autoscaling_config=scaled, max_concurrent_queries=SLOTS, max_queued_requests=QUEUED_MAX
    )
    # Proxy and handles each think that a replica is free: it refuses some.
    shared = BackendConfig(num_replicas=2, max_concurrent_queries=1)
    await _all_done(
        admin,
        await asyncio.gather(
            admin.call(_deploy("seen", "Seen", seen)),
            admin.call(_deploy("quiet", "Quiet", shared)),
            admin.call(_deploy("asleep", "Quiet", BackendConfig(autoscaling_config=asleep, num_replicas=0))),
        ),
    )
    shadow = ShadowTraffic(endpoint="default/seen", backend_tag="default/quiet", proportion=0.5)
    await _all_done(admin, [await admin.call(shadow)])
    await _roll_out(admin)


async def _roll_out(admin: AdminClient) -> None:
    """One that stays at its step, one whose answers are compared, and one that is aborted."""
    plain = [_deploy(name, "Quiet", BackendConfig()) for name in ("rolled", "compared", "aborted")]
    await _all_done(admin, [await admin.call(command) for command in plain])
    for command in plain:
        first = "shadow 100% wait" if command.name == "compared" else "50% wait"
        steps = RolloutConfig(steps=(first, "100%"))
        await admin.call(StartRollout(name=command.name, version="new", rollout=steps))
    await admin.call(ControlRollout(name="aborted", action=RolloutAction.ABORT))


def _deploy(name: str, class_name: str, backend_config: BackendConfig) -> Deploy:
    return Deploy(
        name=name,
        replica_config=ReplicaConfig(
            import_path=f"seen_models:{class_name}",
            app_dir=str(APP_DIR),
            ray_actor_options=RayActorOptions(num_cpus=0.5),
        ),
        backend_config=backend_config,
        route_prefix=f"/{name}",
    )


async def _all_done(admin: AdminClient, replies: list[ChangeReply]) -> None:
    for goal_id in [reply.goal_id for reply in replies if reply.goal_id is not None]:
        goal = await admin.wait_for_goal(GoalId(goal_id), deadline_s=_CHANGE_LIMIT_S)
        assert goal.status is GoalStatus.SUCCEEDED, goal


@asynccontextmanager
async def under_load(http_url: str) -> AsyncIterator[None]:
    """Load without a pause inside the block. A replica dies now and then, and one is woken."""
    async with aiohttp.ClientSession(http_url, timeout=aiohttp.ClientTimeout(total=20)) as session:
        models = itertools.cycle(("a", "b", "c"))
        kinds: list[Callable[[], Awaitable[None]]] = [
            *(lambda: _get(session, "/seen/wait?s=0.05") for _ in range(6)),
            *(lambda: _get(session, "/seen/batch?item=x") for _ in range(3)),
            lambda: _get(session, f"/seen/model?id={next(models)}"),
            *(lambda: _get(session, "/seen/call") for _ in range(3)),
            *(lambda: _get(session, "/quiet") for _ in range(2)),
            lambda: _get(session, "/seen/fail"),
            lambda: _get(session, "/seen/stream"),
            lambda: _burst(session),
            lambda: _talk(session),
            lambda: _get(session, "/asleep"),
            *(lambda: _get(session, "/rolled") for _ in range(2)),
            *(lambda: _get(session, "/compared") for _ in range(2)),
            lambda: _get(session, "/nowhere"),
            lambda: _die(session),
        ]
        async with asyncio.TaskGroup() as tasks:
            over = asyncio.Event()
            running = [tasks.create_task(_until(over, kind)) for kind in kinds]
            try:
                yield
            finally:
                over.set()  # a cancellation may be taken for the end of a request that took too long
                for task in running:
                    task.cancel()


async def _until(over: asyncio.Event, kind: Callable[[], Awaitable[None]]) -> None:
    while not over.is_set():
        await kind()
        await asyncio.sleep(0.02)  # a pace: there is no need for all that the machine can bear


async def _get(session: aiohttp.ClientSession, path: str) -> None:
    try:
        async with session.get(path) as response:
            await response.read()
    except (aiohttp.ClientError, TimeoutError):
        pass  # refused ones, failed ones and those of the replica that died are what is to be seen


async def _burst(session: aiohttp.ClientSession) -> None:
    """More than may wait."""
    await asyncio.gather(*(_get(session, "/seen/wait?s=0.1") for _ in range(BURST)))
    await asyncio.sleep(0.5)


async def _die(session: aiohttp.ClientSession) -> None:
    """Again and again: a start that is the first of its series is none that Prometheus' `rate` could see."""
    await _get(session, "/quiet?die=1")
    await asyncio.sleep(_DEATH_EVERY_S)


async def _talk(session: aiohttp.ClientSession) -> None:
    try:
        async with session.ws_connect("/seen/socket") as socket:
            for _ in range(20):
                await socket.send_str("x")
                await socket.receive(timeout=5)
                await asyncio.sleep(0.1)
    except (aiohttp.ClientError, TimeoutError):
        pass  # refused while everything is in use
