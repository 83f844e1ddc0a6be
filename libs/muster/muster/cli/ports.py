"""Interfaces that commands use to reach a stack; `muster.client` implements them, tests replace them."""

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
    """The admin verbs as commands use them; `muster.client.AdminClient` implements them."""

    async def change(self, request: Change) -> ChangeReply:
        """Send a command that answers with one goal."""
        ...

    async def shutdown(self, request: Shutdown) -> ShutdownReply:
        """Delete every application, deployment, endpoint and backend."""
        ...

    async def fetch_backup(self) -> bytes:
        """Take a new backup and return its whole file."""
        ...

    async def send_backup(self, data: bytes, *, confirm: bool) -> RestoreReply:
        """Restore from a backup's file; without ``confirm`` it is only checked. Raises `BadField` for a bad file."""
        ...

    async def plan(self, request: Change | Shutdown) -> PlanView:
        """Return what a command would do, without doing it."""
        ...

    async def get_deployment_info(self, request: GetDeploymentInfo) -> DeploymentView:
        """Return one deployment. Raises `NotFound`."""
        ...

    async def get_backend_config(self, request: GetBackendConfig) -> BackendConfigView:
        """Return the configuration of one backend. Raises `NotFound`."""
        ...

    async def get_events(self, request: GetEvents) -> list[EventView]:
        """Return recent events, the oldest first."""
        ...

    async def get_history(self, request: GetHistory) -> list[HistoryView]:
        """Return entries of the audit log, the newest first."""
        ...

    async def get_revisions(self, request: GetRevisions) -> list[RevisionView]:
        """Return the revisions of a deployment or backend, the newest first. Raises `NotFound`."""
        ...

    async def get_status(self, request: GetStatus) -> StatusView:
        """Return the status of the whole system. Raises `LimitReached` when it exceeds one message."""
        ...

    async def list_deployments(self, request: ListDeployments) -> list[DeploymentView]:
        """Return all deployments; on request also deleted ones."""
        ...

    async def get_all_applications(self) -> list[ApplicationView]:
        """Return all applications."""
        ...

    async def get_all_backends(self) -> list[BackendView]:
        """Return all backends with their replicas."""
        ...

    async def get_all_endpoints(self) -> list[EndpointView]:
        """Return all endpoints with their traffic."""
        ...

    async def get_http_config(self) -> HttpOptions:
        """Return the HTTP options of all proxies."""
        ...

    async def get_http_proxies(self) -> list[ProxyView]:
        """Return all proxies that reported recently."""
        ...

    async def get_hosts(self) -> list[HostView]:
        """Return all hosts that reported recently."""
        ...

    async def get_autoscaling(self) -> list[AutoscalingView]:
        """Return the last load and decision of each autoscaled backend."""
        ...

    async def get_load(self) -> LoadView:
        """Return counters of the current load, summed over all services."""
        ...

    async def get_snapshot(self) -> list[SnapshotView]:
        """Return a summary of every deployment, deleted ones included."""
        ...

    async def wait_for_goal(
        self, goal_id: GoalId, *, deadline_s: float, on_progress: Callable[[GoalView], None]
    ) -> GoalView:
        """Wait at most ``deadline_s`` for a goal to end; a view that is still PENDING means the deadline passed."""
        ...


class CallPort(Protocol):
    """Calls endpoints over NATS; `muster.client.Caller` implements it."""

    async def call(
        self, name: str, body: bytes, *, headers: Mapping[str, str], timeout_s: float
    ) -> AdminReply:
        """Send one request to an endpoint and return its response."""
        ...


class StackPort(Protocol):
    """A connected stack."""

    @property
    def admin(self) -> AdminPort:
        """Client of its controller."""
        ...

    @property
    def caller(self) -> CallPort:
        """Client of its proxies' gateway."""
        ...


class Connect(Protocol):
    """Connects to a stack; `muster.client.connect_stack` implements it."""

    def __call__(
        self, address: StackAddress, *, retry_for_s: float, on_retry: Callable[[str], None]
    ) -> AbstractAsyncContextManager[StackPort]:
        """Raises `BusUnavailable` and `BusAuthorizationFailed` when entered."""
        ...


class EmbeddedPort(Protocol):
    """A stack that runs within an ``async with``; `muster.embedded.stack.EmbeddedStack` implements it."""

    async def __aenter__(self) -> object:
        """Returns when everything is ready."""
        ...

    async def __aexit__(self, *_: object) -> None:
        """Stops everything in order."""
        ...

    @property
    def record(self) -> RunRecord:
        """Processes, addresses and ports of the stack."""
        ...


class MakeEmbedded(Protocol):
    """Creates an embedded stack that is not started yet."""

    def __call__(
        self, state_dir: Path, options: StackOptions, *, on_event: OnEvent, on_notice: Callable[[str], None]
    ) -> EmbeddedPort:
        """Raises nothing; starting it does."""
        ...
