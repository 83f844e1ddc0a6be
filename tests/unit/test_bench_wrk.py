"""The benchmark believes what it reads from wrk, so reading it must not guess."""

from __future__ import annotations

import textwrap

import pytest

from tests.bench.loads import OTHER_LOADS, Kind, Load, Served, noop_loads
from tests.bench.measure import Figures, Run, Sample, System, conclude, conclude_processes, plan
from tests.bench.meters import Usage
from tests.bench.wrk import WrkFailed, WrkFigures, parse_wrk

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
