"""Replies to queries: the system as callers see it.

Why not the controller's stored objects: callers depend on these fields, and the checkpoint must be free to change.
Together with `commands` and `queries` these are the admin API.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import msgspec

from serve_common.config.backend import BackendConfig, EndpointOptions, ReplicaConfig
from serve_common.config.capture import CaptureConfig
from serve_common.names import GoalId


class GoalStatus(Enum):
    """State of an accepted change."""

    PENDING = "pending"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    SUPERSEDED = "superseded"
    """A later change of the same object replaced it before it ended."""


class GoalView(msgspec.Struct, frozen=True, kw_only=True):
    """One goal as callers see it."""

    goal_id: GoalId
    """Id of the goal."""
    status: GoalStatus
    """Whether the change is in progress, and otherwise how it ended."""
    error: str = ""
    """FAILED: the user's traceback or the reason. SUPERSEDED: the goal that replaced it."""
    message: str = ""
    """PENDING: what the goal waits for, for people."""


class DeploymentStatus(Enum):
    """Health of a deployment as a whole."""

    UPDATING = "updating"
    """A change is in progress."""
    HEALTHY = "healthy"
    """As many replicas serve as are wanted. The last change may have failed and been undone; then `message` says so."""
    UNHEALTHY = "unhealthy"
    """Fewer replicas serve than are wanted, or the first version failed."""
    DELETING = "deleting"
    DELETED = "deleted"


HEALTH_CHECKS_FAILED = "its health checks failed"
"""Message of a replica that is replaced for that, until it has stopped."""


class ReplicaView(msgspec.Struct, frozen=True, kw_only=True):
    """One replica; ``state`` is its state in the controller."""

    replica_tag: str
    """``app/backend#ordinal``."""
    state: str
    """``should_start`` (waits for a host), ``starting``, ``running``, ``updating`` (gets a new configuration),
    ``unhealthy``, ``should_stop`` or ``stopping``. Requests go to ``running`` and ``updating`` ones only."""
    host_id: str | None
    """Host that it was placed on; None while it waits for one."""
    version: str | None
    """The user's name for the code that it runs; None is unversioned."""
    message: str = ""
    """Why it waits, failed or is unhealthy; empty when it is healthy."""


class DeploymentView(msgspec.Struct, frozen=True, kw_only=True):
    """One deployment."""

    name: str
    """``app/deployment``."""
    status: DeploymentStatus
    """Health of the deployment."""
    message: str
    """Why it is not healthy, or the last goal's error; empty when it is healthy."""
    route_prefix: str | None
    """HTTP path prefix; None is headless."""
    methods: list[str]
    """Accepted HTTP methods."""
    version: str | None
    """The target version; None is unversioned."""
    code_version: int
    """Number of code changes of this deployment."""
    backend_config: BackendConfig
    """Target number and treatment of replicas."""
    replica_config: ReplicaConfig
    """Target code, and resources of each replica."""
    goal_id: GoalId
    """Goal of the last change."""
    goal_status: GoalStatus
    """Status of that goal; `GoalStatus.SUCCEEDED` also for one that is no longer retained."""
    replicas: list[ReplicaView]
    """Replicas, the oldest first. Empty where the query leaves them out, and for a deleted deployment."""
    rollout_replicas: list[ReplicaView] = []
    """Replicas of the canary and then the baseline, while a rollout has any; left out where ``replicas`` are."""
    application: str = ""
    """Name of its application; empty for a deployment that was deployed by itself."""
    is_ingress: bool = False
    """Whether its application's route leads to it."""
    started_at: float = 0.0
    """When it was first deployed, in seconds since 1970."""
    ended_at: float | None = None
    """When it was deleted, in seconds since 1970; None while it exists."""
    endpoint_options: EndpointOptions = EndpointOptions()
    """Options of the deployment's endpoint."""


class ApplicationView(msgspec.Struct, frozen=True, kw_only=True):
    """One application."""

    name: str
    """Name of the application."""
    status: DeploymentStatus
    """The worst status of its deployments."""
    message: str
    """Why it is not healthy, or the last goal's error; empty when it is healthy."""
    route_prefix: str | None
    """HTTP path prefix of the ingress; None is headless."""
    ingress: str
    """The deployment that the route leads to."""
    deployments: list[str]
    """Names of its deployments, as ``app/deployment``."""
    goal_id: GoalId
    """Goal of the last change."""
    goal_status: GoalStatus
    """Status of that goal; `GoalStatus.SUCCEEDED` also for one that is no longer retained."""
    deployed_at: float = 0.0
    """When it was last deployed with a change, in seconds since 1970."""
    app_config: dict[str, Any] | None = None
    """What the configuration file had for it; None when it was deployed without one."""
    build_error: str = ""
    """Why its last deploy could not import or build it; empty when there was no such error. What an earlier deploy
    made is in the other fields: without one there are no deployments."""


class BackendView(msgspec.Struct, frozen=True, kw_only=True):
    """One backend and its replicas."""

    backend_tag: str
    """Tag of the backend."""
    backend_config: BackendConfig
    """Target number and treatment of replicas."""
    replica_config: ReplicaConfig
    """Target code, and resources of each replica."""
    replicas: list[ReplicaView]
    """Replicas, the oldest first."""
    status: DeploymentStatus = DeploymentStatus.HEALTHY
    """Health of the backend."""
    message: str = ""
    """Why it is not healthy, or the last goal's error; empty when it is healthy."""
    goal_id: GoalId | None = None
    """Goal of the last change."""
    goal_status: GoalStatus = GoalStatus.SUCCEEDED
    """Status of that goal; `GoalStatus.SUCCEEDED` also for one that is no longer retained."""


class BackendConfigView(msgspec.Struct, frozen=True, kw_only=True):
    """One backend's configuration."""

    backend_tag: str
    """Tag of the backend."""
    backend_config: BackendConfig
    """Target number and treatment of replicas."""
    replica_config: ReplicaConfig
    """Target code, and resources of each replica."""
    version: str | None
    """The user's name for the target code; None is unversioned."""


class EndpointView(msgspec.Struct, frozen=True, kw_only=True):
    """One endpoint."""

    endpoint_tag: str
    """Tag of the endpoint."""
    route: str | None
    """HTTP path prefix; None is headless."""
    methods: list[str]
    """Accepted HTTP methods."""
    traffic: dict[str, float]
    """Weight of each backend, 0 to 1; the sum is 1."""
    shadows: dict[str, float] = {}
    """Proportion of requests copied to each shadow backend."""
    options: EndpointOptions = EndpointOptions()
    """Options of the endpoint."""


class CaptureView(msgspec.Struct, frozen=True, kw_only=True):
    """What is captured of the requests of one endpoint."""

    endpoint_tag: str
    """Tag of the endpoint."""
    capture: CaptureConfig
    """Which requests, and what is redacted."""
    goal_id: GoalId
    """The goal that set it."""


class HostView(msgspec.Struct, frozen=True, kw_only=True):
    """One host as of its last report."""

    host_id: str
    """Id of the host."""
    status: str
    """``live``, ``leaving`` (drains before it ends), ``suspect`` (silent for 3 s) or ``lost`` (silent for 8 s)."""
    report_age_s: float
    """Seconds since its last report."""
    resources: dict[str, float]
    """Total resources by Ray's names: CPU, GPU, memory (bytes) and custom ones."""
    num_replicas: int
    """Replicas placed there, in any state."""
    draining: bool = False
    """Whether `drain_host` has drained it, so that it runs nothing."""


class ProxyView(msgspec.Struct, frozen=True, kw_only=True):
    """One proxy as of its last report."""

    proxy_id: str
    """Id of the proxy."""
    status: str
    """``live``, ``leaving`` (finishes its requests before it ends) or ``lost`` (silent)."""
    report_age_s: float
    """Seconds since its last report."""
    address: str
    """Address that it serves HTTP on; with ``https://`` before it where that is encrypted."""
    applied_snapshot_id: int
    """Newest snapshot that its router has applied."""


class AutoscalingView(msgspec.Struct, frozen=True, kw_only=True):
    """The last load, decision and reason of one backend's autoscaling."""

    backend_tag: str
    """Tag of the backend."""
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
    """Lower limit of the number of replicas."""
    max_replicas: int
    """Upper limit of the number of replicas."""
    why: str = ""
    """Reason for the last decision, or why there is none, for people."""
    source: str = ""
    """``prometheus``, ``scrape`` or empty."""
    decided_at: float | None = None
    """Time of the last decision, in seconds since 1970."""
    data_age_s: float | None = None
    """Age of the newest usable load sample, in seconds."""


class StatusView(msgspec.Struct, frozen=True, kw_only=True):
    """The whole system at once."""

    controller_id: str
    """Id of the leading controller."""
    epoch: int
    """Number of its term of leadership."""
    store_available: bool
    """Whether Postgres answers; without it changes are refused."""
    snapshot_id: int
    """Newest snapshot that was recorded."""
    deployments: list[DeploymentView]
    """All deployments; empty if the query leaves them out."""
    hosts: list[HostView]
    """All hosts that reported recently."""
    proxies: list[ProxyView]
    """All proxies that reported recently."""
    autoscaling: list[AutoscalingView] = []
    """Autoscaling of each backend that has it."""
    store_restored_at: float | None = None
    """When a leader last found Postgres restored to an earlier state, in seconds since 1970; None for never."""
    is_shut_down: bool = False
    """Whether nothing was deployed since a shutdown."""


class BackupPage(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a backup's file."""

    backup_id: str
    """Id of the backup, for the queries of further pages."""
    page: int
    """Number of this page, from 0."""
    pages: int
    """Number of pages of the file."""
    data: bytes
    """Content of the page."""


class SnapshotView(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of one deployment, as in the snapshot of early Ray Serve."""

    name: str
    """``app/deployment``."""
    class_name: str
    """Class or function that ``import_path`` names."""
    version: str
    """``Unversioned`` for none."""
    route: str | None
    """HTTP path prefix; None is headless."""
    status: DeploymentStatus
    """Health of the deployment."""
    start_time: float
    """Seconds since 1970."""
    end_time: float | None
    """Seconds since 1970; None while it exists."""


class EventView(msgspec.Struct, frozen=True, kw_only=True):
    """One event; also what is published on ``serve.event.<kind>.<subject>``."""

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
    """Goal that the event belongs to, if any."""


class HistoryView(msgspec.Struct, frozen=True, kw_only=True):
    """One accepted change."""

    id: int
    """Number of the entry; later ones are higher."""
    at: float
    """When the change was accepted, in seconds since 1970."""
    principal: str
    """Name that the client claims, unverified. Printable, at most 200 characters; empty if it claims none."""
    epoch: int
    """Term of leadership of the controller that accepted it."""
    verb: str
    """Verb of the command."""
    subject: str
    """Name, tag or id of the object that the command names."""
    goal_id: GoalId | None
    """Goal of the change; None if there was nothing to wait for."""
    request: Any
    """The command."""
    old: Any = None
    """The changed object before the change; None if it did not exist."""
    new: Any = None
    """The changed object after the change."""


class RevisionView(msgspec.Struct, frozen=True, kw_only=True):
    """One revision of a deployment or backend."""

    revision: int
    """Number of the revision, for `Rollback`; later ones are higher."""
    at: float
    """When it was accepted, in seconds since 1970."""
    goal_id: GoalId
    """Goal of the change that made it."""
    status: GoalStatus
    """Status of its goal."""
    is_current: bool
    """Whether it equals the last version that succeeded."""
    version: str | None
    """The user's name for its code; None is unversioned."""
    import_path: str
    """``module:attribute`` of its code."""
    num_replicas: int
    """Number of replicas that it asked for."""
    route_prefix: str | None = None
    """HTTP path prefix; None is headless."""


class PlannedAction(Enum):
    """What a plan does to a replica."""

    START = "start"
    STOP = "stop"
    RECONFIGURE = "reconfigure"
    """Give a running replica the new configuration."""


class PlannedReplica(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan does to one replica, and why."""

    action: PlannedAction
    """What is done to the replica."""
    backend_tag: str
    """Tag of the replica's backend."""
    replica_tag: str | None
    """None: a new replica."""
    why: str
    """Reason, for people."""


class PlanView(msgspec.Struct, frozen=True, kw_only=True):
    """What a command would do. A command that would be refused is answered with its refusal instead."""

    updating: bool
    """False: there is nothing to do."""
    replicas: list[PlannedReplica]
    """Replicas that the command starts, stops or reconfigures."""
    notes: list[str]
    """Other changes, and obstacles, for people."""


class EndpointLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of one endpoint over all proxies since each of them started; two of these give a rate."""

    endpoint_tag: str
    """Tag of the endpoint."""
    requests: float
    """Requests answered, whatever the status."""
    errors: float
    """Requests answered with status 500 and above."""
    seconds_buckets: dict[str, float]
    """Cumulative count of requests by upper bound of seconds, as in Prometheus; ``+Inf`` counts all."""


class BackendLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Current load of one backend."""

    backend_tag: str
    """Tag of the backend."""
    in_flight: float
    """Requests that its replicas work on."""
    queued: float
    """Requests that wait for one of its replicas in routers."""


class LoadView(msgspec.Struct, frozen=True, kw_only=True):
    """One scrape of all services, summed up."""

    at: float
    """Seconds since 1970."""
    endpoints: list[EndpointLoad]
    """Counters of each endpoint."""
    backends: list[BackendLoad]
    """Current load of each backend."""
    unreachable: list[str]
    """Addresses of services that did not respond in time."""


class ErrorView(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Body of an error reply; the headers ``Nats-Service-Error`` and ``…-Code`` summarize it."""

    code: str
    """Stable error code, such as ``not_found``."""
    message: str
    """Explanation for people."""
    field: str = ""
    """Path of the bad field, such as ``backend_config.num_replicas``."""
