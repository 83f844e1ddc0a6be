"""Exceptions with the names of ``ray.serve.exceptions``.

Why aliases: there is one hierarchy of errors, `serve_common.errors`, and a program that catches Ray Serve's names
catches the same objects.
"""

from __future__ import annotations

import sys
from typing import NoReturn

from muster.handles.options import RequestCancelledError
from muster.sdk.absent import NotInMuster
from serve_common.dispatch.errors import BackPressureError, DeploymentUnavailableError
from serve_common.errors import ReplicaDied, ServeError

RayServeException = ServeError
"""Base of everything that Muster raises."""
ReplicaUnavailableError = ReplicaDied
"""The replica that had the request is gone."""


if (_ray := sys.modules.get("ray.exceptions")) is not None:
    # A program that has imported Ray may ask whether this class is below Ray's, as it is in Ray Serve.
    RequestCancelledError.__bases__ = (*RequestCancelledError.__bases__, _ray.TaskCancelledError)


class gRPCStatusError(ServeError):  # noqa: N801 - Ray Serve's name
    """Never raised: there is no gRPC ingress. It may be caught; making one raises `NotInMuster`."""

    def __init__(self, *_: object, **__: object) -> NoReturn:
        raise NotInMuster("gRPCStatusError", "there is no gRPC ingress; raise an exception of your own")


__all__ = [
    "BackPressureError",
    "DeploymentUnavailableError",
    "RayServeException",
    "ReplicaUnavailableError",
    "RequestCancelledError",
    "gRPCStatusError",
]
