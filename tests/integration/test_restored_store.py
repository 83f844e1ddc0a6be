"""Postgres restored to an earlier state under load, and backups of a running system, all of it real."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import itertools
import time
from collections.abc import AsyncIterator

import asyncpg
import msgspec
import pytest
import pytest_asyncio

from serve_common.api.commands import (
    Command,
    CreateEndpoint,
    DeleteDeployment,
    DeleteEndpoint,
    Deploy,
    DeployApplication,
    DeploymentSpec,
    SetEndpointOptions,
    SetHttpOptions,
    UpdateBackendConfig,
)
from serve_common.api.queries import GetStatus
from serve_common.api.views import DeploymentStatus, GoalStatus
from serve_common.config.backend import BackendConfig, EndpointOptions
from serve_common.runtime.tasks import TaskOwner
from serve_controller.shell.checkpoint_rows import read_backup
from tests.support.loads.steady_load import SteadyLoad
from tests.support.stacks.loaded_stack import CHANGE_LIMIT_S, NAME, ROUTE, LoadedStack, replica_config
from tests.support.waiting import eventually

pytestmark = [pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="module")]

LIVE, STOP_AND_START = "live", "stop and start"
TABLES = ("leader", "checkpoint_rows", "history")
Dump = dict[str, list[asyncpg.Record]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LoadedStack]:
    async with LoadedStack.running(tmp_path_factory.mktemp("restored")) as stack:
        yield stack


@contextlib.asynccontextmanager
async def database(stack: LoadedStack) -> AsyncIterator[asyncpg.Connection]:
    connection = await stack.connect_postgres()
    try:
        yield connection
    finally:
        await connection.close()


async def dump(stack: LoadedStack) -> Dump:
    """All rows, as of one moment."""
    async with (
        database(stack) as connection,
        connection.transaction(isolation="repeatable_read", readonly=True),
    ):
        return {table: await connection.fetch(f"SELECT * FROM muster.{table}") for table in TABLES}


async def restore(stack: LoadedStack, rows: Dump) -> None:
    """Behind the controllers' back, as `pg_restore --clean` in one transaction."""
    async with database(stack) as connection, connection.transaction():
        for table in TABLES:
            await connection.execute(f"DELETE FROM muster.{table}")
            for row in rows[table]:
                names = list(row.keys())
                places = ", ".join(f"${n}" for n in range(1, len(names) + 1))
                await connection.execute(
                    f"INSERT INTO muster.{table} ({', '.join(names)}) OVERRIDING SYSTEM VALUE VALUES ({places})",
                    *row.values(),
                )


def idle(version: str, name: str = "idle") -> Deploy:
    """A deployment without replicas: a change that costs nothing."""
    config = BackendConfig(num_replicas=0)
    return Deploy(name=name, version=version, replica_config=replica_config(version), backend_config=config)


class Lost(msgspec.Struct, frozen=True, kw_only=True):
    """What is made after a dump and lost when that is restored."""

    commands: list[Command]
    version: str
    """Whose answers come then."""
    user_config: str = "plain"
    next_version: str
    """Deployed once everything is as it was."""


def loaded(version: str, num_replicas: int, user_config: str = "plain") -> Deploy:
    """The deployment that is under load."""
    return Deploy(
        name=NAME,
        version=version,
        route_prefix=ROUTE,
        replica_config=replica_config(version),
        backend_config=BackendConfig(num_replicas=num_replicas, user_config=user_config),
    )


def twenty_changes() -> Lost:
    """Deploys, scalings, deletes and traffic, at last with another version in another number, on both hosts."""
    scaled = [UpdateBackendConfig(backend_tag=NAME, config={"num_replicas": number}) for number in (1, 3)]
    commands = [
        loaded("v2", 2),
        *(idle(f"v{number}") for number in range(6)),
        scaled[0],
        CreateEndpoint(endpoint="other", traffic={NAME: 1.0}, route="/other"),
        *(SetEndpointOptions(endpoint="other", options={"backend_header": f"X-{n}"}) for n in range(4)),
        SetHttpOptions(options={"keep_alive_timeout_s": 77.0}),
        idle("v1", "lost"),
        DeleteDeployment(name="kept"),
        DeleteEndpoint(endpoint="other"),
        loaded("v3", 2),
        scaled[1],
        idle("v2", "lost"),
    ]
    return Lost(commands=commands, version="v3", next_version="v4")


def configurations(number: int) -> Lost:
    """The replicas that the dump knows are given a configuration, and serve on before and after."""
    user_config = f"lost {number}"
    return Lost(
        commands=[loaded("v1", 2, user_config)], version="v1", user_config=user_config, next_version="v1"
    )


async def changed(stack: LoadedStack, commands: list[Command]) -> None:
    for command in commands:
        await stack.done(await stack.admin.call(command))


async def until_noticed(stack: LoadedStack, since: float) -> None:
    """Until a leader says that the store was restored after ``since``."""
    async with asyncio.timeout(CHANGE_LIMIT_S):
        while ((await stack.admin.call(GetStatus())).store_restored_at or 0.0) <= since:  # noqa: ASYNC110
            await asyncio.sleep(0.01)  # the leader tells no more


async def until_as(stack: LoadedStack, names: set[str]) -> None:
    """Until these, and no others, are deployed and healthy, and every proxy knows."""
    async with asyncio.timeout(CHANGE_LIMIT_S):
        while True:
            status = await stack.admin.call(GetStatus())
            is_so = {view.name for view in status.deployments} == names and all(
                view.status is DeploymentStatus.HEALTHY
                and {(r.state, r.version) for r in view.replicas} <= {("running", view.version)}
                for view in status.deployments
            )
            behind = [p for p in status.proxies if p.applied_snapshot_id < status.snapshot_id]
            if is_so and not behind:
                return
            await asyncio.sleep(0.05)


async def restored(stack: LoadedStack, rows: Dump, *, how: str) -> None:
    """Until a leader has noticed it."""
    since = (await stack.admin.call(GetStatus())).store_restored_at or 0.0
    if how == STOP_AND_START:
        for controller in list(stack.controllers):
            await controller.end()
        stack.controllers.clear()
    await restore(stack, rows)
    if how == STOP_AND_START:
        await asyncio.gather(stack.start_controller(), stack.start_controller())
    await until_noticed(stack, since)


async def restored_under_load(
    stack: LoadedStack, losses: list[Lost], *, how: str, times: int = 1
) -> list[float]:
    """One dump is restored after each of ``losses``, that many ``times`` before everything is as it was.

    Returns how long each took.
    """
    await stack.deployed("v1", 2)
    await changed(stack, [idle("v1", "kept")])
    names = {view.name for view in (await stack.admin.call(GetStatus())).deployments}
    rows = await dump(stack)
    took_s = []

    async def answered(version: str, user_config: str) -> None:
        answers = await load.more(100)
        assert {(a.version, a.configuration) for a in answers} == {(version, user_config)}

    async with SteadyLoad.running(ROUTE, stack.http_ports) as load:
        for lost in losses:
            await changed(stack, lost.commands)
            await answered(lost.version, lost.user_config)
            began = time.monotonic()
            for _ in range(times):
                await restored(stack, rows, how=how)
            await until_as(stack, names)
            took_s.append(time.monotonic() - began)
            await answered("v1", "plain")
            # A goal that succeeds is served: had it been told by the numbers of what is lost, it would not be.
            await stack.deployed(lost.next_version, 2, "served")
            await answered(lost.next_version, "served")
    load.result(f"store restored {len(losses)} times, {times} in a row, {how}")
    return took_s


async def test_postgres_restored_twice_fails_no_request_and_no_goal_succeeds_unserved(
    stack: LoadedStack,
) -> None:
    # More often, with a stop and start, and again before it has converged: bench.restored.
    await restored_under_load(stack, [twenty_changes(), configurations(1)], how=LIVE)
    await changed(stack, [DeleteDeployment(name="kept")])


def pair(number: int) -> DeployApplication:
    """Two deployments that are always of the same version."""
    parts = [
        DeploymentSpec(
            name=name,
            version=f"v{number}",
            replica_config=replica_config(f"v{number}"),
            backend_config=BackendConfig(num_replicas=0),
            endpoint_options=EndpointOptions(),
        )
        for name in ("front", "back")
    ]
    return DeployApplication(name="pair", deployments=parts, ingress="front", route_prefix="/pair")


async def backups_under_changes(stack: LoadedStack, backups: int, pause_s: float) -> str:
    """Changes at more than 100 a minute, and backups all the while; each of them must hold one moment's state."""
    made = 0

    async def change() -> None:
        nonlocal made
        for number in itertools.count():
            await stack.admin.call(pair(number))
            made = number
            await asyncio.sleep(pause_s)

    await stack.done(await stack.admin.call(pair(0)))
    began = time.monotonic()
    changing = TaskOwner("changing")
    changing.start(change(), "change")
    seen: set[str | None] = set()
    try:
        for _ in range(backups):
            before = made
            data = await stack.admin.fetch_backup()
            _, saved = read_backup(data)
            versions = {
                backend.target.version for tag, backend in saved.backends.items() if tag.startswith("pair/")
            }
            assert len(versions) == 1, f"of two moments: {versions}"
            seen |= versions
            await eventually(lambda goal=before + 3: made >= goal, within_s=CHANGE_LIMIT_S)
    finally:
        await changing.close(timeout_s=0.1)
    rate = made / (time.monotonic() - began) * 60
    checked = await stack.admin.send_backup(data, confirm=False)
    reply = await stack.admin.send_backup(data, confirm=True)
    assert checked.summary == reply.summary
    for goal_id in reply.goal_ids:
        view = await stack.admin.wait_for_goal(goal_id, deadline_s=CHANGE_LIMIT_S)
        assert view.status is GoalStatus.SUCCEEDED, view
    (version,) = versions
    deployed = {v.name: v.version for v in (await stack.admin.call(GetStatus())).deployments}
    assert deployed["pair/front"] == deployed["pair/back"] == version
    return f"{backups} backups ({len(seen)} states) beside {rate:.0f} changes a minute, and restored"


async def test_backups_under_changes_are_of_one_moment_and_restore_to_it(stack: LoadedStack) -> None:
    await stack.deployed("v1", 1)
    async with SteadyLoad.running(ROUTE, stack.http_ports) as load:
        await backups_under_changes(stack, 5, 0.2)
    load.result("backups")
    text = gzip.decompress(await stack.admin.fetch_backup()).decode()
    assert "loaded_model" in text
    assert not [password for password in stack.passwords() if password in text]
