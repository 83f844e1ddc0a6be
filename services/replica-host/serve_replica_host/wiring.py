"""Wires the parts of the host, and runs it: start, serve, leave.

Why in this order: reports start when Ray is up, because a host without resources is of no use; NATS may connect and
disconnect at any time.
"""

from __future__ import annotations

import asyncio
import os
import signal
import uuid
from pathlib import Path
from typing import Final

import msgspec
import structlog

from serve_common.clock import SystemClock
from serve_common.nats.login import declare_identity
from serve_common.protocol.subjects import Subjects
from serve_common.runtime.health import BusHealthCheck, LoopLag
from serve_common.runtime.operations import OperationsServer, ProcessPages, metrics_url
from serve_common.runtime.tasks import TaskOwner
from serve_common.telemetry.log_forwarder import LogForwarder, NatsLogSink
from serve_replica_host.adapters.code_cache import CodeCache, ReplicasWithCode
from serve_replica_host.adapters.control_bus import ControlBus
from serve_replica_host.adapters.host_metrics import PrometheusHostMetrics
from serve_replica_host.adapters.log_socket import LogSocket
from serve_replica_host.adapters.metrics_files import MetricsFiles
from serve_replica_host.adapters.ray_process import IdentifiedReplicas, RayProcess
from serve_replica_host.core.events import Evaluated, ReplicaEvent
from serve_replica_host.settings import HostSettings
from serve_replica_host.shell.evaluations import EvaluationForwarder
from serve_replica_host.shell.host import HostShell

_log = structlog.get_logger(__name__)

_CLOSE_TIMEOUT_S: Final = 1.0
STARTS_MIN: Final = 4
"""Minimum of processes that may start at once; on larger machines it is two for each processor."""


async def run_host(  # noqa: PLR0915 - it wires everything
    settings: HostSettings, logs: LogForwarder, runtime: RayProcess, log_socket: LogSocket
) -> int:
    """Run a host until SIGTERM or SIGINT; returns 0 after leaving, 1 after a failure.

    ``logs`` are published. ``runtime``, which is starting, and ``log_socket``, which is bound, are closed at the end.
    """
    declare_identity(settings.bus)
    loop = asyncio.get_running_loop()
    files = MetricsFiles(Path(settings.metrics_dir))
    files.clean()
    lag = LoopLag()
    metrics = PrometheusHostMetrics(files, settings.host_id, lag, {"control": lambda: bus.is_connected})
    failures: list[str] = []
    stop = asyncio.Event()

    def on_failure(task: str, error: BaseException) -> None:
        failures.append(f"{task}: {error}")
        stop.set()

    def reconnected() -> None:
        metrics.count_reconnect()
        shell.report_now()

    # Proxies on this machine are of the host's user, also in compose.
    replica_bus = msgspec.structs.replace(settings.replica_bus, direct_uids=(0, os.geteuid()))
    identified = IdentifiedReplicas(runtime, replica_bus, settings.replica_identity_s)

    def publish_evaluation(payload: bytes) -> None:
        tasks.start(bus.publish_evaluation(payload), "publish_evaluation")

    evaluations = EvaluationForwarder(runtime, publish_evaluation, metrics.message_refused)

    def take_event(event: ReplicaEvent) -> None:
        if isinstance(event, Evaluated):
            evaluations.take_event(event)
            return
        identified.take_event(event)
        replicas.take_event(event)
        shell.take_event(event)

    bus = ControlBus(
        settings.bus,
        settings.host_id,
        on_goal=lambda payload: shell.take_goal(payload),  # noqa: PLW0108 - made below
        on_leader=lambda payload: shell.take_leader(payload),  # noqa: PLW0108 - made below
        on_evaluation=evaluations.take_order,
        on_connected=lambda: shell.report_now(),  # noqa: PLW0108 - made below
        on_reconnect=reconnected,
        logs=NatsLogSink(
            logs, Subjects(settings.bus.subject_prefix), "host", settings.host_id, log_socket.recent
        ),
    )
    cache = CodeCache(Path(settings.code_dir), bus)
    cache.clean()
    replicas = ReplicasWithCode(identified, cache, take_event)
    shell = HostShell(
        settings.host_id,
        runtime=replicas,
        bus=bus,
        metrics=metrics,
        incarnation=uuid.uuid4().hex,
        started_at=SystemClock().now(),
        now=loop.time,
        metrics_url=lambda: metrics_url(settings.operations, operations.port, bus.local_host),
        missing_code=lambda: sorted(cache.missing),
        starts_max=max(STARTS_MIN, 2 * (os.cpu_count() or 1)),
    )
    is_ray_up = False

    def readiness_error() -> str | None:
        if not is_ray_up:
            return "Ray starts"
        if stop.is_set():
            return "the host leaves"
        return None if bus.is_connected else "NATS is not connected"

    pulse = BusHealthCheck(
        "control plane",
        is_connected=lambda: bus.is_connected,
        ping=bus.ping,
        silent_after_s=settings.operations.unhealthy_after_s,
    )
    silent_after_s = settings.operations.unhealthy_after_s
    operations = OperationsServer(
        settings.operations,
        ProcessPages(
            metrics.registry,
            readiness_error=readiness_error,
            health_error=lambda: pulse.health_error() or runtime.health_error(silent_after_s),
        ),
    )
    _listen_for_signals(stop)
    tasks = TaskOwner("host", on_failure=on_failure)
    try:
        await operations.start()
        _log.info("operations_port", host=settings.operations.host, port=operations.port)
        log_socket.open(logs.write_through)
        await runtime.open(take_event, lambda: shell.backlog)
        is_ray_up = True
        tasks.start(bus.run(), "control_bus")
        tasks.start(identified.run(), "replica_identities")
        tasks.start(pulse.run(), "pulse")
        tasks.start(runtime.watch(), "ray_watch")
        tasks.start(lag.run(), "loop_lag")
        tasks.start(_leave_when(stop, shell, settings.drain_timeout_s), "leave")
        await _run_with(runtime, shell)
    except Exception as error:  # noqa: BLE001 - no end may be silent
        _log.critical("host_failed", exc_info=error)
        failures.append(str(error) or repr(error))
    finally:
        await replicas.close(_CLOSE_TIMEOUT_S)
        await tasks.close(_CLOSE_TIMEOUT_S)  # first, or the bus would reconnect
        await bus.close()
        await runtime.close()
        log_socket.close()
        await operations.close()
    _log.info("host_ended", failures=failures)
    return 1 if failures else 0


async def _run_with(runtime: RayProcess, shell: HostShell) -> None:
    """Run until the host has left. Raises `RayUnavailable` when its runtime has ended."""
    try:
        async with asyncio.TaskGroup() as group:
            runtime_task = group.create_task(runtime.run(), name="ray_runtime")
            await shell.run()
            runtime_task.cancel()
    except ExceptionGroup as group_error:
        raise group_error.exceptions[0] from None


def _listen_for_signals(stop: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)


async def _leave_when(stop: asyncio.Event, shell: HostShell, timeout_s: float) -> None:
    await stop.wait()
    shell.leave(timeout_s)
