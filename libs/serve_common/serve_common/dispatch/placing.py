"""Places requests at routers, and moves active ones when snapshots change routes and backends."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from typing import Final, final

from serve_common.dispatch.admission import Endpoint
from serve_common.dispatch.calls import Call, CallRegistry, RequestSpec
from serve_common.dispatch.errors import BackendStopped, CircuitOpen, QueueIsFull
from serve_common.dispatch.outgoing import Outgoing
from serve_common.dispatch.recovery import LostRequests
from serve_common.dispatch.routes import Routes
from serve_common.errors import NoReplicaAvailable, NotFound, ReplicaDied, ServeError
from serve_common.names import BackendTag, EndpointTag, parse_backend_tag
from serve_common.protocol.snapshots import BackendSnapshot, Snapshot
from serve_common.protocol.subjects import backend_key, endpoint_key
from serve_common.routing.replica_choice import Affinity, stable_hash
from serve_common.routing.request_events import Queued, QueueFull, SendTo
from serve_common.routing.route_table import HttpChange
from serve_common.routing.router import Router


@final
class SnapshotUpdates:
    """Applies snapshots to the routers and to active calls."""

    def __init__(self, registry: CallRegistry, routes: Routes, lost_requests: LostRequests) -> None:
        self._registry = registry
        self._routes = routes
        self._lost_requests = lost_requests
        self._loop = asyncio.get_running_loop()

    def update(self, snapshots: Mapping[str, Snapshot | None], *, whole: bool) -> HttpChange | None:
        """Apply snapshots, as `Dispatcher.update`."""
        changes = self._routes.update(snapshots, whole=whole)
        failures: list[Exception] = []
        for tag, backend in changes.backends.items():
            try:
                self._apply_backend(tag, backend)
                self._routes.confirm(backend_key(tag))
            except Exception as error:  # noqa: BLE001 - raised below
                failures.append(error)
        if changes.endpoints:
            for tag in self._routes.orphans():
                self._drop_router(self._routes.routers.pop(tag))
            self._place_again(changes.endpoints)
            for endpoint_tag in changes.endpoints:
                self._routes.confirm(endpoint_key(endpoint_tag))
        if failures:
            raise ExceptionGroup("snapshots were not applied", failures)
        return changes.http

    def _apply_backend(self, tag: BackendTag, backend: BackendSnapshot | None) -> None:
        if backend is None:
            self._drop_router(self._routes.routers.pop(tag, None))
            return
        router = self._routes.router(tag)
        applied = router.apply(backend, self._loop.time())
        self._registry.perform(router, applied.dispatches)
        self._lost_requests.lose(
            applied.lost,
            router,
            "left the backend",
            died=applied.died,
            are_others_left=applied.are_others_left,
        )

    def _drop_router(self, router: Router | None) -> None:
        """Drop a removed backend: requests that wait for it are placed again or fail now, not at their deadline."""
        if router is None:
            return
        dropped = router.drop()
        waiting = [self._registry.calls[request] for request in dropped.waiting]
        for call in waiting:
            call.router = None
        self._lost_requests.lose(dropped.lost, router, "left with its backend")
        for call in waiting:
            if call.key in self._registry.calls:
                self._registry.submit(call)

    def _place_again(self, changed: Collection[EndpointTag]) -> None:
        """Place waiting requests by the current traffic policy; requests in flight are still answered.

        Otherwise a request could wait for a backend that gets no more replicas because all traffic left it.
        """
        for call in list(self._registry.calls.values()):
            spec, router = call.spec, call.router
            if (
                spec.endpoint.tag not in changed
                or call.attempt is not None
                or call.key not in self._registry.calls
            ):
                continue
            endpoint = self._routes.endpoints.get(spec.endpoint.tag)
            if endpoint is None:
                self._registry.end_with(call, NotFound(f"endpoint {spec.endpoint.tag!r} is gone"))
            elif (
                router is not None
                and spec.shadow_backend is None
                and not endpoint.takes(router.backend_tag, spec.backend_tag)
                and self._registry.leave_router(call)
            ):
                self._registry.submit(call)


def send_wake_if_due(outgoing: Outgoing, router: Router, now: float, *, refused: int = 0) -> None:
    """Send a wake message if it is due: the backend is at zero replicas, and requests wait or were ``refused``.

    Shadow copies do not count. While NATS is disconnected nothing is sent; it is then still due.

    Why both when a request starts to wait and by the timers: the first must not have to wait for a timer or a scrape,
    and the message must be repeated while requests wait, for one may be lost, or a new controller may have taken over.
    """
    waiting = router.queue_depth or refused
    if (
        router.is_scaled_to_zero
        and waiting
        and router.wake_signal.is_due(now, waiting)
        and outgoing.wake(router.backend_tag, waiting)
    ):
        router.wake_signal.record_sent(now, waiting)


_MAY_HAVE_RUN: Final = "the request was lost and may have run"


@final
class RequestPlacement:
    """Places calls at routers."""

    def __init__(self, routes: Routes, outgoing: Outgoing) -> None:
        self._routes = routes
        self._outgoing = outgoing
        self._loop = asyncio.get_running_loop()

    def choose(self, call: Call) -> SendTo | Queued | ServeError:
        """Submit the call to a router; when an error is returned, it has none."""
        spec = call.spec
        # A retry uses the current endpoint.
        endpoint = self._routes.endpoints.get(spec.endpoint.tag)
        if endpoint is None:
            return NotFound(f"endpoint {spec.endpoint.tag!r} is gone")
        shadow = spec.shadow_backend
        shard_hash = stable_hash(spec.shard_key) if spec.shard_key else None
        if shadow is not None:
            router = self._routes.routers.get(shadow)
        elif (stays_with := _suspect_backend(call, endpoint)) is not None:
            router = self._routes.choose_router(endpoint, stays_with)
        else:
            router = self._routes.choose_router(endpoint, spec.backend_tag, shard_hash)
        if router is None:
            wanted = "backend" if spec.backend_tag is None else f"backend {spec.backend_tag!r}"
            return NoReplicaAvailable(f"endpoint {endpoint.tag!r} has no {wanted}")
        if router.circuit.is_open or router.is_stopped:
            refusal = self._check_refusal(call, router)
            if refusal is not None:
                return refusal
        affinity = None
        if shard_hash is not None or spec.code_versions or (spec.call is not None and spec.call.model_id):
            affinity = _build_affinity(spec, router.backend_tag, shard_hash)
        outcome = router.submit(
            call.key,
            spec.deadline,
            is_admitted=call.was_admitted,
            is_shadow=shadow is not None,
            is_suspect=call.is_suspect,
            affinity=affinity,
        )
        if type(outcome) is not SendTo:
            if router.is_scaled_to_zero:
                send_wake_if_due(self._outgoing, router, self._loop.time(), refused=1)
            if type(outcome) is QueueFull:
                router.circuit.withdrew(call.key)
                return QueueIsFull(router.backend_tag, outcome.limit, router.protection)
        call.router = router
        call.was_admitted = True
        return outcome

    def _check_refusal(self, call: Call, router: Router) -> ServeError | None:
        if router.is_stopped:
            router.stopped_refusals += 1
            if call.lost_attempts:
                return ReplicaDied(f"{_MAY_HAVE_RUN}; {router.backend_tag!r} was set to no replicas since")
            return BackendStopped(router.backend_tag)
        wait_s = router.circuit.refuse(call.key, self._loop.time())
        if wait_s is None:
            return None
        if call.lost_attempts:
            return ReplicaDied(f"{_MAY_HAVE_RUN}; the circuit of {router.backend_tag!r} is open")
        return CircuitOpen(router.backend_tag, wait_s)


def _suspect_backend(call: Call, endpoint: Endpoint) -> BackendTag | None:
    """The backend whose replica died with the request, if it may stay there: to protect other backends from it."""
    if not call.lost_with:
        return None
    backend_tag = parse_backend_tag(call.lost_with[-1])
    return backend_tag if endpoint.takes(backend_tag, call.spec.backend_tag) else None


def _build_affinity(spec: RequestSpec, backend_tag: BackendTag, shard_hash: int | None) -> Affinity:
    return Affinity(
        None if spec.code_versions is None else spec.code_versions.get(backend_tag),
        shard_hash,
        "" if spec.call is None else spec.call.model_id,
    )
