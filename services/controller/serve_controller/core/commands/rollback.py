"""Back to what a deployment or backend was.

Why ``num_replicas`` stays as it is: who rolls back a bad version at night, after having scaled up for the load, must
not be scaled down with it.
"""

from __future__ import annotations

import msgspec

from serve_common.errors import NotFound
from serve_common.names import BackendTag, EndpointTag, deployment_tag
from serve_common.subjects import backend_key
from serve_common.wires.commands import Rollback
from serve_controller.core.checkpoint import Checkpoint, Draft
from serve_controller.core.commands.accepted import (
    Accepted,
    changed,
    ended_badly,
    new_goal,
    nothing_to_do,
    retried,
)
from serve_controller.core.commands.deployments import check_route_free, is_deployed_as, put_deployment
from serve_controller.core.commands.versions import Wanted, is_as_wanted, make_backend
from serve_controller.core.goals.scope import deployment_owned
from serve_controller.core.ingress_moves import check_not_moving
from serve_controller.core.objects import Backend, EndpointConfig, GoalKind, Revision
from serve_controller.core.scaling import scaled_config


def rollback(checkpoint: Checkpoint, command: Rollback, now: float) -> Accepted:
    """See `Rollback`. Raises `NotFound` when the backend or the revision is unknown."""
    tag = deployment_tag(command.name)
    existing = checkpoint.backends.get(tag)
    if existing is None or existing.deleting:
        raise NotFound(f"name: there is no deployment or backend {command.name[:100]!r}")
    again = retried(checkpoint, command.request_id, tag, backend_key(tag))
    if again is not None:
        return again
    endpoint = checkpoint.endpoints.get(EndpointTag(tag))
    revision = _chosen(checkpoint, existing, None if endpoint is None else endpoint.target, command.to)
    num_replicas = existing.target.backend_config.num_replicas
    as_it_was = msgspec.structs.replace(revision.version.backend_config, num_replicas=num_replicas)
    wanted = Wanted(
        revision.version.replica_config,
        scaled_config(as_it_was, existing),
        revision.version.version,
        # An unversioned one may have had other files under the same import path.
        is_same_code=existing.target.code_version == revision.version.code_version
        or revision.version.version is not None,
    )
    config = revision.endpoint
    if config is None:
        if is_as_wanted(existing, wanted) and not ended_badly(checkpoint, existing.goal_id):
            return nothing_to_do(tag, existing.goal_id)
    else:
        check_route_free(checkpoint, config.route, EndpointTag(tag), "to")
        config = msgspec.structs.replace(config, traffic={tag: 1.0}, shadows={})
        is_there = is_deployed_as(checkpoint, existing, wanted, config)
        if is_there and not ended_badly(checkpoint, existing.goal_id):
            return nothing_to_do(tag, existing.goal_id)
        check_not_moving(checkpoint, tag)
    draft = Draft(checkpoint)
    owns = [backend_key(tag)] if config is None else deployment_owned(tag)
    goal_id = new_goal(draft, GoalKind.DEPLOY, tag, owns, now, request_id=command.request_id)
    draft.put(make_backend(existing, tag, goal_id, wanted))
    if config is not None:
        put_deployment(draft, tag, config, now)
    return changed(draft, tag, goal_id)


def _chosen(
    checkpoint: Checkpoint, existing: Backend, reached: EndpointConfig | None, to: str | int | None
) -> Revision:
    found = checkpoint.revisions.get(existing.backend_tag)
    revisions = [] if found is None else [found[number] for number in sorted(found, reverse=True)]
    match to:
        case None:
            for revision in revisions:
                if not _is_like(revision, existing, reached):
                    return revision
            raise NotFound(f"name: {existing.backend_tag!r} has no earlier version that succeeded")
        case int():
            for revision in revisions:
                if revision.revision == to:
                    return revision
        case str():
            for revision in revisions:
                if revision.version.version == to:
                    return revision
    raise NotFound(f"to: {_known(existing.backend_tag, revisions, to)}")


def _is_like(revision: Revision, existing: Backend, reached: EndpointConfig | None) -> bool:
    """Whether a revision is the present target, but for what a rollback leaves as it is."""
    target = existing.target
    num_replicas = target.backend_config.num_replicas
    was, way = revision.version, revision.endpoint
    is_newest = revision.revision == existing.newest_revision
    return (
        (way is None or reached is None or _is_reached_alike(way, reached, is_newest=is_newest))
        and was.code_version == target.code_version
        and msgspec.structs.replace(was.backend_config, num_replicas=num_replicas) == target.backend_config
    )


def _is_reached_alike(way: EndpointConfig, reached: EndpointConfig, *, is_newest: bool) -> bool:
    # Options that were set since the newest revision are no version to go back from.
    return (way.route, way.methods) == (reached.route, reached.methods) and (
        is_newest or way.options == reached.options
    )


def _known(tag: BackendTag, revisions: list[Revision], to: str | int) -> str:
    names = ", ".join(f"{r.revision} ({r.version.version or 'unversioned'})" for r in revisions)
    return f"{tag!r} has no revision {to!r}; it has {names or 'none'}"
