"""The objects of the checkpoint: everything that the controller must not forget.

Why one value per row: a change writes only the rows that it changed, so its cost does not grow with the rest of the
state. Values are frozen; a change makes a new one.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from serve_common.names import BackendTag, EndpointTag, GoalId, HostId, ProxyId, ReplicaTag, ordinal_of
from serve_common.values import BackendConfig, ReplicaConfig
from serve_common.wires.snapshots import Snapshot
from serve_common.wires.views import GoalStatus


class ReplicaState(Enum):
    """What was decided about one replica; the moves between them are in `core.transitions`."""

    SHOULD_START = "should_start"
    """Wanted; no host chosen yet."""
    STARTING = "starting"
    """In a host's goal; not heard running yet."""
    RUNNING = "running"
    UPDATING = "updating"
    """Running; told to take a newer configuration. Still routed to."""
    UNHEALTHY = "unhealthy"
    """Running; its health check fails. Not routed to."""
    SHOULD_STOP = "should_stop"
    """Not wanted any more; not yet known to its host. Not routed to."""
    STOPPING = "stopping"
    """Its host knows and drains it."""
    STOPPED = "stopped"
    """Gone; the row is deleted in the same change, so this state is never stored."""


class BackendVersion(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that a backend was told to be."""

    code_version: int
    """Counts changes of the code: replicas of another one are replaced."""
    config_version: int
    """Counts changes that a running replica must hear of: replicas of another one are reconfigured in place."""
    version: str | None
    """The user's name of the code, None for unversioned."""
    replica_config: ReplicaConfig
    backend_config: BackendConfig


class Backend(msgspec.Struct, frozen=True, kw_only=True):
    """A backend: what it should be, and what it last was with success."""

    backend_tag: BackendTag
    goal_id: GoalId
    """The newest goal about this backend."""
    target: BackendVersion
    last_good: BackendVersion | None
    """What the last succeeded goal made; a failed goal puts it back as the target."""
    others: list[BackendVersion] = []
    """Older versions that replicas still run."""
    newest_code_version: int
    newest_config_version: int
    deleting: bool = False
    halted: bool = False
    """The first version failed and there is none to go back to: nothing is started until the next deploy."""
    start_failures: int = 0
    """Failed starts of the target's code since the last success."""
    last_error: str = ""
    retry_at: float = 0.0
    """No start before then, seconds since 1970."""

    def versions(self) -> list[BackendVersion]:
        """Every version that a replica may have."""
        known = [self.target, *self.others]
        return known if self.last_good is None else [*known, self.last_good]

    @property
    def num_wanted(self) -> int:
        """How many replicas should run."""
        return 0 if self.deleting or self.halted else self.target.backend_config.num_replicas


class EndpointConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How an endpoint is reached and where its traffic goes."""

    route: str | None
    methods: list[str]
    traffic: dict[BackendTag, float]


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """An endpoint: what it is now, and what it was with the last success."""

    endpoint_tag: EndpointTag
    target: EndpointConfig
    last_good: EndpointConfig | None


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """One replica that was decided on."""

    replica_tag: ReplicaTag
    backend_tag: BackendTag
    code_version: int
    config_version: int
    """What it should run; while UPDATING it may still run an older one."""
    state: ReplicaState
    since: float
    """When it came into this state, seconds since 1970."""
    host_id: HostId | None = None
    generation: int = 0
    """Of its host's goal when the replica was put in, or taken out of, that goal."""
    message: str = ""
    """Why it waits, for people."""

    @property
    def ordinal(self) -> int:
        """The number in its tag: younger replicas have higher ones."""
        return ordinal_of(self.replica_tag)


class GoalKind(Enum):
    """What a goal's success means."""

    DEPLOY = "deploy"
    DELETE = "delete"


class Goal(msgspec.Struct, frozen=True, kw_only=True):
    """One accepted change that a caller can wait for."""

    goal_id: GoalId
    kind: GoalKind
    backend_tag: BackendTag
    status: GoalStatus
    created_at: float
    request_id: str | None = None
    error: str = ""
    finished_at: float | None = None


class HostRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What must be remembered of a host: the number of its newest goal."""

    host_id: HostId
    generation: int


class ProxyRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A proxy that goals wait for. Durable, so that a new leader waits for proxies it has not heard of yet."""

    proxy_id: ProxyId


class SnapshotRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The newest snapshot of one bucket key; recorded before it is published."""

    key: str
    snapshot: Snapshot


class Counters(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers that must never be given twice; each is the last one given."""

    goal: int = 0
    ordinal: int = 0
    generation: int = 0
    snapshot: int = 0


CheckpointObject = Backend | Endpoint | Replica | Goal | HostRecord | ProxyRecord | SnapshotRecord | Counters
