"""Owns every active request: connects the routers' decisions with the messages of the bus.

Why callbacks and no task per request: a response resolves the waiting handler in the bus' read path, which keeps a
request's cost near that of its two messages.

A call ends in one place, `_remove`, where its slot or place in a queue and its reply subject are released.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final, final

import msgspec
import structlog

from serve_common.dispatch.calls import Call, RequestSpec, Response
from serve_common.dispatch.errors import (
    HeadersTooLarge,
    ReplicaError,
    ReplicaTimedOut,
    get_error_type,
)
from serve_common.dispatch.recovery import LostRequests, PendingReconnect
from serve_common.dispatch.routes import (
    RequestPlacement,
    Routes,
    SnapshotUpdates,
)
from serve_common.dispatch.upstream import Outgoing, ResponseReader
from serve_common.errors import (
    BusUnavailable,
    DeadlineExceeded,
    NoReplicaAvailable,
    ReplicaDied,
    ServeError,
)
from serve_common.names import BackendTag, ReplicaTag, parse_backend_tag
from serve_common.nats.options import InboxFull, NotConnected, OutboundFull, PayloadTooLarge
from serve_common.protocol.frames import FrameUnreadable, RequestKind
from serve_common.protocol.snapshots import Snapshot
from serve_common.routing.queues import Dispatch, Refusal, RequestKey, SendTo
from serve_common.routing.route_table import HttpChange
from serve_common.routing.router import Router

_log = structlog.get_logger(__name__)


@final
class Dispatcher:
    """All methods run on the loop; none of them waits, except `send`."""

    def __init__(self, routes: Routes, outgoing: Outgoing, *, bus_wait_s: float) -> None:
        """``bus_wait_s`` is how many seconds a request waits for the bus to reconnect."""
        self.calls: Final[dict[RequestKey, Call]] = {}
        self._routes = routes
        self._outgoing = outgoing
        self._choosing = RequestPlacement(routes, outgoing)
        self.lost_requests: Final = LostRequests(self, outgoing)
        self.failure_detector: Final = self.lost_requests.failure_detector
        self._changes = SnapshotUpdates(self, routes, self.lost_requests)
        self._response_reader = ResponseReader(self, outgoing, self.failure_detector)
        self._pending_reconnect = PendingReconnect(
            self, outgoing, self.failure_detector, bus_wait_s=bus_wait_s
        )
        self._pending = self._pending_reconnect.pending
        self._loop = asyncio.get_running_loop()
        self._last_key = 0
        outgoing.on_link_lost = self._pending_reconnect.link_lost
        # Bound once: a bound method is an object, and every call needs both.
        self._take_reply = self._response_reader.take
        self._take_no_responders = self.lost_requests.take_no_responders

    # -- for handlers --

    def start(
        self,
        spec: RequestSpec,
        on_response: Callable[[Call, Response], None],
        on_error: Callable[[Call, ServeError], None],
    ) -> Call:
        """Send a request without a future and without a task: exactly one of the callbacks is called, once.

        ``on_response`` gets the head of the response, in the bus' read path and after the slot was released (if the
        response is complete); a stream must be read to its end or given up by `abandon`. ``on_error`` gets the reason
        why there is no response, possibly before `start` returns. After `abandon` neither is called. Both may begin and
        abandon other calls; neither may block or raise.
        """
        self._last_key += 1
        call = Call(
            RequestKey(self._last_key),
            spec,
            on_response,
            on_error,
            on_reply=self._take_reply,
            on_no_responders=self._take_no_responders,
        )
        self.calls[call.key] = call
        if spec.upload is not None:
            spec.upload.on_more = lambda: self._response_reader.send_more(call)
            spec.upload.on_failed = lambda error: self.fail(call, error)
        self.submit(call)
        return call

    def start_at(
        self,
        replica: ReplicaTag,
        spec: RequestSpec,
        on_response: Callable[[Call, Response], None],
        on_error: Callable[[Call, ServeError], None],
    ) -> Call:
        """As `start`, at one replica, past the router's limits: it waits there for a slot, and never goes elsewhere."""
        self._last_key += 1
        call = Call(
            RequestKey(self._last_key),
            msgspec.structs.replace(spec, replica=replica),
            on_response,
            on_error,
            on_reply=self._take_reply,
            on_no_responders=self._take_no_responders,
        )
        call.may_queue = True
        self.calls[call.key] = call
        router = self._routes.routers.get(parse_backend_tag(replica))
        if not self._outgoing.is_connected:
            self._pending_reconnect.wait_for_bus(call)
        elif router is None or not router.submit_to(replica, call.key, spec.deadline):
            self.end_with(call, ReplicaDied(f"replica {replica} takes no requests"))
        else:
            call.router = router
            self.perform(router, self._send(call, router, replica))
        return call

    async def send(self, spec: RequestSpec) -> tuple[Call, Response]:
        """`start` for tasks: a replica's response, whose stream must be read or abandoned. Raises `ServeError`."""
        waiter: asyncio.Future[Response] = self._loop.create_future()

        def on_response(_call: Call, response: Response) -> None:
            if not waiter.done():  # the task was cancelled, and has not run since
                waiter.set_result(response)

        def on_error(_call: Call, error: ServeError) -> None:
            if not waiter.done():
                waiter.set_exception(error)

        call = self.start(spec, on_response, on_error)
        try:
            return call, await waiter
        except asyncio.CancelledError:
            self.abandon(call)
            raise

    def accepts_shadows(self, backend_tag: BackendTag) -> bool:
        """False while a backend is scaled to zero: a shadow copy must not wake it, so it would wait in vain."""
        router = self._routes.routers.get(backend_tag)
        return router is None or not router.is_scaled_to_zero

    def abandon(self, call: Call) -> None:
        """Cancel the call: its caller does not want the (rest of the) response. Does nothing when it has ended."""
        if call.runs_on:  # and only a response that is a stream is cancelled
            call.on_response, call.on_error = lambda call, _: self.abandon(call), lambda _call, _error: None
        elif call.key in self.calls:
            self._outgoing.cancel(call)
            if call.judged_by is not None:
                # Whoever leaves because it takes too long has measured how long it takes.
                call.judged_by.add_time(self._loop.time() - call.judged_since)
            router = self._remove(call)
            if router is not None:
                self.perform(router, router.cancelled(call.key))

    def close(self, why: str = "this process is shutting down") -> None:
        """End all calls with a `BusUnavailable` whose message is ``why``."""
        for call in list(self.calls.values()):
            self.fail(call, BusUnavailable(why))

    # -- what changes around the calls --

    def update(self, snapshots: Mapping[str, Snapshot | None], *, whole: bool) -> HttpChange | None:
        """Apply the bucket's routing snapshots, and return the change of HTTP options; called as `SnapshotListener`.

        A failure of one backend does not affect others. Its snapshot then counts as not applied, and the failure is
        raised, so that the watch restarts and reports it again.
        """
        return self._changes.update(snapshots, whole=whole)

    def bus_reconnected(self) -> None:
        """After a reconnect: send calls that waited for it, and probe those that were in flight."""
        self._pending_reconnect.bus_reconnected()

    def bus_responds_again(self, since: float) -> None:
        """The bus was unresponsive from ``since`` until now: conclusions from that are undone.

        Call it before later messages are read, and after `bus_reconnected` where the connection was re-established.
        """
        self.failure_detector.reconnected()
        for router in list(self._routes.routers.values()):
            self.perform(router, router.forgive(since))

    def perform(self, router: Router, dispatches: Sequence[Dispatch]) -> None:
        """Send the requests that the router gave a slot."""
        todo = deque(dispatches)
        while todo:
            dispatch = todo.popleft()
            call = self.calls.get(dispatch.request)
            if call is not None:
                todo.extend(self._send(call, router, dispatch.replica))

    # -- effects of a replica's frames on a call --

    def responded(self, call: Call) -> None:
        """Finish a call whose response is complete."""
        if call.judged_by is not None:
            is_socket = call.spec.kind is RequestKind.WEBSOCKET
            taken_s = None if is_socket else self._loop.time() - call.judged_since
            call.judged_by.add(call.status, taken_s)
        router = self._remove(call)
        if router is not None:
            freed = (
                router.finished(call.key) if call.status < 500 else router.failed(call.key, self._loop.time())
            )
            if freed:
                self.perform(router, freed)

    def end_with(self, call: Call, error: ServeError) -> None:
        """End the call without a (complete) response; also for a call that no replica has."""
        if call.key not in self.calls:
            return  # a callback of another call has abandoned this one
        if call.spec.trace is not None:
            call.spec.trace.attempt_failed(get_error_type(error), str(error))
        if call.judged_by is not None and not isinstance(error, BusUnavailable):
            # What breaks off is a failure, whatever its status was.
            status = error.status if isinstance(error, ReplicaError) else error.status_hint
            call.judged_by.add(0 if call.status else status, self._loop.time() - call.judged_since)
        router = self._remove(call)
        if router is not None:
            freed = _leave(router, call, error, self._loop.time())
            if freed:
                self.perform(router, freed)
        if call.response_reader is not None:
            call.response_reader.fail(error)
        else:
            call.on_error(call, error)

    def fail(self, call: Call, error: ServeError) -> None:
        """As `end_with`, and notify the replica."""
        if call.key in self.calls:
            self._outgoing.cancel(call)
            self.end_with(call, error)

    def refused(self, call: Call, reason: Refusal) -> None:
        """Requeue a call that the replica did not start, or let it queue in the replica."""
        attempt, router = call.attempt, call.router
        assert attempt is not None
        assert router is not None
        if call.spec.replica is not None:
            self.end_with(call, ReplicaDied(f"replica {attempt.replica} takes no requests"))
            return
        if not call.is_whole:
            self.end_with(
                call, ReplicaDied("the replica refused a request whose body is partly gone already")
            )
            return
        if call.spec.trace is not None:
            call.spec.trace.attempt_failed(reason.value, "the replica did not begin the request")
        self._outgoing.drop(call)
        if reason is Refusal.BUSY and not call.may_queue and call.spec.shadow_backend is None:
            call.may_queue = True
            if router.is_only_available(attempt.replica):
                # It keeps its slot and waits there, in the replica's own order, which is fair to all routers.
                self.perform(router, self._send(call, router, attempt.replica))
                return
        self.perform(router, router.refused(call.key, attempt.replica, reason, self._loop.time()))

    def never_started(self, call: Call) -> None:
        """Send a call again that was lost on its way to the replica, as if for the first time."""
        if call.spec.trace is not None:
            call.spec.trace.attempt_failed("never_begun", "the request did not arrive")
        if call.response_reader is not None or not call.is_whole or call.spec.replica is not None:
            self.lost_requests.request_unknown(call)
        elif self.leave_router(call):
            self.submit(call)

    def request_unknown(self, call: Call) -> None:
        """Handle a call that the replica does not know: its response was lost, or the process is another one."""
        self.lost_requests.request_unknown(call)

    # -- choosing and sending --

    def submit(self, call: Call) -> None:
        """Choose a router for a call that has none; it is sent, or waits, or ends."""
        if not self._outgoing.is_connected and not self._outgoing.links.carry_all:
            self._pending_reconnect.wait_for_bus(call)
            return
        outcome = self._choosing.choose(call)
        if type(outcome) is SendTo:
            router = call.router
            assert router is not None
            freed = self._send(call, router, outcome.replica)
            if freed:
                self.perform(router, freed)
        elif isinstance(outcome, ServeError):
            self.end_with(call, outcome)
        elif call.spec.trace is not None:
            call.spec.trace.waits("replica")

    def _send(self, call: Call, router: Router, replica: ReplicaTag) -> Sequence[Dispatch]:
        """Start an attempt. A call that cannot be sent releases its slot; returns the dispatches that this allows."""
        try:
            self._outgoing.start(call, replica, is_alone=len(self.calls) == 1)
        except NotConnected:
            if call.spec.trace is not None:
                call.spec.trace.attempt_failed(BusUnavailable.error_code, "NATS went away")
            links = self._outgoing.links
            if links.carry_all and any(links.get(other) is not None for other in router.pool.running()):
                self._outgoing.drop(call)
                return router.refused(call.key, replica, Refusal.BUSY, self._loop.time())
            freed = self._release(call, router)
            self._pending_reconnect.wait_for_bus(call)
            return freed
        except FrameUnreadable as error:
            return self._end_unsent(call, router, HeadersTooLarge(str(error)))
        except DeadlineExceeded:
            message = f"the deadline was over before a replica of {router.backend_tag!r} had room"
            return self._end_unsent(call, router, NoReplicaAvailable(message))
        except (InboxFull, OutboundFull, PayloadTooLarge) as error:
            return self._end_unsent(call, router, error)
        return ()

    def _end_unsent(self, call: Call, router: Router, error: ServeError) -> Sequence[Dispatch]:
        freed = self._release(call, router)
        self.end_with(call, error)
        return freed

    # -- release --

    def _remove(self, call: Call) -> Router | None:
        """Forget the call; return the router in which it still has a slot or a place in the queue."""
        if self.calls.pop(call.key, None) is None:
            return None
        if self._pending:
            self._pending.pop(call.key, None)
        if call.spec.upload is not None:
            call.spec.upload.close()
        self._outgoing.drop(call)
        router, call.router = call.router, None
        return router

    def _release(self, call: Call, router: Router) -> Sequence[Dispatch]:
        self._outgoing.drop(call)
        call.router = None
        return router.cancelled(call.key)

    def leave_router(self, call: Call) -> bool:
        """Release the call's slot or its place in the queue; False when that ended the call."""
        self._outgoing.drop(call)
        router = call.router
        if router is not None:
            call.router = None
            self.perform(router, router.cancelled(call.key))
        return call.key in self.calls


def _leave(router: Router, call: Call, error: ServeError, now: float) -> Sequence[Dispatch]:
    """Remove ``call`` from its router, which updates the replica's state according to ``error``."""
    request = call.key
    if isinstance(error, ReplicaError):
        # The replica itself reports that the user's code, or a deployment that it called, took too long.
        if error.code == DeadlineExceeded.error_code and now >= call.spec.deadline:
            return router.cancelled(request)
        return router.failed(request, now) if error.status >= 500 else router.finished(request)
    if isinstance(error, ReplicaTimedOut):
        return router.incomplete(request, now)
    return router.cancelled(request)
