"""What benchmarks read is believed, so it must not guess: clients' own counts, wrk, NATS and pages of metrics."""

from __future__ import annotations

import textwrap
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from bench.chaos import ChaosLoad, Failure, Kill, Storm
from bench.floor_processes import bare
from bench.generators import Generators
from bench.machines import Links, wrong_way
from bench.measure import (
    MIB,
    OTHER_LOADS,
    Figures,
    Kind,
    Load,
    Run,
    Sample,
    Served,
    System,
    conclude,
    conclude_processes,
    noop_loads,
    plan,
)
from bench.meters import Usage
from bench.scale.meters import Sent, controllers_part, sample_of
from bench.wrk import WrkFailed, WrkFigures, parse_wrk
from serve_common.runtime.settings import DirectMode


@pytest.fixture
async def url() -> AsyncIterator[str]:
    runner = web.ServerRunner(web.Server(await bare()))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


@pytest.mark.parametrize("path", [Served.ECHO, Served.UPLOAD])
async def test_a_body_is_sent_whole_and_its_answer_checked(url: str, tmp_path: Path, path: Served) -> None:
    load = Load(name="body", path=path, kind=Kind.TRANSFER, body_bytes=3 * MIB + 5)
    figures = await Generators("none", tmp_path).run(load, f"{url}/{path.value}", 0)
    assert (figures.requests, figures.errors) == (2, 0)
    assert figures.rate > 0


async def test_a_short_answer_to_a_body_is_an_error(url: str, tmp_path: Path) -> None:
    load = Load(name="body", path=Served.ECHO, kind=Kind.TRANSFER, body_bytes=1000)
    figures = await Generators("none", tmp_path).run(load, f"{url}/noop", 0)
    assert (figures.requests, figures.errors, figures.rate) == (0, 2, 0.0)


async def test_every_token_is_counted_once_wherever_the_stream_is_cut(url: str, tmp_path: Path) -> None:
    load = next(load for load in OTHER_LOADS if load.kind is Kind.TOKENS and load.connections > 1)
    small = Load(name="tokens", path=load.path, kind=load.kind, connections=5, tokens=777)
    generators = Generators("none", tmp_path)
    figures = await generators.run(small, f"{url}/tokens", 1)
    assert figures.errors == 0
    assert figures.requests >= 5
    assert figures.first_ms is not None
    taken_s = figures.requests * 777 / figures.rate
    assert 1.0 <= taken_s < 10.0, "rate and number of answers fit together"


async def test_losses_are_held_against_the_kill_before_them() -> None:
    load = ChaosLoad("/x", [1], 1.0)
    kills = [Kill(at=at, pid=1, fragile_in_flight=1) for at in (10.0, 20.0)]

    def lost(*moments: float, clients: int = 1) -> list[str]:
        load.failures = [
            Failure(kind="POST", ended_at=at, what="502 replica_died", client=number % clients)
            for number, at in enumerate(moments)
        ]
        return Storm(load=load, kills=kills).lost_beyond()

    assert lost() == lost(10.5, 20.5) == lost(10.5, 11.0, clients=2) == []
    assert lost(10.5, 11.0) == ["client 0 lost 2 at one kill"]
    assert lost(9.0) == ["1 lost without a kill"]
    assert not Failure(kind="GET", ended_at=0.0, what="502 replica_died").is_allowed
    assert not Failure(kind="POST", ended_at=0.0, what="504 deadline_exceeded").is_allowed


# The benchmark believes what it reads from wrk, so reading it must not guess.


GOOD = textwrap.dedent(
    """\
    Running 4s test @ http://127.0.0.1:8000/noop
      1 threads and 64 connections
      Thread Stats   Avg      Stdev     Max   +/- Stdev
        Latency     1.91ms  506.25us  12.01ms   88.83%
        Req/Sec    33.65k     2.49k   37.56k    70.00%
      Latency Distribution
         50%    1.79ms
         75%    1.97ms
         90%    2.40ms
         99%    3.91ms
      133962 requests in 4.00s, 19.42MB read
    Requests/sec:  33461.55
    Transfer/sec:      4.85MB
    """
)
BAD_LINES = """\
  Socket errors: connect 1, read 20, write 300, timeout 4000
  Non-2xx or 3xx responses: 17
Requests/sec:"""


def test_a_clean_run_is_read_whole() -> None:
    figures = parse_wrk(GOOD)
    assert figures == WrkFigures(
        requests=133_962, requests_per_s=33_461.55, p50_ms=1.79, p99_ms=3.91, socket_errors=0, bad_statuses=0
    )
    assert figures.errors == 0


@pytest.mark.parametrize(
    ("written", "meant_ms"), [("98.00us", 0.098), ("1.79ms", 1.79), ("2.05s", 2_050.0), ("1.50m", 90_000.0)]
)
def test_latencies_come_in_every_unit_that_wrk_uses(written: str, meant_ms: float) -> None:
    assert parse_wrk(GOOD.replace("1.79ms", written)).p50_ms == pytest.approx(meant_ms)


def test_every_kind_of_error_is_counted() -> None:
    figures = parse_wrk(GOOD.replace("Requests/sec:", BAD_LINES))
    assert (figures.socket_errors, figures.bad_statuses, figures.errors) == (4_321, 17, 4_338)


def test_silence_is_an_error_although_wrk_reports_none() -> None:
    assert parse_wrk(GOOD.replace("133962 requests", "0 requests")).errors == 1


@pytest.mark.parametrize("missing", ["50%", "99%", "requests in", "Requests/sec:"])
def test_a_missing_figure_is_an_error_that_shows_what_wrk_said(missing: str) -> None:
    text = "\n".join(line for line in GOOD.splitlines() if missing not in line)
    with pytest.raises(WrkFailed, match="Running 4s test"):
        parse_wrk(text)


def system(name: str, *served: Served) -> System:
    return System(name=name, urls={path.value: "" for path in served or (Served.NOOP,)})


def test_systems_take_turns_so_that_drift_hits_all_alike() -> None:
    a, b = system("a"), system("b")
    order = [
        (run.round, run.load.connections, run.system.name) for run in plan([a, b], noop_loads([1, 64]), 2)
    ]
    assert order == [(r, c, s) for r in (0, 1) for c in (1, 64) for s in "ab"]


def test_a_system_is_asked_only_for_what_it_serves() -> None:
    runs = list(plan([system("floor"), system("all", *Served)], OTHER_LOADS, rounds=1))
    assert {run.system.name for run in runs} == {"all"}
    assert len(runs) == len(OTHER_LOADS)


def test_every_kind_of_load_is_there_and_no_two_have_one_name() -> None:
    loads = noop_loads([1, 16, 64, 256]) + OTHER_LOADS
    assert {load.path for load in loads} == set(Served) - {Served.UNCOUNTED}  # that one is measured in pairs
    assert {load.kind for load in loads} == set(Kind)
    assert len({load.name for load in loads}) == len(loads)


LOAD = Load(name="it", path=Served.NOOP, reference="floor")


def sample(
    name: str, number: int, rate: float, *, errors: int = 0, warm_up_errors: int = 0, cpu_s: float = 0.0
) -> Sample:
    figures = Figures(requests=100, rate=rate, p50_ms=rate, p99_ms=rate, errors=errors)
    run = Run(round=number, load=LOAD, system=system(name))
    usage = {"proxy": Usage(cpu_s=cpu_s, rss_bytes=number, rss_growth_bytes=number)}
    return Sample(run=run, figures=figures, warm_up_errors=warm_up_errors, usage=usage)


def test_ratios_are_taken_within_a_round_and_errors_add_up() -> None:
    samples = [
        *(sample("floor", 0, 100.0), sample("it", 0, 50.0, errors=2)),
        *(sample("floor", 1, 10.0), sample("it", 1, 8.0, warm_up_errors=3)),  # the machine was slow for both
        *(sample("floor", 2, 100.0), sample("it", 2, 60.0)),
    ]
    floor, it = conclude(samples)
    assert (floor.ratio, floor.errors, floor.first_ms) == (1.0, 0, None)
    assert (it.rate, it.rate_min, it.rate_max) == (50.0, 8.0, 60.0)
    assert (it.ratio, it.errors) == (0.6, 5)


def test_without_the_reference_there_is_no_ratio() -> None:
    assert [line.ratio for line in conclude([sample("it", 0, 1.0)])] == [None]


def test_what_a_process_costs_is_told_by_request() -> None:
    samples = [sample("it", number, 1.0, cpu_s=cpu_s) for number, cpu_s in enumerate((0.1, 0.3, 0.2))]
    (line,) = conclude_processes(samples, ["it"])
    assert (line.process, line.cpu_s, line.cpu_us_per_request) == ("proxy", 0.2, 2000.0)
    assert (line.rss_bytes, line.rss_growth_bytes) == (1, 2)
    assert conclude_processes(samples, ["another"]) == []


# Which way requests took between containers.

SMALL, LARGE = noop_loads([1])[0], next(load for load in OTHER_LOADS if load.body_bytes == MIB)
OPEN, SHUT = Links(tcp=1, unix=0, frames=9), Links(tcp=0, unix=0, frames=9)


@pytest.mark.parametrize(
    ("load", "mode", "links", "frames", "is_wrong"),
    [
        (LARGE, DirectMode.OFF, SHUT, 0, False),
        (LARGE, DirectMode.OFF, OPEN, 0, True),
        (SMALL, DirectMode.BODIES, OPEN, 0, False),  # the link of an earlier load
        (SMALL, DirectMode.BODIES, OPEN, 1, True),
        (LARGE, DirectMode.BODIES, OPEN, 1, False),
        (LARGE, DirectMode.BODIES, OPEN, 0, True),
        (SMALL, DirectMode.ALL, OPEN, 1, False),
        (SMALL, DirectMode.ALL, SHUT, 1, True),
        (SMALL, DirectMode.ALL, Links(tcp=1, unix=1, frames=9), 1, True),
    ],
)
def test_figures_of_another_way_than_the_modes_are_told(
    load: Load, mode: DirectMode, links: Links, frames: int, is_wrong: bool
) -> None:
    assert bool(wrong_way(load, mode, links, frames)) is is_wrong


# What the scale benchmark reads of NATS and of a page of metrics.


def test_only_the_controllers_connections_count_as_published():
    connz = {
        "connections": [
            {"name": "controller controller-1", "in_msgs": 3, "in_bytes": 40},
            {"name": "simulated hosts", "in_msgs": 100, "in_bytes": 1000},
            {"in_msgs": 1, "in_bytes": 1},
        ]
    }
    assert controllers_part(connz) == Sent(3, 40)


def test_a_metric_is_the_sum_over_its_labels_and_none_when_it_is_not_there():
    text = '# HELP a_sum text\na_sum{kind="x"} 1.5\na_sum{kind="y"} 2e0\na_sum_other 9\n'
    assert sample_of(text, "a_sum") == 3.5
    assert sample_of(text, "b_sum") is None
