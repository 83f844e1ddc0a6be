"""A whole private Muster with everything deployed that the benchmark asks for.

Why the embedded stack: the same processes, bus, passwords and permissions as users run, on ports of its own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

from bench.counting import UNCOUNTED
from bench.measure import MIB, MUSTER, MUSTER_BODIES, Served, System
from muster.client import StackAddress, connect_stack
from muster.client.admin import AdminClient
from muster.embedded import EmbeddedStack, StackFailed, StatePaths
from muster.embedded.process import http_probe
from muster.embedded.supervisor import last_lines
from serve_common.api.commands import ChangeReply, Deploy, DeployApplication, DeploymentSpec, SetHttpOptions
from serve_common.api.views import GoalStatus
from serve_common.config.backend import BackendConfig, RayActorOptions, ReplicaConfig
from serve_common.errors import ServeError
from tests.support.identities import admin_address
from tests.support.servers.reserved_port import ANY_PORTS

_DEPLOY_WITHIN_S = 60.0
MODELS_DIR = Path(__file__).parent / "models"
_BODY_BYTES_MAX = 256 * MIB
_REPLICA_CPUS = 0.1
"""All deployments are there at once; one at a time is asked."""


@asynccontextmanager
async def running_muster(state_dir: Path, *, sends_small_over_nats: bool = False) -> AsyncIterator[System]:
    """Start it and deploy one replica of everything; all is gone afterwards.

    ``sends_small_over_nats``: with ``MUSTER_DIRECT=bodies``, and the no-op only.

    A deployment that does not come up is told of and left out, except the no-op. Raises `StackFailed`.
    """
    os.environ["MUSTER_UNCOUNTED"] = UNCOUNTED  # the stack inherits both
    if sends_small_over_nats:
        os.environ["MUSTER_DIRECT"] = "bodies"
    async with EmbeddedStack(state_dir, ANY_PORTS) as stack:
        record = stack.record
        os.environ.pop("MUSTER_DIRECT", None)
        served = [Served.NOOP] if sends_small_over_nats else list(Served)
        routes = await deploy_all(admin_address(record), served, str(MODELS_DIR))
        port = urlsplit(record.http_url).port
        assert port is not None, record.http_url
        reason = await http_probe(port, routes[Served.NOOP.value])()
        if reason is not None:
            raise StackFailed(f"the no-op deployment does not serve: {reason}")
        yield System(
            name=MUSTER_BODIES if sends_small_over_nats else MUSTER,
            urls={path: record.http_url + route for path, route in routes.items()},
            stack_id=record.stack_id,
            metrics_urls=[f"{url}/metrics" for url in record.ops_urls.values()],
        )


def logs_of(state_dir: Path) -> str:
    """The ends of the logs of a stack whose requests failed, before they are removed with it; empty without one."""
    logs = sorted(StatePaths(state_dir).logs.glob("*.log"))
    return "\n".join(f"--- {path.name}\n{last_lines(path)}" for path in logs)


async def deploy_all(address: StackAddress, served: Sequence[Served], app_dir: str) -> dict[str, str]:
    """The route of each path that is served; ``app_dir`` is where the replica host finds `MODELS_DIR`."""
    routes: dict[str, str] = {}
    async with connect_stack(address) as reached:
        admin = reached.admin
        await _done(admin, await admin.call(SetHttpOptions(options={"body_bytes_max": _BODY_BYTES_MAX})))
        for path in served:
            try:
                await _done(admin, await _deploy(admin, path, app_dir))
            except (ServeError, StackFailed) as error:
                if path is Served.NOOP:
                    raise
                print(f"warning: Muster does not serve {path.value}: {error}", file=sys.stderr, flush=True)
            else:
                routes[path.value] = f"/{path.value}"
    return routes


async def _deploy(admin: AdminClient, path: Served, app_dir: str) -> ChangeReply:
    if path is Served.CHAIN:
        return await admin.call(
            DeployApplication(
                name="chain",
                deployments=[
                    DeploymentSpec(name=name, replica_config=_config(name.capitalize(), app_dir))
                    for name in ("back", "front")
                ],
                ingress="front",
                route_prefix=f"/{path.value}",
            )
        )
    return await admin.call(
        Deploy(
            name=path.value,
            replica_config=_config("Noop" if path is Served.UNCOUNTED else path.value.capitalize(), app_dir),
            backend_config=BackendConfig(num_replicas=1),
            route_prefix=f"/{path.value}",
        )
    )


def _config(class_name: str, app_dir: str) -> ReplicaConfig:
    return ReplicaConfig(
        import_path=f"bench_models:{class_name}",
        app_dir=app_dir,
        ray_actor_options=RayActorOptions(num_cpus=_REPLICA_CPUS),
    )


async def _done(admin: AdminClient, reply: ChangeReply) -> None:
    if reply.goal_id is None:
        return
    goal = await admin.wait_for_goal(reply.goal_id, deadline_s=_DEPLOY_WITHIN_S)
    if goal.status is not GoalStatus.SUCCEEDED:
        raise StackFailed(f"it is {goal.status.value}: {goal.error or goal.message}")
