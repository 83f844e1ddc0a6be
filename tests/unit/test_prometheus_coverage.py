"""Over which windows Prometheus may be believed: who was scraped, since when, and how often."""

from __future__ import annotations

import pytest

from serve_common.config.autoscaling import AggregationFunction
from serve_common.errors import BadField
from serve_common.names import BackendTag
from serve_common.runtime.settings import Environment
from serve_controller.adapters import prometheus_api as promql
from serve_controller.adapters.prometheus_coverage import Coverage, Process, Scraped, Window, learned_interval
from serve_controller.settings import check_selector, read_prometheus_settings

P1, P2, H1 = Process("proxy", "p1"), Process("proxy", "p2"), Process("host", "h1")
NOW = 1000.0


def every(interval_s: float, first: float, last: float, target: str = "proxy 10.0.0.1:9102") -> Scraped:
    count = int((last - first) / interval_s) + 1
    return Scraped([first + interval_s * number for number in range(count)], target)


def window(
    processes: dict[Process, list[Scraped]],
    wanted_s: float = 30.0,
    began_at: dict[str, float] | None = None,
    counts: dict[float, dict[Process, int]] | None = None,
) -> Window | str:
    coverage = Coverage(NOW, 300.0, processes, counts)
    return coverage.window(wanted_s, [P1, H1], began_at or {})


STEADY = {P1: [every(5, 703, 998)], H1: [every(5, 702, 997)]}


def test_what_all_are_scraped_for_is_asked_about_as_it_was_wanted() -> None:
    assert window(STEADY) == Window(30.0, 997.0)


def test_a_window_that_two_scrapes_do_not_fit_into_is_widened() -> None:
    assert window(STEADY, wanted_s=10.0) == Window(12.5, 997.0)
    slow = {P1: [every(60, 700, 1000)], H1: [every(60, 690, 990)]}
    assert window(slow) == Window(150.0, 990.0)


def test_the_interval_is_learned_from_the_slowest_whatever_failed_between() -> None:
    assert learned_interval([[0, 5, 10, 15, 40, 45], [0, 10, 20, 30]]) == 10
    assert learned_interval([[7.0], []]) is None


def test_after_a_break_the_window_begins_when_prometheus_saw_again() -> None:
    """Otherwise the rate over 30 s would be that of the seconds since its restart, divided by 30."""
    restarted = {
        P1: [Scraped([*every(5, 700, 930).times, *every(5, 988, 998).times])],
        H1: [every(5, 702, 997)],
    }
    assert window(restarted) == Window(15.0, 997.0)
    once = {P1: [Scraped([*every(5, 700, 930).times, 998.0])], H1: [every(5, 702, 997)]}
    assert window(once) == "proxy p1 was scraped only once in the last 5 s"


def test_a_scrape_or_two_that_failed_are_no_break() -> None:
    failed = {
        P1: [Scraped([*every(5, 700, 975).times, *every(5, 990, 1000).times])],
        H1: [every(5, 702, 997)],
    }
    assert window(failed) == Window(30.0, 997.0)


def test_who_is_missing_or_stale_is_named() -> None:
    assert window({H1: [every(5, 702, 997)]}) == "proxy p1 was not scraped by Prometheus"
    stale = {P1: [every(5, 700, 980)], H1: [every(5, 702, 997)]}
    assert window(stale) == "proxy p1 was not scraped for 20 s"


def test_who_has_just_begun_need_not_have_been_seen_before() -> None:
    born = {P1: [every(5, 988, 998)], H1: [every(5, 702, 997)]}
    assert window(born, began_at={"p1": 985.0}) == Window(30.0, 997.0)
    assert window(born, began_at={"p1": 900.0}) == Window(15.0, 997.0)
    assert window({H1: STEADY[H1]}, began_at={"p1": 995.0}) == Window(30.0, 997.0)


def test_a_process_that_two_jobs_scrape_would_count_double() -> None:
    twice = {P1: [every(5, 700, 998, "a x"), every(5, 701, 999, "b x")], H1: [every(5, 702, 997)]}
    assert window(twice) == (
        "proxy p1 is scraped twice, as a x and b x; MUSTER_PROMETHEUS_SELECTOR can choose one"
    )
    moved = {P1: [every(5, 700, 960, "a x"), every(5, 965, 1000, "a y")], H1: [every(5, 702, 997)]}
    assert window(moved) == Window(30.0, 997.0)


def test_long_windows_are_judged_by_the_number_of_scrapes() -> None:
    full = {600.0: {P1: 118, H1: 120}}
    assert window(STEADY, 600.0, counts=full) == Window(600.0, 997.0)
    half = {600.0: {P1: 80, H1: 120}}
    assert window(STEADY, 600.0, counts=half) == Window(400.0, 997.0)


def test_a_time_in_which_nothing_was_scraped_is_found() -> None:
    assert Coverage(NOW, 300.0, STEADY).last_break() is None
    down = {P1: [Scraped([*every(5, 700, 900).times, *every(5, 960, 1000).times])]}
    assert Coverage(NOW, 300.0, down).last_break() == (900.0, 960.0)
    assert Coverage(NOW + 60, 300.0, down).last_break() == (1000.0, NOW + 60)
    one_was_away = {**STEADY, P2: [Scraped([700.0, 705.0, 900.0])]}
    assert Coverage(NOW, 300.0, one_was_away).last_break() is None


def test_nothing_scraped_twice_gives_no_window() -> None:
    once = {P1: [Scraped([998.0])], H1: [Scraped([997.0])]}
    assert window(once) == "Prometheus has not scraped any proxy or host twice so far"


@pytest.mark.parametrize(
    ("text", "matchers"),
    [
        ("", ""),
        ("{}", ""),
        ('{cluster="a"}', 'cluster="a"'),
        ('cluster="a", env=~"x|y",', 'cluster="a", env=~"x|y"'),
        ('{name!="with \\" quote}"}', 'name!="with \\" quote}"'),
    ],
)
def test_label_matchers_are_taken_with_and_without_braces(text: str, matchers: str) -> None:
    assert check_selector(text, "SELECTOR") == matchers


@pytest.mark.parametrize(
    "text", ["cluster", '{cluster="a"}) or vector(1', 'a="b" c="d"', '{1a="b"}', '{a="b}']
)
def test_what_is_no_label_matcher_is_refused(text: str) -> None:
    with pytest.raises(BadField, match="SELECTOR"):
        check_selector(text, "SELECTOR")


def test_the_settings_name_a_server_or_none() -> None:
    assert read_prometheus_settings(Environment({})) is None
    settings = read_prometheus_settings(
        Environment({"MUSTER_PROMETHEUS_URL": "https://u:p@prom/x", "MUSTER_PROMETHEUS_TOKEN": "secret"})
    )
    assert settings is not None
    assert settings.token == "secret"
    assert "secret" not in repr(settings)
    assert "u:p" not in repr(settings)
    with pytest.raises(BadField, match="MUSTER_PROMETHEUS_URL"):
        read_prometheus_settings(Environment({"MUSTER_PROMETHEUS_URL": "prometheus:9090"}))


def test_placeholders_are_replaced_and_fit_for_strings() -> None:
    query = 'sum(rate(x{b="$backend_tag", d=~"$deployment$"}[$look_back])) > $backend_tags'
    replaced = promql.with_placeholders(query, BackendTag("app/model"), 1.5)
    assert replaced == 'sum(rate(x{b="app/model", d=~"model$"}[1500ms])) > $backend_tags'
    assert promql.with_placeholders("'$backend_tag'", BackendTag("a'b\\\n"), 1) == r"'a\'b\\\n'"


def test_queries_bear_the_selector() -> None:
    assert promql.mean_of("x_total", 'c="a"', 30) == 'sum by (backend_tag) (rate(x_total{c="a"}[30s]))'
    extreme = promql.extreme_of(AggregationFunction.MAX, "", window_s=30, inner_s=12.5, step_s=5)
    assert extreme.startswith(
        "max_over_time((sum by (backend_tag) (label_replace(sum by (backend_tag) (rate("
    )
    assert extreme.endswith(")[30s:5s])")
