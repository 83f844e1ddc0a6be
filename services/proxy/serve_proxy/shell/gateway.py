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

from serve_common.bus.errors import ProtocolError
from serve_common.bus.headers import parse_headers
from serve_common.bus.quiet_log import QuietLog
from serve_common.dispatch.admission import Endpoint
from serve_common.dispatch.calls import Ask
from serve_common.dispatch.retry import can_repeat
from serve_common.dispatch.tallies import CLIENT_GONE
from serve_common.errors import NoReplicaAvailable, ServeError
from serve_common.subjects import GATEWAY_QUEUE, Subjects, is_inbox
from serve_common.tasks import TaskOwner
from serve_common.wires.frames import CallHead
from serve_proxy.core.deadlines import earliest_deadline
from serve_proxy.core.following import FollowedRequest
from serve_proxy.core.headers import RequestHeaders, read_request_headers, value_of
from serve_proxy.core.problems import BadRequest, BodiesFull, Problem, problem_of
from serve_proxy.shell.ingress import Ingress
from serve_proxy.shell.plain_replies import WANTS_STREAM, PlainReplies, ReplyBus
from serve_proxy.shell.request_traces import RequestTraces

_log = structlog.get_logger(__name__)

CALLS_MAX: Final = 2_000
"""Plain calls under way at once in this process."""
_METHOD: Final = "POST"
_NO: Final = frozenset((b"", b"0", b"false"))


class EndableSubscription(Protocol):
    """A subscription of the bus."""

    async def drain(self, timeout_s: float) -> None:
        """See `Subscription.drain`."""


class GatewayBus(ReplyBus, Protocol):
    """What the gateway needs of the bus; `BusConnection` is one."""

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
        wall_now: Callable[[], float],
        traces: RequestTraces | None = None,
    ) -> None:
        """``wall_now`` is seconds since 1970, for callers that name the moment of their deadline; ``traces`` is None
        where nothing is traced.
        """
        self._traces = traces
        self._ingress = ingress
        self._bus = bus
        self._subjects = subjects
        self._request_timeout_s = request_timeout_s
        self._new_request_id = new_request_id
        self._wall_now = wall_now
        self._loop = asyncio.get_running_loop()
        self._tasks = TaskOwner("gateway")
        self._subscription: EndableSubscription | None = None
        self._replies = PlainReplies(bus)
        self.dropped_calls = 0
        """Calls that were not answered, for the subject to answer on is no inbox."""
        self._dropped = QuietLog(_log.warning)

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
        if not is_inbox(reply):  # empty: nobody could be told the answer
            self.dropped_calls += 1
            text = reply[:200].decode("utf-8", "replace")
            self._dropped.log(self._loop.time(), "call_without_inbox", reply=text)
            return
        if len(self._tasks) >= CALLS_MAX:
            problem = problem_of(NoReplicaAvailable(f"{CALLS_MAX} calls are under way at this gateway"))
            self._replies.send_problem(reply, problem, "")
            return
        if not self._ingress.room.admit(len(payload)):
            self._replies.send_problem(reply, problem_of(BodiesFull()), "")
            return
        self._tasks.start(self._answer(subject, reply, payload, headers), name="call")

    async def _answer(self, subject: bytes, reply: bytes, payload: bytes, headers: bytes | None) -> None:
        began = time.perf_counter()  # the loop's own time stands still within an iteration
        tally = self._ingress.routes.unmatched
        status = CLIENT_GONE
        request_id = self._new_request_id()
        trace: FollowedRequest | None = None
        problem: Problem | None = None
        try:
            read = read_request_headers(_raw_headers(headers))
            request_id = read.request_id or request_id
            tag = self._subjects.endpoint_of_call(subject.decode("utf-8", "replace"))
            if self._traces is not None:
                self._traces.begin_call(read, tag, request_id)
                trace = read.follower
            endpoint = self._ingress.admit_call(tag)
            tally = endpoint.tally
            in_pieces = value_of(read, WANTS_STREAM).lower() not in _NO
            ask = self._ask_of(endpoint, read, payload, request_id)
            call, answer = await self._ingress.ask(ask)
            try:
                await self._replies.send(reply, answer, request_id, ask.deadline, in_pieces=in_pieces)
            finally:
                if answer.stream is not None:
                    self._ingress.abandon(call)
            status = answer.status
        except ServeError as error:
            problem = problem_of(error)
            status = problem.status
            self._replies.send_problem(reply, problem, request_id)
        except Exception as error:  # noqa: BLE001 - the caller is owed an answer; it is logged
            _log.exception("call_failed", request_id=request_id)
            status = 500
            problem = Problem(
                status=500, code="internal", message=f"the gateway failed: {type(error).__name__}"
            )
            self._replies.send_problem(reply, problem, request_id)
        finally:
            self._ingress.room.leave(len(payload))
            tally.add(_METHOD, status, time.perf_counter() - began)
            if trace is not None:
                trace.ended(status, problem)

    def _ask_of(self, endpoint: Endpoint, read: RequestHeaders, payload: bytes, request_id: str) -> Ask:
        """What a call asks of ``endpoint``, by the same headers as HTTP's. Raises `BadField`, `DeadlineExceeded`."""
        options = endpoint.options
        now = self._loop.time()
        deadline = earliest_deadline(
            read, now + self._request_timeout_s(), options.relative_slo_ms, now=now, wall_now=self._wall_now()
        )
        forwarded = read.forwarded
        if not any(name == b"content-type" for name, _ in forwarded):
            forwarded.append((b"content-type", b"application/json"))
        model_id = read.model_id
        return Ask(
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
            shard_key=value_of(read, options.shard_key_header).decode("latin-1"),
            backend_tag=endpoint.backend_named(value_of(read, options.backend_header)),
            is_repeatable=can_repeat(_METHOD, has_idempotency_key=read.has_idempotency_key),
            deadline=deadline,
            trace=read.follower,
        )


def _raw_headers(block: bytes | None) -> list[tuple[bytes, bytes]]:
    if not block:
        return []
    try:
        return [(name.encode(), value.encode()) for name, value in parse_headers(block)]
    except ProtocolError as error:
        raise BadRequest("headers", str(error)) from error
