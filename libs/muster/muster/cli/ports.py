"""What commands need of a stack, so that they are tested without one. `muster.client` is what implements it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

from muster.client.address import StackAddress
from muster.client.ports import Answer
from muster.embedded.options import StackOptions
from muster.embedded.process import OnEvent
from muster.embedded.run_record import RunRecord
from serve_common.names import GoalId
from serve_common.wires.commands import ChangeReply, Deploy
from serve_common.wires.views import DeploymentView, GoalView, StatusView


class AdminPort(Protocol):
    """The admin verbs that commands use; see `muster.client.AdminClient`."""

    async def deploy(self, request: Deploy) -> ChangeReply:
        """See `AdminClient.deploy`."""
        ...

    async def delete_deployment(self, name: str) -> ChangeReply:
        """See `AdminClient.delete_deployment`."""
        ...

    async def get_deployment_info(self, name: str) -> DeploymentView:
        """See `AdminClient.get_deployment_info`."""
        ...

    async def get_status(self) -> StatusView:
        """See `AdminClient.get_status`."""
        ...

    async def wait_for_goal(
        self, goal_id: GoalId, *, deadline_s: float, on_progress: Callable[[GoalView], None]
    ) -> GoalView:
        """See `AdminClient.wait_for_goal`."""
        ...


class CallPort(Protocol):
    """Calls of endpoints; see `muster.client.Caller`."""

    async def call(self, name: str, body: bytes, *, headers: Mapping[str, str], timeout_s: float) -> Answer:
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
