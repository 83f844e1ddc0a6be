"""The options that all proxies apply to every request."""

from __future__ import annotations

from serve_common.subjects import HTTP_KEY
from serve_common.values.http_options import HttpOptions, check_http_options
from serve_common.values.merging import merged
from serve_common.wires.commands import SetHttpOptions
from serve_controller.core.checkpoint import Checkpoint, Draft
from serve_controller.core.commands.accepted import Accepted, changed, ended_badly, new_goal, nothing_to_do
from serve_controller.core.objects import GoalKind, HttpRecord

SUBJECT = "http"


def set_http_options(checkpoint: Checkpoint, command: SetHttpOptions, now: float) -> Accepted:
    """See `SetHttpOptions`."""
    record = checkpoint.http
    known = HttpOptions() if record is None else record.target
    options = check_http_options(merged(known, command.options, "options"))
    if record is not None and options == record.target and not ended_badly(checkpoint, record.goal_id):
        return nothing_to_do(SUBJECT, record.goal_id)
    draft = Draft(checkpoint)
    goal_id = new_goal(draft, GoalKind.HTTP, SUBJECT, [HTTP_KEY], now)
    last_good = None if record is None else record.last_good
    draft.put(HttpRecord(target=options, last_good=last_good, goal_id=goal_id))
    return changed(draft, SUBJECT, goal_id)
