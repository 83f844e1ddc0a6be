"""``python -m bench.leaks``: what 100,000 requests leave behind when a third of the clients leaves early.

Why clients leave at random moments and not at chosen ones: a slot, a future or a task is lost between two steps that
nobody thought of. The seed is printed, so that a run can be repeated as nearly as timing allows.
`tests/integration/test_leaks.py` runs a twentieth of it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from tests.support.paths import APPS
from tests.support.stacks.bare_stack import BareStack, Runner

RSS_GROWTH_MAX_BYTES = 16 * 1024 * 1024
APP_DIR = APPS / "proof_app"
TAG = "default/mixed"
ROUTE = "/mixed"
CANCELLED_SHARE = 0.3
CLIENTS = 48
KINDS = {"quick": 50, "wait": 15, "read": 12, "stream": 12, "fail": 6, "large": 5}
"""What the replica does, and how often it is asked for."""
UPLOAD_BYTES = 300_000
LEAVES_WITHIN_S = 0.02
PATIENCE_S = 60.0
"""Of clients that stay: far more than any answer takes."""
_SETTLES_WITHIN_S = 30.0
_UNNAMED, _A_TASK = re.compile(r"Task-\d+"), "a task"


class Held(msgspec.Struct, kw_only=True):
    """What one process holds when nobody asks anything."""

    name: str
    slots: int
    futures: int
    """Calls and reply subjects; 0 for a replica, which has none."""
    tasks: list[str]
    rss_bytes: int


class Growth(msgspec.Struct, kw_only=True):
    """What came of a run, of one process."""

    name: str
    slots: int
    futures: int
    more_tasks: list[str]
    rss_before_bytes: int
    """After the warm-up."""
    rss_after_bytes: int

    @property
    def rss_growth_bytes(self) -> int:
        return self.rss_after_bytes - self.rss_before_bytes


class Outcome(msgspec.Struct, kw_only=True):
    """What came of a run."""

    seed: int
    requests: int
    cancelled: int
    unexpected: dict[str, int]
    growths: list[Growth]

    def lines(self) -> list[str]:
        unexpected = self.unexpected or "none"
        said = [
            f"seed {self.seed}: {self.requests} requests, {self.cancelled} cancelled, unexpected: {unexpected}"
        ]
        said += [
            f"{growth.name}: {growth.slots} slots, {growth.futures} futures, {len(growth.more_tasks)} tasks more; "
            f"RSS {growth.rss_before_bytes / 2**20:.1f} -> {growth.rss_after_bytes / 2**20:.1f} MiB"
            for growth in self.growths
        ]
        return said

    def held(self) -> list[str]:
        """Everything that should be gone and is not."""
        return [
            f"{growth.name} holds {growth.slots} slots, {growth.futures} futures, {growth.more_tasks}"
            for growth in self.growths
            if growth.slots or growth.futures or growth.more_tasks
        ]


async def start(stack: BareStack) -> None:
    """A proxy and a replica for `run`."""
    await asyncio.gather(
        stack.add_proxies(1),
        stack.add_replica(
            f"{TAG}#0", "proof_models:Mixed", app_dir=str(APP_DIR), max_concurrent_queries=CLIENTS // 2
        ),
    )
    await stack.put_endpoint(TAG, ROUTE)
    await stack.put_backend(TAG, [f"{TAG}#0"], limit=CLIENTS // 2)


async def run(stack: BareStack, *, seed: int, warm_up: int, requests: int) -> Outcome:
    """Warm up, then count what ``requests`` more leave behind."""
    load = _Load(stack.proxies[0].url, seed)
    idle = [_active(runner, await runner.look()) for runner in stack.runners]
    at_rest = {held.name: held.tasks.count(_A_TASK) for held in idle}
    await load.run(warm_up)
    # aiohttp has a task for each connection, which outlives its client by a moment.
    warm = await _settled(stack.runners, lambda held: held.tasks.count(_A_TASK) > at_rest[held.name])
    before = {held.name: held for held in warm}
    load.reset()
    await load.run(requests)
    after = await _settled(stack.runners, lambda held: bool(_more_tasks(held, before)))
    return Outcome(
        seed=seed,
        requests=load.begun,
        cancelled=load.cancelled,
        unexpected=dict(load.unexpected),
        growths=[
            Growth(
                name=held.name,
                slots=held.slots,
                futures=held.futures,
                more_tasks=_more_tasks(held, before),
                rss_before_bytes=before[held.name].rss_bytes,
                rss_after_bytes=held.rss_bytes,
            )
            for held in after
        ],
    )


class _Load:
    def __init__(self, url: str, seed: int) -> None:
        self._url = url + ROUTE
        self._chance = random.Random(seed)
        self.reset()

    def reset(self) -> None:
        self.begun = self.cancelled = 0
        self.unexpected: Counter[str] = Counter()

    async def run(self, requests: int) -> None:
        async with (
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
            asyncio.TaskGroup() as clients,
        ):
            for _ in range(CLIENTS):
                clients.create_task(self._client(session, requests))

    async def _client(self, session: aiohttp.ClientSession, requests: int) -> None:
        kinds, weights = list(KINDS), list(KINDS.values())
        while self.begun < requests:
            self.begun += 1
            (kind,) = self._chance.choices(kinds, weights)
            is_leaving = self.cancelled < CANCELLED_SHARE * self.begun
            patience_s = self._chance.uniform(0, LEAVES_WITHIN_S) if is_leaving else PATIENCE_S
            scope = asyncio.timeout(patience_s)
            try:
                async with scope:
                    await self._query(session, kind)
            except TimeoutError:
                if is_leaving:
                    self.cancelled += 1
                else:
                    self.unexpected["no answer in time"] += 1
            except aiohttp.ClientError as error:
                self.unexpected[f"{kind}: {type(error).__name__}"] += 1

    async def _query(self, session: aiohttp.ClientSession, kind: str) -> None:
        body = b"x" * UPLOAD_BYTES if kind == "read" else None
        method = "POST" if kind == "read" or self._chance.random() < 0.5 else "GET"
        async with session.request(method, f"{self._url}/{kind}", data=body) as response:
            await response.read()
            if response.status != (500 if kind == "fail" else 200):
                self.unexpected[f"{kind}: {response.status}"] += 1


async def _settled(runners: Sequence[Runner], has_more: Callable[[Held], bool]) -> list[Held]:
    """As soon as nothing is under way, or what is left after a while; ``has_more`` tells of tasks."""
    looks: list[Held] = []
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_SETTLES_WITHIN_S):
            while True:
                looks = [_active(runner, await runner.look()) for runner in runners]
                if not any(held.slots or held.futures or has_more(held) for held in looks):
                    break
                await asyncio.sleep(0.2)
    return looks


def _more_tasks(held: Held, before: Mapping[str, Held]) -> list[str]:
    return sorted((Counter(held.tasks) - Counter(before[held.name].tasks)).elements())


def _active(runner: Runner, look: dict[str, Any]) -> Held:
    tasks = [_UNNAMED.sub(_A_TASK, task) for task in look["tasks"] + look.get("bus_tasks", [])]
    return Held(
        name=f"{runner.kind} {runner.name}",
        slots=look["slots"] + look.get("queued", 0) + look.get("http", 0),
        futures=look.get("calls", 0) + look.get("replies", 0),
        tasks=tasks,
        rss_bytes=look["rss_bytes"],
    )


async def measure(requests: int, seed: int, rounds: int) -> bool:
    """Tell; True when nothing was left."""
    is_clean = True
    with tempfile.TemporaryDirectory(prefix="mk-") as text:
        async with BareStack.running(Path(text)) as stack:
            await start(stack)
            warm_up = max(requests // 10, 1000)
            for number in range(rounds):
                part = requests // rounds
                outcome = await run(
                    stack, seed=seed + number, warm_up=warm_up if number == 0 else 0, requests=part
                )
                print("\n".join(outcome.lines()), flush=True)
                grown = [g for g in outcome.growths if g.rss_growth_bytes > RSS_GROWTH_MAX_BYTES / rounds]
                if number and grown:  # the first part may still fill what stays
                    print(f"grows: {', '.join(growth.name for growth in grown)}")
                if outcome.held() or outcome.unexpected or (number and grown):
                    is_clean = False
    return is_clean


def main() -> int:
    """0: nothing is left behind; 1: something is."""
    parser = argparse.ArgumentParser(prog="python -m bench.leaks", description=__doc__)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=4, help="look so often; memory must be flat over them")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(32))
    options = parser.parse_args()
    began = time.monotonic()
    is_clean = asyncio.run(measure(options.requests, options.seed, options.rounds))
    print(f"{'nothing' if is_clean else 'SOMETHING'} is left behind; took {time.monotonic() - began:.0f} s")
    return 0 if is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
