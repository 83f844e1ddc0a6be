"""The operations port of a process (`/metrics`, `/healthz`, `/readyz`), and the metrics that every process has."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Final, Protocol, final

import structlog
from aiohttp import web
from nats.aio.client import Client
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.gc_collector import GCCollector
from prometheus_client.metrics_core import Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from serve_common.nats.login import has_identity
from serve_common.runtime.health import HealthProbe, Heartbeat, LoopLag
from serve_common.runtime.settings import OperationsSettings
from serve_common.runtime.tasks import TaskOwner
from serve_common.runtime.threads import LoopThread
from serve_common.telemetry.catalogue.services import (
    BUS_CONNECTED,
    BUS_IDENTITIES,
    LOG_LINES_DROPPED,
    LOOP_LAG,
    REFUSED_MESSAGES,
    SPANS_DROPPED,
)
from serve_common.telemetry.catalogue.specs import MetricKind, MetricSpec
from serve_common.telemetry.log_lines import RefusedMessages, dropped_lines

if TYPE_CHECKING:
    from serve_common.telemetry.otlp import Counts, OtlpTracing

_WILDCARDS: Final = frozenset({"", "*", "0.0.0.0", "::", "0:0:0:0:0:0:0:0"})  # noqa: S104 - compared with, not bound


def metrics_url(settings: OperationsSettings, port: int, local_host: str | None) -> str:
    """The URL of the page; empty while the address is not known.

    Its host is the configured one, else the bound address, else ``local_host``: the local address of a connection to
    NATS, which the controller can reach too. ``port`` is the bound one. Why not a name: the containers of a scaled
    service share one, and each must be scraped by itself.
    """
    host, advertised_port = split_advertised(settings.advertise)
    if not host:
        host = settings.host if _is_one_address(settings.host) else local_host or ""
    if not host:
        return ""
    return f"http://{f'[{host}]' if ':' in host else host}:{advertised_port or port}/metrics"


def advertised_for_children(settings: OperationsSettings, port: int) -> str:
    """The address that children of this process must advertise, so that they report its page instead of their own."""
    host, advertised_port = split_advertised(settings.advertise)
    if not host and _is_one_address(settings.host):
        host = settings.host
    return f"{f'[{host}]' if ':' in host else host}:{advertised_port or port}"


def _is_one_address(host: str) -> bool:
    return host not in _WILDCARDS and "," not in host


def split_advertised(text: str) -> tuple[str, int | None]:
    """Host and port of ``host``, ``host:port``, ``:port``, or of an IPv6 address, in brackets where a port follows."""
    if text.startswith("["):
        host, _, port = text[1:].partition("]")
        return host, int(port[1:]) if port else None
    host, colon, port = text.rpartition(":")
    if not colon or ":" in host:
        return text, None
    return host, int(port) if port else None


def get_local_host(client: Client | None) -> str | None:
    """The local address of the connection; None while it is not connected."""
    if client is None or not client.is_connected:
        return None
    # The library has no public access to it.
    writer = getattr(client._transport, "_io_writer", None)  # noqa: SLF001 - no other way
    name = None if writer is None else writer.get_extra_info("sockname")
    return str(name[0]) if isinstance(name, tuple) and name else None


_log = structlog.get_logger(__name__)

NAMES_PARAMETER: Final = "name[]"
"""Query parameter that selects samples by name, as in prometheus_client's own server."""
_CLOSE_TIMEOUT_S: Final = 2.0


class OperationsPages(Protocol):
    """The pages of an operations port. All methods run on the port's own loop."""

    async def metrics(self, names: Collection[str]) -> bytes:
        """Metrics in Prometheus' text format; only samples with one of ``names``, or all when there are none."""
        ...

    async def health_error(self) -> str | None:
        """The reason why the process should be restarted; None when it is healthy."""
        ...

    async def readiness_error(self) -> str | None:
        """The reason why the process cannot take traffic; None when it is ready."""
        ...

    async def close(self) -> None:
        """Called when the port is closed."""
        ...


@final
class OperationsServer:
    """The operations port of a process: serves the three paths, on a thread of its own, until closed.

    Why apart from any traffic: scrapes and probes must be answered also while the service drains or its queue is full.
    Why a thread: also when the service's loop is stuck, scrapes must go on, and a probe must be answered with "the loop
    has not turned for 30 s"; a missing answer gives no reason.
    """

    def __init__(self, settings: OperationsSettings, pages: OperationsPages) -> None:
        """``pages`` are served on the port's own thread after `start`.

        The loop on which `start` is called is checked too: a process whose loop is stuck is neither healthy nor ready.
        """
        self.port = settings.port
        """Port to listen on; after `start` the bound one."""
        self._settings = settings
        self._pages = pages
        self._heartbeat = Heartbeat(settings.unhealthy_after_s)
        self._tasks = TaskOwner("operations")
        self._thread: LoopThread | None = None
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Listen; raises OSError when the port is taken."""
        self._tasks.start(self._heartbeat.run(), "heartbeat")
        self._thread = LoopThread("operations")
        try:
            await asyncio.wrap_future(self._thread.submit(self._listen()))
        except OSError:
            await self.close()
            raise

    async def close(self) -> None:
        """Stop listening; bounded in time."""
        await self._tasks.close(_CLOSE_TIMEOUT_S)
        thread, self._thread = self._thread, None
        if thread is None:
            return
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await asyncio.wrap_future(thread.submit(self._end()))
        except TimeoutError:
            _log.warning("operations_port_not_closed", timeout_s=_CLOSE_TIMEOUT_S)
        await asyncio.to_thread(thread.stop, _CLOSE_TIMEOUT_S)

    async def _listen(self) -> None:
        application = web.Application()
        application.add_routes(
            [
                web.get("/metrics", self._metrics),
                web.get("/healthz", self._healthz),
                web.get("/readyz", self._readyz),
            ]
        )
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.5)
        await self._runner.setup()
        for host in self._settings.host.split(","):
            for address in await _own_addresses(host.strip()):
                await web.TCPSite(self._runner, address, self.port).start()
                self.port = int(self._runner.addresses[0][1])

    async def _end(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        await self._pages.close()

    async def _metrics(self, request: web.Request) -> web.Response:
        page = await self._pages.metrics(frozenset(request.query.getall(NAMES_PARAMETER, ())))
        return web.Response(body=page, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _healthz(self, _request: web.Request) -> web.Response:
        return _health_response(self._heartbeat.health_error() or await self._pages.health_error())

    async def _readyz(self, _request: web.Request) -> web.Response:
        return _health_response(self._heartbeat.health_error() or await self._pages.readiness_error())


@final
class ProcessPages:
    """The `OperationsPages` of one process."""

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        readiness_error: HealthProbe,
        health_error: HealthProbe = lambda: None,
    ) -> None:
        """``health_error`` should return a reason only when a restart of the process would help."""
        self._registry = registry
        self._readiness_error = readiness_error
        self._health_error = health_error

    async def metrics(self, names: Collection[str]) -> bytes:
        # In a thread: the multiprocess collector reads files, which must not delay a probe.
        return await asyncio.to_thread(metrics_page, self._registry, names)

    async def health_error(self) -> str | None:
        return self._health_error()

    async def readiness_error(self) -> str | None:
        return self._readiness_error()

    async def close(self) -> None:
        """Do nothing."""


def metrics_page(registry: Collector, names: Collection[str]) -> bytes:
    """Samples with one of ``names`` in Prometheus' text format; all samples when there are no names.

    A registry's own restriction knows only collectors that describe themselves, which few of ours can.
    """
    return generate_latest(_Restricted(registry, names) if names else registry)


@final
class _Restricted(CollectorRegistry):
    def __init__(self, registry: Collector, names: Collection[str]) -> None:
        super().__init__()
        self._whole = registry
        self._wanted = names

    def collect(self) -> Iterator[Metric]:
        for family in self._whole.collect():
            samples = [sample for sample in family.samples if sample.name in self._wanted]
            if samples:
                selected = Metric(family.name, family.documentation, family.type, family.unit)
                selected.samples = samples
                yield selected


async def _own_addresses(host: str) -> list[str]:
    """Addresses of ``host`` that this process can listen on; raises OSError when there are none.

    A name that containers of a scaled service share has all their addresses, and one is this container's.
    """
    found = await asyncio.to_thread(
        socket.getaddrinfo, host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    own: list[str] = []
    error: OSError | None = None
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
        except OSError as refused:
            error = refused
        else:
            own.append(str(address[0]))
    if not own:
        raise OSError(errno.EADDRNOTAVAIL, f"{host} is no address of this machine") from error
    return own


def _health_response(reason: str | None) -> web.Response:
    return web.Response(text="ok\n") if reason is None else web.Response(status=503, text=f"{reason}\n")


def register_process_metrics(
    registry: CollectorRegistry,
    lag: LoopLag,
    connections: Mapping[str, Callable[[], bool]],
    refused: RefusedMessages | None,
) -> None:
    """Export process metrics by ``registry``; ``connections`` return whether they are up, by the label's value.

    A process without connections of its own has no metrics of them, and one that receives no messages from services
    none of ``refused``.
    """
    # Those are one more series per counter, with nothing but its creation time.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    registry.register(_ProcessCollector(lag, connections, refused))
    ProcessCollector(registry=registry)
    GCCollector(registry=registry)


def build_family(
    spec: MetricSpec, samples: Iterable[tuple[Sequence[str], float]] = ()
) -> CounterMetricFamily | GaugeMetricFamily:
    """A family of a counter or gauge, for this scrape; ``samples`` are label values and the value that they have."""
    make = CounterMetricFamily if spec.kind is MetricKind.COUNTER else GaugeMetricFamily
    family = make(spec.family, spec.text, labels=spec.labels)
    for labels, value in samples:
        family.add_metric(labels, value)
    return family


def build_single(spec: MetricSpec, value: float) -> Metric:
    """A counter or gauge without labels, for this scrape."""
    return build_family(spec, [((), value)])


def build_histogram_family(spec: MetricSpec) -> HistogramMetricFamily:
    """An empty family of a histogram."""
    return HistogramMetricFamily(spec.family, spec.text, labels=spec.labels)


def add_observations(
    family: HistogramMetricFamily,
    labels: list[str],
    buckets: Iterable[float],
    counts: list[int],
    total: float,
) -> None:
    """Add one series to a histogram; ``counts`` are not cumulative and one longer than ``buckets``."""
    bounds = [*(str(float(bound)) for bound in buckets), "+Inf"]
    family.add_metric(labels, list(zip(bounds, accumulate(counts), strict=True)), total)


@final
class _ProcessCollector(Collector):
    def __init__(
        self, lag: LoopLag, connections: Mapping[str, Callable[[], bool]], refused: RefusedMessages | None
    ) -> None:
        self._refused = refused
        self._lag = lag
        self._connections = connections

    def collect(self) -> Iterable[Metric]:
        lag, observed = build_histogram_family(LOOP_LAG), self._lag.observations
        add_observations(lag, [], LOOP_LAG.buckets, list(observed.counts), observed.total)
        yield lag
        connections = self._connections.items()
        if connections:
            yield build_family(BUS_CONNECTED, (([name], is_up()) for name, is_up in connections))
            yield build_single(BUS_IDENTITIES, has_identity())
        dropped = dropped_lines.by_reason()
        yield build_family(LOG_LINES_DROPPED, (([reason], lines) for reason, lines in dropped.items()))
        if self._refused is not None:
            refused = self._refused.counts.items()
            yield build_family(REFUSED_MESSAGES, (([kind], count) for kind, count in refused))


def register_trace_metrics(registry: CollectorRegistry, tracing: OtlpTracing | None) -> None:
    """Export metrics of spans by ``registry``; does nothing when tracing is off.

    Why: a trace that lacks spans looks like one whose work was never done, and nothing in it shows the difference.
    """
    if tracing is not None:
        registry.register(_SpansCollector(tracing.counts))


@final
class _SpansCollector(Collector):
    def __init__(self, counts: Counts) -> None:
        self._counts = counts

    def collect(self) -> Iterable[Metric]:
        dropped = self._counts.dropped_by_reason
        yield build_family(SPANS_DROPPED, (([reason], count) for reason, count in dropped.items()))
