"""Trace Context for any ids, and for any text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from serve_common.telemetry.otlp import build_sampler
from serve_common.telemetry.request_traces import parse_span_context
from serve_common.telemetry.trace_context import (
    TRACESTATE_LENGTH_MAX,
    Sampler,
    TraceParent,
    may_be_sampled,
    parse_traceparent,
)

TRACE_IDS = st.integers(1, 2**128 - 1).map(lambda bits: f"{bits:032x}")
SPAN_IDS = st.integers(1, 2**64 - 1).map(lambda bits: f"{bits:016x}")
PARENTS = st.builds(TraceParent, TRACE_IDS, SPAN_IDS, st.booleans())
MESSY = st.text(alphabet=st.sampled_from("abcz019-_@=, *A/\tü"), max_size=80)


@given(PARENTS)
def test_what_is_written_is_read_again(parent: TraceParent) -> None:
    assert parse_traceparent(parent.header) == parent
    assert may_be_sampled(parent.header) == parent.is_sampled
    context = parse_span_context(parent)
    assert (context.is_valid, context.trace_flags.sampled) == (True, parent.is_sampled)


@given(st.text() | st.from_regex(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}.{0,3}", fullmatch=True))
def test_any_text_is_read_without_harm_and_never_sampled_against_its_word(text: str) -> None:
    parent = parse_traceparent(text)
    extracted = trace.get_current_span(TraceContextTextMapPropagator().extract({"traceparent": text}))
    context = extracted.get_span_context()
    assert context.is_valid == (parent is not None)  # as OpenTelemetry reads it
    if parent is not None:
        assert context == parse_span_context(parent)[:3] + context[3:]
        assert context.trace_flags.sampled == parent.is_sampled
        assert parse_traceparent(parent.header) == parent
        assert may_be_sampled(text) or not parent.is_sampled


@given(MESSY)
def test_a_usable_tracestate_stays_as_it_is(text: str) -> None:
    parent = TraceParent("1" * 32, "2" * 16, is_sampled=True)
    usable = parse_span_context(parent, text).trace_state.to_header()
    assert parse_span_context(parent, usable).trace_state.to_header() == usable
    assert len(usable) <= TRACESTATE_LENGTH_MAX
    assert usable.isascii()


@given(TRACE_IDS, st.floats(0, 1))
def test_the_cheap_decision_is_that_of_opentelemetry_s_sampler(trace_id: str, ratio: float) -> None:
    sampler = Sampler(ratio=ratio)
    result = build_sampler(sampler).should_sample(Context(), int(trace_id, 16), "root")
    assert result.decision.is_sampled() == sampler.decide(None, trace_id)


@given(TRACE_IDS, st.floats(0, 1), st.floats(0, 1))
def test_who_is_sampled_by_a_ratio_is_sampled_by_every_larger_one(
    trace_id: str, one: float, other: float
) -> None:
    low, high = sorted((one, other))
    assert not Sampler(ratio=low).decide(None, trace_id) or Sampler(ratio=high).decide(None, trace_id)
