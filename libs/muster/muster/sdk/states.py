"""Muster's views by Ray Serve's names: states of replicas, deployments, applications and proxies.

Apart from what deploys, so that the command line's ``status`` imports no handles.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from muster.schema import (
    ApplicationStatus,
    ApplicationStatusOverview,
    DeploymentStatus,
    DeploymentStatusOverview,
    DeploymentStatusTrigger,
    ProxyStatus,
    ReplicaState,
    ServeStatus,
)
from serve_common.api.views import ApplicationView, DeploymentView, GoalStatus, StatusView
from serve_common.api.views import DeploymentStatus as Health

_REPLICA_STATES: Final = {
    "should_start": ReplicaState.STARTING,
    "starting": ReplicaState.STARTING,
    "running": ReplicaState.RUNNING,
    "updating": ReplicaState.UPDATING,
    "unhealthy": ReplicaState.RUNNING,
    "should_stop": ReplicaState.STOPPING,
    "stopping": ReplicaState.STOPPING,
}


_PROXY_STATUSES: Final = {"live": ProxyStatus.HEALTHY, "leaving": ProxyStatus.DRAINING}
"""Status of a proxy by Muster's name for it; a lost one is unhealthy."""


def view_status(status: StatusView, applications: Sequence[ApplicationView]) -> ServeStatus:
    """The state of everything, in Ray Serve's classes."""
    deployments = {each.name: each for each in status.deployments}
    return ServeStatus(
        proxies={
            proxy.proxy_id: _PROXY_STATUSES.get(proxy.status, ProxyStatus.UNHEALTHY)
            for proxy in status.proxies
        },
        applications={app.name: _application(app, deployments) for app in applications},
    )


def _application(app: ApplicationView, deployments: dict[str, DeploymentView]) -> ApplicationStatusOverview:
    parts = [deployments[name] for name in app.deployments if name in deployments]
    shown = {part.name.partition("/")[2]: _deployment(part) for part in parts}
    failed = [name for name, each in shown.items() if each.status is DeploymentStatus.DEPLOY_FAILED]
    return ApplicationStatusOverview(
        status=_application_status(app),
        message=f"{format_failed(failed)}{app.message}",
        last_deployed_time_s=app.deployed_at,
        deployments=shown,
    )


def format_failed(deployments: Sequence[str]) -> str:
    """Ray Serve's words, which programs look for, for deployments that could not be deployed; "" for none."""
    return f"Failed to update the deployments {list(deployments)}. " if deployments else ""


def _application_status(app: ApplicationView) -> ApplicationStatus:
    if app.status in (Health.DELETING, Health.DELETED):
        return ApplicationStatus.DELETING
    if app.goal_status is GoalStatus.PENDING:
        return ApplicationStatus.DEPLOYING
    if app.goal_status is GoalStatus.FAILED:
        return ApplicationStatus.DEPLOY_FAILED
    if app.status is Health.UNHEALTHY:
        return ApplicationStatus.UNHEALTHY
    return ApplicationStatus.RUNNING


def _deployment(view: DeploymentView) -> DeploymentStatusOverview:
    state, trigger = _deployment_status(view)
    states = Counter(
        _REPLICA_STATES.get(replica.state, ReplicaState.STARTING).value for replica in view.replicas
    )
    return DeploymentStatusOverview(
        status=state, status_trigger=trigger, replica_states=dict(states), message=view.message
    )


def _deployment_status(view: DeploymentView) -> tuple[DeploymentStatus, DeploymentStatusTrigger]:
    trigger = DeploymentStatusTrigger
    if view.status in (Health.DELETING, Health.DELETED):
        return DeploymentStatus.UPDATING, trigger.DELETING
    if view.goal_status is GoalStatus.FAILED:
        return DeploymentStatus.DEPLOY_FAILED, trigger.REPLICA_STARTUP_FAILED
    if view.status is Health.UPDATING or view.goal_status is GoalStatus.PENDING:
        return DeploymentStatus.UPDATING, trigger.CONFIG_UPDATE_STARTED
    if view.status is Health.UNHEALTHY:
        return DeploymentStatus.UNHEALTHY, trigger.HEALTH_CHECK_FAILED
    serving = sum(replica.state == "running" for replica in view.replicas)
    if view.backend_config.autoscaling_config is not None and serving != view.backend_config.num_replicas:
        growing = serving < view.backend_config.num_replicas
        return DeploymentStatus.UPSCALING if growing else DeploymentStatus.DOWNSCALING, trigger.AUTOSCALING
    return DeploymentStatus.HEALTHY, trigger.CONFIG_UPDATE_COMPLETED
