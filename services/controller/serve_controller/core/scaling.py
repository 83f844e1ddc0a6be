"""Precedence of the user and the autoscaler in setting a backend's number of replicas.

Why one place: a command, a deploy, a rollback and the autoscaler all set ``num_replicas``, and the user must take
precedence over the autoscaler in the same way for each of them.

The rules. With an ``autoscaling_config`` the autoscaler owns ``num_replicas``, within the limits: the value of a deploy
is ignored, and a backend that is deployed again keeps its number; new code for one scaled to zero starts with
`initial_replicas`, so that it is tried before the deploy succeeds. New limits apply at once. A user who sets
``num_replicas`` (`Scale`, `UpdateBackendConfig`) gets exactly that, and autoscaling pauses until it is resumed; the
pause outlives deploys and ends with `ResumeAutoscaling`, or when the ``autoscaling_config`` is removed.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from serve_common.api.views import EventView
from serve_common.config.backend import BackendConfig
from serve_common.errors import BadField
from serve_common.names import BackendTag
from serve_common.values import truncate
from serve_controller.core.autoscaling.values import ScalingDecision, ScalingDecisionKind
from serve_controller.core.checkpoint import Checkpoint, Draft
from serve_controller.core.events import MESSAGE_LENGTH_MAX
from serve_controller.core.objects import Backend, BackendVersion


def scaled_config(
    config: BackendConfig, existing: Backend | None, *, is_new_code: bool = False
) -> BackendConfig:
    """``config`` as deployed: with autoscaling, ``num_replicas`` is the autoscaler's, within the new limits."""
    scaling = config.autoscaling_config
    if scaling is None:
        return config
    num_replicas = scaling.min_replicas if scaling.initial_replicas is None else scaling.initial_replicas
    if existing is not None and not existing.deleting:
        known = existing.target.backend_config.num_replicas
        if known or existing.autoscaling_paused or not is_new_code:
            num_replicas = known
    return _with_num(config, num_replicas)


def check_within_limits(config: BackendConfig, field: str) -> None:
    """Raise `BadField` when a user's ``num_replicas`` is outside the limits of autoscaling."""
    scaling, num_replicas = config.autoscaling_config, config.num_replicas
    if scaling is None or scaling.min_replicas <= num_replicas <= scaling.max_replicas:
        return
    limits = f"{scaling.min_replicas} and {scaling.max_replicas} (autoscaling_config)"
    raise BadField(field, f"is {num_replicas}; it must be between {limits}, or these must be changed first")


def apply_scalings(draft: Draft, scalings: Mapping[BackendTag, int]) -> None:
    """Set the numbers of replicas decided by the autoscaler, except where a user has paused it meanwhile."""
    for tag, num_replicas in sorted(scalings.items()):
        backend = draft.backends.get(tag)
        if backend is None or backend.autoscaling is None:
            continue
        target = _scaled_version(backend.target, num_replicas)
        if target == backend.target:
            continue
        # If a pending deploy fails, the restored version must have the capacity for the same load.
        last_good = backend.last_good
        if last_good is not None and last_good.backend_config.autoscaling_config is not None:
            last_good = _scaled_version(last_good, num_replicas)
        draft.put(msgspec.structs.replace(backend, target=target, last_good=last_good))


def _scaled_version(version: BackendVersion, num_replicas: int) -> BackendVersion:
    return msgspec.structs.replace(version, backend_config=_with_num(version.backend_config, num_replicas))


def _with_num(config: BackendConfig, num_replicas: int) -> BackendConfig:
    scaling = config.autoscaling_config
    if scaling is not None:
        num_replicas = min(max(num_replicas, scaling.min_replicas), scaling.max_replicas)
    return msgspec.structs.replace(config, num_replicas=num_replicas)


def scaling_events(
    before: Checkpoint, after: Checkpoint, decisions: Mapping[BackendTag, ScalingDecision], now: float
) -> list[EventView]:
    """Events for the numbers of replicas that the autoscaler changed, with the reasons."""
    events = []
    for tag, decision in sorted(decisions.items()):
        known, backend = before.backends.get(tag), after.backends.get(tag)
        if known is None or backend is None or known.num_wanted == backend.num_wanted:
            continue
        message = f"{known.num_wanted} → {backend.num_wanted} replicas: {decision.why}"
        events.append(scaling_event(tag, decision.verdict, message, now))
    return events


def scaling_event(tag: BackendTag, verdict: ScalingDecisionKind, message: str, now: float) -> EventView:
    """One event about the autoscaling of a backend."""
    return EventView(
        at=now,
        kind="autoscaling",
        subject=tag,
        message=truncate(message, MESSAGE_LENGTH_MAX),
        state=verdict.value,
    )
