"""``python -m bench.conflicts``: clients with conflicting commands, beside a deployment that none of them touches.

`tests/integration/test_storms.py` runs a short storm; this one takes minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import psutil

from muster.client.admin import AdminClient
from muster.embedded import leftovers
from serve_common.api.commands import (
    CreateEndpoint,
    DeleteDeployment,
    DeleteEndpoint,
    Deploy,
    DrainHost,
    Rollback,
    Scale,
    SetTraffic,
    UndrainHost,
)
from serve_common.api.queries import GetAllBackends, ListDeployments
from serve_common.api.views import DeploymentStatus, GoalStatus
from serve_common.config.backend import BackendConfig
from serve_common.errors import ServeError
from tests.support.loads.steady_load import counted_requests
from tests.support.stacks.loaded_stack import CHANGE_LIMIT_S, NAME, ROUTE, LoadedStack, replica_config

CONSISTENT_WITHIN_S = 20.0
CLIENTS = 5
NAMES = ("a", "b", "shop/c")
HOSTS = ("replica-host-1", "replica-host-2")
SHARED_ENDPOINT = "mix"
_ASK_EVERY_S = 0.02
_LOOK_EVERY_S = 0.1
_KILL_EVERY_S = 5.0


class Storm(msgspec.Struct, kw_only=True):
    """What happened."""

    answers: Counter[str] = msgspec.field(default_factory=Counter)
    """The bystander's requests by how they ended; ``200`` is good."""
    commands: Counter[str] = msgspec.field(default_factory=Counter)
    """By verb and how they were answered."""
    kills: list[str] = []
    consistent_after_s: float = 0.0
    """From the last command to everything being as it was asked for."""
    rows: Counter[str] = msgspec.field(default_factory=Counter)
    """What Postgres holds once everything but the bystander is deleted, by kind."""
    wrong: list[str] = []
    """What should not be there then."""

    def line(self) -> str:
        """All of it, short."""
        return (
            f"bystander {dict(self.answers)}; {sum(self.commands.values())} commands {dict(self.commands)}; "
            f"kills {self.kills}; consistent after {self.consistent_after_s:.1f} s; rows {dict(self.rows)}; "
            f"wrong {self.wrong}"
        )


async def storm(stack: LoadedStack, seconds: float, seed: int, *, kills: bool = False) -> Storm:
    """Let five clients ask for what they like for ``seconds``, wait for the calm, delete all, and look at what stays.

    ``kills``: hosts, a raylet and NATS are killed in the middle of it.
    """
    happened = Storm()
    await stack.deployed("v1", 2)
    url = f"http://127.0.0.1:{stack.http_ports[0]}{ROUTE}?work_s=0.005"
    async with counted_requests(url, happened.answers, _ASK_EVERY_S):
        end = time.monotonic() + seconds
        async with asyncio.TaskGroup() as tasks:
            for number in range(CLIENTS):
                tasks.create_task(_client(stack.admin, random.Random(f"{seed} {number}"), end, happened))
            if kills:
                tasks.create_task(_kill(stack, random.Random(f"{seed} kills"), end, happened))
        began = time.monotonic()
        for host in HOSTS:
            await stack.admin.call(UndrainHost(host_id=host))
        await _until_none(lambda: _inconsistent(stack.admin))
        happened.consistent_after_s = time.monotonic() - began
        await _delete_all(stack.admin)
    await _until_none(lambda: _left(stack, happened))
    return happened


async def _client(admin: AdminClient, dice: random.Random, end: float, happened: Storm) -> None:
    while time.monotonic() < end:
        name = dice.choice(NAMES)
        verb, ask = dice.choice(_COMMANDS)
        try:
            await ask(admin, name, dice)
            happened.commands[f"{verb} ok"] += 1
        except ServeError as error:
            happened.commands[f"{verb} {error.error_code}"] += 1
        await asyncio.sleep(dice.uniform(0.0, 0.3))


async def _deploy(admin: AdminClient, name: str, dice: random.Random) -> None:
    version = f"v{dice.randrange(1000)}"
    await admin.call(
        Deploy(
            name=name,
            replica_config=replica_config(version),
            backend_config=BackendConfig(
                num_replicas=dice.randrange(1, 3), user_config="plain", graceful_shutdown_timeout_s=2.0
            ),
            route_prefix=f"/{name}",
            version=version,
        )
    )


async def _delete(admin: AdminClient, name: str, _dice: random.Random) -> None:
    await admin.call(DeleteDeployment(name=name))


async def _scale(admin: AdminClient, name: str, dice: random.Random) -> None:
    await admin.call(Scale(backend_tag=name, num_replicas=dice.randrange(0, 4)))


async def _rollback(admin: AdminClient, name: str, _dice: random.Random) -> None:
    await admin.call(Rollback(name=name))


async def _traffic(admin: AdminClient, name: str, dice: random.Random) -> None:
    others = dict.fromkeys(dice.sample(NAMES, 2), 0.5)
    if dice.random() < 0.3:
        await admin.call(
            CreateEndpoint(endpoint=SHARED_ENDPOINT, traffic=others, route=f"/{SHARED_ENDPOINT}")
        )
    elif dice.random() < 0.3:
        await admin.call(DeleteEndpoint(endpoint=SHARED_ENDPOINT))
    else:
        await admin.call(SetTraffic(endpoint=SHARED_ENDPOINT, weights=others))


async def _drain(admin: AdminClient, _name: str, dice: random.Random) -> None:
    host = dice.choice(HOSTS)
    if dice.random() < 0.4:
        await admin.call(DrainHost(host_id=host))
    else:
        await admin.call(UndrainHost(host_id=host))


_COMMANDS: tuple[tuple[str, Callable[[AdminClient, str, random.Random], Awaitable[None]]], ...] = (
    ("deploy", _deploy),
    ("deploy", _deploy),
    ("delete", _delete),
    ("scale", _scale),
    ("rollback", _rollback),
    ("traffic", _traffic),
    ("drain", _drain),
)


async def _kill(stack: LoadedStack, dice: random.Random, end: float, happened: Storm) -> None:
    """One after the other, as far as time allows."""
    for what in dice.sample(["replica-host-1", "raylet of replica-host-2", "nats"], 3):
        await asyncio.sleep(dice.uniform(0.5, 1.0) * _KILL_EVERY_S)
        if time.monotonic() >= end:
            return
        process = stack.process(what.removeprefix("raylet of "))
        victims = [process.pid]
        if what.startswith("raylet"):
            below = psutil.Process(process.pid).children(recursive=True)
            victims = [child.pid for child in below if child.name() == "raylet"]
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                happened.kills.append(what)


async def _inconsistent(admin: AdminClient) -> list[str]:
    """What is under way, or is not as it should be: each backend has as many replicas as it should, all running."""
    found = [
        f"{deployment.name} is {deployment.status.value}: {deployment.message}"
        for deployment in await admin.call(ListDeployments())
        if deployment.goal_status is GoalStatus.PENDING
    ]
    for backend in await admin.call(GetAllBackends()):
        states = [replica.state for replica in backend.replicas]
        wanted = backend.backend_config.num_replicas
        is_short = len(states) != wanted and backend.status is DeploymentStatus.HEALTHY
        if backend.goal_status is GoalStatus.PENDING or set(states) - {"running"} or is_short:
            told = [(replica.replica_tag, replica.state, replica.message) for replica in backend.replicas]
            found.append(f"{backend.backend_tag} is {backend.status.value}, wants {wanted}, has {told}")
    return found


async def _delete_all(admin: AdminClient) -> None:
    with contextlib.suppress(ServeError):  # it may not be there
        await admin.call(DeleteEndpoint(endpoint=SHARED_ENDPOINT))
    for name in NAMES:
        reply = await admin.call(DeleteDeployment(name=name))
        if reply.goal_id is not None:
            await admin.wait_for_goal(reply.goal_id, deadline_s=CHANGE_LIMIT_S)


async def _left(stack: LoadedStack, happened: Storm) -> list[str]:
    """What is there beside the bystander, in Postgres or among the replicas."""
    rows = await stack.rows()
    happened.rows = Counter(kind for kind, _, _ in rows)
    happened.wrong = [
        f"{kind} {key}"
        for kind, key, value in rows
        if (kind in {"backend", "endpoint", "replica"} and NAME not in key)
        or (kind == "goal" and value.get("finished_at") is None)
        or (kind == "host" and key not in HOSTS)
    ]
    running = {replica.replica_tag for replica in await stack.replicas()}
    stored = {key for kind, key, _ in rows if kind == "replica"}
    if stored != running:
        happened.wrong.append(f"replicas {stored ^ running}")
    return happened.wrong


async def _until_none(look: Callable[[], Awaitable[list[str]]]) -> None:
    found = ["never looked"]
    try:
        async with asyncio.timeout(CHANGE_LIMIT_S):
            while found:
                with contextlib.suppress(ServeError):  # asked again
                    found = await look()
                await asyncio.sleep(_LOOK_EVERY_S)
    except TimeoutError as error:
        raise AssertionError(f"it does not come to rest: {found}") from error


async def measure(options: argparse.Namespace) -> bool:
    """Tell; True when all is as promised."""
    with tempfile.TemporaryDirectory(prefix="mc-", ignore_cleanup_errors=True) as text:
        async with LoadedStack.running(Path(text)) as stack:
            happened = await storm(stack, options.seconds, options.seed, kills=options.kills)
            stack_id = stack.stack_id
    print(happened.line())
    orphans = [process.pid for process in leftovers.find_marked(stack_id)]
    print(f"processes that are left: {orphans}")
    failed = set(happened.answers) - {"200"}
    is_well = happened.consistent_after_s <= CONSISTENT_WITHIN_S and not failed
    # A killed host and its requests take their time; that it comes to rest and leaves nothing holds all the same.
    return not orphans and not happened.wrong and (options.kills or is_well)


def main() -> int:
    """0: all as promised; 1: not."""
    parser = argparse.ArgumentParser(prog="python -m bench.conflicts", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long commands come")
    parser.add_argument("--kills", action="store_true", help="kill a host, a raylet and NATS meanwhile")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(32))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    is_well = asyncio.run(measure(options))
    print("as promised" if is_well else "NOT as promised")
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
