"""What the pages of rollouts show: how far each is, what its requests have shown, and what can be done."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from serve_common.api.rollout_views import DifferencesView, GateView, PassedStepView, RolloutView
from serve_common.api.views import EventView
from serve_common.config.rollout import RolloutStep, parse_steps
from serve_common.errors import BadField
from serve_common.names import short_name
from serve_console.core.plain_text import clean_text
from serve_console.core.system import System
from serve_console.core.timeline import TimelineItem

OPEN_STATES: Final = frozenset({"running", "paused", "promoting", "closing"})
TIMELINE_MAX: Final = 60
"""Events that the page of one rollout shows."""
_GATE_TITLES: Final = {
    "errors": "Errors",
    "client_errors": "Client errors",
    "latency_p50": "Median latency",
    "latency_p99": "p99 latency",
    "differences": "Different responses",
}
_TONES: Final = {
    "promoted": "good", "passed": "good", "running": "good", "aborted": "bad", "failed": "bad", "unhealthy": "bad",
    "superseded": "warn", "paused": "warn", "should_start": "warn", "started": "accent",
}  # fmt: skip


class StepItem(msgspec.Struct, frozen=True):
    """One step of the progress bar."""

    name: str
    hint: str


class GateRow(msgspec.Struct, frozen=True, kw_only=True):
    """One gate of the present step."""

    title: str
    status: str
    figures: str
    requests: int
    """Requests of the new version that were compared."""
    need: str
    """What the verdict needs, in words."""
    is_external: bool


class ControlAction(msgspec.Struct, frozen=True):
    """Something that can be done with a rollout in its state."""

    action: str
    label: str
    kind: str
    """Look of its button."""
    hint: str


class RolloutRow(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout in the list."""

    name: str
    """Full name of its deployment."""
    title: str
    version: str
    state: str
    """Its state, or how it ended."""
    is_open: bool
    steps: list[StepItem]
    current: int
    """Number of the present step, from 0; that of the steps once all passed."""
    step_text: str
    split: list[tuple[str, float]]
    is_shadow: bool
    summary: str
    """What its requests have shown so far, or why it ended, in one line."""
    need: str
    """About how many requests it still needs, in words; empty where that is not the point."""
    started_at: float
    ended_at: float | None
    """When it was decided or ended."""


class RolloutDetail(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout."""

    row: RolloutRow
    goal_id: str
    headline: str
    """Where it stands, in one sentence."""
    reason: str
    gates: list[GateRow]
    passed: list[PassedStepView]
    differences: DifferencesView | None
    failures: list[tuple[str, int]]
    """Replica failures by canary and baseline."""
    actions: list[ControlAction]
    in_force_at: float | None
    decided_at: float | None
    finished_at: float | None


def build_rows(system: System) -> tuple[list[RolloutRow], list[RolloutRow]]:
    """The open rollouts, the oldest first, and those that are decided, the newest first."""
    rows = [build_row(view) for view in system.rollouts.values()]
    is_open = [row for row in rows if row.is_open]
    ended = [row for row in rows if not row.is_open]
    return (
        sorted(is_open, key=lambda row: (row.started_at, row.name)),
        sorted(ended, key=lambda row: (-(row.ended_at or row.started_at), row.name)),
    )


def build_row(view: RolloutView) -> RolloutRow:
    """The row of one rollout."""
    steps = _parse(view)
    present = steps[view.step] if view.step < len(steps) else None
    passed = dict(enumerate(view.passed))
    return RolloutRow(
        name=view.backend_tag,
        title=short_name(view.backend_tag),
        version=view.version or "",
        state=view.outcome or view.state,
        is_open=_is_open(view),
        steps=[
            StepItem(_name_step(text, steps, number), _step_hint(steps, number, passed.get(number)))
            for number, text in enumerate(view.steps)
        ],
        current=len(view.steps) if view.outcome == "promoted" else view.step,
        step_text=view.steps[view.step] if view.step < len(view.steps) else "",
        split=find_shares(view),
        is_shadow=present is not None and present.is_shadow,
        summary=_summarize(view),
        need=_describe_total_need(view),
        started_at=view.started_at,
        ended_at=view.decided_at or view.ended_at,
    )


def build_detail(view: RolloutView) -> RolloutDetail:
    """The page of one rollout."""
    return RolloutDetail(
        row=build_row(view),
        goal_id=view.goal_id,
        headline=describe_state(view),
        reason=view.reason if view.outcome or not view.gates else "",
        gates=[build_gate(gate) for gate in view.gates],
        passed=view.passed,
        differences=view.differences,
        failures=sorted(view.replica_failures.items()),
        actions=find_actions(view),
        in_force_at=view.in_force_at,
        decided_at=view.decided_at,
        finished_at=view.ended_at,
    )


def build_gate(gate: GateView) -> GateRow:
    """The row of one gate."""
    return GateRow(
        title=_GATE_TITLES.get(gate.kind, gate.kind),
        status=gate.status,
        figures=gate.text,
        requests=gate.canary_requests,
        need=describe_need(gate),
        is_external=gate.is_external,
    )


def describe_need(gate: GateView) -> str:
    """What the verdict of a gate needs, in words."""
    if gate.status == "passed":
        return "nothing more"
    if gate.status == "failed":
        return "worse than it may be"
    if gate.is_external:
        return "a good response from outside"
    if gate.requests_needed is None:
        return "nobody can know yet"
    if gate.requests_needed == 0:
        return "almost enough"
    return f"needs about {gate.requests_needed:,} more requests"


def describe_state(view: RolloutView) -> str:
    """Where a rollout stands, in one sentence."""
    number = f"step {view.step + 1} of {len(view.steps)}"
    match view.outcome:
        case "promoted":
            return "Promoted: the new version has taken the place of the old one."
        case "aborted":
            ending = "" if view.ended_at else " Its replicas are being stopped."
            return f"Aborted at {number}: the old version has all requests.{ending}"
        case "superseded":
            return f"Superseded at {number}: a later change of the deployment replaced it."
        case _:
            return _describe_open(view, number)


def _describe_open(view: RolloutView, number: str) -> str:
    if view.state == "promoting":
        return "Every step passed; the deployment's own replicas are being replaced."
    if view.state == "paused":
        return f"Paused at {number}. A version that is shown to be worse is still aborted."
    if not view.is_in_force:
        return f"At {number}: requests go that way once its replicas run and every proxy knows them."
    if view.gates and all(gate.status == "passed" for gate in view.gates):
        waits = " wait" in f" {view.steps[view.step]} "
        rest = "it waits for a person to let it go on" if waits else "it goes on once its time is over"
        return f"At {number}: all gates have passed; {rest}."
    return f"At {number}: the new version is compared with a baseline of the old one, request by request."


def find_actions(view: RolloutView) -> list[ControlAction]:
    """What can be done in its state; nothing once it is decided."""
    if view.outcome or view.state not in OPEN_STATES - {"closing"}:
        return []
    abort = ControlAction("abort", "Abort", "danger", "Gives all requests back to the old version.")
    if view.state == "promoting":
        return [abort]
    found = []
    if view.state == "paused":
        found.append(ControlAction("resume", "Resume", "primary", "Lets it go on."))
    else:
        found.append(ControlAction("pause", "Pause", "", "Keeps it at its step."))
        if view.is_in_force:
            found.append(ControlAction("step", "Pass this step", "", "Whatever its requests have shown."))
    return [*found, ControlAction("promote", "Promote", "", "Skips the other steps."), abort]


def find_shares(view: RolloutView) -> list[tuple[str, float]]:
    """Shares of the versions in a deployment's requests while a step is in force; empty where none is.

    In a step with traffic the baseline gets as much as the canary, as far as the old version's share allows.
    """
    steps = _parse(view)
    if view.outcome or not view.is_in_force or not _is_open(view) or view.step >= len(steps):
        return []
    step = steps[view.step]
    if step.is_shadow:
        return [("old version", 1.0)]
    baseline = min(step.share, 1 - step.share)
    parts = [
        ("old version", max(0.0, 1 - step.share - baseline)),
        ("baseline", baseline),
        ("new version", step.share),
    ]
    return [(name, round(share, 6)) for name, share in parts if share > 1e-9]


def find_events(view: RolloutView, events: Iterable[EventView]) -> list[TimelineItem]:
    """The newest events of a rollout, the newest first: of its goal, its deployment, its canary and its baseline."""
    # That a goal waits says nothing that its rollout does not say, and it says it often.
    found = [
        event
        for event in events
        if _belongs(view, event) and (event.kind, event.state) != ("goal", "pending")
    ]
    return [
        TimelineItem(
            at=event.at,
            title=f"{_name_subject(view, event)} {event.state.replace('_', ' ')}".strip(),
            text=clean_text(event.message),
            tone=_TONES.get(event.state, ""),
        )
        for event in reversed(found[-TIMELINE_MAX:])
    ]


def _belongs(view: RolloutView, event: EventView) -> bool:
    if event.at < view.started_at - 1:
        return False
    tag = event.subject.partition("#")[0]
    names = {view.backend_tag, f"{view.backend_tag}--canary", f"{view.backend_tag}--baseline"}
    return event.goal_id == view.goal_id or tag in names


def _name_subject(view: RolloutView, event: EventView) -> str:
    if event.kind == "audit":
        return "command"
    if event.kind == "goal" or event.subject == view.backend_tag:
        return event.kind
    for part in ("canary", "baseline"):
        prefix = f"{view.backend_tag}--{part}"
        if event.subject.partition("#")[0] == prefix:
            return part + event.subject.removeprefix(prefix)
    return short_name(event.subject)


def _is_open(view: RolloutView) -> bool:
    return not view.outcome and view.state in OPEN_STATES


def _parse(view: RolloutView) -> tuple[RolloutStep, ...]:
    """Its steps; empty where a newer controller writes them in another way."""
    try:
        return parse_steps(tuple(view.steps))
    except BadField:
        return ()


def _name_step(text: str, steps: tuple[RolloutStep, ...], number: int) -> str:
    if not steps:
        return text
    step = steps[number]
    return f"{'shadow ' if step.is_shadow else ''}{step.share * 100:g} %"


def _step_hint(steps: tuple[RolloutStep, ...], number: int, passed: PassedStepView | None) -> str:
    if passed is not None:
        return f"{passed.requests:,} compared"
    if not steps:
        return ""
    parts = [f"at least {_duration(steps[number].hold_s)}"] if steps[number].hold_s else []
    return ", ".join([*parts, "waits for a person"] if steps[number].waits else parts)


def _duration(seconds: float) -> str:
    for length, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= length and seconds % length == 0:
            return f"{seconds / length:g} {unit}"
    return f"{seconds:g} s"


def _summarize(view: RolloutView) -> str:
    if view.outcome:
        return view.reason
    if not view.gates:
        return view.reason or describe_state(view)
    failed = [gate for gate in view.gates if gate.status == "failed"]
    if failed:
        return f"{_GATE_TITLES.get(failed[0].kind, failed[0].kind)}: {failed[0].text}"
    passed = sum(gate.status == "passed" for gate in view.gates)
    return f"{passed} of {len(view.gates)} gates passed"


def _describe_total_need(view: RolloutView) -> str:
    """What the whole step needs: as much as its slowest gate."""
    if not _is_open(view) or not view.is_in_force or view.state == "promoting":
        return ""
    unknown = [gate for gate in view.gates if gate.status == "unknown"]
    own = [gate for gate in unknown if not gate.is_external]
    if any(gate.requests_needed is None for gate in own):
        return "nobody can know yet how many requests it needs"
    needed = max((gate.requests_needed or 0 for gate in own), default=0)
    if needed:
        return f"needs about {needed:,} more requests"
    if unknown and not own:
        return "waits for a response from outside"
    return ""
