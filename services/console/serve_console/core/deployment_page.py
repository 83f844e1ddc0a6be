"""What the page of one deployment shows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypedDict
from urllib.parse import quote

import msgspec

from serve_common.api.rollout_views import RolloutView
from serve_common.api.views import (
    AutoscalingView,
    DeploymentView,
    EndpointView,
    HistoryView,
    ReplicaView,
    RevisionView,
)
from serve_console.core.config_diff import build_diff
from serve_console.core.now_page import NowRow, build_row
from serve_console.core.plain_text import clean_text
from serve_console.core.system import RatesPoint, System

REPLICAS_MAX: Final = 500
"""Most replicas in the table."""
_MESSAGE_MAX: Final = 8_000


class ReplicaRow(msgspec.Struct, frozen=True):
    """One replica."""

    tag: str
    state: str
    host: str
    version: str
    is_old: bool
    """Whether it is one of the deployment itself, and runs another version than the target."""
    message: str


class DeploymentPageView(msgspec.Struct, frozen=True, kw_only=True):
    """The parts that follow the state of the stack."""

    row: NowRow
    view: DeploymentView
    endpoint: EndpointView | None
    autoscaling: AutoscalingView | None
    rollout: RolloutView | None
    replicas: list[ReplicaRow]
    replicas_left_out: int
    message: str
    """What is wrong, whole: often a traceback; empty if one line says all."""


class ChartSeries(TypedDict):
    """One line of a chart; a dictionary, as the page encodes it as JSON."""

    name: str
    values: list[float | None]
    colour: int


class ChartData(msgspec.Struct, frozen=True, kw_only=True):
    """One chart, as the macro ``chart`` takes it."""

    key: str
    """Names it among the charts of the page."""
    label: str
    times: list[float]
    series: list[ChartSeries]
    unit: str


class PageAction(msgspec.Struct, frozen=True):
    """A link to the form of a command."""

    verb: str
    label: str
    href: str
    kind: str = ""
    symbol: str = ""


def build_page(system: System, name: str) -> DeploymentPageView | None:
    """None: there is no such deployment."""
    view = system.find_deployment(name)
    if view is None:
        return None
    row = build_row(system, view)
    replicas = [*view.replicas, *view.rollout_replicas]
    message = clean_text(view.message.strip(), _MESSAGE_MAX)
    if not message and view.status.value == "unhealthy":
        message = next((clean_text(each.message, _MESSAGE_MAX) for each in view.replicas if each.message), "")
    row = msgspec.structs.replace(row, wrong=clean_text(row.wrong))
    return DeploymentPageView(
        row=row,
        view=view,
        endpoint=system.endpoints.get(name),
        autoscaling=system.autoscaling.get(name),
        rollout=system.rollouts.get(name),
        replicas=[_build_replica(each, view) for each in replicas[:REPLICAS_MAX]],
        replicas_left_out=max(0, len(replicas) - REPLICAS_MAX),
        message=message if message.strip() != row.wrong else "",
    )


def _build_replica(view: ReplicaView, deployment: DeploymentView) -> ReplicaRow:
    lines = clean_text(view.message, 2_000).strip().splitlines()
    is_own = view.replica_tag.startswith(f"{deployment.name}#")
    return ReplicaRow(
        tag=view.replica_tag,
        state=view.state,
        host=view.host_id or "",
        version=view.version or "unversioned",
        is_old=is_own and view.version != deployment.version,
        message=lines[-1] if lines else "",
    )


def build_charts(points: Sequence[RatesPoint], keys: Iterable[str] = ()) -> list[ChartData]:
    """Charts of the load; ``keys`` selects some, none selects all."""
    times = [round(point.at, 1) for point in points]
    rates = [point.rates for point in points]

    def series(name: str, values: Iterable[float | None], colour: int, scale: float = 1.0) -> ChartSeries:
        scaled = [None if value is None else round(value * scale, 2) for value in values]
        return ChartSeries(name=name, values=scaled, colour=colour)

    charts = [
        ChartData(
            key="requests", label="Requests and errors", times=times, unit="/s",
            series=[series("requests", [each.requests_per_s for each in rates], 1),
                    series("errors", [each.errors_per_s for each in rates], 2)],
        ),
        ChartData(
            key="latency", label="Latency", times=times, unit="ms",
            series=[series("p50", [each.p50_s for each in rates], 1, 1000.0),
                    series("p99", [each.p99_s for each in rates], 4, 1000.0)],
        ),
        ChartData(
            key="work", label="In flight and queued", times=times, unit="",
            series=[series("in flight", [each.in_flight for each in rates], 1),
                    series("queued", [each.queued for each in rates], 2)],
        ),
        ChartData(
            key="replicas", label="Replicas", times=times, unit="",
            series=[series("running", [each.running for each in rates], 3),
                    series("wanted", [each.wanted for each in rates], 5)],
        ),
    ]  # fmt: skip
    wanted = set(keys)
    return [chart for chart in charts if not wanted or chart.key in wanted]


def encode_points(charts: Sequence[ChartData]) -> dict[str, list[list[float | None]]]:
    """Points as the script appends them: by chart, the times and then the values of each series."""
    return {
        chart.key: [list[float | None](chart.times), *[each["values"] for each in chart.series]]
        for chart in charts
    }


def list_actions(page: DeploymentPageView) -> list[PageAction]:
    """Everything that can be done with a deployment, the most usual first."""
    name = quote(page.view.name, safe="")
    actions = [
        PageAction("scale", "Scale", f"/do/scale?backend_tag={name}"),
        PageAction("rollback", "Roll back", f"/do/rollback?name={name}", symbol="undo"),
        PageAction("start_rollout", "Start a rollout", f"/do/start_rollout?name={name}"),
        PageAction("set_traffic", "Split traffic", f"/do/set_traffic?endpoint={name}"),
        PageAction("shadow_traffic", "Copy requests", f"/do/shadow_traffic?endpoint={name}"),
        PageAction(
            "update_backend_config",
            "Change the configuration",
            f"/do/update_backend_config?backend_tag={name}",
        ),
        PageAction(
            "set_endpoint_options",
            "Change the endpoint's options",
            f"/do/set_endpoint_options?endpoint={name}",
        ),
    ]
    if page.autoscaling is not None:
        is_paused = bool(page.autoscaling.paused)
        verb, label = (
            ("resume_autoscaling", "Resume autoscaling")
            if is_paused
            else ("pause_autoscaling", "Pause autoscaling")
        )
        actions.append(PageAction(verb, label, f"/do/{verb}?backend_tag={name}"))
    actions.append(
        PageAction(
            "delete_deployment", "Delete", f"/do/delete_deployment?name={name}", kind="danger", symbol="trash"
        )
    )
    return actions


def list_tabs(page: DeploymentPageView) -> list[tuple[str, str, str]]:
    """Key, label and address of each tab."""
    base = f"/deployments/{quote(page.view.name)}"
    keys = [("overview", "Overview"), ("logs", "Logs")]
    if page.autoscaling is not None:
        keys.append(("autoscaling", "Autoscaling"))
    keys += [("configuration", "Configuration"), ("history", "History")]
    return [(key, label, base if key == "overview" else f"{base}?tab={key}") for key, label in keys]


def select_objects(stored: Any, name: str) -> dict[str, Any] | None:
    """What an entry of the history has of this deployment; None: nothing."""
    if not isinstance(stored, Mapping):
        return None
    kinds = ("backend", "endpoint")
    found = {kind: stored[key] for kind in kinds if (key := f"{kind} {name}") in stored}
    return found or None


def diff_entry(entry: HistoryView, name: str) -> list[str]:
    """What a change did to the deployment; empty: nothing."""
    old, new = select_objects(entry.old, name), select_objects(entry.new, name)
    if old is None and new is None:
        return build_diff(entry.old, entry.new)
    return build_diff(old, new)


class RevisionDiff(msgspec.Struct, frozen=True):
    """The difference of two revisions."""

    old: int
    new: int
    lines: list[str] | None
    """None: the history has no longer what one of them was."""


def diff_revisions(
    revisions: Sequence[RevisionView], history: Iterable[HistoryView], name: str, old: int, new: int
) -> RevisionDiff | None:
    """The difference of two revisions by number; None: there is no such revision."""
    goals = {each.revision: each.goal_id for each in revisions}
    if old not in goals or new not in goals:
        return None
    stored = {entry.goal_id: select_objects(entry.new, name) for entry in history if entry.goal_id}
    before, after = stored.get(goals[old]), stored.get(goals[new])
    lines: list[str] | None = None
    if before is not None and after is not None:
        # A change stores only the objects that it changed.
        both = before.keys() & after.keys()
        lines = build_diff({key: before[key] for key in both}, {key: after[key] for key in both})
    return RevisionDiff(old, new, lines)
