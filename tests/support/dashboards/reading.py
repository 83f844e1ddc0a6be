"""The dashboards as they are checked in, and everything in them that is asked of Prometheus."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from tests.support.paths import ROOT

DIRECTORY: Final = ROOT / "deploy/grafana/dashboards"
_LABEL_VALUES: Final = re.compile(r"label_values\((.+),\s*(\w+)\)")
_LEGEND_LABEL: Final = re.compile(r"\{\{\s*(\w+)\s*\}\}")


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
