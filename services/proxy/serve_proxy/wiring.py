"""Wires the parts of a proxy process, starts them in order, and stops them without losing a request."""

from __future__ import annotations

import asyncio
import os
import random
import time
import uuid
from collections.abc import Callable
from typing import Final, final

import structlog
from prometheus_client import CollectorRegistry

from serve_common.clock import SystemClock
from serve_common.dispatch.dispatcher import Dispatcher
from serve_common.dispatch.request_body import UploadMemory
from serve_common.dispatch.response_comparisons import ResponseComparisons
from serve_common.dispatch.routes import ModelHolders, Routes
from serve_common.dispatch.shadows import Shadows
from serve_common.dispatch.timers import RequestTimers
from serve_common.dispatch.upstream import Outgoing
from serve_common.errors import BusUnavailable
from serve_common.nats.connection import BusConnection, Inbox
from serve_common.nats.login import build_login, declare_identity
from serve_common.nats.options import ROUTER_PING_INTERVAL_S, ROUTER_PINGS_MAX, BusOptions
from serve_common.protocol.subjects import Subjects
from serve_common.runtime.health import BusHealthCheck, LoopLag, first_error
from serve_common.runtime.operations import (
    OperationsServer,
    ProcessPages,
    metrics_url,
    register_process_metrics,
    register_trace_metrics,
)
from serve_common.runtime.settings import DirectMode
from serve_common.runtime.tasks import TaskOwner
from serve_common.telemetry.log_forwarder import LogForwarder, NatsLogSink
from serve_common.telemetry.log_lines import RefusedMessages
from serve_common.telemetry.request_traces import open_tracing
from serve_proxy.adapters.access_writer import AccessWriter
from serve_proxy.adapters.control_plane import NatsControlPlane
from serve_proxy.adapters.metrics import ProxyCollector, RoutesCollector
from serve_proxy.http.bodies import release_memory
from serve_proxy.http.middlewares import NO_MIDDLEWARES, add_directory, load_middlewares
from serve_proxy.http.requests import HttpRequests
from serve_proxy.http.server import HttpServer
from serve_proxy.http.tls import Certificate
from serve_proxy.settings import ProxySettings
from serve_proxy.shell.busy_polling import BusyPolling
from serve_proxy.shell.captures import Captures
from serve_proxy.shell.gateway import Gateway
from serve_proxy.shell.ingress import Ingress, LiveOptions, request_ids
from serve_proxy.shell.reports import Reports
from serve_proxy.shell.request_observers import RequestTraces

_log = structlog.get_logger(__name__)

_CONNECT_ROUND_S: Final = 10.0
_DRAINED_IDLE_S: Final = 0.1
"""Seconds without requests before a drain ends: newly accepted connections are not counted at once."""
_IDLE_CLOSE_S: Final = 1.0
"""Seconds without requests in a drain before idle connections are closed: a client may be about to send, and the next
response makes it connect elsewhere."""
_SOCKETS_GRACE_S: Final = 5.0
"""Seconds, at most half of the drain timeout, before WebSockets are closed in a drain."""
_CLOSE_TIMEOUT_S: Final = 2.0


@final
class Proxy:
    """The parts of one proxy process."""

    def __init__(
        self,
        settings: ProxySettings,
        *,
        on_failure: Callable[[], None],
        logs: LogForwarder | None = None,
        write_access: Callable[[bytes], None] | None = None,
    ) -> None:
        """Creates all parts and starts none; call it on a running loop.

        ``on_failure`` is called when the process cannot continue and should be restarted. ``logs`` are published.
        ``write_access`` writes the access log, as for `AccessWriter`; None writes to standard error.
        """
        self._settings = settings
        rng = random.Random()  # noqa: S311 - balances load, not for security
        subjects = Subjects(settings.bus.subject_prefix)
        self._bus = BusConnection(_bus_options(settings), rng)
        inbox = Inbox(self._bus, f"{settings.proxy_id}-{uuid.uuid4().hex[:12]}")
        routes = Routes(rng.random, uncounted=settings.uncounted)
        outgoing = Outgoing(self._bus, inbox, subjects, settings.bus.direct)
        self._links = outgoing.links
        self._dispatcher = Dispatcher(routes, outgoing, bus_wait_s=settings.bus_wait_s)
        models = ModelHolders(routes, subjects, asyncio.get_running_loop().time)
        self._bus.subscribe(subjects.all_models, models.take)
        self._timers = RequestTimers(self._dispatcher, routes, outgoing, models)
        self._shadows = Shadows(
            self._dispatcher,
            rng.random,
            asyncio.get_running_loop().time,
            ResponseComparisons(routes.routers, asyncio.get_running_loop().time),
        )
        self._captures = Captures(
            self._bus.publish,
            subjects,
            rng.random,
            now=asyncio.get_running_loop().time,
            wall_now=SystemClock().now,
        )
        if settings.middleware_dir is not None:
            add_directory(settings.middleware_dir)
        self._live_options = LiveOptions(
            settings.http,
            nothing=NO_MIDDLEWARES,
            load=load_middlewares,
            use=lambda options, loaded: requests.use(options, loaded),  # noqa: PLW0108 - made below
            listen=self._listen if settings.closes_when_shut_down else None,
            on_applied=lambda snapshot_id: self._ingress.on_http_options_applied(snapshot_id),  # noqa: PLW0108 - as above
        )
        self._ingress = Ingress(
            routes,
            self._dispatcher,
            self._bus,
            self._shadows,
            self._live_options,
            captures=self._captures,
            on_applied=self._on_applied,
            bus_wait_s=settings.bus_wait_s,
            memory=UploadMemory(settings.body_memory_max // 2, settings.body_memory_max),
            polling=_build_polling(settings, self._dispatcher),
        )
        refused = RefusedMessages(asyncio.get_running_loop().time)
        self._control_plane = NatsControlPlane(
            settings.bus,
            name=f"proxy {settings.proxy_id}",
            listener=self._ingress,
            on_leader=lambda: self._reports.wake(),  # noqa: PLW0108 - created below
            on_closed=on_failure,
            refused=refused,
        )
        self._reports = Reports(
            self._control_plane.send_report,
            settings.proxy_id,
            incarnation=uuid.uuid4().hex,
            started_at=SystemClock().now(),
            applied_snapshot_id=lambda: routes.applied_snapshot_id,
            http_refusal=lambda: (self._live_options.error, self._live_options.error_snapshot_id),
            metrics_url=lambda: metrics_url(
                settings.operations, self.operations.port, self._control_plane.local_host
            ),
            request_counts=routes.request_counts,
            differences=self._shadows.get_differences,
        )

        self._tracing = open_tracing(settings.tracing, "muster-proxy", settings.proxy_id)
        traces = None if self._tracing is None else RequestTraces(self._tracing.tracer)
        new_request_id = request_ids(rng.getrandbits)
        self._gateway = Gateway(
            self._ingress,
            self._bus,
            subjects,
            inbox,
            request_timeout_s=lambda: self._live_options.options.request_timeout_s,
            new_request_id=new_request_id,
            wall_now=SystemClock().now,
            traces=traces,
        )
        ids = {"service": "proxy", "proxy_id": settings.proxy_id}
        self._access = AccessWriter(ids, SystemClock(), write_access)
        requests = HttpRequests(
            self._ingress,
            settings.http,
            new_request_id=new_request_id,
            forwarded_hops=settings.forwarded_hops,
            traces=traces,
            log_request=self._access.add,
            scheme="http" if settings.tls is None else "https",
        )
        self._requests = requests
        self._certificate = None if settings.tls is None else Certificate(settings.tls)
        tls = None if self._certificate is None else self._certificate.context
        self.http = HttpServer(requests, self._ingress, tls)
        outgoing.links.on_batch_start = self.http.start_gathering
        outgoing.links.on_batch_end = self.http.write_gathered
        registry = CollectorRegistry()
        registry.register(RoutesCollector(routes))
        registry.register(
            ProxyCollector(
                settings.proxy_id,
                routes,
                self._bus,
                reconnects=lambda: self._bus.reconnects + self._control_plane.reconnects,
                connections=lambda: self.http.connections,
                dropped_calls=lambda: self._gateway.dropped_calls,
                memory=self._ingress.memory,
                links=self._links,
                captures=self._captures,
            )
        )
        register_trace_metrics(registry, self._tracing)
        self._lag = LoopLag()
        register_process_metrics(
            registry,
            self._lag,
            {
                "data": lambda: self._bus.is_connected,
                "control": lambda: self._control_plane.is_connected,
            },
            refused,
        )
        silent_after_s = settings.operations.unhealthy_after_s
        self._pulses = (
            BusHealthCheck(
                "data plane",
                is_connected=lambda: self._bus.is_connected,
                ping=self._bus.flush,
                silent_after_s=silent_after_s,
            ),
            BusHealthCheck(
                "control plane",
                is_connected=lambda: self._control_plane.is_connected,
                ping=self._control_plane.ping,
                silent_after_s=silent_after_s,
            ),
        )
        self.operations = OperationsServer(
            settings.operations,
            ProcessPages(
                registry,
                readiness_error=self._ingress.readiness_error,
                health_error=first_error(*(pulse.health_error for pulse in self._pulses)),
            ),
        )
        self._tasks = TaskOwner("proxy", on_failure=lambda _name, _error: on_failure())
        self._bus.on_connected.append(self._dispatcher.bus_reconnected)
        self._bus.on_bus_responds_again.append(self._dispatcher.bus_responds_again)
        self._log_sink = None if logs is None else NatsLogSink(logs, subjects, "proxy", settings.proxy_id)
        if self._log_sink is not None:
            self._log_sink.join(self._bus)

    async def start(self) -> str:
        """Listen, and connect in the background. Returns the address. Raises OSError when a port is in use."""
        settings = self._settings
        declare_identity(settings.bus)
        await self.operations.start()
        address = await self.http.start(
            settings.http_host, settings.http_port, reuse_port=settings.parent_fd is not None
        )
        if self._certificate is not None:
            address = f"https://{address}"
            self._tasks.start(self._certificate.run(), name="certificate")
        self._reports.address = address
        self._tasks.start(self._connect_bus(), name="connect_bus")
        self._tasks.start(self._control_plane.connect(), name="connect_control_plane")
        self._tasks.start(self._reports.run(), name="reports")
        self._tasks.start(self._timers.run(), name="beat")
        self._captures.start()
        self._shadows.start()
        self._tasks.start(release_memory(self._ingress.memory), name="release_memory")
        self._tasks.start(self._lag.run(), name="loop_lag")
        for pulse in self._pulses:
            self._tasks.start(pulse.run(), name="pulse")
        _log.info("proxy_listening", address=address, operations_port=self.operations.port)
        return address

    async def drain(self) -> None:
        """Accept nothing new, and wait until requests in flight have ended, for at most `drain_timeout_s`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._settings.drain_timeout_s
        self._ingress.is_draining = True
        await self.http.stop_listening()
        self._reports.leave()
        _log.info("proxy_drains", in_flight=self._in_flight, connections=self.http.connections)
        sockets_grace_s = min(_SOCKETS_GRACE_S, self._settings.drain_timeout_s / 2)
        self._tasks.start(self._requests.sockets.leave(sockets_grace_s), name="leave_sockets")
        await self._gateway.leave(_CLOSE_TIMEOUT_S)
        idle_since = loop.time()
        while loop.time() < deadline:
            now = loop.time()
            if self._in_flight:
                idle_since = now
            elif now - idle_since >= _IDLE_CLOSE_S:
                self.http.close_idle()
            if not self.http.connections and now - idle_since >= _DRAINED_IDLE_S:
                return
            await asyncio.sleep(0.02)
        _log.warning("drain_timed_out", in_flight=self._in_flight)

    async def close(self) -> None:
        """Stop everything at once; requests in flight get an error."""
        self._ingress.is_draining = True
        await self._gateway.leave(_CLOSE_TIMEOUT_S)
        await self._shadows.close(_CLOSE_TIMEOUT_S)
        await self._captures.close(_CLOSE_TIMEOUT_S)
        self._dispatcher.close()
        await self.http.close(_CLOSE_TIMEOUT_S)
        await self._requests.close(_CLOSE_TIMEOUT_S)
        self._ingress.memory.pipes.close()
        await asyncio.to_thread(self._access.close, _CLOSE_TIMEOUT_S)
        await self._gateway.close(_CLOSE_TIMEOUT_S)
        self._reports.leave()
        await self._reports.send()
        await self._live_options.close(_CLOSE_TIMEOUT_S)
        await self._tasks.close(_CLOSE_TIMEOUT_S)
        await self._control_plane.close()
        await self._links.close()
        if self._log_sink is not None:
            await self._log_sink.close()
        await self._bus.close()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close, _CLOSE_TIMEOUT_S)
        await self.operations.close()

    @property
    def _in_flight(self) -> int:
        return self.http.in_flight + self._gateway.in_flight

    async def _listen(self, is_wanted: bool) -> None:  # noqa: FBT001 - the only argument
        if self._ingress.is_draining:
            return
        if is_wanted:
            await self.http.listen_again()
        else:
            await self.http.stop_listening()
            self.http.close_idle()

    def _on_applied(self) -> None:
        self._reports.wake()
        if self._ingress.is_open and not self._ingress.is_draining:
            self._gateway.start()

    async def _connect_bus(self) -> None:
        while True:
            try:
                await self._bus.connect(_CONNECT_ROUND_S)
            except BusUnavailable as error:
                _log.warning("bus_unavailable", reason=str(error))
            else:
                return


def _build_polling(settings: ProxySettings, dispatcher: Dispatcher) -> BusyPolling | None:
    """None where it would keep the replica from its processor, or few requests take links."""
    if settings.bus.direct is not DirectMode.ALL or len(os.sched_getaffinity(0)) == 1:
        return None
    return BusyPolling(dispatcher.calls, asyncio.get_running_loop().call_soon, time.perf_counter)


def _bus_options(settings: ProxySettings) -> BusOptions:
    bus = settings.bus
    return BusOptions(
        servers=bus.servers,
        login=build_login(bus),
        user=bus.user or None,
        password=bus.password or None,
        name=f"proxy {settings.proxy_id} data",
        inbox_prefix=bus.inbox_prefix,
        tls_ca_file=bus.tls_ca_file,
        ping_interval_s=ROUTER_PING_INTERVAL_S,
        outstanding_pings_max=ROUTER_PINGS_MAX,
    )
