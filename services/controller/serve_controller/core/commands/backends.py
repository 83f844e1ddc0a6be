"""Backends that are made by themselves, for endpoints to split traffic over."""

from __future__ import annotations

import msgspec

from serve_common.errors import Conflict, NotFound
from serve_common.names import EndpointTag, deployment_tag
from serve_common.subjects import backend_key
from serve_common.values.backend_config import check_backend_config
from serve_common.values.merging import merged
from serve_common.wires.commands import CreateBackend, DeleteBackend, UpdateBackendConfig
from serve_controller.core.checkpoint import Checkpoint, Draft
from serve_controller.core.commands.accepted import (
    Accepted,
    changed,
    ended_badly,
    is_going,
    new_goal,
    nothing_there,
    nothing_to_do,
)
from serve_controller.core.commands.deployments import check_unused, give_up
from serve_controller.core.commands.versions import (
    Wanted,
    as_scaled,
    check_room_for_backends,
    check_wanted,
    is_as_wanted,
    make_backend,
)
from serve_controller.core.goals.scope import deployment_owned, pending_goal
from serve_controller.core.objects import GoalKind
from serve_controller.core.scaling import check_within_limits, scaled_config

_FIELD = "backend_tag"


def create_backend(checkpoint: Checkpoint, command: CreateBackend, now: float) -> Accepted:
    """See `CreateBackend`."""
    tag = deployment_tag(command.backend_tag, _FIELD)
    wanted = Wanted(command.replica_config, command.backend_config, None, is_same_code=True)
    check_wanted(wanted)
    wanted = as_scaled(wanted, checkpoint.backends.get(tag))
    deployment = checkpoint.deployments.get(tag)
    if deployment is not None and deployment.ended_at is None:
        raise Conflict(f"{_FIELD}: {tag!r} is a deployment's; use deploy or update_backend_config")
    existing = checkpoint.backends.get(tag)
    if existing is None:
        check_room_for_backends(checkpoint, 1)
    elif is_as_wanted(existing, wanted) and not ended_badly(checkpoint, existing.goal_id):
        return nothing_to_do(tag, existing.goal_id)
    draft = Draft(checkpoint)
    goal_id = new_goal(draft, GoalKind.DEPLOY, tag, [backend_key(tag)], now)
    draft.put(make_backend(existing, tag, goal_id, wanted))
    return changed(draft, tag, goal_id)


def delete_backend(checkpoint: Checkpoint, command: DeleteBackend, now: float) -> Accepted:
    """See `DeleteBackend`."""
    tag = deployment_tag(command.backend_tag, _FIELD)
    existing = checkpoint.backends.get(tag)
    if existing is None:
        return nothing_there(checkpoint, tag, backend_key(tag))
    is_under_way = is_going(checkpoint, existing)
    if is_under_way and (existing.force_kill or not command.force_kill):
        return nothing_to_do(tag, existing.goal_id, updating=True)
    check_unused(checkpoint, tag, set())
    deployment = checkpoint.deployments.get(tag)
    if deployment is not None and deployment.ended_at is None and not existing.deleting:
        raise Conflict(f"{_FIELD}: {tag!r} is a deployment's; use delete_deployment")
    draft = Draft(checkpoint)
    goal_id = existing.goal_id
    if not is_under_way:
        goal_id = new_goal(draft, GoalKind.DELETE, tag, [backend_key(tag)], now)
    give_up(draft, existing, goal_id, force_kill=command.force_kill)
    return changed(draft, tag, goal_id)


def update_backend_config(
    checkpoint: Checkpoint,
    command: UpdateBackendConfig,
    now: float,
    *,
    paused_by: str = "update_backend_config",
) -> Accepted:
    """See `UpdateBackendConfig`.

    ``paused_by``: the verb that autoscaling is paused by when a number of replicas is given.
    """
    tag = deployment_tag(command.backend_tag, _FIELD)
    existing = checkpoint.backends.get(tag)
    if existing is None or existing.deleting:
        raise NotFound(f"{_FIELD}: there is no backend {command.backend_tag[:100]!r}")
    target = existing.target
    config = check_backend_config(merged(target.backend_config, command.config, "config"), "config")
    paused = existing.autoscaling_paused
    if config.autoscaling_config is None:
        paused = ""
    elif "num_replicas" in command.config:
        check_within_limits(config, "config.num_replicas")
        paused = paused or paused_by
    else:
        config = scaled_config(config, existing)
    wanted = Wanted(target.replica_config, config, target.version, is_same_code=True, leaves_kept=True)
    is_there = is_as_wanted(existing, wanted) and paused == existing.autoscaling_paused
    if is_there and not ended_badly(checkpoint, existing.goal_id):
        return nothing_to_do(tag, existing.goal_id)
    draft = Draft(checkpoint)
    deployment = checkpoint.deployments.get(tag)
    is_deployment = deployment is not None and deployment.ended_at is None
    endpoint = checkpoint.endpoints.get(EndpointTag(tag))
    if (
        pending_goal(checkpoint, tag) is None
        and endpoint is not None
        and endpoint.goal_id in checkpoint.pending
    ):
        is_deployment = False  # its traffic is being changed: that goal is not replaced by this one
    owns = deployment_owned(tag) if is_deployment else [backend_key(tag)]
    goal_id = new_goal(draft, GoalKind.DEPLOY, tag, owns, now)
    backend = make_backend(existing, tag, goal_id, wanted)
    draft.put(msgspec.structs.replace(backend, autoscaling_paused=paused))
    return changed(draft, tag, goal_id)
