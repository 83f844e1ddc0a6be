"""``python -m bench.link_cuts``: direct links are cut at random bytes, and connections to NATS, while replicas roll.

10,000 requests of 1 B to 8 MiB, GET and POST, whole and streamed, over WebSockets and by handle: none may fail, none
may be run twice, and each answer is compared by its SHA-256. A client whose WebSocket a drain closes with 1012, which
says so, opens another and goes on with the message that was not answered.
`tests/integration/test_replica_chaos.py` has a short storm.

Links are cut by a forwarder that takes the place of a replica's socket, connections to NATS by one before its port:
bytes come through up to a random one, and then both ends are closed.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import io
import itertools
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode

import aiohttp
import msgspec

from bench.forwarders import Counts, Network, draw_bytes
from muster.handle import DeploymentHandle
from muster.handles import runtime
from serve_common.api.commands import DeleteDeployment, Deploy
from serve_common.config.backend import BackendConfig, RayActorOptions, ReplicaConfig
from serve_common.identities.roles import Role
from serve_common.runtime.settings import DirectMode
from tests.support.apps.mixed_app.mixed_model import make
from tests.support.paths import APPS
from tests.support.stacks.loaded_stack import LoadedStack

NAME = "mixed"
REPLICAS = 4
CLIENTS = 24
SIZE_MAX = 8 * 1024 * 1024
NATS_CUT_EVERY_S = 1.0
KINDS = ("POST", "GET", "stream", "handle", "POST", "GET", "socket")
"""In turn. None may be run twice but GET, which may always."""
MESSAGE_BYTES = 500_000
RESTARTS = 1012
"""Close code of a WebSocket whose replica is replaced."""
_ANSWER_TIMEOUT_S = 120.0
_COUNTED_EVERY_S = 0.5


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
        self._numbers = self._until_rolled(requests)
        self._seed = seed
        self._record = str(record)
        self._handle = DeploymentHandle(NAME, "default").options(method_name="call")

    def _until_rolled(self, requests: int) -> Iterator[int]:
        """So many, and more until replicas have rolled once and a connection to NATS was cut."""
        for number in itertools.count():
            if number >= requests and self._storm.rolls and self._storm.nats_cuts:
                return
            yield number

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
                # On a machine that is full 8 MiB take longer than a replica waits by default before it is killed,
                # which is another fault than a cut.
                backend_config=BackendConfig(
                    num_replicas=REPLICAS, graceful_shutdown_timeout_s=_ANSWER_TIMEOUT_S
                ),
                route_prefix=f"/{NAME}",
                version=version,
            )
        )
    )


async def _roll(stack: LoadedStack, storm: Storm, name: str) -> None:
    for number in itertools.count(1):
        await _deploy(stack, f"{name}.{number}")
        storm.rolls += 1


async def _count_cuts(network: Network, storm: Storm, before: Counts, is_over: asyncio.Event) -> None:
    while not is_over.is_set():
        storm.nats_cuts = (await network.count()).nats_cuts - before.nats_cuts
        await asyncio.sleep(_COUNTED_EVERY_S)


async def storm(
    stack: LoadedStack,
    network: Network,
    requests: int,
    seed: int,
    record: Path,
    *,
    nats_cut_every_s: float = NATS_CUT_EVERY_S,
) -> Storm:
    """Send so many requests while everything is cut, and more until replicas have rolled once and NATS was cut once.

    ``record`` is a file that does not exist yet. ``network`` has the stack's front.
    """
    outcome, name = Storm(), f"v{seed}"
    runtime.use(stack.data_settings(Role.CLIENT))
    try:
        await network.take_over_sockets(stack.direct_dirs)
        await _deploy(stack, name)
        began = time.monotonic()
        before = await network.cut(seed, nats_cut_every_s)
        async with asyncio.TaskGroup() as tasks:
            rolling = tasks.create_task(_roll(stack, outcome, name))
            is_over = asyncio.Event()
            tasks.create_task(_count_cuts(network, outcome, before, is_over))
            await _Clients(stack, outcome, requests, seed, record).run()
            outcome.taken_s = time.monotonic() - began
            rolling.cancel()
            is_over.set()
        after = await network.spare()
        outcome.links, outcome.link_cuts, outcome.nats_cuts = (
            after.links - before.links,
            after.link_cuts - before.link_cuts,
            after.nats_cuts - before.nats_cuts,
        )
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
        async with (
            Network.running() as network,
            LoadedStack.running(
                directory / "state", DirectMode(options.direct), front=network.stand_before_nats
            ) as stack,
        ):
            outcome = await storm(
                stack,
                network,
                options.requests,
                options.seed,
                directory / "runs",
                nats_cut_every_s=options.nats_cut_every,
            )
    print(outcome.line())
    for failure in outcome.failures[:20]:
        print(f"  {failure}")
    return not outcome.failures and not outcome.twice


def main() -> int:
    """0: nothing failed and nothing was run twice; 1: something was not so."""
    parser = argparse.ArgumentParser(prog="python -m bench.link_cuts", description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--direct", choices=[mode.value for mode in DirectMode], default=DirectMode.ALL.value)
    parser.add_argument(
        "--nats-cut-every",
        type=float,
        default=NATS_CUT_EVERY_S,
        metavar="S",
        help="seconds between the cuts of connections to NATS",
    )
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(32))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    is_well = asyncio.run(measure(options))
    print("as promised" if is_well else "NOT as promised")
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
