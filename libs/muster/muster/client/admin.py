"""The whole admin API as typed methods: commands and queries."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from muster.client.requests import VERB_BY_REQUEST, AdminRequester, AdminRequests, Requests, ignore
from serve_common.api.commands import (
    BACKUP_PAGE_BYTES_MAX,
    Change,
    ChangeReply,
    CreateBackend,
    CreateEndpoint,
    DeleteApplication,
    DeleteBackend,
    DeleteDeployment,
    DeleteEndpoint,
    Deploy,
    DeployApplication,
    DrainHost,
    PauseAutoscaling,
    Restore,
    RestoreReply,
    ResumeAutoscaling,
    Rollback,
    Scale,
    SetEndpointOptions,
    SetHttpOptions,
    SetTraffic,
    ShadowTraffic,
    Shutdown,
    ShutdownReply,
    UndrainHost,
    UpdateBackendConfig,
)
from serve_common.api.queries import (
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
from serve_common.api.views import (
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
from serve_common.config.endpoint import HttpOptions
from serve_common.errors import NotFound
from serve_common.names import GoalId
from serve_common.protocol.subjects import Subjects

RESTORE_ATTEMPT_S: Final = 30.0
"""Seconds per attempt: the whole file is checked with its last page."""


class AdminCommands(AdminRequests):
    """The commands. Part of `AdminClient`.

    A reply means that the change is recorded, not that it is done; `AdminClient.wait_for_goal` waits for that.
    """

    async def change(self, request: Change) -> ChangeReply:
        """Send any command that is answered with one goal."""
        reply: ChangeReply = await self._requester.ask(request)
        return reply

    async def deploy(self, request: Deploy) -> ChangeReply:
        """Create or update a deployment."""
        return await self.change(request)

    async def delete_deployment(self, request: DeleteDeployment | str) -> ChangeReply:
        """Delete a deployment, given as a command or a name; an unknown one succeeds without a goal."""
        return await self.change(DeleteDeployment(name=request) if isinstance(request, str) else request)

    async def deploy_application(self, request: DeployApplication) -> ChangeReply:
        """Create or update an application in one change, all or nothing. Deployments left out are deleted."""
        return await self.change(request)

    async def delete_application(self, request: DeleteApplication) -> ChangeReply:
        """Delete an application and its deployments. An unknown name succeeds."""
        return await self.change(request)

    async def create_backend(self, request: CreateBackend) -> ChangeReply:
        """Create or update a backend. Unchanged configurations make no new goal."""
        return await self.change(request)

    async def delete_backend(self, request: DeleteBackend) -> ChangeReply:
        """Delete a backend. An unknown tag succeeds. Refused while an endpoint sends or copies traffic to it."""
        return await self.change(request)

    async def update_backend_config(self, request: UpdateBackendConfig) -> ChangeReply:
        """Change the given fields of the configuration of a backend or deployment; the others stay."""
        return await self.change(request)

    async def scale(self, request: Scale) -> ChangeReply:
        """Set the number of replicas of a backend. Autoscaling, if configured, pauses until it is resumed."""
        return await self.change(request)

    async def pause_autoscaling(self, request: PauseAutoscaling | str) -> ChangeReply:
        """Pause the autoscaling of a backend, given as a command or a tag."""
        return await self.change(
            PauseAutoscaling(backend_tag=request) if isinstance(request, str) else request
        )

    async def resume_autoscaling(self, request: ResumeAutoscaling | str) -> ChangeReply:
        """Resume the autoscaling of a backend, given as a command or a tag."""
        return await self.change(
            ResumeAutoscaling(backend_tag=request) if isinstance(request, str) else request
        )

    async def create_endpoint(self, request: CreateEndpoint) -> ChangeReply:
        """Create an endpoint. An identical one makes no new goal; a different one of the same name is refused."""
        return await self.change(request)

    async def delete_endpoint(self, request: DeleteEndpoint) -> ChangeReply:
        """Delete an endpoint; its backends stay. An unknown name succeeds."""
        return await self.change(request)

    async def set_traffic(self, request: SetTraffic) -> ChangeReply:
        """Set the traffic split of an endpoint."""
        return await self.change(request)

    async def shadow_traffic(self, request: ShadowTraffic) -> ChangeReply:
        """Copy a proportion of an endpoint's requests to a backend whose responses are dropped."""
        return await self.change(request)

    async def set_endpoint_options(self, request: SetEndpointOptions) -> ChangeReply:
        """Change the given options of the endpoint of this tag, also that of a deployment; the others stay."""
        return await self.change(request)

    async def rollback(self, request: Rollback) -> ChangeReply:
        """Return a deployment or backend to an earlier revision."""
        return await self.change(request)

    async def set_http_options(self, request: SetHttpOptions) -> ChangeReply:
        """Change the given options of all proxies while they run; the others stay."""
        return await self.change(request)

    async def drain_host(self, request: DrainHost) -> ChangeReply:
        """Move every replica off a host, starting replacements first, and place none there."""
        return await self.change(request)

    async def undrain_host(self, request: UndrainHost) -> ChangeReply:
        """Allow replicas on a host again. Succeeds if the host is not drained."""
        return await self.change(request)

    async def restore(self, request: Restore) -> RestoreReply:
        """Send one page of a backup; the last one restores it. `send_backup` sends a whole file."""
        reply: RestoreReply = await self._requester.ask(request, attempt_s=RESTORE_ATTEMPT_S)
        return reply

    async def send_backup(self, data: bytes, *, confirm: bool) -> RestoreReply:
        """Restore from a backup's file; without ``confirm`` it is only checked.

        Raises `BadField` with the reason when the file is invalid; nothing is changed then.
        """
        upload_id, size = uuid.uuid4().hex, BACKUP_PAGE_BYTES_MAX
        parts = [data[at : at + size] for at in range(0, len(data), size)] or [b""]
        reply = RestoreReply()
        for number, part in enumerate(parts):
            is_last = number == len(parts) - 1
            reply = await self.restore(
                Restore(
                    upload_id=upload_id,
                    page=number,
                    pages=len(parts),
                    data=part,
                    confirm=confirm and is_last,
                )
            )
        return reply

    async def shutdown(self, request: Shutdown | None = None) -> ShutdownReply:
        """Delete every application, deployment, endpoint and backend."""
        reply: ShutdownReply = await self._requester.ask(request or Shutdown(confirm="everything"))
        return reply


WAIT_SLICE_S: Final = 1.0
"""Seconds per `WaitForGoal` query, so that progress is shown about once a second."""
SLICE_SLACK_S: Final = 2.0
"""Seconds that a reply to `WaitForGoal` may take beyond its own timeout."""

BACKUP_TRIES: Final = 3
"""Attempts to fetch a backup; a change of leader between two pages restarts it."""


class AdminQueries(AdminRequests):
    """The queries. Part of `AdminClient`.

    Lists are returned whole, fetched page by page, unless the query asks for one page with its ``limit``.
    """

    async def get_deployment_info(self, request: GetDeploymentInfo | str) -> DeploymentView:
        """Get one deployment, given as a query or a name. Raises `NotFound`."""
        query = GetDeploymentInfo(name=request) if isinstance(request, str) else request
        reply: DeploymentView = await self._requester.ask(query)
        return reply

    async def list_deployments(self, request: ListDeployments | None = None) -> list[DeploymentView]:
        """List all deployments; on request also deleted ones."""
        query = request or ListDeployments()
        return await self._requester.request_all(query, lambda view: view.name)

    async def get_all_applications(self, request: GetAllApplications | None = None) -> list[ApplicationView]:
        """List all applications."""
        return await self._requester.request_all(request or GetAllApplications(), lambda view: view.name)

    async def get_all_backends(self, request: GetAllBackends | None = None) -> list[BackendView]:
        """List all backends with their replicas."""
        return await self._requester.request_all(request or GetAllBackends(), lambda view: view.backend_tag)

    async def get_backend_config(self, request: GetBackendConfig) -> BackendConfigView:
        """Get the configuration of one backend. Raises `NotFound`."""
        reply: BackendConfigView = await self._requester.ask(request)
        return reply

    async def get_all_endpoints(self, request: GetAllEndpoints | None = None) -> list[EndpointView]:
        """List all endpoints with their traffic."""
        return await self._requester.request_all(request or GetAllEndpoints(), lambda view: view.endpoint_tag)

    async def get_http_config(self, request: GetHttpConfig | None = None) -> HttpOptions:
        """Get the HTTP options of all proxies."""
        reply: HttpOptions = await self._requester.ask(request or GetHttpConfig())
        return reply

    async def get_http_proxies(self, request: GetHttpProxies | None = None) -> list[ProxyView]:
        """List all proxies that reported recently, with the snapshots that they applied."""
        return await self._requester.request_all(request or GetHttpProxies(), lambda view: view.proxy_id)

    async def get_hosts(self, request: GetHosts | None = None) -> list[HostView]:
        """List all hosts that reported recently."""
        return await self._requester.request_all(request or GetHosts(), lambda view: view.host_id)

    async def get_status(self, request: GetStatus | None = None) -> StatusView:
        """Get the status of the whole system. Raises `LimitReached` when it exceeds one message."""
        reply: StatusView = await self._requester.ask(request or GetStatus())
        return reply

    async def get_autoscaling(self, request: GetAutoscaling | None = None) -> list[AutoscalingView]:
        """List the last load, decision and reason of each autoscaled backend."""
        return await self._requester.request_all(request or GetAutoscaling(), lambda view: view.backend_tag)

    async def get_load(self, request: GetLoad | None = None) -> LoadView:
        """Get the load of all services, as counters since they started; two replies give rates."""
        reply: LoadView = await self._requester.ask(request or GetLoad())
        return reply

    async def get_snapshot(self, request: GetSnapshot | None = None) -> list[SnapshotView]:
        """List a summary of every deployment, deleted ones included."""
        return await self._requester.request_all(request or GetSnapshot(), lambda view: view.name)

    async def get_events(self, request: GetEvents | None = None) -> list[EventView]:
        """Get recent events, the oldest first."""
        reply: list[EventView] = await self._requester.ask(request or GetEvents())
        return reply

    async def get_history(self, request: GetHistory | None = None) -> list[HistoryView]:
        """Get entries of the audit log, the newest first."""
        reply: list[HistoryView] = await self._requester.ask(request or GetHistory())
        return reply

    async def get_revisions(self, request: GetRevisions) -> list[RevisionView]:
        """Get the revisions of a deployment or backend, the newest first. Raises `NotFound`."""
        reply: list[RevisionView] = await self._requester.ask(request)
        return reply

    async def get_backup(self, request: GetBackup | None = None) -> BackupPage:
        """Get a page of a backup's file. Raises `NotFound` for a backup that has expired."""
        reply: BackupPage = await self._requester.ask(request or GetBackup())
        return reply

    async def fetch_backup(self) -> bytes:
        """Take a new backup and return its file. Raises `NotFound` when the leader changed during every attempt."""
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
        """Get what a command would do, given as a query or the command; raises the error that would refuse it."""
        if not isinstance(request, Plan):
            command = msgspec.Raw(msgspec.json.encode(request))
            request = Plan(verb=VERB_BY_REQUEST[type(request)], request=command)
        reply: PlanView = await self._requester.ask(request)
        return reply

    async def wait_for_goal(
        self,
        goal_id: GoalId,
        *,
        deadline_s: float,
        on_progress: Callable[[GoalView], None] = ignore,
    ) -> GoalView:
        """Wait at most ``deadline_s`` for a goal to end; a view that is still PENDING means the deadline passed.

        ``on_progress`` is called with every view, about once a second. Raises `NotFound` for an unknown id.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + deadline_s
        while True:
            left_s = max(0.0, deadline - loop.time())
            slice_s = min(WAIT_SLICE_S, left_s)
            view: GoalView = await self._requester.ask(
                WaitForGoal(goal_id=goal_id, timeout_s=slice_s),
                attempt_s=slice_s + SLICE_SLACK_S,
            )
            on_progress(view)
            if view.status is not GoalStatus.PENDING or loop.time() >= deadline:
                return view


class AdminClient(AdminCommands, AdminQueries):
    """Client of one stack's admin API. Raises the controller's errors, as classes of `serve_common.errors`.

    A call survives the death of the controller that it was sent to (`AdminRequester`).
    """

    def __init__(
        self,
        requests: Requests,
        subjects: Subjects,
        *,
        who: str = "",
        headers: Mapping[str, str] | None = None,
        retry_for_s: float = 30.0,
        retry_pause_s: float = 0.25,
        on_retry: Callable[[str], None] = ignore,
    ) -> None:
        """Retries transient errors for ``retry_for_s`` seconds; ``on_retry`` is called with the reason.

        ``who`` and ``headers`` are sent with every change; ``who`` is the client's name in the audit log.
        """
        super().__init__(
            AdminRequester(
                requests,
                subjects,
                who=who,
                headers=headers,
                retry_for_s=retry_for_s,
                retry_pause_s=retry_pause_s,
                on_retry=on_retry,
            )
        )
