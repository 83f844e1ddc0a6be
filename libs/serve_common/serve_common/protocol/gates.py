"""Messages of external gates: JSON that the leading controller sends to a webhook or a NATS subject, and what it gets.

Why one form for both, and no meaning in a status code: a server that is broken, missing or behind a proxy that answers
in its place says nothing about a version, and must neither pass nor abort it.
"""

from __future__ import annotations

import math
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from serve_common.errors import BadField
from serve_common.names import BackendTag, GoalId
from serve_common.protocol.subjects import UNREADABLE

RESPONSE_BYTES_MAX: Final = 64 * 1024
"""Most bytes of a response."""
_Reason = Annotated[str, Meta(max_length=RESPONSE_BYTES_MAX)]


class GateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked about a rollout's present step."""

    gate: str
    """Name of the gate."""
    backend_tag: BackendTag
    """Tag of the deployment or backend that is rolled out."""
    canary: BackendTag
    """Tag of the backend that runs the new version: the label ``backend_tag`` of its metrics."""
    baseline: BackendTag
    """Tag of the backend that runs the old version beside it."""
    goal_id: GoalId
    """The rollout's goal: another rollout has another one."""
    version: str | None
    """The user's name for the new version."""
    step: int
    """Number of the step, from 0."""
    share: float
    """Share of the requests that the new version gets, 0 to 1."""
    is_shadow: bool
    """Whether these are copies."""
    lasted_s: float
    """How long requests have gone by the step."""


class GateResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The answer. Without ``passed`` and ``value`` it is none."""

    passed: bool | None = None
    """Whether the new version is good enough."""
    value: float | None = None
    """A number for the gate's limits."""
    baseline_value: float | None = None
    """The same number of the baseline, for ``min_ratio`` and ``max_ratio``."""
    reason: _Reason = ""
    """Why, for people."""


def decode_gate_response(data: bytes) -> GateResponse:
    """Decode an answer. Raises `BadField` for one that cannot be read."""
    if len(data) > RESPONSE_BYTES_MAX:
        raise BadField("response", f"has {len(data):,} bytes; at most {RESPONSE_BYTES_MAX:,} are read")
    try:
        response = msgspec.json.decode(data, type=GateResponse)
    except UNREADABLE as error:
        raise BadField("response", f"is not as it should be: {error}") from error
    for name in ("value", "baseline_value"):
        number = getattr(response, name)
        if number is not None and not math.isfinite(number):
            raise BadField(f"response.{name}", "must be a finite number")
    return response
