"""Snapshots for routers, derived from the checkpoint alone; and moving a route to an application's new ingress.

They are derived from the checkpoint and not from reports, because what was not recorded may be undone by a crash, and a
router must never learn of it. A snapshot gets its durable id in the same change that makes it necessary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Final

import msgspec

from serve_common.config.backend import BackendConfig
from serve_common.config.capture import CaptureConfig
from serve_common.errors import Conflict
from serve_common.names import BackendTag, EndpointTag, GoalId, ReplicaTag
from serve_common.protocol.snapshots import (
    BackendProtection,
    BackendSnapshot,
    EndpointSnapshot,
    HttpSnapshot,
    ShadowComparison,
    Snapshot,
    SnapshotContent,
)
from serve_common.protocol.subjects import HTTP_KEY, backend_key, endpoint_key
from serve_controller.core.checkpoint import Checkpoint, Draft
from serve_controller.core.objects import (
    Application,
    Backend,
    EndpointConfig,
    EndpointRecord,
    ObjectKind,
    Replica,
    ReplicaState,
    SnapshotRecord,
)
from serve_controller.core.rollouts.record import Rollout, get_comparisons, rolled_out, split_traffic
from serve_controller.core.transitions import DRAINING, ROUTED

NO_ROLLOUTS: Final[Mapping[BackendTag, Rollout]] = MappingProxyType({})


def taken_over(
    checkpoint: Checkpoint, route: str | None, ingress: BackendTag, members: Collection[BackendTag]
) -> str | None:
    """``route`` if another one of ``members`` has it now, so that the ingress must wait for it; otherwise None."""
    if route is None:
        return None
    others = {EndpointTag(tag) for tag in members if tag != ingress}
    has_it = any(
        checkpoint.endpoints[tag].target.route == route
        for tag in others.intersection(checkpoint.routes.get(route, ()))
    )
    return route if has_it else None


def interim_route(
    checkpoint: Checkpoint,
    target_route: str | None,
    takes_over: str | None,
    tag: BackendTag,
    *,
    is_ingress: bool,
) -> str | None:
    """The route of an application's deployment until the whole application runs.

    A new ingress does not get the route at once: it may have no replica yet, and a failure must leave what served. The
    route stays with the former ingress until all of the application runs; then one decision changes both endpoints.
    """
    if takes_over is None:
        return target_route if is_ingress else None
    endpoint = checkpoint.endpoints.get(EndpointTag(tag))
    present = None if endpoint is None else endpoint.target.route
    return present if is_ingress or present == takes_over else None


def check_not_moving(checkpoint: Checkpoint, tag: BackendTag, field: str = "name") -> None:
    """Raise `Conflict` while a deployment's route is being moved from or to another deployment."""
    deployment = checkpoint.deployments.get(tag)
    application = None if deployment is None else checkpoint.applications.get(deployment.application)
    if application is None or application.goal_id not in checkpoint.pending:
        return
    route = application.target.takes_over
    endpoint = checkpoint.endpoints.get(EndpointTag(tag))
    has_it = endpoint is not None and endpoint.target.route == route
    if route is not None and (tag == application.target.ingress or has_it):
        raise Conflict(
            f"{field}: the route {route!r} of the application {application.name!r} is being moved to "
            f"{application.target.ingress!r} by {application.goal_id}; wait for its end, or deploy the application"
        )


def move_route(draft: Draft, application: Application | None) -> bool:
    """Give the ingress the route that it takes over; returns whether there was one."""
    if application is None or application.deleting or application.target.takes_over is None:
        return False
    route, ingress = application.target.takes_over, EndpointTag(application.target.ingress)
    target = msgspec.structs.replace(application.target, takes_over=None)
    draft.put(msgspec.structs.replace(application, target=target))
    for tag in sorted(draft.routes.get(route, ())):
        if draft.endpoints[tag].target.route == route:
            _put_route(draft, tag, None)
    if ingress in draft.endpoints:
        _put_route(draft, ingress, route)
    return True


def _put_route(draft: Draft, tag: EndpointTag, route: str | None) -> None:
    endpoint = draft.endpoints[tag]
    target: EndpointConfig = msgspec.structs.replace(endpoint.target, route=route)
    draft.put(msgspec.structs.replace(endpoint, target=target))


CODE_VERSIONS_MAX = 5_000
"""Most replicas whose code versions are published: with more, tags and versions could exceed one value of the bucket.
Routers then use any replica, as they do where one version runs."""
NO_ROLLOUT: Final = GoalId("")
TOMBSTONES_MAX = 1000
"""Most tombstones that are retained, so that a late value cannot revive a deleted name."""


# A value that equals the default is replaced by the default object itself, so that encoding omits it.
_OPTIONS: Final = EndpointSnapshot(endpoint_tag=EndpointTag(""), route=None, methods=[], traffic={}).options
_PROTECTION: Final = BackendSnapshot(
    backend_tag=BackendTag(""), replicas=[], draining=[], max_concurrent_queries=0, max_queued_requests=0
).protection


def derive_endpoint(
    endpoint: EndpointRecord,
    rollouts: Mapping[BackendTag, Rollout] = NO_ROLLOUTS,
    capture: CaptureConfig | None = None,
) -> EndpointSnapshot:
    """The snapshot of an endpoint; ``rollouts`` are those of its backends, ``capture`` says what is captured."""
    traffic, shadows, comparisons = endpoint.target.traffic, endpoint.target.shadows, list[ShadowComparison]()
    if rollouts:
        comparisons = get_comparisons(traffic, rollouts)
        traffic, shadows = split_traffic(traffic, shadows, rollouts)
    return EndpointSnapshot(
        endpoint_tag=endpoint.endpoint_tag,
        route=endpoint.target.route,
        methods=endpoint.target.methods,
        traffic=traffic,
        shadows=shadows,
        options=_OPTIONS if endpoint.target.options == _OPTIONS else endpoint.target.options,
        is_ingress=endpoint.target.is_ingress,
        capture=capture,
        comparisons=comparisons,
    )


def derive_backend(
    backend: Backend, replicas: list[Replica], *, rollout_id: GoalId = NO_ROLLOUT
) -> BackendSnapshot:
    """The snapshot of a backend; ``rollout_id`` is the goal of the rollout that it takes part in."""

    def tags(states: frozenset[ReplicaState]) -> list[ReplicaTag]:
        return sorted(r.replica_tag for r in replicas if r.state in states)

    config = backend.target.backend_config
    return BackendSnapshot(
        backend_tag=backend.backend_tag,
        replicas=tags(ROUTED),
        draining=tags(DRAINING),
        max_concurrent_queries=config.max_concurrent_queries,
        max_queued_requests=config.max_queued_requests,
        protection=_get_protection(config),
        can_wake=backend.autoscaling is not None and backend.num_wanted == 0,
        is_stopped=backend.halted
        or (backend.autoscaling is None and config.num_replicas == 0 and not backend.deleting),
        rollout_id=rollout_id,
        code_versions=_code_versions([r for r in replicas if r.state in ROUTED]),
    )


def _get_protection(config: BackendConfig) -> BackendProtection:
    changed = {
        name: value
        for name in BackendProtection.__struct_fields__
        if (value := getattr(config, name)) != getattr(_PROTECTION, name)
    }
    return BackendProtection(**changed) if changed else _PROTECTION


def _code_versions(routed: list[Replica]) -> dict[ReplicaTag, int]:
    if len(routed) > CODE_VERSIONS_MAX or len({r.code_version for r in routed}) < 2:
        return {}
    return {r.replica_tag: r.code_version for r in sorted(routed, key=lambda r: r.replica_tag)}


def renew_snapshots(
    draft: Draft, epoch: int, endpoints: Iterable[EndpointTag], backends: Iterable[BackendTag]
) -> None:
    """Record a new snapshot for every one of these whose content changed, and for the HTTP options."""
    contents: dict[str, SnapshotContent | None] = {}
    backend_tags = set(backends)
    endpoint_tags = {*endpoints, *(e for tag in backend_tags for e in draft.used_by.get(tag, {}))}
    for tag in backend_tags:
        contents[backend_key(tag)] = _backend_content(draft, tag)
        if tag not in draft.backends:
            endpoint_tags.add(EndpointTag(tag))
    for endpoint_tag in endpoint_tags:
        contents[endpoint_key(endpoint_tag)] = _endpoint_content(draft, endpoint_tag)
    contents[HTTP_KEY] = http_snapshot(draft)
    # Backends before endpoints: a router that receives an endpoint already knows its backends. And the other way round
    # for deletions. An endpoint that gives up a route comes after the one that takes it over: one always has it.
    there = [key for key, content in contents.items() if content is not None]
    for key in sorted(there, key=lambda key: (_releases_route(draft, key, contents[key]), key)):
        _renew(draft, key, contents[key], epoch)
    for key in sorted((key for key, content in contents.items() if content is None), reverse=True):
        if key in draft.snapshots:
            _renew(draft, key, None, epoch)


def _backend_content(draft: Checkpoint, tag: BackendTag) -> BackendSnapshot | None:
    backend = draft.backends.get(tag)
    if backend is None:
        return None
    judged = rolled_out(tag) if draft.active_rollouts else tag
    rollout_id = draft.rollouts[judged].goal_id if judged in draft.active_rollouts else NO_ROLLOUT
    return derive_backend(backend, list(draft.get_replicas(tag).values()), rollout_id=rollout_id)


def _endpoint_content(draft: Checkpoint, tag: EndpointTag) -> EndpointSnapshot | None:
    endpoint = draft.endpoints.get(tag)
    if endpoint is None or not any(to in draft.backends for to in endpoint.target.traffic):
        return None
    rollouts = (
        {to: draft.rollouts[to] for to in endpoint.target.traffic if to in draft.active_rollouts}
        if draft.active_rollouts
        else NO_ROLLOUTS
    )
    capture = draft.captures.get(tag)
    return derive_endpoint(endpoint, rollouts, None if capture is None else capture.config)


def is_renewed(draft: Checkpoint, backends: Iterable[BackendTag], endpoints: Iterable[EndpointTag]) -> bool:
    """Whether the recorded snapshots of these say what the draft says."""
    contents: dict[str, SnapshotContent | None] = {
        **{backend_key(tag): _backend_content(draft, tag) for tag in backends},
        **{endpoint_key(tag): _endpoint_content(draft, tag) for tag in endpoints},
    }
    for key, content in contents.items():
        known = draft.snapshots.get(key)
        if (None if known is None else known.snapshot.content) != content:
            return False
    return True


def http_snapshot(draft: Checkpoint) -> HttpSnapshot | None:
    """What proxies are told of all requests; None while nothing of it was ever changed."""
    record = draft.http
    if record is None:
        return None
    return HttpSnapshot(options=record.target, is_shut_down=record.is_shut_down)


def forget_tombstones(draft: Draft) -> None:
    """Delete the oldest tombstones beyond `TOMBSTONES_MAX`."""
    tombstones = sorted(
        (r for r in draft.snapshots.values() if r.snapshot.content is None),
        key=lambda r: r.snapshot.snapshot_id,
    )
    for record in tombstones[:-TOMBSTONES_MAX]:
        draft.delete((ObjectKind.SNAPSHOT, record.key))


def _releases_route(draft: Draft, key: str, content: SnapshotContent | None) -> bool:
    known = draft.snapshots.get(key)
    before = None if known is None else known.snapshot.content
    if not isinstance(before, EndpointSnapshot) or not isinstance(content, EndpointSnapshot):
        return False
    return before.route is not None and before.route != content.route


def _renew(draft: Draft, key: str, content: SnapshotContent | None, epoch: int) -> None:
    known = draft.snapshots.get(key)
    if known is not None and known.snapshot.content == content:
        return
    put_snapshot(draft, key, content, epoch)


def void_last(draft: Draft, bucket: Mapping[str, int] | None, epoch: int) -> None:
    """Renumber the snapshot that voids all older ones after those that are yet to be published and must stay valid."""
    record = draft.snapshots.get(HTTP_KEY)
    if record is None or not record.snapshot.voids_below or bucket is None:
        return
    number = record.snapshot.snapshot_id
    if bucket.get(HTTP_KEY) != number and number < draft.counters.snapshot:
        put_snapshot(draft, HTTP_KEY, record.snapshot.content, epoch)


def put_snapshot(draft: Draft, key: str, content: SnapshotContent | None, epoch: int) -> None:
    """Record a snapshot with a new id, even if its content is unchanged."""
    restored = draft.counters.restored_snapshot
    snapshot = Snapshot(
        snapshot_id=draft.next_snapshot_id(),
        epoch=epoch,
        content=content,
        voids_below=restored + 1 if restored and key == HTTP_KEY else 0,
    )
    draft.put(SnapshotRecord(key=key, snapshot=snapshot))
