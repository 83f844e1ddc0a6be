"""What a leader tells of what happened, and what it remembers of that for those who ask later.

Why apart from the term: it is for people alone. Nothing is decided by it, and any of it may be lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

import msgspec

from serve_common.names import GoalId
from serve_common.wires.views import EventView
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.events import goal_progress
from serve_controller.core.observed import ObservedState
from serve_controller.core.views import view_goal
from serve_controller.ports import EventSink

EVENTS_MAX: Final = 5_000
"""Events that are remembered for `get_events`."""
PROGRESS_MAX: Final = 50
"""Goals whose progress is told after one plan; of more, the rest is told later or never."""


class Telling:
    """The events of one term."""

    def __init__(self, sink: EventSink) -> None:
        """``sink``: where they are published."""
        self.events: deque[EventView] = deque(maxlen=EVENTS_MAX)
        """What happened lately, the newest last."""
        self._sink = sink
        self._progress: dict[GoalId, str] = {}
        """What was last told of each pending goal."""

    def remember(self, events: Sequence[EventView]) -> None:
        """Take over events of earlier terms, the oldest first."""
        self.events.extendleft(reversed(events))

    def tell(self, events: Sequence[EventView], checkpoint: Checkpoint, observed: ObservedState) -> None:
        """Publish and remember events. Of a goal, its view is published: as it is in ``checkpoint``."""
        self.events.extend(events)
        for event in events:
            if event.kind == "goal" and event.goal_id is not None:
                view = view_goal(checkpoint, observed, event.goal_id)
                self._progress.pop(event.goal_id, None)
                self._sink.publish_event("goal", event.goal_id, msgspec.json.encode(view))
            else:
                self._sink.publish_event(event.kind, event.subject, msgspec.json.encode(event))

    def tell_progress(self, checkpoint: Checkpoint, observed: ObservedState) -> None:
        """Publish what pending goals wait for, where that changed."""
        goal_ids = sorted(checkpoint.pending)[:PROGRESS_MAX]
        for view in goal_progress(checkpoint, observed, goal_ids, self._progress):
            self._progress[view.goal_id] = view.message
            self._sink.publish_event("goal", view.goal_id, msgspec.json.encode(view))
