"""ASGI's ``send`` for one HTTP answer: a whole answer leaves as one, anything else as a stream.

Why the head waits for the body's first piece: most applications send both in one go, and one frame costs half of two.
Where the body takes longer the head leaves when the loop turns, so that a client of server-sent events sees it at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from starlette.types import Message

from serve_common.errors import UserCodeRaised
from serve_common.wires.frames import Headers
from serve_replica_host.replica.answer_stream import AnswerStream
from serve_replica_host.replica.contexts import answer_begun
from serve_replica_host.replica.exchange import Ended, Exchange, Failed, ToBus
from serve_replica_host.replica.request_body import BodyReader


class CallerGone(OSError):
    """Nobody takes the answer any more; frameworks know it by its base."""


@final
class HttpSender:
    """Sends what an ASGI application says; runs on the user loop."""

    def __init__(self, exchange: Exchange, to_bus: Callable[[ToBus], object], reader: BodyReader) -> None:
        self._exchange = exchange
        self._to_bus = to_bus
        self._reader = reader
        self._stream: AnswerStream | None = None
        self._is_ended = False

    @property
    def has_begun(self) -> bool:
        """The application has said how its answer begins."""
        return self._stream is not None

    @property
    def is_whole(self) -> bool:
        """The application has sent all of its answer."""
        return self._is_ended

    async def __call__(self, message: Message) -> None:
        """Raises `CallerGone`, and RuntimeError for what ASGI does not allow."""
        if self._exchange.is_dropped:
            raise CallerGone("the caller is gone")
        kind = message["type"].removeprefix("websocket.")
        if kind == "http.response.start":
            if self._stream is not None:
                raise RuntimeError("the answer was begun already")
            self._stream = AnswerStream(self._exchange, self._to_bus)
            self._stream.open(message["status"], as_headers(message.get("headers", ())))
            answer_begun()
        elif kind == "http.response.body":
            await self._take_body(message)

    async def _take_body(self, message: Message) -> None:
        stream = self._stream
        if stream is None:
            raise RuntimeError("a body was sent before the head of the answer")
        if self._is_ended:
            raise RuntimeError("a body was sent after the end of the answer")
        data = message.get("body", b"")
        if type(data) is not bytes:
            data = bytes(data)
        if message.get("more_body", False):
            if data and stream.put(data):
                await stream.wait()
            return
        self._is_ended = True
        stream.end(data)
        self._reader.leave()

    def outcome(self) -> ToBus:
        """What ends the work: nothing is left to say when the answer was whole."""
        if self._is_ended:
            return Ended(self._exchange)
        if self._stream is not None:
            return self._stream.outcome()
        message = "the application returned without an answer"
        return Failed(self._exchange, UserCodeRaised.error_code, UserCodeRaised.status_hint, message)


def as_headers(given: Any) -> Headers:
    """What an application gives as headers, as frames have them: its names may be in any case."""
    return [(bytes(name).lower(), bytes(value)) for name, value in given]
