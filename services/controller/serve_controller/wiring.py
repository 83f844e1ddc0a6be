"""Joins the controller's parts and runs them until the process is told to stop."""

from __future__ import annotations

import asyncio
import signal
import time

import structlog
from prometheus_client import CollectorRegistry

from serve_common.adapters.nats_client import close_nats, connect_nats
from serve_common.adapters.operations import OperationsServer
from serve_common.adapters.system_clock import SystemClock
from serve_common.subjects import Subjects
from serve_controller.adapters.metrics import ControllerMetrics
from serve_controller.adapters.nats_bus import NatsBus
from serve_controller.adapters.postgres_store import PostgresStore
from serve_controller.settings import ControllerSettings
from serve_controller.shell.boundary import Boundary, OpenBoundary
from serve_controller.shell.crash_mode import CrashingBoundary
from serve_controller.shell.service import ControllerService

_log = structlog.get_logger()
VERSION = "0.1.0"
_START_DEADLINE_S = 86_400.0
"""NATS may come up long after the controller; a supervisor sees from `/readyz` that it waits."""


async def run(settings: ControllerSettings) -> None:
    """Run one controller until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(_serve(settings, stop), name="serve")
        await stop.wait()
        serving.cancel()
    _log.info("controller_stopped")


async def _serve(settings: ControllerSettings, stop: asyncio.Event) -> None:
    subjects = Subjects(settings.bus.subject_prefix)
    service: ControllerService | None = None
    bus: NatsBus | None = None
    registry = CollectorRegistry()
    metrics = ControllerMetrics(registry, lambda: None if service is None else service.term)

    def why_not_ready() -> str | None:
        return "NATS is not connected" if bus is None or not bus.is_connected else None

    operations = OperationsServer(settings.operations, registry, why_not_ready=why_not_ready)
    await operations.start()

    def reconnected() -> None:
        metrics.nats_reconnects.inc()
        if bus is not None:
            bus.reopen()
        if service is not None:
            service.bus_came()

    def disconnected() -> None:
        if service is not None:
            service.bus_went()

    client = await connect_nats(
        settings.bus,
        name=f"controller {settings.controller_id}",
        deadline_s=_START_DEADLINE_S,
        on_disconnect=disconnected,
        on_reconnect=reconnected,
        on_closed=stop.set,
    )
    store = PostgresStore(
        settings.postgres_dsn, settings.postgres_password, application_name=f"muster-{settings.controller_id}"
    )
    bus = NatsBus(client, subjects, VERSION)
    boundary: Boundary = OpenBoundary(metrics, time.monotonic)
    if settings.crash_mode is not None:
        boundary = CrashingBoundary(boundary, settings.crash_mode)
    service = ControllerService(
        controller_id=settings.controller_id,
        store=store,
        bus=bus,
        clock=SystemClock(),
        boundary=boundary,
        telemetry=metrics,
    )
    try:
        await bus.start(service, service.admin)
        await service.run()
    finally:
        await bus.close()
        await close_nats(client)
        await store.close()
        await operations.close()
