"""Commands: turned into a new goal state, or refused.

Why pure: the reply to a command is a promise, and a promise must depend on nothing but the checkpoint it was made
on. The shell records the changes before it replies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from serve_common.api import commands as c
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.commands import (
    applications,
    captures,
    deployments,
    endpoints,
    operations,
    restoring,
    rollouts,
)
from serve_controller.core.commands.changes import Accepted

DECISIONS: Final[Mapping[type[c.Command[Any]], Callable[[Checkpoint, Any, float], Accepted]]] = {
    c.Deploy: deployments.deploy,
    c.DeleteDeployment: deployments.delete_deployment,
    c.DeployApplication: applications.deploy_application,
    c.RecordBuildFailure: applications.record_build_failure,
    c.DeleteApplication: applications.delete_application,
    c.CreateBackend: deployments.create_backend,
    c.DeleteBackend: deployments.delete_backend,
    c.UpdateBackendConfig: deployments.update_backend_config,
    c.Scale: operations.scale,
    c.PauseAutoscaling: operations.pause_autoscaling,
    c.ResumeAutoscaling: operations.resume_autoscaling,
    c.CreateEndpoint: endpoints.create_endpoint,
    c.DeleteEndpoint: endpoints.delete_endpoint,
    c.SetTraffic: endpoints.set_traffic,
    c.ShadowTraffic: endpoints.shadow_traffic,
    c.SetEndpointOptions: endpoints.set_endpoint_options,
    c.SetCapture: captures.set_capture,
    c.Rollback: deployments.rollback,
    c.StartRollout: rollouts.start_rollout,
    c.ControlRollout: rollouts.control_rollout,
    c.SetHttpOptions: endpoints.set_http_options,
    c.DrainHost: operations.drain_host,
    c.UndrainHost: operations.undrain_host,
    c.Shutdown: operations.shutdown,
    c.Restore: restoring.refuse_plan,
    c.UploadCode: operations.refuse_upload,
    restoring.RestoreFrom: restoring.restore,
}
"""What decides each command. A decision takes the checkpoint, the command and the time in seconds since 1970."""


def decide(checkpoint: Checkpoint, command: c.Command[Any], now: float) -> Accepted:
    """Turn a command into a new goal state.

    Raises a `CommandRefused` (BadField, NotFound, Conflict, LimitReached) and changes nothing then. Every command is
    idempotent: the same command again is accepted again.
    """
    return DECISIONS[type(command)](checkpoint, command, now)
