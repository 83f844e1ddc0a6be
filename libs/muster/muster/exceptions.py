"""Exceptions with the names of ``ray.serve.exceptions``.

Why aliases: there is one hierarchy of errors, `serve_common.errors`, and a program that catches Ray Serve's names
catches the same objects.
"""

from __future__ import annotations

from muster.handles.options import BackPressureError, DeploymentUnavailableError, RequestCancelledError
from serve_common.errors import ReplicaDied, ServeError

RayServeException = ServeError
"""Base of everything that Muster raises."""
ReplicaUnavailableError = ReplicaDied
"""The replica that had the request is gone."""

__all__ = [
    "BackPressureError",
    "DeploymentUnavailableError",
    "RayServeException",
    "ReplicaUnavailableError",
    "RequestCancelledError",
]
