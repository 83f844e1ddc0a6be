"""Real controller processes between a real NATS and a real Postgres, with a host and a proxy that are nearly real.

Why nearly: the host is the host's own shell and core over a runtime that starts replicas at once, and the proxy is the
proxy's own control plane and snapshot table without HTTP, so that what they refuse is what real ones refuse, and a
scenario needs no processes but its controllers.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Self

import aiohttp
import asyncpg
import msgspec
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import NoRespondersError
from nats.errors import TimeoutError as NatsTimeoutError

from muster.client.admin import AdminClient, connect_stack
from muster.client.requests import StackAddress
from serve_common.api.commands import Deploy, Request
from serve_common.api.queries import GetStatus
from serve_common.api.views import StatusView
from serve_common.clock import SystemClock
from serve_common.config.backend import BackendConfig, ReplicaConfig
from serve_common.names import BackendTag, HostId, ProxyId, ReplicaTag
from serve_common.nats.client import close_nats, connect_nats
from serve_common.protocol.reports import HostGoal, ProxyReport, ReplicaGoal, ReplicaStatus
from serve_common.protocol.snapshots import BackendSnapshot, Snapshot
from serve_common.protocol.subjects import Subjects
from serve_common.routing.route_table import SnapshotTable
from serve_common.runtime.settings import BusSettings
from serve_common.runtime.tasks import TaskOwner, raise_if_cancelled
from serve_common.telemetry.log_lines import RefusedMessages
from serve_proxy.adapters.control_plane import NatsControlPlane
from serve_replica_host.adapters.control_bus import ControlBus
from serve_replica_host.core.events import (
    Constructed,
    Drained,
    HealthChecked,
    Placed,
    ProcessEnded,
    Reconfigured,
    ReplicaEvent,
)
from serve_replica_host.shell.host import HostShell
from tests.support.paths import ROOT
from tests.support.servers.nats_server import NatsServer
from tests.support.servers.postgres_server import PostgresServer

CHANGE_LIMIT_S = 200.0
"""For what has no limit of its own: processes that start, all at once, on a busy machine."""
SOURCES = ("libs/serve_common", "services/controller")


class ControllerProcess:
    """One life of ``python -m serve_controller``, and what it logs."""

    def __init__(self, controller_id: str, process: asyncio.subprocess.Process) -> None:
        self.controller_id = controller_id
        self.log: list[dict[str, Any]] = []
        self._process = process
        self._logged = asyncio.Condition()
        self._is_log_whole = asyncio.Event()

    @classmethod
    async def start(cls, controller_id: str, environment: Mapping[str, str]) -> Self:
        """Started, not yet leading."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("MUSTER_", "PG"))}
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "serve_controller"),
            cwd=ROOT,
            env={**inherited, **environment, "MUSTER_CONTROLLER_ID": controller_id},
            stdin=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            limit=2**20,
        )
        return cls(controller_id, process)

    async def read_log(self) -> None:
        """Until the process is gone."""
        assert self._process.stderr is not None
        while line := await self._process.stderr.readline():
            async with self._logged:
                try:
                    self.log.append(json.loads(line))
                except ValueError:
                    self.log.append({"event": line.decode(errors="replace").rstrip()})
                self._logged.notify_all()
        await self._process.wait()
        self._is_log_whole.set()
        async with self._logged:
            self._logged.notify_all()

    def logged(self, event: str) -> list[dict[str, Any]]:
        """All lines of that event."""
        return [line for line in self.log if line["event"] == event]

    async def metrics(self) -> str:
        """Its page."""
        await self.until_logged("operations_port")
        url = f"http://127.0.0.1:{self.logged('operations_port')[0]['port']}/metrics"
        async with aiohttp.ClientSession() as session, session.get(url) as answer:
            assert answer.status == 200, self.log[-5:]
            return await answer.text()

    @property
    def exit_code(self) -> int | None:
        """None while it runs; minus the signal's number when one killed it."""
        return self._process.returncode

    async def until_logged(self, *events: str, timeout_s: float = CHANGE_LIMIT_S) -> None:
        """Until it has logged one of these, or is gone and its log is read to the end."""
        async with asyncio.timeout(timeout_s), self._logged:
            await self._logged.wait_for(
                lambda: self._is_log_whole.is_set() or any(self.logged(event) for event in events)
            )

    async def until_gone(self, timeout_s: float = CHANGE_LIMIT_S) -> int:
        """Its exit code. What it logged is known then, to the last line."""
        async with asyncio.timeout(timeout_s):
            await self._is_log_whole.wait()
            return await self._process.wait()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        self._process.send_signal(number)

    async def end(self) -> None:
        """Kill it if it still runs."""
        if self.exit_code is None:
            self._process.kill()
        await self.until_gone(10.0)


class InstantRuntime:
    """Starts, drains and stops replicas at once; nothing runs."""

    def __init__(self, tell: Callable[[ReplicaEvent], None]) -> None:
        self.resources = {"CPU": 64.0}
        self.started: list[ReplicaTag] = []
        self._tell = tell
        self._active: list[ReplicaEvent] | None = None

    def hold_constructors(self) -> None:
        """From now on replicas stay STARTING."""
        self._active = []

    def release_constructors(self) -> None:
        """Let them be RUNNING, and later ones at once."""
        held, self._active = self._active or [], None
        for event in held:
            self._tell(event)

    def start(self, goal: ReplicaGoal) -> None:
        self.started.append(goal.replica_tag)
        self._tell(Placed(goal.replica_tag, 1000 + len(self.started)))
        constructed = Constructed(goal.replica_tag, goal.config_version)
        if self._active is None:
            self._tell(constructed)
        else:
            self._active.append(constructed)

    def reconfigure(self, goal: ReplicaGoal) -> None:
        self._tell(Reconfigured(goal.replica_tag, goal.config_version, None))

    def check_health(self, replica_tag: ReplicaTag) -> None:
        self._tell(HealthChecked(replica_tag, None))

    def drain(self, replica_tag: ReplicaTag) -> None:
        self._tell(Drained(replica_tag))

    def kill(self, replica_tag: ReplicaTag) -> None:
        self._tell(ProcessEnded(replica_tag, "killed"))

    def kill_by_force(self, replica_tag: ReplicaTag) -> None:
        self.kill(replica_tag)


class NoMetrics:
    """The host's metrics, not kept."""

    def show_replicas(self, counts: Mapping[ReplicaStatus, int]) -> None:
        return

    def count_start(self, backend_tag: BackendTag, seconds: float, *, was_spare: bool) -> None:
        return

    def count_failure(self, backend_tag: BackendTag, status: ReplicaStatus) -> None:
        return

    def message_refused(self, kind: str, sender: str, error: Exception) -> None: ...

    def retire_process(self, process: str) -> None:
        return


class SimulatedHost:
    """A replica host's shell on the real bus."""

    def __init__(self, settings: BusSettings, host_id: str) -> None:
        self.host_id = HostId(host_id)
        self.runtime = InstantRuntime(lambda event: self.shell.take_event(event))  # noqa: PLW0108 - made below
        self.bus = ControlBus(
            settings,
            self.host_id,
            on_goal=self._take_goal,
            on_leader=lambda payload: self.shell.take_leader(payload),  # noqa: PLW0108 - made below
            on_evaluation=lambda _: None,
            on_connected=lambda: self.shell.report_now(),  # noqa: PLW0108 - made below
            on_reconnect=lambda: self.shell.report_now(),  # noqa: PLW0108 - made below
        )
        self.shell = HostShell(
            self.host_id,
            runtime=self.runtime,
            bus=self.bus,
            metrics=NoMetrics(),
            incarnation=uuid.uuid4().hex,
            started_at=SystemClock().now(),
            now=time.monotonic,
        )
        self.refused: list[tuple[int, int]] = []
        """(epoch, generation) of goals that were not obeyed."""

    def _take_goal(self, payload: bytes) -> None:
        self.shell.take_goal(payload)
        goal = msgspec.json.decode(payload, type=HostGoal)
        if goal.epoch < self.epoch:
            self.refused.append((goal.epoch, goal.generation))

    @property
    def epoch(self) -> int:
        """The highest that it has heard of."""
        return self.shell._state.epoch

    @property
    def goal(self) -> HostGoal | None:
        """What it obeys."""
        return self.shell._state.goal

    @property
    def running(self) -> set[ReplicaTag]:
        """What it runs."""
        held = self.shell._state.replicas.values()
        return {replica.tag for replica in held if replica.status is ReplicaStatus.RUNNING}


class SimulatedProxy:
    """A proxy's side of the control plane: watches the bucket, applies snapshots, reports."""

    def __init__(self, settings: BusSettings, proxy_id: str) -> None:
        self.table = SnapshotTable()
        self.snapshots: dict[str, Snapshot] = {}
        """The newest that came for each key, applied or not."""
        self.control_plane = NatsControlPlane(
            settings,
            name=f"proxy {proxy_id}",
            listener=self,
            on_leader=self._wake_up,
            on_closed=self._wake_up,
            refused=RefusedMessages(time.monotonic),
        )
        self._proxy_id = ProxyId(proxy_id)
        self._started_at = SystemClock().now()
        self._sequence = 0
        self._wake = asyncio.Event()

    def on_snapshots(self, snapshots: Mapping[str, Snapshot | None], *, whole: bool) -> None:
        self.table.update(snapshots, whole=whole)
        for key, snapshot in snapshots.items():
            self.table.confirm(key)
            if snapshot is not None:
                self.snapshots[key] = snapshot
        self._wake_up()

    def _wake_up(self) -> None:
        self._wake.set()

    async def report(self) -> None:
        """Every second and at once on change, for ever."""
        while True:
            self._wake.clear()
            self._sequence += 1
            await self.control_plane.send_report(
                ProxyReport(
                    proxy_id=self._proxy_id,
                    incarnation="only",
                    sequence=self._sequence,
                    started_at=self._started_at,
                    applied_snapshot_id=self.table.applied_snapshot_id,
                )
            )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._wake.wait()

    def routed_to(self, key: str) -> set[ReplicaTag]:
        """The replicas that it would send requests of that backend to."""
        held = self.table._snapshots.get(key)
        content = None if held is None else held.content
        return set(content.replicas) if isinstance(content, BackendSnapshot) else set()


class ControlPlane:
    """One instance: a database, a subject prefix, a host, a proxy, a client, and any number of controllers."""

    def __init__(self, nats: NatsServer, dsn: str, password: str) -> None:
        self._nats, self._dsn, self._password = nats, dsn, password
        self.subjects = Subjects(f"t{uuid.uuid4().hex[:10]}")
        self.controllers: list[ControllerProcess] = []
        self.retries: list[str] = []
        self._tasks = TaskOwner("control_plane")
        self.admin: AdminClient
        self.client: Client

    @classmethod
    @contextlib.asynccontextmanager
    async def opened(cls, nats: NatsServer, postgres: PostgresServer) -> AsyncIterator[Self]:
        """With host, proxy and client, without controllers."""
        self = cls(nats, *await postgres.make_database())
        address = StackAddress(urls=(nats.url,), subject_prefix=self.subjects.prefix)
        self.host = SimulatedHost(self._bus("host"), "host-1")
        self.proxy = SimulatedProxy(self._bus("proxy"), "proxy-1")
        self.client = await connect_nats(self._bus("test"), name="test", deadline_s=10.0)
        try:
            await self.proxy.control_plane.connect()
            self._tasks.start(self.host.bus.run(), "host_bus")
            self._tasks.start(self.host.shell.run(), "host")
            self._tasks.start(self.proxy.report(), "proxy")
            async with connect_stack(
                address, retry_for_s=CHANGE_LIMIT_S, on_retry=self.retries.append
            ) as stack:
                self.admin = stack.admin
                yield self
        finally:
            for controller in self.controllers:
                await controller.end()
            await self._tasks.close(timeout_s=5.0)
            await self.host.bus.close()
            await self.proxy.control_plane.close()
            await close_nats(self.client)

    def _bus(self, role: str) -> BusSettings:
        return BusSettings(
            servers=[self._nats.url],
            user="",
            password="",
            inbox_prefix=f"_INBOX_{role}",
            subject_prefix=self.subjects.prefix,
        )

    async def start_controller(self, controller_id: str, **environment: str) -> ControllerProcess:
        """Another controller process; not yet leading."""
        fixed = {
            "MUSTER_NATS_URL": self._nats.url,
            "MUSTER_NATS_PASSWORD": "unused",
            "MUSTER_SUBJECT_PREFIX": self.subjects.prefix,
            "MUSTER_POSTGRES_DSN": self._dsn,
            "MUSTER_POSTGRES_PASSWORD": self._password,
            "MUSTER_OPS_PORT": "0",
            "PYTHONPATH": os.pathsep.join(str(ROOT / source) for source in SOURCES),
        }
        controller = await ControllerProcess.start(controller_id, {**fixed, **environment})
        self.controllers.append(controller)
        self._tasks.start(controller.read_log(), f"log of {controller_id}")
        return controller

    async def ask(self, verb: str, request: Request, *, timeout_s: float) -> Msg:
        """One try over the bare bus: what comes, an error included. Raises nats-py's errors."""
        return await self.client.request(
            self.subjects.admin(verb), msgspec.json.encode(request), timeout=timeout_s
        )

    async def leader(self, timeout_s: float = 0.5) -> StatusView | None:
        """Who says that it leads; None when nobody does, or not in time."""
        try:
            message = await self.ask("get_status", GetStatus(), timeout_s=timeout_s)
        except (NoRespondersError, NatsTimeoutError):
            return None
        raise_if_cancelled()  # it is asked again and again
        return None if message.headers else msgspec.json.decode(message.data, type=StatusView)

    async def until_led_by(self, *controller_ids: str, timeout_s: float = CHANGE_LIMIT_S) -> StatusView:
        """The first answer of one of these."""
        async with asyncio.timeout(timeout_s):
            while True:
                status = await self.leader()
                if status is not None and status.controller_id in controller_ids:
                    return status
                await asyncio.sleep(0.02)

    async def fetch(self, query: str, *arguments: object) -> list[asyncpg.Record]:
        """Rows of the instance's database."""
        connection = await asyncpg.connect(self._dsn, password=self._password, timeout=10)
        try:
            return await connection.fetch(query, *arguments)
        finally:
            await connection.close()


def deploy_request(name: str, version: str, *, num_replicas: int = 2) -> Deploy:
    """A deploy that is the same change however often it is sent."""
    return Deploy(
        name=name,
        version=version,
        replica_config=ReplicaConfig(import_path="model:Model"),
        backend_config=BackendConfig(num_replicas=num_replicas),
        route_prefix=f"/{name}",
        request_id=f"{name}-{version}",
    )
