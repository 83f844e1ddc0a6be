"""Queries: what callers see of the checkpoint and of what was heard. Pure, and never wait for anything."""

from __future__ import annotations

import msgspec

from serve_common.errors import NotFound
from serve_common.names import EndpointTag, GoalId, deployment_tag
from serve_common.wires.views import (
    BackendView,
    DeploymentStatus,
    DeploymentView,
    EndpointView,
    GoalStatus,
    GoalView,
    HostView,
    ProxyView,
    ReplicaView,
)
from serve_controller.core.checkpoint import Checkpoint, Draft
from serve_controller.core.goals import number_of, waits_for
from serve_controller.core.objects import Backend, Replica, ReplicaState
from serve_controller.core.observed import PROXY_LOST_AFTER_S, ObservedState, host_status
from serve_controller.core.transitions import ROUTED


def view_goal(checkpoint: Checkpoint, observed: ObservedState, goal_id: GoalId) -> GoalView:
    """One goal. Raises `NotFound`, which tells an id that never was from one that is forgotten."""
    goal = checkpoint.goals.get(goal_id)
    if goal is None:
        if 0 < number_of(goal_id) <= checkpoint.counters.goal:
            raise NotFound(f"goal_id: {goal_id} ended more than a day ago and is forgotten")
        raise NotFound(f"goal_id: {goal_id[:80]!r} was never given")
    message = ""
    if goal.status is GoalStatus.PENDING:
        message = waits_for(Draft(checkpoint), observed, goal)
    return GoalView(goal_id=goal_id, status=goal.status, error=goal.error, message=message)


def view_deployment(checkpoint: Checkpoint, name: str) -> DeploymentView:
    """One deployment by the name that its user gave. Raises `NotFound` or `BadField`."""
    backend = checkpoint.backends.get(deployment_tag(name))
    if backend is None:
        raise NotFound(f"name: there is no deployment {name!r}")
    return _deployment(checkpoint, backend)


def view_deployments(checkpoint: Checkpoint) -> list[DeploymentView]:
    """All deployments in the order of their names."""
    return [_deployment(checkpoint, checkpoint.backends[tag]) for tag in sorted(checkpoint.backends)]


def _deployment(checkpoint: Checkpoint, backend: Backend) -> DeploymentView:
    endpoint = checkpoint.endpoints.get(EndpointTag(backend.backend_tag))
    goal = checkpoint.goals.get(backend.goal_id)
    status, message = _status(checkpoint, backend)
    return DeploymentView(
        name=backend.backend_tag,
        status=status,
        message=message,
        route_prefix=None if endpoint is None else endpoint.target.route,
        methods=[] if endpoint is None else endpoint.target.methods,
        version=backend.target.version,
        code_version=backend.target.code_version,
        backend_config=backend.target.backend_config,
        replica_config=backend.target.replica_config,
        goal_id=backend.goal_id,
        goal_status=GoalStatus.SUCCEEDED if goal is None else goal.status,
        replicas=_replicas(checkpoint, backend),
    )


def _status(checkpoint: Checkpoint, backend: Backend) -> tuple[DeploymentStatus, str]:
    goal = checkpoint.goals.get(backend.goal_id)
    replicas = checkpoint.replicas.get(backend.backend_tag, {}).values()
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
        return DeploymentStatus.HEALTHY, f"the last change failed and was undone: {goal.error}"
    return DeploymentStatus.HEALTHY, ""


def _replicas(checkpoint: Checkpoint, backend: Backend) -> list[ReplicaView]:
    names = {v.code_version: v.version for v in backend.versions()}
    replicas = checkpoint.replicas.get(backend.backend_tag, {}).values()
    return [_replica(r, names.get(r.code_version)) for r in sorted(replicas, key=lambda r: r.ordinal)]


def _replica(replica: Replica, version: str | None) -> ReplicaView:
    return ReplicaView(
        replica_tag=replica.replica_tag,
        state=replica.state.value,
        host_id=replica.host_id,
        version=version,
        message=replica.message,
    )


def view_backends(checkpoint: Checkpoint) -> list[BackendView]:
    """All backends in the order of their tags."""
    return [
        BackendView(
            backend_tag=tag,
            backend_config=backend.target.backend_config,
            replica_config=backend.target.replica_config,
            replicas=_replicas(checkpoint, backend),
        )
        for tag, backend in sorted(checkpoint.backends.items())
    ]


def view_endpoints(checkpoint: Checkpoint) -> list[EndpointView]:
    """All endpoints in the order of their tags."""
    return [
        EndpointView(
            endpoint_tag=tag,
            route=endpoint.target.route,
            methods=endpoint.target.methods,
            traffic=dict(endpoint.target.traffic.items()),
        )
        for tag, endpoint in sorted(checkpoint.endpoints.items())
    ]


def view_hosts(checkpoint: Checkpoint, observed: ObservedState, now: float) -> list[HostView]:
    """All hosts that were heard of lately."""
    counts: dict[str, int] = {}
    for replicas in checkpoint.replicas.values():
        for replica in replicas.values():
            if replica.host_id is not None:
                counts[replica.host_id] = counts.get(replica.host_id, 0) + 1
    return [
        HostView(
            host_id=host_id,
            status=host_status(observed, host_id, now).value,
            report_age_s=round(now - host.heard_at, 3),
            resources=host.report.resources,
            num_replicas=counts.get(host_id, 0),
        )
        for host_id, host in sorted(observed.hosts.items())
    ]


def view_proxies(observed: ObservedState, now: float) -> list[ProxyView]:
    """All proxies that were heard of lately."""
    views = []
    for proxy_id, proxy in sorted(observed.proxies.items()):
        silent_s = now - proxy.heard_at
        status = "lost" if silent_s >= PROXY_LOST_AFTER_S else "leaving" if proxy.report.leaving else "live"
        views.append(
            ProxyView(
                proxy_id=proxy_id,
                status=status,
                report_age_s=round(silent_s, 3),
                address=proxy.report.address,
                applied_snapshot_id=proxy.report.applied_snapshot_id,
            )
        )
    return views


class ReplicaCount(msgspec.Struct, frozen=True):
    """How many replicas of a backend are in a state; for metrics."""

    backend_tag: str
    state: str
    count: int


def count_replicas(checkpoint: Checkpoint) -> list[ReplicaCount]:
    """Replicas by backend and state; every state is listed, so that a series falls to zero."""
    return [
        ReplicaCount(
            tag, state.value, sum(r.state is state for r in checkpoint.replicas.get(tag, {}).values())
        )
        for tag in checkpoint.backends
        for state in ReplicaState
        if state is not ReplicaState.STOPPED
    ]
