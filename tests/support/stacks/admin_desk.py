"""One instance with a real controller process, two hosts and a proxy, and a caller that knows only NATS and JSON."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any, Self

import msgspec
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from muster.client.admin import AdminClient
from serve_common.api.commands import ChangeReply
from serve_common.api.queries import VERBS, GetEvents, GetStatus
from serve_common.api.views import ErrorView, EventView, GoalStatus, GoalView
from serve_common.config.backend import ReplicaConfig
from serve_common.names import GoalId
from serve_common.protocol.reports import ReplicaGoal
from serve_common.protocol.subjects import Subjects
from serve_common.runtime.tasks import TaskOwner
from serve_replica_host.core.events import Placed, ReplicaStartFailed
from tests.support.servers.nats_server import NatsServer
from tests.support.servers.postgres_server import PostgresServer
from tests.support.stacks.control_plane import ControlPlane, SimulatedHost

CODE = ReplicaConfig(import_path="model:Model")
BAD_CODE = ReplicaConfig(import_path="model:Broken")
"""Its constructor raises, on these hosts."""
SOON_S = 60.0
"""For what takes a moment on a quiet machine, and has no limit of its own on a busy one."""
TRACEBACK = 'File "model.py", line 7, in __init__\nValueError: no weights'


class Refusal(msgspec.Struct, frozen=True):
    """An error reply, head and body."""

    status: int
    """``Nats-Service-Error-Code``."""
    text: str
    """``Nats-Service-Error``."""
    view: ErrorView


class AdminDesk:
    """Where commands are given and heard about."""

    def __init__(self, plane: ControlPlane) -> None:
        self.plane = plane
        self.told: list[tuple[str, str, EventView]] = []
        """Kind, subject and content of every event that was published."""
        self._heard = asyncio.Condition()

    @classmethod
    @contextlib.asynccontextmanager
    async def opened(
        cls, nats: NatsServer, postgres: PostgresServer, **environment: str
    ) -> AsyncIterator[Self]:
        """With one leader, that has more variables of its ``environment``, and both hosts and the proxy heard of."""
        async with ControlPlane.opened(nats, postgres) as plane:
            self = cls(plane)
            second = SimulatedHost(plane._bus("host-2"), "host-2")
            for host in (plane.host, second):
                _fail_bad_code(host)
            tasks = TaskOwner("admin_desk")
            tasks.start(second.bus.run(), "host_bus")
            tasks.start(second.shell.run(), "host")
            events = await plane.client.subscribe(plane.subjects.events)
            tasks.start(self._listen(events), "events")
            try:
                await plane.start_controller("controller-1", **environment)
                await plane.until_led_by("controller-1")
                await self.until_heard_of()
                yield self
            finally:
                await tasks.close(timeout_s=5.0)
                await second.bus.close()

    @property
    def admin(self) -> AdminClient:
        """The client that people program against."""
        return self.plane.admin

    @property
    def subjects(self) -> Subjects:
        """Of this instance."""
        return self.plane.subjects

    async def until_heard_of(self) -> None:
        """Both hosts and the proxy have reported to the leader."""
        async with asyncio.timeout(SOON_S):
            while True:
                status = await self.admin.call(GetStatus())
                if len(status.hosts) == 2 and status.proxies:
                    return
                await asyncio.sleep(0.02)

    # -- raw requests --------------------------------------------------------------------------------------------------

    async def send(self, verb: str, fields: dict[str, Any]) -> Msg:
        """One request over the bare bus."""
        return await self.plane.client.request(
            self.subjects.admin(verb), json.dumps(fields).encode(), timeout=SOON_S
        )

    async def call(self, verb: str, /, **fields: Any) -> Any:
        """The reply of a request that is accepted, as the table of verbs types it."""
        message = await self.send(verb, fields)
        assert "Nats-Service-Error-Code" not in (message.headers or {}), message.data
        return msgspec.json.decode(message.data, type=VERBS[verb].reply_type())

    async def refused(self, verb: str, /, **fields: Any) -> Refusal:
        """The error of a request that is not."""
        message = await self.send(verb, fields)
        assert message.headers is not None, f"{verb} was accepted: {message.data!r}"
        view = msgspec.json.decode(message.data, type=ErrorView)
        code, text = message.headers["Nats-Service-Error-Code"], message.headers["Nats-Service-Error"]
        return Refusal(int(code), text, view)

    # -- goals and events ----------------------------------------------------------------------------------------------

    async def ended(self, goal_id: GoalId | None) -> GoalView:
        """How a goal ended."""
        assert goal_id is not None
        view = await self.admin.wait_for_goal(goal_id, deadline_s=SOON_S)
        assert view.status is not GoalStatus.PENDING, view.message
        return view

    async def done(self, reply: ChangeReply) -> GoalId:
        """See what was asked succeed."""
        view = await self.ended(reply.goal_id)
        assert view.status is GoalStatus.SUCCEEDED, view.error
        return view.goal_id

    async def _listen(self, events: Subscription) -> None:
        async for message in events.messages:
            kind, _, subject = message.subject.removeprefix(f"{self.subjects.prefix}.event.").partition(".")
            content = msgspec.json.decode(message.data, type=EventView)
            async with self._heard:
                self.told.append((kind, subject, content))
                self._heard.notify_all()

    async def until_kept(
        self, query: GetEvents, is_so: Callable[[list[EventView]], bool], *, timeout_s: float = SOON_S
    ) -> list[EventView]:
        """What can be asked for afterwards, once it is so."""
        events: list[EventView] = []
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not is_so(events := await self.admin.call(query)):  # noqa: ASYNC110 - the server tells not
                    await asyncio.sleep(0.05)
                return events
        raise AssertionError(f"{query} never was answered as it should be, but with {events}")

    async def until_told(
        self, kind: str, subject: str, *, state: str, timeout_s: float = SOON_S
    ) -> list[EventView]:
        """Everything told of that subject, once ``state`` is."""

        def found() -> list[EventView]:
            return [content for k, s, content in self.told if (k, s) == (kind, subject)]

        def is_notified() -> bool:
            return any(state == each.state for each in found())

        async with asyncio.timeout(timeout_s), self._heard:
            await self._heard.wait_for(is_notified)
        return found()


def _fail_bad_code(host: SimulatedHost) -> None:
    runtime = host.runtime
    start = runtime.start

    def start_or_fail(goal: ReplicaGoal) -> None:
        if goal.replica_config.import_path != BAD_CODE.import_path:
            start(goal)
            return
        host.shell.take_event(Placed(goal.replica_tag, 1))
        host.shell.take_event(ReplicaStartFailed(goal.replica_tag, TRACEBACK))

    runtime.start = start_or_fail  # type: ignore[method-assign]  # a broken model on an otherwise good host
