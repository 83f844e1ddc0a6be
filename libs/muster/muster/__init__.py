"""The user API of Muster: ``import muster as serve`` is the line that Ray Serve's users change.

Why everything is imported lazily: every replica and the command line run ``import muster``, and it must cost nothing
there.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from muster import config as config
    from muster import context as context
    from muster import exceptions as exceptions
    from muster import handle as handle
    from muster import metrics as metrics
    from muster import schema as schema
    from muster.asgi import ingress
    from muster.autoscaling_context import AutoscalingContext
    from muster.batching import BatchCancelled, WrongBatchResult, batch
    from muster.config import ControllerOptions, HTTPOptions
    from muster.context import (
        NotInReplica,
        ReplicaContext,
        RequestContext,
        get_batch_request_contexts,
        get_multiplexed_model_id,
        get_replica_context,
        get_request_context,
        get_trace_context,
    )
    from muster.handles import (
        BackPressureError,
        DeploymentHandle,
        DeploymentResponse,
        DeploymentResponseGenerator,
        RequestCancelledError,
        connect,
        disconnect,
        get_app_handle,
        get_deployment_handle,
    )
    from muster.multiplexing import multiplexed
    from muster.schema import TracingConfig
    from muster.sdk.absent import get_deployment_actor, get_deployment_actor_context
    from muster.sdk.deployments import Application, Deployment, deployment
    from muster.sdk.run import (
        RunTarget,
        _run,
        _run_many,
        delete,
        run,
        run_many,
        shutdown,
        shutdown_async,
        start,
        status,
    )

__all__ = [
    "Application",
    "AutoscalingContext",
    "BackPressureError",
    "BatchCancelled",
    "ControllerOptions",
    "Deployment",
    "DeploymentHandle",
    "DeploymentResponse",
    "DeploymentResponseGenerator",
    "HTTPOptions",
    "NotInReplica",
    "ReplicaContext",
    "RequestCancelledError",
    "RequestContext",
    "RunTarget",
    "TracingConfig",
    "WrongBatchResult",
    "_run",
    "_run_many",
    "batch",
    "connect",
    "delete",
    "deployment",
    "disconnect",
    "get_app_handle",
    "get_batch_request_contexts",
    "get_deployment_actor",
    "get_deployment_actor_context",
    "get_deployment_handle",
    "get_multiplexed_model_id",
    "get_replica_context",
    "get_request_context",
    "get_trace_context",
    "ingress",
    "multiplexed",
    "run",
    "run_many",
    "shutdown",
    "shutdown_async",
    "start",
    "status",
]

_HOMES: Final = {
    "muster.asgi": ("ingress",),
    "muster.autoscaling_context": ("AutoscalingContext",),
    "muster.batching": ("BatchCancelled", "WrongBatchResult", "batch"),
    "muster.context": (
        "NotInReplica",
        "ReplicaContext",
        "RequestContext",
        "get_batch_request_contexts",
        "get_multiplexed_model_id",
        "get_replica_context",
        "get_request_context",
        "get_trace_context",
    ),
    "muster.handles": (
        "BackPressureError",
        "DeploymentHandle",
        "DeploymentResponse",
        "DeploymentResponseGenerator",
        "RequestCancelledError",
        "connect",
        "disconnect",
        "get_app_handle",
        "get_deployment_handle",
    ),
    "muster.config": ("ControllerOptions", "HTTPOptions"),
    "muster.multiplexing": ("multiplexed",),
    "muster.schema": ("TracingConfig",),
    "muster.sdk.absent": ("get_deployment_actor", "get_deployment_actor_context"),
    "muster.sdk.deployments": ("Application", "Deployment", "deployment"),
    "muster.sdk.run": (
        "RunTarget",
        "_run",
        "_run_many",
        "delete",
        "run",
        "run_many",
        "shutdown",
        "shutdown_async",
        "start",
        "status",
    ),
}
"""Public names by module. No module of this package may have one of these names: its import would shadow it."""
_MODULES: Final = ("config", "context", "exceptions", "handle", "metrics", "schema")
"""Modules that are used as attributes, as in ``serve.metrics.Counter`` of Ray Serve."""
_HOME_OF: Final = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")  # sets the attribute of this module
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'muster' has no attribute {name!r}")
    found = getattr(importlib.import_module(home), name)
    globals()[name] = found  # later accesses skip __getattr__
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
