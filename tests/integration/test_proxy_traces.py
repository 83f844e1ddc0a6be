"""What a proxy tells of requests in traces, by whichever way they go, and that it harms none of them."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from serve_common.telemetry.trace_context import read_tracing_settings
from tests.support.servers.nats_server import NatsServer
from tests.support.servers.otlp_receiver import OtlpReceiver, ReceivedSpan, tree
from tests.support.servers.reserved_port import HeldPort
from tests.support.stacks.proxy_stack import MIB, R0, R1, TAG, Stack, running_stack
from tests.support.waiting import until

PARENT = "00f067aa0ba902b7"
ATTEMPT = f"attempt {TAG}"


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as receiver:
        yield receiver


@asynccontextmanager
async def traced(
    shared_server: NatsServer, patch: pytest.MonkeyPatch, environment: dict[str, str], **options
) -> AsyncIterator[Stack]:
    for name, value in environment.items():
        patch.setenv(name, value)
    async with running_stack(shared_server, tracing=read_tracing_settings(environment), **options) as stack:
        yield stack
        await stack.client.jetstream().delete_key_value(stack.subjects.bucket)


@pytest.fixture
async def stack(
    shared_server: NatsServer, receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Stack]:
    async with traced(shared_server, monkeypatch, receiver.environment()) as stack:
        yield stack


def parent(flags: str = "01") -> tuple[str, dict[str, str]]:
    trace_id = uuid.uuid4().hex
    return trace_id, {"traceparent": f"00-{trace_id}-{PARENT}-{flags}"}


def trace_of(headers: Mapping[str, str]) -> str:
    """The trace that began with a request: it has the digits of the id that the proxy gave it."""
    return headers["X-Request-ID"].replace("-", "")


async def spans_of(receiver: OtlpReceiver, trace_id: str, count: int) -> list[ReceivedSpan]:
    return await asyncio.to_thread(receiver.of_trace, trace_id, count)


async def test_a_request_that_waits_in_the_queue_says_so(stack: Stack, receiver: OtlpReceiver) -> None:
    (replica,) = await stack.serve(R0, limit=1)
    trace_id, headers = parent()
    async with asyncio.TaskGroup() as asking:
        asking.create_task(stack.get("/echo/hold"))
        await replica.wait(lambda: len(replica.held) == 1)
        asking.create_task(stack.get("/echo/two", headers=headers))
        await stack.queued()
        replica.release()
    spans = await spans_of(receiver, trace_id, 3)
    assert tree(spans, PARENT) == [["GET /echo", ["queue"], [ATTEMPT]]]
    proxy, queue, attempt = spans
    assert queue.attributes == {"muster.waits_for": "replica"}
    assert proxy.start_ns <= queue.start_ns < queue.ended_ns <= attempt.start_ns
    assert attempt.attributes["muster.backend_tag"] == TAG


async def test_each_sending_of_a_request_is_a_span(stack: Stack, receiver: OtlpReceiver) -> None:
    leaving, staying = await stack.serve(R0, R1)
    leaving.is_draining = True
    for _ in range(40):
        trace_id, headers = parent()
        status, _, _ = await stack.get("/echo", headers=headers)
        assert status == 200
        # The proxy's own span ends last, so once it is there all others are.
        await asyncio.to_thread(
            receiver.wait,
            lambda spans, own=trace_id: any((s.trace_id, s.parent_id) == (own, PARENT) for s in spans),
        )
        spans = await spans_of(receiver, trace_id, 2)
        if spans[1].attributes["muster.replica_tag"] == R0:
            break
    else:
        raise AssertionError("the router never chose the replica that leaves")
    proxy, refused, answered = spans
    assert (refused.error, refused.attributes["error.type"]) == (
        "the replica did not begin the request",
        "draining",
    )
    assert answered.error is None
    assert answered.attributes["http.response.status_code"] == 200
    assert (refused.attributes["muster.attempt"], answered.attributes["muster.attempt"]) == (1, 2)
    assert answered.attributes["muster.replica_tag"] == R1
    assert proxy.attributes["muster.attempts"] == 2
    assert staying.seen[-1].traceparent == f"00-{trace_id}-{answered.span_id}-01"


@pytest.mark.parametrize("way", ["short", "long", "upload", "stream", "middlewares", "plain call"])
async def test_every_way_through_the_proxy_is_traced(stack: Stack, receiver: OtlpReceiver, way: str) -> None:
    (replica,) = await stack.serve(R0)
    if way == "middlewares":
        await stack.applied(await stack.put_http(middlewares=["serve_proxy.middlewares.cors:cors"]))
    trace_id, headers = parent()
    method, name = "GET", "GET /echo"
    if way == "short" or way == "middlewares":
        await stack.get("/echo/secret-free?key=secret", headers=headers)
    elif way == "long":
        method, name = "HEAD", "HEAD /echo"
        await stack.get("/echo", "HEAD", headers=headers)
    elif way == "upload":
        method, name = "POST", "POST /echo"

        async def body() -> AsyncIterator[bytes]:
            for _ in range(4):
                yield bytes(MIB // 2)

        status, _, _ = await stack.get("/echo/sink", "POST", data=body(), headers=headers)
        assert status == 200
    elif way == "stream":
        _, whole, _ = await stack.get(f"/echo/big?{3 * MIB}", headers=headers)
        assert len(whole) == 3 * MIB
    else:
        method, name = "", "call"
        await stack.client.request(f"serve.call.{TAG.replace('/', '.')}", b"1", timeout=20, headers=headers)
    spans = await spans_of(receiver, trace_id, 2)
    assert tree(spans, PARENT) == [[name, [ATTEMPT]]]
    proxy, attempt = spans
    assert proxy.attributes.get("http.request.method", "") == method
    assert proxy.attributes["http.response.status_code"] == 200
    assert proxy.attributes["muster.endpoint_tag"] == TAG
    assert proxy.start_ns <= attempt.start_ns <= attempt.ended_ns <= proxy.ended_ns
    assert proxy.ended_ns - proxy.start_ns < 60 * 1_000_000_000
    assert abs(proxy.start_ns - time.time_ns()) < 60 * 1_000_000_000
    assert replica.seen[-1].traceparent == f"00-{trace_id}-{attempt.span_id}-01"
    assert "secret" not in re.sub("/echo/secret-free", "", repr(spans))


async def test_failures_have_their_status_and_reason(stack: Stack, receiver: OtlpReceiver) -> None:
    await stack.serve(R0)
    trace_id, headers = parent()
    assert (await stack.get("/echo/raise", headers=headers))[0] == 500
    proxy, attempt = await spans_of(receiver, trace_id, 2)
    assert (attempt.error, attempt.attributes["error.type"]) == ("ValueError: no", "user_code_raised")
    assert (proxy.error, proxy.attributes["http.response.status_code"]) == ("ValueError: no", 500)

    trace_id, headers = parent()
    assert (await stack.get("/nowhere", headers=headers))[0] == 404
    (proxy,) = await spans_of(receiver, trace_id, 1)
    assert (proxy.name, proxy.error, proxy.attributes["error.type"]) == ("GET", None, "no_route")


async def test_a_client_that_leaves_ends_its_trace(stack: Stack, receiver: OtlpReceiver) -> None:
    (replica,) = await stack.serve(R0)
    trace_id, headers = parent()
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(stack.get("/echo/hold", headers=headers))
        await replica.wait(lambda: len(replica.held) == 1)
        asking.cancel()
    proxy, attempt = await spans_of(receiver, trace_id, 2)
    assert proxy.attributes["error.type"] == "client_gone"
    assert "http.response.status_code" not in proxy.attributes | attempt.attributes


async def test_what_its_parent_did_not_sample_goes_on_so(stack: Stack, receiver: OtlpReceiver) -> None:
    (replica,) = await stack.serve(R0)
    _, headers = parent("00")
    await stack.get("/echo", headers=headers)
    assert replica.seen[-1].traceparent == headers["traceparent"]
    sampled, headers = parent()
    await stack.get("/echo", headers=headers)
    await spans_of(receiver, sampled, 2)
    assert {span.trace_id for span in receiver.spans} == {sampled}


async def test_nonsense_for_a_parent_begins_a_new_trace(stack: Stack, receiver: OtlpReceiver) -> None:
    (replica,) = await stack.serve(R0)
    _, _, headers = await stack.get("/echo", headers={"traceparent": "00-a-b-01", "tracestate": "x=1"})
    proxy, _ = await spans_of(receiver, trace_of(headers), 2)
    assert (proxy.parent_id, proxy.tracestate) == ("", "")
    assert replica.seen[-1].traceparent.startswith(f"00-{trace_of(headers)}-")


async def test_with_ratio_0_nothing_is_exported_and_replicas_are_told(
    shared_server: NatsServer, receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = receiver.environment(
        OTEL_TRACES_SAMPLER="parentbased_traceidratio", OTEL_TRACES_SAMPLER_ARG="0"
    )
    async with traced(shared_server, monkeypatch, environment) as stack:
        (replica,) = await stack.serve(R0)
        for _ in range(20):
            await stack.get("/echo")
        assert {head.traceparent[-3:] for head in replica.seen} == {"-00"}
        assert len({head.traceparent for head in replica.seen}) == 20
        assert all(trace_of({"X-Request-ID": head.request_id}) in head.traceparent for head in replica.seen)
        trace_id, headers = parent()
        await stack.get("/echo", headers=headers)  # its parent decides
        await spans_of(receiver, trace_id, 2)
    assert {span.trace_id for span in receiver.spans} == {trace_id}


async def test_the_standard_s_variables_are_heeded(
    shared_server: NatsServer, receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = receiver.environment(
        OTEL_EXPORTER_OTLP_HEADERS="api-key=open sesame",
        OTEL_EXPORTER_OTLP_COMPRESSION="gzip",
        OTEL_SERVICE_NAME="our-ingress",
        OTEL_RESOURCE_ATTRIBUTES="deployment.environment.name=test,team=a",
    )
    async with traced(shared_server, monkeypatch, environment) as stack:
        await stack.serve(R0)
        _, _, headers = await stack.get("/echo")
        proxy, _ = await spans_of(receiver, trace_of(headers), 2)
    assert receiver.headers[0]["api-key"] == "open sesame"
    assert receiver.headers[0]["content-encoding"] == "gzip"
    expected = {
        "service.name": "our-ingress",
        "service.instance.id": "p1",
        "deployment.environment.name": "test",
        "team": "a",
    }
    assert proxy.resource | expected == proxy.resource


async def test_a_receiver_that_is_dead_harms_nothing(
    shared_server: NatsServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    nobody = HeldPort()
    environment = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{nobody.port}",
        "OTEL_EXPORTER_OTLP_TIMEOUT": "3600",
        "OTEL_BSP_MAX_QUEUE_SIZE": "64",
        "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "16",
        "OTEL_BSP_SCHEDULE_DELAY": "20",
    }
    async with traced(shared_server, monkeypatch, environment) as stack:
        await stack.serve(R0)
        for _ in range(10):
            answers = await asyncio.gather(*(stack.get("/echo") for _ in range(20)))
            assert {status for status, _, _ in answers} == {200}
        counts = stack.proxy._tracing.counts
        assert counts.waiting <= 64
        await asyncio.to_thread(until, lambda: counts.dropped > 0)
        told = re.findall(
            r'^serve_trace_spans_dropped_total\{reason="(\w+)"\} (\S+)$', await stack.metrics(), re.MULTILINE
        )
        assert [reason for reason, _ in told] == ["queue", "receiver"]
        assert sum(float(number) for _, number in told) > 0
        async with asyncio.timeout(30):  # much less than what is allowed for sending
            await stack.proxy.close()
    nobody.release()
    told = [record.name for record in caplog.records if record.name.startswith("opentelemetry")]
    assert len(told) == len(set(told))


async def test_a_receiver_that_comes_back_is_sent_what_happens_then(
    stack: Stack, receiver: OtlpReceiver
) -> None:
    await stack.serve(R0)
    receiver.status = 400
    await stack.get("/echo")
    await asyncio.to_thread(until, lambda: receiver.headers)
    receiver.status = 200
    _, _, headers = await stack.get("/echo")
    await spans_of(receiver, trace_of(headers), 2)


def test_where_tracing_is_off_opentelemetry_s_sdk_is_never_imported(tmp_path: Path) -> None:
    program = (
        "import sys, serve_proxy.__main__, serve_proxy.wiring, serve_controller.wiring, muster.handles.runtime\n"
        "import serve_replica_host.replica.process, serve_replica_host.replica.user.python_calls, muster\n"
        "from serve_common.telemetry.request_traces import import_ahead, open_tracing\n"
        "from serve_common.telemetry.trace_context import read_tracing_settings\n"
        "settings = read_tracing_settings({'OTEL_EXPORTER_OTLP_ENDPOINT': '', 'OTEL_SERVICE_NAME': 'x'})\n"
        "import_ahead(settings); assert open_tracing(settings, 'a', 'b') is None\n"
        "print([name for name in sys.modules if name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter'))])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert done.stdout.strip() == "[]"
