"""One span as a plain record: filled while something happens, handed on once it has ended."""

from __future__ import annotations

from enum import Enum
from typing import Final

import msgspec

from serve_common.tracing.trace_context import SpanRef, format_traceparent

TEXT_LENGTH_MAX: Final = 500
"""Of an attribute or an error; longer ones are cut."""

Value = str | int | float | bool
"""Of an attribute."""


class SpanKind(Enum):
    """OpenTelemetry's kinds, as far as they are used."""

    INTERNAL = "internal"
    SERVER = "server"
    CLIENT = "client"


class Event(msgspec.Struct, frozen=True):
    """Something that happened within a span."""

    name: str
    at_ns: int
    attributes: dict[str, Value]


class Span(msgspec.Struct, kw_only=True, eq=False):
    """A sampled span. Times are nanoseconds since 1970."""

    name: str
    kind: SpanKind
    trace_id: str
    span_id: str
    parent_id: str = ""
    """Empty for the first span of a trace."""
    is_parent_remote: bool = False
    tracestate: str = ""
    began_ns: int
    ended_ns: int = 0
    """0 while it goes on."""
    attributes: dict[str, Value]
    events: list[Event] = []
    links: tuple[SpanRef, ...] = ()
    """Spans of other requests that this one worked for as well."""
    error: str | None = None
    """None unless it failed; may be empty."""

    @property
    def traceparent(self) -> str:
        """For whatever this span calls."""
        return format_traceparent(self.trace_id, self.span_id, is_sampled=True)

    @property
    def ref(self) -> SpanRef:
        """Its name."""
        return SpanRef(self.trace_id, self.span_id, True, self.tracestate)  # noqa: FBT003 - a field


def cut(text: str) -> str:
    """``text`` as an attribute may have it."""
    return text if len(text) <= TEXT_LENGTH_MAX else text[: TEXT_LENGTH_MAX - 1] + "…"
