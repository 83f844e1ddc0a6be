"""Spans on their way out: OTLP over HTTP, from a thread of OpenTelemetry's SDK and through its bounded queue.

Why our own count of what waits: the SDK drops what is too much with a warning for each and counts nothing. And why our
records are turned into the SDK's spans only in its thread: requests do not wait for that.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Final, final

import structlog
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace import Span as SdkSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import SpanContext, TraceFlags

from serve_common.adapters import otlp_spans
from serve_common.adapters.otlp import DROPPED_AT_QUEUE, DROPPED_AT_RECEIVER
from serve_common.bus.quiet_log import QuietLog
from serve_common.tracing.process import process_tracer, set_process_tracer
from serve_common.tracing.settings import TracingSettings
from serve_common.tracing.spans import Span
from serve_common.tracing.tracer import Tracer

_log = structlog.get_logger(__name__)

QUEUE_MAX_DEFAULT: Final = 2048
"""Spans that wait; OTEL_BSP_MAX_QUEUE_SIZE's default."""
LOG_INTERVAL_S: Final = 60.0
_LOUD: Final = (
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.exporter.otlp.common.http",
    "opentelemetry.sdk.trace.export",
    "opentelemetry.sdk._shared_internal",
)
"""Loggers of the SDK that speak of every batch and every span that is lost."""
_ANY_SAMPLED: Final = SpanContext(1, 1, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))


@final
class _Rarely(logging.Filter):
    """Lets a line of each logger through now and then; they are not silenced, for user code may use them too."""

    def __init__(self) -> None:
        super().__init__()
        self._last_s: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """See `logging.Filter`."""
        now_s = time.monotonic()
        if now_s - self._last_s.get(record.name, float("-inf")) < LOG_INTERVAL_S:
            return False
        self._last_s[record.name] = now_s
        return True


_rarely: Final = _Rarely()


@final
class OtlpTracing:
    """An `OpenTracing`."""

    def __init__(
        self, settings: TracingSettings, service: str, instance_id: str, attributes: Mapping[str, str]
    ) -> None:
        for name in _LOUD:
            logging.getLogger(name).addFilter(_rarely)
        for complaint in settings.complaints:
            _log.warning("tracing_setting_ignored", reason=complaint)
        self._settings = settings
        self._resource = _resource(service, instance_id, attributes)
        self._exporter = _Exporter(self._resource)
        self._processor = BatchSpanProcessor(self._exporter)
        self.counts: Final = self._exporter.counts
        self._entrance = _Entrance(self._processor, self.counts)
        chance = random.Random(random.SystemRandom().getrandbits(128))  # noqa: S311 - unique, not secret
        self.tracer: Final = Tracer(
            settings.sampler,
            emit=self._entrance.take,
            monotonic_ns=time.monotonic_ns,
            wall_ns=time.time_ns(),
            draw_bits=chance.getrandbits,
            enter=lambda span: otlp_spans.enter(span, self.tracer),
            entered=otlp_spans.entered,
        )
        self._provider: TracerProvider | None = None
        _log.info("tracing_on", service=service, ratio=settings.sampler.ratio)

    def serve_user_code(self) -> None:
        """See `OpenTracing`; to be called after the user's code was imported, which may bring an SDK of its own."""
        if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
            sampler = otlp_spans.UserSampler(self._settings.sampler)
            self._provider = TracerProvider(sampler, self._resource, shutdown_on_exit=False)
            self._provider.add_span_processor(self._entrance)
            trace.set_tracer_provider(self._provider)
        elif self._provider is None:
            # Its own sampler looks at the current span, and knows nothing of requests.
            self.tracer.enter_unsampled = otlp_spans.enter_unsampled

    def close(self, timeout_s: float) -> None:
        """See `OpenTracing`."""
        if process_tracer() is self.tracer:
            set_process_tracer(None)
        # The SDK's own shutdown waits for half a minute when the receiver is dead; so it does that by itself.
        closing = threading.Thread(target=self._close, name="tracing-close", daemon=True)
        closing.start()
        closing.join(timeout_s)
        if closing.is_alive():
            self._exporter.shutdown()  # it then tries no more
            _log.warning("spans_not_sent", waiting=self.counts.waiting)

    def _close(self) -> None:
        self._processor.shutdown()  # type: ignore[no-untyped-call]  # the library's


@final
class Counts:
    """A `SpanCounts`; changed under a lock, for spans come from several threads."""

    def __init__(self, waiting_max: int) -> None:
        self.exported = 0
        self.dropped_by_reason = {DROPPED_AT_QUEUE: 0, DROPPED_AT_RECEIVER: 0}
        self.waiting = 0
        self._waiting_max = waiting_max
        self._lock = threading.Lock()

    @property
    def dropped(self) -> int:
        """All that was lost."""
        return sum(self.dropped_by_reason.values())

    def may_wait(self) -> bool:
        """One more comes; False when it is too much."""
        with self._lock:
            if self.waiting >= self._waiting_max:
                self.dropped_by_reason[DROPPED_AT_QUEUE] += 1
                return False
            self.waiting += 1
            return True

    def leave(self, count: int) -> None:
        """So many no longer wait."""
        with self._lock:
            self.waiting -= count

    def end(self, count: int, *, is_taken: bool) -> None:
        """So many were sent, or lost."""
        with self._lock:
            if is_taken:
                self.exported += count
            else:
                self.dropped_by_reason[DROPPED_AT_RECEIVER] += count


@final
class _Late(ReadableSpan):
    """A record in the SDK's queue."""

    def __init__(self, span: Span) -> None:
        self.span = span

    @property
    def context(self) -> SpanContext:
        """The processor asks whether it is sampled."""
        return _ANY_SAMPLED


@final
class _Entrance(SpanProcessor):
    """Where all spans come in: ours, and those that user code makes by the SDK."""

    def __init__(self, processor: BatchSpanProcessor, counts: Counts) -> None:
        self._processor = processor
        self._counts = counts

    def take(self, span: Span) -> None:
        """One of ours has ended."""
        if self._counts.may_wait():
            self._processor.on_end(_Late(span))

    def on_start(self, span: SdkSpan, parent_context: otel_context.Context | None = None) -> None:
        """See `SpanProcessor`."""

    def on_end(self, span: ReadableSpan) -> None:
        """See `SpanProcessor`."""
        context = span.get_span_context()
        if context is not None and context.trace_flags.sampled and self._counts.may_wait():
            self._processor.on_end(span)

    def shutdown(self) -> None:
        """See `SpanProcessor`; whoever opened the way out closes it."""

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """See `SpanProcessor`."""
        return self._processor.force_flush(timeout_millis)


@final
class _Exporter(SpanExporter):
    """The SDK's exporter, with a count; runs in the SDK's thread."""

    def __init__(self, resource: Resource) -> None:
        self.counts: Final = Counts(_queue_max())
        self._resource = resource
        self._inner = OTLPSpanExporter()
        self._losses = QuietLog(_log.warning, LOG_INTERVAL_S)
        self._is_closed = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """See `SpanExporter`."""
        count = len(spans)
        self.counts.leave(count)
        result, reason = SpanExportResult.FAILURE, "the receiver did not take them"
        try:
            whole = [
                otlp_spans.readable(span.span, self._resource) if isinstance(span, _Late) else span
                for span in spans
            ]
            result = self._inner.export(whole)
        except Exception as error:  # noqa: BLE001 - the next ones must still be tried
            reason = repr(error)
        is_taken = result is SpanExportResult.SUCCESS
        self.counts.end(count, is_taken=is_taken)
        if not is_taken:
            dropped = self.counts.dropped
            self._losses.log(
                time.monotonic(), "spans_not_exported", reason=reason, lost=count, lost_so_far=dropped
            )
        return result

    def shutdown(self) -> None:
        """See `SpanExporter`; may be called twice, and by any thread."""
        if not self._is_closed:
            self._is_closed = True
            self._inner.shutdown()  # type: ignore[no-untyped-call]  # the library's

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """See `SpanExporter`."""
        return self._inner.force_flush(timeout_millis)


def _queue_max() -> int:
    """As the SDK reads it."""
    try:
        return max(1, int(os.environ.get("OTEL_BSP_MAX_QUEUE_SIZE", QUEUE_MAX_DEFAULT)))
    except ValueError:
        return QUEUE_MAX_DEFAULT


def _resource(service: str, instance_id: str, attributes: Mapping[str, str]) -> Resource:
    """What the environment says wins."""
    own = {"service.name": service, "service.instance.id": instance_id, **attributes}
    return Resource.create({**own, **OTELResourceDetector().detect().attributes})
