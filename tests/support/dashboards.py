"""The dashboards as they are checked in: what they ask of Prometheus, and what they must keep to beside the schema.

Why not a parser of PromQL: whether it is PromQL at all is judged by Prometheus itself, in the tests that have one.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from serve_common.telemetry.catalogue import get_spec
from serve_common.telemetry.catalogue.specs import Exporter, MetricKind, MetricSpec
from tests.support.paths import ROOT

_GROUPING: Final = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_STRING: Final = re.compile(r'"(?:[^"\\]|\\.)*"')
_SELECTOR: Final = re.compile(r"(\w+\s*\(\s*)?\b([a-zA-Z_:][\w:]*)\b(?!\s*\()(\s*\{[^}]*\})?")
_MATCHER: Final = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"((?:[^"\\]|\\.)*)"')
_KEYWORDS: Final = frozenset(
    ["and", "or", "unless", "bool", "offset", "by", "without", "on", "ignoring", "inf", "nan"]
)
_DURATION: Final = re.compile(r"\[[^\]]*\]|\boffset\s+\w+")
DIRECTORY: Final = ROOT / "deploy/grafana/dashboards"
_LABEL_VALUES: Final = re.compile(r"label_values\((.+),\s*(\w+)\)")
_LEGEND_LABEL: Final = re.compile(r"\{\{\s*(\w+)\s*\}\}")
SCHEMA_VERSION: Final = 42
GRID_WIDTH: Final = 24
UNITS: Final = {"none", "s", "bytes", "binBps", "reqps", "ops", "percentunit"}
"""Grafana's names of them."""
OTHERS: Final = {
    "up": {"job", "instance"},
    "ALERTS": {"alertname", "alertstate", "severity", "job", "instance"},
    "scrape_samples_scraped": {"job", "instance"},
    "process_start_time_seconds": {"job", "instance"},
    "process_cpu_seconds_total": {"job", "instance"},
    "process_resident_memory_bytes": {"job", "instance"},
    "process_open_fds": {"job", "instance"},
    "process_max_fds": {"job", "instance"},
    "python_gc_collections_total": {"job", "instance", "generation"},
}
"""What Prometheus and the client library add to our own metrics."""
_BUILT_IN: Final = {"__rate_interval"}
_OF_COUNTERS: Final = {"rate", "increase"}
_FILTERED_LABELS: Final = {"endpoint": "endpoint_tag", "backend": "backend_tag", "instance": "instance"}
"""What each variable must filter by, wherever a metric has that label."""
_VARIABLE: Final = re.compile(r"\$\{?(\w+)")
_LINK: Final = re.compile(r"/d/([\w-]+)\?var-(\w+)=\$\{__field\.labels\.(\w+)\}&\$\{__url_time_range\}")


@dataclass(frozen=True)
class Selector:
    """One use of a metric."""

    metric: str
    function: str
    """Directly around it; empty when there is none."""
    filters: tuple[tuple[str, str, str], ...]
    """Label, operator, value."""

    def __str__(self) -> str:
        matchers = ", ".join(f'{label}{operator}"{value}"' for label, operator, value in self.filters)
        return f"{self.metric}{{{matchers}}}"


def selectors(expr: str) -> list[Selector]:
    """Every use of a metric in ``expr``."""
    strings: list[str] = []

    def quarantine(found: re.Match[str]) -> str:
        strings.append(found[0])
        return f'"{len(strings) - 1}"'

    text = _STRING.sub(quarantine, expr)
    text = _DURATION.sub(" ", _GROUPING.sub(" ", text))
    return [
        Selector(
            name,
            (function or "").rstrip("( \n"),
            tuple(
                (label, operator, strings[int(value)][1:-1])
                for label, operator, value in _MATCHER.findall(braces or "")
            ),
        )
        for function, name, braces in _SELECTOR.findall(text)
        if name not in _KEYWORDS
    ]


def grouping_labels(expr: str) -> set[str]:
    """The labels in every ``by (…)`` and its like."""
    return {
        label.strip() for labels in _GROUPING.findall(expr) for label in labels.split(",") if label.strip()
    }


@dataclass(frozen=True)
class Question:
    """One query, and where it is."""

    board: str
    place: str
    """The panel's title with the query's letter, or the name of the annotation or variable."""
    expr: str
    labels: frozenset[str] = frozenset()
    """That each series of the answer must have, because its legend or heading shows them."""
    step_min_s: float = 0.0
    """How far apart the points are at least."""

    def __str__(self) -> str:
        return f"{self.board} / {self.place}"


def dashboards() -> dict[str, dict[str, Any]]:
    """By the name of the file."""
    return {file.stem: json.loads(file.read_text()) for file in sorted(DIRECTORY.glob("*.json"))}


def panels(dashboard: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All but the headings of rows."""
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def panel_questions(name: str, dashboard: Mapping[str, Any]) -> Iterator[Question]:
    """Of every panel."""
    for panel in panels(dashboard):
        for target in panel["targets"]:
            legend = target["legendFormat"] if target["format"] != "table" else ""
            yield Question(
                name,
                f"{panel['title']} {target['refId']}",
                target["expr"],
                frozenset(_LEGEND_LABEL.findall(legend)),
                {"": 0.0, "1m": 60.0}[panel.get("interval", "")],
            )


def annotation_questions(name: str, dashboard: Mapping[str, Any]) -> Iterator[Question]:
    """Of every annotation."""
    for annotation in dashboard["annotations"]["list"]:
        labels = frozenset(filter(None, annotation["tagKeys"].split(",")))
        yield Question(name, f"annotation {annotation['name']}", annotation["target"]["expr"], labels)


def variable_questions(name: str, dashboard: Mapping[str, Any]) -> Iterator[Question]:
    """Of every variable: ``label_values(series, label)`` asks for the series of the time range."""
    for variable in dashboard["templating"]["list"]:
        found = _LABEL_VALUES.fullmatch(variable["query"]["query"])
        assert found is not None, variable
        yield Question(name, f"variable {variable['name']}", found[1], frozenset({found[2]}))


def all_questions(name: str, dashboard: Mapping[str, Any]) -> list[Question]:
    """Everything that the dashboard asks."""
    return [
        *panel_questions(name, dashboard),
        *annotation_questions(name, dashboard),
        *variable_questions(name, dashboard),
    ]


def as_grafana_sends(question: Question, dashboard: Mapping[str, Any], *, scrape_interval_s: float) -> str:
    """With the variables at All, and with the window as Grafana takes it for points as near as may be."""
    expr = question.expr
    for variable in dashboard["templating"]["list"]:
        expr = expr.replace(f"${variable['name']}", variable["allValue"])
    step_s = max(scrape_interval_s, question.step_min_s)
    window_s = max(4 * scrape_interval_s, step_s + scrape_interval_s)
    return expr.replace("$__rate_interval", f"{round(window_s * 1000)}ms")


def complaints(
    name: str, dashboard: Mapping[str, Any], boards: Mapping[str, Mapping[str, Any]], datasource_uid: str
) -> list[str]:
    """Everything that is wrong; ``boards`` are all that there are, for links between them."""
    return [
        *_about_the_whole(dashboard),
        *_about_places(dashboard),
        *_about_words(dashboard),
        *_about_datasources(dashboard, datasource_uid),
        *_about_variables(name, dashboard),
        *(
            said
            for question in all_questions(name, dashboard)
            for said in _about_question(question, dashboard)
        ),
        *_about_links(dashboard, boards),
    ]


def _about_the_whole(dashboard: Mapping[str, Any]) -> Iterator[str]:
    if dashboard["schemaVersion"] != SCHEMA_VERSION:
        yield f"schemaVersion is {dashboard['schemaVersion']}"
    for field in ("uid", "title", "description"):
        if not dashboard.get(field):
            yield f"the dashboard has no {field}"
    kept = [link for link in dashboard["links"] if link["includeVars"] and link["keepTime"]]
    if not any(set(link["tags"]) & set(dashboard["tags"]) for link in kept):
        yield "no link leads to the other dashboards with variables and time"
    if not any("serve_controller_goals" in a["target"]["expr"] for a in dashboard["annotations"]["list"]):
        yield "no annotation marks deploys"
    if not any("replicas_wanted" in a["target"]["expr"] for a in dashboard["annotations"]["list"]):
        yield "no annotation marks scaling"


def _about_places(dashboard: Mapping[str, Any]) -> Iterator[str]:
    taken: dict[tuple[int, int], str] = {}
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        if place["x"] < 0 or place["x"] + place["w"] > GRID_WIDTH:
            yield f"{panel['title']} reaches beyond the grid"
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                if (x, y) in taken:
                    yield f"{panel['title']} overlaps {taken[x, y]}"
                    return
                taken[x, y] = panel["title"]
    if _doubles([panel["id"] for panel in dashboard["panels"]]):
        yield "two panels have one id"


def _about_words(dashboard: Mapping[str, Any]) -> Iterator[str]:
    for panel in panels(dashboard):
        title = panel.get("title") or "a panel"
        if not panel.get("title"):
            yield "a panel has no title"
        if not panel.get("description"):
            yield f"{title} has no description"
        if panel["fieldConfig"]["defaults"].get("unit") not in UNITS:
            yield f"{title} has no unit"
        if not panel["targets"]:
            yield f"{title} asks nothing"
        if _doubles([target["refId"] for target in panel["targets"]]):
            yield f"{title} has two queries of one letter"
        if len(panel["targets"]) > 1 and _doubles([target["legendFormat"] for target in panel["targets"]]):
            yield f"{title} has two lines of one name"
    for double in _doubles([panel.get("title") for panel in panels(dashboard)]):
        yield f"two panels are called {double}"


def _about_datasources(dashboard: Mapping[str, Any], uid: str) -> Iterator[str]:
    asking = [
        *panels(dashboard),
        *(target for panel in panels(dashboard) for target in panel["targets"]),
        *dashboard["templating"]["list"],
        *dashboard["annotations"]["list"],
    ]
    if any(asks["datasource"] != {"type": "prometheus", "uid": uid} for asks in asking):
        yield "something asks another data source than the provisioned one"


def _about_variables(name: str, dashboard: Mapping[str, Any]) -> Iterator[str]:
    known = {variable["name"] for variable in dashboard["templating"]["list"]}
    used = {word for question in all_questions(name, dashboard) for word in _VARIABLE.findall(question.expr)}
    for variable in sorted(used - known - _BUILT_IN):
        yield f"there is no variable ${variable}"
    for variable in sorted(known - used):
        yield f"nothing uses ${variable}"


def _about_question(question: Question, dashboard: Mapping[str, Any]) -> Iterator[str]:
    found = selectors(question.expr)
    if not found:
        yield f"{question} names no metric"
    labels_of_all: set[str] = set()
    for selector in found:
        spec = get_spec(selector.metric)
        labels = _labels(selector.metric, spec)
        if labels is None:
            yield f"{question}: there is no metric {selector.metric}"
            continue
        labels_of_all |= labels
        for label in sorted({label for label, _, _ in selector.filters} - labels):
            yield f"{question}: {selector.metric} has no label {label}"
        if not question.place.startswith("variable"):
            yield from _about_filters(question, selector, spec, labels, dashboard)
            yield from _about_function(question, selector, spec)
    for label in sorted((grouping_labels(question.expr) | question.labels) - labels_of_all):
        yield f"{question}: none of its metrics has a label {label}"


def _labels(metric: str, spec: MetricSpec | None) -> set[str] | None:
    """None when there is no such metric."""
    if spec is None:
        return OTHERS.get(metric)
    if metric not in spec.series:
        return None
    return {*spec.labels, "job", "instance", *(["le"] if metric.endswith("_bucket") else [])}


def _about_filters(
    question: Question,
    selector: Selector,
    spec: MetricSpec | None,
    labels: set[str],
    dashboard: Mapping[str, Any],
) -> Iterator[str]:
    for variable in dashboard["templating"]["list"]:
        label = _FILTERED_LABELS[variable["name"]]
        if label not in labels or (label, "=~", f"${variable['name']}") in selector.filters:
            continue
        if label == "instance" and (
            question.place.startswith("annotation")
            or (
                spec is not None
                and spec.exporters == (Exporter.CONTROLLER,)
                and "reconnects" not in spec.name
            )
        ):
            continue  # what the leader knows of the whole system
        yield f"{question}: {selector.metric} is not filtered by ${variable['name']}"


def _about_function(question: Question, selector: Selector, spec: MetricSpec | None) -> Iterator[str]:
    counts = spec.kind is not MetricKind.GAUGE if spec else selector.metric.endswith("_total")
    if counts and selector.function not in _OF_COUNTERS:
        yield f"{question}: the counter {selector.metric} is in no rate"
    if not counts and selector.function in _OF_COUNTERS:
        yield f"{question}: the gauge {selector.metric} is in a rate"


def _about_links(dashboard: Mapping[str, Any], boards: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    by_uid = {board["uid"]: board for board in boards.values()}
    for panel in panels(dashboard):
        for link in panel["fieldConfig"]["defaults"].get("links", []):
            found = _LINK.fullmatch(link["url"])
            if found is None or found[1] not in by_uid:
                yield f"{panel['title']} leads nowhere: {link['url']}"
                continue
            _, variable, label = found.groups()
            if variable not in {known["name"] for known in by_uid[found[1]]["templating"]["list"]}:
                yield f"{panel['title']} sets ${variable}, which {found[1]} does not have"
            if not all(f"{{{{{label}}}}}" in target["legendFormat"] for target in panel["targets"]):
                yield f"{panel['title']} links by {label}, which not all of its lines show"


def _doubles(values: list[Any]) -> list[Any]:
    return [value for value, count in Counter(values).items() if count > 1]
