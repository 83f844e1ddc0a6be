"""Applications as callers see them.

Why the status is the worst of the deployments': an application serves only when all of its parts do.
"""

from __future__ import annotations

from typing import Final

from serve_common.names import EndpointTag
from serve_common.wires.queries import PagedQuery
from serve_common.wires.views import ApplicationView, DeploymentStatus, GoalStatus
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.objects import Application
from serve_controller.core.views.backends import status_of
from serve_controller.core.views.paging import ALL, page_of

WORSE: Final = (
    DeploymentStatus.HEALTHY,
    DeploymentStatus.UPDATING,
    DeploymentStatus.UNHEALTHY,
    DeploymentStatus.DELETING,
    DeploymentStatus.DELETED,
)
"""Each is worse than those before it."""
NUM_REASONS_MAX: Final = 3


def view_applications(checkpoint: Checkpoint, query: PagedQuery = ALL) -> list[ApplicationView]:
    """All applications in the order of their names."""
    return [
        _application(checkpoint, checkpoint.applications[name])
        for name in page_of(checkpoint.applications.keys(), query)
    ]


def _application(checkpoint: Checkpoint, application: Application) -> ApplicationView:
    goal = checkpoint.goals.get(application.goal_id)
    goal_status = GoalStatus.SUCCEEDED if goal is None else goal.status
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
    )


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
        status, message = status_of(checkpoint, backend)
        worst = max(worst, status, key=WORSE.index)
        if status is not DeploymentStatus.HEALTHY and message:
            reasons.append(f"{tag}: {message}")
    more = len(reasons) - NUM_REASONS_MAX
    return worst, "; ".join([*reasons[:NUM_REASONS_MAX], *([f"and {more} more"] if more > 0 else [])])
