"""Backends as callers see them, and how healthy one is as a whole.

Why the status is derived when it is asked for: it follows from the replicas and the newest goal, and a stored one could
come to differ from them.
"""

from __future__ import annotations

from serve_common.errors import NotFound
from serve_common.names import deployment_tag
from serve_common.wires.queries import PagedQuery
from serve_common.wires.views import BackendConfigView, BackendView, DeploymentStatus, GoalStatus, ReplicaView
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.objects import Backend, Goal, Replica
from serve_controller.core.transitions import ROUTED
from serve_controller.core.views.paging import ALL, page_of


def view_backends(checkpoint: Checkpoint, query: PagedQuery = ALL) -> list[BackendView]:
    """All backends in the order of their tags."""
    return [
        _backend(checkpoint, checkpoint.backends[tag]) for tag in page_of(checkpoint.backends.keys(), query)
    ]


def _backend(checkpoint: Checkpoint, backend: Backend) -> BackendView:
    status, message = status_of(checkpoint, backend)
    return BackendView(
        backend_tag=backend.backend_tag,
        backend_config=backend.target.backend_config,
        replica_config=backend.target.replica_config,
        replicas=view_replicas(checkpoint, backend),
        status=status,
        message=message,
        goal_id=backend.goal_id,
        goal_status=goal_status_of(checkpoint, backend),
    )


def view_backend_config(checkpoint: Checkpoint, backend_tag: str) -> BackendConfigView:
    """One backend's configuration. Raises `NotFound` or `BadField`."""
    tag = deployment_tag(backend_tag, "backend_tag")
    backend = checkpoint.backends.get(tag)
    if backend is None:
        raise NotFound(f"backend_tag: there is no backend {tag!r}")
    return BackendConfigView(
        backend_tag=tag,
        backend_config=backend.target.backend_config,
        replica_config=backend.target.replica_config,
        version=backend.target.version,
    )


def goal_status_of(checkpoint: Checkpoint, backend: Backend) -> GoalStatus:
    """How the backend's newest goal stands; one that is forgotten succeeded or does not matter any more."""
    goal = checkpoint.goals.get(backend.goal_id)
    return GoalStatus.SUCCEEDED if goal is None else goal.status


def status_of(checkpoint: Checkpoint, backend: Backend) -> tuple[DeploymentStatus, str]:
    """How the backend is, and why for people; the message is empty when all is well."""
    goal = checkpoint.goals.get(backend.goal_id)
    replicas = list(checkpoint.replicas_of(backend.backend_tag).values())
    serving = sum(r.state in ROUTED for r in replicas)
    reasons = "; ".join(sorted({r.message for r in replicas if r.message})[:3])
    if backend.deleting:
        return DeploymentStatus.DELETING, f"{len(replicas)} replicas still stop"
    if backend.halted:
        return DeploymentStatus.UNHEALTHY, backend.last_error
    if goal is not None and goal.status is GoalStatus.PENDING:
        return DeploymentStatus.UPDATING, reasons or backend.last_error
    if serving < backend.num_wanted:
        message = f"{serving} of {backend.num_wanted} replicas serve"
        detail = reasons or (backend.last_error if backend.start_failures else "")
        return DeploymentStatus.UNHEALTHY, f"{message}: {detail}" if detail else message
    if goal is not None and goal.status is GoalStatus.FAILED:
        return DeploymentStatus.HEALTHY, _after_failure(backend, goal, replicas)
    return DeploymentStatus.HEALTHY, ""


def _after_failure(backend: Backend, goal: Goal, replicas: list[Replica]) -> str:
    kept = backend.kept
    if kept is not None:
        count = sum(r.state in ROUTED and r.config_version == kept.config_version for r in replicas)
        if count:
            name = kept.version or kept.code_version
            return f"the last change failed; {count} replicas of version {name} are kept: {goal.error}"
    return f"the last change failed and was undone: {goal.error}"


def view_replicas(checkpoint: Checkpoint, backend: Backend) -> list[ReplicaView]:
    """A backend's replicas, the oldest first."""
    names = {v.code_version: v.version for v in backend.versions()}
    replicas = sorted(checkpoint.replicas_of(backend.backend_tag).values(), key=lambda r: r.ordinal)
    return [
        ReplicaView(
            replica_tag=replica.replica_tag,
            state=replica.state.value,
            host_id=replica.host_id,
            version=names.get(replica.code_version),
            message=replica.message,
        )
        for replica in replicas
    ]
