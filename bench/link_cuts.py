"""``python -m bench.link_cuts``: direct links are cut at random bytes, and connections to NATS, while replicas roll.

10,000 requests of 1 B to 8 MiB, GET and POST, whole and streamed, over WebSockets and by handle: none may fail, none
may be run twice, and each answer is compared by its SHA-256. A client whose WebSocket a drain closes with 1012, which
says so, opens another and goes on with the message that was not answered.
`tests/integration/test_replica_chaos.py` has a short storm.

Links are cut by a forwarder that takes the place of a replica's socket: bytes come through up to a random one, and then
both ends are closed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import io
import itertools
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlencode

import aiohttp
import msgspec

from muster.handle import DeploymentHandle
from muster.handles import runtime
from serve_common.api.commands import DeleteDeployment, Deploy
from serve_common.config.backend import BackendConfig, RayActorOptions, ReplicaConfig
from serve_common.identities.roles import Role
from serve_common.nats.client import connect_nats
from serve_common.runtime.settings import DirectMode
from tests.support.apps.mixed_app.mixed_model import make
from tests.support.paths import APPS
from tests.support.stacks.loaded_stack import LoadedStack

NAME = "mixed"
REPLICAS = 4
CLIENTS = 24
SIZE_MAX = 8 * 1024 * 1024
CUT_BYTES = (64, 16 * 1024 * 1024)
"""A link ends after so many bytes, drawn evenly by their logarithm; a ticket, of 32, has always come through."""
NATS_CUT_EVERY_S = 2.0
KINDS = ("POST", "GET", "stream", "handle", "POST", "GET", "socket")
"""In turn. None may be run twice but GET, which may always."""
MESSAGE_BYTES = 500_000
RESTARTS = 1012
"""Close code of a WebSocket whose replica is replaced."""
_ANSWER_TIMEOUT_S = 120.0
_LOOK_EVERY_S = 0.005


def draw_bytes(chance: random.Random, least: int, most: int) -> int:
    """A number of bytes, evenly by its logarithm."""
    return int(least * (most / least) ** chance.random())


class LinkCutter:
    """Stands between routers and the sockets that replicas make in ``directories``."""

    def __init__(self, directories: list[Path], chance: random.Random) -> None:
        self.links = 0
        """Links that were forwarded."""
        self.cuts = 0
        self._directories = directories
        self._chance = chance
        self._taken: set[Path] = set()
        self._servers: list[asyncio.Server] = []
        self._writers: set[asyncio.StreamWriter] = set()

    @classmethod
    @contextlib.asynccontextmanager
    async def running(cls, directories: list[Path], chance: random.Random) -> AsyncIterator[Self]:
        """Under way; every link that it forwards ends with it."""
        self = cls(directories, chance)
        async with asyncio.TaskGroup() as tasks:
            looking = tasks.create_task(self._take_over())
            try:
                yield self
            finally:
                looking.cancel()
                for server in self._servers:
                    server.close()
                for writer in list(self._writers):
                    writer.transport.abort()

    async def _take_over(self) -> None:
        while True:
            for directory in self._directories:
                for path in directory.iterdir() if directory.exists() else ():
                    if path not in self._taken and path.is_socket():
                        await self._stand_before(path)
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _stand_before(self, path: Path) -> None:
        real = path.parent / "aside" / path.name
        self._taken.add(path)
        await asyncio.to_thread(_put_aside, path, real)
        self._servers.append(
            await asyncio.start_unix_server(lambda r, w: self._forward(real, r, w), str(path))
        )

    async def _forward(self, real: Path, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        left = draw_bytes(self._chance, *CUT_BYTES)
        self._writers.add(writer)
        far: asyncio.StreamWriter | None = None
        try:
            far_reader, far = await asyncio.open_unix_connection(str(real))
            self._writers.add(far)
            self.links += 1

            async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
                nonlocal left
                while left > 0 and (data := await source.read(65_536)):
                    data = data[:left]
                    left -= len(data)
                    target.write(data)
                    await target.drain()
                raise ConnectionError("the link is cut, or an end has closed it")

            with contextlib.suppress(ExceptionGroup):
                async with asyncio.TaskGroup() as pumps:
                    pumps.create_task(pump(reader, far))
                    pumps.create_task(pump(far_reader, writer))
            self.cuts += left <= 0
        except OSError:
            pass  # the replica has ended
        finally:
            for each in (writer, far):
                if each is not None:
                    self._writers.discard(each)
                    each.close()  # what was written arrives, and then the end


def _put_aside(path: Path, real: Path) -> None:
    real.parent.mkdir(exist_ok=True)
    path.rename(real)


class Storm(msgspec.Struct, kw_only=True):
    """What came of it."""

    served: Counter[str] = msgspec.field(default_factory=Counter)
    """By kind."""
    failures: list[str] = []
    runs: Counter[str] = msgspec.field(default_factory=Counter)
    """How often each request that may not be run twice was run, by its number."""
    links: int = 0
    link_cuts: int = 0
    nats_cuts: int = 0
    reopened: int = 0
    """WebSockets that a drain closed."""
    rolls: int = 0
    bytes_each_way: int = 0
    taken_s: float = 0.0

    @property
    def twice(self) -> list[str]:
        """Requests that were run more than once."""
        return [number for number, count in self.runs.items() if count > 1]

    def line(self) -> str:
        """In one line."""
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.served.items()))
        return (
            f"{self.served.total()} requests served ({kinds}) with {self.bytes_each_way / 2**20:.0f} MiB in "
            f"{self.taken_s:.0f} s, {len(self.failures)} failed, {len(self.twice)} run twice; "
            f"{self.rolls} rolling updates, {self.reopened} WebSockets closed by a drain, "
            f"{self.link_cuts} of {self.links} links cut, "
            f"{self.nats_cuts} connections to NATS cut"
        )


class _Clients:
    """Sends the requests, each once."""

    def __init__(self, stack: LoadedStack, storm: Storm, requests: int, seed: int, record: Path) -> None:
        self._storm = storm
        self._urls = [f"http://127.0.0.1:{port}/{NAME}" for port in stack.http_ports]
        self._numbers = iter(range(requests))
        self._seed = seed
        self._record = str(record)
        self._handle = DeploymentHandle(NAME, "default").options(method_name="call")

    async def run(self) -> None:
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=_ANSWER_TIMEOUT_S)
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
            asyncio.TaskGroup() as clients,
        ):
            for _ in range(CLIENTS):
                clients.create_task(self._client(session))

    async def _client(self, session: aiohttp.ClientSession) -> None:
        for number in self._numbers:
            kind = KINDS[number % len(KINDS)]
            size = draw_bytes(random.Random(f"{self._seed} {number}"), 1, SIZE_MAX)
            try:
                async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                    wrong = await self._request(session, kind, number, size)
            except Exception as error:
                wrong = f"{type(error).__name__}: {error}"
            if wrong:
                self._storm.failures.append(f"{kind} of {size} bytes, number {number}: {wrong}")
            else:
                self._storm.served[kind] += 1
                self._storm.bytes_each_way += size

    async def _request(self, session: aiohttp.ClientSession, kind: str, number: int, size: int) -> str:
        """What was wrong with the answer; empty when nothing was."""
        body = make(number, size)
        wanted = hashlib.sha256(body).digest()
        query = {"number": number, "size": size, "record": self._record}
        url = f"{self._urls[number % len(self._urls)]}/{{}}?{urlencode(query)}"
        if kind == "handle":
            answer = await self._handle.remote(number, body, self._record)
        elif kind == "socket":
            answer = await self._talk(session, url.format("socket"), body)
        else:
            method, path = {"GET": ("GET", "get"), "POST": ("POST", "echo"), "stream": ("POST", "stream")}[
                kind
            ]
            data = None if method == "GET" else io.BytesIO(body)
            async with session.request(method, url.format(path), data=data) as response:
                answer = await response.read()
                if response.status != 200:
                    return f"{response.status} {answer[:200]!r}"
        return "" if hashlib.sha256(answer).digest() == wanted else f"{len(answer)} other bytes"

    async def _talk(self, session: aiohttp.ClientSession, url: str, body: bytes) -> bytes:
        """Send ``body`` in messages, each when the one before was answered."""
        answer = b""
        while True:
            async with session.ws_connect(url, max_msg_size=0) as socket:
                while len(answer) < len(body):
                    await socket.send_bytes(body[len(answer) : len(answer) + MESSAGE_BYTES])
                    message = await socket.receive()
                    if message.type is not aiohttp.WSMsgType.BINARY:
                        break
                    answer += message.data
                else:
                    return answer
            if socket.close_code != RESTARTS:
                raise ConnectionError(f"closed with {socket.close_code}")
            self._storm.reopened += 1
            url = url.replace("record=", "again=")


async def _deploy(stack: LoadedStack, version: str) -> None:
    await stack.done(
        await stack.admin.call(
            Deploy(
                name=NAME,
                replica_config=ReplicaConfig(
                    import_path="mixed_model:Mixed",
                    app_dir=str(APPS / "mixed_app"),
                    init_args=[version],
                    ray_actor_options=RayActorOptions(num_cpus=0.5),
                ),
                backend_config=BackendConfig(num_replicas=REPLICAS),
                route_prefix=f"/{NAME}",
                version=version,
            )
        )
    )


async def _roll(stack: LoadedStack, storm: Storm, name: str) -> None:
    for number in itertools.count(1):
        await _deploy(stack, f"{name}.{number}")
        storm.rolls += 1


async def _cut_nats(stack: LoadedStack, storm: Storm, chance: random.Random) -> None:
    """End one connection that carries requests, every now and then."""
    url = f"http://127.0.0.1:{stack.nats_monitor_port}"
    client = await connect_nats(stack.settings(Role.SYSTEM), name="link cuts", deadline_s=20.0)
    try:
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{url}/varz") as response:
                server_id = (await response.json())["server_id"]
            while True:
                await asyncio.sleep(NATS_CUT_EVERY_S * chance.uniform(0.5, 1.5))
                async with session.get(f"{url}/connz?limit=1000") as response:
                    connections: list[dict[str, Any]] = (await response.json())["connections"]
                found = [
                    c["cid"] for c in connections if c.get("name", "").startswith(("proxy ", "replica "))
                ]
                if found:
                    told = json.dumps({"cid": chance.choice(found)}).encode()
                    await client.request(f"$SYS.REQ.SERVER.{server_id}.KICK", told, timeout=20)
                    storm.nats_cuts += 1
    finally:
        await client.close()


async def storm(stack: LoadedStack, requests: int, seed: int, record: Path) -> Storm:
    """Send so many requests while everything is cut. ``record`` is a file that does not exist yet."""
    outcome, chance, name = Storm(), random.Random(seed), f"v{seed}"
    runtime.use(msgspec.structs.replace(stack.settings(Role.CLIENT), direct=stack.direct))
    try:
        async with LinkCutter.running(stack.direct_dirs, chance) as cutter:
            await _deploy(stack, name)
            began = time.monotonic()
            async with asyncio.TaskGroup() as tasks:
                others = [
                    tasks.create_task(_roll(stack, outcome, name)),
                    tasks.create_task(_cut_nats(stack, outcome, chance)),
                ]
                await _Clients(stack, outcome, requests, seed, record).run()
                outcome.taken_s = time.monotonic() - began
                for other in others:
                    other.cancel()
            outcome.links, outcome.link_cuts = cutter.links, cutter.cuts
    finally:
        runtime.disconnect()
    await stack.done(await stack.admin.call(DeleteDeployment(name=NAME)))
    outcome.runs = Counter((await asyncio.to_thread(record.read_text)).splitlines())
    return outcome


async def measure(options: argparse.Namespace) -> bool:
    """Tell; True when all is as promised."""
    with tempfile.TemporaryDirectory(prefix="ml-", ignore_cleanup_errors=True) as text:
        directory = Path(text)
        (directory / "state").mkdir()
        async with LoadedStack.running(directory / "state", DirectMode(options.direct)) as stack:
            outcome = await storm(stack, options.requests, options.seed, directory / "runs")
    print(outcome.line())
    for failure in outcome.failures[:20]:
        print(f"  {failure}")
    return not outcome.failures and not outcome.twice


def main() -> int:
    """0: nothing failed and nothing was run twice; 1: something was not so."""
    parser = argparse.ArgumentParser(prog="python -m bench.link_cuts", description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--direct", choices=[mode.value for mode in DirectMode], default=DirectMode.ALL.value)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(32))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    is_well = asyncio.run(measure(options))
    print("as promised" if is_well else "NOT as promised")
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
