"""The dashboards are what is described, are what Grafana reads, and show what exists."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
import yaml

from deploy.grafana.boards.__main__ import files
from serve_common.telemetry.catalogue import CATALOGUE, get_spec
from serve_common.telemetry.catalogue.specs import MetricKind
from tests.support.dashboards import (
    DIRECTORY,
    OTHERS,
    ROOT,
    all_questions,
    complaints,
    dashboards,
    grouping_labels,
    panels,
    selectors,
)

SCHEMA = json.loads((ROOT / "tests/data/grafana/schema-12.2.0.json").read_text())
PROVISIONED = yaml.safe_load((ROOT / "deploy/grafana/provisioning/datasources/prometheus.yaml").read_text())
DATASOURCE_UID = PROVISIONED["datasources"][0]["uid"]
BOARDS = dashboards()
NOT_SHOWN: dict[str, str] = {
    "serve_host_metrics_files_left_out": "0 but for code that writes into the host's files of metrics",
    "serve_bus_identities": "does not change while a process lives; 'muster status' says it",
    "serve_console_open_tabs": "says who looks at the console, and nothing of what is served",
    "serve_console_sessions": "as serve_console_open_tabs",
    "serve_console_sign_ins_total": "the console's log names each; for alerts of your own",
    "serve_controller_store_restored_timestamp_seconds": "happens once in years; 'muster status' and an event say it",
}
"""Metrics that no panel shows, each with the reason."""

Board = dict[str, Any]


def faults_by_schema(definition: str, value: Any) -> list[str]:
    validator = jsonschema.Draft7Validator({**SCHEMA, "$ref": f"#/definitions/{definition}"})
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(value)]


def schema_faults(board: Board) -> list[str]:
    faults = faults_by_schema("Dashboard", board)
    for panel in panels(board):
        faults += faults_by_schema(f"{panel['type']}.options", panel["options"])
        if f"{panel['type']}.custom" in SCHEMA["definitions"]:
            faults += faults_by_schema(f"{panel['type']}.custom", panel["fieldConfig"]["defaults"]["custom"])
    return faults


def test_the_json_is_what_the_description_makes() -> None:
    described = dict(files())
    assert {file.name for file in DIRECTORY.iterdir()} == set(described)
    for name, text in described.items():
        assert (DIRECTORY / name).read_text() == text, f"{name}: run python -m deploy.grafana.boards"


def test_the_home_dashboard_of_compose_exists() -> None:
    compose = yaml.safe_load((ROOT / "compose.yaml").read_text())
    home = compose["services"]["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    directory, _, name = home.rpartition("/")
    assert f"./deploy/grafana/dashboards:{directory}:ro" in compose["services"]["grafana"]["volumes"]
    assert (DIRECTORY / name).is_file()


@pytest.mark.parametrize("name", BOARDS)
def test_a_dashboard_is_valid_to_the_schema_that_grafana_publishes(name: str) -> None:
    assert schema_faults(BOARDS[name]) == []


@pytest.mark.parametrize("name", BOARDS)
def test_a_dashboard_keeps_to_our_rules(name: str) -> None:
    assert complaints(name, BOARDS[name], BOARDS, DATASOURCE_UID) == []


def test_dashboards_have_different_uids_and_titles() -> None:
    assert len({board["uid"] for board in BOARDS.values()}) == len(BOARDS)
    assert len({board["title"] for board in BOARDS.values()}) == len(BOARDS)


def test_every_metric_is_shown_or_said_not_to_be() -> None:
    shown = {
        spec.name
        for name, board in BOARDS.items()
        for question in all_questions(name, board)
        if question.place.startswith("variable") is False
        for selector in selectors(question.expr)
        if (spec := get_spec(selector.metric)) is not None
    }
    assert {spec.name for spec in CATALOGUE} - shown == set(NOT_SHOWN)


def first_panel(board: Board, kind: str = "timeseries") -> Board:
    return next(panel for panel in panels(board) if panel["type"] == kind)


def set_place(board: Board) -> None:
    panels(board)[1]["gridPos"] = panels(board)[0]["gridPos"]


def set_expr(expr: str) -> Callable[[Board], None]:
    return lambda board: first_panel(board)["targets"][0].update(expr=expr, legendFormat="all")


def add_variable(board: Board) -> None:
    unused = copy.deepcopy(board["templating"]["list"][0]) | {"name": "instance"}
    board["templating"]["list"].append(unused)


FAULTS: dict[str, tuple[Callable[[Board], Any], str]] = {
    "no unit": (lambda board: first_panel(board)["fieldConfig"]["defaults"].pop("unit"), "has no unit"),
    "a unit that Grafana does not know": (
        lambda board: first_panel(board)["fieldConfig"]["defaults"].update(unit="requests"),
        "has no unit",
    ),
    "no description": (lambda board: first_panel(board).pop("description"), "has no description"),
    "an empty description": (
        lambda board: first_panel(board).update(description=""),
        "has no description",
    ),
    "no title": (lambda board: first_panel(board).update(title=""), "has no title"),
    "one title twice": (
        lambda board: panels(board)[1].update(title=panels(board)[0]["title"]),
        "two panels are called",
    ),
    "an overlap": (set_place, "overlaps"),
    "beyond the grid": (lambda board: first_panel(board)["gridPos"].update(x=20, w=8), "beyond the grid"),
    "one id twice": (
        lambda board: panels(board)[1].update(id=panels(board)[0]["id"]),
        "two panels have one id",
    ),
    "another data source": (
        lambda board: first_panel(board)["targets"][0].update(datasource={"type": "prometheus", "uid": "x"}),
        "another data source",
    ),
    "an unknown variable": (
        set_expr('sum(serve_proxy_queue_depth{backend_tag=~"$backnd"})'),
        "no variable $backnd",
    ),
    "a variable that nothing uses": (add_variable, "nothing uses $instance"),
    "no filter": (set_expr("sum(serve_proxy_queue_depth)"), "is not filtered by $backend"),
    "a metric that does not exist": (
        set_expr("sum(serve_proxy_made_up_total)"),
        "there is no metric serve_proxy_made_up_total",
    ),
    "a histogram without its ending": (
        set_expr('rate(serve_proxy_request_seconds{endpoint_tag=~"$endpoint"}[$__rate_interval])'),
        "there is no metric serve_proxy_request_seconds",
    ),
    "a label that the metric lacks": (
        set_expr('sum by (replica_tag) (serve_proxy_queue_depth{backend_tag=~"$backend"})'),
        "has a label replica_tag",
    ),
    "a filter by a label that the metric lacks": (
        set_expr('sum(serve_proxy_queue_depth{backend_tag=~"$backend", code="200"})'),
        "has no label code",
    ),
    "a counter as it is": (
        set_expr('sum(serve_proxy_retries_total{backend_tag=~"$backend"})'),
        "is in no rate",
    ),
    "the rate of a gauge": (
        set_expr('sum(rate(serve_proxy_queue_depth{backend_tag=~"$backend"}[$__rate_interval]))'),
        "is in a rate",
    ),
    "no way to the others": (lambda board: board["links"].clear(), "no link leads"),
    "a link that loses the choice": (
        lambda board: board["links"][0].update(includeVars=False),
        "no link leads",
    ),
    "a link to nowhere": (
        lambda board: first_panel(board)["fieldConfig"]["defaults"].update(
            links=[
                {"title": "x", "url": "/d/gone?var-backend=${__field.labels.backend_tag}&${__url_time_range}"}
            ]
        ),
        "leads nowhere",
    ),
    "no mark of deploys": (lambda board: board["annotations"]["list"].pop(0), "marks deploys"),
    "no mark of scaling": (lambda board: board["annotations"]["list"].pop(1), "marks scaling"),
    "an older schema": (lambda board: board.update(schemaVersion=39), "schemaVersion is 39"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_our_rules_refuse(fault: str) -> None:
    put_in, said = FAULTS[fault]
    board = copy.deepcopy(BOARDS["overview"])
    put_in(board)
    assert any(said in complaint for complaint in complaints("overview", board, BOARDS, DATASOURCE_UID))


SCHEMA_FAULTS: dict[str, Callable[[Board], Any]] = {
    "an unknown field": lambda board: board.update(panel=[]),
    "a panel's unknown field": lambda board: first_panel(board).update(span=12),
    "a width that is no number": lambda board: first_panel(board)["gridPos"].update(w="8"),
    "an unknown kind of variable": lambda board: board["templating"]["list"][0].update(type="querry"),
    "an unknown option": lambda board: first_panel(board)["options"].update(legnd={}),
    "an unknown way of drawing": lambda board: first_panel(board)["fieldConfig"]["defaults"]["custom"].update(
        showPoints="sometimes"
    ),
    "a stat without its colours": lambda board: first_panel(board, "stat")["options"].pop("colorMode"),
}


@pytest.mark.parametrize("fault", SCHEMA_FAULTS)
def test_the_schema_refuses(fault: str) -> None:
    board = copy.deepcopy(BOARDS["overview"])
    SCHEMA_FAULTS[fault](board)
    assert schema_faults(board)


# Every alert has a severity, numbers, a test of its own and a paragraph in the runbook, and watches what exists.


PROMETHEUS = ROOT / "deploy/prometheus"
RUNBOOK = (ROOT / "docs/runbook.md").read_text()
PARTS_OF_A_PARAGRAPH = ("For users", "Look", "Causes", "Do", "Do not")


def seconds(duration: str) -> int:
    """As Prometheus writes them: ``1m30s``."""
    units = {"h": 3600, "m": 60, "s": 1}
    return sum(int(number) * units[unit] for number, unit in re.findall(r"(\d+)([hms])", duration))


def load(directory: str) -> list[dict[str, Any]]:
    return [yaml.safe_load(file.read_text()) for file in sorted((PROMETHEUS / directory).glob("*.yml"))]


ALERTS: dict[str, dict[str, Any]] = {
    rule["alert"]: rule for file in load("rules") for group in file["groups"] for rule in group["rules"]
}
CASES: dict[str, dict[str, Any]] = {case["name"]: case for file in load("tests") for case in file["tests"]}


def test_prometheus_reads_the_rules_and_looks_at_them_as_often_as_it_scrapes() -> None:
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    assert config["rule_files"] == ["/etc/prometheus/rules/*.yml"]
    assert config["global"]["evaluation_interval"] == config["global"]["scrape_interval"]
    compose = yaml.safe_load((ROOT / "compose.yaml").read_text())
    assert "./deploy/prometheus:/etc/prometheus:ro" in compose["services"]["prometheus"]["volumes"]


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_says_how_bad_it_is_what_it_means_and_where_to_read_on(name: str) -> None:
    alert = ALERTS[name]
    assert alert["labels"]["severity"] in {"critical", "warning"}
    assert alert["annotations"]["summary"]
    assert re.search(r"\d|\$value|a minute", alert["annotations"]["description"]), "has no number"
    assert alert["annotations"]["runbook"] == f"docs/runbook.md#{name.lower()}"


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_watches_only_what_exists(name: str) -> None:
    found = selectors(ALERTS[name]["expr"])
    labels: set[str] = set()
    for selector in found:
        spec = get_spec(selector.metric)
        if spec is None:
            assert selector.metric in OTHERS, selector
            labels |= OTHERS[selector.metric]
            continue
        assert selector.metric in spec.series, selector
        assert (spec.kind is MetricKind.GAUGE) == (selector.function not in {"rate", "increase"}), selector
        labels |= {*spec.labels, "job", "instance", "le"}
        assert {label for label, _, _ in selector.filters} <= {*spec.labels, "job", "instance"}, selector
    assert found
    assert grouping_labels(ALERTS[name]["expr"]) <= labels
    shown = set(re.findall(r"\$labels\.(\w+)", str(ALERTS[name]["annotations"])))
    assert shown <= labels


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_is_tested_before_while_and_after_it_fires_and_just_below(name: str) -> None:
    looks = CASES[name]["alert_rule_test"]
    assert {look["alertname"] for look in looks} == {name}
    fires_at = [seconds(look["eval_time"]) for look in looks if look["exp_alerts"]]
    silent_at = [seconds(look["eval_time"]) for look in looks if not look["exp_alerts"]]
    assert len(fires_at) == 1
    assert 0 < fires_at[0] - max(time for time in silent_at if time < fires_at[0]) <= 10
    assert max(silent_at) > fires_at[0]
    below = CASES[f"{name}, just below"]["alert_rule_test"]
    assert len(below) >= 2
    assert all(look["alertname"] == name and not look["exp_alerts"] for look in below)
    assert max(seconds(look["eval_time"]) for look in below) >= seconds(ALERTS[name].get("for", "0s"))


def test_there_is_no_test_of_an_alert_that_is_gone() -> None:
    assert {name.partition(",")[0] for name in CASES} == set(ALERTS)


@pytest.mark.parametrize("name", ALERTS)
def test_the_runbook_has_a_paragraph_for_the_alert(name: str) -> None:
    _, _, rest = RUNBOOK.partition(f"\n### {name}\n")
    paragraph = re.split(r"\n##", rest)[0]
    for part in PARTS_OF_A_PARAGRAPH:
        assert f"**{part}.**" in paragraph, part
    assert "`" in paragraph, "names no command"


def test_the_runbook_speaks_of_no_alert_and_no_metric_that_does_not_exist() -> None:
    assert set(re.findall(r"^### (\w+)$", RUNBOOK, re.MULTILINE)) == set(ALERTS)
    for metric in set(re.findall(r"\b(?:serve|process)_[a-z]+_[a-z_]+\b", RUNBOOK)):
        spec = get_spec(metric)
        assert metric in OTHERS or (spec is not None and metric in spec.series), metric
