"""Operators' commands: drain a host, scale, pause autoscaling, shut everything down."""

from __future__ import annotations

import msgspec

from serve_common.api.commands import (
    DrainHost,
    PauseAutoscaling,
    ResumeAutoscaling,
    Scale,
    Shutdown,
    ShutdownReply,
    UndrainHost,
    UpdateBackendConfig,
    UploadCode,
)
from serve_common.api.views import GoalStatus
from serve_common.config.autoscaling import REPLICAS_MAX
from serve_common.errors import BadField, Conflict, NotFound
from serve_common.names import BackendTag, GoalId, HostId, check_name, deployment_tag
from serve_common.protocol.subjects import HTTP_KEY, endpoint_key
from serve_common.values import check_between
from serve_controller.core.checkpoint import Checkpoint, Draft
from serve_controller.core.commands.changes import Accepted, changed, new_goal, nothing_to_do
from serve_controller.core.commands.deployments import existing_backend, give_up, update_backend_config
from serve_controller.core.goals import deployment_owned, end_goal, host_owned
from serve_controller.core.objects import Backend, GoalKind, HostRecord, HttpRecord, ObjectKind, parse_number
from serve_controller.core.scaling import check_within_limits


def drain_host(checkpoint: Checkpoint, command: DrainHost, now: float) -> Accepted:
    """Place nothing more on a host and move its replicas elsewhere. Raises `NotFound` for an unknown host."""
    record = _known(checkpoint, command.host_id)
    if record.draining:
        return nothing_to_do(record.host_id, record.goal_id)
    draft = Draft(checkpoint)
    goal_id = new_goal(draft, GoalKind.DRAIN, record.host_id, [host_owned(record.host_id)], now)
    draft.put(msgspec.structs.replace(record, draining=True, goal_id=goal_id))
    return changed(draft, record.host_id, goal_id)


def undrain_host(checkpoint: Checkpoint, command: UndrainHost, now: float) -> Accepted:
    """Allow placement on a host again. Needs no goal: it is done once it is recorded."""
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


def scale(checkpoint: Checkpoint, command: Scale, now: float) -> Accepted:
    """Set a backend's number of replicas; active autoscaling pauses."""
    existing = checkpoint.backends.get(deployment_tag(command.backend_tag, "backend_tag"))
    check_between(command.num_replicas, 0, REPLICAS_MAX, "num_replicas")
    if existing is not None and not existing.deleting:
        config = msgspec.structs.replace(existing.target.backend_config, num_replicas=command.num_replicas)
        check_within_limits(config, "num_replicas")
    update = UpdateBackendConfig(
        backend_tag=command.backend_tag, config={"num_replicas": command.num_replicas}
    )
    return update_backend_config(checkpoint, update, now, paused_by="scale")


def pause_autoscaling(checkpoint: Checkpoint, command: PauseAutoscaling, _now: float) -> Accepted:
    """Pause the autoscaling of a backend until it is resumed."""
    backend = _autoscaled(checkpoint, command.backend_tag)
    return _set_paused(checkpoint, backend, backend.autoscaling_paused or "pause_autoscaling")


def resume_autoscaling(checkpoint: Checkpoint, command: ResumeAutoscaling, _now: float) -> Accepted:
    """Resume the autoscaling of a backend."""
    return _set_paused(checkpoint, _autoscaled(checkpoint, command.backend_tag), "")


def _autoscaled(checkpoint: Checkpoint, backend_tag: str) -> Backend:
    backend = existing_backend(checkpoint, backend_tag)
    if backend.target.backend_config.autoscaling_config is None:
        raise Conflict(f"backend_tag: {backend.backend_tag!r} has no autoscaling_config")
    return backend


def _set_paused(checkpoint: Checkpoint, backend: Backend, paused: str) -> Accepted:
    tag = backend.backend_tag
    if backend.autoscaling_paused == paused:
        return nothing_to_do(tag, None)
    draft = Draft(checkpoint)
    draft.put(msgspec.structs.replace(backend, autoscaling_paused=paused))
    return changed(draft, tag, None)


def refuse_upload(_checkpoint: Checkpoint, _command: UploadCode, _now: float) -> Accepted:
    """An `UploadCode` changes nothing that is deployed, so there is nothing to decide; only `Plan` asks for that."""
    raise BadField("verb", "upload_code changes nothing that is deployed, so it has no plan")


SUBJECT = "everything"


def shutdown(checkpoint: Checkpoint, _command: Shutdown, now: float) -> Accepted:
    """Delete all applications, backends and endpoints, and tell proxies until there is an endpoint again.

    For pending deletions the reply has their goals.
    """
    draft = Draft(checkpoint)
    goal_ids: dict[GoalId, None] = {}
    for name in sorted(draft.applications):
        draft.delete((ObjectKind.APPLICATION, name))
    for name in sorted(draft.build_failures):
        draft.delete((ObjectKind.BUILD_FAILURE, name))
    for goal_id in sorted(draft.pending, key=parse_number):
        goal = draft.pending[goal_id]
        if goal.kind is GoalKind.APPLICATION:
            # Before its parts are deleted one by one: while this goal is pending, a goal of a part would become one of
            # the whole.
            end_goal(draft, goal, GoalStatus.SUPERSEDED, now, "replaced by shutdown")
    for tag in sorted(draft.backends):
        backend = draft.backends[tag]
        if backend.deleting and backend.goal_id in draft.pending:
            goal_ids[backend.goal_id] = None
            continue
        goal_id = new_goal(draft, GoalKind.DELETE, tag, deployment_owned(tag), now)
        give_up(draft, backend, goal_id)
        goal_ids[goal_id] = None
    for endpoint_tag in sorted(draft.endpoints):
        owned = endpoint_key(endpoint_tag)
        if BackendTag(endpoint_tag) not in draft.backends:
            goal_ids[new_goal(draft, GoalKind.ROUTE, endpoint_tag, [owned], now)] = None
        draft.delete((ObjectKind.ENDPOINT, endpoint_tag))
    if draft.http is None or not draft.http.is_shut_down:
        record = draft.http or HttpRecord(target=None, last_good=None, goal_id=GoalId(""))
        goal_id = new_goal(draft, GoalKind.HTTP, "http", [HTTP_KEY], now)
        draft.put(msgspec.structs.replace(record, goal_id=goal_id, is_shut_down=True))
        goal_ids[goal_id] = None
    return Accepted(
        changes=draft.changes(),
        reply=ShutdownReply(goal_ids=list(goal_ids)),
        subject=SUBJECT,
        goal_id=next(iter(goal_ids), None),
    )
