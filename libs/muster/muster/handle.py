"""Handles and responses, with the names of ``ray.serve.handle``."""

from __future__ import annotations

from muster.handles.handle import DeploymentHandle, DeploymentResponse, DeploymentResponseGenerator

__all__ = ["DeploymentHandle", "DeploymentResponse", "DeploymentResponseGenerator"]
