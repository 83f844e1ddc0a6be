"""Restores a backup: everything is deployed as in the backup, as one change.

Why by goals and not by rows: running replicas and all numbers given so far stay. The deployed state is changed to that
of the backup in the same way as by any command, so nothing that serves stops before its replacement serves.
"""

from __future__ import annotations

import msgspec

from serve_common.api.commands import Command, Restore, RestoreReply
from serve_common.api.views import GoalStatus
from serve_common.config.backend import check_endpoint_options
from serve_common.errors import BadField
from serve_common.names import BackendTag, EndpointTag, GoalId, check_name, check_route, deployment_tag
from serve_common.protocol.subjects import HTTP_KEY, backend_key, endpoint_key
from serve_controller.core.checkpoint import Checkpoint, Draft
from serve_controller.core.commands.changes import (
    Accepted,
    check_methods,
    check_target,
    new_goal,
)
from serve_controller.core.commands.deployments import give_up
from serve_controller.core.goals import application_owned, deployment_owned, end_goal
from serve_controller.core.objects import (
    Application,
    Backend,
    Deployment,
    EndpointRecord,
    GoalKind,
    HttpRecord,
    ObjectKind,
    parse_number,
)
from serve_controller.core.restored import MARGIN, raise_counters_above
from serve_controller.core.versions import Wanted, make_backend

SUBJECT = "everything"


class RestoreFrom(Command[RestoreReply], frozen=True, kw_only=True):
    """A `Restore` whose file is complete and decoded."""

    verb = Restore.verb
    saved: Checkpoint
    summary: str


def refuse_plan(_checkpoint: Checkpoint, _command: Restore, _now: float) -> Accepted:
    """A `Restore` has only a page of the file, so it cannot be decided; only `Plan` asks for that."""
    raise BadField("verb", "a restore has no plan; without confirm its file is checked")


def check_backup(saved: Checkpoint) -> str:
    """Summary of a backup's contents. Raises `BadField` for an invalid backup."""
    for tag, backend in saved.backends.items():
        at = f"backends[{tag}]."
        if str(deployment_tag(tag, "backends")) != str(tag):
            raise BadField("backends", f"{tag[:100]!r} is not a whole tag")
        target = backend.target
        check_target(
            Wanted(target.replica_config, target.backend_config, target.version, is_same_code=True), at
        )
    wanted = {tag for tag, backend in saved.backends.items() if not backend.deleting}
    for endpoint_tag, endpoint in saved.endpoints.items():
        at = f"endpoints[{endpoint_tag}]"
        if str(deployment_tag(endpoint_tag, "endpoints")) != str(endpoint_tag):
            raise BadField("endpoints", f"{endpoint_tag[:100]!r} is not a whole tag")
        if endpoint.target.route is not None:
            check_route(endpoint.target.route, f"{at}.route")
        check_methods(endpoint.target.methods)
        check_endpoint_options(endpoint.target.options, f"{at}.options")
        if not endpoint.target.backend_tags() <= wanted:
            raise BadField(f"{at}.traffic", "names a backend that is not there")
    routes = [e.target.route for e in saved.endpoints.values() if e.target.route is not None]
    if len(set(routes)) != len(routes):
        raise BadField("endpoints", "two of them have the same route")
    for name, application in saved.applications.items():
        check_name(name, "applications")
        if not application.deleting and application.target.ingress not in wanted:
            raise BadField(f"applications[{name}].ingress", "is not there")
    deployments = len(wanted & _deployed(saved))
    return f"{deployments} deployments, {len(wanted) - deployments} other backends, {len(saved.endpoints)} endpoints"


def restore(checkpoint: Checkpoint, command: RestoreFrom, now: float) -> Accepted:
    """Change what is deployed to the contents of a backup that `check_backup` has passed."""
    draft, saved = Draft(checkpoint), command.saved
    if saved.counters.goal > draft.counters.goal or saved.counters.ordinal > draft.counters.ordinal:
        # Another store than the one that was backed up: do not give numbers of that one again.
        draft.put(raise_counters_above(draft.counters, saved.counters, MARGIN))
    for goal_id in sorted(draft.pending, key=parse_number):
        end_goal(draft, draft.pending[goal_id], GoalStatus.SUPERSEDED, now, "replaced by restore")
    goals = [*_drop(draft, saved, now), *_put_backends(draft, saved, now), *_put_endpoints(draft, saved, now)]
    goals += _put_http(draft, saved, now)
    for tag, deployment in saved.deployments.items():
        if tag not in draft.deployments and deployment.ended_at is not None:
            draft.put(deployment)
    return Accepted(
        changes=draft.changes(),
        reply=RestoreReply(goal_ids=goals, summary=command.summary),
        subject=SUBJECT,
        goal_id=goals[0] if goals else None,
    )


def _deployed(saved: Checkpoint) -> set[BackendTag]:
    return {tag for tag, deployment in saved.deployments.items() if deployment.ended_at is None}


def _is_wanted(saved: Checkpoint, tag: BackendTag) -> bool:
    backend = saved.backends.get(tag)
    return backend is not None and not backend.deleting


def _drop(draft: Draft, saved: Checkpoint, now: float) -> list[GoalId]:
    """Delete what the backup does not have."""
    goals: list[GoalId] = []
    for name in sorted(draft.applications):
        draft.delete((ObjectKind.APPLICATION, name))  # those of the backup are put again
    for name in sorted(draft.build_failures):
        draft.delete((ObjectKind.BUILD_FAILURE, name))
    for endpoint_tag in sorted(draft.endpoints):
        if endpoint_tag not in saved.endpoints:
            if BackendTag(endpoint_tag) not in draft.backends:
                goals.append(new_goal(draft, GoalKind.ROUTE, endpoint_tag, [endpoint_key(endpoint_tag)], now))
            draft.delete((ObjectKind.ENDPOINT, endpoint_tag))
    for tag in sorted(draft.backends):
        if not _is_wanted(saved, tag):
            goals.append(new_goal(draft, GoalKind.DELETE, tag, deployment_owned(tag), now))
            give_up(draft, draft.backends[tag], goals[-1])
    return goals


def _put_backends(draft: Draft, saved: Checkpoint, now: float) -> list[GoalId]:
    goals: dict[BackendTag, GoalId] = {}
    for name, application in sorted(saved.applications.items()):
        parts = [tag for tag in application.target.deployments if _is_wanted(saved, tag)]
        if application.deleting or not parts:
            continue
        owns = [application_owned(name), *(key for tag in parts for key in deployment_owned(tag))]
        goal_id = new_goal(draft, GoalKind.APPLICATION, name, owns, now)
        target = msgspec.structs.replace(application.target, deployments=sorted(parts), takes_over=None)
        draft.put(Application(name=name, goal_id=goal_id, target=target, last_good=None))
        goals.update(dict.fromkeys(parts, goal_id))
    deployed = _deployed(saved)
    for tag in sorted(tag for tag in saved.backends if _is_wanted(saved, tag)):
        if tag not in goals:
            owns = deployment_owned(tag) if tag in deployed else [backend_key(tag)]
            goals[tag] = new_goal(draft, GoalKind.DEPLOY, tag, owns, now)
        _put_backend(draft, saved, saved.backends[tag], goals[tag])
        if tag in deployed:
            draft.put(saved.deployments[tag])
        elif draft.living_deployment(tag) is not None:
            draft.delete((ObjectKind.DEPLOYMENT, tag))
    return list(dict.fromkeys(goals.values()))


def _put_backend(draft: Draft, saved: Checkpoint, backend: Backend, goal_id: GoalId) -> None:
    tag, target = backend.backend_tag, backend.target
    existing = draft.backends.get(tag)
    is_same_incarnation = _started_at(draft.deployments.get(tag)) == _started_at(saved.deployments.get(tag))
    is_same_code = target.version is not None or (
        existing is not None and is_same_incarnation and existing.target.code_version == target.code_version
    )
    wanted = Wanted(target.replica_config, target.backend_config, target.version, is_same_code)
    made = make_backend(existing, tag, goal_id, wanted)
    paused = backend.autoscaling_paused if target.backend_config.autoscaling_config is not None else ""
    made = msgspec.structs.replace(made, autoscaling_paused=paused)
    if existing is None:
        made = msgspec.structs.replace(made, newest_revision=backend.newest_revision)
        for revision in saved.revisions.get(tag, {}).values():
            draft.put(revision)
    draft.put(made)


def _started_at(deployment: Deployment | None) -> float | None:
    return None if deployment is None or deployment.ended_at is not None else deployment.started_at


def _put_endpoints(draft: Draft, saved: Checkpoint, now: float) -> list[GoalId]:
    """Put all endpoints at once, so that no two claim the same route. A failed goal leaves them as they are here."""
    goals: list[GoalId] = []
    for tag in sorted(saved.endpoints):
        goal_id = GoalId("")
        if not _is_wanted(saved, BackendTag(tag)):
            goal_id = new_goal(draft, GoalKind.ROUTE, tag, [endpoint_key(tag)], now)
            goals.append(goal_id)
        draft.put(
            EndpointRecord(
                endpoint_tag=EndpointTag(tag),
                target=saved.endpoints[tag].target,
                last_good=None,
                goal_id=goal_id,
            )
        )
    return goals


def _put_http(draft: Draft, saved: Checkpoint, now: float) -> list[GoalId]:
    target = saved.http_options
    if target == draft.http_options:
        return []
    goal_id = new_goal(draft, GoalKind.HTTP, "", [HTTP_KEY], now)
    last_good = None if draft.http is None else draft.http.last_good
    draft.put(HttpRecord(target=target, last_good=last_good, goal_id=goal_id))
    return [goal_id]
