"""``python -m bench.hangs``: nats-server stands still for 4, 12 and 25 s under load, idle and in an update.

As after SIGSTOP: no connection breaks, and nothing comes through. With ``--killed`` it is gone instead, for as long.
Requests go on over links, but with ``--direct bodies`` or ``off``.
`tests/integration/test_replica_chaos.py` has one short hang.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path

import aiohttp
import msgspec
import psutil

from serve_common.runtime.settings import DirectMode
from tests.support.loads.steady_load import error_code
from tests.support.stacks.loaded_stack import CHANGE_LIMIT_S, ROUTE, LoadedStack

REPLICAS = 4
BEFORE_S = 2.0
AFTER_S = 5.0
BACK_WITHIN_S = 1.0
"""After the thaw."""
_ANSWER_TIMEOUT_S = 120.0


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one request, which was sent once; times count from the thaw."""

    number: int
    method: str
    sent_s: float
    ended_s: float
    what: str
    """The status, and the error's code if there is one."""


class Hang(msgspec.Struct, kw_only=True):
    """What one hang of ``seconds`` came to."""

    seconds: float
    is_updating: bool
    answers: list[Answer]
    runs: Counter[str]
    """How often each request was run, by its number."""
    replicas_before: list[str]
    replicas_after: list[str]
    started: int
    """Replicas that were started since just before the hang."""
    reconnects: int = 0

    @property
    def back_s(self) -> float:
        """From the thaw to the first answer to a request that was sent after it."""
        ends = [a.ended_s for a in self.answers if a.sent_s >= 0 and a.what == "200"]
        return min(ends, default=float("inf"))

    def failed_after(self, seconds: float) -> list[Answer]:
        """Requests that failed though they were sent so long after the thaw, or well before the hang."""
        return [a for a in self.answers if a.what != "200" and a.sent_s >= seconds]

    @property
    def meanwhile(self) -> tuple[int, int]:
        """Of the requests that were sent while NATS stood still, how many were answered before the thaw, and all."""
        sent = [a for a in self.answers if -self.seconds <= a.sent_s < 0]
        return sum(a.what == "200" and a.ended_s < 0 for a in sent), len(sent)

    @property
    def twice(self) -> list[str]:
        """Requests that were run more than once."""
        return [number for number, count in self.runs.items() if count > 1]

    def replaced(self) -> str:
        """Which replicas were replaced without an order; empty when none were."""
        ordered = REPLICAS if self.is_updating else 0
        if self.started != ordered or (not self.is_updating and self.replicas_after != self.replicas_before):
            return f"{self.replicas_before} became {self.replicas_after}; {self.started} were started"
        return ""

    def line(self) -> str:
        """What came of it, in one line."""
        what = ", ".join(f"{count} x {name}" for name, count in Counter(a.what for a in self.answers).items())
        kind = "in a rolling update" if self.is_updating else "idle"
        answered, sent = self.meanwhile
        return (
            f"{self.seconds:g} s, {kind}: {what}; {answered} of {sent} sent meanwhile were answered before the thaw; "
            f"{len(self.twice)} run twice; "
            f"back {self.back_s:.2f} s after the thaw; {self.replaced() or 'no replica replaced'}"
        )


async def hang(
    stack: LoadedStack,
    version: str,
    seconds: float,
    record: Path,
    *,
    rate: float,
    is_updating: bool,
    is_killed: bool = False,
) -> Hang:
    """Deploy ``version``, stop NATS for so long under load, let it go on, and look at what came of everything.

    ``rate`` is that of the requests, in 1/s; ``is_killed``: NATS ends, and is started again after that time.

    ``record`` is a file that does not exist yet; the replicas write into it.
    """
    loop = asyncio.get_running_loop()
    await stack.deployed(version, REPLICAS)
    before = await _settled(stack)
    nats = stack.process("nats").pid
    answers: list[tuple[int, str, float, float, str]] = []
    ended = asyncio.Event()
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=_ANSWER_TIMEOUT_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def ask(number: int) -> None:
            method = ("GET", "POST")[number % 2]
            port = stack.http_ports[number // 2 % len(stack.http_ports)]
            url = f"http://127.0.0.1:{port}{ROUTE}?work_s=0.01&number={number}&record={record}"
            sent_at = loop.time()
            try:
                async with session.request(method, url) as answer:
                    body = await answer.read()
                    what = (
                        str(answer.status) if answer.status == 200 else f"{answer.status} {error_code(body)}"
                    )
            except (aiohttp.ClientError, TimeoutError) as error:
                what = type(error).__name__
            answers.append((number, method, sent_at, loop.time(), what))

        async def load() -> None:
            number, due = 0, loop.time()
            while not ended.is_set():
                requests.create_task(ask(number))
                number, due = number + 1, due + 1 / rate
                await asyncio.sleep(max(0.0, due - loop.time()))

        async with asyncio.TaskGroup() as requests:
            requests.create_task(load())
            await asyncio.sleep(BEFORE_S)
            reply = await stack.deploy(f"{version}-next", REPLICAS) if is_updating else None
            # Who starts it again stands still meanwhile.
            stopped = psutil.Process(nats).ppid() if is_killed else nats
            os.kill(stopped, signal.SIGSTOP)
            if is_killed:
                os.kill(nats, signal.SIGKILL)
            try:
                await asyncio.sleep(seconds)
            finally:
                os.kill(stopped, signal.SIGCONT)
            thawed_at = loop.time()
            await asyncio.sleep(AFTER_S)
            if reply is not None:
                await stack.done(reply)
            ended.set()
    after = await _settled(stack)
    if not is_killed:
        assert stack.process("nats").pid == nats, "nats-server was started anew, which is another fault"
    return Hang(
        seconds=seconds,
        is_updating=is_updating,
        answers=[
            Answer(number=n, method=m, sent_s=sent - thawed_at, ended_s=end - thawed_at, what=what)
            for n, m, sent, end, what in answers
        ],
        runs=Counter((await asyncio.to_thread(record.read_text)).splitlines()),
        replicas_before=before,
        replicas_after=after,
        started=max(map(_ordinal, after)) - max(map(_ordinal, before)),
    )


async def _settled(stack: LoadedStack) -> list[str]:
    """The replicas' tags once none of a former version is left."""
    async with asyncio.timeout(CHANGE_LIMIT_S):
        while len(replicas := await stack.replicas()) != REPLICAS:  # noqa: ASYNC110 - asked
            await asyncio.sleep(0.1)
    return sorted(replica.replica_tag for replica in replicas)


def _ordinal(tag: str) -> int:
    return int(tag.rpartition("#")[2])


async def measure(options: argparse.Namespace) -> bool:
    """Tell; True when all is as promised."""
    is_well = True
    with tempfile.TemporaryDirectory(prefix="mh-", ignore_cleanup_errors=True) as text:
        directory = Path(text)
        (directory / "state").mkdir()
        async with LoadedStack.running(directory / "state", DirectMode(options.direct)) as stack:
            for seconds in options.seconds:
                for is_updating in (False, True):
                    name = f"{'update' if is_updating else 'idle'}-{seconds:g}"
                    outcome = await hang(
                        stack,
                        name,
                        seconds,
                        directory / name,
                        rate=options.rate,
                        is_updating=is_updating,
                        is_killed=options.killed,
                    )
                    print(outcome.line(), flush=True)
                    for failure in outcome.failed_after(BACK_WITHIN_S)[:5]:
                        print(f"  failed after the thaw: {failure}")
                    is_well = is_well and not (
                        outcome.replaced()
                        or outcome.twice
                        or outcome.failed_after(BACK_WITHIN_S)
                        or outcome.back_s > BACK_WITHIN_S
                    )
    return is_well


def main() -> int:
    """0: nothing replaced, nothing run twice, and back within a second; 1: something was not so."""
    parser = argparse.ArgumentParser(prog="python -m bench.hangs", description=__doc__)
    parser.add_argument("--seconds", type=float, nargs="+", default=[4.0, 12.0, 25.0])
    parser.add_argument("--rate", type=float, default=100.0, help="requests a second")
    parser.add_argument("--killed", action="store_true", help="NATS is gone, and does not only stand still")
    parser.add_argument("--direct", choices=[mode.value for mode in DirectMode], default=DirectMode.ALL.value)
    is_well = asyncio.run(measure(parser.parse_args()))
    print("as promised" if is_well else "NOT as promised")
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
