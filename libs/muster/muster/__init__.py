"""Muster for those who use it: ``import muster as serve`` is the line that Ray Serve's users change.

Why everything is imported when it is first used: ``import muster`` is in every replica and in the command line, and
must cost nothing there.
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
"""No module of this package may have the name of something in here: imported, it would take its place."""
_MODULES: Final = ("metrics",)
"""To be used as ``serve.metrics.Counter``, as in Ray Serve."""
_HOME_OF: Final = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")  # which puts it here
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'muster' has no attribute {name!r}")
    found = getattr(importlib.import_module(home), name)
    globals()[name] = found  # from now on it costs nothing
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
