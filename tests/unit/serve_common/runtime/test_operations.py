"""The operations port answers whatever the service's loop does, and shows the metrics that were asked for."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlencode

import aiohttp
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from serve_common.errors import BadField
from serve_common.runtime.operations import (
    OperationsPages,
    OperationsServer,
    ProcessPages,
    advertised_for_children,
    metrics_url,
)
from serve_common.runtime.settings import Environment, OperationsSettings, read_operations_settings
from serve_proxy.adapters.proxy_process import ChildrenPages
from serve_proxy.shell.parent import Child

LOCAL = OperationsSettings(host="127.0.0.1", port=0)


class Custom(Collector):
    """As our services' own: it does not describe itself, so that no registry knows its names."""

    def collect(self) -> Iterable[Metric]:
        yield CounterMetricFamily("custom", "Says \\ nothing", value=3)
        yield GaugeMetricFamily("other", "As well", value=4)


def registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(Custom())
    Counter("direct", "A counter", ["a"], registry=registry).labels("x").inc(2)
    Gauge("unasked", "A gauge", registry=registry)
    Histogram("seconds", "A histogram", buckets=[1], registry=registry).observe(0.5)
    return registry


@asynccontextmanager
async def serving(
    settings: OperationsSettings = LOCAL,
    readiness_error: str | None = None,
    pages: OperationsPages | None = None,
) -> AsyncIterator[OperationsServer]:
    pages = pages or ProcessPages(registry(), readiness_error=lambda: readiness_error)
    server = OperationsServer(settings, pages)
    await server.start()
    try:
        yield server
    finally:
        await server.close()


async def get(port: int, path: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}{path}") as answer:
        return answer.status, await answer.text()


def samples(page: str) -> list[str]:
    return sorted(s.name for family in text_string_to_metric_families(page) for s in family.samples)


def named(*names: str) -> str:
    return "/metrics?" + urlencode([("name[]", name) for name in names])


async def test_only_samples_of_the_names_asked_for_are_shown_also_of_collectors_that_describe_nothing() -> (
    None
):
    async with serving() as server:
        _, whole = await get(server.port, "/metrics")
        _, some = await get(server.port, named("custom_total", "direct_total", "seconds_bucket"))
        status, none = await get(server.port, named("no_such_metric"))
    assert {"custom_total", "other", "unasked", "seconds_sum"} <= set(samples(whole))
    assert samples(some) == ["custom_total", "direct_total", "seconds_bucket", "seconds_bucket"]
    assert "# TYPE custom_total counter" in some
    assert 'direct_total{a="x"} 2.0' in some
    assert (status, none) == (200, "")


async def test_it_listens_at_those_addresses_of_a_name_that_are_this_machines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the name of a scaled service has: one address for each of its containers."""
    resolve = socket.getaddrinfo

    def resolved(host: object, *arguments: Any, **options: Any) -> list[Any]:
        names = {"shared": ["192.0.2.1", "127.0.0.3"], "elsewhere": ["192.0.2.1"]}.get(str(host), [host])
        return [entry for name in names for entry in resolve(name, *arguments, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    async with serving(OperationsSettings(host="127.0.0.2, shared", port=0)) as server:
        for address, listens in (("127.0.0.2", True), ("127.0.0.3", True), ("127.0.0.1", False)):
            with socket.socket() as probe:
                assert (probe.connect_ex((address, server.port)) == 0) is listens, address
    with pytest.raises(OSError, match="elsewhere is no address of this machine"):
        async with serving(OperationsSettings(host="elsewhere", port=0)):
            pass


class FixedChild:
    def __init__(self, operations_port: int | None) -> None:
        self.operations_port = operations_port

    async def ended(self) -> int:
        raise NotImplementedError

    def stop(self) -> None:
        raise NotImplementedError

    def kill(self) -> None:
        raise NotImplementedError


async def test_a_parent_passes_the_names_on_and_its_health_is_that_of_the_children_that_run() -> None:
    async with serving() as first, serving(readiness_error="no bus") as second:
        children: dict[int, Child] = {1: FixedChild(first.port), 2: FixedChild(second.port)}
        async with serving(pages=ChildrenPages(children, lambda: None)) as operations:
            _, page = await get(operations.port, named("custom_total", "other"))
            assert samples(page) == ["custom_total"] * 2 + ["other"] * 2
            assert 'custom_total{process="2"} 3.0' in page
            assert await get(operations.port, "/readyz") == (503, "process 2: no bus\n")
            assert await get(operations.port, "/healthz") == (200, "ok\n")
            children[3] = FixedChild(None)
            assert await get(operations.port, "/healthz") == (200, "ok\n")
            assert "process 3: it starts" in (await get(operations.port, "/readyz"))[1]


async def test_a_child_that_takes_connections_and_says_nothing_makes_the_parent_unhealthy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("serve_proxy.adapters.proxy_process._PAGE_TIMEOUT_S", 0.1)
    writers: list[asyncio.StreamWriter] = []
    silent = await asyncio.start_server(lambda _reader, writer: writers.append(writer), "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    try:
        async with serving(pages=ChildrenPages({1: FixedChild(port)}, lambda: None)) as operations:
            status, why = await get(operations.port, "/healthz")
    finally:
        for writer in writers:
            writer.close()
            await writer.wait_closed()
        silent.close()
    assert (status, why) == (503, "process 1: it does not answer within 0.1 s\n")


async def until_healthy(server: OperationsServer) -> None:
    """A busy machine may let the loop stand still at any time."""
    async with asyncio.timeout(30):
        while await get(server.port, "/healthz") != (200, "ok\n"):  # noqa: ASYNC110 - asked over HTTP
            await asyncio.sleep(0.01)


async def test_a_loop_that_stands_still_is_told_and_its_metrics_are_still_shown() -> None:
    settings = OperationsSettings(host="127.0.0.1", port=0, unhealthy_after_s=0.5)
    async with serving(settings) as server:
        seen: list[tuple[int, str]] = []

        def ask() -> None:
            for path in ("/healthz", "/readyz", "/metrics"):
                seen.append(asyncio.run(get(server.port, path)))

        await until_healthy(server)
        asker = threading.Timer(0.7, ask)
        asker.start()
        asker.join()  # the loop stands still: that is what is tested
        await until_healthy(server)
    assert re.match(r"the loop has not turned for \d+\.\d s", seen[0][1])
    assert [status for status, _ in seen] == [503, 503, 200]
    assert "custom_total 3.0" in seen[2][1]


# Where a service says that it can be scraped.


def settings(host: str = "0.0.0.0", advertise: str = "") -> OperationsSettings:
    return read_operations_settings(
        Environment({"MUSTER_OPS_HOST": host, "MUSTER_OPS_ADVERTISE": advertise}), 9102
    )


@pytest.mark.parametrize(
    ("host", "advertise", "local_host", "url"),
    [
        ("127.0.0.1", "", "10.0.0.7", "http://127.0.0.1:9/metrics"),
        ("0.0.0.0", "", "10.0.0.7", "http://10.0.0.7:9/metrics"),
        ("::", "", "fd00::7", "http://[fd00::7]:9/metrics"),
        ("0.0.0.0", "", None, ""),
        ("127.0.0.1,shared", "", "10.0.0.7", "http://10.0.0.7:9/metrics"),
        ("127.0.0.1", "node-3", None, "http://node-3:9/metrics"),
        ("127.0.0.1", "node-3:80", None, "http://node-3:80/metrics"),
        ("0.0.0.0", ":80", "10.0.0.7", "http://10.0.0.7:80/metrics"),
        ("127.0.0.1", "fd00::7", None, "http://[fd00::7]:9/metrics"),
        ("127.0.0.1", "[fd00::7]:80", None, "http://[fd00::7]:80/metrics"),
    ],
)
def test_the_url_is_what_was_configured_or_bound_or_what_nats_is_reached_from(
    host: str, advertise: str, local_host: str | None, url: str
) -> None:
    assert metrics_url(settings(host, advertise), 9, local_host) == url


@pytest.mark.parametrize(
    ("host", "advertise", "told"),
    [
        ("127.0.0.1", "", "127.0.0.1:9"),
        ("0.0.0.0", "", ":9"),
        ("0.0.0.0", "node-3", "node-3:9"),
        ("0.0.0.0", "[fd00::7]:80", "[fd00::7]:80"),
    ],
)
def test_children_tell_of_their_parents_page(host: str, advertise: str, told: str) -> None:
    assert advertised_for_children(settings(host, advertise), 9) == told
    child = settings("127.0.0.1", told)
    parent = settings(host, advertise)
    if told != ":9":
        assert metrics_url(child, 55_555, None) == metrics_url(parent, 9, None)
    assert metrics_url(child, 55_555, "10.0.0.7") in (
        metrics_url(parent, 9, "10.0.0.7"),
        "http://127.0.0.1:9/metrics",
    )


@pytest.mark.parametrize("text", ["http://x", "a b", "host:port", "host:70000", "[::1", "/x"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(BadField, match="MUSTER_OPS_ADVERTISE"):
        settings(advertise=text)
