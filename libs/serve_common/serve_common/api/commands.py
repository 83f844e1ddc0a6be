"""Commands: everything that changes state, as sent to ``serve.admin.<verb>``.

Why every field is validated by type and unknown ones are refused: any NATS client can send these, and a misspelt option
must not be silently ignored. Every command is idempotent: sent again, it comes to the same.
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
    """What most commands answer."""

    goal_id: GoalId | None
    """What to wait for. None: nothing is left to wait for; what was asked is so, or was done when it was recorded."""
    updating: bool
    """False: this command changed nothing; everything is as asked, or a goal that makes it so was begun before."""


def _all_methods() -> list[str]:
    return list(METHODS)


def _endpoint_methods() -> list[str]:
    return ["GET", "POST"]


class Deploy(Command, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Make a deployment be as given: a backend plus an endpoint of the same tag that sends everything to it."""

    name: str
    """``deployment`` or ``app/deployment``."""
    replica_config: ReplicaConfig
    backend_config: BackendConfig = BackendConfig()
    route_prefix: str | None = None
    """Where HTTP reaches it; None is headless."""
    methods: list[str] = msgspec.field(default_factory=_all_methods)
    """That HTTP requests may have; all of them unless given, because an ASGI application needs them."""
    endpoint_options: EndpointOptions = EndpointOptions()
    version: str | None = None
    """The user's name for the code. None: always a new version. The same again: replicas are kept."""
    prev_version: str | None = None
    """Refused unless this is the version that is deployed now. None: whatever is there."""
    request_id: str | None = None
    """Chosen by the client for one change; sending the same again (a retry) answers the same goal."""


class DeleteDeployment(Command, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Make a deployment not exist. An unknown name is a success."""

    name: str


class DeploymentSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One deployment of an application."""

    name: str
    """Within the application."""
    replica_config: ReplicaConfig
    backend_config: BackendConfig = BackendConfig()
    version: str | None = None
    endpoint_options: EndpointOptions = EndpointOptions()


class DeployApplication(Command, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Make an application be these deployments, in one change: all or nothing. Those left out go away."""

    name: str
    deployments: list[DeploymentSpec]
    ingress: str
    """The deployment that the application's route leads to; the others are headless."""
    route_prefix: str | None = None
    methods: list[str] = msgspec.field(default_factory=_all_methods)
    """As in `Deploy`."""
    request_id: str | None = None
    """As in `Deploy`."""


class DeleteApplication(Command, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Make an application and its deployments not exist. An unknown name is a success."""

    name: str


class CreateBackend(Command, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Make a backend be as given. The same configurations again make no new goal."""

    backend_tag: str
    replica_config: ReplicaConfig
    backend_config: BackendConfig = BackendConfig()


class DeleteBackend(Command, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Make a backend not exist. Unknown: a success. Refused while an endpoint sends or copies traffic to it."""

    backend_tag: str
    force_kill: bool = False
    """End its replicas without letting them finish what is in flight."""


class UpdateBackendConfig(Command, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Change the given fields of a backend's configuration, also of a deployment's; the others stay."""

    backend_tag: str
    config: dict[str, Any]
    """Some fields of `BackendConfig`."""


class Scale(Command, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Make a backend have so many replicas; for people and for scalers of their own.

    With autoscaling it must be within min_replicas and max_replicas, and autoscaling pauses until `ResumeAutoscaling`,
    so that what was asked stays.
    """

    backend_tag: str
    num_replicas: int


class PauseAutoscaling(Command, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Leave a backend's number of replicas as it is. One that is paused is a success; without autoscaling: refused."""

    backend_tag: str


class ResumeAutoscaling(Command, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Let a backend's number of replicas follow its load again. One that does is a success."""

    backend_tag: str


class CreateEndpoint(Command, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Make an endpoint. The same again makes no new goal; another one under the same name is refused."""

    endpoint: str
    traffic: dict[str, float]
    """Weight of each backend; the sum must be 1."""
    route: str | None = None
    """Path prefix; None is headless."""
    methods: list[str] = msgspec.field(default_factory=_endpoint_methods)
    options: EndpointOptions = EndpointOptions()


class DeleteEndpoint(Command, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Make an endpoint not exist; its backends stay. Unknown: a success."""

    endpoint: str


class SetTraffic(Command, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Say where an endpoint's requests go."""

    endpoint: str
    weights: dict[str, float]
    """Weight of each backend, 0 to 1; the sum must be 1."""


class ShadowTraffic(Command, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Copy a proportion of an endpoint's requests to a backend whose answers are dropped."""

    endpoint: str
    backend_tag: str
    proportion: float
    """0 to 1; 0 ends it."""


class SetEndpointOptions(Command, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Change the given options of an endpoint, also of a deployment's; the others stay."""

    endpoint: str
    options: dict[str, Any]
    """Some fields of `EndpointOptions`."""


class Rollback(Command, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Make a deployment or backend be again what it was."""

    name: str
    to: str | int | None = None
    """A version's name, or a revision's number (see `GetRevisions`). None: what last succeeded before the present."""
    request_id: str | None = None
    """As in `Deploy`."""


class SetHttpOptions(Command, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Change the given options of all proxies while they run; the others stay."""

    options: dict[str, Any]
    """Some fields of `HttpOptions`."""


class DrainHost(Command, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Move every replica off a host, new ones first, and place none there."""

    host_id: str


class UndrainHost(Command, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Place replicas on a host again. One that is not drained is a success."""

    host_id: str


class Shutdown(Command, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Delete every application, deployment, endpoint and backend."""

    confirm: Literal["everything"]
    """What is to go away, in so many words: this command must not come about by accident."""


class ShutdownReply(msgspec.Struct, frozen=True, kw_only=True):
    """One goal for everything that goes away."""

    goal_ids: list[GoalId]


BACKUP_PAGE_BYTES_MAX = 512 * 1024
"""Of a backup's file in one message, before its encoding in JSON adds a third."""


class Restore(Command, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Make everything be deployed as a backup says, in one change: all or nothing. What it does not have goes away.

    The file comes in pages, sent in order under one ``upload_id``. With the last one the whole is checked; it is done
    when that one is sent with ``confirm``.
    """

    upload_id: str
    """Chosen by the client."""
    page: int
    """From 0."""
    pages: int
    data: bytes
    """At most `BACKUP_PAGE_BYTES_MAX`."""
    confirm: bool = False
    """False with the last page: the file is checked, and nothing is changed."""


class RestoreReply(msgspec.Struct, frozen=True, kw_only=True):
    """What a backup holds, and one goal for everything that it changes."""

    summary: str = ""
    """For people; empty while pages are missing."""
    goal_ids: list[GoalId] = []
    """Empty where nothing was done."""


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
