"""Spans as plain records, and their propagation: W3C Trace Context.

Source: https://www.w3.org/TR/trace-context/ (Recommendation of 2021; levels 1 and 2 agree on all that is used here).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from typing import Final

import msgspec

_FORM: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)
_NO_TRACE: Final = "0" * 32
_NO_SPAN: Final = "0" * 16
_SAMPLED: Final = 0x01
_UNSAMPLED_END: Final = "-00"

TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"
"""The headers' names, in HTTP and in NATS."""
TRACESTATE_LENGTH_MAX: Final = 512
"""Length that every participant must propagate (3.3.1.5); longer ones are dropped."""
TRACESTATE_MEMBERS_MAX: Final = 32
_MEMBER: Final = re.compile(
    r"[a-z0-9][a-z0-9_\-*/]{0,240}(?:@[a-z][a-z0-9_\-*/]{0,13})?="
    r"[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
)


class SpanRef(msgspec.Struct, frozen=True, gc=False):
    """Refers to one span, of this process or of another one."""

    trace_id: str
    """32 hexadecimal digits."""
    span_id: str
    """16 hexadecimal digits."""
    is_sampled: bool
    tracestate: str = ""

    @property
    def traceparent(self) -> str:
        """The value of the header ``traceparent``."""
        return format_traceparent(self.trace_id, self.span_id, is_sampled=self.is_sampled)


def format_traceparent(trace_id: str, span_id: str, *, is_sampled: bool) -> str:
    """The header ``traceparent``, of version 00."""
    return f"00-{trace_id}-{span_id}-01" if is_sampled else f"00-{trace_id}-{span_id}-00"


def parse_traceparent(text: str, tracestate: str = "") -> SpanRef | None:
    """The span that ``text`` refers to; None when it is invalid, which counts as no traceparent (3.2.2.3)."""
    found = _FORM.fullmatch(text.strip(" \t"))
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == "ff" or (version == "00" and more) or trace_id == _NO_TRACE or span_id == _NO_SPAN:
        return None
    return SpanRef(trace_id, span_id, bool(int(flags, 16) & _SAMPLED), tracestate)


def may_be_sampled(traceparent: str) -> bool:
    """False without a traceparent and for an unsampled one: most requests, decided without parsing."""
    return bool(traceparent) and not traceparent.endswith(_UNSAMPLED_END)


def parse_trace_id(traceparent: str) -> str:
    """The trace's id; empty when ``traceparent`` is invalid."""
    ref = parse_traceparent(traceparent) if traceparent else None
    return "" if ref is None else ref.trace_id


def usable_tracestate(text: str) -> str:
    """``text`` without superfluous spaces when it can be propagated, otherwise empty (3.3.1)."""
    members = [member.strip(" \t") for member in text.split(",")]
    members = [member for member in members if member]
    joined = ",".join(members)
    if len(members) > TRACESTATE_MEMBERS_MAX or len(joined) > TRACESTATE_LENGTH_MAX:
        return ""
    if not all(_MEMBER.fullmatch(member) for member in members):
        return ""
    keys = {member.partition("=")[0] for member in members}
    return joined if len(keys) == len(members) else ""


def headers_from_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Headers for the trace that a program runs in, from its environment; empty when there is none.

    Source: OpenTelemetry's "Environment Variables as Context Propagation Carriers", which build servers follow.
    """
    ref = parse_traceparent(variables.get("TRACEPARENT", ""))
    if ref is None:
        return {}
    tracestate = usable_tracestate(variables.get("TRACESTATE", ""))
    return {TRACEPARENT: ref.traceparent} | ({TRACESTATE: tracestate} if tracestate else {})


def parse_tracestate(headers: list[tuple[bytes, bytes]]) -> str:
    """The tracestate in a request's headers (names in lower case); several headers form one list."""
    found = [value.decode("latin-1") for name, value in headers if name == b"tracestate"]
    return usable_tracestate(",".join(found)) if found else ""


TEXT_LENGTH_MAX: Final = 500
"""Longest attribute or error text, in characters; longer ones are cut."""

Value = str | int | float | bool
"""Value of an attribute."""


class SpanKind(Enum):
    """OpenTelemetry's span kinds that are used."""

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
    """0 until it ends."""
    attributes: dict[str, Value]
    events: list[Event] = []
    links: tuple[SpanRef, ...] = ()
    """Spans of other requests that this one served as well."""
    error: str | None = None
    """Error text, possibly empty; None unless the span failed."""

    @property
    def traceparent(self) -> str:
        """The header for calls made in this span."""
        return format_traceparent(self.trace_id, self.span_id, is_sampled=True)

    @property
    def ref(self) -> SpanRef:
        """The span's reference."""
        return SpanRef(self.trace_id, self.span_id, True, self.tracestate)  # noqa: FBT003 - a field


def cut(text: str) -> str:
    """``text``, cut to `TEXT_LENGTH_MAX` characters."""
    return text if len(text) <= TEXT_LENGTH_MAX else text[: TEXT_LENGTH_MAX - 1] + "…"
