"""Every query of the admin API as a typed method. Lists come whole, page by page, unless one page is asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import msgspec

from muster.client.asking import VERB_OF, Asking, ignore
from serve_common.errors import NotFound
from serve_common.names import GoalId
from serve_common.values.http_options import HttpOptions
from serve_common.wires.commands import Change, Shutdown
from serve_common.wires.queries import (
    GetAllApplications,
    GetAllBackends,
    GetAllEndpoints,
    GetAutoscaling,
    GetBackendConfig,
    GetBackup,
    GetDeploymentInfo,
    GetEvents,
    GetHistory,
    GetHosts,
    GetHttpConfig,
    GetHttpProxies,
    GetLoad,
    GetRevisions,
    GetSnapshot,
    GetStatus,
    ListDeployments,
    Plan,
    WaitForGoal,
)
from serve_common.wires.views import (
    ApplicationView,
    AutoscalingView,
    BackendConfigView,
    BackendView,
    BackupPage,
    DeploymentView,
    EndpointView,
    EventView,
    GoalStatus,
    GoalView,
    HistoryView,
    HostView,
    LoadView,
    PlanView,
    ProxyView,
    RevisionView,
    SnapshotView,
    StatusView,
)

WAIT_SLICE_S: Final = 1.0
"""How long the server holds one question for a goal, so that its progress is shown about every second."""
SLICE_SLACK_S: Final = 2.0

BACKUP_TRIES: Final = 3
"""A change of leader between two pages means to begin anew."""


class Queries(Asking):
    """The queries. Part of `AdminClient`."""

    async def get_deployment_info(self, request: GetDeploymentInfo | str) -> DeploymentView:
        """One deployment; raises `NotFound`. Its name alone will do."""
        query = GetDeploymentInfo(name=request) if isinstance(request, str) else request
        reply: DeploymentView = await self._asker.ask(query)
        return reply

    async def list_deployments(self, request: ListDeployments | None = None) -> list[DeploymentView]:
        """All deployments; on request also those that are gone."""
        query = request or ListDeployments()
        return await self._asker.ask_all(query, lambda view: view.name)

    async def get_all_applications(self, request: GetAllApplications | None = None) -> list[ApplicationView]:
        """All applications."""
        return await self._asker.ask_all(request or GetAllApplications(), lambda view: view.name)

    async def get_all_backends(self, request: GetAllBackends | None = None) -> list[BackendView]:
        """All backends and their replicas."""
        return await self._asker.ask_all(request or GetAllBackends(), lambda view: view.backend_tag)

    async def get_backend_config(self, request: GetBackendConfig) -> BackendConfigView:
        """One backend's configuration; raises `NotFound`."""
        reply: BackendConfigView = await self._asker.ask(request)
        return reply

    async def get_all_endpoints(self, request: GetAllEndpoints | None = None) -> list[EndpointView]:
        """All endpoints and their traffic."""
        return await self._asker.ask_all(request or GetAllEndpoints(), lambda view: view.endpoint_tag)

    async def get_http_config(self, request: GetHttpConfig | None = None) -> HttpOptions:
        """The options of all proxies."""
        reply: HttpOptions = await self._asker.ask(request or GetHttpConfig())
        return reply

    async def get_http_proxies(self, request: GetHttpProxies | None = None) -> list[ProxyView]:
        """All proxies that were heard of lately, with the snapshots that they applied."""
        return await self._asker.ask_all(request or GetHttpProxies(), lambda view: view.proxy_id)

    async def get_hosts(self, request: GetHosts | None = None) -> list[HostView]:
        """All hosts that were heard of lately."""
        return await self._asker.ask_all(request or GetHosts(), lambda view: view.host_id)

    async def get_status(self, request: GetStatus | None = None) -> StatusView:
        """The whole system. Raises `LimitReached` when that is more than one message carries."""
        reply: StatusView = await self._asker.ask(request or GetStatus())
        return reply

    async def get_autoscaling(self, request: GetAutoscaling | None = None) -> list[AutoscalingView]:
        """What the autoscaling of each backend that has one saw last, and why it moved or held."""
        return await self._asker.ask_all(request or GetAutoscaling(), lambda view: view.backend_tag)

    async def get_load(self, request: GetLoad | None = None) -> LoadView:
        """What all services bear now, as counts since they began: two of these make rates."""
        reply: LoadView = await self._asker.ask(request or GetLoad())
        return reply

    async def get_snapshot(self, request: GetSnapshot | None = None) -> list[SnapshotView]:
        """Every deployment in short, also those that are gone."""
        return await self._asker.ask_all(request or GetSnapshot(), lambda view: view.name)

    async def get_events(self, request: GetEvents | None = None) -> list[EventView]:
        """What happened lately, the oldest first."""
        reply: list[EventView] = await self._asker.ask(request or GetEvents())
        return reply

    async def get_history(self, request: GetHistory | None = None) -> list[HistoryView]:
        """Who changed what, the newest first."""
        reply: list[HistoryView] = await self._asker.ask(request or GetHistory())
        return reply

    async def get_revisions(self, request: GetRevisions) -> list[RevisionView]:
        """What a deployment or backend was, the newest first; raises `NotFound`."""
        reply: list[RevisionView] = await self._asker.ask(request)
        return reply

    async def get_backup(self, request: GetBackup | None = None) -> BackupPage:
        """A page of a backup's file; raises `NotFound` for a backup that is no longer kept."""
        reply: BackupPage = await self._asker.ask(request or GetBackup())
        return reply

    async def fetch_backup(self) -> bytes:
        """The whole file of a new backup. Raises `NotFound` when the leader changed again and again meanwhile."""
        for _ in range(BACKUP_TRIES - 1):
            try:
                return await self._fetch_backup()
            except NotFound:
                continue
        return await self._fetch_backup()

    async def _fetch_backup(self) -> bytes:
        first = await self.get_backup()
        pages = [first.data]
        for number in range(1, first.pages):
            page = await self.get_backup(GetBackup(backup_id=first.backup_id, page=number))
            pages.append(page.data)
        return b"".join(pages)

    async def plan(self, request: Plan | Change | Shutdown) -> PlanView:
        """What a command would do, without doing it; raises its refusal. The command itself will do."""
        if not isinstance(request, Plan):
            command = msgspec.Raw(msgspec.json.encode(request))
            request = Plan(verb=VERB_OF[type(request)], request=command)
        reply: PlanView = await self._asker.ask(request)
        return reply

    async def wait_for_goal(
        self,
        goal_id: GoalId,
        *,
        deadline_s: float,
        on_progress: Callable[[GoalView], None] = ignore,
    ) -> GoalView:
        """Wait until a goal ends, for at most ``deadline_s``; a view that is still PENDING means the time is over.

        ``on_progress`` hears every view, about one a second. Raises `NotFound` for an id that is unknown.
        """
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + deadline_s
        while True:
            left_s = max(0.0, give_up_at - loop.time())
            slice_s = min(WAIT_SLICE_S, left_s)
            view: GoalView = await self._asker.ask(
                WaitForGoal(goal_id=goal_id, timeout_s=slice_s),
                attempt_s=slice_s + SLICE_SLACK_S,
            )
            on_progress(view)
            if view.status is not GoalStatus.PENDING or loop.time() >= give_up_at:
                return view
