"""Messages of evaluations in replicas' processes: of programs' autoscaling policies, and of what replicas record.

Why in a replica: a policy that only the program has is a pickle, and only a replica's process may load one. The
controller sends plain data to the host of a running replica, and gets plain data back; the host passes bytes on.

Why the result is no reply to an inbox: a host that got one inbox of the controller could forge replies of others, so it
publishes results on a subject of its own.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from serve_common.config.autoscaling import AutoscalingContext
from serve_common.errors import BadField
from serve_common.names import ReplicaTag
from serve_common.protocol.code import PAGE_BYTES_MAX
from serve_common.values import check_size

REQUEST_BYTES_MAX: Final = 960 * 1024
"""Most bytes of a request; with what is around it, it fits one message of NATS."""
RESULT_BYTES_MAX: Final = 128 * 1024
POLICY_BYTES_MAX: Final = PAGE_BYTES_MAX
"""Most bytes of an uploaded policy: it travels with each request."""
STATS_MAX: Final = 64
"""Most values of one replica."""
DECISIONS_MAX: Final = 1_000
"""Most deployments for which a policy of an application decides."""

_Id = Annotated[str, Meta(max_length=64)]
_Tag = Annotated[ReplicaTag, Meta(max_length=200)]
_Name = Annotated[str, Meta(max_length=128)]


class EvaluationOrder(msgspec.Struct, frozen=True, kw_only=True):
    """From the controller to a host: an encoded `Evaluation` for one of its replicas."""

    request_id: _Id
    replica_tag: _Tag
    body: Annotated[bytes, Meta(max_length=REQUEST_BYTES_MAX)]


class EvaluationReport(msgspec.Struct, frozen=True, kw_only=True):
    """From a host to the controller: an encoded `EvaluationResult`."""

    request_id: _Id
    replica_tag: _Tag
    body: Annotated[bytes, Meta(max_length=RESULT_BYTES_MAX)]


class PolicyCall(msgspec.Struct, frozen=True, kw_only=True):
    """A policy and its arguments."""

    name: str
    """The policy's name, for people."""
    digest: str
    code: bytes
    """The pickle that ``digest`` names."""
    kwargs: dict[str, Any]
    """Arguments of the constructor, where the policy is a class."""
    context: AutoscalingContext | None = None
    """Argument of the policy of one deployment."""
    application: list[AutoscalingContext] | None = None
    """Arguments of the policy of an application: the contexts of its deployments."""


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica is to evaluate."""

    policy: PolicyCall | None = None
    """None asks for what ``record_autoscaling_stats`` returns."""


class PolicyDecision(msgspec.Struct, frozen=True, kw_only=True):
    """What the policy of an application decided for one deployment."""

    num_replicas: Annotated[float, Meta(ge=0, le=2.0**31)]
    policy_state: dict[str, Any]


class EvaluationResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What came of an `Evaluation`; a hostile replica can only lie about its own backend."""

    error: Annotated[str, Meta(max_length=16_000)] = ""
    """The user's traceback, or why nothing was evaluated; empty for success."""
    stats: Annotated[dict[_Name, float], Meta(max_length=STATS_MAX)] | None = None
    """None where the code has no ``record_autoscaling_stats``, or it failed."""
    num_replicas: Annotated[float, Meta(ge=0, le=2.0**31)] = 0.0
    policy_state: dict[str, Any] | None = None
    """The policy's next state; None leaves it unchanged."""
    decisions: Annotated[dict[_Name, PolicyDecision], Meta(max_length=DECISIONS_MAX)] | None = None
    """By deployment, of the policy of an application; those that it left out keep their replicas."""


def check_evaluation(result: EvaluationResult) -> EvaluationResult:
    """Return ``result`` if it can be used: the replica that it came from may be hostile. Raises `BadField`."""
    decisions = result.decisions or {}
    for number in (result.num_replicas, *(each.num_replicas for each in decisions.values())):
        if not math.isfinite(number):
            raise BadField("num_replicas", "must be a finite number")
    for name, value in (result.stats or {}).items():
        if not math.isfinite(value):
            raise BadField(f"stats.{name}", "must be a finite number")
    for state in (result.policy_state, *(each.policy_state for each in decisions.values())):
        try:
            if state is not None:
                check_size(state, "policy_state")
        except (TypeError, ValueError, RecursionError) as error:
            raise BadField("policy_state", f"must be what JSON can say: {error}") from None
    return result
