"""Which versions of an application belong together.

Why it is recorded with each replica: during an update replicas of two versions of every deployment serve side by side,
and a request that began with the new ingress should go on with the new model. What a replica belongs with is what the
application was to be when the replica was placed; that must not change while it runs.
"""

from __future__ import annotations

from serve_common.names import BackendTag
from serve_controller.core.checkpoint import Checkpoint


def companions_of(checkpoint: Checkpoint, tag: BackendTag) -> dict[BackendTag, int]:
    """Wanted code versions of the other backends of the application that a backend is in; empty for one in none."""
    deployment = checkpoint.deployments.get(tag)
    if deployment is None or deployment.ended_at is not None:
        return {}
    application = checkpoint.applications.get(deployment.application)
    if application is None or tag not in application.target.deployments:
        return {}
    return {
        other: backend.target.code_version
        for other in sorted(application.target.deployments)
        if other != tag and (backend := checkpoint.backends.get(other)) is not None and not backend.deleting
    }
