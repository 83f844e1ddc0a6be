"""Plain NATS request/reply, so that any NATS client can call an endpoint without HTTP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final, final

import structlog

from serve_common.dispatch.admission import CLIENT_GONE, Endpoint, can_repeat
from serve_common.dispatch.calls import RequestSpec, Response
from serve_common.dispatch.errors import ResponseUnusable
from serve_common.errors import DeadlineExceeded, NoReplicaAvailable, ServeError
from serve_common.nats.connection import BusConnection
from serve_common.nats.options import NatsProtocolError, NotConnected, OutboundFull, PayloadTooLarge
from serve_common.nats.protocol import Subscription, encode_headers, parse_headers
from serve_common.protocol.frames import CallHead
from serve_common.protocol.subjects import GATEWAY_QUEUE, Subjects, is_inbox
from serve_common.runtime.tasks import TaskOwner
from serve_common.telemetry.log_lines import RateLimitedLogger
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

WANTS_STREAM: Final = "x-serve-stream"
"""Request header: any value but ``0`` and ``false`` requests a response in several messages, the last one empty."""
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
    """

    def __init__(self, bus: BusConnection) -> None:
        self._bus = bus
        self._loop = asyncio.get_running_loop()
        self._lost = RateLimitedLogger(_log.warning)

    async def send(
        self, reply: bytes, upstream: Response, request_id: str, deadline: float, *, in_pieces: bool
    ) -> None:
        """Send a response by ``deadline`` (loop time): in one message, or ``in_pieces`` followed by an empty one.

        Raises `ResponseUnusable` for one that is invalid or too large, `DeadlineExceeded`, and the errors of the
        response's stream; the error must then still be sent to the caller.
        """
        headers = _response_headers(upstream, request_id)
        if upstream.stream is None and not in_pieces:
            self._publish(reply, self._fitting(bytes(upstream.body)), headers)
            return
        try:
            async with asyncio.timeout_at(deadline):
                if in_pieces:
                    await self._send_pieces(reply, upstream, headers)
                else:
                    self._publish(reply, await self._whole_body(upstream), headers)
        except TimeoutError as error:
            raise DeadlineExceeded("the answer did not end within the call's deadline") from error

    def send_problem(self, reply: bytes, problem: Problem, request_id: str) -> None:
        """Send an error. It also ends a response that was started in pieces."""
        headers = [
            ("Content-Type", "application/json"),
            (REQUEST_ID, request_id),
            *_error_headers(problem.status, problem.message),
        ]
        self._publish(reply, encode_problem(problem, request_id), headers)

    async def _send_pieces(self, reply: bytes, upstream: Response, headers: TextHeaders) -> None:
        limit = self._limit
        piece: memoryview | None = upstream.body if upstream.stream is None else await upstream.stream.read()
        while piece is not None:
            for at in range(0, len(piece), limit):
                self._publish(reply, bytes(piece[at : at + limit]), headers)
                headers = []  # they come with the first message only
                await self._wait_writable()
            piece = None if upstream.stream is None else await upstream.stream.read()
        self._publish(reply, b"", headers)

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

    def _publish(self, reply: bytes, body: bytes, headers: TextHeaders) -> None:
        try:
            self._bus.publish(reply, body, headers=encode_headers(headers) if headers else None)
        except (NotConnected, OutboundFull, PayloadTooLarge, NatsProtocolError) as error:
            self._lost.log(self._loop.time(), "reply_lost", reason=str(error))


def _too_large(limit: int) -> str:
    return (
        f"the answer does not fit into one message of {limit} bytes; ask for several with the header {WANTS_STREAM}, "
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
    if upstream.status >= 400:
        headers += _error_headers(upstream.status, f"the endpoint answered with status {upstream.status}")
    return headers


def _error_headers(status: int, message: str) -> TextHeaders:
    text = " ".join(message.split())[:_ERROR_TEXT_MAX]
    return [("Nats-Service-Error", text), ("Nats-Service-Error-Code", str(status))]


CALLS_MAX: Final = 2_000
"""Maximum plain calls in flight in this process."""
_METHOD: Final = "POST"
_FALSE_VALUES: Final = frozenset((b"", b"0", b"false"))


@final
class Gateway:
    """Serves ``serve.call.…`` as a member of the gateways' queue group."""

    def __init__(
        self,
        ingress: Ingress,
        bus: BusConnection,
        subjects: Subjects,
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
        self._replies = PlainReplies(bus)
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
            self._replies.send_problem(reply, problem, "")
            return
        if not self._ingress.memory.admit(len(payload)):
            self._replies.send_problem(reply, build_problem(BodiesFull()), "")
            return
        self._tasks.start(self._respond(subject, reply, payload, headers), name="call")

    async def _respond(self, subject: bytes, reply: bytes, payload: bytes, headers: bytes | None) -> None:
        started_at = time.perf_counter()  # the loop's own time stands still within an iteration
        stats = self._ingress.routes.unmatched
        status = CLIENT_GONE
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
            in_pieces = get_header_value(read, WANTS_STREAM).lower() not in _FALSE_VALUES
            spec = self._build_request(endpoint, read, payload, request_id)
            call, upstream = await self._ingress.send(spec)
            try:
                await self._replies.send(reply, upstream, request_id, spec.deadline, in_pieces=in_pieces)
            finally:
                if upstream.stream is not None:
                    self._ingress.abandon(call)
            status = upstream.status
        except ServeError as error:
            problem = build_problem(error)
            status = problem.status
            self._replies.send_problem(reply, problem, request_id)
        except Exception as error:  # noqa: BLE001 - the caller must get a response; it is logged
            _log.exception("call_failed", request_id=request_id)
            status = 500
            problem = Problem(
                status=500, code="internal", message=f"the gateway failed: {type(error).__name__}"
            )
            self._replies.send_problem(reply, problem, request_id)
        finally:
            self._ingress.memory.leave(len(payload))
            stats.add(_METHOD, status, time.perf_counter() - started_at)
            if trace is not None:
                trace.ended(status, problem)

    def _build_request(
        self, endpoint: Endpoint, read: RequestHeaders, payload: bytes, request_id: str
    ) -> RequestSpec:
        """Build the request of a call, by the same headers as for HTTP. Raises `BadField`, `DeadlineExceeded`."""
        options = endpoint.options
        now = self._loop.time()
        deadline = earliest_deadline(
            read, now + self._request_timeout_s(), options.relative_slo_ms, now=now, wall_now=self._wall_now()
        )
        forwarded = read.forwarded
        if not any(name == b"content-type" for name, _ in forwarded):
            forwarded.append((b"content-type", b"application/json"))
        model_id = read.model_id
        return RequestSpec(
            endpoint=endpoint,
            method=_METHOD,
            path="/",
            route="",
            query="",
            headers=forwarded,
            body=payload,
            request_id=request_id,
            traceparent=read.traceparent,
            call=CallHead(model_id=model_id.decode("utf-8", "replace")) if model_id else None,
            shard_key=get_header_value(read, options.shard_key_header).decode("latin-1"),
            backend_tag=endpoint.select_backend(get_header_value(read, options.backend_header)),
            is_repeatable=can_repeat(_METHOD, has_idempotency_key=read.has_idempotency_key),
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
