"""What is decided about traces before OpenTelemetry is involved: settings, W3C Trace Context headers, sampling.

Why not OpenTelemetry's own propagator and samplers: most requests are not sampled, and for those they would cost 3 µs
(without a traceparent) to 7 µs (with one) instead of 0.5 to 1 µs, of about 50 µs that a proxy needs for a request. What
is sampled is OpenTelemetry's from there on (`request_traces`, `otlp`): 28 µs for a span, which with a hundredth of the
requests sampled is half a microsecond for each. Nothing here imports OpenTelemetry, so logs and clients have the
headers without it.

Source: https://www.w3.org/TR/trace-context/ (Recommendation of 2021; levels 1 and 2 agree on all that is used here).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
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


class TraceParent(msgspec.Struct, frozen=True, gc=False):
    """The fields of a ``traceparent`` that are used."""

    trace_id: str
    """32 hexadecimal digits."""
    span_id: str
    """16 hexadecimal digits; empty for a sampled trace that has no span yet."""
    is_sampled: bool

    @property
    def header(self) -> str:
        """The value of the header ``traceparent``, of version 00."""
        return f"00-{self.trace_id}-{self.span_id}-{'01' if self.is_sampled else '00'}"


def parse_traceparent(text: str) -> TraceParent | None:
    """The fields of ``text``; None when it is invalid, which counts as no traceparent (3.2.2.3)."""
    found = _FORM.fullmatch(text.strip(" \t"))
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == "ff" or (version == "00" and more) or trace_id == _NO_TRACE or span_id == _NO_SPAN:
        return None
    return TraceParent(trace_id, span_id, bool(int(flags, 16) & _SAMPLED))


def may_be_sampled(traceparent: str) -> bool:
    """False without a traceparent and for an unsampled one: most requests, decided without parsing."""
    return bool(traceparent) and not traceparent.endswith(_UNSAMPLED_END)


def parse_trace_id(traceparent: str) -> str:
    """The trace's id; empty when ``traceparent`` is invalid."""
    parsed = parse_traceparent(traceparent) if traceparent else None
    return "" if parsed is None else parsed.trace_id


def join_tracestate(headers: list[tuple[bytes, bytes]]) -> str:
    """The tracestate in a request's headers (names in lower case), not checked; several headers form one list."""
    return ",".join(value.decode("latin-1") for name, value in headers if name == b"tracestate")


def headers_from_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Headers for the trace that a program runs in, from its environment; empty when there is none.

    Source: OpenTelemetry's "Environment Variables as Context Propagation Carriers", which build servers follow.
    """
    parent = parse_traceparent(variables.get("TRACEPARENT", ""))
    if parent is None:
        return {}
    tracestate = variables.get("TRACESTATE", "").strip()
    is_usable = len(tracestate) <= TRACESTATE_LENGTH_MAX and tracestate.isascii() and tracestate.isprintable()
    return {TRACEPARENT: parent.header} | ({TRACESTATE: tracestate} if tracestate and is_usable else {})


_LOW_DIGITS: Final = 16
_RANGE: Final = 1 << 64


class Sampler(msgspec.Struct, frozen=True):
    """Sampling settings, and the decision by a comparison that comes before OpenTelemetry's sampler and equals it.

    The decision is made where a trace starts; the samplers with a parent follow it elsewhere. Source: OpenTelemetry's
    specification of the environment variable OTEL_TRACES_SAMPLER, and of TraceIdRatioBased.
    """

    ratio: float = 1.0
    """Share of the traces that start here, from 0 to 1."""
    respects_parent: bool = True
    """Follow the sampling decision of a trace that started elsewhere."""

    def decide(self, parent: TraceParent | None, trace_id: str) -> bool:
        """Whether a span of trace ``trace_id`` (32 hexadecimal digits; the last 16 are the random value) is sampled.

        The decision depends on the id alone, so processes with one ratio agree on a trace.
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
