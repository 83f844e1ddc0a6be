"""Commands and queries: what is sent to ``serve.admin.<verb>`` and what comes back, as JSON.

Why msgspec structs: any NATS client can send them, so every field is validated by type with the path of the bad one,
and unknown fields are refused (a misspelt option must not be silently ignored).
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import msgspec

from serve_common.names import GoalId
from serve_common.values import BackendConfig, ReplicaConfig


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all requests."""


class Deploy(Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Make a deployment be as given: a backend plus an endpoint of the same tag that sends everything to it."""

    name: str
    """``deployment`` or ``app/deployment``."""
    replica_config: ReplicaConfig
    backend_config: BackendConfig = BackendConfig()
    route_prefix: str | None = None
    """Where HTTP reaches it; None is headless."""
    methods: list[str] = msgspec.field(default_factory=lambda: ["GET", "POST"])
    version: str | None = None
    """The user's name for the code. None: always a new version. The same again: replicas are kept."""
    request_id: str | None = None
    """Chosen by the client for one change; sending the same again (a retry) answers the same goal."""


class DeployReply(msgspec.Struct, frozen=True, kw_only=True):
    """``updating`` is False when there was nothing to do."""

    goal_id: GoalId
    updating: bool


class DeleteDeployment(Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Make a deployment not exist. An unknown name is a success."""

    name: str


class DeleteReply(msgspec.Struct, frozen=True, kw_only=True):
    """``goal_id`` is None when there was nothing to delete."""

    goal_id: GoalId | None


class GetDeploymentInfo(Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One deployment."""

    name: str


class ListDeployments(Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All deployments."""


class GetAllBackends(Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All backends."""


class GetAllEndpoints(Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All endpoints."""


class GetStatus(Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole system."""


WAIT_TIMEOUT_S_MAX = 30.0


class WaitForGoal(Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Wait until a goal ends or the time is over. Unknown ids are refused with ``not_found``."""

    goal_id: GoalId
    timeout_s: float = 10.0
    """0 to `WAIT_TIMEOUT_S_MAX`; a caller that wants longer asks again."""


class GoalStatus(Enum):
    """Where an accepted change stands."""

    PENDING = "pending"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    SUPERSEDED = "superseded"


class GoalView(msgspec.Struct, frozen=True, kw_only=True):
    """One goal as callers see it."""

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


class BackendView(msgspec.Struct, frozen=True, kw_only=True):
    """One backend and its replicas."""

    backend_tag: str
    backend_config: BackendConfig
    replica_config: ReplicaConfig
    replicas: list[ReplicaView]


class EndpointView(msgspec.Struct, frozen=True, kw_only=True):
    """One endpoint."""

    endpoint_tag: str
    route: str | None
    methods: list[str]
    traffic: dict[str, float]


class HostView(msgspec.Struct, frozen=True, kw_only=True):
    """One host as last heard."""

    host_id: str
    status: str
    report_age_s: float
    resources: dict[str, float]
    num_replicas: int


class ProxyView(msgspec.Struct, frozen=True, kw_only=True):
    """One proxy as last heard."""

    proxy_id: str
    status: str
    report_age_s: float
    address: str
    applied_snapshot_id: int


class StatusView(msgspec.Struct, frozen=True, kw_only=True):
    """The whole system at once."""

    controller_id: str
    epoch: int
    store_available: bool
    snapshot_id: int
    deployments: list[DeploymentView]
    hosts: list[HostView]
    proxies: list[ProxyView]


class ErrorView(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Body of an error reply; the headers ``Nats-Service-Error`` and ``…-Code`` say the same in short."""

    code: str
    message: str
    field: str = ""
    """Path of the bad field, such as ``backend_config.num_replicas``."""


VERBS: dict[str, tuple[type[Request], Any]] = {
    "deploy": (Deploy, DeployReply),
    "delete_deployment": (DeleteDeployment, DeleteReply),
    "get_deployment_info": (GetDeploymentInfo, DeploymentView),
    "list_deployments": (ListDeployments, list[DeploymentView]),
    "get_all_backends": (GetAllBackends, list[BackendView]),
    "get_all_endpoints": (GetAllEndpoints, list[EndpointView]),
    "get_status": (GetStatus, StatusView),
    "wait_for_goal": (WaitForGoal, GoalView),
}
"""Every verb with its request and its reply."""
