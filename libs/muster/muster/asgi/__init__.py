"""Web applications in replicas: FastAPI, Starlette or any other ASGI application as the face of a deployment.

Why a package of its own name: ``muster.ingress`` is the decorator that users write, and a module of that name would
take its place.
"""

from __future__ import annotations

from muster.asgi.ingress import ingress

__all__ = ["ingress"]
