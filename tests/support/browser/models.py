"""Deploys what the tests of the console look at, in one request and without a process for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from serve_common.api.commands import DeleteDeployment, Deploy
from serve_common.api.queries import WaitForGoal
from serve_common.api.views import GoalStatus, GoalView
from serve_common.config.backend import BackendConfig, RayActorOptions, ReplicaConfig
from serve_common.names import GoalId
from tests.support.paths import APPS
from tests.support.stacks.embedded_stack import EmbeddedStack

_DONE_WITHIN_S = 90.0
_SLICE_S = 4.0


def deploy(
    stack: EmbeddedStack,
    name: str,
    model: str = "Steady",
    *,
    version: str | None = None,
    replicas: int = 1,
    ends: GoalStatus = GoalStatus.SUCCEEDED,
    backend: BackendConfig | None = None,
    app_dir: Path = APPS / "browser_app",
    **arguments: Any,
) -> GoalView:
    """Deploy a model of ``app_dir`` at the route of its name; how it ended, which must be as ``ends`` says."""
    command = Deploy(
        name=name,
        replica_config=ReplicaConfig(
            import_path=f"shown_models:{model}",
            app_dir=str(app_dir),
            init_kwargs=arguments,
            ray_actor_options=RayActorOptions(num_cpus=0.05),
        ),
        backend_config=backend
        or BackendConfig(num_replicas=replicas, max_constructor_retry_count=1, graceful_shutdown_timeout_s=1),
        route_prefix=f"/{name.rpartition('/')[2]}",
        version=version,
    )
    goal_id = stack.request(command).goal_id
    assert goal_id is not None
    view = wait_for_goal(stack, goal_id)
    assert view.status is ends, view
    return view


def delete(stack: EmbeddedStack, *names: str) -> None:
    """Delete deployments, and wait until nothing of them is left."""
    for goal_id in [stack.request(DeleteDeployment(name=name)).goal_id for name in names]:
        if goal_id is not None:
            wait_for_goal(stack, goal_id)


def wait_for_goal(stack: EmbeddedStack, goal_id: GoalId) -> GoalView:
    """How a goal ended, or after a long while how it stands."""
    view = stack.request(WaitForGoal(goal_id=goal_id, timeout_s=_SLICE_S))
    for _ in range(int(_DONE_WITHIN_S / _SLICE_S)):
        if view.status is not GoalStatus.PENDING:
            break
        view = stack.request(WaitForGoal(goal_id=goal_id, timeout_s=_SLICE_S))
    return view
