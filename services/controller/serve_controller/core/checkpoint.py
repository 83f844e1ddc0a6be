"""The whole durable state, and drafts of the next one.

Why persistent maps (hash tries that share what did not change): a decision must neither change what others hold nor
cost a copy of everything. A new checkpoint of 10,000 replicas costs as much as one of ten, and going back is free.
Their order is not defined: whoever needs one sorts.

Beside the objects there are indices, kept by the same two functions that put and delete objects, so that they cannot
come apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec
from immutables import Map

from serve_common.names import BackendTag, EndpointTag, GoalId, HostId, ProxyId, ReplicaTag, backend_tag_of
from serve_controller.core.changes import Changes, Key, Kind, key_of
from serve_controller.core.goals.ids import goal_id_of
from serve_controller.core.indices import Indices, index_endpoint, index_goal, index_replica
from serve_controller.core.nested_maps import delete_in, put_in
from serve_controller.core.objects import (
    Application,
    Backend,
    CheckpointObject,
    Counters,
    Deployment,
    Endpoint,
    Goal,
    HostRecord,
    HttpRecord,
    ProxyRecord,
    Replica,
    Revision,
    SnapshotRecord,
)


class Checkpoint(Indices):
    """All objects by key, with indices. Never changed in place (but for a `Draft`): `applied` makes the next one."""

    __slots__ = (
        "applications",
        "backends",
        "counters",
        "deployments",
        "endpoints",
        "goals",
        "hosts",
        "http",
        "proxies",
        "replicas",
        "revisions",
        "snapshots",
    )

    def __init__(self) -> None:
        """The empty checkpoint of a new system."""
        super().__init__()
        self.backends: Map[BackendTag, Backend] = Map()
        self.endpoints: Map[EndpointTag, Endpoint] = Map()
        self.deployments: Map[BackendTag, Deployment] = Map()
        self.applications: Map[str, Application] = Map()
        self.revisions: Map[BackendTag, Map[int, Revision]] = Map()
        self.replicas: Map[BackendTag, Map[ReplicaTag, Replica]] = Map()
        """By backend, because every decision is about one backend's replicas."""
        self.goals: Map[GoalId, Goal] = Map()
        self.hosts: Map[HostId, HostRecord] = Map()
        self.proxies: Map[ProxyId, ProxyRecord] = Map()
        self.snapshots: Map[str, SnapshotRecord] = Map()
        self.http: HttpRecord | None = None
        self.counters = Counters()

    def applied(self, changes: Changes) -> Checkpoint:
        """The checkpoint after ``changes``; what did not change is shared with this one."""
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

    def replicas_of(self, tag: BackendTag) -> Map[ReplicaTag, Replica]:
        """A backend's replicas."""
        found: Map[ReplicaTag, Replica] = self.replicas.get(tag, Map())
        return found

    def lookup(self, key: Key) -> CheckpointObject | None:  # noqa: C901 - a table
        """The object under ``key`` or None."""
        kind, name = key
        match kind:
            case Kind.BACKEND:
                return self.backends.get(BackendTag(name))
            case Kind.ENDPOINT:
                return self.endpoints.get(EndpointTag(name))
            case Kind.DEPLOYMENT:
                return self.deployments.get(BackendTag(name))
            case Kind.APPLICATION:
                return self.applications.get(name)
            case Kind.REVISION:
                tag, _, number = name.rpartition("@")
                return self.revisions.get(BackendTag(tag), Map()).get(int(number))
            case Kind.REPLICA:
                return self.replicas_of(backend_tag_of(ReplicaTag(name))).get(ReplicaTag(name))
            case Kind.GOAL:
                return self.goals.get(GoalId(name))
            case Kind.HOST:
                return self.hosts.get(HostId(name))
            case Kind.PROXY:
                return self.proxies.get(ProxyId(name))
            case Kind.HTTP:
                return self.http
            case Kind.SNAPSHOT:
                return self.snapshots.get(name)
            case Kind.COUNTERS:
                return self.counters


PARTS: Final = (*Checkpoint.__slots__, *Indices.__slots__)
"""Names of all that a checkpoint is made of."""
Mark = tuple[Any, ...]


class Draft(Checkpoint):
    """A checkpoint being changed by one decision; remembers what changed against its base."""

    __slots__ = ("_base", "_touched")

    def __init__(self, base: Checkpoint) -> None:
        """Begin with everything as in ``base``."""
        for name in PARTS:
            setattr(self, name, getattr(base, name))
        self._base = base
        self._touched: dict[Key, None] = {}

    # -- changing ------------------------------------------------------------------------------------------------------

    def put(self, value: CheckpointObject) -> None:  # noqa: C901 - a table
        """Add or replace an object."""
        self._touched[key_of(value)] = None
        match value:
            case Backend():
                self.backends = self.backends.set(value.backend_tag, value)
            case Endpoint():
                index_endpoint(self, self.endpoints.get(value.endpoint_tag), value)
                self.endpoints = self.endpoints.set(value.endpoint_tag, value)
            case Deployment():
                self.deployments = self.deployments.set(value.tag, value)
            case Application():
                self.applications = self.applications.set(value.name, value)
            case Revision():
                self.revisions = put_in(self.revisions, value.backend_tag, value.revision, value)
            case Replica():
                index_replica(self, self.replicas_of(value.backend_tag).get(value.replica_tag), value)
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
        """Remove an object; one that is not there is no error."""
        before = self.lookup(key)
        if before is None:
            return
        self._touched[key] = None
        match before:
            case Backend():
                self.backends = self.backends.delete(before.backend_tag)
            case Endpoint():
                index_endpoint(self, before, None)
                self.endpoints = self.endpoints.delete(before.endpoint_tag)
            case Deployment():
                self.deployments = self.deployments.delete(before.tag)
            case Application():
                self.applications = self.applications.delete(before.name)
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
        """A point to go back to."""
        return tuple(getattr(self, name) for name in PARTS)

    def roll_back(self, mark: Mark) -> None:
        """Undo everything since ``mark``, except that numbers once given stay given."""
        counters = self.counters
        for name, value in zip(PARTS, mark, strict=True):
            setattr(self, name, value)
        self.put(counters)

    # -- numbers that are never given twice ----------------------------------------------------------------------------

    def next_goal_id(self) -> GoalId:
        """A new goal id; ids tell their order, so an unknown one is told from a forgotten one."""
        self.put(msgspec.structs.replace(self.counters, goal=self.counters.goal + 1))
        return goal_id_of(self.counters.goal)

    def next_ordinal(self) -> int:
        """A new replica ordinal, never given before."""
        self.put(msgspec.structs.replace(self.counters, ordinal=self.counters.ordinal + 1))
        return self.counters.ordinal

    def next_snapshot_id(self) -> int:
        """A new snapshot id."""
        self.put(msgspec.structs.replace(self.counters, snapshot=self.counters.snapshot + 1))
        return self.counters.snapshot

    def renew_host_goal(self, host_id: HostId) -> int:
        """Say that this host's goal changes; returns its new generation."""
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
        """What it began with."""
        return self._base

    def touched(self) -> list[Key]:
        """Keys of what was put or deleted, in the order of the first time; some may be as they were."""
        return list(self._touched)

    def changes(self) -> Changes:
        """What differs from the base; objects put back as they were do not count."""
        puts: list[CheckpointObject] = []
        deletes: list[Key] = []
        for key in self._touched:
            before, after = self._base.lookup(key), self.lookup(key)
            if after is None and before is not None:
                deletes.append(key)
            elif after is not None and after != before:
                puts.append(after)
        return Changes(tuple(puts), tuple(deletes))

    def checkpoint(self) -> Checkpoint:
        """The draft as it is now, as a checkpoint."""
        result = Checkpoint()
        for name in PARTS:
            setattr(result, name, getattr(self, name))
        return result
