"""Routes calls of this process' handles to replicas, from their creation to their outcome.

Why beside the dispatcher: a call that waits for the bucket, for an endpoint deployed a moment ago, or for the responses
of other calls, is not a request yet.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final, final

import structlog

from muster.handles.calls import ArgumentSources, CallOutcome, HandleCall, get_headers
from muster.handles.options import CallNotAllowed, DeploymentGone, RequestCancelledError
from muster.handles.pickles import BODY_BYTES_MAX, to_exception
from muster.handles.wakeups import make_waiter
from serve_common.config.backend import allows
from serve_common.dispatch.admission import Endpoint
from serve_common.dispatch.calls import Call, RequestSpec, Response, ResponseBody
from serve_common.dispatch.dispatcher import Dispatcher
from serve_common.dispatch.errors import ResponseUnusable
from serve_common.dispatch.routes import Routes
from serve_common.dispatch.shadows import Shadows
from serve_common.errors import BusUnavailable, DeadlineExceeded, NoReplicaAvailable, NotFound, ServeError
from serve_common.names import BackendTag, EndpointTag, ReplicaTag
from serve_common.protocol.frames import RequestKind
from serve_common.protocol.snapshots import Snapshot
from serve_common.protocol.subjects import HTTP_KEY
from serve_common.runtime.request_context import HandleQueue, current_replica
from serve_common.runtime.tasks import TaskOwner

_log = structlog.get_logger(__name__)

BUCKET_WAIT_S: Final = 10.0
"""Seconds that a call waits for the routing state; only calls made right after the process started do."""
ENDPOINT_GRACE_S: Final = 0.5
"""Seconds that a call waits for an unknown endpoint: it may have been deployed a moment ago."""
CHOICE_WAIT_S: Final = 60.0
"""Seconds that `HandleRouter.choose` waits for a replica to run."""
WAITING_MAX: Final = 10_000
DISCONNECTED: Final = "this process no longer calls deployments"
"""Error of all calls that are under way when their process disconnects."""
_SWEEP_S: Final = 0.05
_CLOSE_TIMEOUT_S: Final = 1.0


@final
class HandleRouter:
    """Routes calls on the router's thread; implements `SnapshotListener`."""

    def __init__(self, dispatcher: Dispatcher, routes: Routes, shadows: Shadows) -> None:
        self._dispatcher = dispatcher
        self._routes = routes
        self._shadows = shadows
        self._loop = asyncio.get_running_loop()
        self._tasks = TaskOwner("handles")
        self._waiting: dict[HandleCall, float] = {}
        """Waiting calls, with the most seconds that each waits for its current reason."""
        self._is_sweeping = False
        self._ingresses: dict[str, Endpoint] = {}
        self._chosen: Counter[ReplicaTag] = Counter()
        """How many have chosen a replica and not yet sent their request."""
        self._changed = asyncio.Event()
        """Set and replaced at every change of the routes."""
        self.routing_error = "not connected to NATS yet"
        """Error message of calls that waited for the bucket in vain."""
        self.failure: ServeError | None = None
        """Permanent failure: no call will ever be routed."""
        self.failed_at = 0.0
        """When `failure` was set, by `time.monotonic`."""

    # -- inputs --

    def take(self, call: HandleCall) -> None:
        """Do the next step for ``call``; for `Mailbox`."""
        try:
            self._process(call)
        except ServeError as error:
            call.fail(error)
        except Exception as error:  # noqa: BLE001 - the caller must get the error, and other calls must go on
            _log.exception("handle_call_failed", endpoint_tag=call.endpoint)
            call.fail(ServeError(f"the call could not be made: {error!r}"))

    def on_snapshots(self, snapshots: Mapping[str, Snapshot | None], *, whole: bool) -> None:
        """Apply changed snapshots to the routes, and try waiting calls again."""
        try:
            if self._dispatcher.update(snapshots, whole=whole) is not None:
                self._routes.confirm(HTTP_KEY)  # HTTP's options mean nothing here
        finally:
            self._ingresses.clear()
            self._retry_waiting()

    def fail_all(self, error: ServeError) -> None:
        """Fail waiting and future calls permanently."""
        if self.failure is None:
            self.failure = error
            self.failed_at = time.monotonic()
        self._retry_waiting()

    def queues(self) -> dict[BackendTag, HandleQueue]:
        """Queue of each backend that was called; callable from any thread."""
        now = self._routes.now()
        routers = list(self._routes.routers.values())  # in one step: the router's thread adds and removes
        return {
            router.backend_tag: HandleQueue(router.queued_seconds(now), router.queue_depth)
            for router in routers
            if router.is_used
        }

    async def close(self) -> None:
        """Fail all calls that are under way."""
        self.fail_all(BusUnavailable(DISCONNECTED))
        await self._tasks.close(_CLOSE_TIMEOUT_S)
        await self._shadows.close(_CLOSE_TIMEOUT_S)
        self._dispatcher.close(DISCONNECTED)

    # -- before a call is a request --

    def _process(self, call: HandleCall) -> None:
        if call.outcome is not None:
            return
        if call.is_cancelled:
            self._cancel(call)
        elif call.routed is not None:
            if call.items is not None:
                call.items.notify_capacity()
        elif self.failure is not None:
            self._waiting.pop(call, None)
            call.fail(self.failure)
        elif self._has_sources(call):
            self._send(call, call.replica)

    def _has_sources(self, call: HandleCall) -> bool:
        sources = call.sources
        if sources is None:
            return True
        for source in sources.awaited():
            if source.outcome is None:
                self._wait(call, call.deadline - time.monotonic())
                return False
            if source.outcome.failure is not None:
                self._waiting.pop(call, None)
                call.finish(source.outcome)
                return False
        call.body, call.sources = sources.joined(), None
        self._waiting.pop(call, None)  # the reason to wait has changed
        return True

    def _send(self, call: HandleCall, replica: ReplicaTag | None = None) -> None:
        if not self._routes.is_filled:
            self._wait(call, BUCKET_WAIT_S)
            return
        endpoint = self._get_endpoint(call.endpoint)
        if endpoint is None:
            self._wait(call, ENDPOINT_GRACE_S)
            return
        if self._waiting:
            self._waiting.pop(call, None)
        _check_allowed(endpoint)
        left_s = call.deadline - time.monotonic()
        if left_s <= 0:
            raise DeadlineExceeded(f"the deadline of the call of {endpoint.tag!r} had passed")
        spec = RequestSpec(
            endpoint=endpoint,
            kind=RequestKind.PYTHON,
            method="",
            path="",
            route="",
            query="",
            headers=get_headers(call.trace),
            body=call.body,
            request_id=call.request_id,
            traceparent=call.traceparent,
            call=call.head,
            is_repeatable=call.is_repeatable,
            shard_key=call.shard_key,
            code_versions=call.code_versions,
            deadline=self._loop.time() + left_s,
            trace=call.trace,
        )
        if endpoint.shadows and replica is None:
            self._shadows.copy(spec)

        def on_response(routed: Call, response: Response) -> None:
            self._on_response(call, routed, response)

        def on_error(_routed: Call, error: ServeError) -> None:
            call.fail(error)

        if replica is None:
            routed = self._dispatcher.start(spec, on_response, on_error)
        else:
            routed = self._dispatcher.start_at(replica, spec, on_response, on_error)
        if call.outcome is None:
            call.routed = routed

    def _get_endpoint(self, name: str) -> Endpoint | None:
        """The endpoint of that tag, or for ``app/`` the application's ingress; None when there is none."""
        if not name.endswith("/"):
            return self._routes.endpoints.get(EndpointTag(name))
        ingress = self._ingresses.get(name)
        if ingress is None:
            own = [endpoint for tag, endpoint in self._routes.endpoints.items() if tag.startswith(name)]
            # Deployments with bare names may be beside the application ``default``.
            found = [endpoint for endpoint in own if endpoint.is_ingress]
            found = found or (own if len(own) == 1 else [endpoint for endpoint in own if endpoint.route])
            if len(found) > 1:
                raise NotFound(
                    f"application {name[:-1]!r} has {len(found)} deployments with a route; name one of them"
                )
            if found:
                ingress = self._ingresses[name] = found[0]
        return ingress

    # -- questions, and calls of all replicas --

    async def find(self, name: str) -> Endpoint | None:
        """The endpoint that a call of ``name`` would go to, or None.

        Waits for the bucket, and `ENDPOINT_GRACE_S` for what was deployed a moment ago. Raises `BusUnavailable` and
        what `fail_all` was called with.
        """
        filled_at: float | None = None
        started_at = self._loop.time()
        while True:
            if self.failure is not None:
                raise self.failure
            deadline = started_at + BUCKET_WAIT_S
            if self._routes.is_filled:
                endpoint = self._get_endpoint(name)
                if endpoint is not None:
                    return endpoint
                filled_at = self._loop.time() if filled_at is None else filled_at
                deadline = filled_at + ENDPOINT_GRACE_S
            try:
                async with asyncio.timeout_at(deadline):
                    await self._changed.wait()
            except TimeoutError:
                if filled_at is not None:
                    return None
                raise BusUnavailable(self.routing_error) from None

    async def count_replicas(self, name: str) -> int:
        """How many running replicas the router knows of the endpoint ``name``."""
        endpoint = self._get_endpoint(name)
        return 0 if endpoint is None else len(self._replicas(endpoint))

    async def broadcast(self, template: HandleCall, post: Callable[[HandleCall], None]) -> list[HandleCall]:
        """Send a copy of ``template``, which was not sent, to every running replica; ``post`` is for the copies."""
        try:
            body = template.body if template.sources is None else await _read_sources(template.sources)
            endpoint = await self.find(template.endpoint)
            if endpoint is None:
                raise DeploymentGone(f"there is no deployment {template.endpoint!r}")
            calls = []
            for replica in self._replicas(endpoint):
                call = template.copy(body, post)
                try:
                    self._send(call, replica)
                except ServeError as error:
                    call.fail(error)
                calls.append(call)
        except ServeError as error:
            template.fail(error)
            raise to_exception(error) from None
        finally:
            template.finish(CallOutcome(body=_NO_BYTES))
        return calls

    async def choose(self, name: str) -> ReplicaTag:
        """Choose the running replica that has least to do, and count one more request there until `release`.

        Waits for a replica. Raises `NoReplicaAvailable` after `CHOICE_WAIT_S`, and as `find` does.
        """
        try:
            async with asyncio.timeout(CHOICE_WAIT_S):
                while True:
                    endpoint = await self.find(name)
                    if endpoint is None:
                        raise DeploymentGone(f"there is no deployment {name!r}")
                    if loads := self._loads(endpoint):
                        break
                    await self._changed.wait()
        except TimeoutError:
            raise NoReplicaAvailable(f"no replica of {name!r} runs") from None
        chosen = min(loads, key=lambda tag: loads[tag])
        self._chosen[chosen] += 1
        return chosen

    async def release(self, replica: ReplicaTag) -> None:
        """Undo what `choose` counted."""
        self._chosen[replica] -= 1
        if not self._chosen[replica]:
            del self._chosen[replica]

    def _loads(self, endpoint: Endpoint) -> dict[ReplicaTag, int]:
        """Requests of this router at each running replica."""
        routers = [self._routes.routers.get(tag) for tag in endpoint.split.backend_tags]
        return {
            tag: len(router.requests_at(tag)) + self._chosen[tag]
            for router in routers
            if router is not None
            for tag in router.pool.running()
        }

    def _replicas(self, endpoint: Endpoint) -> list[ReplicaTag]:
        return list(self._loads(endpoint))

    # -- waiting --

    def _wait(self, call: HandleCall, at_most_s: float) -> None:
        """Retry ``call`` on every change; the time counts from when it first waited for the same reason."""
        waits_s = self._waiting.get(call)
        if waits_s == at_most_s:
            return
        if waits_s is None and len(self._waiting) >= WAITING_MAX:
            raise BusUnavailable(f"{WAITING_MAX} calls wait already: {self.routing_error}")
        left_s = call.deadline - time.monotonic()
        call.wait_until = self._loop.time() + min(at_most_s, left_s)
        self._waiting[call] = at_most_s
        if not self._is_sweeping:
            self._is_sweeping = True
            self._loop.call_later(_SWEEP_S, self._sweep)

    def _sweep(self) -> None:
        now = self._loop.time()
        for call in [call for call in self._waiting if now >= call.wait_until]:
            del self._waiting[call]
            call.fail(self._wait_error(call))
        self._is_sweeping = bool(self._waiting)
        if self._is_sweeping:
            self._loop.call_later(_SWEEP_S, self._sweep)

    def _wait_error(self, call: HandleCall) -> ServeError:
        if call.deadline <= time.monotonic():
            return DeadlineExceeded(f"the deadline of the call of {call.endpoint!r} has passed")
        if not self._routes.is_filled:
            return BusUnavailable(self.routing_error)
        if call.endpoint.endswith("/"):
            return DeploymentGone(f"there is no application {call.endpoint[:-1]!r} with an ingress")
        return DeploymentGone(f"there is no deployment {call.endpoint!r}")

    def _retry_waiting(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        for call in list(self._waiting):
            self.take(call)

    def _cancel(self, call: HandleCall) -> None:
        self._waiting.pop(call, None)
        if call.work is not None:
            call.work.cancel()
        if call.routed is not None:
            self._dispatcher.abandon(call.routed)
        call.fail(RequestCancelledError(call.request_id))

    # -- answers --

    def _on_response(self, call: HandleCall, routed: Call, response: Response) -> None:
        """Runs in the read path of the bus connection."""
        if call.items is not None:
            call.items.put(response.body if response.stream is None else _NO_BYTES)
        if response.stream is None:
            call.finish(CallOutcome(body=response.body))
            return
        call.routed = routed  # the response may arrive before `start` returns
        call.work = self._tasks.start(self._read_stream(call, routed, response.stream), "answer")

    async def _read_stream(self, call: HandleCall, routed: Call, body: ResponseBody) -> None:
        """Read a streamed response."""
        pieces: list[bytes | memoryview] = []
        size = 0
        try:
            while (piece := await body.read()) is not None:
                if call.items is not None:
                    call.items.put(piece)
                    await call.items.wait_capacity()
                    continue
                size += len(piece)
                pieces.append(piece)
                if size > BODY_BYTES_MAX:
                    raise ResponseUnusable(f"the answer has more than {BODY_BYTES_MAX} bytes")
            call.finish(CallOutcome(body=b"".join(pieces)))
        except ServeError as error:
            call.fail(error)
        finally:
            self._dispatcher.abandon(routed)
            if call.outcome is None:  # the task was cancelled
                call.fail(RequestCancelledError(call.request_id))


_NO_BYTES: Final = memoryview(b"")


async def _read_sources(sources: ArgumentSources) -> bytes:
    """The body, once all responses that are arguments have arrived. Raises what the first that failed ended with."""
    for source in sources.awaited():
        if source.outcome is None:
            waiter, waker = make_waiter()
            source.add_done_waker(waker)
            await waiter
        assert source.outcome is not None
        if source.outcome.failure is not None:
            raise source.outcome.failure
    return sources.joined()


def _check_allowed(endpoint: Endpoint) -> None:
    """Raise `CallNotAllowed` for a call that this replica may not make: NATS would drop it without an error."""
    replica = current_replica()
    if replica is None:
        return
    for tag in (endpoint.tag, *endpoint.split.backend_tags):
        if not allows(replica.may_call, replica.backend_tag, tag):
            calls = (
                "its own application" if replica.may_call is None else ", ".join(replica.may_call) or "nobody"
            )
            via = "" if tag == endpoint.tag else f", which sends requests to {tag!r}"
            raise CallNotAllowed(
                f"{replica.backend_tag!r} may not call {endpoint.tag!r}{via}: "
                f"may_call of its configuration allows {calls}"
            )
