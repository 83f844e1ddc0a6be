"""The objects of the checkpoint, and the changes of one transaction.

Each object is stored as one row, and a change writes only the rows that it changed: its cost does not grow with the
rest of the state. Objects are frozen; a change makes new ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, Final

import msgspec

from serve_common.api.views import GoalStatus
from serve_common.config.autoscaling import AutoscalingConfig
from serve_common.config.backend import BackendConfig, EndpointOptions, HttpOptions, ReplicaConfig
from serve_common.config.capture import CaptureConfig
from serve_common.config.runtime_env import setup_seconds
from serve_common.names import BackendTag, EndpointTag, GoalId, HostId, ProxyId, ReplicaTag, parse_ordinal
from serve_common.protocol.reports import ReplicaRank
from serve_common.protocol.snapshots import Snapshot
from serve_controller.core.rollouts.record import Rollout


class ReplicaState(Enum):
    """The decided state of a replica; the transitions are in `core.transitions`."""

    # The members are single objects; Enum's own hash is a Python call, and states are looked up in sets all the time.
    __hash__ = object.__hash__

    SHOULD_START = "should_start"
    """Wanted; no host chosen yet."""
    STARTING = "starting"
    """In a host's goal; not reported running yet."""
    RUNNING = "running"
    UPDATING = "updating"
    """Running; is being given a newer configuration. Still routed to."""
    UNHEALTHY = "unhealthy"
    """Running; its health check fails. Not routed to."""
    SHOULD_STOP = "should_stop"
    """No longer wanted; its host has not acknowledged that yet. Not routed to."""
    STOPPING = "stopping"
    """Its host drains it."""
    STOPPED = "stopped"
    """Gone; the row is deleted in the same change, so this state is never stored."""


class BackendVersion(msgspec.Struct, frozen=True, kw_only=True):
    """One version of a backend: its code and its configuration."""

    code_version: int
    """Counts changes of the code: replicas of another one are replaced."""
    config_version: int
    """Counts changes that running replicas must apply: replicas of another one are reconfigured in place."""
    version: str | None
    """The user's name of the code, None for unversioned."""
    replica_config: ReplicaConfig
    backend_config: BackendConfig

    @property
    def start_seconds(self) -> float:
        """Seconds after which a replica counts as stuck in its start."""
        environment = self.replica_config.ray_actor_options.runtime_env
        return self.backend_config.start_timeout_s + setup_seconds(environment)


class Backend(msgspec.Struct, frozen=True, kw_only=True):
    """A backend: its target and its last good version."""

    backend_tag: BackendTag
    goal_id: GoalId
    """The newest goal about this backend."""
    target: BackendVersion
    last_good: BackendVersion | None
    """Target of the last succeeded goal; a failed goal makes it the target again."""
    retained: BackendVersion | None = None
    """Version that a failed update left running (`OnFailure.KEEP`): its serving replicas are kept while they live."""
    others: list[BackendVersion] = []
    """Further versions that replicas still run."""
    newest_code_version: int
    newest_config_version: int
    newest_revision: int = 0
    deleting: bool = False
    force_kill: bool = False
    """While deleting: replicas are ended without draining."""
    halted: bool = False
    """The first version failed and there is none to roll back to: nothing is started until the next deploy."""
    start_failures: int = 0
    """Failed starts of the target's code since the last success."""
    last_error: str = ""
    retry_at: float = 0.0
    """Earliest time of the next start, seconds since 1970."""
    autoscaling_paused: str = ""
    """Command that paused autoscaling; empty while it is active or not configured. Outlives a deploy."""
    world_size: int = 0
    """The number of wanted replicas that hosts were last told."""

    def versions(self) -> list[BackendVersion]:
        """Every version that a replica may have."""
        return [self.target, *self.others, *(v for v in (self.last_good, self.retained) if v is not None)]

    def get_version(self, config_version: int) -> BackendVersion | None:
        """The version with that number; None if it is no longer retained."""
        return next((v for v in self.versions() if v.config_version == config_version), None)

    @property
    def num_wanted(self) -> int:
        """How many replicas should run."""
        return 0 if self.deleting or self.halted else self.target.backend_config.num_replicas

    @property
    def autoscaling(self) -> AutoscalingConfig | None:
        """The active autoscaling configuration; None without one and for a paused, halted or deleted backend."""
        if self.deleting or self.halted or self.autoscaling_paused:
            return None
        return self.target.backend_config.autoscaling_config


class EndpointConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How an endpoint is reached and where its traffic goes."""

    route: str | None
    methods: list[str]
    traffic: dict[BackendTag, float]
    shadows: dict[BackendTag, float] = {}
    options: EndpointOptions = EndpointOptions()
    is_ingress: bool = False
    """Whether it is the ingress of its application, by which handles find one that has no route."""

    def backend_tags(self) -> set[BackendTag]:
        """Every backend that the endpoint sends or copies requests to."""
        return {*self.traffic, *self.shadows}


class EndpointRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An endpoint: its target and its last good configuration."""

    endpoint_tag: EndpointTag
    target: EndpointConfig
    last_good: EndpointConfig | None
    goal_id: GoalId = GoalId("")
    """The newest goal about this endpoint alone; empty for none."""
    set_alone: list[str] = []
    """Fields of the configuration that this goal, and pending ones that it replaced, set by themselves."""

    def configs(self) -> list[EndpointConfig]:
        """The target, and the configuration that a failed goal may restore."""
        return [self.target] if self.last_good is None else [self.target, self.last_good]

    def with_set_alone(self, config: EndpointConfig) -> EndpointConfig:
        """``config`` with the fields set by the endpoint's own goal."""
        return msgspec.structs.replace(
            config, **{name: getattr(self.target, name) for name in self.set_alone}
        )


class Capture(msgspec.Struct, frozen=True, kw_only=True):
    """That proxies capture requests of an endpoint. It goes with its endpoint."""

    endpoint_tag: EndpointTag
    config: CaptureConfig
    goal_id: GoalId
    """The goal that set it."""


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """The user's unit: a backend and the endpoint of its tag. Retained for a while after it is deleted."""

    tag: BackendTag
    application: str = ""
    """Empty for one that was deployed by itself."""
    started_at: float
    """When it was first deployed, seconds since 1970."""
    ended_at: float | None = None
    """When its last replica had stopped after a deletion; None while it exists."""
    ended_as: BackendVersion | None = None
    """Its version when it was deleted."""
    ended_route: str | None = None
    ended_goal_id: GoalId = GoalId("")
    """Id of the goal that deleted it; empty while it exists."""


class ApplicationVersion(msgspec.Struct, frozen=True, kw_only=True):
    """One version of an application."""

    ingress: BackendTag
    deployments: list[BackendTag]
    takes_over: str | None = None
    """Route that another deployment of the application has until all of them run; then the ingress takes it over."""
    app_config: dict[str, Any] | None = None
    """What a configuration file has for it; None for one that was deployed without."""


class Application(msgspec.Struct, frozen=True, kw_only=True):
    """A group of deployments with one ingress."""

    name: str
    goal_id: GoalId
    target: ApplicationVersion
    last_good: ApplicationVersion | None
    deleting: bool = False


class BuildFailure(msgspec.Struct, frozen=True, kw_only=True):
    """The last deploy of an application, which could not import or build it; until it is deployed or deleted."""

    name: str
    """The application, of which an earlier version may run."""
    goal_id: GoalId
    error: str
    failed_at: float
    app_config: dict[str, Any] | None = None
    """As in `ApplicationVersion`."""


class Revision(msgspec.Struct, frozen=True, kw_only=True):
    """A version of a backend that succeeded: a possible target of a rollback."""

    backend_tag: BackendTag
    revision: int
    at: float
    goal_id: GoalId
    version: BackendVersion
    endpoint: EndpointConfig | None
    """The endpoint's configuration; None for a backend that is no deployment."""


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """One replica, as decided."""

    replica_tag: ReplicaTag
    backend_tag: BackendTag
    code_version: int
    config_version: int
    """Target configuration; while UPDATING the replica may still run an older one."""
    state: ReplicaState
    since: float
    """When it entered this state, seconds since 1970."""
    host_id: HostId | None = None
    generation: int = 0
    """Generation of the host goal that put the replica in or took it out."""
    message: str = ""
    """Why it waits, for people."""
    needs: dict[str, float] = {}
    """Resources it takes from its host, by Ray's names; as of its placement."""
    goal_bytes: int = 0
    """Bytes it takes of its host's goal."""
    force_kill: bool = False
    """While stopping: its host ends it without draining."""
    peer_versions: dict[BackendTag, int] = {}
    """Code versions of its application's other backends when it was placed; its requests prefer those."""
    rank: ReplicaRank | None = None
    """Its ranks among the backend's replicas; None until it is placed."""

    @property
    def ordinal(self) -> int:
        """The number in its tag: younger replicas have higher ones."""
        return parse_ordinal(self.replica_tag)


class GoalKind(Enum):
    """Kind of a goal; decides what its success or failure changes."""

    DEPLOY = "deploy"
    """One backend, and the endpoint of its tag for a deployment."""
    APPLICATION = "application"
    """All deployments of an application at once."""
    DELETE = "delete"
    ROUTE = "route"
    """One endpoint."""
    HTTP = "http"
    """The options of all proxies."""
    DRAIN = "drain"
    """One host."""
    ROLLOUT = "rollout"
    """One rollout, with the backends of its canary and its baseline."""


class Goal(msgspec.Struct, frozen=True, kw_only=True):
    """One accepted change that a caller can wait for."""

    goal_id: GoalId
    kind: GoalKind
    subject: str
    """Name of the changed object, for people: a tag, an application's name, a host."""
    owns: list[str]
    """Keys of the objects it owns (`core.goals`), the most important first. A later goal that owns the first
    one supersedes this goal."""
    status: GoalStatus
    created_at: float
    request_id: str | None = None
    error: str = ""
    finished_at: float | None = None


class HostRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Durable state of a host: the generation of its newest goal, and whether it is drained."""

    host_id: HostId
    generation: int
    draining: bool = False
    goal_id: GoalId = GoalId("")
    """Goal of the newest `drain_host`; empty for none."""
    holder: str = ""
    """Digest (`observed.holder_digest`) of the incarnation that owns the id: a new leader refuses any other one while
    that lives. Empty until it is recorded."""
    adopted_epoch: int = 0
    """The `Counters.restored_epoch` after which the replicas that the host ran by lost goals were adopted; 0 for none.
    Those not adopted may have been stopped since."""


class ProxyRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A proxy that goals wait for. Durable, so that a new leader waits for proxies that have not reported to it yet."""

    proxy_id: ProxyId
    holder: str = ""
    """As in `HostRecord`."""


class HttpRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The HTTP options of all proxies: the target and the last good ones."""

    target: HttpOptions | None
    """None: the proxies' own defaults."""
    last_good: HttpOptions | None
    goal_id: GoalId
    is_shut_down: bool = False
    """Everything was shut down, and no endpoint made since."""


class SnapshotRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The newest snapshot of one bucket key; recorded before it is published."""

    key: str
    snapshot: Snapshot


class Counters(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers that must never be given twice; each field is the last one given."""

    goal: int = 0
    ordinal: int = 0
    generation: int = 0
    snapshot: int = 0
    restored_at: float = 0.0
    """When the counters were last raised because the store had been restored to an earlier state (`core.restored`),
    seconds since 1970; 0 for never."""
    restored_epoch: int = 0
    """The first epoch after that; a host that follows an older one has not received a goal since."""
    restored_ordinal: int = 0
    """The last ordinal of the restored state: higher ones were given in the lost one."""
    restored_snapshot: int = 0
    """Snapshots up to this one are void."""


CheckpointObject = (
    Backend
    | EndpointRecord
    | Deployment
    | Application
    | BuildFailure
    | Rollout
    | Capture
    | Revision
    | Replica
    | Goal
    | HostRecord
    | ProxyRecord
    | HttpRecord
    | SnapshotRecord
    | Counters
)


class ObjectKind(Enum):
    """Kinds of objects; the same words in SQL."""

    BACKEND = "backend"
    ENDPOINT = "endpoint"
    DEPLOYMENT = "deployment"
    APPLICATION = "application"
    BUILD_FAILURE = "build_failure"
    ROLLOUT = "rollout"
    CAPTURE = "capture"
    REVISION = "revision"
    REPLICA = "replica"
    GOAL = "goal"
    HOST = "host"
    PROXY = "proxy"
    HTTP = "http"
    SNAPSHOT = "snapshot"
    COUNTERS = "counters"


Key = tuple[ObjectKind, str]
"""Key of an object: its kind and its name within the kind."""

COUNTERS_KEY: Final[Key] = (ObjectKind.COUNTERS, "counters")
HTTP_RECORD_KEY: Final[Key] = (ObjectKind.HTTP, "options")

CLASSES: Final[Mapping[ObjectKind, type[CheckpointObject]]] = {
    ObjectKind.BACKEND: Backend,
    ObjectKind.ENDPOINT: EndpointRecord,
    ObjectKind.DEPLOYMENT: Deployment,
    ObjectKind.APPLICATION: Application,
    ObjectKind.BUILD_FAILURE: BuildFailure,
    ObjectKind.ROLLOUT: Rollout,
    ObjectKind.CAPTURE: Capture,
    ObjectKind.REVISION: Revision,
    ObjectKind.REPLICA: Replica,
    ObjectKind.GOAL: Goal,
    ObjectKind.HOST: HostRecord,
    ObjectKind.PROXY: ProxyRecord,
    ObjectKind.HTTP: HttpRecord,
    ObjectKind.SNAPSHOT: SnapshotRecord,
    ObjectKind.COUNTERS: Counters,
}


def revision_name(tag: BackendTag, revision: int) -> str:
    """The name of a revision, unique among all backends."""
    return f"{tag}@{revision}"


def get_key(value: CheckpointObject) -> Key:  # noqa: C901, PLR0912 - a table
    """The key under which an object is stored."""
    match value:
        case Backend():
            return ObjectKind.BACKEND, value.backend_tag
        case EndpointRecord():
            return ObjectKind.ENDPOINT, value.endpoint_tag
        case Deployment():
            return ObjectKind.DEPLOYMENT, value.tag
        case Application():
            return ObjectKind.APPLICATION, value.name
        case BuildFailure():
            return ObjectKind.BUILD_FAILURE, value.name
        case Rollout():
            return ObjectKind.ROLLOUT, value.backend_tag
        case Capture():
            return ObjectKind.CAPTURE, value.endpoint_tag
        case Revision():
            return ObjectKind.REVISION, revision_name(value.backend_tag, value.revision)
        case Replica():
            return ObjectKind.REPLICA, value.replica_tag
        case Goal():
            return ObjectKind.GOAL, value.goal_id
        case HostRecord():
            return ObjectKind.HOST, value.host_id
        case ProxyRecord():
            return ObjectKind.PROXY, value.proxy_id
        case HttpRecord():
            return HTTP_RECORD_KEY
        case SnapshotRecord():
            return ObjectKind.SNAPSHOT, value.key
        case Counters():
            return COUNTERS_KEY


class ObjectChanges(msgspec.Struct, frozen=True):
    """The changes of one transaction: objects to write, and keys of objects to delete."""

    puts: tuple[CheckpointObject, ...] = ()
    deletes: tuple[Key, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.puts or self.deletes)


def get_goal_id(number: int) -> GoalId:
    """The id of the goal with that number."""
    return GoalId(f"g{number}")


def parse_number(goal_id: GoalId) -> int:
    """The number in a goal's id; 0 for an invalid id."""
    digits = goal_id.removeprefix("g")
    return (
        int(digits)
        if goal_id.startswith("g") and digits.isascii() and digits.isdigit() and len(digits) < 19
        else 0
    )
