"""Draining a host, and taking it back."""

from __future__ import annotations

import msgspec

from serve_common.errors import NotFound
from serve_common.names import GoalId, HostId, check_name
from serve_common.wires.commands import DrainHost, UndrainHost
from serve_common.wires.views import GoalStatus
from serve_controller.core.checkpoint import Checkpoint, Draft
from serve_controller.core.commands.accepted import Accepted, changed, new_goal, nothing_to_do
from serve_controller.core.goals.ending import end_goal
from serve_controller.core.goals.scope import host_owned
from serve_controller.core.objects import GoalKind, HostRecord


def drain_host(checkpoint: Checkpoint, command: DrainHost, now: float) -> Accepted:
    """See `DrainHost`. Raises `NotFound` for a host that never reported."""
    record = _known(checkpoint, command.host_id)
    if record.draining:
        return nothing_to_do(record.host_id, record.goal_id)
    draft = Draft(checkpoint)
    goal_id = new_goal(draft, GoalKind.DRAIN, record.host_id, [host_owned(record.host_id)], now)
    draft.put(msgspec.structs.replace(record, draining=True, goal_id=goal_id))
    return changed(draft, record.host_id, goal_id)


def undrain_host(checkpoint: Checkpoint, command: UndrainHost, now: float) -> Accepted:
    """See `UndrainHost`. Needs no goal of its own: it is done when it is recorded."""
    record = _known(checkpoint, command.host_id)
    if not record.draining:
        return nothing_to_do(record.host_id, None)
    draft = Draft(checkpoint)
    goal = draft.pending.get(record.goal_id)
    if goal is not None:
        end_goal(draft, goal, GoalStatus.SUPERSEDED, now, "replaced by undrain_host")
    draft.put(msgspec.structs.replace(record, draining=False, goal_id=GoalId("")))
    return changed(draft, record.host_id, None)


def _known(checkpoint: Checkpoint, name: str) -> HostRecord:
    record = checkpoint.hosts.get(HostId(check_name(name, "host_id")))
    if record is None:
        raise NotFound(f"host_id: there is no host {name!r}")
    return record
