"""A whole private Muster with the no-op example deployed.

Why the embedded stack: the same processes, bus, passwords and permissions as users run, on ports of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from muster.client import StackAddress, connect_stack
from muster.embedded import EmbeddedStack, RunRecord, StackFailed, StackOptions, StatePaths
from muster.embedded.logfiles import last_lines
from muster.secrets import Secrets
from serve_common.values import BackendConfig, ReplicaConfig
from serve_common.wires.commands import Deploy
from serve_common.wires.views import GoalStatus
from tests.bench.probes import answers_http

_ROUTE = "/noop"
_DEPLOY_WITHIN_S = 60.0
_OPTIONS = StackOptions(http_port=0, nats_port=0, controller_ops_port=0, proxy_ops_port=0, host_ops_port=0)
_NOOP_DIR = Path(__file__).parents[2] / "examples" / "noop"


@asynccontextmanager
async def running_muster(state_dir: Path) -> AsyncIterator[str]:
    """Start it, deploy one replica, and give the URL of it; everything is gone afterwards.

    Raises `StackFailed`, or what the controller refuses the deployment with.
    """
    async with EmbeddedStack(state_dir, _OPTIONS) as stack:
        await _deploy_noop(stack.record)
        url = stack.record.http_url + _ROUTE
        reason = await answers_http(url)()
        if reason is not None:
            raise StackFailed(f"the no-op deployment does not serve: {reason}")
        yield url


def logs_of(state_dir: Path) -> str:
    """The ends of the logs of a stack whose requests failed, before they are removed with it; empty without one."""
    logs = sorted(StatePaths(state_dir).logs.glob("*.log"))
    return "\n".join(f"--- {path.name}\n{last_lines(path)}" for path in logs)


async def _deploy_noop(record: RunRecord) -> None:
    password = await asyncio.to_thread(Secrets(Path(record.secrets)).read, "nats_admin")
    request = Deploy(
        name="noop",
        replica_config=ReplicaConfig(import_path="noop:Noop", app_dir=str(_NOOP_DIR)),
        backend_config=BackendConfig(num_replicas=1),
        route_prefix=_ROUTE,
    )
    async with connect_stack(StackAddress(urls=(record.nats_url,), password=password)) as reached:
        reply = await reached.admin.deploy(request)
        assert reply.goal_id is not None
        goal = await reached.admin.wait_for_goal(reply.goal_id, deadline_s=_DEPLOY_WITHIN_S)
    if goal.status is not GoalStatus.SUCCEEDED:
        raise StackFailed(f"the no-op deployment is {goal.status.value}: {goal.error or goal.message}")
