"""Real replicas follow a real load without Prometheus, down to none and back, and a policy of the user's."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from bench.scaling.clients import Clients
from muster.client import connect_stack
from muster.client.admin import AdminClient
from muster.embedded import EmbeddedStack
from serve_common.api.commands import Deploy
from serve_common.api.queries import GetAutoscaling, GetDeploymentInfo, GetEvents
from serve_common.api.views import AutoscalingView, EventView, GoalStatus
from serve_common.config.autoscaling import AutoscalingConfig
from serve_common.config.backend import BackendConfig, RayActorOptions, ReplicaConfig
from tests.support.identities import admin_address
from tests.support.paths import APPS
from tests.support.servers.reserved_port import ANY_PORTS

pytestmark = [pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]

APP_DIR = APPS / "scaling_app"
LIMIT_S = 90.0
"""For whatever comes about by and by, on a busy machine; measured it is on a quiet one, by `make bench-scaling`."""
QUICK = AutoscalingConfig(
    min_replicas=0,
    max_replicas=4,
    target_ongoing_requests=2.0,
    metrics_interval_s=1.0,
    look_back_period_s=4.0,
    upscale_delay_s=0.0,
    downscale_delay_s=2.0,
    panic_window_s=4.0,
    panic_hold_s=0.0,
)


class Scaled:
    """A stack and its one deployment."""

    def __init__(self, admin: AdminClient, http_url: str) -> None:
        self.admin = admin
        self.url = f"{http_url}/waiting"

    async def deploy(self, config: AutoscalingConfig) -> None:
        """Make it be so."""
        command = Deploy(
            name="waiting",
            version="v1",
            route_prefix="/waiting",
            replica_config=ReplicaConfig(
                import_path="waiting_model:Waiting",
                app_dir=str(APP_DIR),
                ray_actor_options=RayActorOptions(num_cpus=0.1),
            ),
            backend_config=BackendConfig(max_concurrent_queries=4, autoscaling_config=config),
        )
        reply = await self.admin.call(command)
        assert reply.goal_id is not None
        goal = await self.admin.wait_for_goal(reply.goal_id, deadline_s=LIMIT_S)
        assert goal.status is GoalStatus.SUCCEEDED, goal

    async def view(self) -> AutoscalingView:
        """What its autoscaling says."""
        (view,) = await self.admin.call(GetAutoscaling())
        return view

    async def running(self) -> int:
        """Replicas that serve."""
        info = await self.admin.call(GetDeploymentInfo(name="waiting"))
        return sum(replica.state == "running" for replica in info.replicas)

    async def until(self, is_so: Callable[[int, AutoscalingView], Any], what: str) -> AutoscalingView:
        """Wait for what running replicas and autoscaling should say."""
        view = await self.view()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LIMIT_S):
                while not is_so(await self.running(), view):
                    await asyncio.sleep(0.1)
                    view = await self.view()
                return view
        raise AssertionError(f"it never was so that {what}: {await self.running()} run, {view}")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scaled(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Scaled]:
    async with EmbeddedStack(tmp_path_factory.mktemp("scaled"), ANY_PORTS) as stack:
        record = stack.record
        async with connect_stack(admin_address(record)) as reached:
            yield Scaled(reached.admin, record.http_url)


async def test_replicas_follow_a_load_from_none_and_back_to_none_and_lose_no_request(scaled: Scaled) -> None:
    await scaled.deploy(QUICK)
    assert await scaled.running() == 0
    async with Clients.asking(scaled.url) as clients:
        await asyncio.gather(*(clients.once() for _ in range(20)))
        clients.set(8)
        view = await scaled.until(lambda running, _: running == 4, "four replicas bear eight clients")
        assert view.source in ("scrape", "")
        # More may have been seen before, those that waited for the first replica, and fewer in between.
        await scaled.until(
            lambda _, v: (v.source, v.num_replicas, v.seen) == ("scrape", 4, pytest.approx(8, abs=2)),
            "eight clients are seen, and four replicas decided",
        )
        await clients.end()
        await scaled.until(lambda running, v: running == 0 == v.num_replicas, "it falls asleep")
        await clients.once()
        assert [asked.error for asked in clients.asked if asked.error] == []
    told: list[EventView] = []
    async with asyncio.timeout(LIMIT_S):  # they are kept a moment after what they tell of
        while not {"woken", "down"} <= {event.state for event in told}:
            events = await scaled.admin.call(GetEvents(subject="waiting", limit=1000))
            told = [event for event in events if event.kind == "autoscaling"]
    assert all(" replicas: " in event.message for event in told if event.state != "held")


async def test_a_users_policy_decides_with_what_it_remembers_and_its_error_holds(scaled: Scaled) -> None:
    policy = {"policy_function": "policies:one_more_each_time", "policy_kwargs": {"most": 3}}
    fields = msgspec.to_builtins(QUICK) | {"min_replicas": 1, "policy": policy}
    await scaled.deploy(msgspec.convert(fields, AutoscalingConfig))
    await scaled.until(lambda running, v: running == 3 == v.num_replicas, "the policy's three replicas run")
    fields["policy"] = {"policy_function": "policies:one_more_each_time"}  # it needs ``most``
    await scaled.deploy(msgspec.convert(fields, AutoscalingConfig))
    why = "missing 1 required keyword-only argument: 'most'"
    await scaled.until(lambda _, v: v.verdict == "held" and why in v.why, "the error holds")
    assert await scaled.running() == 3
