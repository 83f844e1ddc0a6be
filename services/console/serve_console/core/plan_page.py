"""What the dry run of a change shows."""

from __future__ import annotations

from collections import Counter
from typing import Final

import msgspec

from serve_common.api.views import PlannedAction, PlanView
from serve_common.names import short_name
from serve_console.core.plain_text import clean_text

ROWS_MAX: Final = 200
"""Most replicas that are listed."""
_PHRASES: Final = {
    PlannedAction.START: ("starts", "start", "starting"),
    PlannedAction.STOP: ("stops", "stop", "stopping"),
    PlannedAction.RECONFIGURE: ("is reconfigured", "are reconfigured", "updating"),
}


class PlanRow(msgspec.Struct, frozen=True, kw_only=True):
    """One replica."""

    state: str
    """The state that its dot shows."""
    action: str
    replica: str
    why: str


class PlanPage(msgspec.Struct, frozen=True, kw_only=True):
    """The dry run."""

    has_effect: bool
    """False: there is nothing to do."""
    summary: str
    """How many replicas start, stop or are reconfigured; empty: none."""
    rows: list[PlanRow]
    hidden: int
    """Replicas beyond those in ``rows``."""
    notes: list[str]


def build_plan_page(view: PlanView) -> PlanPage:
    """The dry run as its page shows it."""
    counts = Counter(replica.action for replica in view.replicas)
    parts = [
        f"{counts[action]} {_PHRASES[action][counts[action] != 1]}" for action in _PHRASES if counts[action]
    ]
    if parts:
        number, _, rest = parts[0].partition(" ")
        parts[0] = f"{number} {'replica' if number == '1' else 'replicas'} {rest}"
    return PlanPage(
        has_effect=view.updating,
        summary=", ".join(parts),
        rows=[
            PlanRow(
                state=_PHRASES[replica.action][2],
                action=_PHRASES[replica.action][0],
                replica=short_name(replica.replica_tag or replica.backend_tag)
                + ("" if replica.replica_tag else " (a new one)"),
                why=clean_text(replica.why),
            )
            for replica in view.replicas[:ROWS_MAX]
        ],
        hidden=max(0, len(view.replicas) - ROWS_MAX),
        notes=[clean_text(note) for note in view.notes],
    )
