"""The user side of a replica: a task for each request, on a loop where user code may do what it likes.

Why it shares nothing but mailboxes with the bus side: when user code blocks this loop, the replica still refuses,
cancels and drains.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final, final

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import PlainTextResponse

from serve_common.departures import departures
from serve_common.errors import BadField, ServeError, UserCodeRaised
from serve_common.wires.frames import Kind
from serve_replica_host.replica.asgi_http import CallerGone
from serve_replica_host.replica.contexts import enter_request, enter_trace
from serve_replica_host.replica.direct_answers import DirectAnswers
from serve_replica_host.replica.exchange import (
    Answered,
    BodyPiece,
    Drop,
    Ended,
    Exchange,
    Failed,
    Heard,
    Room,
    ToBus,
    ToUser,
    is_cancellation,
)
from serve_replica_host.replica.passed_on import failed_by, is_passed_on
from serve_replica_host.replica.request_kinds import RequestKinds, log_raised, make_reader
from serve_replica_host.replica.request_tasks import RequestTasks
from serve_replica_host.replica.sockets import LEAVE_S, Socket
from serve_replica_host.replica.tracebacks import error_line
from serve_replica_host.replica.traces import Traces
from serve_replica_host.replica.user_code import UserCode

_CLOSE_TIMEOUT_S: Final = 1.0


@final
class UserSide:
    """Runs the user's code for each exchange; all methods run on the user loop."""

    def __init__(
        self,
        code: UserCode,
        to_bus: Callable[[ToBus], object],
        direct: DirectAnswers | None = None,
        traces: Traces | None = None,
    ) -> None:
        """``direct``: whole answers leave by it, instead of ``to_bus``. ``traces`` is None where nothing is traced."""
        self._traces = traces
        self._to_bus = to_bus
        self._direct = direct
        self._kinds = RequestKinds(code, to_bus)
        self._tasks = RequestTasks()
        self._at_work = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def take(self, item: ToUser) -> None:
        """Something from the bus side."""
        if type(item) is Exchange:
            self._begin(item)
        elif type(item) is BodyPiece:
            make_reader(item.exchange, self._to_bus).add(item.data, last=item.last)
        elif type(item) is Heard:
            if item.exchange.socket is not None:
                item.exchange.socket.hear(item)
        elif type(item) is Room:
            if item.exchange.room is not None:
                item.exchange.room.set()
        elif type(item) is Drop:
            self._drop(item)

    async def wait_idle(self) -> None:
        """Wait until no user code runs for a request, not even after its answer has left."""
        await self._idle.wait()
        if self._direct is not None:
            self._direct.flush()

    async def close(self) -> None:
        """Cancel what still runs."""
        await self._tasks.close(_CLOSE_TIMEOUT_S)

    def _begin(self, exchange: Exchange) -> None:
        if not self._at_work:
            self._idle.clear()
        self._at_work += 1
        if exchange.is_dropped:  # its caller is gone, or its time is over: it never reaches the user's code
            self._end(Ended(exchange))
            return
        if exchange.head.kind is Kind.WEBSOCKET:
            exchange.socket = Socket(exchange, self._to_bus)
        exchange.work = self._tasks.start(self._serve(exchange))

    def _drop(self, drop: Drop) -> None:
        exchange = drop.exchange
        if exchange.room is not None:
            exchange.room.set()
        if exchange.reader is not None:
            exchange.reader.leave()
        work = exchange.work
        if work is None or work.done():
            return
        if isinstance(exchange.socket, Socket) and exchange.has_begun:
            # An application hears of it as ASGI has it, and then has some time to end by itself.
            exchange.socket.leave(drop.close_code, drop.reason)
            asyncio.get_running_loop().call_later(LEAVE_S, _cancel, exchange.reply, work)
            return
        _cancel(exchange.reply, work)
        if not exchange.has_begun:  # then `_serve` never runs, and cannot say that it ended
            self._end(Ended(exchange))

    async def _serve(self, exchange: Exchange) -> None:
        """Exactly one outcome that ends the work reaches the bus side, whatever happens."""
        exchange.has_begun = True
        outcome: ToBus = Ended(exchange)
        try:
            enter_request(exchange)
            if self._traces is not None:
                enter_trace(exchange, self._traces)
            outcome = await self._kinds.answer(exchange)
        except HTTPException as error:
            answer = PlainTextResponse(error.detail, error.status_code, dict(error.headers or {}))
            outcome = Answered(exchange, error.status_code, answer.raw_headers, bytes(answer.body))
        except BadField as error:
            outcome = Failed(exchange, error.error_code, error.status_hint, str(error))
        except BaseException as error:
            if is_cancellation(exchange, error):
                raise
            if isinstance(error, ServeError) and is_passed_on(error):
                outcome = failed_by(exchange, error)
            else:
                if not (exchange.is_dropped and isinstance(error, CallerGone | ClientDisconnect)):
                    log_raised(exchange, error)
                outcome = _raised(exchange, error)
        finally:
            if exchange.trace is not None:
                exchange.trace.code_ended(*_failure_of(outcome))
            self._end(outcome)

    def _end(self, outcome: ToBus) -> None:
        self._at_work -= 1
        if not self._at_work:
            self._idle.set()
        if type(outcome) is Answered and self._direct is not None:
            self._direct.send(outcome)
        else:
            self._to_bus(outcome)


def _raised(exchange: Exchange, error: BaseException) -> Failed:
    return Failed(exchange, UserCodeRaised.error_code, UserCodeRaised.status_hint, error_line(error))


def _failure_of(outcome: ToBus) -> tuple[int, str, str]:
    """The status of an answer, 0 for none yet; and of a failure its code and text, empty where there is no more."""
    if isinstance(outcome, Answered):
        return outcome.status, "", ""
    if isinstance(outcome, Failed):
        return outcome.status, outcome.error_code, outcome.message
    return 0, "", ""


def _cancel(key: bytes, work: asyncio.Task[Any]) -> None:
    """End the work on a request: its task, and what its threads wait for."""
    if not work.done():
        departures.leave(key)
        work.cancel()
