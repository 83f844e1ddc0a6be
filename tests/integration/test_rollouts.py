"""Rollouts of real versions under 300 requests per second: judged by what becomes of them, whoever dies meanwhile."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
import pytest_asyncio
from typer.testing import CliRunner, Result

from muster.cli.main import app
from muster.cli.session import Session
from serve_common.api.commands import Deploy, StartRollout
from serve_common.api.queries import GetRollouts
from serve_common.api.rollout_views import RolloutView
from serve_common.api.views import GoalStatus
from serve_common.config.backend import BackendConfig, RayActorOptions, ReplicaConfig
from serve_common.config.rollout import RolloutConfig
from serve_common.identities.credentials import CredentialsFile
from serve_common.identities.roles import Role
from serve_common.names import GoalId
from tests.support.paths import APPS
from tests.support.stacks.loaded_stack import LoadedStack

pytestmark = [pytest.mark.timeout(480), pytest.mark.asyncio(loop_scope="module")]

RATE = 300.0
DECIDED_WITHIN_S = 150.0
NAME = "rolled"


class Load:
    """Requests at a steady rate to both proxies, each over a connection that is kept."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self.statuses: Counter[str] = Counter()
        """By status, or by the class of the error."""
        self.names: Counter[str] = Counter()
        """By the version that answered."""
        self.failed_at: list[float] = []

    @property
    def failures(self) -> dict[str, int]:
        """What was not answered with 200."""
        return {status: count for status, count in self.statuses.items() if status != "200"}

    @classmethod
    @asynccontextmanager
    async def running(cls, stack: LoadedStack, rate: float = RATE) -> AsyncIterator[Load]:
        """While the block runs; what was sent is waited for."""
        self = cls(rate)
        urls = [f"http://127.0.0.1:{port}/{NAME}" for port in stack.http_ports]
        # While the stack stands still requests wait for a connection: there are only so many files.
        connector, timeout = aiohttp.TCPConnector(limit=300), aiohttp.ClientTimeout(total=30)
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
            asyncio.TaskGroup() as requests,
        ):
            sending = requests.create_task(self._send(session, urls, requests))
            try:
                yield self
            finally:
                sending.cancel()

    async def _send(
        self, session: aiohttp.ClientSession, urls: list[str], requests: asyncio.TaskGroup
    ) -> None:
        began, sent = time.monotonic(), 0
        while True:
            while sent < (time.monotonic() - began) * self._rate:
                requests.create_task(self._request(session, urls[sent % len(urls)]))
                sent += 1
            await asyncio.sleep(0.004)

    async def _request(self, session: aiohttp.ClientSession, url: str) -> None:
        try:
            async with session.get(url) as response:
                body = await response.text()
            status = str(response.status)
        except (aiohttp.ClientError, TimeoutError) as error:
            status, body = type(error).__name__, ""
        self.statuses[status] += 1
        if status == "200":
            self.names[body] += 1
        else:
            self.failed_at.append(time.monotonic())


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LoadedStack]:
    async with LoadedStack.running(tmp_path_factory.mktemp("rollouts")) as stack:
        yield stack


async def deployed(stack: LoadedStack) -> None:
    """The old version, anew: whatever a test left."""
    config = ReplicaConfig(
        import_path="rollout_model:Rolled",
        app_dir=str(APPS / "rollout_app"),
        init_args=["old"],
        ray_actor_options=RayActorOptions(num_cpus=0.5),
    )
    backend = BackendConfig(num_replicas=2)
    await stack.done(
        await stack.admin.call(
            Deploy(name=NAME, replica_config=config, backend_config=backend, route_prefix=f"/{NAME}")
        )
    )


async def started(
    stack: LoadedStack, *steps: str, max_latency_ratio: float = 3.0, **behaviour: float
) -> GoalId:
    """A rollout of a version that behaves so; its goal.

    Times on a busy machine vary widely, and a wide limit is shown to hold sooner.
    """
    reply = await stack.admin.call(
        StartRollout(
            name=NAME,
            version="new",
            replica_config={"init_args": ["new"], "init_kwargs": behaviour},
            rollout=RolloutConfig(steps=steps, max_latency_ratio=max_latency_ratio),
            again=True,
        )
    )
    assert reply.goal_id is not None
    return reply.goal_id


async def rollout(stack: LoadedStack) -> RolloutView:
    [view] = await stack.admin.call(GetRollouts(name=NAME))
    return view


async def until_step(stack: LoadedStack, step: int) -> None:
    """Until requests go by that step."""
    deadline = time.monotonic() + DECIDED_WITHIN_S
    while True:
        view = await rollout(stack)
        assert not view.outcome, view
        if view.step >= step and view.is_in_force:
            return
        assert time.monotonic() < deadline, view
        await asyncio.sleep(0.1)


@pytest.mark.alone  # it measures how soon
async def test_a_version_that_always_fails_harms_next_to_nobody(stack: LoadedStack) -> None:
    await deployed(stack)
    async with Load.running(stack) as load:
        await asyncio.sleep(2)
        goal = await stack.admin.wait_for_goal(
            await started(stack, "5%", "25%", "100%", errors=1.0), deadline_s=DECIDED_WITHIN_S
        )
        await asyncio.sleep(10)
    sent = load.statuses.total()
    print(
        f"{len(load.failed_at)} of {sent} failed in {load.failed_at[-1] - load.failed_at[0]:.1f} s; {goal.error}"
    )
    assert goal.status is GoalStatus.FAILED
    assert goal.error.startswith("errors: ")
    assert load.failures.keys() == {"500"}
    assert load.failures["500"] <= sent / 100
    assert load.failed_at[-1] - load.failed_at[0] < 2.0
    assert (await rollout(stack)).passed == []


async def test_a_slower_version_is_gone_before_a_quarter_of_the_requests(stack: LoadedStack) -> None:
    await deployed(stack)
    async with Load.running(stack) as load:
        goal_id = await started(stack, "10%", "25%", "100%", slowdown=1.5, max_latency_ratio=1.2)
        goal = await stack.admin.wait_for_goal(goal_id, deadline_s=DECIDED_WITHIN_S)
    print(f"{load.names}; {goal.error}")
    assert goal.status is GoalStatus.FAILED
    assert goal.error.startswith("latency_")
    assert load.failures == {}
    assert (await rollout(stack)).passed == [], "that it was not let into the second step"


async def test_a_good_version_is_promoted_though_leaders_die_and_nats_hangs(stack: LoadedStack) -> None:
    await deployed(stack)
    async with Load.running(stack) as load:
        goal_id = await started(stack, "25%", "50%", "100% 3s")
        for step in range(3):
            await until_step(stack, step)
            before = await rollout(stack)
            leader = await stack.leader()
            stack.controllers.remove(leader)
            leader.signal(signal.SIGKILL)
            await leader.until_gone()
            await stack.until_standing_by()
            after = await rollout(stack)
            assert after.step >= before.step
            if after.step == before.step and before.gates:
                pairs = zip(before.gates, after.gates, strict=True)
                assert all(new.canary_requests >= old.canary_requests for old, new in pairs), (
                    "nothing is lost"
                )
            if step == 0:
                nats = stack.process("nats").pid
                os.kill(nats, signal.SIGSTOP)
                await asyncio.sleep(2)
                os.kill(nats, signal.SIGCONT)
        goal = await stack.admin.wait_for_goal(goal_id, deadline_s=DECIDED_WITHIN_S)
        moment = Counter(load.names)
        await asyncio.sleep(2)
        since = load.names - moment
    view = await rollout(stack)
    print(f"{load.names}; {load.statuses}; {[(one.step, one.requests) for one in view.passed]}")
    assert goal.status is GoalStatus.SUCCEEDED, goal.error
    assert load.failures == {}
    assert since.keys() == {"new"}, "whoever was told of the success gets the new version only"


async def test_a_proxy_that_dies_costs_its_last_counts_and_no_verdict(stack: LoadedStack) -> None:
    await deployed(stack)
    async with Load.running(stack) as load:
        goal_id = await started(stack, "25%", "100%")
        await until_step(stack, 0)
        await asyncio.sleep(3)
        os.kill(stack.process("proxy-2").pid, signal.SIGKILL)
        goal = await stack.admin.wait_for_goal(goal_id, deadline_s=DECIDED_WITHIN_S)
    print(f"{load.names}; {load.statuses}")
    assert goal.status is GoalStatus.SUCCEEDED, goal.error
    assert not any(status.isdigit() for status in load.failures), "only connections to it were lost"


async def muster(stack: LoadedStack, *arguments: str) -> Result:
    """One run of the program."""
    settings = stack.settings(Role.ADMIN)
    assert isinstance(settings.credentials, CredentialsFile)
    environment = {
        "MUSTER_NATS_URL": stack.nats_url,
        "MUSTER_NATS_CREDS_FILE": settings.credentials.path,
    }
    session = Session(environment=environment, directory=APPS)
    return await asyncio.to_thread(CliRunner().invoke, app, arguments, obj=session)


async def test_each_deploy_of_a_deployment_with_rollout_is_one(stack: LoadedStack) -> None:
    await deployed(stack)
    # On a busy machine one replica may stand still for a moment; what must be found here always fails.
    limits = {
        "steps": ["25%", "100%"],
        "max_error_increase": 0.05,
        "max_client_error_increase": 0.05,
        "max_latency_ratio": 20.0,
        "false_abort_probability": 1e-9,
    }
    always = ("deploy", "rollout_model:Rolled", "--name", NAME, "--route-prefix", f"/{NAME}")
    always += ("--app-dir", "rollout_app", "--num-cpus", "0.5", "--num-replicas", "2")
    always += ("--rollout", json.dumps(limits))
    first = await muster(stack, *always, "--no-rollout", "--version", "v1", "--init-args", '["v1"]')
    assert first.exit_code == 0, first.output
    second = (*always, "--version", "v2", "--init-args", '["v2"]')
    async with Load.running(stack, RATE / 3) as load:
        planned = await muster(stack, *second, "--dry-run")
        assert "a rollout of default/rolled starts" in planned.output
        good = await muster(stack, *second)
        assert good.exit_code == 0, good.output
        view = await rollout(stack)
        assert (view.version, view.outcome, len(view.passed)) == ("v2", "promoted", 1)
        moment = Counter(load.names)
        await asyncio.sleep(1)
        assert (load.names - moment).keys() == {"v2"}
        assert "nothing to do" in (await muster(stack, *second)).output
        assert load.failures == {}
        bad = ("--version", "v3", "--init-args", '["v3"]', "--init-kwargs", '{"errors": 1.0}')
        failed = await muster(stack, *always, *bad)
        assert failed.exit_code == 1, failed.output
        assert "errors: " in failed.output
        assert "version v2" in failed.output
        moment = Counter(load.names)
        await asyncio.sleep(1)
        assert (load.names - moment).keys() == {"v2"}
        refused = await muster(stack, *always, *bad)
        assert refused.exit_code != 0
        assert "is refused for another" in refused.output
    print(f"{load.names}; {load.statuses}; {failed.output}")
    assert load.failures.keys() == {"500"}
    assert load.failures["500"] <= 200
