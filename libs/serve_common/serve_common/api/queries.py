"""Queries, requests to ``serve.admin.<verb>`` that change nothing; and the table of all verbs.

Why pages: a reply must fit one NATS message (1 MiB by default), and lists grow with the system. A page holds at most
``limit`` items that come after ``after`` in the order of names; one that is shorter than ``limit`` is the last.

Why a table of verbs: the controller offers exactly these, and the client and the CLI are tested against it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

import msgspec

from serve_common.api import commands
from serve_common.api import views as v
from serve_common.api.commands import Command, Reply_co, Request
from serve_common.api.rollout_views import RolloutView
from serve_common.config.backend import HttpOptions
from serve_common.names import GoalId

PAGE_LIMIT_MAX = 10_000


class Query(Request[Reply_co], frozen=True, kw_only=True):
    """Base of all queries."""


class PagedQuery(Query[Reply_co], frozen=True, kw_only=True):
    """Base of queries for lists."""

    ordered_by: ClassVar[str]
    """Field of the items that has their name."""

    limit: int | None = None
    """Most items to return, 1 to `PAGE_LIMIT_MAX`; None: all."""
    after: str = ""
    """The last name of the previous page; empty for the first page."""


class GetDeploymentInfo(Query[v.DeploymentView], frozen=True, kw_only=True):
    """Get one deployment. An unknown name is refused with `not_found`."""

    verb = "get_deployment_info"
    name: str
    """``deployment`` or ``app/deployment``."""


class ListDeployments(PagedQuery[list[v.DeploymentView]], frozen=True, kw_only=True):
    """List all deployments."""

    verb = "list_deployments"
    ordered_by = "name"
    include_deleted: bool = False
    """Include deleted deployments that are still retained."""


class GetAllApplications(PagedQuery[list[v.ApplicationView]], frozen=True, kw_only=True):
    """List all applications."""

    verb = "get_all_applications"
    ordered_by = "name"


class GetAllBackends(PagedQuery[list[v.BackendView]], frozen=True, kw_only=True):
    """List all backends, those of deployments included."""

    verb = "get_all_backends"
    ordered_by = "backend_tag"


class GetBackendConfig(Query[v.BackendConfigView], frozen=True, kw_only=True):
    """Get the configuration of one backend. An unknown tag is refused with `not_found`."""

    verb = "get_backend_config"
    backend_tag: str
    """Tag of the backend or deployment."""


class GetAllEndpoints(PagedQuery[list[v.EndpointView]], frozen=True, kw_only=True):
    """List all endpoints."""

    verb = "get_all_endpoints"
    ordered_by = "endpoint_tag"


class GetHttpConfig(Query[HttpOptions], frozen=True, kw_only=True):
    """Get the HTTP options of all proxies."""

    verb = "get_http_config"


class GetHttpProxies(PagedQuery[list[v.ProxyView]], frozen=True, kw_only=True):
    """List all proxies that reported recently."""

    verb = "get_http_proxies"
    ordered_by = "proxy_id"


class GetHosts(PagedQuery[list[v.HostView]], frozen=True, kw_only=True):
    """List all hosts that reported recently."""

    verb = "get_hosts"
    ordered_by = "host_id"


class GetStatus(Query[v.StatusView], frozen=True, kw_only=True):
    """Get the status of the whole system."""

    verb = "get_status"
    replicas: bool = True
    """False leaves out individual replicas, which make the reply long."""
    deployments: bool = True
    """False leaves out deployments and their autoscaling: `ListDeployments` and `GetAutoscaling` return them in
    pages."""


class GetAutoscaling(PagedQuery[list[v.AutoscalingView]], frozen=True, kw_only=True):
    """List the last load, decision and reason of each autoscaled backend."""

    verb = "get_autoscaling"
    ordered_by = "backend_tag"


class GetRollouts(PagedQuery[list[RolloutView]], frozen=True, kw_only=True):
    """List the rollouts: of each deployment the present one, or the last."""

    verb = "get_rollouts"
    ordered_by = "backend_tag"
    name: str | None = None
    """Only that of this deployment or backend; None: all."""


class GetCaptures(PagedQuery[list[v.CaptureView]], frozen=True, kw_only=True):
    """List the endpoints whose requests are captured."""

    verb = "get_captures"
    ordered_by = "endpoint_tag"


class GetLoad(Query[v.LoadView], frozen=True, kw_only=True):
    """Scrape all services now and sum up their load."""

    verb = "get_load"


class GetSnapshot(PagedQuery[list[v.SnapshotView]], frozen=True, kw_only=True):
    """List a summary of every deployment, deleted ones included."""

    verb = "get_snapshot"
    ordered_by = "name"


class GetEvents(Query[list[v.EventView]], frozen=True, kw_only=True):
    """Get recent events, the oldest first."""

    verb = "get_events"
    limit: int = 100
    """Number of the newest events to return, 1 to 1,000."""
    subject: str | None = None
    """Only events of this deployment, backend, endpoint, host, proxy or goal; None: all."""


class GetHistory(Query[list[v.HistoryView]], frozen=True, kw_only=True):
    """Get entries of the audit log, the newest first."""

    verb = "get_history"
    limit: int = 50
    """Most entries to return, 1 to 500."""
    subject: str | None = None
    """Only changes of this deployment, backend, endpoint or host; None: all."""
    before: int | None = None
    """Only entries with a lower id, for the next page; None: from the newest."""


class GetRevisions(Query[list[v.RevisionView]], frozen=True, kw_only=True):
    """Get the revisions of a deployment or backend, the newest first, that `rollback` can return to."""

    verb = "get_revisions"
    name: str
    """Name of the deployment, or tag of the backend."""


class GetBackup(Query[v.BackupPage], frozen=True, kw_only=True):
    """Get a page of a backup's file: everything that is deployed at one moment. Uploaded code is fetched apart."""

    verb = "get_backup"
    backup_id: str = ""
    """Id that came with the first page; empty takes a new backup. A backup expires after a minute without requests, and
    on a change of leader: then the reply is `not_found`, and the client starts over."""
    page: int = 0
    """Number of the page, from 0."""
    code: str = ""
    """Digest of uploaded code that the file names: the page is one of that code. Empty for the file itself."""


WAIT_TIMEOUT_S_MAX = 30.0


class WaitForGoal(Query[v.GoalView], frozen=True, kw_only=True):
    """Wait until a goal ends or the timeout passes. An unknown id is refused with `not_found`."""

    verb = "wait_for_goal"
    goal_id: GoalId
    """Goal to wait for, from the reply to a command."""
    timeout_s: float = 10.0
    """Seconds to wait, 0 to `WAIT_TIMEOUT_S_MAX`; to wait longer, repeat the query."""


class GetSchemas(Query[dict[str, Any]], frozen=True, kw_only=True):
    """Get JSON Schemas of all requests and replies, as one document: ``verbs``, ``error`` and ``$defs``."""

    verb = "get_schemas"


class Plan(Query[v.PlanView], frozen=True, kw_only=True):
    """Get what a command would do, without doing it."""

    verb = "plan"
    command_verb: str = msgspec.field(name="verb")
    """Verb of the command, such as ``deploy``."""
    request: msgspec.Raw = msgspec.Raw(b"{}")
    """The command itself."""

    @classmethod
    def for_command(cls, command: Command[Any]) -> Plan:
        """Build the query for what ``command`` would do."""
        return cls(command_verb=command.verb, request=msgspec.Raw(msgspec.json.encode(command)))


COMMANDS: Final[Mapping[str, type[Command[Any]]]] = {
    kind.verb: kind
    for kind in vars(commands).values()
    if isinstance(kind, type) and issubclass(kind, Command) and hasattr(kind, "verb")
}
"""Every verb that changes state."""

QUERIES: Final[Mapping[str, type[Query[Any]]]] = {
    kind.verb: kind
    for kind in tuple(globals().values())
    if isinstance(kind, type) and issubclass(kind, Query) and hasattr(kind, "verb")
}
"""Every verb that changes nothing."""

VERBS: Final[Mapping[str, type[Request[Any]]]] = {**COMMANDS, **QUERIES}

VIEW_VERBS: Final = frozenset(QUERIES) - {GetBackup.verb}
"""Verbs of people who may only view: a backup holds all that was deployed, code included."""
OPERATE_VERBS: Final = VIEW_VERBS | {
    kind.verb
    for kind in (
        commands.Scale,
        commands.SetTraffic,
        commands.ShadowTraffic,
        commands.Rollback,
        commands.PauseAutoscaling,
        commands.ResumeAutoscaling,
        commands.ControlRollout,
        commands.DrainHost,
        commands.UndrainHost,
    )
}
"""Verbs of people who keep a system running, and deploy nothing."""

PRINCIPAL_HEADER: Final = "Muster-Principal"
"""NATS header with the client's name for the audit log: an unverified claim."""
PRINCIPAL_LENGTH_MAX: Final = 200


def sanitize_principal(claimed: str) -> str:
    """``claimed`` as it is stored and shown: one line of printable characters, at most `PRINCIPAL_LENGTH_MAX`."""
    return " ".join("".join(c if c.isprintable() else " " for c in claimed).split())[:PRINCIPAL_LENGTH_MAX]
