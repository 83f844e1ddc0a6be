"""Queries: requests to ``serve.admin.<verb>`` that change nothing.

Why pages: a reply must fit one NATS message (1 MiB by default), and lists grow with the system. A page holds at most
``limit`` items that come after ``after`` in the order of names; one that is shorter than ``limit`` is the last.
"""

from __future__ import annotations

import msgspec

from serve_common.api.commands import Request
from serve_common.names import GoalId

PAGE_LIMIT_MAX = 10_000


class Query(Request, frozen=True, kw_only=True):
    """Base of all queries."""


class PagedQuery(Query, frozen=True, kw_only=True):
    """Base of queries for lists."""

    limit: int | None = None
    """Most items to return, 1 to `PAGE_LIMIT_MAX`; None: all."""
    after: str = ""
    """The last name of the previous page; empty for the first page."""


class GetDeploymentInfo(Query, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Get one deployment. An unknown name is refused with `not_found`."""

    name: str


class ListDeployments(PagedQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """List all deployments."""

    include_deleted: bool = False
    """Include deleted deployments that are still retained."""


class GetAllApplications(PagedQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """List all applications."""


class GetAllBackends(PagedQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """List all backends, those of deployments included."""


class GetBackendConfig(Query, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Get the configuration of one backend. An unknown tag is refused with `not_found`."""

    backend_tag: str


class GetAllEndpoints(PagedQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """List all endpoints."""


class GetHttpConfig(Query, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Get the HTTP options of all proxies."""


class GetHttpProxies(PagedQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """List all proxies that reported recently."""


class GetHosts(PagedQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """List all hosts that reported recently."""


class GetStatus(Query, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Get the status of the whole system."""

    replicas: bool = True
    """False leaves out individual replicas, which make the reply long."""
    deployments: bool = True
    """False leaves out deployments and their autoscaling: `ListDeployments` and `GetAutoscaling` return them in
    pages."""


class GetAutoscaling(PagedQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """List the last load, decision and reason of each autoscaled backend."""


class GetLoad(Query, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Scrape all services now and sum up their load."""


class GetSnapshot(PagedQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """List a summary of every deployment, deleted ones included."""


class GetEvents(Query, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Get recent events, the oldest first."""

    limit: int = 100
    """Number of the newest events to return, 1 to 1,000."""
    subject: str | None = None
    """Only events of this deployment, backend, endpoint, host, proxy or goal; None: all."""


class GetHistory(Query, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Get entries of the audit log, the newest first."""

    limit: int = 50
    """Most entries to return, 1 to 500."""
    subject: str | None = None
    """Only changes of this deployment, backend, endpoint or host; None: all."""
    before: int | None = None
    """Only entries with a lower id, for the next page; None: from the newest."""


class GetRevisions(Query, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Get the revisions of a deployment or backend, the newest first, that `rollback` can return to."""

    name: str


class GetBackup(Query, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Get a page of a backup's file: everything that is deployed at one moment."""

    backup_id: str = ""
    """Id that came with the first page; empty takes a new backup. A backup expires after a minute without requests, and
    on a change of leader: then the reply is `not_found`, and the client starts over."""
    page: int = 0


WAIT_TIMEOUT_S_MAX = 30.0


class WaitForGoal(Query, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Wait until a goal ends or the timeout passes. An unknown id is refused with `not_found`."""

    goal_id: GoalId
    timeout_s: float = 10.0
    """Seconds to wait, 0 to `WAIT_TIMEOUT_S_MAX`; to wait longer, repeat the query."""


class Plan(Query, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Get what a command would do, without doing it."""

    verb: str
    """Verb of the command, such as ``deploy``."""
    request: msgspec.Raw = msgspec.Raw(b"{}")
    """The command itself."""


AnyQuery = (
    GetDeploymentInfo
    | ListDeployments
    | GetAllApplications
    | GetAllBackends
    | GetBackendConfig
    | GetAllEndpoints
    | GetHttpConfig
    | GetHttpProxies
    | GetHosts
    | GetStatus
    | GetAutoscaling
    | GetLoad
    | GetSnapshot
    | GetEvents
    | GetHistory
    | GetRevisions
    | GetBackup
    | WaitForGoal
    | Plan
)
