"""Autoscaling as callers see it: what was seen, what it comes to, and why it moved or held."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from serve_common.names import BackendTag
from serve_common.wires.queries import PagedQuery
from serve_common.wires.views import AutoscalingView
from serve_controller.core.autoscaling.values import ScalingStatus
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.objects import Backend
from serve_controller.core.views.paging import ALL, page_of


def view_autoscaling(
    checkpoint: Checkpoint,
    statuses: Mapping[BackendTag, ScalingStatus],
    now: float,
    query: PagedQuery = ALL,
) -> list[AutoscalingView]:
    """Every backend that has an ``autoscaling_config``, in the order of their tags."""
    tags = [tag for tag, backend in checkpoint.backends.items() if _is_configured(backend)]
    return [_view(checkpoint.backends[tag], statuses.get(tag), now) for tag in page_of(tags, query)]


def _is_configured(backend: Backend) -> bool:
    return not backend.deleting and backend.target.backend_config.autoscaling_config is not None


def _view(backend: Backend, status: ScalingStatus | None, now: float) -> AutoscalingView:
    config = backend.target.backend_config.autoscaling_config
    assert config is not None
    said: dict[str, Any] = {}
    if backend.autoscaling_paused:
        said["why"] = (
            f"paused by {backend.autoscaling_paused}: resume_autoscaling lets it follow the load again"
        )
    elif backend.halted:
        said["why"] = "halted: its first version failed, and nothing is started until the next deploy"
    elif status is not None:
        decision = status.decision
        said = {
            "verdict": decision.verdict.value,
            "seen": decision.seen,
            "wanted": decision.wanted,
            "why": decision.why,
            "source": status.source,
            "decided_at": status.decided_at,
            "data_age_s": None if status.read_at is None else round(now - status.read_at, 3),
        }
    return AutoscalingView(
        backend_tag=backend.backend_tag,
        paused=backend.autoscaling_paused,
        num_replicas=backend.target.backend_config.num_replicas,
        min_replicas=config.min_replicas,
        max_replicas=config.max_replicas,
        **said,
    )
