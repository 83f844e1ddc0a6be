"""The smallest stack in which nothing is alone: two controllers, two replica hosts and two proxies, all of them real.

Why not `muster up`: that has one of each. The servers, passwords, permissions and variables are its very own; the
controllers are not supervised, because a leader that is started again at once would leave its standby nothing to do.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Self

import asyncpg
import msgspec

from muster.client.admin import AdminClient, connect_stack
from muster.client.requests import StackAddress
from muster.embedded.options import StackOptions, StatePaths
from muster.embedded.postgres import EmbeddedPostgres
from muster.embedded.process import ProcessSpec
from muster.embedded.run_record import RunningProcess
from muster.embedded.services import CONTROLLER, HOST, PROXY, ServiceSpecs, nats_spec, prepare_nats
from muster.embedded.supervisor import Supervisor
from muster.secrets import NAMES, generate
from serve_common.api.commands import ChangeReply, Deploy
from serve_common.api.queries import GetDeploymentInfo, GetStatus
from serve_common.api.views import GoalStatus, ReplicaView
from serve_common.config.backend import BackendConfig, RayActorOptions, ReplicaConfig
from serve_common.identities.roles import Role
from serve_common.names import GoalId
from serve_common.runtime.settings import BusSettings, DirectMode
from serve_common.runtime.tasks import TaskOwner
from tests.support.identities import bus_settings
from tests.support.paths import APPS
from tests.support.servers.reserved_port import HeldPort
from tests.support.stacks.control_plane import ControllerProcess
from tests.support.waiting import eventually

APP_DIR = APPS / "loaded_app"
NAME = "loaded"
ROUTE = "/loaded"
HOST_CPUS = 8
REPLICA_CPUS = 0.5
CHANGE_LIMIT_S = 150.0
"""Far more than any change should take; how long they take is measured elsewhere, on a quiet machine."""
STARTS_WITHIN_S = 240.0
"""A Ray that does not start within half a minute gives up; then its host is started again, and that must be in it."""
_NUMBERS = (1, 2)
AS_ELSEWHERE = {"MUSTER_DIRECT_DIR": "", "MUSTER_DIRECT_HOST": "127.0.0.1"}
"""Of the last host: its replicas have direct links as on another machine, the others' as on this one."""


def replica_config(version: str) -> ReplicaConfig:
    """Code that answers with ``version``."""
    return ReplicaConfig(
        import_path="loaded_model:Loaded",
        app_dir=str(APP_DIR),
        init_args=[version],
        ray_actor_options=RayActorOptions(num_cpus=REPLICA_CPUS),
    )


class LoadedStack:
    """A running stack. Each test leaves it whole."""

    def __init__(
        self,
        paths: StatePaths,
        ray_dir: Path,
        direct: DirectMode = DirectMode.ALL,
        *,
        has_front: bool = False,
    ) -> None:
        self.direct = direct
        self.has_front = has_front
        """Whether hosts, replicas and proxies reach NATS by another port than its own."""
        self.direct_dirs = [ray_dir / str(number) / "direct" for number in _NUMBERS]
        """Where replicas make the sockets of direct links, by host."""
        self.controllers: list[ControllerProcess] = []
        """Those that live."""
        self.retries: list[str] = []
        """Why the client asked again."""
        self.admin: AdminClient
        self._controller_environment: Mapping[str, str] = {}
        self._controllers_started = 0
        self._tasks = TaskOwner("loaded_stack")
        self._secrets = generate(paths.secrets)
        uses = ["nats", "nats_front", "nats_monitor", "postgres"]
        uses += [
            f"{use}_{n}" for use in ("http", "controller_ops", "proxy_ops", "host_ops") for n in _NUMBERS
        ]
        self._held_ports = {use: HeldPort() for use in uses}
        self._ports = {use: held.port for use, held in self._held_ports.items()}
        self._paths = paths
        self.stack_id = uuid.uuid4().hex[:12]
        self._supervisor = Supervisor(self.stack_id, self._specs(ray_dir), lambda _event: None)

    @classmethod
    @contextlib.asynccontextmanager
    async def running(
        cls,
        state_dir: Path,
        direct: DirectMode = DirectMode.ALL,
        *,
        front: Callable[[int, int], Awaitable[None]] | None = None,
    ) -> AsyncIterator[Self]:
        """With everything ready; nothing is left of it afterwards. ``direct`` says what takes direct links.

        ``front`` is told two ports before anything starts: one on which it listens, and that of NATS, to which it
        passes on. By it come those who carry requests: proxies, hosts and their replicas, handles by `data_settings`.
        """
        paths = StatePaths(state_dir)
        paths.logs.mkdir()
        # Ray's sockets need a short path.
        with tempfile.TemporaryDirectory(prefix="muster-", dir="/tmp", ignore_cleanup_errors=True) as ray_dir:
            self = cls(paths, Path(ray_dir), direct, has_front=front is not None)
            try:
                if front is not None:
                    await front(self._ports["nats_front"], self._ports["nats"])
                # Controllers wait for NATS and Postgres by themselves.
                await asyncio.gather(
                    self._supervisor.start(), self.start_controller(), self.start_controller()
                )
                address = StackAddress(
                    urls=(self._nats_url,),
                    credentials_file=str(self._secrets.credentials_file(Role.ADMIN)),
                )
                async with connect_stack(
                    address, retry_for_s=CHANGE_LIMIT_S, on_retry=self.retries.append
                ) as reached:
                    self.admin = reached.admin
                    await self._until_whole()
                    yield self
            finally:
                for controller in self.controllers:
                    await controller.end()
                await self._supervisor.stop()
                await self._tasks.close(timeout_s=5.0)

    @property
    def http_ports(self) -> list[int]:
        """Of the proxies."""
        return [self._ports[f"http_{number}"] for number in _NUMBERS]

    @property
    def proxy_operations_ports(self) -> list[int]:
        """Of the proxies."""
        return [self._ports[f"proxy_ops_{number}"] for number in _NUMBERS]

    @property
    def _nats_url(self) -> str:
        return f"nats://127.0.0.1:{self._ports['nats']}"

    @property
    def _data_nats_url(self) -> str:
        return f"nats://127.0.0.1:{self._ports['nats_front' if self.has_front else 'nats']}"

    def _specs(self, ray_dir: Path) -> list[ProcessSpec]:
        options = StackOptions(num_cpus=HOST_CPUS)
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("MUSTER_", "PG", "RAY_"))
        }
        prepare_nats(self._paths, options, self._secrets)
        postgres = EmbeddedPostgres(self._paths, options, self._secrets, self._ports["postgres"])
        postgres.prepare()
        specs = [nats_spec(self._paths, self._ports, environment), postgres.spec(environment)]
        for number in _NUMBERS:
            of_this = {
                use.removesuffix(f"_{number}"): port
                for use, port in self._ports.items()
                if not use[-1].isdigit() or use.endswith(f"_{number}")
            }
            own_ray_dir, metrics = ray_dir / str(number), self._paths.root / f"metrics-{number}"
            for directory in (own_ray_dir, metrics):
                directory.mkdir(mode=0o700)
            services = ServiceSpecs(self._paths, options, self._secrets, of_this, own_ray_dir)
            for spec in services.all(environment):
                if spec.name == CONTROLLER:
                    self._controller_environment = {**spec.env, "MUSTER_OPS_PORT": "0"}
                    continue
                name = f"{spec.name}-{number}"
                own = {
                    HOST: {
                        "MUSTER_HOST_ID": name,
                        "PROMETHEUS_MULTIPROC_DIR": str(metrics),
                        **(AS_ELSEWHERE if number == _NUMBERS[-1] else {}),
                    },
                    PROXY: {"MUSTER_PROXY_ID": name},
                }
                specs.append(
                    msgspec.structs.replace(
                        spec,
                        name=name,
                        env={
                            **spec.env,
                            **own[spec.name],
                            "MUSTER_DIRECT": self.direct.value,
                            "MUSTER_NATS_URL": self._data_nats_url,
                        },
                        log_path=self._paths.log(name),
                        ready_timeout_s=STARTS_WITHIN_S,
                    )
                )
        return specs

    async def start_controller(self) -> ControllerProcess:
        """Another one, under an id of its own."""
        self._controllers_started += 1
        controller_id = f"controller-{self._controllers_started}"
        controller = await ControllerProcess.start(controller_id, self._controller_environment)
        self.controllers.append(controller)
        self._tasks.start(controller.read_log(), f"log of {controller_id}")
        return controller

    async def leader(self) -> ControllerProcess:
        """The one that leads."""
        leading = (await self.admin.call(GetStatus())).controller_id
        return next(c for c in self.controllers if c.controller_id == leading)

    async def until_standing_by(self) -> None:
        """Until two controllers live, one of which waits for the other's end."""
        while len(self.controllers) < len(_NUMBERS):
            await self.start_controller()
        leader = await self.leader()
        for controller in self.controllers:
            if controller is not leader:
                await controller.until_logged("standing_by")

    async def _until_whole(self) -> None:
        async with asyncio.timeout(CHANGE_LIMIT_S):
            while True:
                status = await self.admin.call(GetStatus())
                if len(status.hosts) == len(status.proxies) == len(_NUMBERS):
                    break
                await asyncio.sleep(0.05)
        await self.until_standing_by()

    def process(self, name: str) -> RunningProcess:
        """What is known of it now; after it was killed, of the one that takes its place."""
        return next(process for process in self._supervisor.processes if process.name == name)

    async def terminated(self, name: str) -> None:
        """Send SIGTERM, as a deployment tool does; return when it has ended by itself and the next one is ready."""
        before = self.process(name)
        os.kill(before.pid, signal.SIGTERM)
        await eventually(
            lambda: self.process(name).restarts > before.restarts and self.process(name).is_ready,
            within_s=CHANGE_LIMIT_S,
        )
        assert self.process(name).pid != before.pid

    async def done(self, reply: ChangeReply) -> None:
        """Until the change is made."""
        assert reply.goal_id is not None
        await self.succeeded(reply.goal_id)

    async def succeeded(self, goal_id: GoalId) -> None:
        """Until that goal is reached."""
        goal = await self.admin.wait_for_goal(goal_id, deadline_s=CHANGE_LIMIT_S)
        assert goal.status is GoalStatus.SUCCEEDED, goal

    async def deployed(self, version: str, num_replicas: int, user_config: Any = "plain") -> None:
        """The deployment `NAME` at `ROUTE` is so."""
        await self.done(await self.deploy(version, num_replicas, user_config))

    async def deploy(self, version: str, num_replicas: int, user_config: Any = "plain") -> ChangeReply:
        """Say that it shall be so."""
        return await self.admin.call(
            Deploy(
                name=NAME,
                replica_config=replica_config(version),
                backend_config=BackendConfig(num_replicas=num_replicas, user_config=user_config),
                route_prefix=ROUTE,
                version=version,
            )
        )

    async def replicas(self) -> list[ReplicaView]:
        """Of the deployment."""
        return (await self.admin.call(GetDeploymentInfo(name=NAME))).replicas

    async def rows(self) -> list[tuple[str, str, dict[str, Any]]]:
        """Kind, key and value of all that Postgres holds of the controllers' decisions."""
        connection = await asyncpg.connect(
            host="127.0.0.1",
            port=self._ports["postgres"],
            user="muster",
            database="muster",
            password=self._secrets.read("postgres_password"),
        )
        try:
            found = await connection.fetch("SELECT kind, key, value FROM muster.checkpoint_rows")
        finally:
            await connection.close()
        return [(row["kind"], row["key"], msgspec.json.decode(row["value"])) for row in found]

    @property
    def nats_url(self) -> str:
        """Of the server."""
        return self._nats_url

    def settings(self, role: Role) -> BusSettings:
        """As a process of that role comes to the server."""
        return bus_settings(self._secrets, self._nats_url, role)

    def data_settings(self, role: Role) -> BusSettings:
        """As a process of that role comes that carries requests."""
        settings = bus_settings(self._secrets, self._data_nats_url, role)
        return msgspec.structs.replace(settings, direct=self.direct)

    @property
    def nats_monitor_port(self) -> int:
        """Of the server's own HTTP."""
        return self._ports["nats_monitor"]

    async def connect_postgres(self) -> asyncpg.Connection:
        """To the controllers' database, as they reach it."""
        environment = self._controller_environment
        return await asyncpg.connect(
            environment["MUSTER_POSTGRES_DSN"], password=self._secrets.read("postgres_password")
        )

    def passwords(self) -> list[str]:
        """All of the stack."""
        return [self._secrets.read(name) for name in NAMES]

    def log(self, name: str) -> str:
        """What a supervised process wrote, in all its lives."""
        return self._paths.log(name).read_text()
