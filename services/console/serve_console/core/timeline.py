"""What happened to one deployment, in one list: events of it and its replicas, and who changed what."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from serve_common.api.views import EventView, HistoryView
from serve_common.names import short_name
from serve_console.core.plain_text import clean_text

TIMELINE_MAX: Final = 60
_TOGETHER_S: Final = 15.0
"""Events of several replicas that say the same within this time are one item."""
_TEXT_MAX: Final = 300
_TONES: Final = {
    "succeeded": "good", "running": "good", "promoted": "good",
    "failed": "bad", "unhealthy": "bad", "dead": "bad", "aborted": "bad", "lost": "bad", "ejected": "bad",
    "should_start": "warn", "superseded": "warn", "step": "accent", "passed": "good",
}  # fmt: skip
_TITLES: Final = {
    "deploy": "Deploy", "deploy_application": "Deploy of the application", "delete_deployment": "Delete",
    "delete_application": "Delete of the application", "scale": "Scale", "rollback": "Rollback",
    "set_traffic": "Traffic split", "shadow_traffic": "Copies of requests", "start_rollout": "Rollout",
    "control_rollout": "Rollout", "pause_autoscaling": "Autoscaling paused",
    "resume_autoscaling": "Autoscaling resumed", "update_backend_config": "Configuration",
    "set_endpoint_options": "Options of the endpoint", "set_capture": "Capture of requests",
    "restore": "Restore",
}  # fmt: skip


class TimelineItem(msgspec.Struct, frozen=True):
    """One line, as the macro ``timeline`` takes it."""

    at: float
    title: str
    text: str
    tone: str
    """``good``, ``bad``, ``warn``, ``accent`` or empty."""
    goal_id: str = ""


def describe_change(entry: HistoryView) -> str:
    """What a change was, in a few words."""
    title = _TITLES.get(entry.verb, entry.verb.replace("_", " ").capitalize())
    request: Any = entry.request if isinstance(entry.request, dict) else {}
    if entry.verb == "scale" and "num_replicas" in request:
        return f"Scale to {request['num_replicas']}"
    if entry.verb in ("deploy", "start_rollout") and request.get("version"):
        return clean_text(f"{title} of {request['version']}", 100)
    if entry.verb == "rollback" and request.get("to") is not None:
        return clean_text(f"Rollback to {request['to']}", 100)
    if entry.verb == "control_rollout" and request.get("action"):
        return clean_text(f"Rollout: {request['action']}", 100)
    return title


def select_events(name: str, events: Iterable[EventView], goals: Iterable[str]) -> list[EventView]:
    """Events of a deployment: of itself, its replicas, and the goals of its changes."""
    known = set(goals)
    found: list[EventView] = []
    for event in events:
        is_own = event.subject == name or event.subject.startswith(f"{name}#")
        if is_own and event.goal_id and event.kind == "audit":
            known.add(event.goal_id)
        if is_own or (event.kind == "goal" and event.subject in known):
            found.append(event)
    return found


def merge_timeline(
    name: str, events: Iterable[EventView], history: Sequence[HistoryView], most: int = TIMELINE_MAX
) -> list[TimelineItem]:
    """The newest first, at most ``most``.

    A change is shown once: the entry of the history says more than the audit event of the same change.
    """
    goals = {entry.goal_id for entry in history if entry.goal_id}
    noted = {(entry.verb, round(entry.at)) for entry in history}
    items = [
        TimelineItem(
            at=entry.at,
            title=describe_change(entry),
            text=f"by {clean_text(entry.principal, 200)}" if entry.principal else "",
            tone="accent",
            goal_id=entry.goal_id or "",
        )
        for entry in history
    ]
    own = select_events(name, events, goals)
    items += _merge_replicas(
        [
            event
            for event in own
            if not (event.kind == "audit" and _is_noted(event, goals, noted))
            and not (event.kind == "goal" and event.state == "pending")
        ],
        name,
    )
    items.sort(key=lambda item: item.at, reverse=True)
    return items[:most]


def _is_noted(event: EventView, goals: set[Any], noted: set[tuple[str, int]]) -> bool:
    if event.goal_id:
        return event.goal_id in goals
    return any((event.state, round(event.at) + shift) in noted for shift in (-1, 0, 1))


def _merge_replicas(events: Sequence[EventView], name: str) -> list[TimelineItem]:
    """One item where several replicas say the same at about the same time."""
    groups: list[list[EventView]] = []
    last: dict[tuple[str, str, str | None], list[EventView]] = {}
    for event in events:
        key = (event.state, event.message, event.goal_id)
        group = last.get(key)
        is_replica = event.subject.startswith(f"{name}#")
        if is_replica and group is not None and event.at - group[-1].at <= _TOGETHER_S:
            group.append(event)
            continue
        group = [event]
        groups.append(group)
        if is_replica:
            last[key] = group
    return [_build_item(group, name) for group in groups]


def _build_item(group: Sequence[EventView], name: str) -> TimelineItem:
    event = group[-1]
    message = clean_text(event.message, _TEXT_MAX)
    tone = _TONES.get(event.state, "")
    goal = event.goal_id or ""
    if event.subject.startswith(f"{name}#"):
        numbers = list(dict.fromkeys("#" + each.subject.rpartition("#")[2] for each in group))
        shown = ", ".join(numbers[:4]) + (f" and {len(numbers) - 4} more" if len(numbers) > 4 else "")
        return TimelineItem(
            event.at, f"{'Replica' if len(numbers) == 1 else 'Replicas'} {shown}", message, tone
        )
    if event.kind == "goal":
        return TimelineItem(event.at, f"{event.subject} {event.state}", message, tone, event.subject)
    titles = {"autoscaling": "Autoscaling", "audit": "Change", "rollout": "Rollout"}
    title = titles.get(event.kind, short_name(name))
    return TimelineItem(event.at, title, message, tone, goal)
