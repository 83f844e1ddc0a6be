"""`python -m bench.wires`: nats-py beside our own bus, request and reply of small messages over nats-server.

Why: the data plane speaks NATS by a client of its own only because that is faster. This is where it can be seen,
and where it would be seen if it no longer was. Rounds of both alternate, so that what disturbs disturbs both.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import nats
import structlog
import uvloop

from bench.floors import nats_server_binary
from serve_common.nats.connection import BusConnection, Inbox
from serve_common.nats.options import BusOptions

WIRES = ("nats-py", "bus")
SUBJECT = "serve.replica.default.echo.0"
Ask = Callable[[bytes], Awaitable[bytes]]


@dataclass
class Round:
    """What one round of one wire measured."""

    per_s: float
    p50_ms: float
    p99_ms: float
    cpu_us: float
    """CPU time of caller and answerer together, per request."""


@contextlib.contextmanager
def nats_server() -> Iterator[str]:
    """The URL of a server of our own."""
    binary = nats_server_binary()
    with tempfile.TemporaryDirectory(prefix="muster-wires-") as directory:
        process = subprocess.Popen(
            [binary, "-a", "127.0.0.1", "-p", "-1", "--ports_file_dir", directory], stderr=subprocess.DEVNULL
        )
        try:
            ports = Path(directory) / f"nats-server_{process.pid}.ports"
            while not ports.exists() or not ports.read_text():
                assert process.poll() is None, "nats-server does not start"
                time.sleep(0.01)
            yield f"nats://127.0.0.1:{json.loads(ports.read_text())['nats'][0].rpartition(':')[2]}"
        finally:
            process.kill()
            process.wait()


async def answer(wire: str, url: str) -> None:
    """Echo until SIGTERM; says when it listens."""
    over = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, over.set)
    if wire == "bus":
        bus = BusConnection(BusOptions([url]), random.Random(1))
        await bus.connect(10)
        bus.subscribe(SUBJECT, lambda _subject, reply, payload, _headers: bus.publish(reply, payload))
        await bus.flush(5)
        print("ready", flush=True)
        await over.wait()
        await bus.close()
        return
    client = await nats.connect(url)

    async def echo(message: nats.aio.msg.Msg) -> None:
        await client.publish(message.reply, message.data)

    await client.subscribe(SUBJECT, cb=echo)
    await client.flush()
    print("ready", flush=True)
    await over.wait()
    await client.close()


@contextlib.contextmanager
def answerer(wire: str, url: str) -> Iterator[subprocess.Popen[str]]:
    """A process of its own that echoes."""
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.wires", "--answer", wire, url], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.terminate()
        process.communicate()


@contextlib.asynccontextmanager
async def caller(wire: str, url: str) -> AsyncIterator[Ask]:
    """Asks over that wire."""
    if wire == "bus":
        async with _bus_caller(url) as ask:
            yield ask
        return
    client = await nats.connect(url)

    async def ask(payload: bytes) -> bytes:
        return (await client.request(SUBJECT, payload, timeout=5)).data

    try:
        yield ask
    finally:
        await client.close()


@contextlib.asynccontextmanager
async def _bus_caller(url: str) -> AsyncIterator[Ask]:
    bus = BusConnection(BusOptions([url]), random.Random(1))
    await bus.connect(10)
    inbox = Inbox(bus, "caller")
    await bus.flush(5)
    loop = asyncio.get_running_loop()
    subject = SUBJECT.encode()

    async def ask(payload: bytes) -> bytes:
        answered: asyncio.Future[bytes] = loop.create_future()

        def time_out() -> None:
            if not answered.done():
                answered.set_exception(TimeoutError())

        token, reply = inbox.new_reply(
            lambda payload, _reply, _headers: answered.set_result(payload), time_out
        )
        timer = loop.call_later(5, time_out)  # as the other wire's requests have one
        try:
            bus.publish(subject, payload, reply)
            return await answered
        finally:
            timer.cancel()
            inbox.forget(token)

    try:
        yield ask
    finally:
        await bus.close()


def cpu_s(pid: int) -> float:
    """CPU time that the main thread of a process, its only busy one, has used so far."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


async def measure(ask: Ask, answerer_pid: int, clients: int, seconds: float, payload: bytes) -> Round:
    """One round of so many clients, each of which asks again as soon as it is answered."""
    latencies: list[float] = []
    until = time.perf_counter() + seconds

    async def client() -> None:
        while True:  # once at least, also where all of the time has passed before the first
            began = time.perf_counter()
            assert len(await ask(payload)) == len(payload)
            ended = time.perf_counter()
            latencies.append(ended - began)
            if ended >= until:
                return

    began, cpu_began = time.perf_counter(), time.process_time() + cpu_s(answerer_pid)
    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(client())
    took_s = time.perf_counter() - began
    cpu_used_s = time.process_time() + cpu_s(answerer_pid) - cpu_began
    latencies.sort()
    return Round(
        per_s=len(latencies) / took_s,
        p50_ms=latencies[len(latencies) // 2] * 1e3,
        p99_ms=latencies[int(len(latencies) * 0.99)] * 1e3,
        cpu_us=cpu_used_s / len(latencies) * 1e6,
    )


async def run(wires: list[str], counts: list[int], rounds: int, seconds: float, payload_bytes: int) -> None:
    """Measure everything and print the table."""
    results: dict[tuple[int, str], list[Round]] = {(count, wire): [] for count in counts for wire in wires}
    payload = b"x" * payload_bytes
    async with contextlib.AsyncExitStack() as stack:
        asks, pids = {}, {}
        for wire in wires:
            url = stack.enter_context(nats_server())
            pids[wire] = stack.enter_context(answerer(wire, url)).pid
            asks[wire] = await stack.enter_async_context(caller(wire, url))
            await measure(asks[wire], pids[wire], 16, 0.3, payload)
        for _ in range(rounds):
            for count in counts:
                for wire in wires:
                    results[count, wire].append(
                        await measure(asks[wire], pids[wire], count, seconds, payload)
                    )
    print(f"request and reply, {payload_bytes} bytes each way; medians of {rounds} rounds of {seconds:g} s\n")
    print(
        f"{'clients':>7}  {'wire':8} {'req/s':>8} {'p50 ms':>8} {'p99 ms':>8} {'CPU µs/req':>11} {'req/s ratio':>12}"
    )
    for count in counts:
        first = statistics.median(one.per_s for one in results[count, wires[0]])
        for wire in wires:
            taken = results[count, wire]
            per_s, p50, p99, cpu = (
                statistics.median(getattr(one, name) for one in taken)
                for name in ("per_s", "p50_ms", "p99_ms", "cpu_us")
            )
            print(
                f"{count:>7}  {wire:8} {per_s:>8.0f} {p50:>8.3f} {p99:>8.3f} {cpu:>11.1f} {per_s / first:>11.2f}x"
            )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="of one round")
    parser.add_argument("--bytes", type=int, default=128, help="of one message")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--wires", choices=WIRES, nargs="+", default=list(WIRES))
    parser.add_argument("--answer", nargs=2, metavar=("WIRE", "URL"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    if options.answer:
        uvloop.run(answer(*options.answer))
        return
    uvloop.run(run(options.wires, options.clients, options.rounds, options.seconds, options.bytes))


if __name__ == "__main__":
    main()
