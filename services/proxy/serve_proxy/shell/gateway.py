"""Plain NATS request/reply, so that any NATS client can call an endpoint without HTTP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Final, final

import structlog

from serve_common.dispatch.admission import CLIENT_GONE, Endpoint, can_repeat
from serve_common.dispatch.calls import Replies, RequestSpec, Response
from serve_common.dispatch.errors import ResponseUnusable
from serve_common.errors import DeadlineExceeded, NoReplicaAvailable, ServeError
from serve_common.nats.connection import BusConnection
from serve_common.nats.options import (
    InboxFull,
    NatsProtocolError,
    NotConnected,
    OutboundFull,
    PayloadTooLarge,
)
from serve_common.nats.protocol import Subscription, encode_headers, parse_headers
from serve_common.protocol.frames import CallHead
from serve_common.protocol.subjects import GATEWAY_QUEUE, Subjects, is_inbox
from serve_common.runtime.tasks import TaskOwner
from serve_common.telemetry.log_lines import RateLimitedLogger
from serve_proxy.core.call_headers import (
    DEFAULT_TARGET,
    HEARTBEATS,
    STREAM,
    CallTarget,
    take_target,
    wants_pieces,
)
from serve_proxy.core.headers import (
    REQUEST_ID,
    ObservedRequest,
    RequestHeaders,
    as_text,
    earliest_deadline,
    get_header_value,
    read_request_headers,
    read_response_head,
)
from serve_proxy.core.problems import BadRequest, BodiesFull, Problem, build_problem, encode_problem
from serve_proxy.shell.ingress import Ingress
from serve_proxy.shell.request_observers import RequestTraces

_log = structlog.get_logger(__name__)

HEARTBEAT: Final = "X-Serve-Heartbeat"
"""Header of an empty message that ends nothing."""
HEARTBEAT_S: Final = 0.5
"""Seconds of silence after which a heartbeat is sent to who wants them."""
_ERROR_TEXT_MAX: Final = 500
_HEADERS_BYTES_MAX: Final = 1024

TextHeaders = list[tuple[str, str]]


@final
class PlainReplies:
    """Sends responses and errors in the format of NATS services.

    Why NATS' own error headers: any client knows them from every NATS service, and need not parse a body to detect that
    a call failed.

    Why an empty message ends a response in pieces: NATS' clients know it as the sentinel of "request many", so that a
    large or streamed response needs no code of the caller's own.

    Why each piece has a reply subject: NATS answers there when nobody subscribes to the caller's inbox any more, which
    is how a stream learns that its caller left. A caller need not do anything for it.
    """

    def __init__(self, bus: BusConnection, inbox: Replies) -> None:
        self._bus = bus
        self._inbox = inbox
        self._loop = asyncio.get_running_loop()
        self._lost = RateLimitedLogger(_log.warning)

    async def send(self, reply: bytes, upstream: Response, request_id: str, deadline: float) -> None:
        """Send a response in one message, by ``deadline`` (loop time).

        Raises `ResponseUnusable` for one that is invalid or too large, `DeadlineExceeded`, and the errors of the
        response's stream; the error must then still be sent to the caller.
        """
        headers = _response_headers(upstream, request_id)
        if upstream.stream is None:
            self._publish(reply, self._fitting(bytes(upstream.body)), headers)
            return
        try:
            async with asyncio.timeout_at(deadline):
                self._publish(reply, await self._whole_body(upstream), headers)
        except TimeoutError as error:
            raise DeadlineExceeded("the answer did not end within the call's deadline") from error

    async def send_pieces(
        self, reply: bytes, upstream: Response, request_id: str, *, silence_s_max: float, has_heartbeats: bool
    ) -> bool:
        """Send a response in pieces followed by an empty message; False if its caller left before the end.

        It may last as long as it likes, as over HTTP. A caller who wants no heartbeats is only noticed to be gone when
        a piece is sent, so that such a stream may not be silent for longer than ``silence_s_max``.
        Raises as `send`.
        """
        headers = _response_headers(upstream, request_id)
        try:
            async with asyncio.timeout(None) as scope:
                with self._watched(reply, scope, has_heartbeats=has_heartbeats) as watch:
                    await self._send_pieces(
                        upstream, headers, watch, None if has_heartbeats else silence_s_max
                    )
        except TimeoutError as error:
            if watch.is_gone:
                return False
            message = f"the answer was silent for {silence_s_max:g} s, and its caller wants no heartbeats"
            raise DeadlineExceeded(message) from error
        return True

    def send_problem(self, reply: bytes, problem: Problem, request_id: str, *, in_pieces: bool) -> None:
        """Send an error; ``in_pieces`` an empty message with the same error follows, as the end of the stream."""
        errors = _error_headers(problem.status, problem.message)
        headers = [("Content-Type", "application/json"), (REQUEST_ID, request_id), *errors]
        self._publish(reply, encode_problem(problem, request_id)[1], headers)
        if in_pieces:
            self._publish(reply, b"", [(REQUEST_ID, request_id), *errors])

    @contextmanager
    def _watched(
        self, reply: bytes, scope: asyncio.Timeout, *, has_heartbeats: bool
    ) -> Iterator[_CallerWatch]:
        def publish(body: bytes, headers: TextHeaders, back: bytes) -> None:
            self._publish(reply, body, headers, back)

        watch = _CallerWatch(publish, scope, has_heartbeats=has_heartbeats)
        try:
            token, watch.back = self._inbox.new_reply(lambda *_: None, watch.leave)
        except InboxFull as error:
            raise NoReplicaAvailable(str(error)) from error
        try:
            yield watch
        finally:
            watch.close()
            self._inbox.forget(token)

    async def _send_pieces(
        self, upstream: Response, headers: TextHeaders, watch: _CallerWatch, silence_s_max: float | None
    ) -> None:
        limit = self._limit
        piece: bytes | memoryview | None = upstream.body
        if upstream.stream is not None:
            watch.limit_silence(silence_s_max)
            piece = await upstream.stream.read()
        while piece is not None:
            for at in range(0, len(piece), limit):
                watch.send(bytes(piece[at : at + limit]), headers)
                headers = []  # they come with the first message only
                await self._wait_writable()
            if upstream.stream is None:
                break
            watch.limit_silence(silence_s_max)
            piece = await upstream.stream.read()
        watch.send(b"", headers)

    async def _whole_body(self, upstream: Response) -> bytes:
        assert upstream.stream is not None
        pieces: list[bytes] = []
        size = 0
        while (piece := await upstream.stream.read()) is not None:
            size += len(piece)
            if size > self._limit:
                raise ResponseUnusable(_too_large(self._limit))
            pieces.append(bytes(piece))
        return b"".join(pieces)

    @property
    def _limit(self) -> int:
        return max(1, self._bus.max_payload - _HEADERS_BYTES_MAX)

    def _fitting(self, body: bytes) -> bytes:
        if len(body) > self._limit:
            raise ResponseUnusable(_too_large(self._limit))
        return body

    async def _wait_writable(self) -> None:
        try:
            await self._bus.wait_writable()
        except NotConnected as error:
            raise ResponseUnusable(f"the answer was lost: {error}") from error

    def _publish(self, reply: bytes, body: bytes, headers: TextHeaders, back: bytes = b"") -> None:
        try:
            self._bus.publish(reply, body, back, encode_headers(headers) if headers else None)
        except (NotConnected, OutboundFull, PayloadTooLarge, NatsProtocolError) as error:
            self._lost.log(self._loop.time(), "reply_lost", reason=str(error))


@final
class _CallerWatch:
    """Sends the pieces of one stream, and ends ``scope`` when their caller left."""

    def __init__(
        self,
        publish: Callable[[bytes, TextHeaders, bytes], None],
        scope: asyncio.Timeout,
        *,
        has_heartbeats: bool,
    ) -> None:
        self.is_gone = False
        self.back = b""
        """Where NATS reports that nobody receives the pieces."""
        self._publish = publish
        self._scope = scope
        self._loop = asyncio.get_running_loop()
        self._sent_at = self._loop.time()
        self._timer = self._loop.call_later(HEARTBEAT_S, self._beat) if has_heartbeats else None

    def send(self, body: bytes, headers: TextHeaders) -> None:
        self._sent_at = self._loop.time()
        self._publish(body, headers, self.back)

    def limit_silence(self, seconds: float | None) -> None:
        if not self.is_gone:
            self._scope.reschedule(None if seconds is None else self._loop.time() + seconds)

    def leave(self) -> None:
        self.is_gone = True
        self._scope.reschedule(self._loop.time())

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _beat(self) -> None:
        now = self._loop.time()
        if now - self._sent_at >= HEARTBEAT_S:
            self.send(b"", [(HEARTBEAT, "1")])
        self._timer = self._loop.call_at(self._sent_at + HEARTBEAT_S, self._beat)


def _too_large(limit: int) -> str:
    return (
        f"the answer does not fit into one message of {limit} bytes; ask for several with the header {STREAM}, "
        "or use HTTP"
    )


def _response_headers(upstream: Response, request_id: str) -> TextHeaders:
    try:
        forwarded = read_response_head(upstream.status, upstream.headers).forwarded
    except ValueError as error:
        raise ResponseUnusable(str(error)) from error
    headers: TextHeaders = [(REQUEST_ID, request_id)]
    headers += [
        ("Content-Type", value) for name, value in as_text(forwarded) if name.lower() == "content-type"
    ]
    if upstream.status < 400 and upstream.status != HTTPStatus.OK:
        headers.append((STATUS, str(upstream.status)))
    if upstream.status >= 400:
        headers += _error_headers(upstream.status, f"the endpoint answered with status {upstream.status}")
    return headers


def _error_headers(status: int, message: str) -> TextHeaders:
    text = " ".join(message.split())[:_ERROR_TEXT_MAX]
    return [("Nats-Service-Error", text), ("Nats-Service-Error-Code", str(status))]


STATUS: Final = "X-Serve-Status"
"""Header of a reply with the status of a response that is no error and not 200."""
CALLS_MAX: Final = 2_000
"""Maximum plain calls in flight in this process."""
_CONTENT_TYPE: Final = b"content-type"
_FALSE_VALUES: Final = frozenset((b"", b"0", b"false"))


@final
class Gateway:
    """Serves ``serve.call.…`` as a member of the gateways' queue group."""

    def __init__(
        self,
        ingress: Ingress,
        bus: BusConnection,
        subjects: Subjects,
        inbox: Replies,
        *,
        request_timeout_s: Callable[[], float],
        new_request_id: Callable[[], str],
        wall_now: Callable[[], float],
        traces: RequestTraces | None = None,
    ) -> None:
        """``wall_now`` is seconds since 1970, for absolute deadlines; ``traces`` is None if tracing is off."""
        self._traces = traces
        self._ingress = ingress
        self._bus = bus
        self._subjects = subjects
        self._request_timeout_s = request_timeout_s
        self._new_request_id = new_request_id
        self._wall_now = wall_now
        self._loop = asyncio.get_running_loop()
        self._tasks = TaskOwner("gateway")
        self._subscription: Subscription | None = None
        self._replies = PlainReplies(bus, inbox)
        self.dropped_calls = 0
        """Calls dropped because their reply subject is not an inbox."""
        self._dropped = RateLimitedLogger(_log.warning)

    @property
    def in_flight(self) -> int:
        """Calls in flight."""
        return len(self._tasks)

    def start(self) -> None:
        """Join the queue group; call it once the bucket was read, so that no call meets an empty routing table."""
        if self._subscription is None:
            self._subscription = self._bus.subscribe(self._subjects.calls, self._on_call, GATEWAY_QUEUE)

    async def leave(self, timeout_s: float) -> None:
        """Leave the queue group; calls that were already delivered are still served."""
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            await subscription.drain(timeout_s)

    async def close(self, timeout_s: float) -> None:
        """Cancel the calls in flight."""
        await self._tasks.close(timeout_s)

    def _on_call(self, subject: bytes, reply: bytes, payload: bytes, headers: bytes | None) -> None:
        if not is_inbox(reply):  # empty: there is no subject to reply to
            self.dropped_calls += 1
            text = reply[:200].decode("utf-8", "replace")
            self._dropped.log(self._loop.time(), "call_without_inbox", reply=text)
            return
        if len(self._tasks) >= CALLS_MAX:
            problem = build_problem(NoReplicaAvailable(f"{CALLS_MAX} calls are under way at this gateway"))
            self._replies.send_problem(reply, problem, "", in_pieces=wants_pieces(headers))
            return
        if not self._ingress.memory.admit(len(payload)):
            problem = build_problem(BodiesFull())
            self._replies.send_problem(reply, problem, "", in_pieces=wants_pieces(headers))
            return
        self._tasks.start(self._respond(subject, reply, payload, headers), name="call")

    async def _respond(self, subject: bytes, reply: bytes, payload: bytes, headers: bytes | None) -> None:
        started_at = time.perf_counter()  # the loop's own time stands still within an iteration
        stats = self._ingress.routes.unmatched
        status = CLIENT_GONE
        target = DEFAULT_TARGET
        request_id = self._new_request_id()
        trace: ObservedRequest | None = None
        problem: Problem | None = None
        try:
            read = read_request_headers(_raw_headers(headers))
            request_id = read.request_id or request_id
            tag = self._subjects.parse_call_endpoint(subject.decode("utf-8", "replace"))
            if self._traces is not None:
                self._traces.start_call(read, tag, request_id)
                trace = read.observer
            endpoint = self._ingress.admit_call(tag)
            stats = endpoint.stats
            target = take_target(read)
            spec = self._build_request(endpoint, read, target, payload, request_id)
            call, upstream = await self._ingress.send(spec)
            is_received = True
            try:
                if target.stream in _FALSE_VALUES:
                    await self._replies.send(reply, upstream, request_id, spec.deadline)
                else:
                    is_received = await self._replies.send_pieces(
                        reply,
                        upstream,
                        request_id,
                        silence_s_max=self._request_timeout_s(),
                        has_heartbeats=target.stream == HEARTBEATS,
                    )
            finally:
                if upstream.stream is not None:
                    self._ingress.abandon(call)
            if is_received:
                status = upstream.status
        except ServeError as error:
            problem = build_problem(error)
            status = problem.status
            self._replies.send_problem(reply, problem, request_id, in_pieces=wants_pieces(headers))
        except Exception as error:  # noqa: BLE001 - the caller must get a response; it is logged
            _log.exception("call_failed", request_id=request_id)
            status = 500
            problem = Problem(
                status=500, code="internal", message=f"the gateway failed: {type(error).__name__}"
            )
            self._replies.send_problem(reply, problem, request_id, in_pieces=wants_pieces(headers))
        finally:
            self._ingress.memory.leave(len(payload))
            stats.add(target.method, status, time.perf_counter() - started_at)
            if trace is not None:
                trace.ended(status, problem)

    def _build_request(
        self, endpoint: Endpoint, read: RequestHeaders, target: CallTarget, payload: bytes, request_id: str
    ) -> RequestSpec:
        """Build the request of a call, by the same headers as for HTTP. Raises `BadField`, `DeadlineExceeded`."""
        options = endpoint.options
        now = self._loop.time()
        deadline = earliest_deadline(
            read, now + self._request_timeout_s(), options.relative_slo_ms, now=now, wall_now=self._wall_now()
        )
        forwarded = read.forwarded
        if not any(name == _CONTENT_TYPE for name, _ in forwarded):
            forwarded.append((_CONTENT_TYPE, b"application/json"))
        model_id = read.model_id
        return RequestSpec(
            endpoint=endpoint,
            method=target.method,
            path=target.path,
            route="",
            query=target.query,
            headers=forwarded,
            body=payload,
            request_id=request_id,
            traceparent=read.traceparent,
            call=CallHead(model_id=model_id.decode("utf-8", "replace")) if model_id else None,
            shard_key=get_header_value(read, options.shard_key_header).decode("latin-1"),
            backend_tag=endpoint.select_backend(get_header_value(read, options.backend_header)),
            is_repeatable=can_repeat(target.method, has_idempotency_key=read.has_idempotency_key),
            deadline=deadline,
            trace=read.observer,
        )


def _raw_headers(block: bytes | None) -> list[tuple[bytes, bytes]]:
    if not block:
        return []
    try:
        return [(name.encode(), value.encode()) for name, value in parse_headers(block)]
    except NatsProtocolError as error:
        raise BadRequest("headers", str(error)) from error
