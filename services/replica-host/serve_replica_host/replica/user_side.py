"""The user side of a replica: a task for each request, on a loop where user code may do what it likes.

Why it shares nothing but mailboxes with the bus side: when user code blocks this loop, the replica still refuses,
cancels and drains.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final, final

import msgspec
import structlog
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse, Response
from starlette.types import Message

from serve_common.errors import BadField, UserCodeRaised
from serve_common.tasks import TaskOwner
from serve_common.wires.frames import Kind
from serve_replica_host.replica.answers import NotAnAnswer, WholeAnswer, to_answer
from serve_replica_host.replica.exchange import (
    UNSENT_BYTES_MAX,
    Answered,
    Drop,
    Ended,
    Exchange,
    Failed,
    Opened,
    Piece,
    Room,
    ToBus,
    ToUser,
)
from serve_replica_host.replica.http_request import make_request
from serve_replica_host.replica.tracebacks import error_line, user_traceback
from serve_replica_host.replica.user_code import UserCode

_log = structlog.get_logger(__name__)

_CLOSE_TIMEOUT_S: Final = 1.0


@final
class UserSide:
    """Runs the user's code for each exchange; all methods run on the user loop."""

    def __init__(self, code: UserCode, to_bus: Callable[[ToBus], None]) -> None:
        self._code = code
        self._to_bus = to_bus
        self._tasks = TaskOwner("request")
        self._at_work = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def take(self, item: ToUser) -> None:
        """Something from the bus side."""
        if type(item) is Exchange:
            self._at_work += 1
            self._idle.clear()
            item.work = self._tasks.start(self._serve(item), item.head.request_id)
        elif type(item) is Drop:
            exchange = item.exchange
            if exchange.gone is not None:
                exchange.gone.set()
            if exchange.work is not None:
                exchange.work.cancel()
            if not exchange.has_begun:  # then `_serve` never runs, and cannot say that it ended
                self._end(Ended(exchange))
        elif type(item) is Room:
            item.exchange.unsent_bytes -= item.sent_bytes
            if item.exchange.room is not None:
                item.exchange.room.set()

    async def wait_idle(self) -> None:
        """Wait until no user code runs for a request, not even after its answer has left."""
        await self._idle.wait()

    async def close(self) -> None:
        """Cancel what still runs."""
        await self._tasks.close(_CLOSE_TIMEOUT_S)

    async def _serve(self, exchange: Exchange) -> None:
        """Exactly one outcome that ends the work reaches the bus side, whatever happens."""
        exchange.has_begun = True
        outcome: ToBus = Ended(exchange)
        try:
            outcome = await self._outcome(exchange)
        except asyncio.CancelledError:
            if exchange.is_dropped:
                raise
            # The user's code was cancelled by its own doing; the caller must still hear of it.
        except HTTPException as error:
            answer = PlainTextResponse(error.detail, error.status_code, dict(error.headers or {}))
            outcome = Answered(exchange, error.status_code, answer.raw_headers, bytes(answer.body))
        except BadField as error:
            outcome = Failed(exchange, error.error_code, error.status_hint, str(error))
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 - it is the user's code that raised it
            outcome = self._raised(exchange, error)
        finally:
            self._end(outcome)

    def _end(self, outcome: ToBus) -> None:
        self._at_work -= 1
        if self._at_work == 0:
            self._idle.set()
        self._to_bus(outcome)

    async def _outcome(self, exchange: Exchange) -> ToBus:
        if exchange.head.kind is Kind.CALL:
            return self._whole(exchange, to_answer(await self._code.call(_argument(exchange.body))))
        request = make_request(exchange)
        answer = to_answer(await self._code.call(request))
        if isinstance(answer, WholeAnswer):
            return Answered(exchange, answer.status, answer.headers, answer.body)
        sender = _Sender(exchange, self._to_bus)
        await answer(request.scope, request.receive, sender)
        return sender.end()

    def _whole(self, exchange: Exchange, answer: WholeAnswer | Response) -> ToBus:
        if isinstance(answer, WholeAnswer):
            return Answered(exchange, answer.status, answer.headers, answer.body)
        raise NotAnAnswer("a plain call cannot be answered by a stream")

    def _raised(self, exchange: Exchange, error: BaseException) -> ToBus:
        line = error_line(error)
        _log.error(
            "user_code_raised",
            request_id=exchange.head.request_id,
            method=exchange.head.method,
            path=exchange.head.path,
            error=line,
            traceback=user_traceback(error),
        )
        return Failed(exchange, UserCodeRaised.error_code, UserCodeRaised.status_hint, line)


def _argument(body: bytes) -> Any:
    """The argument of a plain call: JSON, or None for an empty body."""
    if not body:
        return None
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadField("body", f"is not JSON: {error}") from error


@final
class _Sender:
    """ASGI's ``send`` for one streamed answer; waits while the network is slower than the user's code."""

    def __init__(self, exchange: Exchange, to_bus: Callable[[ToBus], None]) -> None:
        self._exchange = exchange
        self._to_bus = to_bus
        self._is_open = False
        self._is_ended = False

    async def __call__(self, message: Message) -> None:
        exchange = self._exchange
        if message["type"] == "http.response.start":
            self._is_open = True
            self._to_bus(Opened(exchange, message["status"], list(message["headers"])))
        elif message["type"] == "http.response.body" and not self._is_ended:
            data = bytes(message.get("body", b""))
            self._is_ended = not message.get("more_body", False)
            exchange.unsent_bytes += len(data)
            self._to_bus(Piece(exchange, data, last=self._is_ended))
            while not self._is_ended and exchange.unsent_bytes > UNSENT_BYTES_MAX:
                exchange.room = asyncio.Event()
                await exchange.room.wait()

    def end(self) -> ToBus:
        """What ends the work: nothing is left to say when the answer was whole."""
        if self._is_open and self._is_ended:
            return Ended(self._exchange)
        message = "the returned Response ended without a whole answer"
        return Failed(self._exchange, UserCodeRaised.error_code, UserCodeRaised.status_hint, message)
