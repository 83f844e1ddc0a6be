"""Tracing within one process: headers, decisions, and the spans of requests, operations and batches."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextvars import copy_context

import msgspec
import pytest
from opentelemetry.trace import SpanKind

from muster.batching.batches import below, end_batch_span, start_batch_span
from muster.handles.calls import end_call_span, get_headers, start_call
from serve_common.errors import BusUnavailable
from serve_common.names import ReplicaTag
from serve_common.runtime.request_context import RequestContext, request_context
from serve_common.telemetry.request_traces import (
    CHILDREN_MAX,
    TEXT_LENGTH_MAX,
    RequestTrace,
    current_cause,
    current_trace_id,
    end_request,
    get_trace_id,
    get_traceparent,
    note,
    operation,
    parse_span_context,
    part,
    request_attributes,
    set_process_tracer,
)
from serve_common.telemetry.trace_context import (
    ALWAYS,
    SAMPLERS,
    Sampler,
    TraceParent,
    headers_from_environment,
    join_tracestate,
    may_be_sampled,
    parse_traceparent,
    read_tracing_settings,
)
from serve_proxy.core.headers import read_request_headers
from serve_proxy.shell.request_observers import RequestTraces
from tests.support.recorded_spans import RecordedSpans, error_of, parent_id, span_id

TRACE = "0af7651916cd43dd8448eb211c80319c"
SPAN = "b7ad6b7169203331"
SAMPLED = f"00-{TRACE}-{SPAN}-01"
UNSAMPLED = f"00-{TRACE}-{SPAN}-00"
R0, R1 = ReplicaTag("default/a#0"), ReplicaTag("default/a#1")


@pytest.fixture
def world() -> Iterator[RecordedSpans]:
    world = RecordedSpans()
    set_process_tracer(world.tracer)
    yield world
    set_process_tracer(None)


# -- headers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "",
        "00-a-b-01",
        SAMPLED.upper(),
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"{SAMPLED}-more",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE[:-1]}٣-{SPAN}-01",
    ],
)
def test_what_is_no_traceparent_counts_as_none(text: str) -> None:
    assert parse_traceparent(text) is None


def test_a_traceparent_of_a_later_version_is_understood_as_far_as_it_is_known() -> None:
    assert parse_traceparent(f" cc-{TRACE}-{SPAN}-03-what-comes") == TraceParent(TRACE, SPAN, is_sampled=True)
    assert parse_traceparent(f"00-{TRACE}-{SPAN}-02") == TraceParent(TRACE, SPAN, is_sampled=False)


def test_only_what_certainly_says_no_is_not_looked_at() -> None:
    assert [may_be_sampled(text) for text in ("", UNSAMPLED, SAMPLED, "nonsense")] == [
        False,
        False,
        True,
        True,
    ]


@pytest.mark.parametrize(
    ("text", "usable"),
    [
        ("a=1", "a=1"),
        (" a=1 ,, b@c=x y ", "a=1,b@c=x y"),
        ("a=1,a=2", ""),
        ("A=1", ""),
        ("a", ""),
        ("a=ü", ""),
        (",".join(f"k{n}=1" for n in range(33)), ""),
        ("a=" + "x" * 256 + ",b=" + "x" * 256, ""),
    ],
)
def test_a_tracestate_is_passed_on_only_if_it_is_one(text: str, usable: str) -> None:
    parent = TraceParent(TRACE, SPAN, is_sampled=True)
    assert parse_span_context(parent, text).trace_state.to_header() == usable


def test_a_tracestate_in_several_headers_is_one_list() -> None:
    assert join_tracestate([(b"tracestate", b"a=1"), (b"x", b"y"), (b"tracestate", b"b=2")]) == "a=1,b=2"
    assert join_tracestate([(b"x", b"y")]) == ""


def test_a_program_that_is_run_in_a_trace_is_told_so_by_its_environment() -> None:
    assert (
        headers_from_environment({})
        == headers_from_environment({"TRACEPARENT": "no", "TRACESTATE": "a=1"})
        == {}
    )
    assert headers_from_environment({"TRACEPARENT": SAMPLED}) == {"traceparent": SAMPLED}
    told = headers_from_environment({"TRACEPARENT": SAMPLED, "TRACESTATE": "a=1"})
    assert told == {"traceparent": SAMPLED, "tracestate": "a=1"}
    for odd in ("a=1\r\nb: 2", "a=ü", "a=" + "x" * 600):
        assert headers_from_environment({"TRACEPARENT": SAMPLED, "TRACESTATE": odd}) == {
            "traceparent": SAMPLED
        }


# -- decisions --------------------------------------------------------------------------------------------------------


def test_a_parent_decides_where_it_is_respected() -> None:
    yes, no = TraceParent(TRACE, SPAN, is_sampled=True), TraceParent(TRACE, SPAN, is_sampled=False)
    never = SAMPLERS["parentbased_always_off"]
    assert [never.decide(parent, TRACE) for parent in (yes, no, None)] == [True, False, False]
    assert [ALWAYS.decide(parent, TRACE) for parent in (yes, no, None)] == [True, False, True]
    assert [SAMPLERS["always_on"].decide(parent, TRACE) for parent in (yes, no, None)] == [True] * 3
    assert [SAMPLERS["always_off"].decide(parent, TRACE) for parent in (yes, no, None)] == [False] * 3


def test_the_ratio_decides_by_the_trace_s_id_as_opentelemetry_does() -> None:
    half = Sampler(ratio=0.5)
    low, high = "f" * 16 + "7" + "f" * 15, "0" * 16 + "8" + "0" * 15
    assert (half.decide(None, low), half.decide(None, high)) == (True, False)
    assert not Sampler(ratio=0.0).decide(None, "1" + "0" * 31)
    assert Sampler(ratio=1.0).decide(None, "f" * 32)


def test_tracing_is_off_without_an_endpoint_and_where_it_is_switched_off() -> None:
    on = {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://x/v1/traces"}
    assert read_tracing_settings({}) is None
    assert read_tracing_settings({"OTEL_EXPORTER_OTLP_ENDPOINT": " "}) is None
    assert read_tracing_settings({**on, "OTEL_SDK_DISABLED": "True"}) is None
    assert read_tracing_settings({**on, "OTEL_TRACES_EXPORTER": "none"}) is None
    settings = read_tracing_settings({**on, "OTEL_TRACES_EXPORTER": "console,otlp", "HOME": "/"})
    assert settings is not None
    assert (settings.sampler, settings.complaints) == (ALWAYS, [])
    assert set(settings.variables) == {*on, "OTEL_TRACES_EXPORTER"}


@pytest.mark.parametrize(
    ("name", "argument", "sampler", "complaints"),
    [
        ("parentbased_traceidratio", "0.25", Sampler(ratio=0.25), 0),
        ("TraceIdRatio", "0", Sampler(ratio=0.0, respects_parent=False), 0),
        ("always_off", "0.5", SAMPLERS["always_off"], 0),
        ("parentbased_traceidratio", "", ALWAYS, 0),
        ("parentbased_traceidratio", "many", ALWAYS, 1),
        ("parentbased_traceidratio", "nan", ALWAYS, 1),
        ("parentbased_traceidratio", "1.5", ALWAYS, 1),
        ("jaeger_remote", "", ALWAYS, 1),
    ],
)
def test_samplers_are_read_as_the_standard_names_them(
    name: str, argument: str, sampler: Sampler, complaints: int
) -> None:
    settings = read_tracing_settings(
        {
            "OTEL_EXPORTER_OTLP_ENDPOINT": "http://x",
            "OTEL_TRACES_SAMPLER": name,
            "OTEL_TRACES_SAMPLER_ARG": argument,
        }
    )
    assert settings is not None
    assert (settings.sampler, len(settings.complaints)) == (sampler, complaints)


# -- spans of requests ------------------------------------------------------------------------------------------------


def test_a_request_that_waits_is_refused_and_sent_again_has_a_span_for_each(world: RecordedSpans) -> None:
    trace = RequestTrace(world.tracer, world.root())
    trace.waits("replica")
    first = parse_traceparent(trace.attempt_started(R0, may_queue=False))
    trace.attempt_failed("busy", "no room")
    trace.attempt_ended(0)
    second = parse_traceparent(trace.attempt_started(R1, may_queue=True))
    trace.attempt_ended(200)
    trace.end()
    queue, refused, answered, root = world.ended
    assert world.names == ["queue", "attempt default/a", "attempt default/a", "root"]
    times = [root.start_time, queue.start_time, queue.end_time, refused.start_time, refused.end_time]
    assert times == sorted(times)
    assert first is not None
    assert second is not None
    assert (first.span_id, second.span_id) == (span_id(refused), span_id(answered))
    assert {parent_id(span) for span in (queue, refused, answered)} == {span_id(root)}
    assert len({span.context.trace_id for span in world.ended}) == 1
    assert (error_of(refused), refused.attributes["error.type"]) == ("no room", "busy")
    assert (error_of(answered), answered.attributes["muster.waits_in_replica"]) == (None, True)
    assert root.attributes["muster.attempts"] == 2


def test_whatever_ends_a_request_ends_all_its_spans_once(world: RecordedSpans) -> None:
    trace = RequestTrace(world.tracer, world.root())
    trace.attempt_started(R0, may_queue=False)
    end_request(trace, 499)
    end_request(trace, 500)
    trace.attempt_ended(200)
    assert world.names == ["attempt default/a", "root"]
    assert world.ended[1].attributes == {"error.type": "client_gone"}
    assert error_of(world.ended[1]) is None


def test_a_request_that_is_sent_on_and_on_fills_no_trace(world: RecordedSpans) -> None:
    trace = RequestTrace(world.tracer, world.root())
    for _ in range(3 * CHILDREN_MAX):
        assert parse_traceparent(trace.attempt_started(R0, may_queue=False)) is not None
    trace.end()
    assert len(world.ended) == CHILDREN_MAX + 1
    assert world.ended[-1].attributes["muster.attempts"] == 3 * CHILDREN_MAX


def test_statuses_below_500_are_no_failures_of_a_server(world: RecordedSpans) -> None:
    for status, error in ((404, None), (500, ""), (503, "")):
        trace = RequestTrace(world.tracer, world.root())
        end_request(trace, status)
        assert error_of(world.ended[-1]) == error
    trace = RequestTrace(world.tracer, world.root())
    end_request(trace, 503, "queue_full", "100 wait")
    assert (error_of(world.ended[-1]), world.ended[-1].attributes["error.type"]) == ("100 wait", "queue_full")


def test_what_is_long_or_unknown_is_cut_before_it_becomes_an_attribute() -> None:
    attributes = request_attributes("BREW" * 1000, "/" + "x" * 5000, "http", "r")
    assert attributes["http.request.method"] == "_OTHER"
    assert all(len(str(value)) <= TEXT_LENGTH_MAX for value in attributes.values())


def test_no_span_ends_before_it_begins(world: RecordedSpans, monkeypatch: pytest.MonkeyPatch) -> None:
    span = world.root()
    monkeypatch.setattr(time, "time_ns", lambda: 1_000)  # the wall clock is set back
    world.tracer.end(span)
    (ended,) = world.ended
    assert ended.start_time <= ended.end_time


# -- where requests come in -------------------------------------------------------------------------------------------


def begun(world: RecordedSpans, request_id: str, **headers: str) -> tuple[RequestTrace | None, str]:
    read = read_request_headers([(name.encode(), value.encode()) for name, value in headers.items()])
    RequestTraces(world.tracer).start(read, "GET", "/a", "http", request_id)
    trace = read.observer
    assert trace is None or isinstance(trace, RequestTrace)
    return trace, read.traceparent


def test_a_trace_that_begins_here_is_named_after_its_request(world: RecordedSpans) -> None:
    trace, traceparent = begun(world, TRACE)
    assert trace is not None
    assert (get_trace_id(trace.span), parent_id(trace.span)) == (TRACE, "")
    assert traceparent == get_traceparent(trace.span)
    for chosen in ("mine", TRACE):
        trace, _ = begun(world, chosen, **{"x-request-id": chosen})
        assert trace is not None
        assert get_trace_id(trace.span) not in ("mine", TRACE)


def test_what_is_not_sampled_goes_on_as_decided(world: RecordedSpans) -> None:
    assert begun(world, TRACE, traceparent=UNSAMPLED) == (None, UNSAMPLED)
    none = RecordedSpans(Sampler(ratio=0.0))
    assert begun(none, TRACE) == (None, f"00-{TRACE}-{TRACE[:16]}-00")
    assert begun(none, TRACE, traceparent="nonsense")[1].endswith("-00")
    trace, _ = begun(none, TRACE, traceparent=SAMPLED, tracestate="a=1")
    assert trace is not None
    assert (parent_id(trace.span), trace.span.parent.is_remote) == (SPAN, True)
    assert trace.span.get_span_context().trace_state.to_header() == "a=1"


# -- handles and batches ----------------------------------------------------------------------------------------------


def test_a_call_is_below_the_span_of_its_request_and_takes_the_state_along(world: RecordedSpans) -> None:
    context = RequestContext(request_id="r", traceparent=SAMPLED, tracestate="a=1")
    trace, traceparent = start_call(world.tracer, context, "default/b", "")
    assert trace is not None
    assert (parent_id(trace.span), traceparent) == (SPAN, get_traceparent(trace.span))
    assert get_headers(trace) == [(b"tracestate", b"a=1")]
    end_call_span(trace, BusUnavailable("away"))
    assert (error_of(world.ended[0]), world.ended[0].attributes["error.type"]) == ("away", "bus_unavailable")


def test_a_call_of_an_unsampled_request_has_no_span(world: RecordedSpans) -> None:
    context = RequestContext(traceparent=UNSAMPLED)
    assert start_call(world.tracer, context, "default/b", "") == (None, UNSAMPLED)
    assert get_headers(None) == []


def test_a_call_that_belongs_to_no_request_begins_a_trace(world: RecordedSpans) -> None:
    trace, _ = start_call(world.tracer, None, "default/b", "m")
    assert trace is not None
    assert parent_id(trace.span) == ""
    trace, traceparent = start_call(RecordedSpans(Sampler(ratio=0.0)).tracer, None, "default/b", "m")
    assert trace is None
    assert traceparent.endswith("-00")


def test_a_batch_is_below_its_first_traced_request_and_linked_to_the_others(world: RecordedSpans) -> None:
    other = f"00-{'1' * 32}-{'2' * 16}-01"
    contexts = [
        RequestContext(traceparent=UNSAMPLED),
        None,
        RequestContext(traceparent=SAMPLED),
        RequestContext(traceparent=other),
    ]
    span = copy_context().run(start_batch_span, "Model.run", contexts)
    assert span is not None
    assert (parent_id(span), span.attributes["muster.batch_size"]) == (SPAN, 4)
    assert [f"{link.context.trace_id:x}" for link in span.links] == ["1" * 32]
    context = below(span, contexts[0])
    assert context is not None
    assert context.traceparent == get_traceparent(span)
    end_batch_span(span, ValueError("odd"))
    assert error_of(world.ended[0]) == "ValueError: odd"
    assert start_batch_span("Model.run", [RequestContext(traceparent=UNSAMPLED), None]) is None
    set_process_tracer(None)
    assert start_batch_span("Model.run", contexts) is None


# -- operations -------------------------------------------------------------------------------------------------------


def test_operations_and_their_parts_are_one_trace(world: RecordedSpans) -> None:
    with operation("admin deploy", kind=SpanKind.SERVER, traceparent=SAMPLED) as span:
        assert current_trace_id() == TRACE
        note("muster.subject", "default/m")
        with part("record_command"):
            pass
        cause = current_cause()
    assert current_trace_id() == ""
    with operation("reconcile", after=cause, seconds_ago=1e-9), part("record_plan"):
        pass
    record, deploy, record_plan, reconcile = world.ended
    assert span_id(span) == span_id(deploy)
    assert (parent_id(record), parent_id(deploy)) == (span_id(deploy), SPAN)
    assert (parent_id(reconcile), parent_id(record_plan)) == (span_id(deploy), span_id(reconcile))
    assert deploy.attributes == {"muster.subject": "default/m"}
    assert (deploy.parent.is_remote, reconcile.parent.is_remote) == (True, False)


def test_an_operation_that_fails_says_why(world: RecordedSpans) -> None:
    with pytest.raises(ValueError, match="odd"), operation("o"), part("p"):
        raise ValueError("odd")
    assert [(error_of(span), span.attributes["error.type"]) for span in world.ended] == [
        ("odd", "ValueError")
    ] * 2


def test_a_part_of_nothing_and_what_is_unsampled_have_no_span(world: RecordedSpans) -> None:
    with part("alone") as span:
        assert span is None
    with operation("o", traceparent=UNSAMPLED) as span:
        assert span is None
        note("a", 1)
    set_process_tracer(None)
    with operation("o") as span:
        assert span is None
    assert world.ended == []


def test_logs_are_told_the_trace_of_the_request_sampled_or_not() -> None:
    context = RequestContext(traceparent=UNSAMPLED)
    assert context.trace_id == TRACE
    token = request_context.set(context)
    try:
        assert current_trace_id() == TRACE
        request_context.set(msgspec.structs.replace(context, traceparent="nonsense"))
        assert current_trace_id() == ""
    finally:
        request_context.reset(token)
