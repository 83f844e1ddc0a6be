"""Storms for a whole stack under load: connections to NATS that are cut, and replicas that are killed.

Why functions and no test: `make test` takes a short one, `python -m bench.chaos` the whole.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections import Counter
from collections.abc import Iterable
from typing import Any

import aiohttp
import msgspec
import psutil

from serve_common.api.commands import DrainHost, UndrainHost, UpdateBackendConfig
from serve_common.identities.roles import Role
from serve_common.nats.client import connect_nats
from tests.support.loads.chaos_load import ChaosLoad
from tests.support.stacks.loaded_stack import CHANGE_LIMIT_S, NAME, ROUTE, LoadedStack

REPLICAS = 4
KILL_EVERY_S = 2.0
CUT_NAMES = ("proxy ", "replica ")
"""Beginnings of the names of connections that carry requests; a proxy has another one for all else."""


class Kill(msgspec.Struct, frozen=True, kw_only=True):
    """One `kill -9`."""

    at: float
    pid: int
    fragile_in_flight: int
    """Requests that may not run twice and were under way, on whichever replica."""


class Storm(msgspec.Struct, kw_only=True):
    """What happened while the load went on."""

    load: ChaosLoad
    kills: list[Kill] = []
    cuts: int = 0
    """Connections to NATS that were ended."""

    def lost_beyond(self) -> list[str]:
        """Kills that cost more requests than were under way.

        A client has one request under way, and hears that it is lost only when nothing can be sent to that replica any
        more. How many were under way in all at the kill itself is no limit: until NATS sees that the replica's
        connection has ended, more are sent to it.
        """
        found = []
        for number, kill in enumerate(self.kills):
            until = self.kills[number + 1].at if number + 1 < len(self.kills) else float("inf")
            lost = Counter(
                failure.client
                for failure in self.load.failures
                if failure.is_allowed and kill.at <= failure.ended_at < until
            )
            found += [
                f"client {client} lost {count} at one kill" for client, count in lost.items() if count > 1
            ]
        before = self.kills[0].at if self.kills else float("inf")
        early = sum(failure.ended_at < before for failure in self.load.failures)
        return [*found, *([f"{early} lost without a kill"] if early else [])]


async def cut_connections(stack: LoadedStack, replicas: int) -> int:
    """End every connection that carries requests, as a network would; how many there were.

    Waits until there are those of ``replicas``, and of no more: one that ends in the very moment in which a router is
    cut off cannot be asked any more what became of a request that may not run twice. That gap is known.
    """
    url = f"http://127.0.0.1:{stack.nats_monitor_port}"
    expected = {"proxy": 2 * len(stack.http_ports), "replica": replicas}
    async with aiohttp.ClientSession() as session, asyncio.timeout(CHANGE_LIMIT_S):
        async with session.get(f"{url}/varz") as response:
            server_id = (await response.json())["server_id"]
        while True:
            async with session.get(f"{url}/connz?limit=1000") as response:
                connections: list[dict[str, Any]] = (await response.json())["connections"]
            wanted = {c["cid"]: c["name"] for c in connections if c.get("name", "").startswith(CUT_NAMES)}
            found = Counter(name.partition(" ")[0] for name in wanted.values())
            if found == expected and len(await stack.replicas()) == replicas:
                break
            await asyncio.sleep(0.02)
    client = await connect_nats(stack.settings(Role.SYSTEM), name="chaos", deadline_s=20.0)
    try:
        for cid in wanted:
            await client.request(
                f"$SYS.REQ.SERVER.{server_id}.KICK", json.dumps({"cid": cid}).encode(), timeout=20
            )
    finally:
        await client.close()
    return len(wanted)


async def ordered_changes(stack: LoadedStack, version: str, rounds: int, requests_per_s: float) -> Storm:
    """Replicas are added, rolled, drained and taken away, and connections to NATS are cut between."""
    await stack.deployed(f"{version}.0", 2)
    async with ChaosLoad.running(ROUTE, stack.http_ports, requests_per_s=requests_per_s) as load:
        storm = Storm(load=load)
        for number in range(1, rounds + 1):
            await stack.done(
                await stack.admin.call(
                    UpdateBackendConfig(backend_tag=NAME, config={"num_replicas": REPLICAS})
                )
            )
            storm.cuts += await cut_connections(stack, REPLICAS)
            await stack.deployed(f"{version}.{number}", REPLICAS)
            storm.cuts += await cut_connections(stack, REPLICAS)
            await stack.done(await stack.admin.call(DrainHost(host_id="replica-host-2")))
            await stack.admin.call(UndrainHost(host_id="replica-host-2"))
            storm.cuts += await cut_connections(stack, REPLICAS)
            await stack.done(
                await stack.admin.call(UpdateBackendConfig(backend_tag=NAME, config={"num_replicas": 2}))
            )
            await asyncio.sleep(0.5)
    return storm


def _living(pids: Iterable[str]) -> set[int]:
    return {pid for pid in map(int, pids) if psutil.pid_exists(pid)}


async def killed_replicas(
    stack: LoadedStack, version: str, seconds: float, requests_per_s: float, seed: int
) -> Storm:
    """One of the replicas that answer is killed every `KILL_EVERY_S`, as often as that is in ``seconds``."""
    await stack.deployed(version, REPLICAS)
    chance = random.Random(seed)
    killed: set[int] = set()
    async with ChaosLoad.running(ROUTE, stack.http_ports, requests_per_s=requests_per_s) as load:
        storm = Storm(load=load)
        await asyncio.sleep(1.0)
        for _ in range(int(seconds / KILL_EVERY_S)):
            # One is always left: how long a replica takes to start is not what this is about.
            while len(alive := sorted(_living(load.pids) - killed)) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            pid = chance.choice(alive)
            killed.add(pid)
            storm.kills.append(Kill(at=load.now(), pid=pid, fragile_in_flight=load.fragile_under_way))
            os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(KILL_EVERY_S)
    return storm
