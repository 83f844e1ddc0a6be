"""Holds every request under way: joins what routers decide with what the bus brings.

Why callbacks and no task per request: an answer resolves the waiting handler right in the bus' read path, which is what
keeps a request's cost near that of its two messages.

A call ends in one place, `_forget`, where what it holds (a slot or a place in a queue, and a reply subject) is given
back.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, final

import structlog

from serve_common.bus.errors import InboxFull, NotConnected, OutboundFull, PayloadTooLarge
from serve_common.dispatch import retry
from serve_common.dispatch.calls import Answer, Ask, Call
from serve_common.dispatch.errors import HeadTooLarge, ReplicaError
from serve_common.dispatch.incoming import Incoming
from serve_common.dispatch.liveness import Suspicions
from serve_common.dispatch.outgoing import Outgoing
from serve_common.dispatch.routes import Routes
from serve_common.errors import BusUnavailable, NoReplicaAvailable, NotFound, ReplicaDied, ServeError
from serve_common.names import BackendTag, EndpointTag, ReplicaTag
from serve_common.routing.request_queue import RequestKey
from serve_common.routing.router import Dispatch, QueueFull, Refusal, Router, SendTo
from serve_common.routing.snapshot_table import HttpChange
from serve_common.subjects import backend_key, endpoint_key
from serve_common.wires.frames import FrameUnreadable
from serve_common.wires.snapshots import BackendSnapshot, Snapshot

_log = structlog.get_logger(__name__)

PARKED_MAX: Final = 10_000
"""Requests that wait for the bus to come back."""


@final
class Dispatcher:
    """All methods run on the loop; none of them waits, except `ask`."""

    def __init__(self, routes: Routes, outgoing: Outgoing, *, bus_wait_s: float) -> None:
        """``bus_wait_s`` is how long a request waits for a bus that is away."""
        self.calls: Final[dict[RequestKey, Call]] = {}
        self.suspicions: Final = Suspicions()
        self._routes = routes
        self._outgoing = outgoing
        self._incoming = Incoming(self, outgoing, self.suspicions)
        self._bus_wait_s = bus_wait_s
        self._loop = asyncio.get_running_loop()
        self._parked: dict[RequestKey, Call] = {}
        self._last_key = 0

    # -- for handlers --

    async def ask(self, ask: Ask) -> tuple[Call, Answer]:
        """The answer of a replica; raises a `ServeError` when there is none.

        When the answer has a stream, the caller must read it to its end or call `abandon`.
        """
        self._last_key += 1
        waiter: asyncio.Future[Answer] = self._loop.create_future()
        call = Call(RequestKey(self._last_key), ask, waiter, self._incoming.take, self._take_no_responders)
        self.calls[call.key] = call
        self._submit(call)
        try:
            return call, await waiter
        except asyncio.CancelledError:
            self.abandon(call)
            raise

    def abandon(self, call: Call) -> None:
        """Nobody wants the (rest of the) answer; does nothing when it has ended."""
        if call.key in self.calls:
            self._outgoing.cancel(call)
            self._forget(call)

    def close(self) -> None:
        """End everything that is under way."""
        for call in list(self.calls.values()):
            self.fail(call, BusUnavailable("the proxy is shutting down"))

    # -- what changes around the calls --

    def update(self, snapshots: Mapping[str, Snapshot | None], *, whole: bool) -> HttpChange | None:
        """Apply what the bucket says about routing, and return what it says about HTTP; see `SnapshotListener`.

        What fails for one backend stops no other. Its snapshot then counts as not applied, and the failure is raised,
        so that the watch begins anew and tells it again.
        """
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
            self._choose_anew(changes.endpoints)
            for endpoint_tag in changes.endpoints:
                self._routes.confirm(endpoint_key(endpoint_tag))
        if failures:
            raise ExceptionGroup("snapshots were not applied", failures)
        return changes.http

    def bus_is_back(self) -> None:
        """Send what was parked, and find out what became of what was under way."""
        self.suspicions.reconnected(self._loop.time())
        for call in list(self.calls.values()):
            attempt = call.attempt
            if attempt is None:
                continue
            if attempt.is_body_sent:
                self._outgoing.probe(call)
                self._outgoing.give_credit(call, 0)
            else:  # pieces may be lost; without them it was not begun
                self._outgoing.cancel(call)
                self._leave_router(call)
                self._submit(call)
        parked, self._parked = self._parked, {}
        for call in parked.values():
            call.parked_until = 0.0
            self._submit(call)

    def perform(self, router: Router, dispatches: Sequence[Dispatch]) -> None:
        """Send what the router gave a slot."""
        todo = deque(dispatches)
        while todo:
            dispatch = todo.popleft()
            call = self.calls.get(dispatch.request)
            if call is not None:
                todo.extend(self._send(call, router, dispatch.replica))

    # -- Outcomes: what an answer does to a call --

    def answered(self, call: Call) -> None:
        """See `Outcomes`."""
        self._forget(call, is_answered=True)

    def end_with(self, call: Call, error: ServeError) -> None:
        """See `Outcomes`; also for a call that no replica has."""
        if call.answer is not None:
            call.answer.fail(error)
        elif not call.waiter.done():
            call.waiter.set_exception(error)
        self._forget(call, is_answered=isinstance(error, ReplicaError))

    def fail(self, call: Call, error: ServeError) -> None:
        """See `Outcomes`; the replica is told."""
        self._outgoing.cancel(call)
        self.end_with(call, error)

    def refused(self, call: Call, reason: Refusal) -> None:
        """See `Outcomes`."""
        attempt, router = call.attempt, call.router
        assert attempt is not None
        assert router is not None
        self._outgoing.drop(call)
        self.perform(router, router.refused(call.key, attempt.replica, reason, self._loop.time()))

    def disowned(self, call: Call) -> None:
        """See `Outcomes`: its answer was lost, or the process is not the one that was sent the request."""
        self._leave_router(call, keep_attempt=True)
        self._lost(call, "does not know the request any more")

    def held_up(self, call: Call) -> None:
        """See `Outcomes`."""
        self._leave_router(call)
        self._park(call)

    # -- choosing and sending --

    def _apply_backend(self, tag: BackendTag, backend: BackendSnapshot | None) -> None:
        if backend is None:
            self._drop_router(self._routes.routers.pop(tag, None))
            return
        router = self._routes.router(tag)
        applied = router.apply(backend)
        self.perform(router, applied.dispatches)
        self._lose(applied.lost, "left the backend")

    def _submit(self, call: Call) -> None:
        """Let the endpoint choose a backend, and that one's router a replica or a place in its queue."""
        shadow = call.ask.shadow_backend
        if not self._outgoing.is_connected:
            self._park(call)
            return
        # A second sending goes by what holds now.
        endpoint = self._routes.endpoints.get(call.ask.endpoint.tag)
        if endpoint is None:
            self._end_as_homeless(call)
            return
        router = self._routes.choose_router(endpoint) if shadow is None else self._routes.routers.get(shadow)
        if router is None:
            self.end_with(call, NoReplicaAvailable(f"endpoint {endpoint.tag!r} has no backend"))
            return
        outcome = router.submit(
            call.key, call.ask.deadline, is_admitted=call.was_admitted, is_spare=shadow is not None
        )
        if isinstance(outcome, QueueFull):
            message = f"{outcome.limit} requests wait for backend {router.backend_tag!r} already"
            self.end_with(call, NoReplicaAvailable(message))
            return
        call.router = router
        call.was_admitted = True
        if isinstance(outcome, SendTo):
            freed = self._send(call, router, outcome.replica)
            if freed:
                self.perform(router, freed)

    def _send(self, call: Call, router: Router, replica: ReplicaTag) -> Sequence[Dispatch]:
        """Begin an attempt. A call that cannot be sent gives its slot back; returned is who has it now."""
        try:
            self._outgoing.begin(call, replica)
        except NotConnected:
            freed = self._give_back(call, router)
            self._park(call)
            return freed
        except FrameUnreadable as error:
            return self._end_unsent(call, router, HeadTooLarge(str(error)))
        except (InboxFull, OutboundFull, PayloadTooLarge) as error:
            return self._end_unsent(call, router, error)
        return ()

    def _end_unsent(self, call: Call, router: Router, error: ServeError) -> Sequence[Dispatch]:
        freed = self._give_back(call, router)
        self.end_with(call, error)
        return freed

    def _park(self, call: Call) -> None:
        if call.ask.shadow_backend is not None:
            self.end_with(call, BusUnavailable("NATS is away, and a copy does not wait for it"))
            return
        if len(self._parked) >= PARKED_MAX:
            self.end_with(call, BusUnavailable(f"NATS is away and {PARKED_MAX} requests wait for it"))
            return
        call.parked_until = self._loop.time() + self._bus_wait_s
        self._parked[call.key] = call

    # -- death and loss --

    def _take_no_responders(self, call: Call) -> None:
        """Nobody listens to the subject of the replica of the call's current attempt."""
        attempt, router = call.attempt, call.router
        if attempt is None or router is None:
            return
        now = self._loop.time()
        is_dead = self.suspicions.no_responders(attempt.replica, now)
        if attempt.has_asked or call.answer is not None:
            router.put_aside(attempt.replica, now)
        else:
            self.refused(call, Refusal.NO_RESPONDERS)
        if is_dead:
            lost = router.replica_gone(attempt.replica, now)
            if lost:
                _log.warning("replica_died", replica_tag=attempt.replica, lost_requests=len(lost))
            self._lose(lost, "died")

    def _lose(self, requests: Iterable[RequestKey], why: str) -> None:
        """These were on a replica that is gone; their router has forgotten them."""
        calls = [self.calls[request] for request in requests]
        for call in calls:
            call.router = None
            self._outgoing.cancel(call)
        for call in calls:
            self._lost(call, why)

    def _lost(self, call: Call, why: str) -> None:
        """The replica may have begun the request and will not answer it. The call has left its router."""
        replica = "" if call.attempt is None else call.attempt.replica
        self._outgoing.drop(call)
        call.losses += 1
        if retry.may_send_again(
            is_repeatable=call.ask.is_repeatable,
            has_answer_begun=call.answer is not None,
            losses=call.losses,
        ):
            self._submit(call)
        else:
            self.end_with(call, ReplicaDied(f"replica {replica} {why}; the request may have run"))

    def _drop_router(self, router: Router | None) -> None:
        """The backend is gone: what waits for it chooses anew or fails now, not at its deadline."""
        if router is None:
            return
        dropped = router.drop()
        waiting = [self.calls[request] for request in dropped.waiting]
        for call in waiting:
            call.router = None
        self._lose(dropped.lost, "left with its backend")
        for call in waiting:
            self._submit(call)

    def _choose_anew(self, changed: Collection[EndpointTag]) -> None:
        """What waits goes by the traffic policy of now; what a replica has is still answered.

        Otherwise a request could wait for a backend that gets no replica any more because all traffic left it.
        """
        endpoints = self._routes.endpoints
        for call in list(self.calls.values()):
            tag, router = call.ask.endpoint.tag, call.router
            if tag not in changed or call.attempt is not None or call.key not in self.calls:
                continue
            endpoint = endpoints.get(tag)
            if endpoint is None:
                self._end_as_homeless(call)
            elif (
                router is not None
                and call.ask.shadow_backend is None
                and router.backend_tag not in endpoint.split.backend_tags
            ):
                self._leave_router(call)
                self._submit(call)

    def _end_as_homeless(self, call: Call) -> None:
        self.end_with(call, NotFound(f"endpoint {call.ask.endpoint.tag!r} is gone"))

    # -- giving back --

    def _forget(self, call: Call, *, is_answered: bool = False) -> None:
        if self.calls.pop(call.key, None) is None:
            return
        if self._parked:
            self._parked.pop(call.key, None)
        self._outgoing.drop(call)
        router = call.router
        if router is not None:
            call.router = None
            freed = router.finished(call.key) if is_answered else router.cancelled(call.key)
            if freed:
                self.perform(router, freed)

    def _give_back(self, call: Call, router: Router) -> Sequence[Dispatch]:
        self._outgoing.drop(call)
        call.router = None
        return router.cancelled(call.key)

    def _leave_router(self, call: Call, *, keep_attempt: bool = False) -> None:
        if not keep_attempt:
            self._outgoing.drop(call)
        router = call.router
        if router is not None:
            call.router = None
            self.perform(router, router.cancelled(call.key))
