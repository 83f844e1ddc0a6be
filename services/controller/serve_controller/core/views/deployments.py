"""Deployments, endpoints and applications as callers see them.

Deleted deployments are retained for a while, so that a caller can learn when one ended, and as what. An application's
status is the worst of its deployments', because it serves only when all of its parts do.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from immutables import Map

from serve_common.api.queries import PagedQuery
from serve_common.api.views import (
    ApplicationView,
    CaptureView,
    DeploymentStatus,
    DeploymentView,
    EndpointView,
    GoalStatus,
    ReplicaView,
    SnapshotView,
)
from serve_common.errors import NotFound
from serve_common.names import BackendTag, EndpointTag, GoalId, deployment_tag
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.objects import (
    Application,
    Backend,
    BackendVersion,
    Deployment,
    EndpointConfig,
    EndpointRecord,
)
from serve_controller.core.rollouts.record import baseline_tag, canary_tag
from serve_controller.core.views.backends import get_goal_status, get_status, view_replicas
from serve_controller.core.views.hosts import ALL, paginate

WORSE: Final = (
    DeploymentStatus.HEALTHY,
    DeploymentStatus.UPDATING,
    DeploymentStatus.UNHEALTHY,
    DeploymentStatus.DELETING,
    DeploymentStatus.DELETED,
)
"""Statuses from best to worst."""
NUM_REASONS_MAX: Final = 3


def view_applications(checkpoint: Checkpoint, query: PagedQuery[Any] = ALL) -> list[ApplicationView]:
    """All applications in the order of their names, with those that never were built."""
    names = {*checkpoint.applications, *checkpoint.build_failures}
    return [_view_application(checkpoint, name) for name in paginate(names, query)]


def _view_application(checkpoint: Checkpoint, name: str) -> ApplicationView:
    application, failure = checkpoint.applications.get(name), checkpoint.build_failures.get(name)
    view = _NEVER_BUILT if application is None else _application(checkpoint, application)
    if failure is None:
        return view
    return msgspec.structs.replace(
        view,
        name=name,
        message=view.message or f"the last change failed: {failure.error}",
        goal_id=failure.goal_id,
        goal_status=GoalStatus.FAILED,
        deployed_at=failure.failed_at,
        app_config=failure.app_config,
        build_error=failure.error,
    )


_NEVER_BUILT: Final = ApplicationView(
    name="",
    status=DeploymentStatus.UNHEALTHY,
    message="",
    route_prefix=None,
    ingress="",
    deployments=[],
    goal_id=GoalId(""),
    goal_status=GoalStatus.FAILED,
)


def _application(checkpoint: Checkpoint, application: Application) -> ApplicationView:
    goal = checkpoint.goals.get(application.goal_id)
    goal_status = get_goal_status(checkpoint, application.goal_id)
    ingress = checkpoint.endpoints.get(EndpointTag(application.target.ingress))
    status, message = _status(checkpoint, application, goal_status)
    if status is DeploymentStatus.HEALTHY and goal is not None and goal_status is GoalStatus.FAILED:
        message = f"the last change failed: {goal.error}"
    return ApplicationView(
        name=application.name,
        status=status,
        message=message,
        route_prefix=application.target.takes_over or (None if ingress is None else ingress.target.route),
        ingress=application.target.ingress,
        deployments=sorted(application.target.deployments),
        goal_id=application.goal_id,
        goal_status=goal_status,
        deployed_at=_last_revision_at(checkpoint, application) if goal is None else goal.created_at,
        app_config=application.target.app_config,
    )


def _last_revision_at(checkpoint: Checkpoint, application: Application) -> float:
    """When a version of one of its deployments was accepted last: the goal is no longer retained."""
    revisions = (checkpoint.revisions.get(tag) or Map() for tag in application.target.deployments)
    return max((revision.at for each in revisions for revision in each.values()), default=0.0)


def _status(
    checkpoint: Checkpoint, application: Application, goal_status: GoalStatus
) -> tuple[DeploymentStatus, str]:
    worst = DeploymentStatus.UPDATING if goal_status is GoalStatus.PENDING else DeploymentStatus.HEALTHY
    if application.deleting:
        worst = DeploymentStatus.DELETING
    reasons = []
    for tag in sorted(application.target.deployments):
        backend = checkpoint.backends.get(tag)
        if backend is None:
            continue
        status, message = get_status(checkpoint, backend)
        worst = max(worst, status, key=WORSE.index)
        if status is not DeploymentStatus.HEALTHY and message:
            reasons.append(f"{tag}: {message}")
    more = len(reasons) - NUM_REASONS_MAX
    return worst, "; ".join([*reasons[:NUM_REASONS_MAX], *([f"and {more} more"] if more > 0 else [])])


UNVERSIONED: Final = "Unversioned"
_NOWHERE: Final = EndpointConfig(route=None, methods=[], traffic={})


def view_deployment(checkpoint: Checkpoint, name: str) -> DeploymentView:
    """One deployment by its user's name for it. Raises `NotFound` (also when it was deleted) or `BadField`."""
    tag = deployment_tag(name)
    deployment, backend = checkpoint.deployments.get(tag), _living(checkpoint, tag)
    if deployment is None or backend is None:
        raise NotFound(f"name: there is no deployment {tag!r}")
    return _present(checkpoint, deployment, backend, with_replicas=True)


def view_deployments(
    checkpoint: Checkpoint,
    query: PagedQuery[Any] = ALL,
    *,
    include_deleted: bool = False,
    with_replicas: bool = True,
) -> list[DeploymentView]:
    """All deployments in the order of their names."""
    views = []
    for tag in paginate(_tags(checkpoint, include_deleted=include_deleted), query):
        deployment, backend = checkpoint.deployments[tag], _living(checkpoint, tag)
        if backend is not None:
            views.append(_present(checkpoint, deployment, backend, with_replicas=with_replicas))
        elif deployment.ended_as is not None:
            views.append(_gone(deployment, deployment.ended_as))
    return views


def view_snapshot(checkpoint: Checkpoint, query: PagedQuery[Any] = ALL) -> list[SnapshotView]:
    """Every deployment in short, in the order of their names, including deleted ones."""
    views = []
    for tag in paginate(_tags(checkpoint, include_deleted=True), query):
        deployment, backend = checkpoint.deployments[tag], _living(checkpoint, tag)
        version = deployment.ended_as if backend is None else backend.target
        assert version is not None
        views.append(
            SnapshotView(
                name=tag,
                class_name=version.replica_config.import_path.partition(":")[2],
                version=UNVERSIONED if version.version is None else version.version,
                route=deployment.ended_route if backend is None else _reached(checkpoint, tag).route,
                status=DeploymentStatus.DELETED if backend is None else get_status(checkpoint, backend)[0],
                start_time=deployment.started_at,
                end_time=deployment.ended_at if backend is None else None,
            )
        )
    return views


def _tags(checkpoint: Checkpoint, *, include_deleted: bool) -> list[BackendTag]:
    return [
        tag
        for tag, deployment in checkpoint.deployments.items()
        if _living(checkpoint, tag) is not None or (include_deleted and deployment.ended_as is not None)
    ]


def _living(checkpoint: Checkpoint, tag: BackendTag) -> Backend | None:
    """The backend of an existing deployment; a backend created under the tag of a deleted deployment does not count."""
    return None if checkpoint.living_deployment(tag) is None else checkpoint.backends.get(tag)


def _reached(checkpoint: Checkpoint, tag: BackendTag) -> EndpointConfig:
    """Configuration of a deployment's endpoint."""
    endpoint = checkpoint.endpoints.get(EndpointTag(tag))
    return _NOWHERE if endpoint is None else endpoint.target


def _present(
    checkpoint: Checkpoint, deployment: Deployment, backend: Backend, *, with_replicas: bool
) -> DeploymentView:
    application = checkpoint.applications.get(deployment.application)
    status, message = get_status(checkpoint, backend)
    reached = _reached(checkpoint, backend.backend_tag)
    return DeploymentView(
        name=backend.backend_tag,
        status=status,
        message=message,
        route_prefix=reached.route,
        methods=reached.methods,
        version=backend.target.version,
        code_version=backend.target.code_version,
        backend_config=backend.target.backend_config,
        replica_config=backend.target.replica_config,
        goal_id=backend.goal_id,
        goal_status=get_goal_status(checkpoint, backend.goal_id),
        replicas=view_replicas(checkpoint, backend) if with_replicas else [],
        rollout_replicas=_view_rollout_replicas(checkpoint, backend) if with_replicas else [],
        application=deployment.application,
        is_ingress=application is not None and application.target.ingress == deployment.tag,
        started_at=deployment.started_at,
        endpoint_options=reached.options,
    )


def _view_rollout_replicas(checkpoint: Checkpoint, backend: Backend) -> list[ReplicaView]:
    if backend.backend_tag not in checkpoint.rollouts:
        return []
    tags = (canary_tag(backend.backend_tag), baseline_tag(backend.backend_tag))
    judged = [checkpoint.backends[tag] for tag in tags if tag in checkpoint.backends]
    return [replica for each in judged for replica in view_replicas(checkpoint, each)]


def _gone(deployment: Deployment, version: BackendVersion) -> DeploymentView:
    return DeploymentView(
        name=deployment.tag,
        status=DeploymentStatus.DELETED,
        message="",
        route_prefix=deployment.ended_route,
        methods=[],
        version=version.version,
        code_version=version.code_version,
        backend_config=version.backend_config,
        replica_config=version.replica_config,
        goal_id=deployment.ended_goal_id,
        goal_status=GoalStatus.SUCCEEDED,
        replicas=[],
        application=deployment.application,
        started_at=deployment.started_at,
        ended_at=deployment.ended_at,
    )


def view_endpoints(checkpoint: Checkpoint, query: PagedQuery[Any] = ALL) -> list[EndpointView]:
    """All endpoints in the order of their tags."""
    return [_endpoint(checkpoint.endpoints[tag]) for tag in paginate(checkpoint.endpoints.keys(), query)]


def _endpoint(endpoint: EndpointRecord) -> EndpointView:
    target = endpoint.target
    return EndpointView(
        endpoint_tag=endpoint.endpoint_tag,
        route=target.route,
        methods=target.methods,
        traffic={str(tag): weight for tag, weight in sorted(target.traffic.items())},
        shadows={str(tag): proportion for tag, proportion in sorted(target.shadows.items())},
        options=target.options,
    )


def view_captures(checkpoint: Checkpoint, query: PagedQuery[Any] = ALL) -> list[CaptureView]:
    """What is captured, in the order of the endpoints' tags."""
    found = (checkpoint.captures[tag] for tag in paginate(checkpoint.captures.keys(), query))
    return [
        CaptureView(endpoint_tag=one.endpoint_tag, capture=one.config, goal_id=one.goal_id) for one in found
    ]
