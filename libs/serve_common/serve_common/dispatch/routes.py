"""The routing state of this process, updated from the bucket; the requests placed by it; and which replicas have loaded
which models."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from typing import Final, final

import msgspec
import structlog

from serve_common.dispatch.admission import Endpoint, NullRequestStats, RequestStats
from serve_common.dispatch.calls import Call, CallRegistry, RequestSpec
from serve_common.dispatch.errors import BackendStopped, BackPressureError, CircuitOpen
from serve_common.dispatch.recovery import LostRequests
from serve_common.dispatch.upstream import Outgoing
from serve_common.errors import NoReplicaAvailable, NotFound, ReplicaDied, ServeError
from serve_common.names import BackendTag, EndpointTag, ReplicaTag, parse_backend_tag
from serve_common.protocol.reports import RequestCounts
from serve_common.protocol.snapshots import BackendSnapshot, EndpointSnapshot, Snapshot
from serve_common.protocol.subjects import Subjects, backend_key, endpoint_key
from serve_common.routing.queues import Clock, Queued, QueueFull, SendTo
from serve_common.routing.replica_choice import Affinity, Rng, stable_hash
from serve_common.routing.route_table import HttpChange, RouteTable, SnapshotChanges, SnapshotTable
from serve_common.routing.router import Router
from serve_common.telemetry.log_lines import RateLimitedLogger

_log = structlog.get_logger(__name__)


@final
class Routes:
    """The routing state: route table, endpoints, and a router for each backend."""

    def __init__(
        self, rng: Rng, now: Clock = time.monotonic, uncounted: Collection[str] = frozenset()
    ) -> None:
        """``rng`` returns random numbers in [0, 1); ``now`` is the clock for `Router.queued_seconds`.

        That clock is the process' own and not the loop's, which stands still during an iteration: readers may be in
        other threads. Requests of the endpoints in ``uncounted`` are not counted.
        """
        self.table = RouteTable()
        self.endpoints: dict[EndpointTag, Endpoint] = {}
        self.routers: dict[BackendTag, Router] = {}
        self.unmatched = RequestStats()
        """Counts of requests without a matching endpoint."""
        self._snapshots = SnapshotTable()
        self._rng = rng
        self.now: Final = now
        self._uncounted = uncounted

    @property
    def applied_snapshot_id(self) -> int:
        """Every snapshot up to this id is applied; 0 before the bucket was read."""
        return self._snapshots.applied_snapshot_id

    @property
    def is_filled(self) -> bool:
        """True once the whole bucket was read."""
        return self._snapshots.is_filled

    def confirm(self, key: str, snapshot_id: int | None = None) -> None:
        """Record that the change of ``key`` is applied, as `SnapshotTable.confirm`."""
        self._snapshots.confirm(key, snapshot_id)

    def update(self, snapshots: Mapping[str, Snapshot | None], *, whole: bool) -> SnapshotChanges:
        """Accept snapshots of the bucket, and apply those of endpoints.

        The caller applies backends to their routers, and calls `confirm` for each applied key.
        """
        changes = self._snapshots.update(snapshots, whole=whole)
        for key, reason in changes.ignored:
            _log.warning("snapshot_ignored", key=key, reason=reason)
        if changes.endpoints:
            self._update_endpoints(changes.endpoints)
        return changes

    def choose_router(
        self, endpoint: Endpoint, named: BackendTag | None = None, shard_hash: int | None = None
    ) -> Router | None:
        """The router of the backend that takes a request; None when there is no such backend.

        That is the ``named`` one, or the one that the endpoint's traffic policy picks: for ``shard_hash`` (of a key)
        always the same. A backend without a snapshot yet gets a router without replicas: its snapshot will follow. The
        share of a removed one goes to the others.
        """
        split = endpoint.split
        if named is not None:
            is_there = named in endpoint.backend_tags and not self._is_gone(named)
            return self.router(named) if is_there else None
        if shard_hash is not None:
            backend_tag = split.choose_for(shard_hash)
        else:
            backend_tag = split.sole or split.choose(self._rng())
        if backend_tag is None:
            return None
        router = self.routers.get(backend_tag)
        if router is not None:
            return router
        if self._is_gone(backend_tag):
            split = split.without([tag for tag in split.backend_tags if self._is_gone(tag)])
            backend_tag = split.choose(self._rng()) if shard_hash is None else split.choose_for(shard_hash)
        return None if backend_tag is None else self.router(backend_tag)

    def _is_gone(self, backend_tag: BackendTag) -> bool:
        return backend_tag not in self.routers and self._snapshots.is_gone(backend_key(backend_tag))

    def request_counts(self) -> dict[BackendTag, RequestCounts]:
        """What became of the requests of the backends that take part in a rollout."""
        return {
            tag: router.request_counts.report()
            for tag, router in self.routers.items()
            if router.request_counts is not None
        }

    def orphans(self) -> list[BackendTag]:
        """Backends that have a router, but neither a snapshot nor an endpoint that may send to them."""
        named = {tag for endpoint in self.endpoints.values() for tag in endpoint.backend_tags}
        return [
            tag for tag in self.routers if tag not in named and not self._snapshots.is_there(backend_key(tag))
        ]

    def router(self, backend_tag: BackendTag) -> Router:
        """The router of a backend, created when it does not exist."""
        router = self.routers.get(backend_tag)
        if router is None:
            router = self.routers[backend_tag] = Router(backend_tag, self._rng, self.now)
        return router

    def _update_endpoints(self, changed: Mapping[EndpointTag, EndpointSnapshot | None]) -> None:
        for tag, snapshot in changed.items():
            former = self.endpoints.pop(tag, None)
            if snapshot is not None:
                stats = self._new_stats(tag) if former is None else former.stats
                self.endpoints[tag] = Endpoint(snapshot, stats)
        self.table = RouteTable(self._snapshots.endpoints().values())

    def _new_stats(self, tag: EndpointTag) -> RequestStats:
        return NullRequestStats() if tag in self._uncounted else RequestStats()


SILENT_S: Final = 15.0
"""Seconds for which a replica's models are valid; it publishes them every five seconds."""
MODELS_MAX: Final = 1000
"""Models of one replica; more are ignored."""
MODEL_ID_LENGTH_MAX: Final = 256
MODELS_BYTES_MAX: Final = 2 * MODELS_MAX * MODEL_ID_LENGTH_MAX
"""Size of one message; a larger one is ignored unread."""
AGAIN_S: Final = 0.1
"""Seconds between two updates of one replica; of messages within that time only the last is applied, at its end: a
replica that publishes constantly must not keep a router busy."""
_SWEEP_EVERY_S: Final = 1.0

_decoder: Final = msgspec.msgpack.Decoder(list[str])


@final
class ModelHolders:
    """Updates the routers with the models that their replicas have loaded.

    Why from the replicas, and not from where requests were sent: a replica evicts models by itself, other routers make
    it load some, and a router that has just started must not have everything loaded once more.

    Only replicas that a router knows are stored, so snapshots bound the memory here; a message that comes too early is
    repeated.
    """

    def __init__(self, routes: Routes, subjects: Subjects, now: Callable[[], float]) -> None:
        """``now`` reads the loop's clock."""
        self._routes = routes
        self._subjects = subjects
        self._now = now
        self._received_at: dict[ReplicaTag, float] = {}
        self._sweep_at = float("-inf")
        self._taken_at: dict[ReplicaTag, float] = {}
        """When replicas were last updated, for recent ones."""
        self._waiting: dict[ReplicaTag, bytes] = {}
        """Their last message since."""
        self._bad_messages = RateLimitedLogger(_log.warning)

    def __len__(self) -> int:
        """Number of replicas that are known to have a model."""
        return len(self._received_at)

    def take(self, subject: bytes, _reply: bytes, payload: bytes, _headers: bytes | None) -> None:
        """Process a replica's message; the callback for `Subjects.all_models`."""
        now = self._now()
        try:
            replica = self._subjects.parse_models_replica(subject.decode())
        except UnicodeDecodeError as error:
            self._refuse(now, subject, str(error))
            return
        router = self._routes.routers.get(parse_backend_tag(replica))
        if router is None or replica not in router.pool.replicas:
            return  # it will be repeated
        if len(payload) > MODELS_BYTES_MAX:
            self._refuse(now, subject, f"it has {len(payload)} bytes; {MODELS_BYTES_MAX} are allowed")
        elif now - self._taken_at.get(replica, float("-inf")) < AGAIN_S:
            self._waiting[replica] = payload
        else:
            self._take(replica, payload, now)

    def _take(self, replica: ReplicaTag, payload: bytes, now: float) -> None:
        self._taken_at[replica] = now
        self._waiting.pop(replica, None)
        try:
            former = _decoder.decode(payload)
        except (UnicodeDecodeError, msgspec.DecodeError) as error:
            self._refuse(now, replica.encode(), str(error))
            return
        self.hold(replica, former)

    def _refuse(self, now: float, subject: bytes, reason: str) -> None:
        self._bad_messages.log(now, "models_unreadable", subject=repr(subject[:200]), reason=reason)

    def hold(self, replica: ReplicaTag, former: list[str]) -> None:
        """Set the models of ``replica`` to exactly these."""
        now = self._now()
        self._forget(now)
        models = frozenset(model for model in former[:MODELS_MAX] if len(model) <= MODEL_ID_LENGTH_MAX)
        router = self._routes.routers.get(parse_backend_tag(replica))
        if router is not None and router.hold(replica, models) and models:
            self._received_at[replica] = now
        else:
            self._received_at.pop(replica, None)

    def sweep(self, now: float) -> None:
        """Apply deferred messages, and forget replicas that are gone or silent for `SILENT_S`; to be called often."""
        if self._taken_at:
            self._take_waiting(now)
        self._forget(now)

    def _forget(self, now: float) -> None:
        if now < self._sweep_at:
            return
        self._sweep_at = now + _SWEEP_EVERY_S
        for replica in [
            tag for tag, received_at in self._received_at.items() if now - received_at >= SILENT_S
        ]:
            del self._received_at[replica]
            router = self._routes.routers.get(parse_backend_tag(replica))
            if router is not None:
                router.hold(replica, frozenset())

    def _take_waiting(self, now: float) -> None:
        over = [tag for tag, taken_at in self._taken_at.items() if now - taken_at >= AGAIN_S]
        for replica in over:
            del self._taken_at[replica]
            payload = self._waiting.pop(replica, None)
            if payload is not None:
                self._take(replica, payload, now)


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
        self._lost_requests.probe_left(applied.leaving)

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
        elif call.lost_with and (stays_with := _suspect_backend(call, endpoint)) is not None:
            router = self._routes.choose_router(endpoint, stays_with)
        else:
            router = self._routes.choose_router(endpoint, spec.backend_tag, shard_hash)
        if router is None:
            wanted = "backend" if spec.backend_tag is None else f"backend {spec.backend_tag!r}"
            return NoReplicaAvailable(f"endpoint {endpoint.tag!r} has no {wanted}")
        if router.request_counts is not call.judged_by:
            call.judged_by, call.judged_since = router.request_counts, call.judged_since or self._loop.time()
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
                return BackPressureError.of_backend(router.backend_tag, outcome.limit, router.protection)
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
    backend_tag = parse_backend_tag(call.lost_with[-1])
    return backend_tag if endpoint.takes(backend_tag, call.spec.backend_tag) else None


def _build_affinity(spec: RequestSpec, backend_tag: BackendTag, shard_hash: int | None) -> Affinity:
    return Affinity(
        None if spec.code_versions is None else spec.code_versions.get(backend_tag),
        shard_hash,
        "" if spec.call is None else spec.call.model_id,
    )
