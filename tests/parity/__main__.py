"""Run the programs under Ray Serve and Muster side by side; with ``--record``, keep what Ray Serve answers.

``python -m tests.parity [--record | --muster] [name …]``
"""

from __future__ import annotations

import argparse
import asyncio
import difflib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import msgspec

from bench.console import PEERS_PYTHON, check_peers
from bench.floors import free_port
from muster.cli.session import StackChoice, find_stack
from muster.client import connect_stack
from muster.embedded.stack import EmbeddedStack
from serve_common.api.commands import Shutdown
from tests.parity import programs_of
from tests.support.servers.reserved_port import ANY_PORTS

CPUS = 24


def run_under_ray(chosen: list[str], directory: Path, *, record: bool) -> dict[str, list[str]]:
    """What each program prints under Ray Serve, all on one cluster of this run's own; recorded one by one if asked."""
    check_peers(PEERS_PYTHON)
    port = free_port()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_prestart_worker_first_driver": "0"}
    environment |= {"RAY_enable_worker_prestart": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    environment["RAY_AUTH_MODE"] = "disabled"  # tokens are of the user, and so of other Rays too
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # or each of its processes compiles all of Ray anew
    launcher = [str(PEERS_PYTHON), "-W", "ignore", str(Path(__file__).parent / "ray_program.py")]
    with ray_head(directory, environment) as address:
        environment["RAY_ADDRESS"] = address
        return run_each(chosen, directory, environment, launcher, port, record=record)


@contextmanager
def ray_head(directory: Path, environment: dict[str, str]) -> Iterator[str]:
    """One Ray for all programs; gives its address.

    Every port is its own: gRPC shares ports between processes, so a worker in Ray's default range can answer for
    one of another Ray on this machine.
    """
    gcs, *others = (free_port() for _ in range(5))
    agent = ("dashboard-agent-grpc", "dashboard-agent-listen", "runtime-env-agent", "metrics-export")
    argv = [str(PEERS_PYTHON), "-W", "ignore", "-m", "ray.scripts.scripts", "start", "--head", "--block"]
    argv += ["--node-ip-address", "127.0.0.1", "--port", str(gcs), "--num-cpus", str(CPUS)]
    argv += ["--temp-dir", str(directory / "r"), "--include-dashboard", "false", "--min-worker-port", "0"]
    argv += [
        "--max-worker-port",
        "0",
        "--object-store-memory",
        str(200 * 1024 * 1024),
        "--disable-usage-stats",
    ]
    for name, port in zip(agent, others, strict=True):
        argv += [f"--{name}-port", str(port)]
    said = directory / "ray-start.log"
    with said.open("w") as log:
        head = subprocess.Popen(argv, env=environment, stdout=log, stderr=subprocess.STDOUT, cwd=directory)
        try:
            deadline = time.monotonic() + 90
            while "Ray runtime started" not in said.read_text():
                if head.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"Ray did not start; on a busy machine try again. {said.read_text()}")
                time.sleep(0.2)
            yield f"127.0.0.1:{gcs}"
        finally:
            head.terminate()
            try:
                head.wait(30)
            except subprocess.TimeoutExpired:
                head.kill()
                head.wait(10)


def run_each(
    chosen: list[str],
    directory: Path,
    environment: dict[str, str],
    launcher: list[str],
    port: int,
    *,
    record: bool,
) -> dict[str, list[str]]:
    """What each program prints on the Ray of ``RAY_ADDRESS``, whose Serve goes on between them."""
    printed = {}
    for name in chosen:
        program = directory / f"{name}.py"
        program.write_text(programs_of.with_port((programs_of.PROGRAMS / program.name).read_text(), port))
        start = time.monotonic()
        argv = [*launcher, "--port", str(port), str(program)]
        printed[name] = programs_of.run(argv, directory, environment, port)
        if record:
            programs_of.record(name, printed[name])
        print(f"ray    {name} {time.monotonic() - start:.1f} s", flush=True)
    return printed


def run_under_muster(chosen: list[str], directory: Path) -> dict[str, list[str]]:
    """What each program prints beside one stack."""

    async def work() -> dict[str, list[str]]:
        options = msgspec.structs.replace(ANY_PORTS, num_cpus=CPUS)
        async with EmbeddedStack(directory / "state", options) as stack, AsyncExitStack() as exits:
            address = find_stack(StackChoice(), {"MUSTER_STATE_DIR": stack.record.state_dir}, directory)
            connected = await exits.enter_async_context(connect_stack(address))
            port = int(stack.record.http_url.rpartition(":")[2])
            printed = {}
            for name in chosen:
                start = time.monotonic()
                printed[name] = await asyncio.to_thread(
                    programs_of.run_under_muster, name, port, Path(stack.record.state_dir), directory
                )
                # What a program leaves, the next would meet.
                for goal in (await connected.admin.call(Shutdown(confirm="everything"))).goal_ids:
                    await connected.admin.wait_for_goal(goal, deadline_s=60)
                print(f"muster {name} {time.monotonic() - start:.1f} s", flush=True)
                if printed[name] != programs_of.recorded().get(name):
                    print(*printed[name], sep="\n", flush=True)
            return printed

    return asyncio.run(work())


def main() -> int:
    """Returns the process' exit code: the number of programs that differ, at most 100."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true", help="only under Ray Serve; keep the answers")
    parser.add_argument(
        "--muster", action="store_true", help="only under Muster; compare with what is recorded"
    )
    parser.add_argument("--new", action="store_true", help="only those that are not recorded")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    chosen = options.names or programs_of.names()
    if options.new:
        chosen = [name for name in chosen if name not in programs_of.recorded()]
    with tempfile.TemporaryDirectory(prefix="parity-") as name:
        directory = Path(name)
        expected = programs_of.recorded()
        if not options.muster:
            expected |= run_under_ray(chosen, directory, record=options.record)
        if options.record:
            for each in chosen:
                if any(line.startswith(("EXIT", "TIMEOUT")) for line in expected[each]):
                    print(each, *expected[each], sep="\n")
            return 0
        printed = run_under_muster(chosen, directory)
    differ = [each for each in chosen if printed[each] != expected.get(each)]
    for each in differ:
        sys.stdout.writelines(
            line + "\n"
            for line in difflib.unified_diff(
                expected.get(each, []),
                printed[each],
                f"{each}: Ray Serve",
                f"{each}: Muster",
                lineterm="",
                n=0,
            )
        )
    print(f"{len(chosen) - len(differ)} of {len(chosen)} programs print the same")
    return min(len(differ), 100)


if __name__ == "__main__":
    sys.exit(main())
