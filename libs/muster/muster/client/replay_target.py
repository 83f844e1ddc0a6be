"""How a replay reaches one version, and sends captured requests to it as any client's: over the proxies' gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

import msgspec

from muster.client.admin import Caller
from muster.client.requests import ERROR_CODE_HEADER, AdminReply, parse_error
from serve_common.api.views import EndpointView
from serve_common.errors import BadField, NoReplicaAvailable, NotFound, ServeError, TransientError
from serve_common.names import BackendTag, deployment_tag
from serve_common.protocol.captures import CapturedPair
from serve_common.replay.captured_requests import build_replay_headers
from serve_common.replay.differences import ReplayedResponse

_STATUS: Final = "X-Serve-Status"
_SENDS_MAX: Final = 6
_PAUSE_S: Final = 0.25


class VersionTarget(msgspec.Struct, frozen=True):
    """An endpoint that leads to one backend alone, or that takes its name in a header."""

    endpoint_tag: str
    backend_tag: BackendTag
    header: str = ""
    """Header that selects the backend; empty where the endpoint has no other."""


def find_target(
    endpoints: Sequence[EndpointView], captured: EndpointView, name: str, field: str
) -> VersionTarget:
    """How requests reach the backend or deployment ``name``. Raises `BadField` where there is no way."""
    tag = deployment_tag(name, field)
    named = [view for view in endpoints if view.endpoint_tag == tag]
    for view in (*named, captured, *endpoints):
        if {backend for backend, weight in view.traffic.items() if weight > 0} == {tag}:
            return VersionTarget(view.endpoint_tag, tag)
        if tag in view.traffic and view.options.backend_header:
            return VersionTarget(view.endpoint_tag, tag, view.options.backend_header)
    short = name.removeprefix("default/")
    raise BadField(
        field,
        f"no endpoint leads to {short[:80]!r} alone; create one without a route: "
        f"'muster endpoint create {short[:80]}-replay {short[:80]}'",
    )


def find_endpoint(endpoints: Sequence[EndpointView], name: str) -> EndpointView:
    """The endpoint of a name. Raises `NotFound`."""
    tag = deployment_tag(name)
    for view in endpoints:
        if view.endpoint_tag == tag:
            return view
    raise NotFound(f"there is no endpoint {name[:100]!r}; 'muster endpoint list' lists all")


def get_main_backend(view: EndpointView) -> str:
    """The backend that counts as the old version: the deployment's own, or that with the largest weight."""
    if view.traffic.get(view.endpoint_tag, 0) > 0:
        return view.endpoint_tag
    return max(view.traffic, key=lambda tag: (view.traffic[tag], tag))


def build_headers(pair: CapturedPair, target: VersionTarget) -> dict[str, str]:
    """The headers with which a captured request is sent to a version."""
    headers = build_replay_headers(pair, target.header)
    if target.header:
        headers[target.header] = target.backend_tag
    return headers


async def send_to(
    caller: Caller, pair: CapturedPair, target: VersionTarget, timeout_s: float
) -> ReplayedResponse:
    """Send a captured request to a version, again while proxies have no room for it.

    Raises `TransientError` where that lasts, and as `Caller.exchange`.
    """
    headers = build_headers(pair, target)
    failure: ServeError | None = None
    for attempt in range(_SENDS_MAX):
        reply = await caller.exchange(
            target.endpoint_tag, pair.request.body, headers=headers, timeout_s=timeout_s
        )
        failure = parse_error(reply)
        if not isinstance(failure, TransientError | NoReplicaAvailable):
            return _read_response(reply)
        await asyncio.sleep(_PAUSE_S * (attempt + 1))
    raise TransientError(f"{target.backend_tag} takes no requests: {failure}")


def _read_response(reply: AdminReply) -> ReplayedResponse:
    status = reply.headers.get(ERROR_CODE_HEADER) or reply.headers.get(_STATUS) or "200"
    return ReplayedResponse(
        status=int(status) if status.isdigit() else 0,
        content_type=reply.headers.get("Content-Type", ""),
        body=reply.body,
    )
