"""Queries: what can be asked at ``serve.admin.<verb>`` without changing anything.

Why pages: an answer must fit one NATS message (1 MiB by default), and lists grow with the system. A page holds what
comes after ``after`` in the order of names, at most ``limit`` of it; one that is shorter than ``limit`` is the last.
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
    """At most so many, 1 to `PAGE_LIMIT_MAX`; None: all of them."""
    after: str = ""
    """The name that the last page ended with; empty for the first page."""


class GetDeploymentInfo(Query, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One deployment. Unknown: `not_found`."""

    name: str


class ListDeployments(PagedQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All deployments."""

    include_deleted: bool = False
    """Also those that are gone, as far as they are remembered."""


class GetAllApplications(PagedQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All applications."""


class GetAllBackends(PagedQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All backends, those of deployments included."""


class GetBackendConfig(Query, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One backend's configuration. Unknown: `not_found`."""

    backend_tag: str


class GetAllEndpoints(PagedQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All endpoints."""


class GetHttpConfig(Query, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of all proxies."""


class GetHttpProxies(PagedQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All proxies that were heard of lately."""


class GetHosts(PagedQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All hosts that were heard of lately."""


class GetStatus(Query, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole system."""

    replicas: bool = True
    """False leaves out the single replicas, which make the answer long."""
    deployments: bool = True
    """False leaves out the deployments and their autoscaling: `ListDeployments` and `GetAutoscaling` tell them in
    pages."""


class GetAutoscaling(PagedQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the autoscaling of each backend that has one saw last, and why it moved or held."""


class GetLoad(Query, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Scrape all services now and sum up what they bear."""


class GetSnapshot(PagedQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every deployment in short, also those that are gone."""


class GetEvents(Query, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What happened lately, the oldest first."""

    limit: int = 100
    """1 to 1,000: the newest."""
    subject: str | None = None
    """Only about this deployment, backend, endpoint, host, proxy or goal."""


class GetHistory(Query, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who changed what: the audit log, the newest first."""

    limit: int = 50
    """1 to 500."""
    subject: str | None = None
    """Only about this deployment, backend, endpoint or host."""
    before: int | None = None
    """Only entries with a lower id: the next page."""


class GetRevisions(Query, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a deployment or backend was, the newest first: where `rollback` can go."""

    name: str


class GetBackup(Query, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A page of a backup's file: everything that is deployed, as it is at one moment."""

    backup_id: str = ""
    """As the first page told it; empty takes a new backup. One that nobody asked for in a minute is `not_found`, and so
    is any after a change of leader: begin anew."""
    page: int = 0


WAIT_TIMEOUT_S_MAX = 30.0


class WaitForGoal(Query, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Wait until a goal ends or the time is over. Unknown ids are refused with ``not_found``."""

    goal_id: GoalId
    timeout_s: float = 10.0
    """0 to `WAIT_TIMEOUT_S_MAX`; a caller that wants longer asks again."""


class Plan(Query, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a command would do, without doing it."""

    verb: str
    """Of the command, such as ``deploy``."""
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
