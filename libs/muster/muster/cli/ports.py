"""What commands need of a stack, so that they are tested without one. `muster.client` is what implements it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

from muster.client.address import StackAddress
from muster.client.requests import AdminReply
from muster.embedded.options import StackOptions
from muster.embedded.process import OnEvent
from muster.embedded.run_record import RunRecord
from serve_common.api.commands import Change, ChangeReply, RestoreReply, Shutdown, ShutdownReply
from serve_common.api.queries import (
    GetBackendConfig,
    GetDeploymentInfo,
    GetEvents,
    GetHistory,
    GetRevisions,
    GetStatus,
    ListDeployments,
)
from serve_common.api.views import (
    ApplicationView,
    AutoscalingView,
    BackendConfigView,
    BackendView,
    DeploymentView,
    EndpointView,
    EventView,
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
from serve_common.names import GoalId


class AdminPort(Protocol):
    """The admin verbs as commands use them; see `muster.client.AdminClient`."""

    async def change(self, request: Change) -> ChangeReply:
        """See `AdminClient.change`."""
        ...

    async def shutdown(self, request: Shutdown) -> ShutdownReply:
        """See `AdminClient.shutdown`."""
        ...

    async def fetch_backup(self) -> bytes:
        """See `AdminClient.fetch_backup`."""
        ...

    async def send_backup(self, data: bytes, *, confirm: bool) -> RestoreReply:
        """See `AdminClient.send_backup`."""
        ...

    async def plan(self, request: Change | Shutdown) -> PlanView:
        """See `AdminClient.plan`."""
        ...

    async def get_deployment_info(self, request: GetDeploymentInfo) -> DeploymentView:
        """See `AdminClient.get_deployment_info`."""
        ...

    async def get_backend_config(self, request: GetBackendConfig) -> BackendConfigView:
        """See `AdminClient.get_backend_config`."""
        ...

    async def get_events(self, request: GetEvents) -> list[EventView]:
        """See `AdminClient.get_events`."""
        ...

    async def get_history(self, request: GetHistory) -> list[HistoryView]:
        """See `AdminClient.get_history`."""
        ...

    async def get_revisions(self, request: GetRevisions) -> list[RevisionView]:
        """See `AdminClient.get_revisions`."""
        ...

    async def get_status(self, request: GetStatus) -> StatusView:
        """See `AdminClient.get_status`."""
        ...

    async def list_deployments(self, request: ListDeployments) -> list[DeploymentView]:
        """See `AdminClient.list_deployments`."""
        ...

    async def get_all_applications(self) -> list[ApplicationView]:
        """See `AdminClient.get_all_applications`."""
        ...

    async def get_all_backends(self) -> list[BackendView]:
        """See `AdminClient.get_all_backends`."""
        ...

    async def get_all_endpoints(self) -> list[EndpointView]:
        """See `AdminClient.get_all_endpoints`."""
        ...

    async def get_http_config(self) -> HttpOptions:
        """See `AdminClient.get_http_config`."""
        ...

    async def get_http_proxies(self) -> list[ProxyView]:
        """See `AdminClient.get_http_proxies`."""
        ...

    async def get_hosts(self) -> list[HostView]:
        """See `AdminClient.get_hosts`."""
        ...

    async def get_autoscaling(self) -> list[AutoscalingView]:
        """See `AdminClient.get_autoscaling`."""
        ...

    async def get_load(self) -> LoadView:
        """See `AdminClient.get_load`."""
        ...

    async def get_snapshot(self) -> list[SnapshotView]:
        """See `AdminClient.get_snapshot`."""
        ...

    async def wait_for_goal(
        self, goal_id: GoalId, *, deadline_s: float, on_progress: Callable[[GoalView], None]
    ) -> GoalView:
        """See `AdminClient.wait_for_goal`."""
        ...


class CallPort(Protocol):
    """Calls of endpoints; see `muster.client.Caller`."""

    async def call(
        self, name: str, body: bytes, *, headers: Mapping[str, str], timeout_s: float
    ) -> AdminReply:
        """See `Caller.call`."""
        ...


class StackPort(Protocol):
    """A stack that was reached."""

    @property
    def admin(self) -> AdminPort:
        """Its controller."""
        ...

    @property
    def caller(self) -> CallPort:
        """Its proxies."""
        ...


class Connect(Protocol):
    """Reaches a stack; see `muster.client.connect_stack`."""

    def __call__(
        self, address: StackAddress, *, retry_for_s: float, on_retry: Callable[[str], None]
    ) -> AbstractAsyncContextManager[StackPort]:
        """Raises `BusUnavailable` and `BusAuthorizationFailed` when entered."""
        ...


class EmbeddedPort(Protocol):
    """A stack that runs within an ``async with``; see `muster.embedded.stack.EmbeddedStack`."""

    async def __aenter__(self) -> object:
        """Returns when everything is ready."""
        ...

    async def __aexit__(self, *_: object) -> None:
        """Stops everything in order."""
        ...

    @property
    def record(self) -> RunRecord:
        """What runs where."""
        ...


class MakeEmbedded(Protocol):
    """Makes a stack that is not started yet."""

    def __call__(
        self, state_dir: Path, options: StackOptions, *, on_event: OnEvent, on_notice: Callable[[str], None]
    ) -> EmbeddedPort:
        """Raises nothing; starting it does."""
        ...
