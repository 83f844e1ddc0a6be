"""The dashboards are what is described, are what Grafana reads, and show what exists."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
import yaml

from deploy.grafana.boards.__main__ import files
from serve_common.telemetry.catalogue import CATALOGUE, spec_of
from tests.dashboards.checker import complaints
from tests.dashboards.promql_words import selectors
from tests.dashboards.reading import DIRECTORY, ROOT, all_questions, dashboards, panels

SCHEMA = json.loads((ROOT / "tests/data/grafana/schema-12.2.0.json").read_text())
PROVISIONED = yaml.safe_load((ROOT / "deploy/grafana/provisioning/datasources/prometheus.yaml").read_text())
DATASOURCE_UID = PROVISIONED["datasources"][0]["uid"]
BOARDS = dashboards()
NOT_SHOWN: dict[str, str] = {
    "serve_host_metrics_files_left_out": "0 but for code that writes into the host's files of metrics",
    "serve_bus_identities": "does not change while a process lives; 'muster status' says it",
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
        if (spec := spec_of(selector.metric)) is not None
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
