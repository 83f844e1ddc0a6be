"""A tracer of OpenTelemetry's whose finished spans a test can look at."""

from __future__ import annotations

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Span, SpanKind

from serve_common.telemetry.otlp import RequestIds, build_sampler
from serve_common.telemetry.request_traces import Tracer
from serve_common.telemetry.trace_context import ALWAYS, Sampler


class RecordedSpans:
    """`tracer` and what it has ended."""

    def __init__(self, sampler: Sampler = ALWAYS) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(build_sampler(sampler), shutdown_on_exit=False, id_generator=RequestIds())
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = Tracer(sampler, provider.get_tracer("test"))

    def root(self, name: str = "root") -> Span:
        """Start the first span of a trace."""
        return self.tracer.start(name, SpanKind.SERVER, self.tracer.decide(""), {})

    @property
    def ended(self) -> list[ReadableSpan]:
        """The spans that have ended, in that order."""
        return list(self._exporter.get_finished_spans())

    @property
    def names(self) -> list[str]:
        """The names of the spans that have ended."""
        return [span.name for span in self.ended]


def parent_id(span: ReadableSpan) -> str:
    """The id of the span's parent; empty for the first span of a trace."""
    return "" if span.parent is None else f"{span.parent.span_id:016x}"


def span_id(span: ReadableSpan | Span) -> str:
    """The id of ``span``."""
    context = span.get_span_context()
    assert context is not None
    return f"{context.span_id:016x}"


def error_of(span: ReadableSpan) -> str | None:
    """The error text, possibly empty; None unless the span failed."""
    return None if span.status.is_ok or span.status.is_unset else span.status.description or ""
