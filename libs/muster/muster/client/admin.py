"""The whole admin API as typed methods: commands and queries."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from muster.client.requests import VERB_OF, AdminRequests, Asker, Requests, ignore
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
"""The whole file is checked with its last page."""


class AdminCommands(AdminRequests):
    """The commands. Part of `AdminClient`."""

    async def change(self, request: Change) -> ChangeReply:
        """Any command that answers with one goal."""
        reply: ChangeReply = await self._asker.ask(request)
        return reply

    async def deploy(self, request: Deploy) -> ChangeReply:
        """Make a deployment be as given."""
        return await self.change(request)

    async def delete_deployment(self, request: DeleteDeployment | str) -> ChangeReply:
        """Make a deployment not exist; an unknown name is a success without a goal. Its name alone will do."""
        return await self.change(DeleteDeployment(name=request) if isinstance(request, str) else request)

    async def deploy_application(self, request: DeployApplication) -> ChangeReply:
        """Make an application be these deployments, in one change: all or nothing. Those left out go away."""
        return await self.change(request)

    async def delete_application(self, request: DeleteApplication) -> ChangeReply:
        """Make an application and its deployments not exist. An unknown name is a success."""
        return await self.change(request)

    async def create_backend(self, request: CreateBackend) -> ChangeReply:
        """Make a backend be as given. The same configurations again make no new goal."""
        return await self.change(request)

    async def delete_backend(self, request: DeleteBackend) -> ChangeReply:
        """Make a backend not exist. Unknown: a success. Refused while an endpoint sends or copies traffic to it."""
        return await self.change(request)

    async def update_backend_config(self, request: UpdateBackendConfig) -> ChangeReply:
        """Change the given fields of a backend's configuration, also of a deployment's; the others stay."""
        return await self.change(request)

    async def scale(self, request: Scale) -> ChangeReply:
        """Make a backend have so many replicas. Autoscaling, where there is one, pauses until it is resumed."""
        return await self.change(request)

    async def pause_autoscaling(self, request: PauseAutoscaling | str) -> ChangeReply:
        """Leave a backend's number of replicas as it is. Its tag alone will do."""
        return await self.change(
            PauseAutoscaling(backend_tag=request) if isinstance(request, str) else request
        )

    async def resume_autoscaling(self, request: ResumeAutoscaling | str) -> ChangeReply:
        """Let a backend's number of replicas follow its load again. Its tag alone will do."""
        return await self.change(
            ResumeAutoscaling(backend_tag=request) if isinstance(request, str) else request
        )

    async def create_endpoint(self, request: CreateEndpoint) -> ChangeReply:
        """Make an endpoint. The same again makes no new goal; another one under the same name is refused."""
        return await self.change(request)

    async def delete_endpoint(self, request: DeleteEndpoint) -> ChangeReply:
        """Make an endpoint not exist; its backends stay. Unknown: a success."""
        return await self.change(request)

    async def set_traffic(self, request: SetTraffic) -> ChangeReply:
        """Say where an endpoint's requests go."""
        return await self.change(request)

    async def shadow_traffic(self, request: ShadowTraffic) -> ChangeReply:
        """Copy a proportion of an endpoint's requests to a backend whose answers are dropped."""
        return await self.change(request)

    async def set_endpoint_options(self, request: SetEndpointOptions) -> ChangeReply:
        """Change the given options of an endpoint, also of a deployment's; the others stay."""
        return await self.change(request)

    async def rollback(self, request: Rollback) -> ChangeReply:
        """Make a deployment or backend be again what it was."""
        return await self.change(request)

    async def set_http_options(self, request: SetHttpOptions) -> ChangeReply:
        """Change the given options of all proxies while they run; the others stay."""
        return await self.change(request)

    async def drain_host(self, request: DrainHost) -> ChangeReply:
        """Move every replica off a host, new ones first, and place none there."""
        return await self.change(request)

    async def undrain_host(self, request: UndrainHost) -> ChangeReply:
        """Place replicas on a host again. One that is not drained is a success."""
        return await self.change(request)

    async def restore(self, request: Restore) -> RestoreReply:
        """Send a page of a backup; with the last one everything becomes what the backup says. See `send_backup`."""
        reply: RestoreReply = await self._asker.ask(request, attempt_s=RESTORE_ATTEMPT_S)
        return reply

    async def send_backup(self, data: bytes, *, confirm: bool) -> RestoreReply:
        """Restore from the file of a backup or, without ``confirm``, only have it checked.

        Raises `BadField` that says what is wrong with the file; nothing is changed then.
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
        reply: ShutdownReply = await self._asker.ask(request or Shutdown(confirm="everything"))
        return reply


WAIT_SLICE_S: Final = 1.0
"""How long the server holds one question for a goal, so that its progress is shown about every second."""
SLICE_SLACK_S: Final = 2.0

BACKUP_TRIES: Final = 3
"""A change of leader between two pages means to begin anew."""


class AdminQueries(AdminRequests):
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


class AdminClient(AdminCommands, AdminQueries):
    """The admin API of one stack. Errors are those of `serve_common.errors`, as the controller raised them."""

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
        """See `Asker`."""
        super().__init__(
            Asker(
                requests,
                subjects,
                who=who,
                headers=headers,
                retry_for_s=retry_for_s,
                retry_pause_s=retry_pause_s,
                on_retry=on_retry,
            )
        )
