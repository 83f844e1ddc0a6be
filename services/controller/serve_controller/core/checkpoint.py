"""The whole durable state, and changes of it.

Why a draft: decisions are made step by step, each seeing the last one's outcome, while what must be recorded is the
set of changed objects. The draft is local to one decision; what comes out is frozen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Final

import msgspec

from serve_common.names import BackendTag, EndpointTag, GoalId, HostId, ProxyId, ReplicaTag, backend_tag_of
from serve_controller.core.objects import (
    Backend,
    CheckpointObject,
    Counters,
    Endpoint,
    Goal,
    HostRecord,
    ProxyRecord,
    Replica,
    SnapshotRecord,
)


class Kind(Enum):
    """What kinds of objects there are; the same word in SQL."""

    BACKEND = "backend"
    ENDPOINT = "endpoint"
    REPLICA = "replica"
    GOAL = "goal"
    HOST = "host"
    PROXY = "proxy"
    SNAPSHOT = "snapshot"
    COUNTERS = "counters"


Key = tuple[Kind, str]
"""Which object: its kind and its name within the kind."""

COUNTERS_KEY: Final[Key] = (Kind.COUNTERS, "counters")

CLASSES: Final[Mapping[Kind, type[CheckpointObject]]] = {
    Kind.BACKEND: Backend,
    Kind.ENDPOINT: Endpoint,
    Kind.REPLICA: Replica,
    Kind.GOAL: Goal,
    Kind.HOST: HostRecord,
    Kind.PROXY: ProxyRecord,
    Kind.SNAPSHOT: SnapshotRecord,
    Kind.COUNTERS: Counters,
}


def key_of(value: CheckpointObject) -> Key:
    """The key under which an object is kept."""
    match value:
        case Backend():
            return Kind.BACKEND, value.backend_tag
        case Endpoint():
            return Kind.ENDPOINT, value.endpoint_tag
        case Replica():
            return Kind.REPLICA, value.replica_tag
        case Goal():
            return Kind.GOAL, value.goal_id
        case HostRecord():
            return Kind.HOST, value.host_id
        case ProxyRecord():
            return Kind.PROXY, value.proxy_id
        case SnapshotRecord():
            return Kind.SNAPSHOT, value.key
        case Counters():
            return COUNTERS_KEY


class Changes(msgspec.Struct, frozen=True):
    """What one transaction writes: objects as they are now, and keys of those that are gone."""

    puts: tuple[CheckpointObject, ...] = ()
    deletes: tuple[Key, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.puts or self.deletes)


class Checkpoint:
    """All objects by key. Never changed in place: `applied` makes the next one."""

    __slots__ = ("backends", "counters", "endpoints", "goals", "hosts", "proxies", "replicas", "snapshots")

    def __init__(self) -> None:
        """The empty checkpoint of a new system."""
        self.backends: Mapping[BackendTag, Backend] = {}
        self.endpoints: Mapping[EndpointTag, Endpoint] = {}
        self.replicas: Mapping[BackendTag, Mapping[ReplicaTag, Replica]] = {}
        """By backend, because every decision is about one backend's replicas."""
        self.goals: Mapping[GoalId, Goal] = {}
        self.hosts: Mapping[HostId, HostRecord] = {}
        self.proxies: Mapping[ProxyId, ProxyRecord] = {}
        self.snapshots: Mapping[str, SnapshotRecord] = {}
        self.counters = Counters()

    def applied(self, changes: Changes) -> Checkpoint:
        """The checkpoint after ``changes``; kinds that did not change are shared with this one."""
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
        for replicas in self.replicas.values():
            yield from replicas.values()
        yield from self.goals.values()
        yield from self.hosts.values()
        yield from self.proxies.values()
        yield from self.snapshots.values()
        yield self.counters


class Draft:
    """A checkpoint being changed by one decision; remembers what changed against its base."""

    def __init__(self, base: Checkpoint) -> None:
        self._base = base
        self._changed: dict[Key, CheckpointObject | None] = {}
        self._journal: list[tuple[Key, CheckpointObject | None]] = []
        self.backends: dict[BackendTag, Backend] = dict(base.backends)
        self.endpoints: dict[EndpointTag, Endpoint] = dict(base.endpoints)
        self.replicas: dict[BackendTag, Mapping[ReplicaTag, Replica]] = dict(base.replicas)
        self.goals: dict[GoalId, Goal] = dict(base.goals)
        self.hosts: dict[HostId, HostRecord] = dict(base.hosts)
        self.proxies: dict[ProxyId, ProxyRecord] = dict(base.proxies)
        self.snapshots: dict[str, SnapshotRecord] = dict(base.snapshots)
        self.counters = base.counters
        self._own: dict[BackendTag, dict[ReplicaTag, Replica]] = {}
        """Replicas of the backends that this draft touched; the others' are shared with the base."""

    def _own_replicas(self, tag: BackendTag) -> dict[ReplicaTag, Replica]:
        """The backend's replicas, to be changed in place: copied once, however many of them change."""
        own = self._own.get(tag)
        if own is None:
            own = self._own[tag] = dict(self.replicas.get(tag, {}))
        return own

    def put(self, value: CheckpointObject) -> None:
        """Add or replace an object."""
        key = key_of(value)
        self._journal.append((key, self._lookup(key)))
        self._put(key, value)

    def _put(self, key: Key, value: CheckpointObject) -> None:
        self._changed[key] = value
        match value:
            case Backend():
                self.backends[value.backend_tag] = value
            case Endpoint():
                self.endpoints[value.endpoint_tag] = value
            case Replica():
                own = self._own_replicas(value.backend_tag)
                own[value.replica_tag] = value
                self.replicas[value.backend_tag] = own
            case Goal():
                self.goals[value.goal_id] = value
            case HostRecord():
                self.hosts[value.host_id] = value
            case ProxyRecord():
                self.proxies[value.proxy_id] = value
            case SnapshotRecord():
                self.snapshots[value.key] = value
            case Counters():
                self.counters = value

    def delete(self, key: Key) -> None:
        """Remove an object; one that is not there is no error."""
        self._journal.append((key, self._lookup(key)))
        self._delete(key)

    def _delete(self, key: Key) -> None:
        kind, name = key
        self._changed[key] = None
        match kind:
            case Kind.BACKEND:
                self.backends.pop(BackendTag(name), None)
            case Kind.ENDPOINT:
                self.endpoints.pop(EndpointTag(name), None)
            case Kind.REPLICA:
                tag = ReplicaTag(name)
                backend_tag = backend_tag_of(tag)
                own = self._own_replicas(backend_tag)
                own.pop(tag, None)
                if own:
                    self.replicas[backend_tag] = own
                else:
                    self.replicas.pop(backend_tag, None)
            case Kind.GOAL:
                self.goals.pop(GoalId(name), None)
            case Kind.HOST:
                self.hosts.pop(HostId(name), None)
            case Kind.PROXY:
                self.proxies.pop(ProxyId(name), None)
            case Kind.SNAPSHOT:
                self.snapshots.pop(name, None)
            case Kind.COUNTERS:
                raise AssertionError("the counters are never deleted")

    def _lookup(self, key: Key) -> CheckpointObject | None:
        return lookup(self, key)

    def base_replica(self, tag: ReplicaTag) -> Replica | None:
        """The replica as it was before this draft."""
        return self._base.replicas.get(backend_tag_of(tag), {}).get(tag)

    def mark(self) -> int:
        """A point to go back to."""
        return len(self._journal)

    def roll_back(self, mark: int) -> None:
        """Undo everything since ``mark``, except that numbers once given stay given."""
        counters = self.counters
        while len(self._journal) > mark:
            key, value = self._journal.pop()
            if value is None:
                self._delete(key)
            else:
                self._put(key, value)
        self._put(COUNTERS_KEY, counters)

    def next_goal_id(self) -> GoalId:
        """A new goal id; ids tell their order, so an unknown one is told from a forgotten one."""
        self.put(msgspec.structs.replace(self.counters, goal=self.counters.goal + 1))
        return GoalId(f"g{self.counters.goal}")

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
        self.put(msgspec.structs.replace(self.counters, generation=self.counters.generation + 1))
        self.put(HostRecord(host_id=host_id, generation=self.counters.generation))
        return self.counters.generation

    def changes(self) -> Changes:
        """What differs from the base; objects put back as they were do not count."""
        puts: list[CheckpointObject] = []
        deletes: list[Key] = []
        for key, value in self._changed.items():
            before = lookup(self._base, key)
            if value is None and before is not None:
                deletes.append(key)
            elif value is not None and value != before:
                puts.append(value)
        return Changes(tuple(puts), tuple(deletes))

    def checkpoint(self) -> Checkpoint:
        """The draft as a checkpoint; the draft must not be used any more."""
        result = Checkpoint()
        result.backends, result.endpoints, result.replicas = self.backends, self.endpoints, self.replicas
        result.goals, result.hosts, result.snapshots = self.goals, self.hosts, self.snapshots
        result.proxies = self.proxies
        result.counters = self.counters
        return result


def lookup(checkpoint: Checkpoint | Draft, key: Key) -> CheckpointObject | None:
    """The object under ``key`` or None."""
    kind, name = key
    match kind:
        case Kind.BACKEND:
            return checkpoint.backends.get(BackendTag(name))
        case Kind.ENDPOINT:
            return checkpoint.endpoints.get(EndpointTag(name))
        case Kind.REPLICA:
            tag = ReplicaTag(name)
            return checkpoint.replicas.get(backend_tag_of(tag), {}).get(tag)
        case Kind.GOAL:
            return checkpoint.goals.get(GoalId(name))
        case Kind.HOST:
            return checkpoint.hosts.get(HostId(name))
        case Kind.PROXY:
            return checkpoint.proxies.get(ProxyId(name))
        case Kind.SNAPSHOT:
            return checkpoint.snapshots.get(name)
        case Kind.COUNTERS:
            return checkpoint.counters
