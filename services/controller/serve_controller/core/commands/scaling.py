"""Commands about the number of replicas: what users want beside, or instead of, the autoscaler. See `core.scaling`."""

from __future__ import annotations

from typing import Final

import msgspec

from serve_common.errors import Conflict, NotFound
from serve_common.limits import check_between
from serve_common.names import deployment_tag
from serve_common.values.backend_config import NUM_REPLICAS_MAX
from serve_common.wires.commands import PauseAutoscaling, ResumeAutoscaling, Scale, UpdateBackendConfig
from serve_controller.core.checkpoint import Checkpoint, Draft
from serve_controller.core.commands.accepted import Accepted, changed, nothing_to_do
from serve_controller.core.commands.backends import update_backend_config
from serve_controller.core.objects import Backend
from serve_controller.core.scaling import check_within_limits

_FIELD: Final = "backend_tag"


def scale(checkpoint: Checkpoint, command: Scale, now: float) -> Accepted:
    """See `Scale`."""
    existing = checkpoint.backends.get(deployment_tag(command.backend_tag, _FIELD))
    check_between(command.num_replicas, 0, NUM_REPLICAS_MAX, "num_replicas")
    if existing is not None and not existing.deleting:
        config = msgspec.structs.replace(existing.target.backend_config, num_replicas=command.num_replicas)
        check_within_limits(config, "num_replicas")
    update = UpdateBackendConfig(
        backend_tag=command.backend_tag, config={"num_replicas": command.num_replicas}
    )
    return update_backend_config(checkpoint, update, now, paused_by="scale")


def pause_autoscaling(checkpoint: Checkpoint, command: PauseAutoscaling) -> Accepted:
    """See `PauseAutoscaling`."""
    backend = _autoscaled(checkpoint, command.backend_tag)
    return _set_paused(checkpoint, backend, backend.autoscaling_paused or "pause_autoscaling")


def resume_autoscaling(checkpoint: Checkpoint, command: ResumeAutoscaling) -> Accepted:
    """See `ResumeAutoscaling`."""
    return _set_paused(checkpoint, _autoscaled(checkpoint, command.backend_tag), "")


def _autoscaled(checkpoint: Checkpoint, backend_tag: str) -> Backend:
    tag = deployment_tag(backend_tag, _FIELD)
    backend = checkpoint.backends.get(tag)
    if backend is None or backend.deleting:
        raise NotFound(f"{_FIELD}: there is no backend {backend_tag[:100]!r}")
    if backend.target.backend_config.autoscaling_config is None:
        raise Conflict(f"{_FIELD}: {tag!r} has no autoscaling_config")
    return backend


def _set_paused(checkpoint: Checkpoint, backend: Backend, paused: str) -> Accepted:
    tag = backend.backend_tag
    if backend.autoscaling_paused == paused:
        return nothing_to_do(tag, None)
    draft = Draft(checkpoint)
    draft.put(msgspec.structs.replace(backend, autoscaling_paused=paused))
    return changed(draft, tag, None)
