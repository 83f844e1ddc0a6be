"""Commands: requests that change state, as sent to ``serve.admin.<verb>``.

Why every field is validated by type and unknown ones are refused: any NATS client can send these, and a misspelt option
must not be silently ignored. Every command is idempotent: sending it again has the same result.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from serve_common.config.backend import BackendConfig
from serve_common.config.endpoint import METHODS, EndpointOptions
from serve_common.config.replica import ReplicaConfig
from serve_common.names import GoalId


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all commands and queries."""


class Command(Request, frozen=True, kw_only=True):
    """Base of all commands."""


class ChangeReply(msgspec.Struct, frozen=True, kw_only=True):
    """Reply to most commands."""

    goal_id: GoalId | None
    """The goal to wait for. None: nothing to wait for; the requested state was current, or was reached on recording."""
    updating: bool
    """False: this command changed nothing; the requested state is current, or an earlier goal leads to it."""


def _all_methods() -> list[str]:
    return list(METHODS)


def _endpoint_methods() -> list[str]:
    return ["GET", "POST"]


class Deploy(Command, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Create or update a deployment: a backend, and an endpoint of the same tag that sends everything to it."""

    name: str
    """``deployment`` or ``app/deployment``."""
    replica_config: ReplicaConfig
    backend_config: BackendConfig = BackendConfig()
    route_prefix: str | None = None
    """HTTP path prefix; None is headless."""
    methods: list[str] = msgspec.field(default_factory=_all_methods)
    """Accepted HTTP methods; all by default, because an ASGI application needs them."""
    endpoint_options: EndpointOptions = EndpointOptions()
    version: str | None = None
    """The user's name for the code. Reusing it keeps running replicas; None always makes a new version."""
    prev_version: str | None = None
    """The command is refused unless this version is deployed now. None: no check."""
    request_id: str | None = None
    """Id of one change, chosen by the client; a retry with the same id is answered with the same goal."""


class DeleteDeployment(Command, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Delete a deployment. An unknown name succeeds."""

    name: str


class DeploymentSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One deployment of an application."""

    name: str
    """Name within the application."""
    replica_config: ReplicaConfig
    backend_config: BackendConfig = BackendConfig()
    version: str | None = None
    endpoint_options: EndpointOptions = EndpointOptions()


class DeployApplication(Command, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Create or update an application in one change, all or nothing. Deployments that are left out are deleted."""

    name: str
    deployments: list[DeploymentSpec]
    ingress: str
    """The deployment that the application's route leads to; the others are headless."""
    route_prefix: str | None = None
    methods: list[str] = msgspec.field(default_factory=_all_methods)
    """Accepted HTTP methods, as in `Deploy`."""
    request_id: str | None = None
    """Id of one change, as in `Deploy`."""


class DeleteApplication(Command, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Delete an application and its deployments. An unknown name succeeds."""

    name: str


class CreateBackend(Command, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Create or update a backend. Unchanged configurations make no new goal."""

    backend_tag: str
    replica_config: ReplicaConfig
    backend_config: BackendConfig = BackendConfig()


class DeleteBackend(Command, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Delete a backend. An unknown tag succeeds. Refused while an endpoint sends or copies traffic to it."""

    backend_tag: str
    force_kill: bool = False
    """Kill its replicas without finishing requests in flight."""


class UpdateBackendConfig(Command, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Change the given fields of the configuration of a backend or deployment; the others stay."""

    backend_tag: str
    config: dict[str, Any]
    """Some fields of `BackendConfig`."""


class Scale(Command, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Set the number of replicas of a backend; for people and for external scalers.

    With autoscaling it must be within min_replicas and max_replicas, and autoscaling pauses until `ResumeAutoscaling`,
    so that the number stays.
    """

    backend_tag: str
    num_replicas: int


class PauseAutoscaling(Command, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Pause the autoscaling of a backend. Succeeds if it is paused already; refused without autoscaling."""

    backend_tag: str


class ResumeAutoscaling(Command, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Resume the autoscaling of a backend. Succeeds if it is not paused."""

    backend_tag: str


class CreateEndpoint(Command, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Create an endpoint. An identical one makes no new goal; a different one under the same name is refused."""

    endpoint: str
    traffic: dict[str, float]
    """Weight of each backend; the sum must be 1."""
    route: str | None = None
    """Path prefix; None is headless."""
    methods: list[str] = msgspec.field(default_factory=_endpoint_methods)
    options: EndpointOptions = EndpointOptions()


class DeleteEndpoint(Command, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Delete an endpoint; its backends stay. An unknown name succeeds."""

    endpoint: str


class SetTraffic(Command, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Set the traffic split of an endpoint."""

    endpoint: str
    weights: dict[str, float]
    """Weight of each backend, 0 to 1; the sum must be 1."""


class ShadowTraffic(Command, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Copy a proportion of an endpoint's requests to a backend whose responses are dropped."""

    endpoint: str
    backend_tag: str
    proportion: float
    """Share of requests to copy, 0 to 1; 0 ends copying."""


class SetEndpointOptions(Command, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Change the given options of the endpoint of this tag, also that of a deployment; the others stay."""

    endpoint: str
    options: dict[str, Any]
    """Some fields of `EndpointOptions`."""


class Rollback(Command, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Return a deployment or backend to an earlier revision."""

    name: str
    to: str | int | None = None
    """A version's name, or a revision's number (`GetRevisions`). None: the last to succeed before the current one."""
    request_id: str | None = None
    """Id of one change, as in `Deploy`."""


class SetHttpOptions(Command, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Change the given options of all proxies while they run; the others stay."""

    options: dict[str, Any]
    """Some fields of `HttpOptions`."""


class DrainHost(Command, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Move every replica off a host, starting replacements first, and place none there."""

    host_id: str


class UndrainHost(Command, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Allow replicas on a host again. Succeeds if the host is not drained."""

    host_id: str


class Shutdown(Command, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Delete every application, deployment, endpoint and backend."""

    confirm: Literal["everything"]
    """A literal confirmation, so that the command is never sent by accident."""


class ShutdownReply(msgspec.Struct, frozen=True, kw_only=True):
    """The goals of everything that is deleted."""

    goal_ids: list[GoalId]


BACKUP_PAGE_BYTES_MAX = 512 * 1024
"""Most bytes of a backup's file in one message, before base64 in JSON adds a third."""


class Restore(Command, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Restore everything that is deployed from a backup, in one change, all or nothing. What it lacks is deleted.

    The file is sent in pages, in order, under one ``upload_id``. The whole file is checked with the last page; it is
    restored if that page has ``confirm`` set.
    """

    upload_id: str
    """Id of the upload, chosen by the client."""
    page: int
    """Number of this page, from 0."""
    pages: int
    data: bytes
    """Content of the page, at most `BACKUP_PAGE_BYTES_MAX` bytes."""
    confirm: bool = False
    """False with the last page: the file is checked, and nothing is changed."""


class RestoreReply(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of a backup, and the goals of everything that it changes."""

    summary: str = ""
    """Content of the backup, for people; empty while pages are missing."""
    goal_ids: list[GoalId] = []
    """Goals to wait for; empty if nothing was changed."""


Change = (
    Deploy
    | DeleteDeployment
    | DeployApplication
    | DeleteApplication
    | CreateBackend
    | DeleteBackend
    | UpdateBackendConfig
    | Scale
    | PauseAutoscaling
    | ResumeAutoscaling
    | CreateEndpoint
    | DeleteEndpoint
    | SetTraffic
    | ShadowTraffic
    | SetEndpointOptions
    | Rollback
    | SetHttpOptions
    | DrainHost
    | UndrainHost
)
"""Every command that answers with one goal: all but `Shutdown`."""
AnyCommand = Change | Shutdown | Restore
CommandReply = ChangeReply | ShutdownReply | RestoreReply
