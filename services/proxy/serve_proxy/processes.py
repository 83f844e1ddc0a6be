"""Wiring of a parent of proxy processes: `MUSTER_PROXY_PROCESSES` above 1.

Why children are configured by the environment: they start as every proxy does, so there is one code path.
"""

from __future__ import annotations

import asyncio
import os
import signal

import structlog

from serve_common.runtime.operations import OperationsServer, advertised_for_children
from serve_proxy.adapters.process_operations import ChildrenPages
from serve_proxy.adapters.proxy_process import ProxyProcess, reserved_port
from serve_proxy.core.processes import child_id
from serve_proxy.ports import Child
from serve_proxy.settings import ProxySettings
from serve_proxy.shell.parent import Parent

_log = structlog.get_logger(__name__)


async def run_processes(settings: ProxySettings) -> int:
    """Run until a signal; returns the exit code. Raises OSError when a port is in use."""
    with reserved_port(settings.http_host, settings.http_port) as port:

        async def start(number: int) -> Child:
            environment = child_environment(settings, number, port, operations.port)
            child = await ProxyProcess.start(environment)
            _log.info("proxy_process_started", process=number, pid=child.pid)
            return child

        parent = Parent(start, settings.processes, drain_timeout_s=settings.drain_timeout_s)
        pages = ChildrenPages(parent.children, parent.readiness_error)
        operations = OperationsServer(settings.operations, pages)
        await operations.start()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, parent.stop)
        address = f"{settings.http_host}:{port}"
        _log.info(
            "proxy_processes_run",
            processes=settings.processes,
            address=address,
            operations_port=operations.port,
        )
        try:
            return await parent.run()
        finally:
            await operations.close()


def child_environment(
    settings: ProxySettings, number: int, http_port: int, operations_port: int
) -> dict[str, str]:
    """Environment of the child with that number: the parent's, with the child's id and ports."""
    return {
        **os.environ,
        "MUSTER_PROXY_PROCESSES": "1",
        "MUSTER_PROXY_ID": child_id(settings.proxy_id, number),
        "MUSTER_HTTP_PORT": str(http_port),
        # Queried by the parent only, which knows the port that the system chooses.
        "MUSTER_OPS_HOST": "127.0.0.1",
        "MUSTER_OPS_PORT": "0",
        "MUSTER_OPS_ADVERTISE": advertised_for_children(settings.operations, operations_port),
    }
