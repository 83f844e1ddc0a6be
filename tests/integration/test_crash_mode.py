"""Controller processes that die at every boundary: what was acknowledged is there, every goal ends once, all converges.

Why all scenarios run at once, in one fixture: each mostly waits for a lease or for a process to start.
"""

from __future__ import annotations

import ast
import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from serve_common.api.queries import GetDeploymentInfo
from serve_common.api.views import DeploymentStatus, GoalStatus, GoalView
from serve_controller.shell.boundary import EFFECTS
from tests.support.servers.nats_server import NatsServer
from tests.support.servers.postgres_server import PostgresServer
from tests.support.snapshot_bucket import read_bucket
from tests.support.stacks.control_plane import (
    CHANGE_LIMIT_S,
    ROOT,
    ControllerProcess,
    ControlPlane,
    deploy_request,
)
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(900)

AT_ONCE = 6
STRAY_KEY = "backends.default.stray"
TIMES = {"record_plan": (1, 3), "publish_snapshot": (1, 2)}
"""Plans and publications that follow one another in one deploy; at the other effects, the first time."""


def _effects_in_the_source() -> set[str]:
    """What really crosses the boundary: the first argument of every ``cross`` and of what hands it on."""
    found = set()
    for path in (ROOT / "services/controller/serve_controller/shell").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
                first = node.args[0]
                if node.func.attr in ("cross", "_record") and isinstance(first, ast.Constant):
                    found.add(first.value)
    return found


CROSSED = [effect for effect in EFFECTS if effect in _effects_in_the_source()]
POINTS = [
    f"{when}:{effect}:{nth}"
    for effect in CROSSED
    for nth in TIMES.get(effect, (1,))
    for when in ("before", "after")
]
CHANCE = "chance"


def test_every_effect_of_the_source_has_its_name_in_the_list() -> None:
    assert _effects_in_the_source() <= set(EFFECTS)
    assert {"record_command", "record_plan", "publish_snapshot", "retract_snapshot", "send_host_goal"} <= set(
        CROSSED
    )


@pytest.fixture(scope="module")
def outcomes(
    postgres_server: PostgresServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, BaseException | None]]:
    """What every scenario came to: None, or what was wrong."""
    with NatsServer(tmp_path_factory.mktemp("nats")) as nats:
        yield asyncio.run(_run_all(nats, postgres_server))


async def _run_all(nats: NatsServer, postgres: PostgresServer) -> dict[str, BaseException | None]:
    room = asyncio.Semaphore(AT_ONCE)

    async def run(number: int, name: str) -> None:
        async with room, ControlPlane.opened(nats, postgres) as plane:
            if name == CHANCE:
                await _die_by_chance(plane)
            else:
                # Half of the deaths are followed by a standby, half by the same controller started anew.
                await _die_at(plane, name, has_standby=number % 4 in (0, 3))

    names = [CHANCE, *POINTS]
    results = await asyncio.gather(*(run(n, name) for n, name in enumerate(names)), return_exceptions=True)
    return dict(zip(names, results, strict=True))


@pytest.mark.parametrize("point", POINTS)
def test_a_controller_dies_at_the_boundary_and_nothing_acknowledged_is_lost(
    outcomes: dict[str, BaseException | None], point: str
) -> None:
    _raise(outcomes[point])


def test_controllers_that_die_by_chance_lose_nothing_that_was_acknowledged(
    outcomes: dict[str, BaseException | None],
) -> None:
    _raise(outcomes[CHANCE])


def _raise(outcome: BaseException | None) -> None:
    if outcome is not None:
        raise outcome


async def _die_at(plane: ControlPlane, point: str, *, has_standby: bool) -> None:
    await _put_stray_key(plane)
    doomed = await plane.start_controller("controller-1", MUSTER_CRASH_AT=point)
    async with asyncio.TaskGroup() as tasks:
        story = tasks.create_task(_tell_story(plane))
        if has_standby:
            await doomed.until_logged("leadership_gained")
            await plane.start_controller("controller-2")
            await doomed.until_gone()
        else:
            await doomed.until_gone()
            await plane.start_controller("controller-1")
    assert_died_at(doomed, point)
    await _assert_converged(plane, story.result())


def assert_died_at(controller: ControllerProcess, point: str | None) -> None:
    assert controller.exit_code == -signal.SIGKILL, controller.log[-3:]
    assert len(controller.logged("crash_mode_is_on")) == 1
    kills = controller.logged("crash_mode_kills")
    assert [k["boundary"] for k in kills] == ([point] if point else [kills[0]["boundary"]])
    assert controller.log[-1] == kills[0], "nothing was done after it"


async def _die_by_chance(plane: ControlPlane) -> None:
    await _put_stray_key(plane)
    died: list[ControllerProcess] = []

    async def keep_one_running() -> None:
        while True:
            chance = "0.1" if len(died) < 8 else "0"
            controller = await plane.start_controller(
                "controller-1", MUSTER_CRASH_PROBABILITY=chance, MUSTER_CRASH_SEED=str(77 + len(died))
            )
            await controller.until_gone()
            died.append(controller)

    async with asyncio.TaskGroup() as tasks:
        keeper = tasks.create_task(keep_one_running())
        goals = await _tell_story(plane)
        await _assert_converged(plane, goals)
        keeper.cancel()
    assert died
    for number, controller in enumerate(died):
        assert_died_at(controller, None)
        assert controller.logged("crash_mode_is_on")[0]["seed"] == 77 + number


async def _put_stray_key(plane: ControlPlane) -> None:
    """So that there is something to retract: a key that no checkpoint knows, below all ids (above them, Postgres would
    count as restored to an earlier state)."""
    bucket = await plane.client.jetstream().create_key_value(bucket=plane.subjects.bucket)
    await bucket.put(STRAY_KEY, b'{"snapshot_id":0,"epoch":0,"content":null}')


async def _tell_story(plane: ControlPlane) -> list[GoalView]:
    """What a client does, retrying as it is promised to work: three changes, each waited for."""
    ended = []
    for request in (deploy_request("a", "v1"), deploy_request("b", "v1"), deploy_request("a", "v2")):
        reply = await plane.admin.call(request)
        assert reply.goal_id is not None
        ended.append(await plane.admin.wait_for_goal(reply.goal_id, deadline_s=CHANGE_LIMIT_S))
        again = await plane.admin.call(request)
        assert again.goal_id == reply.goal_id, "the same change is the same goal"
    return ended


async def _assert_converged(plane: ControlPlane, ended: list[GoalView]) -> None:
    assert [goal.status for goal in ended] == [GoalStatus.SUCCEEDED] * 3
    for goal in ended:
        assert await plane.admin.wait_for_goal(goal.goal_id, deadline_s=0) == goal, "a goal ends once"
    # As often as they were sent, the changes were made once each.
    made = await plane.fetch(
        "SELECT request->>'request_id' AS id, goal_id FROM muster.history ORDER BY history.id"
    )
    assert [(row["id"], row["goal_id"]) for row in made] == [
        ("a-v1", ended[0].goal_id),
        ("b-v1", ended[1].goal_id),
        ("a-v2", ended[2].goal_id),
    ]
    await eventually(lambda: _is_at_rest(plane), within_s=CHANGE_LIMIT_S)
    assert len(plane.host.runtime.started) == len(set(plane.host.runtime.started)), "no tag is started twice"


async def _is_at_rest(plane: ControlPlane) -> bool:
    """What is recorded, what runs, what the bucket holds and what is routed are the same."""
    running: set[str] = set()
    for name, version in (("a", "v2"), ("b", "v1")):
        info = await plane.admin.call(GetDeploymentInfo(name=name))
        replicas = {replica.replica_tag for replica in info.replicas}
        assert info.version == version
        if info.status is not DeploymentStatus.HEALTHY or len(replicas) != 2:
            return False
        if plane.proxy.routed_to(f"backends.default.{name}") != replicas:
            return False
        running |= replicas
    rows = await plane.fetch("SELECT key, value FROM muster.checkpoint_rows WHERE kind = 'snapshot'")
    recorded = {row["key"]: msgspec.json.decode(row["value"])["snapshot"]["snapshot_id"] for row in rows}
    bucket = await read_bucket(plane.client, plane.subjects)
    held = {key: msgspec.json.decode(value)["snapshot_id"] for key, value in bucket.items()}
    return plane.host.running == running and held == recorded


async def test_a_boundary_that_does_not_exist_is_refused_at_the_start(
    postgres_server: PostgresServer, tmp_path: Path
) -> None:
    with NatsServer(tmp_path) as nats:
        async with ControlPlane.opened(nats, postgres_server) as plane:
            controller = await plane.start_controller("controller-1", MUSTER_CRASH_AT="after:lunch")
            assert await controller.until_gone() == 1
            await controller.until_logged("controller_failed")
            (failed,) = controller.logged("controller_failed")
            assert failed["error"].startswith(
                "MUSTER_CRASH_AT: 'lunch' is no effect; there are record_command, "
            )
