"""The whole durable state, drafts of the next one, and its indices.

Its maps are persistent (hash tries that share what did not change): a decision must neither change what other code
holds nor cost a copy of everything. A new checkpoint of 10,000 replicas costs as much as one of ten, and going back is
free. The order of these maps is not defined: sort where an order matters.

The indices follow from the objects, so they are never stored. They give at once what a decision must find without a
search. `Draft.put` and `Draft.delete` maintain them together with the objects, so that they cannot diverge.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, TypeVar

import msgspec
from immutables import Map

from serve_common.api.views import GoalStatus
from serve_common.config.backend import HttpOptions
from serve_common.names import BackendTag, EndpointTag, GoalId, HostId, ProxyId, ReplicaTag, parse_backend_tag
from serve_controller.core.host_load import NO_LOAD, HostLoad, changed_load
from serve_controller.core.objects import (
    Application,
    Backend,
    BuildFailure,
    Capture,
    CheckpointObject,
    Counters,
    Deployment,
    EndpointRecord,
    Goal,
    HostRecord,
    HttpRecord,
    Key,
    ObjectChanges,
    ObjectKind,
    ProxyRecord,
    Replica,
    ReplicaState,
    Revision,
    SnapshotRecord,
    get_goal_id,
    get_key,
)
from serve_controller.core.rollouts.record import Rollout

K = TypeVar("K")
V = TypeVar("V")


def put_in(outer: Map[Any, Map[K, V]], name: Any, key: K, value: V) -> Map[Any, Map[K, V]]:
    """``outer`` with ``key`` in the inner map of that name."""
    return outer.set(name, outer.get(name, Map()).set(key, value))


def delete_in(outer: Map[Any, Map[K, V]], name: Any, key: K) -> Map[Any, Map[K, V]]:
    """``outer`` without ``key`` in the inner map of that name; an empty inner map is removed.

    Otherwise two checkpoints of the same objects could differ.
    """
    inner = outer.get(name)
    if inner is None or key not in inner:
        return outer
    inner = inner.delete(key)
    return outer.set(name, inner) if inner else outer.delete(name)


class Indices:
    """Maps derived from a checkpoint's objects; maintained by the functions below."""

    __slots__ = (
        "active_rollouts",
        "by_host",
        "loads",
        "owners",
        "pending",
        "requests",
        "routes",
        "unplaced",
        "used_by",
    )

    def __init__(self) -> None:
        """Indices of no objects."""
        self.by_host: Map[HostId, Map[ReplicaTag, Replica]] = Map()
        self.loads: Map[HostId, HostLoad] = Map()
        self.pending: Map[GoalId, Goal] = Map()
        self.owners: Map[str, Map[GoalId, None]] = Map()
        """Pending goals by the keys that they own."""
        self.requests: Map[str, GoalId] = Map()
        """Goals by the clients' request ids."""
        self.routes: Map[str, Map[EndpointTag, None]] = Map()
        """Endpoints by route: those that have it, or may take it back when a goal fails."""
        self.used_by: Map[BackendTag, Map[EndpointTag, None]] = Map()
        """Endpoints that send or copy requests to a backend, or may do so again when a goal fails."""
        self.unplaced: Map[BackendTag, int] = Map()
        """Number of replicas that wait for a host, by backend."""
        self.active_rollouts: Map[BackendTag, None] = Map()
        """Rollouts that have not ended."""

    def get_load(self, host_id: HostId) -> HostLoad:
        """Capacity taken on a host."""
        return self.loads.get(host_id, NO_LOAD)


def index_replica(indices: Indices, before: Replica | None, after: Replica | None) -> None:
    """Index a replica that was added (``before`` is None), changed, or deleted (``after`` is None)."""
    if before is not None and before.host_id is not None:
        indices.by_host = delete_in(indices.by_host, before.host_id, before.replica_tag)
        _set_load(indices, before.host_id, changed_load(indices.get_load(before.host_id), before, -1))
    if after is not None and after.host_id is not None:
        indices.by_host = put_in(indices.by_host, after.host_id, after.replica_tag, after)
        _set_load(indices, after.host_id, changed_load(indices.get_load(after.host_id), after, 1))
    waited = before is not None and before.state is ReplicaState.SHOULD_START
    waits = after is not None and after.state is ReplicaState.SHOULD_START
    if waits != waited:
        one = after if after is not None else before
        assert one is not None
        count = indices.unplaced.get(one.backend_tag, 0) + (1 if waits else -1)
        indices.unplaced = (
            indices.unplaced.set(one.backend_tag, count)
            if count
            else indices.unplaced.delete(one.backend_tag)
        )


def _set_load(indices: Indices, host_id: HostId, load: HostLoad) -> None:
    if load == NO_LOAD:
        indices.loads = indices.loads.delete(host_id) if host_id in indices.loads else indices.loads
    else:
        indices.loads = indices.loads.set(host_id, load)


def index_goal(indices: Indices, before: Goal | None, after: Goal | None) -> None:
    """Index a goal that was added, changed or deleted."""
    if before is not None and before.status is GoalStatus.PENDING:
        indices.pending = indices.pending.delete(before.goal_id)
        for key in set(before.owns):
            indices.owners = delete_in(indices.owners, key, before.goal_id)
    if after is not None and after.status is GoalStatus.PENDING:
        indices.pending = indices.pending.set(after.goal_id, after)
        for key in after.owns:
            indices.owners = put_in(indices.owners, key, after.goal_id, None)
    if before is not None and before.request_id is not None and before.request_id in indices.requests:
        indices.requests = indices.requests.delete(before.request_id)
    if after is not None and after.request_id is not None:
        indices.requests = indices.requests.set(after.request_id, after.goal_id)


def index_endpoint(indices: Indices, before: EndpointRecord | None, after: EndpointRecord | None) -> None:
    """Index an endpoint that was added, changed or deleted."""
    if before is not None:
        for route in {config.route for config in before.configs()}:
            if route is not None:
                indices.routes = delete_in(indices.routes, route, before.endpoint_tag)
        for tag in {tag for config in before.configs() for tag in config.backend_tags()}:
            indices.used_by = delete_in(indices.used_by, tag, before.endpoint_tag)
    if after is not None:
        for route in {config.route for config in after.configs()}:
            if route is not None:
                indices.routes = put_in(indices.routes, route, after.endpoint_tag, None)
        for tag in {tag for config in after.configs() for tag in config.backend_tags()}:
            indices.used_by = put_in(indices.used_by, tag, after.endpoint_tag, None)


def index_rollout(indices: Indices, tag: BackendTag, *, is_active: bool) -> None:
    """Index a rollout that was changed or deleted."""
    active = indices.active_rollouts
    indices.active_rollouts = (
        active.set(tag, None) if is_active else active.delete(tag) if tag in active else active
    )


class Checkpoint(Indices):
    """All objects by key, with indices. Never changed in place (but for a `Draft`): `applied` makes the next one."""

    __slots__ = (
        "applications",
        "backends",
        "build_failures",
        "captures",
        "counters",
        "deployments",
        "endpoints",
        "goals",
        "hosts",
        "http",
        "proxies",
        "replicas",
        "revisions",
        "rollouts",
        "snapshots",
    )

    def __init__(self) -> None:
        """The empty checkpoint of a new system."""
        super().__init__()
        self.backends: Map[BackendTag, Backend] = Map()
        self.endpoints: Map[EndpointTag, EndpointRecord] = Map()
        self.deployments: Map[BackendTag, Deployment] = Map()
        self.applications: Map[str, Application] = Map()
        self.build_failures: Map[str, BuildFailure] = Map()
        """By the name of the application."""
        self.rollouts: Map[BackendTag, Rollout] = Map()
        self.captures: Map[EndpointTag, Capture] = Map()
        self.revisions: Map[BackendTag, Map[int, Revision]] = Map()
        self.replicas: Map[BackendTag, Map[ReplicaTag, Replica]] = Map()
        """By backend, because every decision is about one backend's replicas."""
        self.goals: Map[GoalId, Goal] = Map()
        self.hosts: Map[HostId, HostRecord] = Map()
        self.proxies: Map[ProxyId, ProxyRecord] = Map()
        self.snapshots: Map[str, SnapshotRecord] = Map()
        self.http: HttpRecord | None = None
        self.counters = Counters()

    def applied(self, changes: ObjectChanges) -> Checkpoint:
        """The checkpoint after ``changes``; unchanged parts are shared with this one."""
        draft = Draft(self)
        for value in changes.puts:
            draft.put(value)
        for key in changes.deletes:
            draft.delete(key)
        return draft.checkpoint()

    def all_objects(self) -> Iterator[CheckpointObject]:
        """Every object; for dumps and comparisons."""
        yield from self.backends.values()
        yield from self.endpoints.values()
        yield from self.deployments.values()
        yield from self.applications.values()
        yield from self.build_failures.values()
        yield from self.rollouts.values()
        yield from self.captures.values()
        for revisions in self.revisions.values():
            yield from revisions.values()
        for replicas in self.replicas.values():
            yield from replicas.values()
        yield from self.goals.values()
        yield from self.hosts.values()
        yield from self.proxies.values()
        yield from self.snapshots.values()
        if self.http is not None:
            yield self.http
        yield self.counters

    def get_replicas(self, tag: BackendTag) -> Map[ReplicaTag, Replica]:
        """A backend's replicas."""
        found: Map[ReplicaTag, Replica] = self.replicas.get(tag, Map())
        return found

    def living_deployment(self, tag: BackendTag) -> Deployment | None:
        """The deployment of that tag; None also for one that was deleted, whose record is retained for a while."""
        found = self.deployments.get(tag)
        return None if found is None or found.ended_at is not None else found

    @property
    def http_options(self) -> HttpOptions:
        """The HTTP options of all proxies; the defaults until they are changed."""
        return (self.http and self.http.target) or HttpOptions()

    def lookup(self, key: Key) -> CheckpointObject | None:  # noqa: C901, PLR0912 - a table
        """The object under ``key`` or None."""
        kind, name = key
        match kind:
            case ObjectKind.BACKEND:
                return self.backends.get(BackendTag(name))
            case ObjectKind.ENDPOINT:
                return self.endpoints.get(EndpointTag(name))
            case ObjectKind.DEPLOYMENT:
                return self.deployments.get(BackendTag(name))
            case ObjectKind.APPLICATION:
                return self.applications.get(name)
            case ObjectKind.BUILD_FAILURE:
                return self.build_failures.get(name)
            case ObjectKind.ROLLOUT:
                return self.rollouts.get(BackendTag(name))
            case ObjectKind.CAPTURE:
                return self.captures.get(EndpointTag(name))
            case ObjectKind.REVISION:
                tag, _, number = name.rpartition("@")
                return self.revisions.get(BackendTag(tag), Map()).get(int(number))
            case ObjectKind.REPLICA:
                return self.get_replicas(parse_backend_tag(ReplicaTag(name))).get(ReplicaTag(name))
            case ObjectKind.GOAL:
                return self.goals.get(GoalId(name))
            case ObjectKind.HOST:
                return self.hosts.get(HostId(name))
            case ObjectKind.PROXY:
                return self.proxies.get(ProxyId(name))
            case ObjectKind.HTTP:
                return self.http
            case ObjectKind.SNAPSHOT:
                return self.snapshots.get(name)
            case ObjectKind.COUNTERS:
                return self.counters


PARTS: Final = (*Checkpoint.__slots__, *Indices.__slots__)
"""Names of all fields of a checkpoint."""
Mark = tuple[Any, ...]


class Draft(Checkpoint):
    """A mutable checkpoint for one decision; tracks the changes against its base."""

    __slots__ = ("_base", "_touched")

    def __init__(self, base: Checkpoint) -> None:
        """Start as a copy of ``base``."""
        for name in PARTS:
            setattr(self, name, getattr(base, name))
        self._base = base
        self._touched: dict[Key, None] = {}

    # -- changing ------------------------------------------------------------------------------------------------------

    def put(self, value: CheckpointObject) -> None:  # noqa: C901, PLR0912 - a table
        """Add or replace an object."""
        self._touched[get_key(value)] = None
        match value:
            case Backend():
                self.backends = self.backends.set(value.backend_tag, value)
            case EndpointRecord():
                index_endpoint(self, self.endpoints.get(value.endpoint_tag), value)
                self.endpoints = self.endpoints.set(value.endpoint_tag, value)
                if self.http is not None and self.http.is_shut_down:
                    self.put(msgspec.structs.replace(self.http, is_shut_down=False))
            case Deployment():
                self.deployments = self.deployments.set(value.tag, value)
            case Application():
                self.applications = self.applications.set(value.name, value)
            case BuildFailure():
                self.build_failures = self.build_failures.set(value.name, value)
            case Rollout():
                index_rollout(self, value.backend_tag, is_active=value.is_active)
                self.rollouts = self.rollouts.set(value.backend_tag, value)
            case Capture():
                self.captures = self.captures.set(value.endpoint_tag, value)
            case Revision():
                self.revisions = put_in(self.revisions, value.backend_tag, value.revision, value)
            case Replica():
                index_replica(self, self.get_replicas(value.backend_tag).get(value.replica_tag), value)
                self.replicas = put_in(self.replicas, value.backend_tag, value.replica_tag, value)
            case Goal():
                index_goal(self, self.goals.get(value.goal_id), value)
                self.goals = self.goals.set(value.goal_id, value)
            case HostRecord():
                self.hosts = self.hosts.set(value.host_id, value)
            case ProxyRecord():
                self.proxies = self.proxies.set(value.proxy_id, value)
            case HttpRecord():
                self.http = value
            case SnapshotRecord():
                self.snapshots = self.snapshots.set(value.key, value)
            case Counters():
                self.counters = value

    def delete(self, key: Key) -> None:  # noqa: C901, PLR0912 - a table
        """Delete an object; a missing one is no error."""
        before = self.lookup(key)
        if before is None:
            return
        self._touched[key] = None
        match before:
            case Backend():
                self.backends = self.backends.delete(before.backend_tag)
            case EndpointRecord():
                index_endpoint(self, before, None)
                self.endpoints = self.endpoints.delete(before.endpoint_tag)
                self.delete((ObjectKind.CAPTURE, before.endpoint_tag))
            case Deployment():
                self.deployments = self.deployments.delete(before.tag)
            case Application():
                self.applications = self.applications.delete(before.name)
            case BuildFailure():
                self.build_failures = self.build_failures.delete(before.name)
            case Rollout():
                index_rollout(self, before.backend_tag, is_active=False)
                self.rollouts = self.rollouts.delete(before.backend_tag)
            case Capture():
                self.captures = self.captures.delete(before.endpoint_tag)
            case Revision():
                self.revisions = delete_in(self.revisions, before.backend_tag, before.revision)
            case Replica():
                index_replica(self, before, None)
                self.replicas = delete_in(self.replicas, before.backend_tag, before.replica_tag)
            case Goal():
                index_goal(self, before, None)
                self.goals = self.goals.delete(before.goal_id)
            case HostRecord():
                self.hosts = self.hosts.delete(before.host_id)
            case ProxyRecord():
                self.proxies = self.proxies.delete(before.proxy_id)
            case HttpRecord():
                self.http = None
            case SnapshotRecord():
                self.snapshots = self.snapshots.delete(before.key)
            case Counters():
                raise AssertionError("the counters are never deleted")

    # -- going back ----------------------------------------------------------------------------------------------------

    def mark(self) -> Mark:
        """A point to roll back to."""
        return tuple(getattr(self, name) for name in PARTS)

    def roll_back(self, mark: Mark) -> None:
        """Undo everything since ``mark``, except the counters: numbers once given stay given."""
        counters = self.counters
        for name, value in zip(PARTS, mark, strict=True):
            setattr(self, name, value)
        self.put(counters)

    # -- numbers that are never given twice ----------------------------------------------------------------------------

    def next_goal_id(self) -> GoalId:
        """A new goal id. Ids are ordered, so that an unknown one can be distinguished from a forgotten one."""
        self.put(msgspec.structs.replace(self.counters, goal=self.counters.goal + 1))
        return get_goal_id(self.counters.goal)

    def next_ordinal(self) -> int:
        """A new replica ordinal, never given before."""
        self.put(msgspec.structs.replace(self.counters, ordinal=self.counters.ordinal + 1))
        return self.counters.ordinal

    def next_snapshot_id(self) -> int:
        """A new snapshot id."""
        self.put(msgspec.structs.replace(self.counters, snapshot=self.counters.snapshot + 1))
        return self.counters.snapshot

    def renew_host_goal(self, host_id: HostId) -> int:
        """Give this host's goal a new generation, because it changes; returns it."""
        generation = self.counters.generation + 1
        self.put(msgspec.structs.replace(self.counters, generation=generation))
        known = self.hosts.get(host_id)
        self.put(
            HostRecord(host_id=host_id, generation=generation)
            if known is None
            else msgspec.structs.replace(known, generation=generation)
        )
        return generation

    # -- the outcome ---------------------------------------------------------------------------------------------------

    @property
    def base(self) -> Checkpoint:
        """The checkpoint that the draft started from."""
        return self._base

    def touched(self) -> list[Key]:
        """Keys that were put or deleted, in the order of the first time; their objects may be unchanged."""
        return list(self._touched)

    def changes(self) -> ObjectChanges:
        """Differences from the base; objects that were put back unchanged do not count."""
        puts: list[CheckpointObject] = []
        deletes: list[Key] = []
        for key in self._touched:
            before, after = self._base.lookup(key), self.lookup(key)
            if after is None and before is not None:
                deletes.append(key)
            elif after is not None and after != before:
                puts.append(after)
        return ObjectChanges(tuple(puts), tuple(deletes))

    def checkpoint(self) -> Checkpoint:
        """The draft as it is now, as a checkpoint."""
        result = Checkpoint()
        for name in PARTS:
            setattr(result, name, getattr(self, name))
        return result
