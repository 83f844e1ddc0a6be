"""Who is traced: decided once, where a trace begins, and respected by all others.

Source: OpenTelemetry's specification of the environment variable OTEL_TRACES_SAMPLER, and of TraceIdRatioBased.
"""

from __future__ import annotations

from typing import Final

import msgspec

from serve_common.tracing.trace_context import SpanRef

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
