"""Ranges of configuration fields, recorded from the functions that check them.

Why recorded: a range that is written twice diverges, and the checks are what holds.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, Final, NamedTuple, get_args, get_type_hints
from unittest.mock import patch

import msgspec

from serve_common.config import autoscaling, backend, capture, external_gates, rollout
from serve_common.config.backend import BackendConfig, EndpointOptions, HttpOptions, ReplicaConfig
from serve_common.config.capture import CaptureConfig
from serve_common.config.external_gates import ExternalGate
from serve_common.config.rollout import RolloutConfig


class Range(NamedTuple):
    """Both limits are allowed values."""

    low: float
    high: float


SPECIAL: Final = {
    ("AutoscalingConfig", "initial_replicas"): "`min_replicas` to `max_replicas`",
    ("AutoscalingConfig", "panic_threshold"): "0, or 1.1 to 1,000",
    ("BackpressureConfig", "status_code"): "503 or 429",
}
"""Ranges that are not two numbers."""
_EXAMPLES: Final[dict[Any, Any]] = {int: 1, float: 1.0, str: "a:b"}


def kinds_in(hint: Any) -> list[type]:
    """The classes of a type: of a union all of them."""
    return [kind for kind in (hint, *get_args(hint)) if isinstance(kind, type)]


def _struct_in(hint: Any) -> type[msgspec.Struct] | None:
    return next((kind for kind in kinds_in(hint) if issubclass(kind, msgspec.Struct)), None)


def _filled(struct: type[Any]) -> Any:
    """A valid instance in which no number and no struct is None, so that every check runs."""
    hints, values = get_type_hints(struct), dict[str, Any]()
    for field in msgspec.structs.fields(struct):
        nested = _struct_in(hints[field.name])
        if nested is not None:
            values[field.name] = _filled(nested)
        elif field.required or field.default is None:
            values[field.name] = next(
                (_EXAMPLES[kind] for kind in kinds_in(hints[field.name]) if kind in _EXAMPLES), field.default
            )
    return struct(**values)


def _owner(path: str) -> tuple[str, str]:
    """The names of struct and field of a path such as ``BackendConfig.circuit_breaker.window_s``."""
    root, *parents, name = path.split(".")
    struct: Any = next(kind for kind in _CHECKED if kind.__name__ == root)
    for parent in parents:
        struct = _struct_in(get_type_hints(struct)[parent])
    return struct.__name__, name


_CHECKED: Final = (
    BackendConfig,
    ReplicaConfig,
    EndpointOptions,
    HttpOptions,
    RolloutConfig,
    ExternalGate,
    CaptureConfig,
)


def _record() -> dict[tuple[str, str], Range]:
    found: dict[tuple[str, str], Range] = {}

    def check_between(_value: float, low: float, high: float, field: str) -> None:
        found[_owner(field)] = Range(low, high)

    with ExitStack() as stack:
        for module in (autoscaling, backend, capture, external_gates, rollout):
            stack.enter_context(patch.object(module, "check_between", check_between))
        # Its rollout is checked by itself below: not every set of its fields is valid.
        filled = msgspec.structs.replace(_filled(BackendConfig), rollout=None)
        backend.check_backend_config(filled, "BackendConfig")
        backend.check_replica_config(_filled(ReplicaConfig), "ReplicaConfig")
        backend.check_endpoint_options(EndpointOptions(relative_slo_ms=1), "EndpointOptions")
        backend.check_http_options(HttpOptions(), "HttpOptions")
        rollout.check_rollout_config(
            RolloutConfig(steps=("shadow 1%", "100%"), max_difference_increase=0.1), "RolloutConfig"
        )
        external_gates.check_external_gate(ExternalGate(name="one", responder="one"), "ExternalGate")
        capture.check_capture_config(CaptureConfig(share=1), "CaptureConfig")
    return {key: limits for key, limits in found.items() if key not in SPECIAL}


RANGES: Final = _record()
"""Limits by names of struct and field."""
