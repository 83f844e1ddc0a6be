"""Spans of user code beside ours, and on their way out."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextvars import copy_context

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.trace import StatusCode

from serve_common.names import BackendTag, ReplicaTag
from serve_common.runtime.request_context import RequestContext, request_context
from serve_common.telemetry import otlp
from serve_common.telemetry.otlp import Counts, OtlpTracing, RequestIds, UserSampler
from serve_common.telemetry.request_traces import TEXT_LENGTH_MAX
from serve_common.telemetry.trace_context import ALWAYS, Sampler, TraceParent, TracingSettings
from serve_replica_host.replica.telemetry.traces import ReplicaRequestTrace, Traces
from serve_replica_host.replica.user import code as user_code
from tests.support.recorded_spans import error_of, parent_id, span_id

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
UNSAMPLED = f"00-{TRACE}-{PARENT}-00"


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> list[ReadableSpan]:
    """What the receiver has taken."""
    spans: list[ReadableSpan] = []

    def export(_: object, batch: list[ReadableSpan]) -> otlp.SpanExportResult:
        spans.extend(batch)
        return otlp.SpanExportResult.SUCCESS

    monkeypatch.setattr(otlp.OTLPSpanExporter, "export", export)
    return spans


@pytest.fixture
def tracing(exported: list[ReadableSpan]) -> Iterator[OtlpTracing]:
    tracing = OtlpTracing(TracingSettings(), "muster-replica", "default/a#0", {})
    yield tracing
    tracing.close(10)


def begin(tracing: OtlpTracing) -> ReplicaRequestTrace:
    return Traces(tracing.tracer, BackendTag("default/a"), ReplicaTag("default/a#0")).start(
        TraceParent(TRACE, PARENT, is_sampled=True),
        tracestate="a=1,b=2",
        kind="http",
        method_name="",
        request_id="r",
        started_at=1.0,
    )


def test_a_request_is_exported_as_its_two_spans(tracing: OtlpTracing, exported: list[ReadableSpan]) -> None:
    spans = begin(tracing)
    spans.code_raised(ValueError("odd"), "ValueError: odd")
    spans.code_ended(500, "", "")
    spans.end(500, 3.0)
    spans.end(200, 4.0)
    tracing.close(10)
    code, request = exported
    assert (code.name, request.name) == ("user code __call__", "replica default/a")
    assert (parent_id(code), parent_id(request)) == (span_id(request), PARENT)
    assert request.parent is not None
    assert request.parent.is_remote
    assert request.context is not None
    assert dict(request.context.trace_state) == {"a": "1", "b": "2"}
    assert (error_of(code), error_of(request)) == ("ValueError: odd", "ValueError: odd")
    assert [event.name for event in code.events] == ["exception"]
    assert request.end_time is not None
    assert request.start_time is not None
    assert request.end_time - request.start_time == 2_000_000_000
    assert request.resource.attributes["service.name"] == "muster-replica"
    assert tracing.counts.dropped == 0


def test_user_code_may_add_to_its_span(tracing: OtlpTracing, exported: list[ReadableSpan]) -> None:
    spans = begin(tracing)

    def code() -> None:
        user_code._enter(spans.user_code)
        seen = trace.get_current_span()
        seen.set_attributes({"model": "m", "sizes": [1, 2], "text": "x" * 5_000})
        seen.record_exception(ValueError("odd"))
        seen.set_status(StatusCode.ERROR, "not good")
        seen.update_name("mine")
        assert (seen.attributes["sizes"], len(seen.attributes["text"])) == ((1, 2), TEXT_LENGTH_MAX)
        assert seen.events[0].attributes["exception.message"] == "odd"
        for number in range(500):
            seen.set_attribute(f"k{number}", number)
            seen.add_event("e")

    copy_context().run(code)
    spans.code_ended(200, "", "")
    spans.end(200, 2.0)
    tracing.close(10)
    code_span, request = exported
    assert (code_span.name, error_of(code_span), error_of(request)) == ("mine", "not good", None)
    assert (len(code_span.attributes), len(code_span.events)) == (128, 128)


def test_user_code_that_ends_its_span_ends_no_other(
    tracing: OtlpTracing, exported: list[ReadableSpan]
) -> None:
    spans = begin(tracing)
    spans.user_code.end()
    spans.user_code.set_attribute("late", 1)
    spans.code_ended(500, "ValueError", "odd")
    spans.end(500, 2.0)
    tracing.close(10)
    code, request = exported
    assert "late" not in code.attributes
    assert (error_of(request), request.attributes["http.response.status_code"]) == ("odd", 500)


def test_user_code_that_shuts_down_its_provider_ends_no_tracing(
    tracing: OtlpTracing, exported: list[ReadableSpan]
) -> None:
    tracing._provide(UserSampler(ALWAYS)).shutdown()
    spans = begin(tracing)
    spans.end(200, 2.0)
    tracing.close(10)
    assert [span.name for span in exported] == ["replica default/a"]


def test_ids_do_not_repeat_where_user_code_seeds_the_random_numbers() -> None:
    ids = RequestIds()
    drawn = set()
    for _ in range(2):
        random.seed(7)
        drawn |= {ids.generate_span_id(), ids.generate_trace_id()}
    assert len(drawn) == 4


def test_user_code_s_own_spans_follow_the_decision_about_their_request() -> None:
    sampler = UserSampler(ALWAYS)

    def decision(traceparent: str | None, sampler: UserSampler = sampler) -> Decision:
        def code() -> Decision:
            if traceparent is not None:
                request_context.set(RequestContext(traceparent=traceparent))
            return sampler.should_sample(None, 1, "own").decision

        return copy_context().run(code)

    assert decision(UNSAMPLED) is Decision.DROP
    assert decision(None) is Decision.RECORD_AND_SAMPLE  # it belongs to no request
    assert decision(None, UserSampler(Sampler(ratio=0.0))) is Decision.DROP


def test_code_with_an_sdk_of_its_own_is_told_that_its_request_is_not_sampled() -> None:
    def code() -> None:
        user_code._enter_unsampled(TraceParent(TRACE, PARENT, is_sampled=False))
        seen = trace.get_current_span()
        assert f"{seen.get_span_context().trace_id:032x}" == TRACE
        assert not seen.get_span_context().trace_flags.sampled
        assert not seen.is_recording()

    copy_context().run(code)


def test_what_waits_is_bounded_and_what_is_lost_is_counted() -> None:
    counts = Counts(waiting_max=3)
    assert [counts.may_wait() for _ in range(5)] == [True, True, True, False, False]
    counts.leave(3)
    counts.drop(1)
    assert (counts.waiting, counts.dropped) == (0, 3)
    assert counts.dropped_by_reason == {"queue": 2, "receiver": 1}
    assert counts.may_wait()
