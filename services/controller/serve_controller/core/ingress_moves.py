"""The route of an application whose ingress changes.

Why it does not move at once: the new ingress may have no replica yet, and what fails must leave what served. So the
route stays with the former ingress until all of the application runs, and then both endpoints change in one decision.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import msgspec

from serve_common.errors import Conflict
from serve_common.names import BackendTag, EndpointTag
from serve_controller.core.checkpoint import Checkpoint, Draft
from serve_controller.core.objects import Application, EndpointConfig


def taken_over(
    checkpoint: Checkpoint, route: str | None, ingress: BackendTag, members: Collection[BackendTag]
) -> str | None:
    """``route`` when another one of ``members`` has it now, so that the ingress must wait for it; otherwise None."""
    if route is None:
        return None
    others = {EndpointTag(tag) for tag in members if tag != ingress}
    has_it = any(
        checkpoint.endpoints[tag].target.route == route for tag in others & set(_claimants(checkpoint, route))
    )
    return route if has_it else None


def _claimants(checkpoint: Checkpoint, route: str) -> Iterable[EndpointTag]:
    """Who has the route, or may take it back."""
    return sorted(checkpoint.routes.get(route, {}))


def route_meanwhile(
    checkpoint: Checkpoint,
    target_route: str | None,
    takes_over: str | None,
    tag: BackendTag,
    *,
    is_ingress: bool,
) -> str | None:
    """The route of a deployment of an application until all of it runs."""
    if takes_over is None:
        return target_route if is_ingress else None
    endpoint = checkpoint.endpoints.get(EndpointTag(tag))
    present = None if endpoint is None else endpoint.target.route
    return present if is_ingress or present == takes_over else None


def check_not_moving(checkpoint: Checkpoint, tag: BackendTag, field: str = "name") -> None:
    """Raise `Conflict` while a deployment's route is to come from another one, or to go to another one."""
    deployment = checkpoint.deployments.get(tag)
    application = None if deployment is None else checkpoint.applications.get(deployment.application)
    if application is None or application.goal_id not in checkpoint.pending:
        return
    route = application.target.takes_over
    endpoint = checkpoint.endpoints.get(EndpointTag(tag))
    has_it = endpoint is not None and endpoint.target.route == route
    if route is not None and (tag == application.target.ingress or has_it):
        raise Conflict(
            f"{field}: the route {route!r} of the application {application.name!r} is being moved to "
            f"{application.target.ingress!r} by {application.goal_id}; wait for its end, or deploy the application"
        )


def move_route(draft: Draft, application: Application | None) -> bool:
    """Give the ingress the route that it takes over; whether there was one to take."""
    if application is None or application.deleting or application.target.takes_over is None:
        return False
    route, ingress = application.target.takes_over, EndpointTag(application.target.ingress)
    target = msgspec.structs.replace(application.target, takes_over=None)
    draft.put(msgspec.structs.replace(application, target=target))
    for tag in _claimants(draft, route):
        if draft.endpoints[tag].target.route == route:
            _put_route(draft, tag, None)
    if ingress in draft.endpoints:
        _put_route(draft, ingress, route)
    return True


def _put_route(draft: Draft, tag: EndpointTag, route: str | None) -> None:
    endpoint = draft.endpoints[tag]
    target: EndpointConfig = msgspec.structs.replace(endpoint.target, route=route)
    draft.put(msgspec.structs.replace(endpoint, target=target))
