"""Whether and how this process is traced: the environment variables that OpenTelemetry defines.

Source: https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/. Those that only the exporter
reads (headers, timeouts, certificates, batch sizes) are left to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from serve_common.tracing.sampling import ALWAYS, SAMPLERS, TAKES_RATIO, Sampler

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
