"""The fewest NATS verbs that carry a request and its answer: what floor B speaks on both sides.

Why not the data plane's own connection: a floor is what nobody can go below with this language and these servers.
It has no reconnects, headers, limits, timeouts or checks, so it says what those cost; only the benchmark may use it.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from typing import cast


class BareNats(asyncio.Protocol):
    """INFO, CONNECT, PING, PONG, SUB, PUB and MSG, and no more. Subclasses say what to do with a message."""

    def __init__(self) -> None:
        self.is_connected: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._rest = b""
        self._batch: list[bytes] = []
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Greet at once: the server's INFO tells nothing that is needed here."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self._transport.write(
            b'CONNECT {"verbose":false,"pedantic":false}\r\nSUB %b 1\r\nPING\r\n' % self.subject
        )

    def connection_lost(self, exc: Exception | None) -> None:
        """Without the bus this process is of no use: end it, so that the benchmark fails instead of waiting."""
        os._exit(1)

    def data_received(self, data: bytes) -> None:
        """Take the lines and messages apart, cut anywhere."""
        data = self._rest + data if self._rest else data
        at = 0
        while (line_end := data.find(b"\r\n", at)) >= 0:
            if data.startswith(b"MSG", at):
                words = data[at:line_end].split(b" ")
                body = line_end + 2
                body_end = body + int(words[-1])
                if len(data) < body_end + 2:
                    break
                self.on_message(words, data[body:body_end])
                at = body_end + 2
                continue
            if data.startswith(b"PING", at):
                self._transport.write(b"PONG\r\n")
            elif data.startswith(b"PONG", at):
                self.is_connected.set_result(None)  # answers our only PING
            elif data.startswith(b"-ERR", at):
                raise ConnectionError(data[at:line_end].decode())
            at = line_end + 2
        self._rest = data[at:]

    def send(self, message: bytes) -> None:
        """Write with all else of this turn of the loop: a system call for each message halves the rate at c=64."""
        if not self._batch:
            self._loop.call_soon(self._flush)
        self._batch.append(message)

    def _flush(self) -> None:
        self._transport.write(b"".join(self._batch))
        self._batch.clear()

    subject: bytes
    """What is subscribed to."""

    def on_message(self, words: list[bytes], payload: bytes) -> None:
        """``words``: MSG, subject, sid, maybe the reply subject, size."""
        raise NotImplementedError


class BareResponder(BareNats):
    """Sends every request's payload back."""

    def __init__(self, subject: bytes) -> None:
        self.subject = subject
        super().__init__()

    def on_message(self, words: list[bytes], payload: bytes) -> None:
        """Answer in the read path."""
        self.send(b"PUB %b %d\r\n%b\r\n" % (words[3], len(payload), payload))


class BareRequester(BareNats):
    """Asks, and awaits the answer for as long as it takes (wrk counts what takes over two seconds as an error)."""

    def __init__(self) -> None:
        self.subject = b"_INBOX.floor.*"
        self._numbers = itertools.count()
        self._waiting: dict[bytes, asyncio.Future[bytes]] = {}
        super().__init__()

    def request(self, subject: bytes, payload: bytes) -> asyncio.Future[bytes]:
        """The answer's payload."""
        reply = b"_INBOX.floor.%d" % next(self._numbers)
        answer: asyncio.Future[bytes] = self._loop.create_future()
        self._waiting[reply] = answer
        self.send(b"PUB %b %b %d\r\n%b\r\n" % (subject, reply, len(payload), payload))
        return answer

    def on_message(self, words: list[bytes], payload: bytes) -> None:
        """Hand the answer to whoever waits; he may be gone when wrk closed the connection."""
        answer = self._waiting.pop(words[1])
        if not answer.done():
            answer.set_result(payload)
