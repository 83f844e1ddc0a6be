"""When a goal succeeds, and what is remembered of it as what last succeeded.

Why beside what is wanted: it is where a later failure, or a user's rollback, goes back to.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from serve_common.names import BackendTag, EndpointTag, GoalId
from serve_common.subjects import endpoint_key
from serve_common.wires.views import GoalStatus
from serve_controller.core.changes import Kind
from serve_controller.core.checkpoint import Checkpoint, Draft
from serve_controller.core.goals.ending import end_goal
from serve_controller.core.goals.failing import fail_http
from serve_controller.core.goals.scope import application_of, backends_of, endpoints_of, left_out_by
from serve_controller.core.goals.waiting import http_refusal, waits_for
from serve_controller.core.ingress_moves import move_route
from serve_controller.core.objects import (
    Application,
    Backend,
    BackendVersion,
    Endpoint,
    EndpointConfig,
    Goal,
    GoalKind,
    Revision,
)
from serve_controller.core.observed import ObservedState

REVISIONS_MAX = 10
"""Of each backend; the oldest are forgotten."""


def succeed_where_reached(
    draft: Draft, observed: ObservedState, goal_ids: Iterable[GoalId], now: float
) -> None:
    """End those pending goals that are reached, as recorded, published and applied by every live proxy."""
    for goal_id in goal_ids:
        goal = draft.pending.get(goal_id)
        if goal is None:
            continue
        refusal = http_refusal(draft, observed, goal)
        if refusal:
            fail_http(draft, goal, refusal, now)
        elif waits_for(draft, observed, goal) == "":
            # One after the other, each applied by every proxy: what is left out may have had the route.
            if move_route(draft, application_of(draft, goal)) or _drop_left_out(draft, goal, now):
                continue
            end_goal(draft, goal, GoalStatus.SUCCEEDED, now)
            _settle(draft, goal, now)


def _drop_left_out(draft: Draft, goal: Goal, now: float) -> bool:
    """Delete what an application no longer has, once the rest runs; whether there is such a deployment."""
    dropped = False
    for tag in left_out_by(draft, goal):
        backend = draft.backends.get(tag)
        if backend is not None and not backend.deleting:
            draft.put(msgspec.structs.replace(backend, deleting=True))
            draft.delete((Kind.ENDPOINT, tag))
            dropped = True
    if dropped:
        # From here on there is no way back, for none of it: what is left out cannot come again by a failure.
        _settle(draft, goal, now)
    return dropped


def _settle(draft: Draft, goal: Goal, now: float) -> None:
    """Remember what a succeeded goal made as what last succeeded."""
    application = application_of(draft, goal)
    if application is not None:
        _settle_application(draft, application, goal)
    elif goal.kind is GoalKind.DEPLOY:
        _settle_part(draft, BackendTag(goal.subject))
    for endpoint_tag in endpoints_of(goal):
        endpoint = draft.endpoints.get(endpoint_tag)
        if endpoint is not None:
            _settle_endpoint(draft, endpoint, goal)
    for tag in backends_of(goal):
        backend = draft.backends.get(tag)
        if backend is not None and not backend.deleting:
            _settle_backend(draft, backend, goal, now)
    if goal.kind is GoalKind.HTTP and draft.http is not None:
        draft.put(msgspec.structs.replace(draft.http, last_good=draft.http.target))


def _settle_application(draft: Draft, application: Application, goal: Goal) -> None:
    if application.deleting:
        draft.delete((Kind.APPLICATION, application.name))
        return
    target, parts = application.target, backends_of(goal)
    # What joined by itself meanwhile has a goal of its own.
    good = msgspec.structs.replace(target, deployments=[t for t in target.deployments if t in parts])
    draft.put(msgspec.structs.replace(application, last_good=good))


def _settle_part(draft: Draft, tag: BackendTag) -> None:
    """One that joined an application by itself belongs from now on to what the application was with success."""
    deployment = draft.deployments.get(tag)
    application = None if deployment is None else draft.applications.get(deployment.application)
    good = None if application is None else application.last_good
    if application is None or good is None or tag in good.deployments:
        return
    if tag in application.target.deployments:
        good = msgspec.structs.replace(good, deployments=sorted([*good.deployments, tag]))
        draft.put(msgspec.structs.replace(application, last_good=good))


def _settle_endpoint(draft: Draft, endpoint: Endpoint, goal: Goal) -> None:
    reached: EndpointConfig | None = endpoint.target
    if goal.kind is GoalKind.ROUTE and draft.owners.get(endpoint_key(endpoint.endpoint_tag)):
        # The rest of it is that of a deploy which may yet fail.
        last_good = endpoint.last_good
        reached = None if last_good is None else endpoint.with_set_alone(last_good)
    if endpoint.last_good != reached:
        draft.put(msgspec.structs.replace(endpoint, last_good=reached))


def _settle_backend(draft: Draft, backend: Backend, goal: Goal, now: float) -> None:
    former, others = backend.last_good, backend.others
    replicas = draft.replicas_of(backend.backend_tag).values()
    if former is not None and any(r.config_version == former.config_version for r in replicas):
        # Its last replicas still stop: what they hold of their hosts must not be forgotten.
        others = [*others, former]
    endpoint = draft.endpoints.get(EndpointTag(backend.backend_tag))
    deployment = draft.deployments.get(backend.backend_tag)
    is_deployment = deployment is not None and deployment.ended_at is None
    reached = endpoint.target if endpoint is not None and is_deployment else None
    revision = backend.newest_revision
    if not _is_alike(former, backend.target) or _newest_endpoint(draft, backend) != reached:
        revision += 1
        _remember(
            draft,
            Revision(
                backend_tag=backend.backend_tag,
                revision=revision,
                at=now,
                goal_id=goal.goal_id,
                version=backend.target,
                endpoint=reached,
            ),
        )
    draft.put(
        msgspec.structs.replace(
            backend, last_good=backend.target, last_error="", others=others, newest_revision=revision
        )
    )


def _remember(draft: Draft, revision: Revision) -> None:
    """Keep one more revision of a backend, and forget its oldest."""
    draft.put(revision)
    for old in sorted(draft.revisions[revision.backend_tag])[:-REVISIONS_MAX]:
        draft.delete((Kind.REVISION, f"{revision.backend_tag}@{old}"))


def _is_alike(former: BackendVersion | None, target: BackendVersion) -> bool:
    """Whether there is nothing between them to go back to: a rollback leaves ``num_replicas`` as it is."""
    if former is None:
        return False
    num_replicas = target.backend_config.num_replicas
    config = msgspec.structs.replace(former.backend_config, num_replicas=num_replicas)
    return msgspec.structs.replace(former, backend_config=config) == target


def _newest_endpoint(draft: Checkpoint, backend: Backend) -> EndpointConfig | None:
    revisions = draft.revisions.get(backend.backend_tag)
    newest = None if revisions is None else revisions.get(backend.newest_revision)
    return None if newest is None else newest.endpoint
