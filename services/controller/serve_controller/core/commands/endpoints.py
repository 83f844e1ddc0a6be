"""Endpoints that belong to no deployment, the traffic of any endpoint, and the options of all proxies."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import msgspec

from serve_common.api.commands import (
    CreateEndpoint,
    DeleteEndpoint,
    SetEndpointOptions,
    SetHttpOptions,
    SetTraffic,
    ShadowTraffic,
)
from serve_common.config.backend import check_endpoint_options, check_http_options, merged
from serve_common.errors import BadField, Conflict, LimitReached, NotFound
from serve_common.names import BackendTag, EndpointTag, check_route, deployment_tag
from serve_common.protocol.subjects import HTTP_KEY, endpoint_key
from serve_common.values import shown
from serve_controller.core.checkpoint import Checkpoint, Draft
from serve_controller.core.commands.changes import (
    Accepted,
    already_deleted,
    changed,
    check_methods,
    check_not_in_rollout,
    goal_failed,
    new_goal,
    nothing_to_do,
)
from serve_controller.core.commands.deployments import check_route_free
from serve_controller.core.goals import deployments_removed_by, pending_goal
from serve_controller.core.objects import (
    EndpointConfig,
    EndpointRecord,
    GoalKind,
    HttpRecord,
    ObjectKind,
)

NUM_ENDPOINTS_MAX = 10_000
SPLIT_MAX = 100
"""Most backends that one endpoint sends requests to, and most that it copies requests to."""
_SUM_PLAY = 1e-6
_TRAFFIC = ("traffic", "shadows")
"""Fields of an endpoint's configuration that decide where its requests go."""


def create_endpoint(checkpoint: Checkpoint, command: CreateEndpoint, now: float) -> Accepted:
    """Create an endpoint that belongs to no deployment. Raises `Conflict` where a different one exists."""
    tag = _tag(command.endpoint)
    config = EndpointConfig(
        route=None if command.route is None else check_route(command.route, "route"),
        methods=check_methods(command.methods),
        traffic=_checked_weights(checkpoint, command.traffic, "traffic"),
        options=check_endpoint_options(command.options),
    )
    existing = checkpoint.endpoints.get(tag)
    if existing is not None:
        if msgspec.structs.replace(existing.target, shadows={}) == config and not _is_deployments(
            checkpoint, tag
        ):
            return nothing_to_do(tag, existing.goal_id)
        raise Conflict(f"endpoint: {tag!r} exists already, with another route, methods, traffic or options")
    if _is_deployments(checkpoint, tag):
        raise Conflict(f"endpoint: the deployment {tag!r} is still being deleted; wait for its goal")
    check_route_free(checkpoint, config.route, tag, "route")
    if len(checkpoint.endpoints) >= NUM_ENDPOINTS_MAX:
        raise LimitReached(f"there are {NUM_ENDPOINTS_MAX} endpoints already")
    return _changed(checkpoint, EndpointRecord(endpoint_tag=tag, target=config, last_good=None), now)


def delete_endpoint(checkpoint: Checkpoint, command: DeleteEndpoint, now: float) -> Accepted:
    """Delete an endpoint that belongs to no deployment."""
    tag = _tag(command.endpoint)
    if tag not in checkpoint.endpoints:
        return already_deleted(checkpoint, tag, endpoint_key(tag))
    if _is_deployments(checkpoint, tag):
        raise Conflict(f"endpoint: {tag!r} belongs to the deployment of that name; use delete_deployment")
    draft = Draft(checkpoint)
    goal_id = new_goal(draft, GoalKind.ROUTE, tag, [endpoint_key(tag)], now)
    draft.delete((ObjectKind.ENDPOINT, tag))
    return changed(draft, tag, goal_id)


def set_traffic(checkpoint: Checkpoint, command: SetTraffic, now: float) -> Accepted:
    """Set the weights of the backends of an endpoint."""
    endpoint = _existing(checkpoint, command.endpoint)
    weights = _checked_weights(checkpoint, command.weights, "weights")
    target = msgspec.structs.replace(endpoint.target, traffic=weights)
    return _set_alone(checkpoint, endpoint, target, _TRAFFIC, now)


def shadow_traffic(checkpoint: Checkpoint, command: ShadowTraffic, now: float) -> Accepted:
    """Copy a proportion of an endpoint's requests to a backend; 0 ends that."""
    endpoint = _existing(checkpoint, command.endpoint)
    if not 0 <= command.proportion <= 1:
        raise BadField("proportion", f"is {shown(command.proportion)}; it must be between 0 and 1")
    tag = deployment_tag(command.backend_tag, "backend_tag")
    shadows = dict(endpoint.target.shadows)
    shadows.pop(tag, None)
    if command.proportion > 0:
        _check_backend(checkpoint, tag, "backend_tag")
        shadows[tag] = command.proportion
    if len(shadows) > SPLIT_MAX:
        raise LimitReached(f"an endpoint has at most {SPLIT_MAX} shadows")
    target = msgspec.structs.replace(endpoint.target, shadows=shadows)
    return _set_alone(checkpoint, endpoint, target, _TRAFFIC, now)


def set_endpoint_options(checkpoint: Checkpoint, command: SetEndpointOptions, now: float) -> Accepted:
    """Change some options of an endpoint."""
    endpoint = _existing(checkpoint, command.endpoint)
    options = check_endpoint_options(merged(endpoint.target.options, command.options, "options"))
    target = msgspec.structs.replace(endpoint.target, options=options)
    return _set_alone(checkpoint, endpoint, target, ("options",), now)


def _set_alone(
    checkpoint: Checkpoint,
    endpoint: EndpointRecord,
    target: EndpointConfig,
    fields: Iterable[str],
    now: float,
) -> Accepted:
    """Change fields of an endpoint by a goal of its own, so that a pending or failing deploy does not undo them."""
    if target == endpoint.target and not goal_failed(checkpoint, endpoint.goal_id):
        return nothing_to_do(endpoint.endpoint_tag, endpoint.goal_id)
    before = endpoint.set_alone if endpoint.goal_id in checkpoint.pending else []
    set_alone = sorted({*before, *fields})
    return _changed(checkpoint, msgspec.structs.replace(endpoint, target=target, set_alone=set_alone), now)


def _changed(checkpoint: Checkpoint, endpoint: EndpointRecord, now: float) -> Accepted:
    tag = endpoint.endpoint_tag
    draft = Draft(checkpoint)
    goal_id = new_goal(draft, GoalKind.ROUTE, tag, [endpoint_key(tag)], now)
    draft.put(msgspec.structs.replace(endpoint, goal_id=goal_id))
    return changed(draft, tag, goal_id)


def _tag(name: str) -> EndpointTag:
    return EndpointTag(deployment_tag(name, "endpoint"))


def _existing(checkpoint: Checkpoint, name: str) -> EndpointRecord:
    endpoint = checkpoint.endpoints.get(_tag(name))
    if endpoint is None:
        raise NotFound(f"endpoint: there is no endpoint {name[:100]!r}")
    return endpoint


def _is_deployments(checkpoint: Checkpoint, tag: EndpointTag) -> bool:
    return checkpoint.living_deployment(BackendTag(tag)) is not None


def _check_backend(checkpoint: Checkpoint, tag: BackendTag, field: str) -> None:
    check_not_in_rollout(checkpoint, tag, field)
    backend = checkpoint.backends.get(tag)
    if backend is None or backend.deleting:
        raise NotFound(f"{field}: there is no backend {tag!r}")
    goal = pending_goal(checkpoint, tag)
    if goal is not None and tag in deployments_removed_by(checkpoint, goal):
        raise Conflict(f"{field}: {tag!r} is left out of its application by {goal.goal_id} and goes away")


def _checked_weights(
    checkpoint: Checkpoint, weights: Mapping[str, float], field: str
) -> dict[BackendTag, float]:
    if not weights:
        raise BadField(field, "must name at least one backend")
    if len(weights) > SPLIT_MAX:
        raise BadField(field, f"names {len(weights)} backends; at most {SPLIT_MAX} are allowed")
    checked: dict[BackendTag, float] = {}
    for name, weight in weights.items():
        tag = deployment_tag(name, field)
        if not 0 <= weight <= 1:
            raise BadField(f"{field}.{name[:100]}", f"is {shown(weight)}; it must be between 0 and 1")
        if tag in checked:
            raise BadField(f"{field}.{name[:100]}", "is named twice")
        _check_backend(checkpoint, tag, f"{field}.{name[:100]}")
        checked[tag] = weight
    total = math.fsum(checked.values())
    if abs(total - 1) > _SUM_PLAY:
        raise BadField(field, f"sum to {total:g}; they must sum to 1")
    return checked


SUBJECT = "http"


def set_http_options(checkpoint: Checkpoint, command: SetHttpOptions, now: float) -> Accepted:
    """Change some HTTP options of all proxies."""
    record = checkpoint.http
    options = check_http_options(merged(checkpoint.http_options, command.options, "options"))
    if record is not None and options == record.target and not goal_failed(checkpoint, record.goal_id):
        return nothing_to_do(SUBJECT, record.goal_id)
    draft = Draft(checkpoint)
    goal_id = new_goal(draft, GoalKind.HTTP, SUBJECT, [HTTP_KEY], now)
    last_good = None if record is None else record.last_good
    is_shut_down = record is not None and record.is_shut_down
    draft.put(HttpRecord(target=options, last_good=last_good, goal_id=goal_id, is_shut_down=is_shut_down))
    return changed(draft, SUBJECT, goal_id)
