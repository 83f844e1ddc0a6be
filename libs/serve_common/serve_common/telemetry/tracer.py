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
"""The span of the work that the running task does for nobody's request; see `operations`."""


def current_trace_id() -> str:
    """32 hexadecimal digits, sampled or not; empty outside of traces."""
    context = request_context.get()
    if context is not None:
        return context.trace_id
    span = current_operation.get()
    return "" if span is None else span.trace_id


_LOW_DIGITS: Final = 16
_RANGE: Final = 1 << 64


class Sampler(msgspec.Struct, frozen=True):
    """A rule for sampling."""

    ratio: float = 1.0
    """Of the traces that begin here, from 0 to 1."""
    respects_parent: bool = True
    """A trace that began elsewhere is sampled as it was decided there."""

    def decide(self, parent: SpanRef | None, trace_id: str) -> bool:
        """Whether a span of trace ``trace_id`` (32 hexadecimal digits, of which the last 16 are the draw) is sampled.

        The decision depends on the id alone, as in OpenTelemetry's SDKs: with the same ratio all agree about a trace.
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
"""By the names of OTEL_TRACES_SAMPLER."""
TAKES_RATIO: Final = frozenset({"traceidratio", "parentbased_traceidratio"})


_TRACE_BITS: Final = 128
_SPAN_BITS: Final = 64
_NS: Final = 1_000_000_000


@final
class Tracer:
    """Of one process; callable from any thread."""

    def __init__(
        self,
        sampler: Sampler,
        *,
        emit: Callable[[Span], None],
        monotonic_ns: Callable[[], int],
        wall_ns: int,
        draw_bits: Callable[[int], int],
        enter: Callable[[Span], None] = lambda _: None,
        enter_unsampled: Callable[[SpanRef], None] | None = None,
        entered: Callable[[], SpanRef | None] = lambda: None,
    ) -> None:
        """``wall_ns`` is since 1970, now; from then on time is ``monotonic_ns``'s, so no span ends before it begins.

        ``draw_bits`` gives that many random bits; ``emit`` takes spans that have ended, never waits and never raises.
        ``enter`` makes a span the current one for user code of the running task, ``entered`` tells which span that is,
        or one that the user's code has begun below it. ``enter_unsampled``: see `enter_unsampled`.
        """
        self.sampler: Final = sampler
        self._emit = emit
        self._monotonic_ns = monotonic_ns
        self._offset_ns = wall_ns - monotonic_ns()
        self._draw_bits = draw_bits
        self.enter: Final = enter
        self.enter_unsampled = enter_unsampled
        """Tells user code that its request is not sampled; None where it need not be told."""
        self.entered: Final = entered

    def now_ns(self) -> int:
        """Since 1970."""
        return self._monotonic_ns() + self._offset_ns

    def at_ns(self, monotonic_s: float) -> int:
        """The same of a moment by `time.monotonic`."""
        return int(monotonic_s * _NS) + self._offset_ns

    def new_trace_id(self) -> str:
        """A random one."""
        return f"{self._draw_bits(_TRACE_BITS) or 1:032x}"

    def new_span_id(self) -> str:
        """A random one."""
        return f"{self._draw_bits(_SPAN_BITS) or 1:016x}"

    def begin_sampled(
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
        """A span that was decided to be sampled; without a ``parent`` the first one of trace ``trace_id``, or of a new
        one. ``began_ns`` 0 means now.
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

    def begin_root(self, name: str, kind: SpanKind, attributes: dict[str, Value]) -> Span | None:
        """The first span of a new trace, if the sampler wants it."""
        trace_id = self.new_trace_id()
        if not self.sampler.decide(None, trace_id):
            return None
        return self.begin_sampled(name, kind, None, attributes, trace_id=trace_id)

    def child(
        self, of: Span, name: str, kind: SpanKind, attributes: dict[str, Value], *, began_ns: int = 0
    ) -> Span:
        """A span below one of this process."""
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
        """``span`` has ended, by an ``error`` if one is given; does nothing when it had ended."""
        if span.ended_ns:
            return
        span.ended_ns = max(ended_ns or self.now_ns(), span.began_ns)
        if error is not None:
            span.error = cut(error)
        self._emit(span)


_tracer: Tracer | None = None


def set_process_tracer(tracer: Tracer | None) -> None:
    """For whoever opens and closes tracing."""
    global _tracer  # noqa: PLW0603 - see the module's text
    _tracer = tracer


def process_tracer() -> Tracer | None:
    """None while nothing is traced."""
    return _tracer


PREFIX: Final = "OTEL_"
_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_SPOKEN: Final = "http/protobuf"


class TracingSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Tracing is on."""

    sampler: Sampler = ALWAYS
    complaints: list[str] = []
    """What was not understood and therefore left as it is by default, as the specification wants it."""
    variables: dict[str, str] = {}
    """All of the environment that begins with `PREFIX`, for processes that are started by this one elsewhere."""


def read_tracing_settings(variables: Mapping[str, str]) -> TracingSettings | None:
    """None when nothing is to be traced: no endpoint is named, or tracing was switched off. Empty means unset."""
    given = {name: value for name, value in variables.items() if name.startswith(PREFIX) and value.strip()}
    if not any(name in given for name in _ENDPOINTS):
        return None
    if given.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    exporters = {name.strip() for name in given.get("OTEL_TRACES_EXPORTER", "otlp").lower().split(",")}
    if "otlp" not in exporters:
        return None
    complaints: list[str] = []
    protocol = next((given[name].strip().lower() for name in _PROTOCOLS if name in given), _SPOKEN)
    if protocol != _SPOKEN:
        complaints.append(f"OTLP over {protocol[:40]!r} is not spoken here; {_SPOKEN} is used")
    return TracingSettings(sampler=_sampler(given, complaints), complaints=complaints, variables=given)


def _sampler(given: Mapping[str, str], complaints: list[str]) -> Sampler:
    name = given.get("OTEL_TRACES_SAMPLER", "parentbased_always_on").strip().lower()
    sampler = SAMPLERS.get(name)
    if sampler is None:
        complaints.append(
            f"OTEL_TRACES_SAMPLER: {name[:40]!r} is not known here; parentbased_always_on is used"
        )
        return ALWAYS
    if name not in TAKES_RATIO or "OTEL_TRACES_SAMPLER_ARG" not in given:
        return sampler
    text = given["OTEL_TRACES_SAMPLER_ARG"]
    try:
        ratio = float(text)
    except ValueError:
        ratio = -1.0
    if not 0.0 <= ratio <= 1.0:
        complaints.append(f"OTEL_TRACES_SAMPLER_ARG: {text[:40]!r} is no number from 0 to 1; 1 is used")
        return sampler
    return msgspec.structs.replace(sampler, ratio=ratio)
