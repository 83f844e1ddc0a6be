"""Deployments as callers see them: a backend and an endpoint of one tag, also when both are gone.

Why deleted ones are remembered: who asks what became of a deployment must be told when it ended, and as what.
"""

from __future__ import annotations

from typing import Final

from serve_common.errors import NotFound
from serve_common.names import BackendTag, EndpointTag, deployment_tag
from serve_common.wires.queries import PagedQuery
from serve_common.wires.views import DeploymentStatus, DeploymentView, GoalStatus, SnapshotView
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.objects import Backend, BackendVersion, Deployment, EndpointConfig
from serve_controller.core.views.backends import goal_status_of, status_of, view_replicas
from serve_controller.core.views.paging import ALL, page_of

UNVERSIONED: Final = "Unversioned"
_NOWHERE: Final = EndpointConfig(route=None, methods=[], traffic={})


def view_deployment(checkpoint: Checkpoint, name: str) -> DeploymentView:
    """One deployment by the name that its user gave. Raises `NotFound` (also when it is gone) or `BadField`."""
    tag = deployment_tag(name)
    deployment, backend = checkpoint.deployments.get(tag), _living(checkpoint, tag)
    if deployment is None or backend is None:
        raise NotFound(f"name: there is no deployment {tag!r}")
    return _present(checkpoint, deployment, backend, with_replicas=True)


def view_deployments(
    checkpoint: Checkpoint,
    query: PagedQuery = ALL,
    *,
    include_deleted: bool = False,
    with_replicas: bool = True,
) -> list[DeploymentView]:
    """All deployments in the order of their names."""
    views = []
    for tag in page_of(_tags(checkpoint, include_deleted=include_deleted), query):
        deployment, backend = checkpoint.deployments[tag], _living(checkpoint, tag)
        if backend is not None:
            views.append(_present(checkpoint, deployment, backend, with_replicas=with_replicas))
        elif deployment.ended_as is not None:
            views.append(_gone(deployment, deployment.ended_as))
    return views


def view_snapshot(checkpoint: Checkpoint, query: PagedQuery = ALL) -> list[SnapshotView]:
    """Every deployment in short, in the order of their names, also those that are gone."""
    views = []
    for tag in page_of(_tags(checkpoint, include_deleted=True), query):
        deployment, backend = checkpoint.deployments[tag], _living(checkpoint, tag)
        version = deployment.ended_as if backend is None else backend.target
        assert version is not None
        views.append(
            SnapshotView(
                name=tag,
                class_name=version.replica_config.import_path.partition(":")[2],
                version=UNVERSIONED if version.version is None else version.version,
                route=deployment.ended_route if backend is None else _reached(checkpoint, tag).route,
                status=DeploymentStatus.DELETED if backend is None else status_of(checkpoint, backend)[0],
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
    """The backend of a deployment that is there; one that was made under the tag of a gone one is no deployment."""
    deployment = checkpoint.deployments.get(tag)
    return None if deployment is None or deployment.ended_at is not None else checkpoint.backends.get(tag)


def _reached(checkpoint: Checkpoint, tag: BackendTag) -> EndpointConfig:
    """What a deployment's endpoint is."""
    endpoint = checkpoint.endpoints.get(EndpointTag(tag))
    return _NOWHERE if endpoint is None else endpoint.target


def _present(
    checkpoint: Checkpoint, deployment: Deployment, backend: Backend, *, with_replicas: bool
) -> DeploymentView:
    application = checkpoint.applications.get(deployment.application)
    status, message = status_of(checkpoint, backend)
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
        goal_status=goal_status_of(checkpoint, backend),
        replicas=view_replicas(checkpoint, backend) if with_replicas else [],
        application=deployment.application,
        is_ingress=application is not None and application.target.ingress == deployment.tag,
        started_at=deployment.started_at,
        endpoint_options=reached.options,
    )


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
