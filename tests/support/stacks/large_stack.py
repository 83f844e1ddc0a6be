"""A real nats-server, with people's identities, and a controller that is not: it shows whatever the test wants shown.

Why not a real one: hundreds of deployments with thousands of replicas take a cluster, and names with which a real
controller would refuse to do anything could not be shown at all.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, Self, TypeVar

import msgspec
from nats.aio.client import Client
from nats.aio.msg import Msg

from muster.secrets import generate
from serve_common.api.queries import (
    QUERIES,
    GetAllApplications,
    GetAllEndpoints,
    GetAutoscaling,
    GetCaptures,
    GetDeploymentInfo,
    GetEvents,
    GetHistory,
    GetHosts,
    GetHttpConfig,
    GetHttpProxies,
    GetLoad,
    GetRevisions,
    GetRollouts,
    GetStatus,
    ListDeployments,
    PagedQuery,
    Plan,
    WaitForGoal,
)
from serve_common.api.rollout_views import RolloutView
from serve_common.api.views import (
    ApplicationView,
    BackendLoad,
    DeploymentStatus,
    DeploymentView,
    EndpointLoad,
    EndpointView,
    ErrorView,
    EventView,
    GoalStatus,
    GoalView,
    HistoryView,
    HostView,
    LoadView,
    PlanView,
    ProxyView,
    ReplicaView,
    StatusView,
)
from serve_common.config.backend import BackendConfig, HttpOptions, ReplicaConfig
from serve_common.errors import LimitReached, NotFound, ServeError
from serve_common.identities.roles import Role
from serve_common.names import GoalId
from serve_common.nats.client import close_nats, connect_nats
from serve_common.protocol.subjects import Subjects
from tests.support.browser.console_process import add_people
from tests.support.identities import bus_settings, lay_out_nats
from tests.support.servers.nats_server import NatsServer, until_known

T = TypeVar("T")

STEP_S: Final = 30.0
"""For each thing that the stack's own thread does."""


def build_deployment(
    name: str, *, replicas: int = 10, states: Sequence[str] = ("running",), **fields: Any
) -> DeploymentView:
    """A deployment of which replicas have ``states`` in turn."""
    views = [
        ReplicaView(
            replica_tag=f"{name}#{number}",
            state=states[number % len(states)],
            host_id=f"host-{number % 40}",
            version="v1",
        )
        for number in range(replicas)
    ]
    known: dict[str, Any] = {
        "status": DeploymentStatus.HEALTHY,
        "message": "",
        "route_prefix": f"/{name}",
        "methods": ["GET", "POST"],
        "version": "v1",
        "code_version": 1,
        "backend_config": BackendConfig(num_replicas=replicas),
        "replica_config": ReplicaConfig(import_path="models:Model"),
        "goal_id": GoalId("g1"),
        "goal_status": GoalStatus.SUCCEEDED,
        "started_at": 1.7e9,
    }
    return DeploymentView(name=name, replicas=views, **{**known, **fields})


class LargeStack:
    """All of it until the block ends; everything public may be changed by the test's thread at any time."""

    def __init__(self, directory: Path) -> None:
        """Not started yet."""
        self.secrets = generate(directory / "secrets")
        add_people(self.secrets)
        self.server = NatsServer(directory, config=lay_out_nats(directory, self.secrets).read_text())
        self.deployments: dict[str, DeploymentView] = {}
        self.applications: list[ApplicationView] = []
        self.endpoints: list[EndpointView] = []
        self.rollouts: list[RolloutView] = []
        self.events: list[EventView] = []
        self.history: list[HistoryView] = []
        self.hosts = [
            HostView(
                host_id=f"host-{number}",
                status="live",
                report_age_s=0.4,
                resources={"CPU": 64.0, "memory": 2.0**38},
                num_replicas=50,
            )
            for number in range(40)
        ]
        self.proxies = [
            ProxyView(
                proxy_id=f"proxy-{number}",
                status="live",
                report_age_s=0.2,
                address=f"10.0.0.{number}:8000",
                applied_snapshot_id=1,
            )
            for number in range(4)
        ]
        self.calls: dict[str, int] = {}
        """How often each verb was called."""
        self.commands: list[tuple[str, bytes]] = []
        """Commands that came; all are accepted, and do nothing."""
        self.subjects = Subjects()
        self._snapshot_id = 1
        self._status = b""
        self._started_at = time.monotonic()
        self._client: Client | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="large-stack")

    def __enter__(self) -> Self:
        self.server.start()
        self._thread.start()
        try:
            self.do(self._connect())
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.do(self._close())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(STEP_S)
            self._loop.close()
            self.server.close()

    def add(self, deployments: Iterable[DeploymentView]) -> None:
        """Show these too, or in place of those with the same names; the console reads all of it anew."""
        added = {view.name: view for view in deployments}
        self.deployments = dict(sorted({**self.deployments, **added}.items()))
        endpoints = {view.endpoint_tag: view for view in self.endpoints} | {
            view.name: EndpointView(
                endpoint_tag=view.name,
                route=view.route_prefix,
                methods=view.methods,
                traffic={view.name: 1.0},
            )
            for view in added.values()
        }
        self.endpoints = [endpoints[tag] for tag in sorted(endpoints)]
        self.change()

    def change(self) -> None:
        """To be called when something public was changed."""
        self._snapshot_id += 1
        self._status = b""

    def publish_event(self, event: EventView) -> None:
        """Publish it now, and retain it."""
        self.events.append(event)
        self.publish(self.subjects.event(event.kind, event.subject), msgspec.json.encode(event))

    def publish(self, subject: str, payload: bytes) -> None:
        """Publish as the controller."""
        self.do(self._publish(self.client, subject, payload))

    @property
    def client(self) -> Client:
        """The controller's connection."""
        assert self._client is not None
        return self._client

    def do(self, doing: Coroutine[Any, Any, T]) -> T:
        """Do something on the stack's own loop, and wait for that."""
        future: Future[T] = asyncio.run_coroutine_threadsafe(doing, self._loop)
        return future.result(STEP_S)

    def start(self, doing: Coroutine[Any, Any, T]) -> Future[T]:
        """Start something on the stack's own loop."""
        return asyncio.run_coroutine_threadsafe(doing, self._loop)

    async def connect_replica(self, tag: str) -> Client:
        """A connection with the rights of that replica, to be closed by `close_nats`."""
        name = tag.replace("/", ".").replace("#", ".")
        return await connect_nats(
            bus_settings(self.secrets, self.server.url, Role.REPLICA, name=name), name=tag, deadline_s=20
        )

    # -- the controller ------------------------------------------------------------------------------------------------

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    async def _connect(self) -> None:
        settings = bus_settings(self.secrets, self.server.url, Role.CONTROLLER)
        self._client = await connect_nats(settings, name="controller", deadline_s=20)
        await self._client.subscribe(self.subjects.admin("*"), cb=self._on_request)
        await until_known(self._client)

    async def _close(self) -> None:
        if self._client is not None:
            await close_nats(self._client)

    async def _publish(self, client: Client, subject: str, payload: bytes) -> None:
        await client.publish(subject, payload)
        await client.flush()

    async def _on_request(self, message: Msg) -> None:
        verb = message.subject.rpartition(".")[2]
        self.calls[verb] = self.calls.get(verb, 0) + 1
        try:
            reply = self._reply(verb, message.data)
            if len(reply) > self.client.max_payload:
                raise LimitReached(f"the answer has {len(reply)} bytes")
        except ServeError as error:
            view = ErrorView(code=error.code, message=str(error))
            headers = {
                "Nats-Service-Error": error.code,
                "Nats-Service-Error-Code": str(error.status_hint),
            }
            await self.client.publish(message.reply, msgspec.json.encode(view), headers=headers)
            return
        await message.respond(reply)

    def _reply(self, verb: str, body: bytes) -> bytes:
        kind = QUERIES.get(verb)
        if kind is None:
            self.commands.append((verb, body))
            return b'{"goal_id":"g1","updating":true}'
        query = msgspec.json.decode(body or b"{}", type=kind)
        if isinstance(query, GetStatus) and query.deployments and query.replicas and self._status:
            return self._status
        reply = msgspec.json.encode(self._find(query))
        if isinstance(query, GetStatus) and query.deployments and query.replicas:
            self._status = reply
        return reply

    def _find(self, query: Any) -> Any:
        now = time.time()  # noqa: TID251 - as the controller's clock
        views: dict[type[Any], Callable[[], Any]] = {
            GetStatus: lambda: self._build_status(query),
            ListDeployments: lambda: list(self.deployments.values()),
            GetDeploymentInfo: lambda: self._get_deployment(query.name),
            GetAllApplications: lambda: self.applications,
            GetAllEndpoints: lambda: self.endpoints,
            GetRollouts: lambda: self.rollouts,
            GetLoad: lambda: self._build_load(now),
            GetEvents: lambda: [event for event in self.events if query.subject in (None, event.subject)][
                -query.limit :
            ],
            GetHistory: lambda: [
                entry for entry in reversed(self.history) if query.subject in (None, entry.subject)
            ][: query.limit],
            GetRevisions: list,
            GetHosts: lambda: self.hosts,
            GetHttpProxies: lambda: self.proxies,
            GetHttpConfig: HttpOptions,
            GetAutoscaling: list,
            GetCaptures: list,
            Plan: lambda: PlanView(updating=True, replicas=[], notes=[]),
            WaitForGoal: lambda: GoalView(goal_id=query.goal_id, status=GoalStatus.SUCCEEDED),
        }
        found = views[type(query)]()
        if isinstance(query, PagedQuery):
            rest = [view for view in found if getattr(view, query.ordered_by) > query.after]
            return rest if query.limit is None else rest[: query.limit]
        return found

    def _get_deployment(self, name: str) -> DeploymentView:
        full = name if "/" in name else f"default/{name}"
        if full not in self.deployments:
            raise NotFound(f"there is no deployment {name!r}")
        return self.deployments[full]

    def _build_status(self, query: GetStatus) -> StatusView:
        deployments = list(self.deployments.values()) if query.deployments else []
        if not query.replicas:
            deployments = [msgspec.structs.replace(view, replicas=[]) for view in deployments]
        return StatusView(
            controller_id="controller-1",
            epoch=1,
            store_available=True,
            snapshot_id=self._snapshot_id,
            deployments=deployments,
            hosts=self.hosts,
            proxies=self.proxies,
        )

    def _build_load(self, now: float) -> LoadView:
        """A hundred requests a second to each, of which some are slow."""
        count = (time.monotonic() - self._started_at) * 100
        return LoadView(
            at=now,
            endpoints=[
                EndpointLoad(
                    endpoint_tag=name,
                    requests=count,
                    errors=0.0,
                    seconds_buckets={"0.01": count * 0.9, "0.1": count * 0.999, "+Inf": count},
                )
                for name in self.deployments
            ],
            backends=[BackendLoad(backend_tag=name, in_flight=3.0, queued=0.0) for name in self.deployments],
            unreachable=[],
        )
