"""What routers need, derived from the checkpoint alone.

Why from the checkpoint and not from reports: what was not recorded may be undone by a crash, and a router must never
learn of it. A snapshot gets its durable id in the same change that makes it necessary.
"""

from __future__ import annotations

from serve_common.names import ReplicaTag
from serve_common.subjects import backend_key, endpoint_key
from serve_common.wires.snapshots import BackendSnapshot, EndpointSnapshot, Snapshot, SnapshotContent
from serve_controller.core.checkpoint import Draft, Kind
from serve_controller.core.objects import Backend, Endpoint, Replica, ReplicaState, SnapshotRecord
from serve_controller.core.transitions import DRAINING, ROUTED

TOMBSTONES_MAX = 1000
"""Snapshots that say "gone" are kept for that many names, so that a late value cannot revive one."""


def derive_endpoint(endpoint: Endpoint) -> EndpointSnapshot:
    """What routers need of an endpoint."""
    return EndpointSnapshot(
        endpoint_tag=endpoint.endpoint_tag,
        route=endpoint.target.route,
        methods=endpoint.target.methods,
        traffic=endpoint.target.traffic,
    )


def derive_backend(backend: Backend, replicas: list[Replica]) -> BackendSnapshot:
    """What routers need of a backend."""

    def tags(states: frozenset[ReplicaState]) -> list[ReplicaTag]:
        return sorted(r.replica_tag for r in replicas if r.state in states)

    config = backend.target.backend_config
    return BackendSnapshot(
        backend_tag=backend.backend_tag,
        replicas=tags(ROUTED),
        draining=tags(DRAINING),
        max_concurrent_queries=config.max_concurrent_queries,
        max_queued_requests=config.max_queued_requests,
    )


def renew_snapshots(draft: Draft, epoch: int) -> None:
    """Record a new snapshot for every key whose content changed, and bound the number of tombstones."""
    contents: dict[str, SnapshotContent] = {}
    for endpoint in draft.endpoints.values():
        backends = (draft.backends.get(tag) for tag in endpoint.target.traffic)
        if any(backend is not None and not backend.halted for backend in backends):
            contents[endpoint_key(endpoint.endpoint_tag)] = derive_endpoint(endpoint)
    for backend in draft.backends.values():
        replicas = list(draft.replicas.get(backend.backend_tag, {}).values())
        contents[backend_key(backend.backend_tag)] = derive_backend(backend, replicas)
    # Backends before endpoints: a router that hears of an endpoint already knows where its traffic goes.
    for key in sorted(contents):
        _renew(draft, key, contents[key], epoch)
    # And the other way round when things go away.
    for key in sorted(draft.snapshots.keys() - contents.keys(), reverse=True):
        _renew(draft, key, None, epoch)
    tombstones = sorted(
        (r for r in draft.snapshots.values() if r.snapshot.content is None),
        key=lambda r: r.snapshot.snapshot_id,
    )
    for record in tombstones[:-TOMBSTONES_MAX]:
        draft.delete((Kind.SNAPSHOT, record.key))


def _renew(draft: Draft, key: str, content: SnapshotContent | None, epoch: int) -> None:
    known = draft.snapshots.get(key)
    if known is not None and known.snapshot.content == content:
        return
    snapshot = Snapshot(snapshot_id=draft.next_snapshot_id(), epoch=epoch, content=content)
    draft.put(SnapshotRecord(key=key, snapshot=snapshot))
