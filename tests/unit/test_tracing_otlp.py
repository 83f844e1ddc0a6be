"""Our spans in OpenTelemetry's words: in user code, and on their way out."""

from __future__ import annotations

from contextvars import copy_context

import pytest
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.trace import StatusCode

from serve_common.runtime.request_context import RequestContext, request_context
from serve_common.telemetry import otlp_export as otlp_spans
from serve_common.telemetry.otlp_export import Counts
from serve_common.telemetry.spans import TEXT_LENGTH_MAX, Span, SpanKind, SpanRef
from serve_common.telemetry.tracer import ALWAYS, Sampler, Tracer

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
UNSAMPLED = f"00-{TRACE}-{PARENT}-00"


@pytest.fixture
def tracer() -> Tracer:
    return Tracer(ALWAYS, emit=lambda _: None, monotonic_ns=lambda: 7, wall_ns=1_000, random_bits=lambda _: 5)


@pytest.fixture
def span(tracer: Tracer) -> Span:
    parent = SpanRef(TRACE, PARENT, is_sampled=True, tracestate="a=1,b=2")
    link = SpanRef("1" * 32, "2" * 16, is_sampled=True)
    return tracer.start_sampled(
        "GET /a", SpanKind.SERVER, parent, {"n": 1}, is_parent_remote=True, links=(link,)
    )


def test_a_record_becomes_the_span_that_it_describes(tracer: Tracer, span: Span) -> None:
    tracer.end(span, "it broke")
    resource = Resource({"service.name": "s"})
    made = otlp_spans.readable(span, resource)
    context, parent = made.get_span_context(), made.parent
    assert context is not None
    assert parent is not None
    assert (f"{context.trace_id:032x}", context.span_id) == (TRACE, 5)
    assert (f"{parent.span_id:016x}", parent.is_remote) == (PARENT, True)
    assert dict(context.trace_state) == {"a": "1", "b": "2"}
    assert (made.start_time, made.end_time, made.kind) == (1_000, 1_000, trace.SpanKind.SERVER)
    assert (made.status.status_code, made.status.description) == (StatusCode.ERROR, "it broke")
    assert [f"{link.context.trace_id:x}" for link in made.links] == ["1" * 32]
    assert (made.resource, made.attributes) == (resource, {"n": 1})


def test_the_first_span_of_a_trace_has_no_parent(tracer: Tracer) -> None:
    span = tracer.start_sampled("x", SpanKind.CLIENT, None, {})
    tracer.end(span)
    made = otlp_spans.readable(span, Resource({}))
    assert (made.parent, made.status.status_code) == (None, StatusCode.UNSET)


def test_user_code_may_add_to_its_span_and_not_end_it(tracer: Tracer, span: Span) -> None:
    def code() -> None:
        otlp_spans.enter(span, tracer)
        assert otlp_spans.entered() == span.ref
        seen = trace.get_current_span()
        seen.set_attributes({"model": "m", "sizes": [1, 2], "text": "x" * 5_000})
        seen.record_exception(ValueError("odd"))
        seen.set_status(StatusCode.ERROR, "not good")
        seen.update_name("mine")
        seen.end()
        for number in range(500):
            seen.set_attribute(f"k{number}", number)
            seen.add_event("e")

    copy_context().run(code)
    assert (span.ended_ns, span.name, span.error) == (0, "mine", "not good")
    assert span.attributes["sizes"] == "[1, 2]"
    assert len(str(span.attributes["text"])) == TEXT_LENGTH_MAX
    assert len(span.attributes) == otlp_spans.ATTRIBUTES_MAX
    assert len(span.events) == otlp_spans.EVENTS_MAX
    assert span.events[0].attributes["exception.message"] == "odd"
    assert otlp_spans.entered() is None


def test_what_has_ended_is_not_changed_any_more(tracer: Tracer, span: Span) -> None:
    seen = otlp_spans.UserSpan(span, tracer)
    tracer.end(span)
    seen.set_attribute("late", 1)
    seen.add_event("late")
    seen.set_status(StatusCode.ERROR)
    assert (seen.is_recording(), span.attributes, span.events, span.error) == (False, {"n": 1}, [], None)


def test_user_code_s_own_spans_follow_the_decision_about_their_request() -> None:
    sampler = otlp_spans.UserSampler(ALWAYS)

    def decision(traceparent: str | None, sampler: otlp_spans.UserSampler = sampler) -> Decision:
        def code() -> Decision:
            if traceparent is not None:
                request_context.set(RequestContext(traceparent=traceparent))
            return sampler.should_sample(None, 1, "own").decision

        return copy_context().run(code)

    assert decision(UNSAMPLED) is Decision.DROP
    assert decision(None) is Decision.RECORD_AND_SAMPLE  # it belongs to no request
    assert decision(None, otlp_spans.UserSampler(Sampler(ratio=0.0))) is Decision.DROP


def test_code_with_an_sdk_of_its_own_is_told_that_its_request_is_not_sampled() -> None:
    ref = SpanRef(TRACE, PARENT, is_sampled=False)

    def code() -> None:
        otlp_spans.enter_unsampled(ref)
        assert otlp_spans.entered() == ref
        assert not trace.get_current_span().is_recording()

    copy_context().run(code)


def test_what_waits_is_bounded_and_what_is_lost_is_counted() -> None:
    counts = Counts(waiting_max=3)
    assert [counts.may_wait() for _ in range(5)] == [True, True, True, False, False]
    counts.leave(3)
    counts.end(2, is_taken=True)
    counts.end(1, is_taken=False)
    assert (counts.waiting, counts.exported, counts.dropped) == (0, 2, 3)
    assert counts.dropped_by_reason == {"queue": 2, "receiver": 1}
    assert counts.may_wait()
