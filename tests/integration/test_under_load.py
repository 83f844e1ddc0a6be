"""Every ordered change of a running system while it is used: none of them may cost a single request.

The load is steady (`steady_load`), half of it POST without an Idempotency-Key, which nothing may send twice. Every
scenario also proves that its change really happened, by what the answers say of who gave them.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Iterable

import pytest
import pytest_asyncio

from serve_common.api.commands import (
    CreateBackend,
    CreateEndpoint,
    DeleteBackend,
    DeleteEndpoint,
    DrainHost,
    SetTraffic,
    UndrainHost,
    UpdateBackendConfig,
)
from serve_common.api.queries import GetHosts, GetStatus
from serve_common.config.backend import BackendConfig
from serve_controller.shell.leadership import LEASE_TTL_S
from tests.support.loads.steady_load import Answer, SteadyLoad
from tests.support.stacks.loaded_stack import NAME, ROUTE, LoadedStack, replica_config

pytestmark = [pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="module")]

FAILOVER_LIMIT_S = 3 * LEASE_TTL_S
"""What is promised is a second over the lease; the rest is for a machine that is busy with all else here."""
MANY = 8
ASKING = 8


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LoadedStack]:
    async with LoadedStack.running(tmp_path_factory.mktemp("loaded")) as stack:
        yield stack


def pids(answers: Iterable[Answer]) -> set[str]:
    return {answer.pid for answer in answers}


async def all_answer(load: SteadyLoad, count: int) -> set[str]:
    """Until so many replicas answered what is sent from now on; their processes."""
    moment = load.now()
    await load.until(lambda: len(pids(load.since(moment))) >= count)
    return pids(load.since(moment))


async def test_scaling_from_one_replica_to_eight_and_to_two_fails_no_request(stack: LoadedStack) -> None:
    await stack.deployed("v1", 1)
    async with SteadyLoad.running(ROUTE, stack.http_ports) as load:
        first = await all_answer(load, 1)
        await stack.done(
            await stack.admin.call(UpdateBackendConfig(backend_tag=NAME, config={"num_replicas": MANY}))
        )
        many = await all_answer(load, MANY)
        await stack.done(
            await stack.admin.call(UpdateBackendConfig(backend_tag=NAME, config={"num_replicas": 2}))
        )
        few = await all_answer(load, 2) | pids(await load.more(200))
    load.result("scale 1 -> 8 -> 2")
    assert len(first) == 1
    assert first < many
    assert len(many) == MANY
    assert len(few) == 2
    assert few < many, "what goes on running is what ran"


async def test_a_rolling_update_of_eight_replicas_fails_no_request(stack: LoadedStack) -> None:
    await stack.deployed("v1", MANY)
    async with SteadyLoad.running(ROUTE, stack.http_ports) as load:
        old = await all_answer(load, MANY)
        await stack.deployed("v2", MANY)
        after = load.now()
        new = await all_answer(load, MANY)
    load.result("rolling update of 8")
    assert {answer.version for answer in load.answers} == {"v1", "v2"}
    assert {answer.version for answer in load.since(after)} == {"v2"}, (
        "a goal that succeeded is served everywhere"
    )
    assert len(new) == MANY
    assert not old & new


async def test_reconfiguring_eight_replicas_in_place_fails_no_request(stack: LoadedStack) -> None:
    await stack.deployed("v2", MANY)
    async with SteadyLoad.running(ROUTE, stack.http_ports) as load:
        before = await all_answer(load, MANY)
        await stack.deployed("v2", MANY, "changed")
        after = load.now()
        reconfigured = await all_answer(load, MANY)
    load.result("reconfigure of 8")
    assert {answer.configuration for answer in load.answers} == {"plain", "changed"}
    assert {answer.configuration for answer in load.since(after)} == {"changed"}
    assert reconfigured == before, "no replica was replaced"


async def test_draining_a_host_fails_no_request(stack: LoadedStack) -> None:
    await stack.deployed("v2", MANY)
    left = "replica-host-2"
    try:
        async with SteadyLoad.running(ROUTE, stack.http_ports) as load:
            before = await all_answer(load, MANY)
            hosts = {answer.host for answer in load.answers}
            await stack.done(await stack.admin.call(DrainHost(host_id=left)))
            after = load.now()
            there = {host.host_id: host for host in await stack.admin.call(GetHosts())}
            replicas = await stack.replicas()
            moved = await all_answer(load, MANY)
    finally:  # the next test needs both hosts, whatever happened to this one
        await stack.admin.call(UndrainHost(host_id=left))
    load.result("drain of a host")
    assert hosts == {"replica-host-1", left}
    assert {answer.host for answer in load.since(after)} == {"replica-host-1"}
    assert there[left].draining
    assert there[left].num_replicas == 0
    assert [(replica.host_id, replica.state) for replica in replicas] == [
        ("replica-host-1", "running")
    ] * MANY
    assert len(moved) == MANY
    assert len(moved & before) >= MANY // 2 - 1, "those of the other host stayed"


async def test_a_rolling_restart_of_the_proxies_fails_no_request(stack: LoadedStack) -> None:
    await stack.deployed("v2", 2)
    first, second = stack.http_ports
    async with SteadyLoad.running(ROUTE, stack.http_ports) as load:
        await load.until(lambda: {answer.port for answer in load.answers} == {first, second})
        for number, port in ((1, first), (2, second)):
            await stack.terminated(f"proxy-{number}")
            after = load.now()
            await load.until(lambda: any(a.port == port for a in load.since(after)))  # noqa: B023 - awaited here
    load.result("SIGTERM of each proxy")
    assert load.balancer.refused, "they were away"
    for number in (1, 2):
        assert "proxy_drains" in stack.log(f"proxy-{number}")
        assert "drain_timed_out" not in stack.log(f"proxy-{number}")


async def test_a_host_told_to_stop_fails_no_request(stack: LoadedStack) -> None:
    for count in (1, 4):  # so both hosts have some, wherever all of an earlier test were
        await stack.deployed("v2", count)
    async with SteadyLoad.running(ROUTE, stack.http_ports) as load:
        before = await all_answer(load, 4)
        await stack.terminated("replica-host-2")
        after = load.now()
        replicas = await stack.replicas()
        moved = await all_answer(load, 4)
    load.result("SIGTERM of a host")
    assert {answer.host for answer in load.answers} == {"replica-host-1", "replica-host-2"}
    assert {answer.host for answer in load.since(after)} == {"replica-host-1"}
    assert [(replica.host_id, replica.state) for replica in replicas] == [("replica-host-1", "running")] * 4
    assert moved != before


async def test_a_killed_leader_with_a_standby_fails_no_request_and_no_change(stack: LoadedStack) -> None:
    await stack.deployed("v2", 2)
    await stack.until_standing_by()
    leader = await stack.leader()
    async with SteadyLoad.running(ROUTE, stack.http_ports) as load:
        retries = len(stack.retries)
        leader.signal(signal.SIGKILL)
        killed_at = load.now()
        stack.controllers.remove(leader)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(stack.deployed("v3", 2))
            (standby,) = stack.controllers
            await standby.until_logged("leadership_gained")
            led_after_s = load.now() - killed_at
        answered = await load.more(100)
    load.result(f"leader killed, the standby led after {led_after_s:.1f} s")
    assert led_after_s <= FAILOVER_LIMIT_S
    assert {answer.version for answer in answered} == {"v3"}
    assert len(stack.retries) > retries, "it was asked while nobody led"
    status = await stack.admin.call(GetStatus())
    assert status.controller_id == standby.controller_id
    await stack.until_standing_by()


async def test_a_leader_told_to_stop_fails_no_request(stack: LoadedStack) -> None:
    await stack.deployed("v3", 2)
    await stack.until_standing_by()
    leader = await stack.leader()
    retries = len(stack.retries)
    async with SteadyLoad.running(ROUTE, stack.http_ports) as load, looking_on(stack):
        leader.signal(signal.SIGTERM)
        stack.controllers.remove(leader)
        await stack.deployed("v3", 2, "by the next one")
        after = load.now()
        await load.more(100)
    load.result("SIGTERM of the leader")
    assert [why for why in stack.retries[retries:] if "in time" in why] == [], "whoever asked it was answered"
    assert {answer.configuration for answer in load.since(after)} == {"by the next one"}
    assert await leader.until_gone() == 0
    await stack.until_standing_by()


@contextlib.asynccontextmanager
async def looking_on(stack: LoadedStack) -> AsyncIterator[None]:
    """Some who ask for the status all the time."""
    enough = False

    async def keep_asking() -> None:
        while not enough:  # not cancelled, for nats-py now and then loses a cancellation
            await stack.admin.call(GetStatus())
            await asyncio.sleep(0.01)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(ASKING):
            tasks.create_task(keep_asking())
        try:
            yield
        finally:
            enough = True


async def test_shifting_traffic_from_one_backend_to_another_fails_no_request(stack: LoadedStack) -> None:
    for tag in ("blue", "green"):
        await stack.done(
            await stack.admin.call(
                CreateBackend(
                    backend_tag=tag,
                    replica_config=replica_config(tag),
                    backend_config=BackendConfig(num_replicas=2),
                )
            )
        )
    await stack.done(
        await stack.admin.call(CreateEndpoint(endpoint="shifted", traffic={"blue": 1.0}, route="/shifted"))
    )
    shares: list[float] = []
    async with SteadyLoad.running("/shifted", stack.http_ports) as load:
        begun = load.now()
        for green in (0.5, 1.0):
            weights = {"blue": 1.0 - green, "green": green}
            await stack.done(await stack.admin.call(SetTraffic(endpoint="shifted", weights=weights)))
            answers = await load.more(500)
            shares.append(sum(answer.version == "green" for answer in answers) / len(answers))
    load.result(f"traffic shift 0 -> {shares[0]:.0%} -> {shares[1]:.0%}")
    assert {answer.version for answer in load.answers if answer.sent_at < begun} == {"blue"}
    assert shares[0] == pytest.approx(0.5, abs=0.12), "more than five standard deviations off"
    assert shares[1] == 1.0
    await stack.done(await stack.admin.call(DeleteEndpoint(endpoint="shifted")))
    for tag in ("blue", "green"):
        await stack.done(await stack.admin.call(DeleteBackend(backend_tag=tag)))
