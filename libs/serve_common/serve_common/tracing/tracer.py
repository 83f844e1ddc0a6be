"""Makes spans, and hands on those that have ended.

Why the clock and chance are given: so that traces can be tested to the nanosecond, and nothing here does I/O.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, final

from serve_common.tracing.sampling import Sampler
from serve_common.tracing.spans import Span, SpanKind, Value, cut
from serve_common.tracing.trace_context import SpanRef

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
