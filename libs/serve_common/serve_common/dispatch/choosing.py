"""Finds a place for a request: its backend, and there a replica or a place in the queue, or says why there is none.

Why apart from dispatching: what may keep a request out is one matter, how it is sent and answered another.
"""

from __future__ import annotations

import asyncio
from typing import Final, final

from serve_common.dispatch.admission import Endpoint
from serve_common.dispatch.calls import Ask, Call
from serve_common.dispatch.errors import BackendStopped, CircuitOpen, QueueIsFull
from serve_common.dispatch.outgoing import Outgoing
from serve_common.dispatch.routes import Routes
from serve_common.dispatch.waking import wake_if_due
from serve_common.errors import NoReplicaAvailable, NotFound, ReplicaDied, ServeError
from serve_common.names import BackendTag, backend_tag_of
from serve_common.routing.outcomes import Queued, QueueFull, SendTo
from serve_common.routing.rendezvous import stable_hash
from serve_common.routing.router import Router
from serve_common.routing.wishes import Wish

_MAY_HAVE_RUN: Final = "the request was lost and may have run"


@final
class Choosing:
    """Brings calls to routers."""

    def __init__(self, routes: Routes, outgoing: Outgoing) -> None:
        self._routes = routes
        self._outgoing = outgoing
        self._loop = asyncio.get_running_loop()

    def choose(self, call: Call) -> SendTo | Queued | ServeError:
        """Give the call a router and a place there; when an error is returned, it has got neither."""
        ask = call.ask
        # A second sending goes by what holds now.
        endpoint = self._routes.endpoints.get(ask.endpoint.tag)
        if endpoint is None:
            return NotFound(f"endpoint {ask.endpoint.tag!r} is gone")
        shadow = ask.shadow_backend
        shard_hash = stable_hash(ask.shard_key) if ask.shard_key else None
        if shadow is not None:
            router = self._routes.routers.get(shadow)
        elif (stays_with := _backend_of_suspect(call, endpoint)) is not None:
            router = self._routes.choose_router(endpoint, stays_with)
        else:
            router = self._routes.choose_router(endpoint, ask.backend_tag, shard_hash)
        if router is None:
            wanted = "backend" if ask.backend_tag is None else f"backend {ask.backend_tag!r}"
            return NoReplicaAvailable(f"endpoint {endpoint.tag!r} has no {wanted}")
        if router.circuit.is_open or router.is_stopped:
            kept_out = self._keep_out(call, router)
            if kept_out is not None:
                return kept_out
        wish = None
        if shard_hash is not None or ask.code_versions or (ask.call is not None and ask.call.model_id):
            wish = _wish_of(ask, router.backend_tag, shard_hash)
        outcome = router.submit(
            call.key,
            ask.deadline,
            is_admitted=call.was_admitted,
            is_spare=shadow is not None,
            is_suspect=call.is_suspect,
            wish=wish,
        )
        if type(outcome) is not SendTo:
            if router.is_asleep:
                wake_if_due(self._outgoing, router, self._loop.time(), refused=1)
            if type(outcome) is QueueFull:
                router.circuit.withdrew(call.key)
                return QueueIsFull(router.backend_tag, outcome.limit, router.protection)
        call.router = router
        call.was_admitted = True
        return outcome

    def _keep_out(self, call: Call, router: Router) -> ServeError | None:
        if router.is_stopped:
            router.stopped_refusals += 1
            if call.losses:
                return ReplicaDied(f"{_MAY_HAVE_RUN}; {router.backend_tag!r} was set to no replicas since")
            return BackendStopped(router.backend_tag)
        wait_s = router.circuit.refuse(call.key, self._loop.time())
        if wait_s is None:
            return None
        if call.losses:
            return ReplicaDied(f"{_MAY_HAVE_RUN}; the circuit of {router.backend_tag!r} is open")
        return CircuitOpen(router.backend_tag, wait_s)


def _backend_of_suspect(call: Call, endpoint: Endpoint) -> BackendTag | None:
    """The backend whose replica died with the request, if it may stay there: no other one should lose any to it."""
    if not call.lost_with:
        return None
    backend_tag = backend_tag_of(call.lost_with[-1])
    return backend_tag if endpoint.takes(backend_tag, call.ask.backend_tag) else None


def _wish_of(ask: Ask, backend_tag: BackendTag, shard_hash: int | None) -> Wish:
    return Wish(
        None if ask.code_versions is None else ask.code_versions.get(backend_tag),
        shard_hash,
        "" if ask.call is None else ask.call.model_id,
    )
