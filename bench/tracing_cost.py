"""``python -m bench.tracing_cost``: what tracing costs.

The same no-op with tracing off, with a small share of the requests traced, and with all of them.

Why by CPU time as well: what a request costs shows there to the microsecond, also on a machine that does other things.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Final

import msgspec
import psutil

from bench.wrk import find_wrk, run_wrk
from tests.support.stacks.bare_stack import BareStack, Runner

OFF: Final = "off"
VARIANTS: Final[Mapping[str, str]] = {OFF: "", "1 % traced": "0.01", "all traced": "1"}
"""Names and ratios; an empty one switches tracing off."""
CONNECTIONS: Final = 64
_RUN_S: Final = 1
_MODELS_DIR: Final = Path(__file__).parent / "models"


class TracingCost(msgspec.Struct, frozen=True, kw_only=True):
    """One variant beside the one that is off; medians over the rounds where nothing else is said."""

    name: str
    ratio: float
    """Its requests/s over those of the one that is off, in the same round."""
    ratio_min: float
    ratio_max: float
    cpu_us: float
    """Of proxy and replica, for one request; the least of all rounds, for whatever else runs can only add to it."""
    cpu_us_off: float
    requests_per_s: float
    errors: int


class Measured(msgspec.Struct, frozen=True):
    """One run."""

    requests_per_s: float
    cpu_us: float
    errors: int


async def measure_tracing(rounds: int, checkouts: Mapping[str, Path]) -> list[TracingCost]:
    """All variants beside `OFF`, and ``checkouts`` of other versions by name with tracing off."""
    wrk = find_wrk()
    with tempfile.TemporaryDirectory(prefix="mt-") as directory:
        async with BareStack.running(Path(directory)) as stack, running_sink() as sink:
            systems = [await _started(stack, name, sink, None) for name in VARIANTS]
            systems += [await _started(stack, name, sink, path) for name, path in checkouts.items()]
            await stack.applied()
            runs: dict[str, list[Measured]] = {system.name: [] for system in systems}
            for number in range(-1, rounds):  # the first one warms up
                for system in systems if number % 2 else reversed(systems):
                    measured = await system.measure(wrk)
                    if number >= 0:
                        runs[system.name].append(measured)
    return [_concluded(name, own, runs[OFF]) for name, own in runs.items() if name != OFF]


def _concluded(name: str, own: list[Measured], off: list[Measured]) -> TracingCost:
    ratios = [run.requests_per_s / base.requests_per_s for run, base in zip(own, off, strict=True)]
    return TracingCost(
        name=name,
        ratio=median(ratios),
        ratio_min=min(ratios),
        ratio_max=max(ratios),
        cpu_us=min(run.cpu_us for run in own),
        cpu_us_off=min(run.cpu_us for run in off),
        requests_per_s=median(run.requests_per_s for run in own),
        errors=sum(run.errors for run in (*own, *off)),
    )


class _System:
    """A proxy and a replica of their own."""

    def __init__(self, name: str, url: str, runners: Sequence[Runner]) -> None:
        self.name = name
        self._url = url
        self._processes = [psutil.Process(runner.process.pid) for runner in runners]

    async def measure(self, wrk: str) -> Measured:
        before_s = self._cpu_s()
        figures = await run_wrk(wrk, self._url, connections=CONNECTIONS, seconds=_RUN_S)
        cpu_s = self._cpu_s() - before_s
        return Measured(figures.requests_per_s, cpu_s * 1e6 / max(figures.requests, 1), figures.errors)

    def _cpu_s(self) -> float:
        return sum(sum(process.cpu_times()[:2]) for process in self._processes)


async def _started(stack: BareStack, name: str, sink: str, checkout: Path | None) -> _System:
    tag = f"bench/{len(stack.replicas)}"
    ratio = VARIANTS.get(name, "")
    environment = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": sink if ratio else "",
        "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
        "OTEL_TRACES_SAMPLER_ARG": ratio,
    }
    if checkout is not None:
        sources = ("libs/serve_common", "libs/muster", "services/proxy", "services/replica-host")
        environment["PYTHONPATH"] = os.pathsep.join(str(checkout / source) for source in sources)
    with _environment(environment):
        (proxy,) = await stack.add_proxies()
        replica = await stack.add_replica(f"{tag}#0", "bench_models:Noop", app_dir=str(_MODELS_DIR))
    await stack.put_endpoint(tag, f"/{tag}")
    await stack.put_backend(tag, [f"{tag}#0"])
    return _System(name, f"{proxy.url}/{tag}", [proxy, replica])


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


async def _discard(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
            await reader.readexactly(length)
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
    writer.close()


async def serve_sink() -> None:
    """Take what is sent over HTTP and throw it away, until terminated; prints its URL first."""
    server = await asyncio.start_server(_discard, "127.0.0.1", 0, limit=2**20)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


@contextlib.asynccontextmanager
async def running_sink() -> AsyncIterator[str]:
    """A receiver that throws everything away, in a process of its own; its URL."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.tracing_cost", "--sink", stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        yield (await process.stdout.readline()).decode().strip()
    finally:
        process.terminate()
        await process.wait()


def shown(cost: TracingCost) -> str:
    """One line for people."""
    return (
        f"tracing, {cost.name}: {cost.ratio:.3f} of the requests/s without "
        f"({cost.ratio_min:.3f}-{cost.ratio_max:.3f}), {cost.cpu_us:.1f} instead of {cost.cpu_us_off:.1f} µs of CPU "
        f"for one request in proxy and replica, {cost.errors} errors"
    )


def main() -> None:
    """Measure and tell."""
    parser = argparse.ArgumentParser(prog="python -m bench.tracing_cost", description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--beside", type=Path, metavar="DIRECTORY", help="another checkout, with tracing off")
    parser.add_argument("--sink", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.sink:
        asyncio.run(serve_sink())
        return
    others = {} if options.beside is None else {f"off, as in {options.beside.name}": options.beside}
    for cost in asyncio.run(measure_tracing(options.rounds, others)):
        print(shown(cost))


if __name__ == "__main__":
    main()
