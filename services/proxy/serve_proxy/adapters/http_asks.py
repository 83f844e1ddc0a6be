"""What an HTTP request asks of its endpoint, by either way through this proxy.

Why a place of its own: which headers mean what, and when a request must be answered, is the same for all of them.
"""

from __future__ import annotations

from typing import Final

import msgspec

from serve_common.adapters.system_clock import SystemClock
from serve_common.dispatch.admission import Endpoint
from serve_common.dispatch.calls import Ask
from serve_common.dispatch.request_body import RequestBody
from serve_common.dispatch.retry import can_repeat
from serve_common.values.endpoint_options import EndpointOptions
from serve_common.wires.frames import CallHead, Kind
from serve_proxy.core.callers import forward
from serve_proxy.core.deadlines import earliest_deadline
from serve_proxy.core.headers import RequestHeaders, value_of

_WEBSOCKET: Final = Kind.WEBSOCKET
_DEFAULT_SHARD_KEY: Final = EndpointOptions().shard_key_header
_CLOCK: Final = SystemClock()


def ask_of(
    endpoint: Endpoint,
    headers: RequestHeaders,
    *,
    method: str,
    path: str,
    query: str,
    body: bytes | RequestBody,
    request_id: str,
    now: float,
    deadline: float,
    peer: str,
    scheme: str = "http",
    kind: Kind = Kind.HTTP,
) -> Ask:
    """What a request asks of ``endpoint``.

    ``now`` and ``deadline``, the latest that the options allow, are by the loop's clock. ``headers`` are used up: call
    it once. ``scheme`` is http or https. Raises `BadField` naming a header that cannot be understood,
    `DeadlineExceeded` when the client's own deadline has passed.
    """
    options = endpoint.options
    if headers.has_slo or options.relative_slo_ms is not None:
        deadline = earliest_deadline(
            headers, deadline, options.relative_slo_ms, now=now, wall_now=_CLOCK.now()
        )
    if options.shard_key_header == _DEFAULT_SHARD_KEY:
        shard_key = headers.shard_key
    else:
        shard_key = value_of(headers, options.shard_key_header)
    backend = value_of(headers, options.backend_header) if options.backend_header else b""
    client, scheme = forward(headers, peer, scheme)
    if kind is _WEBSOCKET:
        scheme = "wss" if scheme == "https" else "ws"
    model_id = headers.model_id
    upload = None
    if isinstance(body, RequestBody):
        upload, body = body, b""
    ask = Ask(
        endpoint=endpoint,
        kind=kind,
        method=method,
        path=path,
        route=endpoint.route,
        query=query,
        headers=headers.forwarded,
        body=body,
        upload=upload,
        request_id=request_id,
        traceparent=headers.traceparent,
        client=client,
        scheme=scheme,
        call=CallHead(model_id=model_id.decode("utf-8", "replace")) if model_id else None,
        shard_key=shard_key.decode("latin-1") if shard_key else "",
        backend_tag=endpoint.backend_named(backend) if backend else None,
        is_repeatable=can_repeat(method, has_idempotency_key=headers.has_idempotency_key),
        deadline=deadline,
    )
    follower = headers.follower
    if follower is None:
        return ask
    follower.asks(ask)
    return msgspec.structs.replace(ask, trace=follower)
