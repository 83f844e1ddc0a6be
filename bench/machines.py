"""``make bench-machines``: proxy and replicas as on two machines, for each MUSTER_DIRECT.

Containers of compose.yaml stand for the machines: they share a network and no directory, so that direct links are TCP
with TLS. There is a proxy for each mode, and one replica of each model serves all three: what takes turns within
seconds is compared fairly, and a replica leaves the choice to who asks it. Hence no chains: there a replica asks.

Proxies are asked at their containers' own addresses. Behind a published port is a program of the engine that copies,
which would be measured too; and nothing stands in front of the proxies in ``make bench`` either.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Final

import msgspec
import psutil
from testcontainers.compose import DockerCompose

from bench.console import positive, print_report, run_command, say, table
from bench.generators import Generators
from bench.measure import (
    KIB,
    OTHER_LOADS,
    Kind,
    Line,
    Load,
    Run,
    Sample,
    Served,
    System,
    conclude,
    conclude_processes,
    measure,
    noop_loads,
    plan,
)
from bench.meters import Meter, with_descendants
from bench.muster_stack import MODELS_DIR, deploy_all
from bench.report import Report, make_report, progress, shown
from bench.scale.meters import sample_of
from bench.wrk import WrkFailed, find_wrk
from muster.client import StackAddress
from muster.embedded import StackFailed
from muster.secrets import generate
from serve_common.errors import ServeError
from serve_common.identities.roles import Role
from serve_common.runtime.settings import DirectMode
from tests.compose.stack import Stack, make_readable, why_no_engine
from tests.support.paths import ROOT

PROJECT: Final = "muster-bench-machines"
FILES: Final = ["compose.yaml", "tests/compose/machines.yaml", "bench/machines.yaml"]
PROXIES: Final = {DirectMode.OFF: "proxy-off", DirectMode.BODIES: "proxy", DirectMode.ALL: "proxy-all"}
"""The service that is a proxy of that mode."""
NATS, HOST = "nats", "replica-host"
SERVICES: Final = (NATS, "controller", HOST, *PROXIES.values())
"""And what they depend on: nothing that looks at them meanwhile, and nothing in front."""
PROXY, REPLICA = "proxy", "replica"
COUNTED: Final = (PROXY, NATS, REPLICA)
"""Whose CPU is counted. The host and Ray have no part in requests."""
NOOP_CONNECTIONS: Final = (1, 64)
_LARGE_BYTES: Final = 64 * KIB
_LINKS: Final = re.compile(r'^serve_proxy_direct_links\{transport="(\w+)"\} (\S+)$', re.MULTILINE)
_STOP_WITHIN_S: Final = 5

_HEAD: Final = [
    *("load", "direct", "rate", "(min-max)", "of bodies", "p50 ms", "p99 ms", "first ms"),
    *("CPU us/request", *COUNTED, "TCP links", "frames", "errors"),
]


class Links(msgspec.Struct, frozen=True, kw_only=True):
    """What a proxy tells of its direct links."""

    tcp: int
    """Open ones."""
    unix: int
    frames: int
    """That they have carried so far, both ways."""


class Carried(msgspec.Struct, frozen=True, kw_only=True):
    """What direct links carried in one run, warm-up included."""

    round: int
    load: str
    mode: str
    tcp_links: int
    """Open ones, at the end."""
    frames: int
    wrong: str
    """What of this should be otherwise; empty: nothing."""


class MachinesReport(Report, frozen=True, kw_only=True):
    """That of ``make bench``, and what took which way."""

    carried: list[Carried]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.machines", description=__doc__)
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--seconds", type=positive, default=3, help="length of one run (default: 3)")
    parser.add_argument("--only", metavar="TEXT", help="only loads whose name has this in it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured there")
    return parser.parse_args()


# -- the containers -----------------------------------------------------------------------------------------------


@contextmanager
def running_machines(directory: Path) -> Iterator[Stack]:
    """Build and start the containers; they, their networks and volumes are gone afterwards, and the images stay.

    Why not async: a signal must end what is being waited for, also a build, before anything is removed.

    Raises `StackFailed` without an engine, and AssertionError when it does not come up.
    """
    why = why_no_engine()
    if why is not None:
        raise StackFailed(f"no Docker engine with compose answers: {why}")
    apps = directory / "apps"
    shutil.copytree(MODELS_DIR, apps / "models", ignore=shutil.ignore_patterns("__pycache__"))
    make_readable(apps)
    secrets = generate(directory / "secrets", for_containers=True)
    for name in ("MUSTER_REQUIREMENTS", "COMPOSE_PROFILES", "COMPOSE_FILE"):
        os.environ.pop(name, None)
    os.environ.update(
        COMPOSE_PROJECT_NAME=PROJECT,
        MUSTER_SECRETS=str(secrets.directory),
        MUSTER_APPS=str(apps),
        MUSTER_NATS_PORT="127.0.0.1:0",  # the engine chooses
        MUSTER_PROMETHEUS_URL="",  # there is none
    )
    stack = Stack(DockerCompose(ROOT, FILES, wait=False), secrets)
    _remove(stack)  # what a run that was killed left behind
    try:
        say("building …")
        stack.build("controller", "proxy", HOST)
        say("starting …")
        stack.up(*SERVICES)
        yield stack
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, _say_it_stops)
        say("stopping …")
        _remove(stack)


def _remove(stack: Stack) -> None:
    stack.run("down", "--volumes", "--remove-orphans", "--timeout", str(_STOP_WITHIN_S))


def _say_it_stops(_number: int, _frame: FrameType | None) -> None:
    say("it stops already")


class Machines:
    """The proxies of a stack, and the processes that serve their requests."""

    def __init__(self, stack: Stack) -> None:
        self._address = {
            mode: stack.inspect(service)["NetworkSettings"]["Networks"][f"{PROJECT}_requests"]["IPAddress"]
            for mode, service in PROXIES.items()
        }
        self._first = {
            service: int(stack.inspect(service)["State"]["Pid"])
            for service in (NATS, HOST, *PROXIES.values())
        }
        """The process of each container that all its others descend from."""

    def url(self, mode: DirectMode, port: int = 8000) -> str:
        """Where the proxy of that mode is."""
        return f"http://{self._address[mode]}:{port}"

    def processes(self, mode: DirectMode) -> dict[psutil.Process, str]:
        """Those of `COUNTED` for that mode."""
        roots = {
            psutil.Process(self._first[service]): name
            for service, name in ((PROXIES[mode], PROXY), (NATS, NATS), (HOST, HOST))
        }
        found = with_descendants(roots)
        others = (HOST, f"{HOST} (Ray)")
        return {
            process: name if name in COUNTED else REPLICA
            for process, name in found.items()
            if name not in others
        }

    def links(self, mode: DirectMode) -> Links:
        """What its proxy tells now."""
        with urllib.request.urlopen(f"{self.url(mode, 9102)}/metrics", timeout=30) as response:
            page = response.read().decode()
        count = {transport: int(float(text)) for transport, text in _LINKS.findall(page)}
        frames = sample_of(page, "serve_proxy_direct_frames_total") or 0
        return Links(tcp=count["tcp"], unix=count["unix"], frames=int(frames))


# -- what is measured ---------------------------------------------------------------------------------------------


async def bench(stack: Stack, directory: Path, loads: Sequence[Load], options: argparse.Namespace) -> int:
    """Deploy, measure, report. 0: measured; 1: measured, with errors."""
    began, load_before = time.monotonic(), os.getloadavg()[0]
    generators = Generators(find_wrk(), directory)
    machines = Machines(stack)
    say("deploying …")
    address = StackAddress(
        urls=(stack.nats_url,), credentials_file=str(stack.secrets.credentials_file(Role.ADMIN))
    )
    served = [path for path in Served if path in {load.path for load in loads}]
    routes = await deploy_all(address, served, "/apps/models")
    systems = [
        System(name=mode.value, urls={path: machines.url(mode) + route for path, route in routes.items()})
        for mode in PROXIES
    ]
    samples, carried = await _measured(machines, plan(systems, loads, options.rounds), generators, options)
    lines = conclude(samples)
    errors = sum(line.errors for line in lines)
    if errors:
        say(stack.run("logs", "--tail", "20", HOST, *PROXIES.values()))
    report = make_report(
        samples,
        lines,
        conclude_processes(samples, [load.name for load in loads]),
        load_before=load_before,
        rounds=options.rounds,
        seconds=options.seconds,
        taken_s=time.monotonic() - began,
    )
    whole = MachinesReport(**msgspec.structs.asdict(report), carried=carried)
    print_report(render(whole), whole, options.json)
    if errors:
        say(f"error: {errors} requests failed; figures beside failures mean nothing")
    wrong = [each for each in carried if each.wrong]
    for each in wrong:
        say(f"error: round {each.round + 1}, {each.load}, direct={each.mode}: {each.wrong}")
    return 2 if wrong else 1 if errors else 0


async def _measured(
    machines: Machines, runs: Iterable[Run], generators: Generators, options: argparse.Namespace
) -> tuple[list[Sample], list[Carried]]:
    samples, carried = [], []
    for run in runs:
        mode = DirectMode(run.system.name)
        before = machines.links(mode)
        sample = await measure(run, options.seconds, generators.run, Meter(partial(machines.processes, mode)))
        after = machines.links(mode)
        frames = after.frames - before.frames
        say(progress(sample, options.rounds))
        samples.append(sample)
        carried.append(
            Carried(
                round=run.round,
                load=run.load.name,
                mode=mode.value,
                tcp_links=after.tcp,
                frames=frames,
                wrong=wrong_way(run.load, mode, after, frames),
            )
        )
    return samples, carried


def wrong_way(load: Load, mode: DirectMode, links: Links, frames: int) -> str:
    """How requests went, where the figures are of something else than what they are called; else empty."""
    is_carried = load.kind is not Kind.REQUESTS or load.body_bytes >= _LARGE_BYTES
    match mode:
        case DirectMode.OFF:
            is_right = not links.tcp and not frames
        case DirectMode.BODIES:
            is_right = bool(links.tcp and frames) if is_carried else not frames
        case DirectMode.ALL:
            is_right = bool(links.tcp and frames)
    if is_right and not links.unix:
        return ""
    return f"direct links carried {frames} frames, and open are {links.tcp} over TCP, {links.unix} over Unix sockets"


def render(report: MachinesReport) -> str:
    """The table, with what one needs to know to read it."""
    cpu_us = {(each.load, each.system, each.process): each.cpu_us_per_request for each in report.processes}
    heading = (
        f"{report.taken_at} · {report.machine} · load before {report.load_before:.1f}\n"
        "proxy and replica in containers, links over TCP with TLS; "
        f"medians of {report.rounds} interleaved rounds of {report.seconds} s; requests by wrk -t1, keep-alive\n"
        "of bodies: the rate over that of direct=bodies in the same round\n"
        "CPU: user and system time; where bodies or streams are made one by one, of a whole one\n"
        "TCP links: open ones at the end of a run; frames: what direct links carried in it, warm-up included; "
        "of both the least\n"
    )
    rows = [_HEAD, *(_cells(line, report, cpu_us) for line in report.lines)]
    return f"{heading}\n{table(rows, left=(0, 1))}\n\nthe whole took {report.taken_s:.0f} s"


def _cells(line: Line, report: MachinesReport, cpu_us: dict[tuple[str, str, str], float]) -> list[str]:
    each_us = [cpu_us.get((line.load, line.system, name), 0.0) for name in COUNTED]
    carried = [each for each in report.carried if (each.load, each.mode) == (line.load, line.system)]
    return [
        line.load,
        line.system,
        f"{line.rate:,.0f} {line.unit}",
        f"{line.rate_min:,.0f}-{line.rate_max:,.0f}",
        *(shown(value) for value in (line.ratio, line.p50_ms, line.p99_ms, line.first_ms)),
        f"{sum(each_us):,.0f}",
        *(f"{value:,.0f}" for value in each_us),
        str(min(each.tcp_links for each in carried)),
        f"{min(each.frames for each in carried):,}",
        str(line.errors),
    ]


def main() -> int:
    """0: measured; 1: measured, with errors; 2: could not measure; 130: stopped."""
    options = _arguments()
    loads = [
        msgspec.structs.replace(load, reference=DirectMode.BODIES.value)
        for load in [*noop_loads(NOOP_CONNECTIONS), *OTHER_LOADS]
        if load.path is not Served.CHAIN and (options.only or "") in load.name
    ]
    failures = (
        *(WrkFailed, StackFailed, ServeError, psutil.Error),
        *(OSError, AssertionError, subprocess.SubprocessError),
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)  # also where a script has SIGINT ignored
    try:
        find_wrk()  # before minutes of building
        with (
            tempfile.TemporaryDirectory(prefix="mb-", ignore_cleanup_errors=True) as name,
            running_machines(Path(name)) as stack,
        ):
            return run_command(bench(stack, Path(name), loads, options), failures)
    except failures as error:
        say(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        say("stopped")
        return 130


if __name__ == "__main__":
    sys.exit(main())
