"""Commands: requests that change state, as sent to ``serve.admin.<verb>``.

Why every field is validated by type and unknown ones are refused: any NATS client can send these, and a misspelt option
must not be silently ignored. Every command is idempotent: sending it again has the same result.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, ClassVar, Generic, Literal, TypeVar, get_args

import msgspec

from serve_common.api.views import PlanView
from serve_common.config.backend import METHODS, BackendConfig, EndpointOptions, ReplicaConfig
from serve_common.config.rollout import RolloutConfig
from serve_common.names import GoalId

Reply_co = TypeVar("Reply_co", covariant=True)


class Request(msgspec.Struct, Generic[Reply_co], frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all commands and queries. ``Reply_co`` is the type of the reply to the request."""

    verb: ClassVar[str]
    """Last token of the subject that the request is sent to."""

    @classmethod
    def reply_type(cls) -> Any:
        """The type in brackets after the base class, to decode a reply with."""
        [base] = vars(cls)["__orig_bases__"]
        [reply_type] = get_args(base)
        return reply_type


class Command(Request[Reply_co], frozen=True, kw_only=True):
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


class Deploy(Command[ChangeReply], frozen=True, kw_only=True):
    """Create or update a deployment: a backend, and an endpoint of the same tag that sends everything to it."""

    verb = "deploy"
    name: str
    """``deployment`` or ``app/deployment``."""
    replica_config: ReplicaConfig
    """Code of the deployment, and resources of each replica."""
    backend_config: BackendConfig = BackendConfig()
    """Number and treatment of replicas. Fields that are left out have their defaults, not their current values."""
    route_prefix: str | None = None
    """HTTP path prefix; None is headless."""
    methods: list[str] = msgspec.field(default_factory=_all_methods)
    """Accepted HTTP methods; all by default, because an ASGI application needs them."""
    endpoint_options: EndpointOptions = EndpointOptions()
    """Options of the deployment's endpoint."""
    version: str | None = None
    """The user's name for the code. Reusing it keeps running replicas; None always makes a new version."""
    prev_version: str | None = None
    """The command is refused unless this version is deployed now. None: no check."""
    skips_rollout: bool = False
    """Whether a new version replaces the old one at once although `BackendConfig.rollout` is set, as for a hotfix."""
    request_id: str | None = None
    """Id of one change, chosen by the client; a retry with the same id is answered with the same goal."""


class DeleteDeployment(Command[ChangeReply], frozen=True, kw_only=True):
    """Delete a deployment. An unknown name succeeds."""

    verb = "delete_deployment"
    name: str
    """``deployment`` or ``app/deployment``."""


class DeploymentSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One deployment of an application."""

    name: str
    """Name within the application."""
    replica_config: ReplicaConfig
    """Code of the deployment, and resources of each replica."""
    backend_config: BackendConfig = BackendConfig()
    """Number and treatment of replicas, as in `Deploy`."""
    version: str | None = None
    """The user's name for the code, as in `Deploy`."""
    endpoint_options: EndpointOptions = EndpointOptions()
    """Options of the deployment's endpoint."""


class DeployApplication(Command[ChangeReply], frozen=True, kw_only=True):
    """Create or update an application in one change, all or nothing. Deployments that are left out are deleted."""

    verb = "deploy_application"
    name: str
    """Name of the application."""
    deployments: list[DeploymentSpec]
    """All deployments of the application; at least one."""
    ingress: str
    """The deployment that the application's route leads to; the others are headless."""
    route_prefix: str | None = None
    """HTTP path prefix of the ingress; None is headless."""
    methods: list[str] = msgspec.field(default_factory=_all_methods)
    """Accepted HTTP methods, as in `Deploy`."""
    app_config: dict[str, Any] | None = None
    """What a configuration file has for the application, for `muster config`: it is stored and shown, and changes
    nothing. None: deployed without a file."""
    skips_rollout: bool = False
    """Whether new versions replace the old ones at once although `BackendConfig.rollout` is set, as in `Deploy`."""
    request_id: str | None = None
    """Id of one change, as in `Deploy`."""


class RecordBuildFailure(Command[ChangeReply], frozen=True, kw_only=True):
    """Record that an application cannot be imported or built by the one who deploys it.

    Its status shows the error until it is deployed or deleted. What runs of it goes on. The reply's goal has failed.
    """

    verb = "record_build_failure"
    name: str
    """Name of the application."""
    error: str
    """Traceback or reason; its last 8,000 characters are stored."""
    app_config: dict[str, Any] | None = None
    """What a configuration file has for the application, as in `DeployApplication`."""


class DeleteApplication(Command[ChangeReply], frozen=True, kw_only=True):
    """Delete an application and its deployments. An unknown name succeeds."""

    verb = "delete_application"
    name: str
    """Name of the application."""


class CreateBackend(Command[ChangeReply], frozen=True, kw_only=True):
    """Create or update a backend. Unchanged configurations make no new goal."""

    verb = "create_backend"
    backend_tag: str
    """Tag of the backend, ``name`` or ``app/name``."""
    replica_config: ReplicaConfig
    """Code of the backend, and resources of each replica."""
    backend_config: BackendConfig = BackendConfig()
    """Number and treatment of replicas, as in `Deploy`."""


class DeleteBackend(Command[ChangeReply], frozen=True, kw_only=True):
    """Delete a backend. An unknown tag succeeds. Refused while an endpoint sends or copies traffic to it."""

    verb = "delete_backend"
    backend_tag: str
    """Tag of the backend."""
    force_kill: bool = False
    """Kill its replicas without finishing requests in flight."""


class UpdateBackendConfig(Command[ChangeReply], frozen=True, kw_only=True):
    """Change the given fields of the configuration of a backend or deployment; the others stay."""

    verb = "update_backend_config"
    backend_tag: str
    """Tag of the backend or deployment."""
    config: dict[str, Any]
    """Some fields of `BackendConfig`."""
    skips_rollout: bool = False
    """Whether replicas are reconfigured at once although `BackendConfig.rollout` is set, as in `Deploy`."""


class Scale(Command[ChangeReply], frozen=True, kw_only=True):
    """Set the number of replicas of a backend; for people and for external scalers.

    With autoscaling it must be within min_replicas and max_replicas, and autoscaling pauses until `ResumeAutoscaling`,
    so that the number stays.
    """

    verb = "scale"
    backend_tag: str
    """Tag of the backend or deployment."""
    num_replicas: int
    """New number of replicas, 0 to 10,000."""


class PauseAutoscaling(Command[ChangeReply], frozen=True, kw_only=True):
    """Pause the autoscaling of a backend. Succeeds if it is paused already; refused without autoscaling."""

    verb = "pause_autoscaling"
    backend_tag: str
    """Tag of the backend or deployment."""


class ResumeAutoscaling(Command[ChangeReply], frozen=True, kw_only=True):
    """Resume the autoscaling of a backend. Succeeds if it is not paused."""

    verb = "resume_autoscaling"
    backend_tag: str
    """Tag of the backend or deployment."""


class CreateEndpoint(Command[ChangeReply], frozen=True, kw_only=True):
    """Create an endpoint. An identical one makes no new goal; a different one under the same name is refused."""

    verb = "create_endpoint"
    endpoint: str
    """Tag of the endpoint, ``name`` or ``app/name``."""
    traffic: dict[str, float]
    """Weight of each backend; the sum must be 1."""
    route: str | None = None
    """Path prefix; None is headless."""
    methods: list[str] = msgspec.field(default_factory=_endpoint_methods)
    """Accepted HTTP methods; GET and POST by default."""
    options: EndpointOptions = EndpointOptions()
    """Options of the endpoint."""


class DeleteEndpoint(Command[ChangeReply], frozen=True, kw_only=True):
    """Delete an endpoint; its backends stay. An unknown name succeeds."""

    verb = "delete_endpoint"
    endpoint: str
    """Tag of the endpoint."""


class SetTraffic(Command[ChangeReply], frozen=True, kw_only=True):
    """Set the traffic split of an endpoint."""

    verb = "set_traffic"
    endpoint: str
    """Tag of the endpoint."""
    weights: dict[str, float]
    """Weight of each backend, 0 to 1; the sum must be 1."""


class ShadowTraffic(Command[ChangeReply], frozen=True, kw_only=True):
    """Copy a proportion of an endpoint's requests to a backend whose responses are dropped."""

    verb = "shadow_traffic"
    endpoint: str
    """Tag of the endpoint whose requests are copied."""
    backend_tag: str
    """Tag of the backend that gets the copies."""
    proportion: float
    """Share of requests to copy, 0 to 1; 0 ends copying."""


class SetEndpointOptions(Command[ChangeReply], frozen=True, kw_only=True):
    """Change the given options of the endpoint of this tag, also that of a deployment; the others stay."""

    verb = "set_endpoint_options"
    endpoint: str
    """Tag of the endpoint or deployment."""
    options: dict[str, Any]
    """Some fields of `EndpointOptions`."""


class SetCapture(Command[ChangeReply], frozen=True, kw_only=True):
    """Capture a share of an endpoint's requests with their responses, or end that with a share of 0.

    The goal succeeds once every proxy does so. What was captured before stays until its time is over.
    """

    verb = "set_capture"
    endpoint: str
    """Tag of the endpoint or deployment."""
    share: float
    """Share of the requests, 0 to 1; the other fields are as in `CaptureConfig`, and replace the current ones."""
    bodies: bool = False
    """Whether bodies are captured too."""
    redact: list[str] = []
    """JSON paths of values to redact in bodies."""
    redact_headers: list[str] = []
    """Further headers to redact."""
    redact_query: list[str] = []
    """Further query parameters to redact."""


class Rollback(Command[ChangeReply], frozen=True, kw_only=True):
    """Return a deployment or backend to an earlier revision."""

    verb = "rollback"
    name: str
    """Name of the deployment, or tag of the backend."""
    to: str | int | None = None
    """A version's name, or a revision's number (`GetRevisions`). None: the last to succeed before the current one."""
    request_id: str | None = None
    """Id of one change, as in `Deploy`."""


class StartRollout(Command[ChangeReply], frozen=True, kw_only=True):
    """Roll out a new version of a deployment or backend that runs: it takes over traffic step by step, and is judged.

    The goal succeeds once the new version has taken the place of the old one, and fails when the rollout is aborted.
    """

    verb = "start_rollout"
    name: str
    """Name of the deployment, or tag of the backend."""
    replica_config: dict[str, Any] = {}
    """Fields of `ReplicaConfig` that the new version changes."""
    backend_config: dict[str, Any] = {}
    """Fields of `BackendConfig` that the new version changes."""
    version: str | None = None
    """The user's name for the code."""
    rollout: RolloutConfig | None = None
    """Steps and limits. None: those of the deployment's `BackendConfig.rollout`, or the defaults."""
    rollout_fields: dict[str, Any] = {}
    """Fields of these that are otherwise in this rollout."""
    again: bool = False
    """Whether to try a version that was aborted a short time ago."""
    request_id: str | None = None
    """Id of one change, as in `Deploy`."""


class RolloutAction(Enum):
    """What to do with a rollout."""

    PAUSE = "pause"
    """Stay at the present step. A version that is shown to be worse is still aborted."""
    RESUME = "resume"
    STEP = "step"
    """Let the present step pass, whatever was shown so far."""
    PROMOTE = "promote"
    """Go to the last step."""
    ABORT = "abort"
    """Give all requests back to the old version."""


class ControlRollout(Command[ChangeReply], frozen=True, kw_only=True):
    """Pause, resume, promote or abort a rollout, or let its present step pass.

    A promotion and an abort have the rollout's goal: it succeeds, or fails once the old version has all requests.
    """

    verb = "control_rollout"
    name: str
    """Name of the deployment, or tag of the backend."""
    action: RolloutAction
    """What to do."""
    step: int | None = None
    """Number of the step, from 0, that this is about: at another one nothing is done. None: whichever it is."""
    reason: str = ""
    """Why, for the history and the event of an abort."""


class SetHttpOptions(Command[ChangeReply], frozen=True, kw_only=True):
    """Change the given options of all proxies while they run; the others stay."""

    verb = "set_http_options"
    options: dict[str, Any]
    """Some fields of `HttpOptions`."""


class DrainHost(Command[ChangeReply], frozen=True, kw_only=True):
    """Move every replica off a host, starting replacements first, and place none there."""

    verb = "drain_host"
    host_id: str
    """Id of the host."""


class UndrainHost(Command[ChangeReply], frozen=True, kw_only=True):
    """Allow replicas on a host again. Succeeds if the host is not drained."""

    verb = "undrain_host"
    host_id: str
    """Id of the host."""


class ShutdownReply(msgspec.Struct, frozen=True, kw_only=True):
    """The goals of everything that is deleted."""

    goal_ids: list[GoalId]
    """Goals to wait for; empty if there was nothing to delete."""


class Shutdown(Command[ShutdownReply], frozen=True, kw_only=True):
    """Delete every application, deployment, endpoint and backend."""

    verb = "shutdown"
    confirm: Literal["everything"]
    """A literal confirmation, so that the command is never sent by accident."""


BACKUP_PAGE_BYTES_MAX = 512 * 1024
"""Most bytes of a backup's file in one message, before base64 in JSON adds a third."""


class RestoreReply(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of a backup, and the goals of everything that it changes."""

    summary: str = ""
    """Content of the backup, for people; empty while pages are missing."""
    goal_ids: list[GoalId] = []
    """Goals to wait for; empty if nothing was changed."""
    plan: PlanView | None = None
    """What the restore would do; only when the file was checked without ``confirm``."""


class Restore(Command[RestoreReply], frozen=True, kw_only=True):
    """Restore everything that is deployed from a backup, in one change, all or nothing. What it lacks is deleted.

    The file is sent in pages, in order, under one ``upload_id``. The whole file is checked with the last page; it is
    restored if that page has ``confirm`` set.
    """

    verb = "restore"
    upload_id: str
    """Id of the upload, chosen by the client."""
    page: int
    """Number of this page, from 0."""
    pages: int
    """Number of pages of the file."""
    data: bytes
    """Content of the page, at most `BACKUP_PAGE_BYTES_MAX` bytes."""
    confirm: bool = False
    """False with the last page: the file is checked, and nothing is changed."""


class UploadCodeReply(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the code can be deployed."""

    is_stored: bool
    """True once the code is stored: with its last page, or before, if it was there already."""


class UploadCode(Command[UploadCodeReply], frozen=True, kw_only=True):
    """Upload code that `ReplicaConfig.code` can name. Code that is there already is not stored again.

    It is sent in pages, in order; a request without pages only finds out whether it is there. Code that no deployment,
    backend or revision names is deleted an hour after it was last uploaded or deployed.
    """

    verb = "upload_code"
    digest: str
    """SHA-256 of the whole code, in hexadecimal."""
    page: int = 0
    """Number of this page, from 0."""
    pages: int = 0
    """Number of pages of the code; 0 asks whether it is stored."""
    data: bytes = b""
    """Content of the page; all pages but the last have 512 KiB."""


CommandReply = ChangeReply | ShutdownReply | RestoreReply
