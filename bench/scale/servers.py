"""A real nats-server and a real Postgres of the benchmark's own, as the embedded stack runs them.

Why Postgres is told a little more: WAL is what a change is charged with, and images of whole pages after a checkpoint,
or a vacuum that happens to run, would charge one change with what belongs to none.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import msgspec

from muster.embedded import StackOptions, StatePaths
from muster.embedded.postgres import DATABASE, POSTGRES, SUPERUSER, EmbeddedPostgres
from muster.embedded.process import PROCESS_MARK, STACK_MARK
from muster.embedded.services import CONTROLLER, NATS, ServiceSpecs, nats_spec, prepare_nats
from muster.embedded.stack import choose_ports
from muster.embedded.supervisor import Supervisor
from muster.secrets import Secrets, generate

_OPTIONS: Final = StackOptions(
    http_port=0, nats_port=0, controller_ops_port=0, proxy_ops_port=0, host_ops_port=0
)
_QUIET_WAL: Final = (
    "--full_page_writes=off",
    "--autovacuum=off",
    "--checkpoint_timeout=1h",
    "--max_wal_size=16GB",
)


class Servers(msgspec.Struct, frozen=True, kw_only=True):
    """What runs where, and what a controller must be told to join in."""

    nats_url: str
    nats_monitor_url: str
    nats_pid: int
    controller_ops_url: str
    controller_environment: Mapping[str, str]
    """The whole one, as the embedded stack gives it."""
    secrets: Secrets
    logs: Path
    postgres_port: int

    def superuser_connection(self) -> dict[str, object]:
        """Arguments of `asyncpg.connect`."""
        return {
            "host": "127.0.0.1",
            "port": self.postgres_port,
            "user": SUPERUSER,
            "password": self.secrets.read("postgres_superuser_password"),
            "database": DATABASE,
        }


@asynccontextmanager
async def running_servers(directory: Path) -> AsyncIterator[Servers]:
    """Start both with new state in ``directory``, an absolute path; both are gone afterwards. Raises `StackFailed`."""
    paths = StatePaths(directory)
    for needed in (paths.root, paths.logs):
        needed.mkdir(mode=0o700, exist_ok=True)
    ports = choose_ports(_OPTIONS, {}).by_use
    secrets = generate(paths.secrets)
    prepare_nats(paths, _OPTIONS, secrets)
    postgres = EmbeddedPostgres(paths, _OPTIONS, secrets, ports["postgres"])
    postgres.prepare()
    environment = {
        name: value for name, value in os.environ.items() if name not in (STACK_MARK, PROCESS_MARK)
    }
    database = postgres.spec(environment)
    database = msgspec.structs.replace(database, argv=[*database.argv, *_QUIET_WAL])
    services = ServiceSpecs(paths, _OPTIONS, secrets, ports, paths.ray).all(environment)
    controller = next(spec for spec in services if spec.name == CONTROLLER)
    stack_id = uuid.uuid4().hex
    supervisor = Supervisor(stack_id, [nats_spec(paths, ports, environment), database], lambda _event: None)
    await supervisor.start()
    try:
        pids = {process.name: process.pid for process in supervisor.processes}
        assert pids.keys() == {NATS, POSTGRES}
        yield Servers(
            nats_url=f"nats://127.0.0.1:{ports['nats']}",
            nats_monitor_url=f"http://127.0.0.1:{ports['nats_monitor']}",
            nats_pid=pids[NATS],
            controller_ops_url=f"http://127.0.0.1:{ports['controller_ops']}",
            # The mark lets the supervisor end what is left of it, should we fail to.
            controller_environment={**controller.env, STACK_MARK: stack_id, PROCESS_MARK: CONTROLLER},
            secrets=secrets,
            logs=paths.logs,
            postgres_port=ports["postgres"],
        )
    finally:
        await supervisor.stop()
