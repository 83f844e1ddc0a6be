"""Which requests of an endpoint proxies capture."""

from __future__ import annotations

import msgspec

from serve_common.api.commands import SetCapture
from serve_common.config.capture import CaptureConfig, check_capture_config
from serve_common.errors import NotFound
from serve_common.names import EndpointTag, deployment_tag
from serve_common.protocol.subjects import endpoint_key
from serve_controller.core.checkpoint import Checkpoint, Draft
from serve_controller.core.commands.changes import (
    Accepted,
    changed,
    goal_failed,
    new_goal,
    nothing_to_do,
)
from serve_controller.core.objects import Capture, GoalKind, ObjectKind


def set_capture(checkpoint: Checkpoint, command: SetCapture, now: float) -> Accepted:
    """Capture a share of an endpoint's requests; 0 ends that. Its goal succeeds once every proxy does so."""
    tag = EndpointTag(deployment_tag(command.endpoint, "endpoint"))
    endpoint = checkpoint.endpoints.get(tag)
    if endpoint is None:
        raise NotFound(f"endpoint: there is no endpoint {command.endpoint[:100]!r}")
    config = _get_config(command)
    known = checkpoint.captures.get(tag)
    if known is None and config is None:
        pending = endpoint.goal_id if endpoint.goal_id in checkpoint.pending else None
        return nothing_to_do(tag, pending)
    if known is not None and config == known.config and not goal_failed(checkpoint, known.goal_id):
        return nothing_to_do(tag, known.goal_id)
    draft = Draft(checkpoint)
    goal_id = new_goal(draft, GoalKind.ROUTE, tag, [endpoint_key(tag)], now)
    # The goal takes the place of a pending one of the same endpoint, and so keeps what that set.
    set_alone = endpoint.set_alone if endpoint.goal_id in checkpoint.pending else []
    draft.put(msgspec.structs.replace(endpoint, goal_id=goal_id, set_alone=set_alone))
    if config is None:
        draft.delete((ObjectKind.CAPTURE, tag))
    else:
        draft.put(Capture(endpoint_tag=tag, config=config, goal_id=goal_id))
    return changed(draft, tag, goal_id)


def _get_config(command: SetCapture) -> CaptureConfig | None:
    if command.share == 0:
        return None
    config = CaptureConfig(
        share=command.share,
        bodies=command.bodies,
        redact=command.redact,
        redact_headers=sorted({name.lower() for name in command.redact_headers}),
        redact_query=sorted(set(command.redact_query)),
    )
    return check_capture_config(config)
