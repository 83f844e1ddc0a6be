"""Plain NATS request/reply in, so that any NATS client calls a model without HTTP.

Why NATS' own error headers: a foreign client knows them from every NATS service, and must not parse a body to learn
that a call failed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final, Protocol, final

import structlog

from serve_common.bus.errors import NotConnected, OutboundFull, PayloadTooLarge, ProtocolError
from serve_common.bus.headers import encode_headers, parse_headers
from serve_common.bus.quiet_log import QuietLog
from serve_common.dispatch.calls import Answer, Ask, Call
from serve_common.dispatch.errors import AnswerUnusable
from serve_common.dispatch.retry import can_repeat
from serve_common.dispatch.tallies import CLIENT_GONE
from serve_common.errors import NoReplicaAvailable, ServeError
from serve_common.subjects import GATEWAY_QUEUE, Subjects
from serve_common.tasks import TaskOwner
from serve_proxy.core.headers import REQUEST_ID, as_text, read_request_headers, read_response_head
from serve_proxy.core.problems import BadRequest, Problem, encode_problem, problem_of
from serve_proxy.shell.ingress import Ingress

_log = structlog.get_logger(__name__)

CALLS_MAX: Final = 2_000
"""Plain calls under way at once in this process."""
_METHOD: Final = "POST"
_ERROR_TEXT_MAX: Final = 500
_HEADERS_ROOM: Final = 1024

TextHeaders = list[tuple[str, str]]


class EndableSubscription(Protocol):
    """A subscription of the bus."""

    async def drain(self, timeout_s: float) -> None:
        """See `Subscription.drain`."""


class GatewayBus(Protocol):
    """What the gateway needs of the bus; `BusConnection` is one."""

    @property
    def max_payload(self) -> int:
        """Bytes that fit into one message."""
        ...

    def publish(
        self, subject: str | bytes, payload: bytes, reply: bytes = b"", headers: bytes | None = None
    ) -> None:
        """See `BusConnection.publish`."""
        ...

    def subscribe(
        self,
        subject: str | bytes,
        callback: Callable[[bytes, bytes, bytes, bytes | None], None],
        queue: str | bytes = b"",
    ) -> EndableSubscription:
        """See `BusConnection.subscribe`."""
        ...


@final
class Gateway:
    """Answers ``serve.call.…`` as one of the group of gateways."""

    def __init__(
        self,
        ingress: Ingress,
        bus: GatewayBus,
        subjects: Subjects,
        *,
        request_timeout_s: Callable[[], float],
        new_request_id: Callable[[], str],
    ) -> None:
        self._ingress = ingress
        self._bus = bus
        self._subjects = subjects
        self._request_timeout_s = request_timeout_s
        self._new_request_id = new_request_id
        self._loop = asyncio.get_running_loop()
        self._tasks = TaskOwner("gateway")
        self._subscription: EndableSubscription | None = None
        self._lost_replies = QuietLog(_log.warning)

    @property
    def in_flight(self) -> int:
        """Calls under way."""
        return len(self._tasks)

    def start(self) -> None:
        """Join the group of gateways; done once the bucket was read, so that no call meets an empty table."""
        if self._subscription is None:
            self._subscription = self._bus.subscribe(self._subjects.calls, self._take, GATEWAY_QUEUE)

    async def leave(self, timeout_s: float) -> None:
        """Leave the group; calls that were already delivered are still answered."""
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            await subscription.drain(timeout_s)

    async def close(self, timeout_s: float) -> None:
        """End all calls that are still under way."""
        await self._tasks.close(timeout_s)

    def _take(self, subject: bytes, reply: bytes, payload: bytes, headers: bytes | None) -> None:
        if not reply:
            return  # nobody could be told the answer
        if len(self._tasks) >= CALLS_MAX:
            problem = problem_of(NoReplicaAvailable(f"{CALLS_MAX} calls are under way at this gateway"))
            self._reply_problem(reply, problem, "")
            return
        self._tasks.start(self._answer(subject, reply, payload, headers), name="call")

    async def _answer(self, subject: bytes, reply: bytes, payload: bytes, headers: bytes | None) -> None:
        began = time.perf_counter()  # the loop's own time stands still within an iteration
        tally = self._ingress.routes.unmatched
        status = CLIENT_GONE
        request_id = self._new_request_id()
        try:
            read = read_request_headers(_raw_headers(headers))
            request_id = read.request_id or request_id
            tag = self._subjects.endpoint_of_call(subject.decode("utf-8", "replace"))
            endpoint = self._ingress.admit_call(tag)
            tally = endpoint.tally
            forwarded = read.forwarded
            if not any(name == b"content-type" for name, _ in forwarded):
                forwarded.append((b"content-type", b"application/json"))
            call, answer = await self._ingress.ask(
                Ask(
                    endpoint=endpoint,
                    method=_METHOD,
                    path="/",
                    route="",
                    query="",
                    headers=forwarded,
                    body=payload,
                    request_id=request_id,
                    traceparent=read.traceparent,
                    is_repeatable=can_repeat(_METHOD, has_idempotency_key=read.has_idempotency_key),
                    deadline=self._loop.time() + self._request_timeout_s(),
                )
            )
            body = await self._whole_body(call, answer)
            status = answer.status
            self._reply_answer(reply, answer, body, request_id)
        except ServeError as error:
            problem = problem_of(error)
            status = problem.status
            self._reply_problem(reply, problem, request_id)
        except Exception as error:  # noqa: BLE001 - the caller is owed an answer; it is logged
            _log.exception("call_failed", request_id=request_id)
            status = 500
            problem = Problem(
                status=500, code="internal", message=f"the gateway failed: {type(error).__name__}"
            )
            self._reply_problem(reply, problem, request_id)
        finally:
            tally.add(_METHOD, status, time.perf_counter() - began)

    async def _whole_body(self, call: Call, answer: Answer) -> bytes:
        limit = self._bus.max_payload - _HEADERS_ROOM
        if answer.stream is None:
            return _fitting(bytes(answer.body), limit)
        pieces: list[bytes] = []
        size = 0
        try:
            while (piece := await answer.stream.read()) is not None:
                size += len(piece)
                if size > limit:
                    raise AnswerUnusable(
                        f"the answer does not fit into one message of {limit} bytes; use HTTP"
                    )
                pieces.append(bytes(piece))
        finally:
            self._ingress.abandon(call)
        return b"".join(pieces)

    def _reply_answer(self, reply: bytes, answer: Answer, body: bytes, request_id: str) -> None:
        try:
            headers = read_response_head(answer.status, answer.headers).forwarded
        except ValueError as error:
            raise AnswerUnusable(str(error)) from error
        sent: TextHeaders = [(REQUEST_ID, request_id)]
        sent += [
            ("Content-Type", value) for name, value in as_text(headers) if name.lower() == "content-type"
        ]
        if answer.status >= 400:
            sent += _error_headers(answer.status, f"the endpoint answered with status {answer.status}")
        self._reply(reply, body, sent)

    def _reply_problem(self, reply: bytes, problem: Problem, request_id: str) -> None:
        headers = [
            ("Content-Type", "application/json"),
            (REQUEST_ID, request_id),
            *_error_headers(problem.status, problem.message),
        ]
        self._reply(reply, encode_problem(problem, request_id), headers)

    def _reply(self, reply: bytes, body: bytes, headers: TextHeaders) -> None:
        try:
            self._bus.publish(reply, body, headers=encode_headers(headers))
        except (NotConnected, OutboundFull, PayloadTooLarge, ProtocolError) as error:
            self._lost_replies.log(self._loop.time(), "reply_lost", reason=str(error))


def _raw_headers(block: bytes | None) -> list[tuple[bytes, bytes]]:
    if not block:
        return []
    try:
        return [(name.encode(), value.encode()) for name, value in parse_headers(block)]
    except ProtocolError as error:
        raise BadRequest("headers", str(error)) from error


def _fitting(body: bytes, limit: int) -> bytes:
    if len(body) > limit:
        raise AnswerUnusable(f"the answer has {len(body)} bytes; one message takes {limit}; use HTTP")
    return body


def _error_headers(status: int, message: str) -> TextHeaders:
    text = " ".join(message.split())[:_ERROR_TEXT_MAX]
    return [("Nats-Service-Error", text), ("Nats-Service-Error-Code", str(status))]
