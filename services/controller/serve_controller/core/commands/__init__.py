"""Commands: turned into a new goal state, or refused.

Why pure: the reply to a command is a promise, and a promise must depend on nothing but the checkpoint it was made
on. The shell records the changes before it replies.
"""

from __future__ import annotations

from serve_common.api.commands import (
    AnyCommand,
    CreateBackend,
    CreateEndpoint,
    DeleteApplication,
    DeleteBackend,
    DeleteDeployment,
    DeleteEndpoint,
    Deploy,
    DeployApplication,
    DrainHost,
    PauseAutoscaling,
    Restore,
    ResumeAutoscaling,
    Rollback,
    Scale,
    SetEndpointOptions,
    SetHttpOptions,
    SetTraffic,
    ShadowTraffic,
    Shutdown,
    UndrainHost,
    UpdateBackendConfig,
)
from serve_common.errors import BadField
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.commands.accepted import Accepted
from serve_controller.core.commands.applications import delete_application, deploy_application
from serve_controller.core.commands.deployments import (
    create_backend,
    delete_backend,
    delete_deployment,
    deploy,
    rollback,
    update_backend_config,
)
from serve_controller.core.commands.endpoints import (
    create_endpoint,
    delete_endpoint,
    set_endpoint_options,
    set_http_options,
    set_traffic,
    shadow_traffic,
)
from serve_controller.core.commands.operations import (
    drain_host,
    pause_autoscaling,
    resume_autoscaling,
    scale,
    shutdown,
    undrain_host,
)
from serve_controller.core.commands.restoring import RestoreFrom, restore

__all__ = ["Accepted", "decide"]


def decide(checkpoint: Checkpoint, command: AnyCommand | RestoreFrom, now: float) -> Accepted:  # noqa: C901, PLR0912 - a table
    """Turn a command into a new goal state.

    Raises a `CommandRefused` (BadField, NotFound, Conflict, LimitReached) and changes nothing then. Every command is
    idempotent: the same command again is accepted again.
    """
    match command:
        case Deploy():
            return deploy(checkpoint, command, now)
        case DeleteDeployment():
            return delete_deployment(checkpoint, command, now)
        case DeployApplication():
            return deploy_application(checkpoint, command, now)
        case DeleteApplication():
            return delete_application(checkpoint, command, now)
        case CreateBackend():
            return create_backend(checkpoint, command, now)
        case DeleteBackend():
            return delete_backend(checkpoint, command, now)
        case UpdateBackendConfig():
            return update_backend_config(checkpoint, command, now)
        case Scale():
            return scale(checkpoint, command, now)
        case PauseAutoscaling():
            return pause_autoscaling(checkpoint, command)
        case ResumeAutoscaling():
            return resume_autoscaling(checkpoint, command)
        case CreateEndpoint():
            return create_endpoint(checkpoint, command, now)
        case DeleteEndpoint():
            return delete_endpoint(checkpoint, command, now)
        case SetTraffic():
            return set_traffic(checkpoint, command, now)
        case ShadowTraffic():
            return shadow_traffic(checkpoint, command, now)
        case SetEndpointOptions():
            return set_endpoint_options(checkpoint, command, now)
        case Rollback():
            return rollback(checkpoint, command, now)
        case SetHttpOptions():
            return set_http_options(checkpoint, command, now)
        case DrainHost():
            return drain_host(checkpoint, command, now)
        case UndrainHost():
            return undrain_host(checkpoint, command, now)
        case Shutdown():
            return shutdown(checkpoint, now)
        case RestoreFrom():
            return restore(checkpoint, command, now)
        case Restore():
            raise BadField("verb", "a restore has no plan; without confirm its file is checked")
