"""`python -m serve_proxy`: one proxy process, from its environment to its last request, or a parent of several.

Why children are configured by the environment: they start as every proxy does, so there is one code path.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys

import structlog
import uvloop

from serve_common.errors import BadField
from serve_common.runtime.heap import keep_freed_memory
from serve_common.runtime.operations import OperationsServer, advertised_for_children
from serve_common.runtime.settings import Environment
from serve_common.runtime.tasks import TaskOwner
from serve_common.telemetry.log_forwarder import LogForwarder
from serve_common.telemetry.logs import configure_logs
from serve_common.telemetry.request_traces import import_ahead
from serve_proxy.adapters.proxy_process import ChildrenPages, ParentLink, ProxyProcess, reserved_port
from serve_proxy.core.processes import child_id
from serve_proxy.http.tls import load_context
from serve_proxy.settings import ProxySettings, read_settings
from serve_proxy.shell.parent import Child, Parent
from serve_proxy.wiring import Proxy

_log = structlog.get_logger(__name__)


async def _run(settings: ProxySettings, logs: LogForwarder) -> int:
    """Run until a signal or a failure; the exit code."""
    should_drain, should_end = asyncio.Event(), asyncio.Event()
    has_failed = False

    def on_failure() -> None:
        nonlocal has_failed
        has_failed = True
        should_drain.set()
        should_end.set()

    def on_signal() -> None:
        (should_end if should_drain.is_set() else should_drain).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    proxy = Proxy(settings, on_failure=on_failure, logs=logs)
    tasks = TaskOwner("main", on_failure=lambda _name, _error: on_failure())

    async def drain() -> None:
        try:
            await proxy.drain()
        finally:  # on any failure, even when the log has no reader any more
            should_end.set()

    parent = None if settings.parent_fd is None else ParentLink(settings.parent_fd, should_drain.set)
    try:
        await proxy.start()
        if parent is not None:
            parent.report_port(proxy.operations.port)
        await should_drain.wait()
        if not should_end.is_set():
            tasks.start(drain(), name="drain")
        await should_end.wait()
    finally:
        await tasks.close(timeout_s=1.0)
        await proxy.close()
        if parent is not None:
            parent.close()
    return 1 if has_failed else 0


async def _run_processes(settings: ProxySettings) -> int:
    """Run until a signal; returns the exit code. Raises OSError when a port is in use."""
    with reserved_port(settings.http_host, settings.http_port) as port:

        async def start(number: int) -> Child:
            environment = _child_environment(settings, number, port, operations.port)
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


def _child_environment(
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


def _tune_gc() -> None:
    """Tune garbage collection for latency: measured, it removed pauses of up to 48 ms and halved p99 at c=64.

    Requests leave no cycles behind, so objects that exist after the imports are frozen, and the rest is collected
    seldom.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)


def main() -> int:
    """Read the settings and run. The exit code: 0 after an ordered stop, 2 for bad settings, else 1 with a log line."""
    try:
        settings = read_settings(Environment())
        if settings.tls is not None:
            load_context(settings.tls)  # what is wrong ends a parent too, instead of each of its children
    except BadField as error:
        configure_logs("proxy")
        _log.critical("bad_setting", field=error.field, reason=error.reason)
        return 2
    logs = configure_logs("proxy", proxy_id=settings.proxy_id)
    if settings.processes == 1:
        import_ahead(settings.tracing)
        _tune_gc()
        keep_freed_memory()
    try:
        return uvloop.run(_run(settings, logs) if settings.processes == 1 else _run_processes(settings))
    except OSError as error:
        _log.critical("cannot_listen", reason=str(error))
    except Exception:  # noqa: BLE001 - no end may be silent
        _log.critical("proxy_failed", exc_info=True)
    return 1


if __name__ == "__main__":
    sys.exit(main())
