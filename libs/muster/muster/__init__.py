"""The user API of Muster: ``import muster as serve`` is the line that Ray Serve's users change.

Why everything is imported lazily: every replica and the command line run ``import muster``, and it must cost nothing
there.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from muster import metrics as metrics
    from muster.asgi import ingress
    from muster.autoscaling_context import AutoscalingContext
    from muster.batching import BatchCancelled, WrongBatchResult, batch
    from muster.context import (
        NotInReplica,
        ReplicaContext,
        RequestContext,
        get_batch_request_contexts,
        get_multiplexed_model_id,
        get_replica_context,
        get_request_context,
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

__all__ = [
    "AutoscalingContext",
    "BackPressureError",
    "BatchCancelled",
    "DeploymentHandle",
    "DeploymentResponse",
    "DeploymentResponseGenerator",
    "NotInReplica",
    "ReplicaContext",
    "RequestCancelledError",
    "RequestContext",
    "WrongBatchResult",
    "batch",
    "connect",
    "disconnect",
    "get_app_handle",
    "get_batch_request_contexts",
    "get_deployment_handle",
    "get_multiplexed_model_id",
    "get_replica_context",
    "get_request_context",
    "ingress",
    "multiplexed",
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
    "muster.multiplexing": ("multiplexed",),
}
"""Public names by module. No module of this package may have one of these names: its import would shadow it."""
_MODULES: Final = ("metrics",)
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
