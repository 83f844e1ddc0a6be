"""A `Board` as the JSON that Grafana 12.2 reads: its classic model, whose last schema version is 42."""

from __future__ import annotations

import string
from typing import Any, Final

from deploy.grafana.boards.layout import placed
from deploy.grafana.boards.model import (
    DATASOURCE_UID,
    WIDTH,
    Annotation,
    Board,
    Kind,
    Link,
    Panel,
    Query,
    Step,
    Variable,
)

SCHEMA_VERSION: Final = 42
TAG: Final = "muster"
_DATASOURCE: Final = {"type": "prometheus", "uid": DATASOURCE_UID}
_TOOLTIP: Final = {"mode": "multi", "sort": "desc"}
_LEGEND: Final = {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []}
_GREEN: Final = (Step(value=None, color="green"),)


def dashboard(board: Board) -> dict[str, Any]:
    """What Grafana is to be given."""
    panels: list[dict[str, Any]] = []
    for title, y, places in placed(board.rows):
        grid = {"h": 1, "w": WIDTH, "x": 0, "y": y}
        row = {"id": len(panels) + 1, "type": "row", "title": title, "collapsed": False}
        panels.append({**row, "gridPos": grid, "panels": []})
        for panel, x, panel_y in places:
            grid = {"h": panel.height, "w": panel.width, "x": x, "y": panel_y}
            panels.append({"id": len(panels) + 1, **_panel(panel), "gridPos": grid})
    return {
        "uid": board.uid,
        "title": board.title,
        "description": board.description,
        "tags": [TAG],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "links": [_other_boards()],
        "templating": {"list": [_variable(variable) for variable in board.variables]},
        "annotations": {"list": [_annotation(annotation) for annotation in board.annotations]},
        "panels": panels,
    }


def _other_boards() -> dict[str, Any]:
    return {
        "type": "dashboards",
        "tags": [TAG],
        "title": "Muster",
        "tooltip": "Another view of the same time and choice",
        "icon": "external link",
        "url": "",
        "asDropdown": False,
        "includeVars": True,
        "keepTime": True,
        "targetBlank": False,
    }


def _variable(variable: Variable) -> dict[str, Any]:
    query = f"label_values({variable.series}, {variable.label})"
    return {
        "name": variable.name,
        "label": variable.title,
        "type": "query",
        "datasource": _DATASOURCE,
        "query": {"query": query, "refId": variable.name},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def _annotation(annotation: Annotation) -> dict[str, Any]:
    # The last four of the target mean nothing here, but the published schema asks for them.
    target = {
        "expr": annotation.expr,
        "refId": "Anno",
        "limit": 100,
        "matchAny": False,
        "tags": [],
        "type": "",
    }
    return {
        "name": annotation.name,
        "datasource": _DATASOURCE,
        "enable": True,
        "hide": False,
        "iconColor": annotation.color,
        "target": target,
        "titleFormat": annotation.name,
        "textFormat": annotation.text,
        "tagKeys": ",".join(annotation.labels),
    }


def _panel(panel: Panel) -> dict[str, Any]:
    made = {
        "type": panel.kind.value,
        "title": panel.title,
        "description": panel.description,
        "datasource": _DATASOURCE,
        "fieldConfig": {"defaults": _field(panel), "overrides": _overrides(panel)},
        "targets": [
            _target(panel, query, ref)
            for query, ref in zip(panel.queries, string.ascii_uppercase, strict=False)
        ],
        "options": _options(panel),
    }
    if panel.counts_events:
        made["interval"] = "1m"
    if panel.kind is Kind.TABLE:
        made["transformations"] = _one_row_for_each(panel)
    return made


def _target(panel: Panel, query: Query, ref: str) -> dict[str, Any]:
    at_once = panel.kind in (Kind.NUMBER, Kind.TABLE)
    return {
        "refId": ref,
        "datasource": _DATASOURCE,
        "editorMode": "code",
        "expr": query.expr,
        "legendFormat": query.legend,
        "instant": at_once,
        "range": not at_once,
        "format": "table" if panel.kind is Kind.TABLE else "time_series",
    }


def _field(panel: Panel) -> dict[str, Any]:
    field: dict[str, Any] = {"unit": panel.unit, "custom": _drawing(panel)}
    if panel.least is not None:
        field["min"] = panel.least
    if panel.most is not None:
        field["max"] = panel.most
    steps = [{"color": step.color, "value": step.value} for step in panel.steps or _GREEN]
    field["thresholds"] = {"mode": "absolute", "steps": steps}
    if panel.texts:
        options = {value: {"text": text} for value, text in panel.texts}
        field["mappings"] = [{"type": "value", "options": options}]
    if panel.kind is Kind.STATES and not panel.steps:
        field["color"] = {"mode": "palette-classic"}
    elif panel.kind is not Kind.LINES:
        field["color"] = {"mode": "thresholds"}
    if panel.link is not None:
        field["links"] = [_link(panel.link)]
    return field


def _drawing(panel: Panel) -> dict[str, Any]:
    match panel.kind:
        case Kind.LINES:
            return {
                "fillOpacity": 20 if panel.stacked else 5,
                "showPoints": "never",
                "lineInterpolation": "stepAfter" if panel.steps_between else "linear",
                "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
                "thresholdsStyle": {"mode": "dashed" if panel.steps else "off"},
            }
        case Kind.TABLE:
            return {"align": "auto", "cellOptions": {"type": "auto"}, "inspect": False}
        case Kind.STATES:
            return {"fillOpacity": 80, "lineWidth": 0}
        case Kind.NUMBER:
            return {}


def _options(panel: Panel) -> dict[str, Any]:
    match panel.kind:
        case Kind.LINES:
            return {"legend": _LEGEND, "tooltip": _TOOLTIP}
        case Kind.TABLE:
            return {"showHeader": True, "frameIndex": 0, "cellHeight": "sm"}
        case Kind.STATES:
            return {
                "legend": _LEGEND,
                "tooltip": _TOOLTIP,
                "showValue": "auto",
                "rowHeight": 0.9,
                "mergeValues": True,
            }
        case Kind.NUMBER:
            return {
                "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
                "orientation": "auto",
                "colorMode": "background" if panel.steps else "value",
                "graphMode": "none",
                "justifyMode": "auto",
                "textMode": "auto",
                "percentChangeColorMode": "standard",
                "showPercentChange": False,
                "wideLayout": True,
            }


def _overrides(panel: Panel) -> list[dict[str, Any]]:
    """Units of single columns and lines."""
    return [
        {
            "matcher": {"id": "byName", "options": query.legend},
            "properties": [{"id": "unit", "value": query.unit}],
        }
        for query in panel.queries
        if query.unit
    ]


def _one_row_for_each(panel: Panel) -> list[dict[str, Any]]:
    """Instant queries give a column ``Value #A`` each; joined by the label they have in common."""
    names = {panel.group_by: panel.heading}
    for query, ref in zip(panel.queries, string.ascii_uppercase, strict=False):
        names["Value" if len(panel.queries) == 1 else f"Value #{ref}"] = query.legend
    return [
        {"id": "merge", "options": {}},
        {"id": "organize", "options": {"excludeByName": {"Time": True}, "renameByName": names}},
    ]


def _link(link: Link) -> dict[str, Any]:
    value = f"${{__field.labels.{link.label}}}"
    return {
        "title": link.title,
        "url": f"/d/{link.uid}?var-{link.variable}={value}&${{__url_time_range}}",
        "targetBlank": False,
    }
