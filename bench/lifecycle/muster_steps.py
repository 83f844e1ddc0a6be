"""The story by a whole private Muster: the embedded stack, asked over one open admin connection."""

from __future__ import annotations

import asyncio
from pathlib import Path
from urllib.parse import urlsplit

from bench.lifecycle.answer_watch import AnswerWatch
from bench.lifecycle.story import (
    CHANGE_TIMEOUT_S,
    FIRST_DEPLOY,
    REPLICA_CPUS,
    STORY,
    WARM_UP,
    Change,
    SystemRound,
    Taken,
)
from muster.client import StackAddress, connect_stack
from muster.client.admin import AdminClient
from muster.embedded import EmbeddedStack, StackFailed, StackOptions
from muster.secrets import Secrets
from serve_common.api.commands import ChangeReply, DeleteDeployment, Deploy
from serve_common.api.views import GoalStatus
from serve_common.config.backend import BackendConfig, RayActorOptions, ReplicaConfig
from serve_common.identities.roles import Role

_NAME, _ROUTE = "noop", "/noop"
_MODEL_DIR = Path(__file__).parent / "model"


async def measure_muster(state_dir: Path, cpus: int, settle_s: float) -> SystemRound:
    """One round of a fresh stack; everything is gone afterwards.

    Raises `StackFailed` when it does not start or a change does not succeed, and what the controller refuses.
    """
    options = StackOptions(
        http_port=0,
        nats_port=0,
        controller_ops_port=0,
        proxy_ops_port=0,
        host_ops_port=0,
        num_cpus=cpus,
    )
    async with EmbeddedStack(state_dir, options) as stack:
        record = stack.record
        credentials_file = str(Secrets(Path(record.secrets)).credentials_file(Role.ADMIN))
        port = urlsplit(record.http_url).port
        assert port is not None, record.http_url
        async with connect_stack(
            StackAddress(urls=(record.nats_url,), credentials_file=credentials_file)
        ) as reached:
            with AnswerWatch(port, _ROUTE) as watch:
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


async def _taken(admin: AdminClient, watch: AnswerWatch, change: Change, last: str | None) -> Taken:
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
        return await admin.call(DeleteDeployment(name=_NAME))
    return await admin.call(
        Deploy(
            name=_NAME,
            version=change.version,
            replica_config=ReplicaConfig(
                import_path="versioned_noop:VersionedNoop",
                app_dir=str(_MODEL_DIR),
                init_args=[change.version],
                ray_actor_options=RayActorOptions(num_cpus=REPLICA_CPUS),
            ),
            backend_config=BackendConfig(num_replicas=change.num_replicas),
            route_prefix=_ROUTE,
        )
    )
