"""``python -m bench.chaos``: connections to NATS that are cut, and replicas that are killed, under full load.

`tests/integration/test_replica_chaos.py` runs a short storm; this one takes minutes. Why not `SteadyLoad`: there
everything has to succeed. Here a request that may not run twice may fail, but only with the one answer that says so,
only when a replica was killed under it, and it is counted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import aiohttp
import msgspec
import psutil

from serve_common.api.commands import DrainHost, UndrainHost, UpdateBackendConfig
from serve_common.identities.roles import Role
from serve_common.nats.client import connect_nats
from tests.support.loads.steady_load import Balancer, Connection, error_code
from tests.support.stacks.loaded_stack import CHANGE_LIMIT_S, NAME, ROUTE, LoadedStack

REPLICAS = 4
KILL_EVERY_S = 2.0
CUT_NAMES = ("proxy ", "replica ")
"""Beginnings of the names of connections that carry requests; a proxy has another one for all else."""
REQUESTS_PER_S = 600
CLIENTS = 48
SHORT_WORK_S = 0.005
LONG_EVERY = 20
LONG_WORK_S = 0.25
KINDS = ("GET", "POST", "POST with a key", "GET", "POST")
"""In turn; a POST without an Idempotency-Key may not be sent twice."""
FRAGILE = "POST"
_ANSWER_TIMEOUT_S = 20.0
_RECENT = 400
_PAUSE_AFTER_FAILURE_S = 0.05


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A request that was not answered 200 with what it had sent."""

    kind: str
    ended_at: float
    what: str
    answer: str = ""
    """The beginning of what came instead."""
    client: int = 0
    """Whose it was; each has one request at a time."""

    @property
    def is_allowed(self) -> bool:
        """It had started on a replica that died, may not run twice, and says so."""
        return self.kind == FRAGILE and self.what == "502 replica_died"


class ChaosLoad:
    """Clients over several proxies, each with one request at a time."""

    def __init__(self, route: str, ports: Sequence[int], requests_per_s: float) -> None:
        self.failures: list[Failure] = []
        self.served: Counter[str] = Counter()
        """By kind."""
        self.latencies_s: list[float] = []
        """Less what the model itself was asked to take."""
        self.balancer = Balancer(ports)
        self.pids: deque[str] = deque(maxlen=_RECENT)
        """Of the processes that gave the last answers."""
        self.fragile_under_way = 0
        """Requests that were sent, have not been answered and may not run twice."""
        self._route = route
        self._requests_per_s = requests_per_s
        self._numbers = itertools.count()
        self._loop = asyncio.get_running_loop()
        self._begun_at = self._loop.time()
        self.taken_s = 0.0
        self._is_over = False

    @classmethod
    @contextlib.asynccontextmanager
    async def running(
        cls, route: str, ports: Sequence[int], *, requests_per_s: float = REQUESTS_PER_S
    ) -> AsyncIterator[Self]:
        """Under way; every request ends before this does."""
        self = cls(route, ports, requests_per_s)
        async with asyncio.TaskGroup() as tasks:
            caring = tasks.create_task(self.balancer.look_after())
            async with asyncio.TaskGroup() as clients:
                try:
                    for number in range(CLIENTS):
                        clients.create_task(self._client(number))
                    yield self
                finally:
                    self._is_over = True
                    self.taken_s = self._loop.time() - self._begun_at
            caring.cancel()

    @property
    def forbidden(self) -> list[Failure]:
        return [failure for failure in self.failures if not failure.is_allowed]

    @property
    def rate(self) -> float:
        """Requests that were answered in a second."""
        return (sum(self.served.values()) + len(self.failures)) / self.taken_s

    def line(self) -> str:
        """What came of it, in one line."""
        served = sum(self.served.values())
        centiles = statistics.quantiles((latency * 1000 for latency in self.latencies_s), n=100)
        lost = sum(failure.is_allowed for failure in self.failures)
        return (
            f"{served} requests served in {self.taken_s:.1f} s ({self.rate:.0f}/s), {len(self.forbidden)} failed, "
            f"{lost} that may not run twice lost with their replica; "
            f"p50 {centiles[49]:.0f} ms, p99 {centiles[98]:.0f} ms over the model's own time"
        )

    def now(self) -> float:
        return self._loop.time()

    async def _client(self, number: int) -> None:
        connection: Connection | None = None
        chance = random.Random(number)
        due = self._begun_at + number / self._requests_per_s
        try:
            while not self._is_over:
                # Varied, lest all clients stay in step with each other and with the system.
                await asyncio.sleep(max(0.0, due + chance.uniform(0, 0.02) - self.now()))
                if connection is None or not connection.is_usable:
                    if connection is not None:
                        await connection.close()
                    connection = await self.balancer.connection()
                if not await self._query(connection, number):
                    await connection.close()
                    connection = None
                    await asyncio.sleep(_PAUSE_AFTER_FAILURE_S)
                due += CLIENTS / self._requests_per_s
        finally:
            if connection is not None:
                await connection.close()

    async def _query(self, connection: Connection, client: int) -> bool:
        """Whether the connection may be used again."""
        number = next(self._numbers)
        kind = KINDS[number % len(KINDS)]
        body = b"" if kind == "GET" else f"request {number}".encode()
        work_s = LONG_WORK_S if number % LONG_EVERY in (6, 8) else SHORT_WORK_S
        key = {"Idempotency-Key": str(number)} if kind == "POST with a key" else {}
        sent_at = self.now()
        self.fragile_under_way += kind == FRAGILE
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                status, answer = await connection.ask(
                    kind.partition(" ")[0], f"{self._route}?work_s={work_s}", body, key
                )
            who, _, echo = answer.partition(b"\n\n")
            if status == 200 and echo == body:
                self.served[kind] += 1
                self.latencies_s.append(self.now() - sent_at - work_s)
                self.pids.append(who.decode().split("\n")[2])
            else:
                told = answer[:600].decode(errors="replace")
                self._fail(client, kind, f"{status} {error_code(answer)}", told)
            return True
        except (OSError, EOFError, TimeoutError) as error:
            self._fail(client, kind, repr(error))
            return False
        finally:
            self.fragile_under_way -= kind == FRAGILE

    def _fail(self, client: int, kind: str, what: str, answer: str = "") -> None:
        self.failures.append(Failure(kind=kind, ended_at=self.now(), what=what, answer=answer, client=client))


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


async def measure(options: argparse.Namespace) -> bool:
    """Tell; True when nothing failed that may not fail."""
    with tempfile.TemporaryDirectory(prefix="mc-", ignore_cleanup_errors=True) as text:
        async with LoadedStack.running(Path(text)) as stack:
            changed = await ordered_changes(stack, "changing", options.rounds, options.requests_per_s)
            _tell(f"ordered changes, {changed.cuts} connections to NATS cut", changed)
            killed = await killed_replicas(
                stack, "killed", options.seconds, options.requests_per_s, options.seed
            )
            in_flight = sum(kill.fragile_in_flight for kill in killed.kills)
            _tell(
                f"{len(killed.kills)} replicas killed, {in_flight} requests that may not run twice under way",
                killed,
            )
    rates_kept = min(changed.load.rate, killed.load.rate) >= options.requests_per_s_min
    if not rates_kept:
        print(f"fewer than {options.requests_per_s_min} requests/s came through")
    return rates_kept and not changed.load.failures and not killed.load.forbidden and not killed.lost_beyond()


def _tell(title: str, storm: Storm) -> None:
    print(f"{title}: {storm.load.line()}", flush=True)
    for what, count in Counter(f"{failure.kind}: {failure.what}" for failure in storm.load.failures).items():
        print(f"  {count} x {what}")
    for beyond in storm.lost_beyond():
        print(f"  {beyond}")


def main() -> int:
    """0: nothing failed that may not fail; 1: something did."""
    parser = argparse.ArgumentParser(prog="python -m bench.chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long replicas are killed")
    parser.add_argument("--rounds", type=int, default=3, help="of ordered changes")
    parser.add_argument("--requests-per-s", type=float, default=600.0)
    parser.add_argument("--requests-per-s-min", type=float, default=500.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(32))
    options = parser.parse_args()
    began = time.monotonic()
    print(f"seed {options.seed}", flush=True)
    is_well = asyncio.run(measure(options))
    print(f"{'as promised' if is_well else 'NOT as promised'}; took {time.monotonic() - began:.0f} s")
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
