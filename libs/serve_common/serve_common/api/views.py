"""What queries answer: the system as callers see it.

Why not what the controller stores: callers depend on these words, and the checkpoint must be free to change. They stand
on one page, like `commands` and `queries`: together the three are the admin API.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import msgspec

from serve_common.config.backend import BackendConfig
from serve_common.config.endpoint import EndpointOptions
from serve_common.config.replica import ReplicaConfig
from serve_common.names import GoalId


class GoalStatus(Enum):
    """Where an accepted change stands."""

    PENDING = "pending"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    SUPERSEDED = "superseded"


class GoalView(msgspec.Struct, frozen=True, kw_only=True):
    """One goal as callers see it; also what is published on ``serve.event.goal.<goal_id>``."""

    goal_id: GoalId
    status: GoalStatus
    error: str = ""
    """Of a failed one: the user's traceback or the reason. Of a superseded one: the goal that replaced it."""
    message: str = ""
    """Of a pending one: what it waits for, for people."""


class DeploymentStatus(Enum):
    """Health of a deployment as a whole."""

    UPDATING = "updating"
    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"
    DELETING = "deleting"
    DELETED = "deleted"


class ReplicaView(msgspec.Struct, frozen=True, kw_only=True):
    """One replica: ``state`` is the controller's word for it."""

    replica_tag: str
    state: str
    host_id: str | None
    version: str | None
    message: str = ""


class DeploymentView(msgspec.Struct, frozen=True, kw_only=True):
    """One deployment."""

    name: str
    status: DeploymentStatus
    message: str
    """Why it is not healthy, or the last goal's error; empty when all is well."""
    route_prefix: str | None
    methods: list[str]
    version: str | None
    """The version that is wanted; None is unversioned."""
    code_version: int
    """Counts code changes of this deployment."""
    backend_config: BackendConfig
    replica_config: ReplicaConfig
    goal_id: GoalId
    goal_status: GoalStatus
    replicas: list[ReplicaView]
    application: str = ""
    """Empty for one that was deployed by itself."""
    is_ingress: bool = False
    """Whether its application's route leads to it."""
    started_at: float = 0.0
    """When it was first deployed, seconds since 1970."""
    ended_at: float | None = None
    """When it was gone; None while it is there."""
    endpoint_options: EndpointOptions = EndpointOptions()


class ApplicationView(msgspec.Struct, frozen=True, kw_only=True):
    """One application."""

    name: str
    status: DeploymentStatus
    """The worst of its deployments'."""
    message: str
    route_prefix: str | None
    ingress: str
    """The deployment that the route leads to."""
    deployments: list[str]
    goal_id: GoalId
    goal_status: GoalStatus


class BackendView(msgspec.Struct, frozen=True, kw_only=True):
    """One backend and its replicas."""

    backend_tag: str
    backend_config: BackendConfig
    replica_config: ReplicaConfig
    replicas: list[ReplicaView]
    status: DeploymentStatus = DeploymentStatus.HEALTHY
    message: str = ""
    goal_id: GoalId | None = None
    goal_status: GoalStatus = GoalStatus.SUCCEEDED


class BackendConfigView(msgspec.Struct, frozen=True, kw_only=True):
    """One backend's configuration."""

    backend_tag: str
    backend_config: BackendConfig
    replica_config: ReplicaConfig
    version: str | None


class EndpointView(msgspec.Struct, frozen=True, kw_only=True):
    """One endpoint."""

    endpoint_tag: str
    route: str | None
    methods: list[str]
    traffic: dict[str, float]
    shadows: dict[str, float] = {}
    """Proportion of requests copied to each backend."""
    options: EndpointOptions = EndpointOptions()


class HostView(msgspec.Struct, frozen=True, kw_only=True):
    """One host as last heard."""

    host_id: str
    status: str
    report_age_s: float
    resources: dict[str, float]
    num_replicas: int
    draining: bool = False
    """It was told by `drain_host` to run nothing."""


class ProxyView(msgspec.Struct, frozen=True, kw_only=True):
    """One proxy as last heard."""

    proxy_id: str
    status: str
    report_age_s: float
    address: str
    applied_snapshot_id: int


class AutoscalingView(msgspec.Struct, frozen=True, kw_only=True):
    """What the autoscaling of one backend saw last, and why it moved or held."""

    backend_tag: str
    paused: str = ""
    """By what; empty while it is on."""
    verdict: str = ""
    """See `core.autoscaling.values.Verdict`; empty before the first decision of this leader."""
    seen: float | None = None
    """Requests worked on and waiting, or what the query gave; None: not known."""
    wanted: float | None = None
    """Replicas that this comes to, before limits and delays."""
    num_replicas: int
    """As decided."""
    min_replicas: int
    max_replicas: int
    why: str = ""
    source: str = ""
    """``prometheus``, ``scrape`` or empty."""
    decided_at: float | None = None
    """Seconds since 1970."""
    data_age_s: float | None = None
    """Of the newest reading that could be used."""


class StatusView(msgspec.Struct, frozen=True, kw_only=True):
    """The whole system at once."""

    controller_id: str
    epoch: int
    store_available: bool
    snapshot_id: int
    deployments: list[DeploymentView]
    hosts: list[HostView]
    proxies: list[ProxyView]
    autoscaling: list[AutoscalingView] = []
    """Of each backend that has one."""
    store_restored_at: float | None = None
    """When a leader last found Postgres restored to an earlier state, seconds since 1970; None for never."""


class BackupPage(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a backup's file."""

    backup_id: str
    page: int
    pages: int
    data: bytes


class SnapshotView(msgspec.Struct, frozen=True, kw_only=True):
    """One deployment in short, as early Ray Serve's snapshot had it."""

    name: str
    class_name: str
    version: str
    """``Unversioned`` for none."""
    route: str | None
    status: DeploymentStatus
    start_time: float
    """Seconds since 1970."""
    end_time: float | None
    """None while it is there."""


class EventView(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that happened."""

    at: float
    """Seconds since 1970."""
    kind: str
    """``goal``, ``replica``, ``backend``, ``autoscaling``, ``host``, ``proxy`` or ``audit``."""
    subject: str
    """What it is about: a tag or an id."""
    message: str
    """For people."""
    state: str = ""
    """What it is now."""
    goal_id: GoalId | None = None


class HistoryView(msgspec.Struct, frozen=True, kw_only=True):
    """One change that was accepted."""

    id: int
    at: float
    who: str
    """Who the client claims to be, unverified. Printable, at most 200 characters; empty when it says nothing."""
    epoch: int
    verb: str
    subject: str
    goal_id: GoalId | None
    request: Any
    """The command."""
    old: Any = None
    """What it changed, as it was; None for what was not there."""
    new: Any = None


class RevisionView(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that a deployment or backend was."""

    revision: int
    at: float
    goal_id: GoalId
    status: GoalStatus
    """How its goal ended."""
    is_current: bool
    version: str | None
    import_path: str
    num_replicas: int
    route_prefix: str | None = None


class PlannedAction(Enum):
    """What would happen to a replica."""

    START = "start"
    STOP = "stop"
    RECONFIGURE = "reconfigure"


class PlannedReplica(msgspec.Struct, frozen=True, kw_only=True):
    """What would happen to one replica, and why."""

    action: PlannedAction
    backend_tag: str
    replica_tag: str | None
    """None: a new one."""
    why: str


class PlanView(msgspec.Struct, frozen=True, kw_only=True):
    """What a command would do. One that would be refused is answered with its refusal instead."""

    updating: bool
    """False: there is nothing to do."""
    replicas: list[PlannedReplica]
    notes: list[str]
    """What else would change, and what is in the way, for people."""


class EndpointLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of one endpoint over all proxies, since each of them began: two of these make a rate."""

    endpoint_tag: str
    requests: float
    errors: float
    """Of these, answered with status 500 and above."""
    seconds_buckets: dict[str, float]
    """Requests answered within each upper bound of seconds, as Prometheus has them; ``+Inf`` is all."""


class BackendLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What one backend bears now."""

    backend_tag: str
    in_flight: float
    queued: float


class LoadView(msgspec.Struct, frozen=True, kw_only=True):
    """One scrape of all services, summed up."""

    at: float
    """Seconds since 1970."""
    endpoints: list[EndpointLoad]
    backends: list[BackendLoad]
    unreachable: list[str]
    """Addresses that did not answer in time."""
