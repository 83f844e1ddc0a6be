"""Ray Serve's classes of states, and Muster's views in them: of replicas, deployments, applications and proxies.

Apart from what deploys and from `muster.schema`, which has them for users: the command line's ``status`` needs
neither handles nor pydantic.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from serve_common.api.views import (
    HEALTH_CHECKS_FAILED,
    ApplicationView,
    DeploymentView,
    GoalStatus,
    StatusView,
)
from serve_common.api.views import DeploymentStatus as Health


class ProxyStatus(str, Enum):
    """State of a proxy."""

    STARTING = "STARTING"
    HEALTHY = "HEALTHY"
    UNHEALTHY = "UNHEALTHY"
    DRAINING = "DRAINING"
    DRAINED = "DRAINED"

    def to_numeric(self) -> int:
        """The state as Ray Serve's metrics have it: 1 to 5, in the order above."""
        return list(ProxyStatus).index(self) + 1


class ApplicationStatus(str, Enum):
    """State of an application."""

    NOT_STARTED = "NOT_STARTED"
    DEPLOYING = "DEPLOYING"
    DEPLOY_FAILED = "DEPLOY_FAILED"
    RUNNING = "RUNNING"
    UNHEALTHY = "UNHEALTHY"
    DELETING = "DELETING"

    def to_numeric(self) -> int:
        """The state as Ray Serve's metrics have it, from 1 for DEPLOY_FAILED to 6 for RUNNING."""
        order = ("DEPLOY_FAILED", "UNHEALTHY", "NOT_STARTED", "DELETING", "DEPLOYING", "RUNNING")
        return order.index(self.value) + 1


class DeploymentStatus(str, Enum):
    """State of a deployment."""

    UPDATING = "UPDATING"
    HEALTHY = "HEALTHY"
    UNHEALTHY = "UNHEALTHY"
    DEPLOY_FAILED = "DEPLOY_FAILED"
    UPSCALING = "UPSCALING"
    DOWNSCALING = "DOWNSCALING"

    def to_numeric(self) -> int:
        """The state as Ray Serve's metrics have it, from 1 for DEPLOY_FAILED to 6 for HEALTHY."""
        order = ("DEPLOY_FAILED", "UNHEALTHY", "UPDATING", "UPSCALING", "DOWNSCALING", "HEALTHY")
        return order.index(self.value) + 1


class DeploymentStatusTrigger(str, Enum):
    """What brought a deployment into its state."""

    UNSPECIFIED = "UNSPECIFIED"
    CONFIG_UPDATE_STARTED = "CONFIG_UPDATE_STARTED"
    CONFIG_UPDATE_COMPLETED = "CONFIG_UPDATE_COMPLETED"
    UPSCALE_COMPLETED = "UPSCALE_COMPLETED"
    DOWNSCALE_COMPLETED = "DOWNSCALE_COMPLETED"
    AUTOSCALING = "AUTOSCALING"
    REPLICA_STARTUP_FAILED = "REPLICA_STARTUP_FAILED"
    DEPLOYMENT_ACTOR_FAILED = "DEPLOYMENT_ACTOR_FAILED"
    HEALTH_CHECK_FAILED = "HEALTH_CHECK_FAILED"
    INTERNAL_ERROR = "INTERNAL_ERROR"
    DELETING = "DELETING"


class ReplicaState(str, Enum):
    """State of a replica."""

    STARTING = "STARTING"
    UPDATING = "UPDATING"
    RECOVERING = "RECOVERING"
    RUNNING = "RUNNING"
    STOPPING = "STOPPING"
    STOPPED = "STOPPED"
    PENDING_MIGRATION = "PENDING_MIGRATION"


@dataclass
class DeploymentStatusOverview:
    """State of one deployment."""

    status: DeploymentStatus
    """Its state."""
    status_trigger: DeploymentStatusTrigger
    """What brought it there."""
    replica_states: dict[str, int]
    """Number of its replicas by state."""
    message: str
    """Details, for people."""


@dataclass
class ApplicationStatusOverview:
    """State of one application."""

    status: ApplicationStatus
    """Its state."""
    message: str
    """Details, for people."""
    last_deployed_time_s: float
    """When it was last deployed, in seconds since 1970."""
    deployments: dict[str, DeploymentStatusOverview]
    """Its deployments by name."""


@dataclass(eq=True)
class ServeStatus:
    """State of everything that is served."""

    proxies: dict[str, ProxyStatus] = field(default_factory=dict)
    """Proxies by id."""
    applications: dict[str, ApplicationStatusOverview] = field(default_factory=dict)
    """Applications by name."""
    target_capacity: float | None = None
    """Always None."""


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
        # After a shutdown Ray Serve has none.
        proxies={
            proxy.proxy_id: _PROXY_STATUSES.get(proxy.status, ProxyStatus.UNHEALTHY)
            for proxy in ([] if status.is_shut_down else status.proxies)
        },
        applications={app.name: _application(app, deployments) for app in by_deploy(applications)},
    )


def by_deploy(applications: Sequence[ApplicationView]) -> list[ApplicationView]:
    """In the order of their last deploys, as Ray Serve, which has that of their first ones, mostly shows them."""
    return sorted(applications, key=lambda app: app.deployed_at)


def _application(app: ApplicationView, deployments: dict[str, DeploymentView]) -> ApplicationStatusOverview:
    parts = [deployments[name] for name in app.deployments if name in deployments]
    shown = {part.name.partition("/")[2]: _deployment(part) for part in parts}
    failed = [name for name, each in shown.items() if each.status is DeploymentStatus.DEPLOY_FAILED]
    return ApplicationStatusOverview(
        status=_application_status(app, shown.values()),
        message=_format_build_error(app) or format_failed(failed) or app.message,
        last_deployed_time_s=app.deployed_at,
        deployments=shown,
    )


def _format_build_error(app: ApplicationView) -> str:
    """Ray Serve's words, which programs look for, for an application that could not be built; "" for none."""
    return f"Deploying app '{app.name}' failed with exception:\n{app.build_error}" if app.build_error else ""


def format_failed(deployments: Sequence[str]) -> str:
    """Ray Serve's words, which programs look for, for deployments that could not be deployed; "" for none."""
    return f"Failed to update the deployments {list(deployments)}." if deployments else ""


def _application_status(
    app: ApplicationView, deployments: Iterable[DeploymentStatusOverview]
) -> ApplicationStatus:
    if app.status in (Health.DELETING, Health.DELETED):
        return ApplicationStatus.DELETING
    if app.build_error:
        return ApplicationStatus.DEPLOY_FAILED
    if app.goal_status is GoalStatus.PENDING:
        return ApplicationStatus.DEPLOYING
    if app.goal_status is GoalStatus.FAILED:
        return ApplicationStatus.DEPLOY_FAILED
    if app.status is Health.UNHEALTHY or any(
        each.status is DeploymentStatus.UNHEALTHY for each in deployments
    ):
        return ApplicationStatus.UNHEALTHY
    return ApplicationStatus.RUNNING


def _deployment(view: DeploymentView) -> DeploymentStatusOverview:
    state, trigger = _deployment_status(view)
    states = Counter(
        _REPLICA_STATES.get(replica.state, ReplicaState.STARTING).value for replica in view.replicas
    )
    message = view.message
    if state is DeploymentStatus.DEPLOY_FAILED:
        starts = view.backend_config.max_constructor_retry_count
        message = _FAILED_TO_START.format(starts=starts, error=message)
    return DeploymentStatusOverview(
        status=state, status_trigger=trigger, replica_states=dict(states), message=message
    )


_FAILED_TO_START: Final = (
    "The deployment failed to start {starts} times in a row. This may be due to a problem with its constructor or "
    "initial health check failing. See controller logs for details. Error:\n{error}"
)
"""Ray Serve's words, which programs look for."""


def _replaces_a_failed_replica(view: DeploymentView) -> bool:
    """True while a replica stops because its health checks failed.

    Why: a spare one takes its place within milliseconds, and who watches as for Ray Serve, which starts one, would see
    nothing of it.
    """
    return any(replica.message == HEALTH_CHECKS_FAILED for replica in view.replicas)


def _deployment_status(view: DeploymentView) -> tuple[DeploymentStatus, DeploymentStatusTrigger]:
    trigger = DeploymentStatusTrigger
    if view.status in (Health.DELETING, Health.DELETED):
        return DeploymentStatus.UPDATING, trigger.DELETING
    if view.goal_status is GoalStatus.FAILED:
        return DeploymentStatus.DEPLOY_FAILED, trigger.REPLICA_STARTUP_FAILED
    if view.status is Health.UPDATING or view.goal_status is GoalStatus.PENDING:
        return DeploymentStatus.UPDATING, trigger.CONFIG_UPDATE_STARTED
    if view.status is Health.UNHEALTHY or _replaces_a_failed_replica(view):
        return DeploymentStatus.UNHEALTHY, trigger.HEALTH_CHECK_FAILED
    serving = sum(replica.state == "running" for replica in view.replicas)
    if view.backend_config.autoscaling_config is not None and serving != view.backend_config.num_replicas:
        growing = serving < view.backend_config.num_replicas
        return DeploymentStatus.UPSCALING if growing else DeploymentStatus.DOWNSCALING, trigger.AUTOSCALING
    return DeploymentStatus.HEALTHY, trigger.CONFIG_UPDATE_COMPLETED
