"""Whether and how this process is traced: settings, sampling, the tracer that makes its spans, the current trace."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final, final

import msgspec

from serve_common.runtime.request_context import request_context
from serve_common.telemetry.spans import Span, SpanKind, SpanRef, Value, cut

if TYPE_CHECKING:
    from serve_common.telemetry.spans import Span

current_operation: Final[ContextVar[Span | None]] = ContextVar("muster_operation", default=None)
"""The span of the running task's work outside of requests (`request_traces.operation`)."""


def current_trace_id() -> str:
    """32 hexadecimal digits, sampled or not; empty outside of traces.

    Why two sources: a request's trace is part of its context, which replicas set anyway; the controller's work is no
    request.
    """
    context = request_context.get()
    if context is not None:
        return context.trace_id
    span = current_operation.get()
    return "" if span is None else span.trace_id


_LOW_DIGITS: Final = 16
_RANGE: Final = 1 << 64


class Sampler(msgspec.Struct, frozen=True):
    """Sampling settings. The decision is made where a trace starts; the samplers with a parent follow it elsewhere.

    Source: OpenTelemetry's specification of the environment variable OTEL_TRACES_SAMPLER, and of TraceIdRatioBased.
    """

    ratio: float = 1.0
    """Share of the traces that start here, from 0 to 1."""
    respects_parent: bool = True
    """Follow the sampling decision of a trace that started elsewhere."""

    def decide(self, parent: SpanRef | None, trace_id: str) -> bool:
        """Whether a span of trace ``trace_id`` (32 hexadecimal digits; the last 16 are the random value) is sampled.

        The decision depends on the id alone, as in OpenTelemetry's SDKs: so processes with one ratio agree on a trace.
        """
        if parent is not None and self.respects_parent:
            return parent.is_sampled
        return int(trace_id[-_LOW_DIGITS:], 16) < self.bound

    @property
    def bound(self) -> int:
        """A trace is sampled when the number of its id's last 16 digits is below this."""
        return round(self.ratio * _RANGE)


ALWAYS: Final = Sampler()
SAMPLERS: Final = {
    "always_on": Sampler(respects_parent=False),
    "always_off": Sampler(ratio=0.0, respects_parent=False),
    "traceidratio": Sampler(respects_parent=False),
    "parentbased_always_on": ALWAYS,
    "parentbased_always_off": Sampler(ratio=0.0),
    "parentbased_traceidratio": ALWAYS,
}
"""Samplers by the values of OTEL_TRACES_SAMPLER."""
TAKES_RATIO: Final = frozenset({"traceidratio", "parentbased_traceidratio"})


_TRACE_BITS: Final = 128
_SPAN_BITS: Final = 64
_NS: Final = 1_000_000_000


@final
class Tracer:
    """Creates the spans of one process; callable from any thread.

    Why the clock and random bits are parameters: traces can be tested to the nanosecond, and nothing here does I/O.
    """

    def __init__(
        self,
        sampler: Sampler,
        *,
        emit: Callable[[Span], None],
        monotonic_ns: Callable[[], int],
        wall_ns: int,
        random_bits: Callable[[int], int],
        enter: Callable[[Span], None] = lambda _: None,
        enter_unsampled: Callable[[SpanRef], None] | None = None,
        entered: Callable[[], SpanRef | None] = lambda: None,
    ) -> None:
        """``wall_ns`` is now, since 1970; later times are taken from ``monotonic_ns``, so spans cannot end early.

        ``random_bits`` gives that many random bits; ``emit`` takes spans that have ended, never waits and never raises.
        ``enter`` makes a span the current one for user code of the running task; ``entered`` returns that span, or a
        child of it that user code has started. ``enter_unsampled`` marks a request as not sampled for user code.
        """
        self.sampler: Final = sampler
        self._emit = emit
        self._monotonic_ns = monotonic_ns
        self._offset_ns = wall_ns - monotonic_ns()
        self._draw_bits = random_bits
        self.enter: Final = enter
        self.enter_unsampled = enter_unsampled
        """Marks the running task's request as not sampled for user code; None where that is not needed."""
        self.entered: Final = entered

    def now_ns(self) -> int:
        """The current time in nanoseconds since 1970."""
        return self._monotonic_ns() + self._offset_ns

    def at_ns(self, monotonic_s: float) -> int:
        """Nanoseconds since 1970 of ``monotonic_s``, a time of `time.monotonic`."""
        return int(monotonic_s * _NS) + self._offset_ns

    def new_trace_id(self) -> str:
        """A random trace id."""
        return f"{self._draw_bits(_TRACE_BITS) or 1:032x}"

    def new_span_id(self) -> str:
        """A random span id."""
        return f"{self._draw_bits(_SPAN_BITS) or 1:016x}"

    def start_sampled(
        self,
        name: str,
        kind: SpanKind,
        parent: SpanRef | None,
        attributes: dict[str, Value],
        *,
        began_ns: int = 0,
        trace_id: str = "",
        is_parent_remote: bool = False,
        links: tuple[SpanRef, ...] = (),
    ) -> Span:
        """Start a sampled span; without a ``parent`` the root of trace ``trace_id``, or of a new one. ``began_ns``
        0 means now.
        """
        return Span(
            name=name,
            kind=kind,
            trace_id=(trace_id or self.new_trace_id()) if parent is None else parent.trace_id,
            span_id=self.new_span_id(),
            parent_id="" if parent is None else parent.span_id,
            is_parent_remote=is_parent_remote,
            tracestate="" if parent is None else parent.tracestate,
            began_ns=began_ns or self.now_ns(),
            attributes=attributes,
            links=links,
        )

    def start_root(self, name: str, kind: SpanKind, attributes: dict[str, Value]) -> Span | None:
        """Start the root span of a new trace; None when it is not sampled."""
        trace_id = self.new_trace_id()
        if not self.sampler.decide(None, trace_id):
            return None
        return self.start_sampled(name, kind, None, attributes, trace_id=trace_id)

    def child(
        self, of: Span, name: str, kind: SpanKind, attributes: dict[str, Value], *, began_ns: int = 0
    ) -> Span:
        """Start a child of a span of this process."""
        return Span(
            name=name,
            kind=kind,
            trace_id=of.trace_id,
            span_id=self.new_span_id(),
            parent_id=of.span_id,
            tracestate=of.tracestate,
            began_ns=began_ns or self.now_ns(),
            attributes=attributes,
        )

    def end(self, span: Span, error: str | None = None, *, ended_ns: int = 0) -> None:
        """End ``span``, with ``error`` if one is given; does nothing when it has ended."""
        if span.ended_ns:
            return
        span.ended_ns = max(ended_ns or self.now_ns(), span.began_ns)
        if error is not None:
            span.error = cut(error)
        self._emit(span)


# A module variable: a process exports its spans in one way, as it does its logs. While tracing is off, finding None is
# all that it costs.
_tracer: Tracer | None = None


def set_process_tracer(tracer: Tracer | None) -> None:
    """Set the process' tracer; called where tracing is opened and closed."""
    global _tracer  # noqa: PLW0603 - one for the process
    _tracer = tracer


def process_tracer() -> Tracer | None:
    """The process' tracer; None while tracing is off."""
    return _tracer


PREFIX: Final = "OTEL_"
_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_SUPPORTED_PROTOCOL: Final = "http/protobuf"


class TracingSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of tracing that is on."""

    sampler: Sampler = ALWAYS
    complaints: list[str] = []
    """Settings that were not understood and are therefore ignored, as the specification requires."""
    variables: dict[str, str] = {}
    """All environment variables with `PREFIX`, for processes that this one starts elsewhere."""


def read_tracing_settings(variables: Mapping[str, str]) -> TracingSettings | None:
    """Read the settings; None without an endpoint, or when tracing is disabled. An empty variable counts as unset.

    Source: https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/. Variables that only the
    exporter reads (headers, timeouts, certificates, batch sizes) are left to it.
    """
    otel_vars = {
        name: value for name, value in variables.items() if name.startswith(PREFIX) and value.strip()
    }
    if not any(name in otel_vars for name in _ENDPOINTS):
        return None
    if otel_vars.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    exporters = {name.strip() for name in otel_vars.get("OTEL_TRACES_EXPORTER", "otlp").lower().split(",")}
    if "otlp" not in exporters:
        return None
    complaints: list[str] = []
    protocol = next(
        (otel_vars[name].strip().lower() for name in _PROTOCOLS if name in otel_vars), _SUPPORTED_PROTOCOL
    )
    if protocol != _SUPPORTED_PROTOCOL:
        complaints.append(f"OTLP over {protocol[:40]!r} is not spoken here; {_SUPPORTED_PROTOCOL} is used")
    return TracingSettings(
        sampler=_sampler(otel_vars, complaints), complaints=complaints, variables=otel_vars
    )


def _sampler(otel_vars: Mapping[str, str], complaints: list[str]) -> Sampler:
    name = otel_vars.get("OTEL_TRACES_SAMPLER", "parentbased_always_on").strip().lower()
    sampler = SAMPLERS.get(name)
    if sampler is None:
        complaints.append(
            f"OTEL_TRACES_SAMPLER: {name[:40]!r} is not known here; parentbased_always_on is used"
        )
        return ALWAYS
    if name not in TAKES_RATIO or "OTEL_TRACES_SAMPLER_ARG" not in otel_vars:
        return sampler
    text = otel_vars["OTEL_TRACES_SAMPLER_ARG"]
    try:
        ratio = float(text)
    except ValueError:
        ratio = -1.0
    if not 0.0 <= ratio <= 1.0:
        complaints.append(f"OTEL_TRACES_SAMPLER_ARG: {text[:40]!r} is no number from 0 to 1; 1 is used")
        return sampler
    return msgspec.structs.replace(sampler, ratio=ratio)
