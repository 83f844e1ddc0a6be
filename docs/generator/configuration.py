"""The page of configuration: every struct that users write in commands, files and code."""

from __future__ import annotations

from typing import Final

import msgspec

from docs.generator.structs import GENERATED, class_doc, field_table
from muster.handles.options import HandleOptions
from serve_common.config.autoscaling import (
    AutoscalingConfig,
    AutoscalingContext,
    AutoscalingPolicy,
    AutoscalingQuery,
    LoadPoint,
)
from serve_common.config.backend import (
    BackendConfig,
    BackpressureConfig,
    CircuitBreaker,
    EndpointOptions,
    HttpOptions,
    LoggingConfig,
    OutlierEjection,
    RayActorOptions,
    ReplicaConfig,
)
from serve_common.config.capture import CaptureConfig
from serve_common.config.external_gates import ExternalGate
from serve_common.config.rollout import RolloutConfig

STRUCTS: Final[tuple[type[msgspec.Struct], ...]] = (
    ReplicaConfig,
    RayActorOptions,
    BackendConfig,
    AutoscalingConfig,
    AutoscalingPolicy,
    AutoscalingQuery,
    BackpressureConfig,
    OutlierEjection,
    CircuitBreaker,
    LoggingConfig,
    EndpointOptions,
    HttpOptions,
    RolloutConfig,
    ExternalGate,
    CaptureConfig,
)
"""Configuration that is sent to the controller."""
_IN_PYTHON: Final[tuple[type[msgspec.Struct], ...]] = (HandleOptions, AutoscalingContext, LoadPoint)
_READ_ONLY: Final = {AutoscalingContext, LoadPoint}

LINKS: Final = {struct.__name__: f"#{struct.__name__.lower()}" for struct in (*STRUCTS, *_IN_PYTHON)}

_HEAD: Final = f"""\
# Configuration

{GENERATED}
Names and units are the same on the command line (`--max-surge-percent`), in Python, in files and in the [admin
API](admin-api.md). Unknown fields are refused. Both ends of a range are allowed. Services themselves are configured
by [environment variables](variables.md).

`ReplicaConfig` is a deployment's code: changing it replaces replicas. `BackendConfig` is how many replicas run and
how they are treated: changing it replaces none. `EndpointOptions` belong to what traffic is sent to, and
`HttpOptions` to all proxies. `RolloutConfig` says how a new version takes over traffic, `CaptureConfig`
which requests of an endpoint are captured.
"""

_PYTHON_HEAD: Final = """\
# In Python only

`HandleOptions` are what `DeploymentHandle.options` sets; `multiplexed_model_id` sets `model_id` and `idempotent` sets
`is_repeatable`. An autoscaling policy function takes an `AutoscalingContext`.
"""


def page() -> str:
    """The page."""
    parts = [_HEAD, *map(_section, STRUCTS), _PYTHON_HEAD, *map(_section, _IN_PYTHON)]
    return "\n".join(parts)


def _section(struct: type[msgspec.Struct]) -> str:
    fields = field_table(struct, LINKS, is_input=struct not in _READ_ONLY)
    return f"## {struct.__name__}\n\n{class_doc(struct)}\n\n{fields}"
