"""Wires the controller's parts together and runs them until the process is asked to stop."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable

import structlog
from prometheus_client import CollectorRegistry

from serve_common.clock import SystemClock
from serve_common.errors import BusUnavailable
from serve_common.nats.client import close_nats, connect_nats, join_log_sink, ping_nats
from serve_common.nats.login import declare_identity
from serve_common.protocol.subjects import Subjects
from serve_common.runtime.health import BusHealthCheck, LoopLag
from serve_common.runtime.operations import (
    OperationsServer,
    ProcessPages,
    register_process_metrics,
    register_trace_metrics,
)
from serve_common.runtime.tasks import TaskOwner
from serve_common.telemetry.log_forwarder import LogForwarder, NatsLogSink
from serve_common.telemetry.log_lines import RefusedMessages
from serve_common.telemetry.request_traces import open_tracing
from serve_controller.adapters.captured_requests import NatsCapturedRequests
from serve_controller.adapters.code_bucket import JetStreamCodeBucket
from serve_controller.adapters.external_gates import ExternalGates
from serve_controller.adapters.load_scrape import LoadScrape, LoadSources
from serve_controller.adapters.metrics import AutoscalingCollector, ControllerMetrics
from serve_controller.adapters.nats_bus import NatsBus
from serve_controller.adapters.nats_monitor import NatsMonitorReader, NatsServersCollector
from serve_controller.adapters.policy_runner import SubprocessPolicies
from serve_controller.adapters.postgres_store import PostgresStore
from serve_controller.adapters.prometheus_api import PrometheusApi
from serve_controller.adapters.prometheus_source import PrometheusSource
from serve_controller.adapters.replica_evaluator import NatsReplicaEvaluator
from serve_controller.adapters.rollout_metrics import RolloutCollector
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.settings import ControllerSettings
from serve_controller.shell.boundary import Boundary, CrashingBoundary, OpenBoundary, kill_after
from serve_controller.shell.capture_replays import CaptureReplays
from serve_controller.shell.code_store import CodeStore
from serve_controller.shell.service import ControllerService, ScalingParts

_log = structlog.get_logger()
VERSION = "0.1.0"
_START_DEADLINE_S = 86_400.0
"""Seconds to wait for NATS, which may start long after the controller; meanwhile `/readyz` reports it."""
_TRACING_CLOSE_S = 2.0


async def run(settings: ControllerSettings, logs: LogForwarder) -> None:
    """Run one controller until SIGTERM or SIGINT; ``logs`` are published. Raises any error that ends it."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    tracing = open_tracing(settings.tracing, "muster-controller", settings.controller_id)
    declare_identity(settings.bus)
    registry = CollectorRegistry()
    register_trace_metrics(registry, tracing)
    try:
        async with asyncio.TaskGroup() as tasks:
            service_task = tasks.create_task(_serve(settings, logs, registry), name="serve")
            await stop.wait()
            service_task.cancel()
    finally:
        if tracing is not None:
            await asyncio.to_thread(tracing.close, _TRACING_CLOSE_S)
    _log.info("controller_stopped")


async def _serve(  # noqa: PLR0915 - it wires everything
    settings: ControllerSettings, logs: LogForwarder, registry: CollectorRegistry
) -> None:
    subjects = Subjects(settings.bus.subject_prefix)
    service: ControllerService | None = None
    bus: NatsBus | None = None
    refused, closed, lag = RefusedMessages(time.monotonic), asyncio.Event(), LoopLag()
    metrics = ControllerMetrics(
        registry, lambda: None if service is None else service.term, SystemClock().now, refused
    )
    registry.register(AutoscalingCollector(lambda: service, SystemClock()))
    registry.register(RolloutCollector(lambda: None if service is None else service.term, SystemClock().now))
    nats_servers = NatsMonitorReader(
        settings.nats_monitors,
        leads=lambda: service is not None and service.term is not None,
        clock=time.monotonic,
    )
    registry.register(NatsServersCollector(nats_servers.samples))
    register_process_metrics(
        registry, lag, {"control": lambda: bus is not None and bus.is_connected}, refused
    )

    def readiness_error() -> str | None:
        if bus is None or not bus.is_connected:
            return "NATS is not connected"
        return None if service is None else service.readiness_error()

    def lead_checkpoint() -> Checkpoint | None:
        term = None if service is None else service.term
        return None if term is None else term.checkpoint

    pulse = BusHealthCheck(
        "control plane",
        is_connected=lambda: bus is not None and bus.is_connected,
        ping=lambda within_s: ping_nats(client, within_s),
        silent_after_s=settings.operations.unhealthy_after_s,
    )
    operations = OperationsServer(
        settings.operations,
        ProcessPages(registry, readiness_error=readiness_error, health_error=pulse.health_error),
    )
    await operations.start()
    _log.info("operations_port", host=settings.operations.host, port=operations.port)

    def reconnected() -> None:
        metrics.nats_reconnects.inc()
        if bus is not None:
            bus.reopen()
        if service is not None:
            service.on_bus_restored()

    def disconnected() -> None:
        if service is not None:
            service.on_bus_lost()

    client = await connect_nats(
        settings.bus,
        name=f"controller {settings.controller_id}",
        deadline_s=_START_DEADLINE_S,
        on_disconnect=disconnected,
        on_reconnect=reconnected,
        on_closed=closed.set,
    )
    store = PostgresStore(
        settings.postgres_dsn, settings.postgres_password, application_name=f"muster-{settings.controller_id}"
    )
    bus = NatsBus(client, subjects, VERSION, refused, metrics.dropped_calls.inc)
    evaluator = NatsReplicaEvaluator(client, subjects, refused)
    prometheus = None
    if settings.prometheus is not None:
        prometheus = PrometheusApi(settings.prometheus.url, settings.prometheus.token)
    gates = ExternalGates(client, subjects, prometheus, SystemClock())
    scaling, close_scaling = _open_scaling(settings, prometheus, evaluator)
    boundary: Boundary = OpenBoundary(metrics, time.monotonic)
    if settings.crash_mode is not None:
        boundary = CrashingBoundary(boundary, settings.crash_mode, kill_after(logs.flush))
    service = ControllerService(
        controller_id=settings.controller_id,
        store=store,
        bus=bus,
        clock=SystemClock(),
        boundary=boundary,
        telemetry=metrics,
        scaling=scaling,
        code=CodeStore(store, JetStreamCodeBucket(client, subjects)),
        gates=gates,
    )
    background = TaskOwner("controller")
    log_sink = NatsLogSink(logs, subjects, "controller", settings.controller_id)
    try:
        await join_log_sink(log_sink, client)
        background.start(pulse.run(), "pulse")
        background.start(lag.run(), "loop_lag")
        background.start(nats_servers.run(), "nats_monitors")
        captured = NatsCapturedRequests(client, subjects)
        background.start(CaptureReplays(captured, lead_checkpoint, time.monotonic).run(), "capture_replays")
        await evaluator.start()
        await bus.start(service, service.admin)
        await _run_until_closed(service, closed)
    finally:
        await background.close(timeout_s=1.0)
        await bus.close()
        await log_sink.close()
        await close_nats(client)
        await store.close()
        await close_scaling()
        await gates.close()
        await operations.close()


async def _run_until_closed(service: ControllerService, closed: asyncio.Event) -> None:
    """Run until cancelled. Raises BusUnavailable when the library has closed the connection for good.

    The library does so when NATS refuses it; only a new process may succeed.
    """

    async def fail_when_closed() -> None:
        await closed.wait()
        raise BusUnavailable("the connection to NATS was closed for good")

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(fail_when_closed(), name="fail_when_closed")
        await service.run()


def _open_scaling(
    settings: ControllerSettings, api: PrometheusApi | None, replicas: NatsReplicaEvaluator
) -> tuple[ScalingParts, Callable[[], Awaitable[None]]]:
    """Build what autoscaling needs from outside; returns it with the function that closes it."""
    prometheus = None
    if settings.prometheus is not None and api is not None:
        prometheus = PrometheusSource(api, settings.prometheus.selector)
    scrape = LoadScrape(time.monotonic)
    loads = LoadSources(prometheus, scrape)
    policies = SubprocessPolicies(settings.app_root)

    async def close() -> None:
        await loads.close()
        await policies.close()

    parts = ScalingParts(loads=loads, policies=policies, replicas=replicas, read_load=scrape.load_view)
    return parts, close
