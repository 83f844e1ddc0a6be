"""Trace Context for any ids, and for any text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from serve_common.telemetry.spans import (
    TRACESTATE_LENGTH_MAX,
    SpanRef,
    may_be_sampled,
    parse_traceparent,
    usable_tracestate,
)
from serve_common.telemetry.tracer import Sampler

TRACE_IDS = st.integers(1, 2**128 - 1).map(lambda bits: f"{bits:032x}")
SPAN_IDS = st.integers(1, 2**64 - 1).map(lambda bits: f"{bits:016x}")
REFS = st.builds(SpanRef, TRACE_IDS, SPAN_IDS, st.booleans())
MESSY = st.text(alphabet=st.sampled_from("abcz019-_@=, *A/\tü"), max_size=80)


@given(REFS)
def test_what_is_written_is_read_again(ref: SpanRef) -> None:
    assert parse_traceparent(ref.traceparent) == ref
    assert may_be_sampled(ref.traceparent) == ref.is_sampled


@given(st.text() | st.from_regex(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}.{0,3}"))
def test_any_text_is_read_without_harm_and_never_sampled_against_its_word(text: str) -> None:
    ref = parse_traceparent(text)
    if ref is not None:
        assert parse_traceparent(ref.traceparent) == ref
        assert may_be_sampled(text) or not ref.is_sampled


@given(MESSY)
def test_a_usable_tracestate_stays_as_it_is(text: str) -> None:
    usable = usable_tracestate(text)
    assert usable_tracestate(usable) == usable
    assert len(usable) <= TRACESTATE_LENGTH_MAX
    assert usable.isascii()


@given(TRACE_IDS, st.floats(0, 1), st.floats(0, 1))
def test_who_is_sampled_by_a_ratio_is_sampled_by_every_larger_one(
    trace_id: str, one: float, other: float
) -> None:
    low, high = sorted((one, other))
    assert not Sampler(ratio=low).decide(None, trace_id) or Sampler(ratio=high).decide(None, trace_id)
