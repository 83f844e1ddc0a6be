"""Handles and responses, with the names of ``ray.serve.handle``."""

from __future__ import annotations

from muster.handles.handle import DeploymentHandle
from muster.handles.responses import (
    DeploymentBroadcastResponse,
    DeploymentResponse,
    DeploymentResponseGenerator,
)

__all__ = [
    "DeploymentBroadcastResponse",
    "DeploymentHandle",
    "DeploymentResponse",
    "DeploymentResponseGenerator",
]
