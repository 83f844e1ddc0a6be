"""What callers over plain NATS are answered: one message, or, for those who ask for it, as many as the answer needs.

Why an empty message ends a stream: NATS' clients know that as the sentinel of "request many", so that a large or a
streamed answer needs no code of the caller's own.
"""

from __future__ import annotations

import asyncio
from typing import Final, Protocol, final

import structlog

from serve_common.bus.errors import NotConnected, OutboundFull, PayloadTooLarge, ProtocolError
from serve_common.bus.headers import encode_headers
from serve_common.bus.quiet_log import QuietLog
from serve_common.dispatch.calls import Answer
from serve_common.dispatch.errors import AnswerUnusable
from serve_common.errors import DeadlineExceeded
from serve_proxy.core.headers import REQUEST_ID, as_text, read_response_head
from serve_proxy.core.problems import Problem, encode_problem

_log = structlog.get_logger(__name__)

WANTS_STREAM: Final = "x-serve-stream"
"""Header of a request: any value but ``0`` and ``false`` asks for an answer in several messages, the last one empty."""
_ERROR_TEXT_MAX: Final = 500
_HEADERS_ROOM: Final = 1024

TextHeaders = list[tuple[str, str]]


class ReplyBus(Protocol):
    """What replying needs of the bus; `BusConnection` is one."""

    @property
    def max_payload(self) -> int:
        """Bytes that fit into one message."""
        ...

    def publish(
        self, subject: str | bytes, payload: bytes, reply: bytes = b"", headers: bytes | None = None
    ) -> None:
        """See `BusConnection.publish`."""
        ...

    async def wait_writable(self) -> None:
        """See `BusConnection.wait_writable`."""
        ...


@final
class PlainReplies:
    """Sends answers and errors as NATS' services do."""

    def __init__(self, bus: ReplyBus) -> None:
        self._bus = bus
        self._loop = asyncio.get_running_loop()
        self._lost = QuietLog(_log.warning)

    async def send(
        self, reply: bytes, answer: Answer, request_id: str, deadline: float, *, in_pieces: bool
    ) -> None:
        """Send an answer whole by ``deadline`` (the loop's time): in one message, or ``in_pieces`` and an empty one.

        Raises `AnswerUnusable` for one that does not fit or is none, `DeadlineExceeded`, and what the answer's own
        stream raises; the caller is then still to be told.
        """
        headers = _answer_headers(answer, request_id)
        if answer.stream is None and not in_pieces:
            self._publish(reply, self._fitting(bytes(answer.body)), headers)
            return
        try:
            async with asyncio.timeout_at(deadline):
                if in_pieces:
                    await self._send_pieces(reply, answer, headers)
                else:
                    self._publish(reply, await self._whole_body(answer), headers)
        except TimeoutError as error:
            raise DeadlineExceeded("the answer did not end within the call's deadline") from error

    def send_problem(self, reply: bytes, problem: Problem, request_id: str) -> None:
        """Send an error. It also ends an answer that was begun in pieces."""
        headers = [
            ("Content-Type", "application/json"),
            (REQUEST_ID, request_id),
            *_error_headers(problem.status, problem.message),
        ]
        self._publish(reply, encode_problem(problem, request_id), headers)

    async def _send_pieces(self, reply: bytes, answer: Answer, headers: TextHeaders) -> None:
        limit = self._limit
        piece: memoryview | None = answer.body if answer.stream is None else await answer.stream.read()
        while piece is not None:
            for at in range(0, len(piece), limit):
                self._publish(reply, bytes(piece[at : at + limit]), headers)
                headers = []  # they come with the first message only
                await self._wait_writable()
            piece = None if answer.stream is None else await answer.stream.read()
        self._publish(reply, b"", headers)

    async def _whole_body(self, answer: Answer) -> bytes:
        assert answer.stream is not None
        pieces: list[bytes] = []
        size = 0
        while (piece := await answer.stream.read()) is not None:
            size += len(piece)
            if size > self._limit:
                raise AnswerUnusable(_too_large(self._limit))
            pieces.append(bytes(piece))
        return b"".join(pieces)

    @property
    def _limit(self) -> int:
        return max(1, self._bus.max_payload - _HEADERS_ROOM)

    def _fitting(self, body: bytes) -> bytes:
        if len(body) > self._limit:
            raise AnswerUnusable(_too_large(self._limit))
        return body

    async def _wait_writable(self) -> None:
        try:
            await self._bus.wait_writable()
        except NotConnected as error:
            raise AnswerUnusable(f"the answer was lost: {error}") from error

    def _publish(self, reply: bytes, body: bytes, headers: TextHeaders) -> None:
        try:
            self._bus.publish(reply, body, headers=encode_headers(headers) if headers else None)
        except (NotConnected, OutboundFull, PayloadTooLarge, ProtocolError) as error:
            self._lost.log(self._loop.time(), "reply_lost", reason=str(error))


def _too_large(limit: int) -> str:
    return (
        f"the answer does not fit into one message of {limit} bytes; ask for several with the header {WANTS_STREAM}, "
        "or use HTTP"
    )


def _answer_headers(answer: Answer, request_id: str) -> TextHeaders:
    try:
        forwarded = read_response_head(answer.status, answer.headers).forwarded
    except ValueError as error:
        raise AnswerUnusable(str(error)) from error
    headers: TextHeaders = [(REQUEST_ID, request_id)]
    headers += [
        ("Content-Type", value) for name, value in as_text(forwarded) if name.lower() == "content-type"
    ]
    if answer.status >= 400:
        headers += _error_headers(answer.status, f"the endpoint answered with status {answer.status}")
    return headers


def _error_headers(status: int, message: str) -> TextHeaders:
    text = " ".join(message.split())[:_ERROR_TEXT_MAX]
    return [("Nats-Service-Error", text), ("Nats-Service-Error-Code", str(status))]
