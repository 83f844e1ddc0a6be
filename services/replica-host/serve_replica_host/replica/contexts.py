"""What user code may know of the request that it works on, set for each one.

Why the deadline is taken back when an answer begins: it bounds the time until then, and a stream may go on for hours.
"""

from __future__ import annotations

import msgspec

from serve_common.request_context import RequestContext, request_context
from serve_common.wires.frames import CallHead
from serve_replica_host.replica.exchange import Exchange

_NO_CALL = CallHead()


def enter_request(exchange: Exchange) -> None:
    """The running task works on ``exchange`` from now on."""
    head = exchange.head
    call = head.call or _NO_CALL
    request_context.set(
        RequestContext(
            request_id=head.request_id,
            traceparent=head.traceparent,
            endpoint_tag=head.endpoint_tag,
            route=head.route,
            deadline=exchange.deadline,
            model_id=call.model_id,
            key=exchange.reply,
        )
    )


def answer_begun() -> None:
    """The answer of the request that the running task works on has begun: no deadline holds any more."""
    context = request_context.get()
    if context is not None and context.deadline is not None:
        request_context.set(msgspec.structs.replace(context, deadline=None))
