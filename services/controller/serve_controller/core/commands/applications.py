"""Applications: groups of deployments with one ingress, changed together or not at all."""

from __future__ import annotations

from typing import Any

import msgspec

from serve_common.api.commands import DeleteApplication, DeployApplication, RecordBuildFailure
from serve_common.api.views import GoalStatus
from serve_common.config.backend import EndpointOptions, check_endpoint_options
from serve_common.errors import BadField, Conflict, LimitReached
from serve_common.names import (
    DEFAULT_APPLICATION,
    BackendTag,
    EndpointTag,
    GoalId,
    check_name,
    check_route,
)
from serve_common.protocol.reports import ERROR_LENGTH_MAX
from serve_controller.core.checkpoint import Checkpoint, Draft
from serve_controller.core.commands.changes import (
    Accepted,
    as_scaled,
    changed,
    check_backend_limit,
    check_methods,
    check_target,
    goal_failed,
    new_goal,
    nothing_to_do,
    retried,
)
from serve_controller.core.commands.deployments import (
    check_is_deployment,
    check_route_free,
    check_unused,
    give_up,
    is_deployed_as,
    put_deployment,
    unwanted_deployments,
)
from serve_controller.core.commands.rolled_deploys import (
    check_rolled,
    check_rollout_of_deployment,
    has_deployed_rollout,
    is_rolled_out_as,
    makes_rollout,
    roll_out_part,
    supersede_rollout,
)
from serve_controller.core.goals import (
    application_owned,
    build_failure_owned,
    deployment_owned,
    end_goal,
    pending_goal,
)
from serve_controller.core.objects import (
    Application,
    ApplicationVersion,
    Backend,
    BuildFailure,
    EndpointConfig,
    GoalKind,
    ObjectKind,
)
from serve_controller.core.snapshots import interim_route, taken_over
from serve_controller.core.versions import Wanted, make_backend

DEPLOYMENTS_MAX = 100
"""Most deployments of one application, to bound what is recorded in one transaction."""
APP_CONFIG_BYTES_MAX = 64 * 1024
"""Largest `DeployApplication.app_config`, as JSON: it is part of the lists of applications."""
BUILD_FAILURES_MAX = 1_000
"""Most build failures: no backends limit the number of applications that never were built."""


def deploy_application(checkpoint: Checkpoint, command: DeployApplication, now: float) -> Accepted:
    """Create or update an application with all its deployments, as one change."""
    name = check_name(command.name, "name")
    parts, options = _checked_parts(command)
    again = retried(checkpoint, command.request_id, name, application_owned(name))
    if again is not None:
        return again
    for index, tag in enumerate(parts):
        check_is_deployment(checkpoint, tag, f"deployments[{index}].name")
    route = None if command.route_prefix is None else check_route(command.route_prefix, "route_prefix")
    methods = check_methods(command.methods)
    ingress = BackendTag(f"{name}/{command.ingress}")
    parts = {tag: as_scaled(wanted, checkpoint.backends.get(tag)) for tag, wanted in parts.items()}
    existing = checkpoint.applications.get(name)
    left_out = [] if existing is None else unwanted_deployments(checkpoint, name, parts)
    members = {*parts, *left_out}
    check_route_free(checkpoint, route, EndpointTag(ingress), "route_prefix", members)
    takes_over = taken_over(checkpoint, route, ingress, members)
    if existing is None and name != DEFAULT_APPLICATION:  # that is in the tags of all with a bare name
        _check_name_free(checkpoint, name, set(parts))
    check_backend_limit(checkpoint, sum(tag not in checkpoint.backends for tag in parts))
    rolled_tags = [
        tag
        for tag, wanted in parts.items()
        if (backend := checkpoint.backends.get(tag)) is not None
        and makes_rollout(checkpoint, backend, wanted, skips=command.skips_rollout)
    ]
    target = ApplicationVersion(
        ingress=ingress, deployments=sorted(parts), takes_over=takes_over, app_config=command.app_config
    )
    configs = {
        tag: EndpointConfig(
            route=interim_route(checkpoint, route, takes_over, tag, is_ingress=tag == ingress),
            methods=methods,
            traffic={tag: 1.0},
            options=options[tag],
            is_ingress=tag == ingress,
        )
        for tag in parts
    }
    draft = Draft(checkpoint)
    draft.delete((ObjectKind.BUILD_FAILURE, name))
    if existing is not None and _is_same(checkpoint, existing, target, parts, configs):
        current = nothing_to_do(name, existing.goal_id)
        return msgspec.structs.replace(current, changes=draft.changes())  # without a build that failed since
    for tag in left_out:
        check_unused(checkpoint, tag, {EndpointTag(tag)})
    rolled = {
        tag: check_rolled(
            checkpoint,
            checkpoint.backends[tag],
            parts[tag],
            configs[tag],
            now,
            at=f"deployments[{list(parts).index(tag)}]",
            more=len(rolled_tags),
        )
        for tag in rolled_tags
    }
    if rolled and takes_over is not None:
        raise Conflict(
            f"route_prefix: {route!r} moves to {ingress!r}, which is no part of a rollout; deploy that first with "
            f"skips_rollout, or the new version without it"
        )
    for tag in (*parts, *left_out):
        if tag not in rolled:
            supersede_rollout(draft, tag, now)
    owns = [
        application_owned(name),
        *(key for tag in (*target.deployments, *left_out) for key in deployment_owned(tag)),
    ]
    goal_id = new_goal(draft, GoalKind.APPLICATION, name, owns, now, request_id=command.request_id)
    draft.put(
        Application(
            name=name,
            goal_id=goal_id,
            target=target,
            last_good=None if existing is None or existing.deleting else existing.last_good,
        )
    )
    for tag, wanted in parts.items():
        if tag in rolled:
            # The version that runs stays what it is until the rollout has passed.
            draft.put(
                msgspec.structs.replace(draft.backends[tag], goal_id=goal_id, start_failures=0, retry_at=0.0)
            )
            roll_out_part(draft, rolled[tag], goal_id, now)
            put_deployment(draft, tag, draft.endpoints[EndpointTag(tag)].target, now, name)
        else:
            draft.put(_part(draft, tag, wanted, configs[tag], goal_id))
            put_deployment(draft, tag, configs[tag], now, name)
    return changed(draft, name, goal_id)


def _part(
    checkpoint: Checkpoint, tag: BackendTag, wanted: Wanted, config: EndpointConfig, goal_id: GoalId
) -> Backend:
    """The backend of one deployment, as the target of its application's goal."""
    backend = checkpoint.backends.get(tag)
    if backend is None or not is_deployed_as(checkpoint, backend, wanted, config):
        return make_backend(backend, tag, goal_id, wanted)
    # Earlier failures do not count: the goal has its own retries.
    return msgspec.structs.replace(backend, goal_id=goal_id, start_failures=0, retry_at=0.0)


def _checked_parts(
    command: DeployApplication,
) -> tuple[dict[BackendTag, Wanted], dict[BackendTag, EndpointOptions]]:
    if not command.deployments:
        raise BadField("deployments", "must not be empty")
    if len(command.deployments) > DEPLOYMENTS_MAX:
        raise LimitReached(
            f"deployments: {len(command.deployments)} are given; at most {DEPLOYMENTS_MAX} may be"
        )
    parts: dict[BackendTag, Wanted] = {}
    options: dict[BackendTag, EndpointOptions] = {}
    for index, spec in enumerate(command.deployments):
        at = f"deployments[{index}]."
        tag = BackendTag(f"{command.name}/{check_name(spec.name, f'{at}name')}")
        if tag in parts:
            raise BadField(f"{at}name", f"{spec.name!r} is given twice")
        parts[tag] = Wanted(spec.replica_config, spec.backend_config, spec.version, spec.version is not None)
        check_target(parts[tag], at)
        check_rollout_of_deployment(parts[tag], tag, f"{at}name", is_deployment=True)
        options[tag] = check_endpoint_options(spec.endpoint_options, f"{at}endpoint_options")
    _check_app_config(command.app_config)
    if BackendTag(f"{command.name}/{command.ingress}") not in parts:
        raise BadField("ingress", f"{command.ingress[:100]!r} is none of the deployments")
    return parts, options


def _check_app_config(app_config: dict[str, Any] | None) -> None:
    if len(msgspec.json.encode(app_config)) > APP_CONFIG_BYTES_MAX:
        raise LimitReached(f"app_config: larger than {APP_CONFIG_BYTES_MAX} bytes of JSON")


def _check_name_free(checkpoint: Checkpoint, name: str, tags: set[BackendTag]) -> None:
    """Raise `Conflict` unless the new application includes all deployments already deployed under its name."""
    prefix = f"{name}/"
    for tag, deployment in sorted(checkpoint.deployments.items()):
        if deployment.ended_at is None and tag.startswith(prefix) and tag not in tags:
            raise Conflict(f"name: the deployment {tag!r} has this application's name and is not part of it")


def _is_same(
    checkpoint: Checkpoint,
    existing: Application,
    target: ApplicationVersion,
    parts: dict[BackendTag, Wanted],
    configs: dict[BackendTag, EndpointConfig],
) -> bool:
    if existing.deleting or existing.target != target or goal_failed(checkpoint, existing.goal_id):
        return False
    for tag, wanted in parts.items():
        goal = pending_goal(checkpoint, tag)
        if goal is not None and goal.goal_id != existing.goal_id:
            return False  # that one is not done
        backend = checkpoint.backends.get(tag)
        if is_rolled_out_as(checkpoint, existing.goal_id, tag, wanted, configs[tag]):
            continue
        if has_deployed_rollout(checkpoint, tag):
            return False
        if backend is None or not is_deployed_as(checkpoint, backend, wanted, configs[tag]):
            return False
    return True


def record_build_failure(checkpoint: Checkpoint, command: RecordBuildFailure, now: float) -> Accepted:
    """Record why the last deploy of an application could not build it; its deployments are left alone."""
    name = check_name(command.name, "name")
    if not command.error.strip():
        raise BadField("error", "must not be empty")
    _check_app_config(command.app_config)
    error, known = command.error[-ERROR_LENGTH_MAX:], checkpoint.build_failures.get(name)
    if known is not None and (known.error, known.app_config) == (error, command.app_config):
        return nothing_to_do(name, known.goal_id)
    if known is None and len(checkpoint.build_failures) >= BUILD_FAILURES_MAX:
        raise LimitReached(f"{BUILD_FAILURES_MAX} applications could not be built already; delete some")
    draft = Draft(checkpoint)
    goal_id = new_goal(draft, GoalKind.APPLICATION, name, [build_failure_owned(name)], now)
    end_goal(draft, draft.goals[goal_id], GoalStatus.FAILED, now, error)
    draft.put(
        BuildFailure(name=name, goal_id=goal_id, error=error, failed_at=now, app_config=command.app_config)
    )
    return changed(draft, name, goal_id)


def delete_application(checkpoint: Checkpoint, command: DeleteApplication, now: float) -> Accepted:
    """Delete an application with all its deployments."""
    name = check_name(command.name, "name")
    existing = checkpoint.applications.get(name)
    draft = Draft(checkpoint)
    draft.delete((ObjectKind.BUILD_FAILURE, name))
    if existing is None or existing.deleting:
        goal_id = None if existing is None else existing.goal_id
        if name in checkpoint.build_failures:
            return changed(draft, name, goal_id)
        return nothing_to_do(name, goal_id, updating=existing is not None)
    tags = sorted(
        {*existing.target.deployments, *unwanted_deployments(checkpoint, name, existing.target.deployments)}
    )
    own = {EndpointTag(tag) for tag in tags}
    for tag in tags:
        check_unused(checkpoint, tag, own)
    owns = [application_owned(name), *(key for tag in tags for key in deployment_owned(tag))]
    goal_id = new_goal(draft, GoalKind.DELETE, name, owns, now)
    draft.put(msgspec.structs.replace(existing, goal_id=goal_id, deleting=True))
    for tag in tags:
        backend = draft.backends.get(tag)
        if backend is not None:
            give_up(draft, backend, goal_id)
    return changed(draft, name, goal_id)
