"""Deployment handles: call deployments from Python, from other replicas and from any authorized program.

Why not through a proxy: a handle routes by itself, with the proxies' own router, so a call costs one hop and keeps the
caller's deadline, its cancellation and the exception as it was raised. Names and behaviour are Ray Serve's.
"""

from __future__ import annotations

from muster.handles.handle import DeploymentHandle, get_app_handle, get_deployment_handle
from muster.handles.options import RequestCancelledError
from muster.handles.responses import (
    DeploymentBroadcastResponse,
    DeploymentResponse,
    DeploymentResponseGenerator,
)
from muster.handles.runtime import connect, disconnect
from serve_common.dispatch.errors import BackPressureError

__all__ = [
    "BackPressureError",
    "DeploymentBroadcastResponse",
    "DeploymentHandle",
    "DeploymentResponse",
    "DeploymentResponseGenerator",
    "RequestCancelledError",
    "connect",
    "disconnect",
    "get_app_handle",
    "get_deployment_handle",
]
