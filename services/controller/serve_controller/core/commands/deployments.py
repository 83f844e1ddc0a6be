"""Deployments, and backends made by themselves: created, replaced, deleted, rolled back."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from serve_common.api.commands import (
    CreateBackend,
    DeleteBackend,
    DeleteDeployment,
    Deploy,
    Rollback,
    UpdateBackendConfig,
)
from serve_common.config.backend import check_backend_config, check_endpoint_options, merged
from serve_common.errors import Conflict, NotFound
from serve_common.names import (
    DEFAULT_APPLICATION,
    BackendTag,
    EndpointTag,
    GoalId,
    check_route,
    deployment_tag,
)
from serve_common.protocol.subjects import backend_key
from serve_controller.core.checkpoint import Checkpoint, Draft
from serve_controller.core.commands.changes import (
    Accepted,
    already_deleted,
    as_scaled,
    changed,
    check_backend_limit,
    check_methods,
    check_not_in_rollout,
    check_target,
    goal_failed,
    is_going,
    new_goal,
    nothing_to_do,
    retried,
)
from serve_controller.core.commands.rolled_deploys import (
    check_rollout_of_deployment,
    deploy_by_rollout,
    has_deployed_rollout,
    makes_rollout,
    supersede_rollout,
)
from serve_controller.core.goals import deployment_owned, pending_goal
from serve_controller.core.objects import (
    Application,
    Backend,
    Deployment,
    EndpointConfig,
    EndpointRecord,
    GoalKind,
    ObjectKind,
    Revision,
)
from serve_controller.core.rollouts.record import rollout_owned
from serve_controller.core.scaling import check_within_limits, scaled_config
from serve_controller.core.snapshots import check_not_moving
from serve_controller.core.versions import Wanted, make_backend, matches_target


def deploy(checkpoint: Checkpoint, command: Deploy, now: float) -> Accepted:
    """Create or update a deployment: its backend and the endpoint of its tag."""
    tag = deployment_tag(command.name)
    is_named = command.version is not None
    wanted = Wanted(command.replica_config, command.backend_config, command.version, is_named)
    check_target(wanted)
    wanted = as_scaled(wanted, checkpoint.backends.get(tag))
    former = checkpoint.endpoints.get(EndpointTag(tag))
    config = EndpointConfig(
        route=None if command.route_prefix is None else check_route(command.route_prefix, "route_prefix"),
        methods=check_methods(command.methods),
        traffic={tag: 1.0},
        options=check_endpoint_options(command.endpoint_options, "endpoint_options"),
        is_ingress=former is not None and former.target.is_ingress,
    )
    check_rollout_of_deployment(wanted, tag, "name", is_deployment=True)
    again = retried(checkpoint, command.request_id, tag, backend_key(tag), rollout_owned(tag))
    if again is not None:
        return again
    check_is_deployment(checkpoint, tag)
    check_route_free(checkpoint, config.route, EndpointTag(tag), "route_prefix")
    existing = checkpoint.backends.get(tag)
    _check_prev_version(existing, command)
    if existing is None:
        check_backend_limit(checkpoint, 1)
    elif (
        not goal_failed(checkpoint, existing.goal_id)
        and is_deployed_as(checkpoint, existing, wanted, config)
        and not has_deployed_rollout(checkpoint, tag)
    ):
        return nothing_to_do(tag, existing.goal_id)
    check_not_moving(checkpoint, tag)
    if existing is not None and makes_rollout(checkpoint, existing, wanted, skips=command.skips_rollout):
        return deploy_by_rollout(checkpoint, existing, wanted, config, now, request_id=command.request_id)
    draft = Draft(checkpoint)
    supersede_rollout(draft, tag, now)
    owns = deployment_owned(tag)
    goal_id = new_goal(draft, GoalKind.DEPLOY, tag, owns, now, request_id=command.request_id)
    existing = draft.backends.get(tag)
    draft.put(make_backend(existing, tag, goal_id, wanted))
    put_deployment(draft, tag, config, now)
    return changed(draft, tag, goal_id)


def put_deployment(
    draft: Draft, tag: BackendTag, config: EndpointConfig, now: float, application: str | None = None
) -> None:
    """Set the endpoint of a deployment to ``config``, and record the deployment.

    ``application`` None: it stays in its application, or joins the one named in its tag (see `_joined`).
    """
    endpoint = draft.endpoints.get(EndpointTag(tag))
    shadows = {} if endpoint is None else endpoint.target.shadows
    draft.put(
        EndpointRecord(
            endpoint_tag=EndpointTag(tag),
            target=msgspec.structs.replace(config, shadows=shadows),
            last_good=None if endpoint is None else endpoint.last_good,
        )
    )
    if application is None:
        application = _joined(draft, tag)
    known = draft.living_deployment(tag)
    if known is not None:
        draft.put(msgspec.structs.replace(known, application=application or known.application))
    else:
        draft.put(Deployment(tag=tag, application=application, started_at=now))


def _joined(draft: Draft, tag: BackendTag) -> str:
    """Add a deployment that is deployed alone to the application named in its tag; returns that name, or ''.

    Not to ``default``, which is in the tags of all that are deployed by bare names: the next deploy of the application
    of that name would delete them.
    """
    name = tag.partition("/")[0]
    application = draft.applications.get(name)
    if application is None or application.deleting or name == DEFAULT_APPLICATION:
        return ""
    target = application.target
    if tag not in target.deployments:
        target = msgspec.structs.replace(target, deployments=sorted([*target.deployments, tag]))
        draft.put(msgspec.structs.replace(application, target=target))
    return application.name


def unwanted_deployments(
    checkpoint: Checkpoint, name: str, wanted: Collection[BackendTag]
) -> list[BackendTag]:
    """Deployments of the application that are not in ``wanted``, including those of superseded or failed goals."""
    return sorted(
        tag
        for tag, deployment in checkpoint.deployments.items()
        if deployment.application == name
        and deployment.ended_at is None
        and tag not in wanted
        and (backend := checkpoint.backends.get(tag)) is not None
        and not backend.deleting
    )


def _check_prev_version(existing: Backend | None, command: Deploy) -> None:
    if command.prev_version is None:
        return
    if existing is None or existing.deleting:
        raise Conflict(f"prev_version: {command.prev_version[:200]!r} was expected, and nothing is deployed")
    if existing.target.version != command.prev_version:
        known = existing.target.version
        running = "an unversioned one" if known is None else repr(known)
        raise Conflict(
            f"prev_version: {command.prev_version[:200]!r} was expected, and {running} is deployed"
        )


def check_is_deployment(checkpoint: Checkpoint, tag: BackendTag, field: str = "name") -> None:
    """Raise `Conflict` when a backend or an endpoint that belongs to no deployment has the name."""
    if checkpoint.living_deployment(tag) is not None:
        return
    if tag in checkpoint.backends:
        raise Conflict(f"{field}: {tag!r} is a backend that was made by create_backend; choose another name")
    if EndpointTag(tag) in checkpoint.endpoints:
        raise Conflict(
            f"{field}: {tag!r} is an endpoint that was made by create_endpoint; choose another name"
        )


def check_route_free(
    checkpoint: Checkpoint,
    route: str | None,
    of: EndpointTag,
    field: str,
    but: Collection[BackendTag] = (),
) -> None:
    """Raise `Conflict` when another endpoint has the route, or may take it back when its pending goal fails.

    ``but``: deployments that give it up. A deployment of the same application may take it back only together with this
    one, so it is no conflict.
    """
    if route is None:
        return
    for other in sorted(checkpoint.routes.get(route, {})):
        if other == of or BackendTag(other) in but:
            continue
        if checkpoint.endpoints[other].target.route == route or not _are_one(checkpoint, of, other):
            deployment = checkpoint.deployments.get(BackendTag(other))
            owner = "" if deployment is None else deployment.application
            # The second sentence is Ray Serve's, whose programs look for it.
            suffix = f'. Prefix {route} is being used by application "{owner}"' if owner else ""
            raise Conflict(f"{field}: {route!r} belongs to the endpoint {other!r}{suffix}")


def _are_one(checkpoint: Checkpoint, one: EndpointTag, other: EndpointTag) -> bool:
    """Whether both are deployments of one application."""
    known = [checkpoint.deployments.get(BackendTag(tag)) for tag in (one, other)]
    names = {"" if deployment is None else deployment.application for deployment in known}
    return len(names) == 1 and "" not in names


def is_deployed_as(checkpoint: Checkpoint, existing: Backend, wanted: Wanted, config: EndpointConfig) -> bool:
    """Whether a deployment equals ``wanted`` and ``config`` already."""
    endpoint = checkpoint.endpoints.get(EndpointTag(existing.backend_tag))
    if endpoint is None or not matches_target(existing, wanted):
        return False
    return msgspec.structs.replace(endpoint.target, shadows={}) == config


def delete_deployment(checkpoint: Checkpoint, command: DeleteDeployment, now: float) -> Accepted:
    """Delete a deployment, and its application with the last one."""
    tag = deployment_tag(command.name)
    existing = checkpoint.backends.get(tag)
    if existing is None:
        return already_deleted(checkpoint, tag, backend_key(tag))
    check_is_deployment(checkpoint, tag)
    if is_going(checkpoint, existing):
        return nothing_to_do(tag, existing.goal_id, updating=True)
    check_not_moving(checkpoint, tag)
    application = checkpoint.applications.get(checkpoint.deployments[tag].application)
    deleted_tags = [tag]
    if application is not None and set(application.target.deployments) <= {tag}:
        # The last deployment of an application also deletes those that were left out of it.
        deleted_tags += unwanted_deployments(checkpoint, application.name, [tag])
    for gone in deleted_tags:
        check_unused(checkpoint, gone, {EndpointTag(t) for t in deleted_tags})
    draft = Draft(checkpoint)
    owns = [key for gone in deleted_tags for key in deployment_owned(gone)]
    goal_id = new_goal(draft, GoalKind.DELETE, tag, owns, now)
    application = draft.applications.get(checkpoint.deployments[tag].application)
    if application is not None:
        _leave(draft, application, tag)
    for gone in deleted_tags:
        give_up(draft, checkpoint.backends[gone], goal_id)
    return changed(draft, tag, goal_id)


def _leave(draft: Draft, application: Application, tag: BackendTag) -> None:
    """Take a deployment out of its application. Raises `Conflict` for an ingress that is not the last one."""
    others = [t for t in application.target.deployments if t != tag]
    if application.target.ingress == tag and others:
        raise Conflict(
            f"name: {tag!r} is the ingress of the application {application.name!r}; delete the application"
        )
    if not others:
        draft.delete((ObjectKind.APPLICATION, application.name))
        return
    last_good = application.last_good
    draft.put(
        msgspec.structs.replace(
            application,
            target=msgspec.structs.replace(application.target, deployments=others),
            last_good=None
            if last_good is None
            else msgspec.structs.replace(
                last_good, deployments=[t for t in last_good.deployments if t != tag]
            ),
        )
    )


def check_unused(checkpoint: Checkpoint, tag: BackendTag, but: set[EndpointTag]) -> None:
    """Raise `Conflict` while another endpoint sends or copies traffic to a backend."""
    for endpoint_tag in sorted(checkpoint.used_by.get(tag, {})):
        if endpoint_tag not in but:
            raise Conflict(f"{tag!r} is used by the endpoint {endpoint_tag!r}: change its traffic first")


def give_up(draft: Draft, backend: Backend, goal_id: GoalId, *, force_kill: bool = False) -> None:
    """Mark a backend as deleted, and its deployment's endpoint with it."""
    tag = backend.backend_tag
    draft.put(
        msgspec.structs.replace(
            backend, goal_id=goal_id, deleting=True, force_kill=backend.force_kill or force_kill
        )
    )
    deployment = draft.living_deployment(tag)
    endpoint = draft.endpoints.get(EndpointTag(tag))
    if deployment is not None:
        if endpoint is not None:
            draft.put(msgspec.structs.replace(deployment, ended_route=endpoint.target.route))
        draft.delete((ObjectKind.ENDPOINT, tag))


_FIELD = "backend_tag"


def create_backend(checkpoint: Checkpoint, command: CreateBackend, now: float) -> Accepted:
    """Create or update a backend that belongs to no deployment."""
    tag = deployment_tag(command.backend_tag, _FIELD)
    check_not_in_rollout(checkpoint, tag, _FIELD)
    wanted = Wanted(command.replica_config, command.backend_config, None, is_same_code=True)
    check_target(wanted)
    check_rollout_of_deployment(wanted, tag, "backend_config.rollout", is_deployment=False)
    wanted = as_scaled(wanted, checkpoint.backends.get(tag))
    if checkpoint.living_deployment(tag) is not None:
        raise Conflict(f"{_FIELD}: {tag!r} is a deployment's; use deploy or update_backend_config")
    existing = checkpoint.backends.get(tag)
    if existing is None:
        check_backend_limit(checkpoint, 1)
    elif matches_target(existing, wanted) and not goal_failed(checkpoint, existing.goal_id):
        return nothing_to_do(tag, existing.goal_id)
    draft = Draft(checkpoint)
    goal_id = new_goal(draft, GoalKind.DEPLOY, tag, [backend_key(tag)], now)
    draft.put(make_backend(existing, tag, goal_id, wanted))
    return changed(draft, tag, goal_id)


def delete_backend(checkpoint: Checkpoint, command: DeleteBackend, now: float) -> Accepted:
    """Delete a backend that belongs to no deployment; ``force_kill`` stops its replicas without draining."""
    tag = deployment_tag(command.backend_tag, _FIELD)
    check_not_in_rollout(checkpoint, tag, _FIELD)
    existing = checkpoint.backends.get(tag)
    if existing is None:
        return already_deleted(checkpoint, tag, backend_key(tag))
    is_under_way = is_going(checkpoint, existing)
    if is_under_way and (existing.force_kill or not command.force_kill):
        return nothing_to_do(tag, existing.goal_id, updating=True)
    check_unused(checkpoint, tag, set())
    if checkpoint.living_deployment(tag) is not None and not existing.deleting:
        raise Conflict(f"{_FIELD}: {tag!r} is a deployment's; use delete_deployment")
    draft = Draft(checkpoint)
    goal_id = existing.goal_id
    if not is_under_way:
        goal_id = new_goal(draft, GoalKind.DELETE, tag, [backend_key(tag)], now)
    give_up(draft, existing, goal_id, force_kill=command.force_kill)
    return changed(draft, tag, goal_id)


def existing_backend(checkpoint: Checkpoint, name: str) -> Backend:
    """The backend of that name or tag. Raises `NotFound`, also for one that is being deleted."""
    backend = checkpoint.backends.get(deployment_tag(name, _FIELD))
    if backend is None or backend.deleting:
        raise NotFound(f"{_FIELD}: there is no backend {name[:100]!r}")
    check_not_in_rollout(checkpoint, backend.backend_tag, _FIELD)
    return backend


def update_backend_config(
    checkpoint: Checkpoint,
    command: UpdateBackendConfig,
    now: float,
    *,
    paused_by: str = "update_backend_config",
) -> Accepted:
    """Change some options of a backend's configuration.

    ``paused_by``: the verb recorded as pausing autoscaling when a number of replicas is set.
    """
    existing = existing_backend(checkpoint, command.backend_tag)
    tag, target = existing.backend_tag, existing.target
    config = check_backend_config(merged(target.backend_config, command.config, "config"), "config")
    paused = existing.autoscaling_paused
    if config.autoscaling_config is None:
        paused = ""
    elif "num_replicas" in command.config:
        check_within_limits(config, "config.num_replicas")
        paused = paused or paused_by
    else:
        config = scaled_config(config, existing)
    wanted = Wanted(target.replica_config, config, target.version, is_same_code=True, leaves_retained=True)
    is_there = matches_target(existing, wanted) and paused == existing.autoscaling_paused
    if is_there and not goal_failed(checkpoint, existing.goal_id):
        return nothing_to_do(tag, existing.goal_id)
    is_deployment = checkpoint.living_deployment(tag) is not None
    check_rollout_of_deployment(wanted, tag, "config.rollout", is_deployment=is_deployment)
    if makes_rollout(checkpoint, existing, wanted, skips=command.skips_rollout):
        return deploy_by_rollout(checkpoint, existing, wanted, None, now)
    draft = Draft(checkpoint)
    endpoint = checkpoint.endpoints.get(EndpointTag(tag))
    if (
        pending_goal(checkpoint, tag) is None
        and endpoint is not None
        and endpoint.goal_id in checkpoint.pending
    ):
        is_deployment = False  # its traffic is being changed: this goal must not supersede that one
    owns = deployment_owned(tag) if is_deployment else [backend_key(tag)]
    goal_id = new_goal(draft, GoalKind.DEPLOY, tag, owns, now)
    backend = make_backend(existing, tag, goal_id, wanted)
    draft.put(msgspec.structs.replace(backend, autoscaling_paused=paused))
    return changed(draft, tag, goal_id)


def rollback(checkpoint: Checkpoint, command: Rollback, now: float) -> Accepted:
    """Deploy an earlier revision again. Raises `NotFound` when the backend or the revision is unknown.

    ``num_replicas`` stays as it is: an operator who rolls back a bad version, after having scaled up for the load, must
    not be scaled down with it.
    """
    tag = deployment_tag(command.name)
    existing = checkpoint.backends.get(tag)
    if existing is None or existing.deleting:
        raise NotFound(f"name: there is no deployment or backend {command.name[:100]!r}")
    check_not_in_rollout(checkpoint, tag, "name")
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
        if matches_target(existing, wanted) and not goal_failed(checkpoint, existing.goal_id):
            return nothing_to_do(tag, existing.goal_id)
    else:
        check_route_free(checkpoint, config.route, EndpointTag(tag), "to")
        config = msgspec.structs.replace(config, traffic={tag: 1.0}, shadows={})
        is_there = is_deployed_as(checkpoint, existing, wanted, config)
        if is_there and not goal_failed(checkpoint, existing.goal_id):
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
    """Whether a revision equals the current target, except for what a rollback leaves unchanged."""
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
    # Options set since the newest revision do not make a different version to roll back from.
    return (way.route, way.methods) == (reached.route, reached.methods) and (
        is_newest or way.options == reached.options
    )


def _known(tag: BackendTag, revisions: list[Revision], to: str | int) -> str:
    names = ", ".join(f"{r.revision} ({r.version.version or 'unversioned'})" for r in revisions)
    return f"{tag!r} has no revision {to!r}; it has {names or 'none'}"
