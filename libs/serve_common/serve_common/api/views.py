"""Replies to queries: the system as callers see it.

Why not the controller's stored objects: callers depend on these fields, and the checkpoint must be free to change.
Together with `commands` and `queries` these are the admin API.
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
    """State of an accepted change."""

    PENDING = "pending"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    SUPERSEDED = "superseded"


class GoalView(msgspec.Struct, frozen=True, kw_only=True):
    """One goal as callers see it; also what is published on ``serve.event.goal.<goal_id>``."""

    goal_id: GoalId
    status: GoalStatus
    error: str = ""
    """FAILED: the user's traceback or the reason. SUPERSEDED: the goal that replaced it."""
    message: str = ""
    """PENDING: what the goal waits for, for people."""


class DeploymentStatus(Enum):
    """Health of a deployment as a whole."""

    UPDATING = "updating"
    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"
    DELETING = "deleting"
    DELETED = "deleted"


class ReplicaView(msgspec.Struct, frozen=True, kw_only=True):
    """One replica; ``state`` is its state in the controller."""

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
    """Why it is not healthy, or the last goal's error; empty when it is healthy."""
    route_prefix: str | None
    methods: list[str]
    version: str | None
    """The target version; None is unversioned."""
    code_version: int
    """Number of code changes of this deployment."""
    backend_config: BackendConfig
    replica_config: ReplicaConfig
    goal_id: GoalId
    goal_status: GoalStatus
    replicas: list[ReplicaView]
    application: str = ""
    """Name of its application; empty for a deployment that was deployed by itself."""
    is_ingress: bool = False
    """Whether its application's route leads to it."""
    started_at: float = 0.0
    """When it was first deployed, in seconds since 1970."""
    ended_at: float | None = None
    """When it was deleted, in seconds since 1970; None while it exists."""
    endpoint_options: EndpointOptions = EndpointOptions()


class ApplicationView(msgspec.Struct, frozen=True, kw_only=True):
    """One application."""

    name: str
    status: DeploymentStatus
    """The worst status of its deployments."""
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
    """Proportion of requests copied to each shadow backend."""
    options: EndpointOptions = EndpointOptions()


class HostView(msgspec.Struct, frozen=True, kw_only=True):
    """One host as of its last report."""

    host_id: str
    status: str
    report_age_s: float
    resources: dict[str, float]
    num_replicas: int
    draining: bool = False
    """Whether `drain_host` has drained it, so that it runs nothing."""


class ProxyView(msgspec.Struct, frozen=True, kw_only=True):
    """One proxy as of its last report."""

    proxy_id: str
    status: str
    report_age_s: float
    address: str
    applied_snapshot_id: int


class AutoscalingView(msgspec.Struct, frozen=True, kw_only=True):
    """The last load, decision and reason of one backend's autoscaling."""

    backend_tag: str
    paused: str = ""
    """What paused it; empty while it is active."""
    verdict: str = ""
    """Kind of the last decision, such as ``up``; empty before the first decision of this leader."""
    seen: float | None = None
    """Running and waiting requests, or the result of the query; None: not known."""
    wanted: float | None = None
    """Replicas for this load, before limits and delays."""
    num_replicas: int
    """Number of replicas decided on."""
    min_replicas: int
    max_replicas: int
    why: str = ""
    source: str = ""
    """``prometheus``, ``scrape`` or empty."""
    decided_at: float | None = None
    """Time of the last decision, in seconds since 1970."""
    data_age_s: float | None = None
    """Age of the newest usable load sample, in seconds."""


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
    """Autoscaling of each backend that has it."""
    store_restored_at: float | None = None
    """When a leader last found Postgres restored to an earlier state, in seconds since 1970; None for never."""


class BackupPage(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a backup's file."""

    backup_id: str
    page: int
    pages: int
    data: bytes


class SnapshotView(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of one deployment, as in the snapshot of early Ray Serve."""

    name: str
    class_name: str
    version: str
    """``Unversioned`` for none."""
    route: str | None
    status: DeploymentStatus
    start_time: float
    """Seconds since 1970."""
    end_time: float | None
    """Seconds since 1970; None while it exists."""


class EventView(msgspec.Struct, frozen=True, kw_only=True):
    """One event."""

    at: float
    """Seconds since 1970."""
    kind: str
    """``goal``, ``replica``, ``backend``, ``autoscaling``, ``host``, ``proxy`` or ``audit``."""
    subject: str
    """Tag or id of the object concerned."""
    message: str
    """Description for people."""
    state: str = ""
    """State of the object after the event."""
    goal_id: GoalId | None = None


class HistoryView(msgspec.Struct, frozen=True, kw_only=True):
    """One accepted change."""

    id: int
    at: float
    who: str
    """Name that the client claims, unverified. Printable, at most 200 characters; empty if it claims none."""
    epoch: int
    verb: str
    subject: str
    goal_id: GoalId | None
    request: Any
    """The command."""
    old: Any = None
    """The changed object before the change; None if it did not exist."""
    new: Any = None
    """The changed object after the change."""


class RevisionView(msgspec.Struct, frozen=True, kw_only=True):
    """One revision of a deployment or backend."""

    revision: int
    at: float
    goal_id: GoalId
    status: GoalStatus
    """Status of its goal."""
    is_current: bool
    version: str | None
    import_path: str
    num_replicas: int
    route_prefix: str | None = None


class PlannedAction(Enum):
    """What a plan does to a replica."""

    START = "start"
    STOP = "stop"
    RECONFIGURE = "reconfigure"


class PlannedReplica(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan does to one replica, and why."""

    action: PlannedAction
    backend_tag: str
    replica_tag: str | None
    """None: a new replica."""
    why: str


class PlanView(msgspec.Struct, frozen=True, kw_only=True):
    """What a command would do. A command that would be refused is answered with its refusal instead."""

    updating: bool
    """False: there is nothing to do."""
    replicas: list[PlannedReplica]
    notes: list[str]
    """Other changes, and obstacles, for people."""


class EndpointLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of one endpoint over all proxies since each of them started; two of these give a rate."""

    endpoint_tag: str
    requests: float
    errors: float
    """Requests answered with status 500 and above."""
    seconds_buckets: dict[str, float]
    """Cumulative count of requests by upper bound of seconds, as in Prometheus; ``+Inf`` counts all."""


class BackendLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Current load of one backend."""

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
    """Addresses of services that did not respond in time."""
