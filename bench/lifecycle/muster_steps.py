"""The story by a whole private Muster: the embedded stack, asked over one open admin connection."""

from __future__ import annotations

import asyncio
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from bench.lifecycle.story import (
    CHANGE_TIMEOUT_S,
    FIRST_DEPLOY,
    MODEL_DIR,
    NAME,
    REPLICA_CPUS,
    ROUTE,
    STORY,
    WARM_UP,
    Change,
    ResponseWatch,
    SystemRound,
    Taken,
)
from muster.client import connect_stack
from muster.client.admin import AdminClient
from muster.embedded import EmbeddedStack, StackFailed
from serve_common.api.commands import ChangeReply, DeleteDeployment, Deploy
from serve_common.api.views import GoalStatus
from serve_common.config.backend import BackendConfig, RayActorOptions, ReplicaConfig
from tests.support.identities import admin_address
from tests.support.servers.reserved_port import ANY_PORTS


async def measure_muster(state_dir: Path, cpus: int, settle_s: float) -> SystemRound:
    """One round of a fresh stack; everything is gone afterwards.

    Raises `StackFailed` when it does not start or a change does not succeed, and what the controller refuses.
    """
    options = msgspec.structs.replace(ANY_PORTS, num_cpus=cpus)
    async with EmbeddedStack(state_dir, options) as stack:
        record = stack.record
        port = urlsplit(record.http_url).port
        assert port is not None, record.http_url
        async with connect_stack(admin_address(record)) as reached:
            with ResponseWatch(port, ROUTE) as watch:
                await asyncio.sleep(settle_s)
                for change in WARM_UP:
                    await _taken(reached.admin, watch, change, None)
                    await asyncio.sleep(settle_s)
                taken, last = [], None
                for change in STORY:
                    taken.append(await _taken(reached.admin, watch, change, last))
                    last = change.version
                    await asyncio.sleep(settle_s)
    return SystemRound(taken=taken, requests=watch.requests, requests_failed=watch.requests_failed)


async def _taken(admin: AdminClient, watch: ResponseWatch, change: Change, last: str | None) -> Taken:
    loop = asyncio.get_running_loop()
    watch.must_serve = watch.must_serve and change.version is not None
    watch.expect(change.version)
    begun = loop.time()
    reply = await _query(admin, change)
    assert reply.goal_id is not None, f"{change} made no goal"
    goal = await admin.wait_for_goal(reply.goal_id, deadline_s=CHANGE_TIMEOUT_S)
    done_s = loop.time() - begun
    if goal.status is not GoalStatus.SUCCEEDED:
        raise StackFailed(f"{change.step} is {goal.status.value}: {goal.error or goal.message}")
    # The watch reads the same clock: asyncio's loop is `time.monotonic`.
    answered_s = await asyncio.to_thread(watch.seen_at, CHANGE_TIMEOUT_S) - begun
    watch.must_serve = watch.must_serve or change.step == FIRST_DEPLOY
    is_new = change.version != last
    return Taken(step=change.step, done_s=done_s, answered_s=answered_s if is_new else None)


async def _query(admin: AdminClient, change: Change) -> ChangeReply:
    if change.version is None:
        return await admin.call(DeleteDeployment(name=NAME))
    return await admin.call(
        Deploy(
            name=NAME,
            version=change.version,
            replica_config=ReplicaConfig(
                import_path="bench_models:VersionedNoop",
                app_dir=str(MODEL_DIR),
                init_args=[change.version],
                ray_actor_options=RayActorOptions(num_cpus=REPLICA_CPUS),
            ),
            backend_config=BackendConfig(num_replicas=change.num_replicas),
            route_prefix=ROUTE,
        )
    )
