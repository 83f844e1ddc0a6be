"""A replica for the proxy's tests: speaks frames on its subject and does what the path of a request says."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from serve_common.names import ReplicaTag
from serve_common.nats.connection import BusConnection
from serve_common.nats.options import BusOptions, NotConnected
from serve_common.protocol.frames import (
    FRAME_BODY_BYTES_MAX,
    UNKNOWN_BYTES,
    WINDOW_FRAMES,
    WINDOW_MESSAGES,
    BodyHead,
    CancelHead,
    CloseHead,
    CreditHead,
    ErrorHead,
    Head,
    MessageHead,
    ProbeHead,
    RefusedHead,
    RequestHead,
    RequestKind,
    ResponseHead,
    decode_frame,
    encode_frame,
    split_body,
)
from serve_common.protocol.subjects import Subjects


@dataclass
class Held:
    """A request that the replica has and has not answered to its end."""

    reply: bytes
    head: RequestHead
    body: bytearray = field(default_factory=bytearray)
    to_send: list[bytes] = field(default_factory=list)
    sequence: int = 1
    credit: int = WINDOW_FRAMES - 1
    received_bytes: int = 0
    has_answered: bool = False
    credit_owed: int = 0
    """Of a body that ``/stuck`` does not take until `take_on`."""
    messages: list[tuple[bool, bytes]] = field(default_factory=list)
    """What a socket has heard: is it text, and what."""
    partial: bytearray = field(default_factory=bytearray)
    frames: int = 0
    closed: tuple[int, str] | None = None


class FakeReplica:
    """By default echoes the body; ``/hold…`` waits for `release`, ``/big?n`` streams n bytes, ``/raise`` fails.

    Of a body that comes in pieces: ``/sink`` counts it, ``/stuck`` takes no more than the window, ``/early`` answers at
    its first piece, ``/pieces`` answers each piece. Sockets: see `_open_socket`.
    """

    def __init__(self, url: str, tag: str, *, limit: int = 100) -> None:
        self.tag = ReplicaTag(tag)
        self.limit = limit
        self.is_draining = False
        self.held: dict[bytes, Held] = {}
        self.seen: list[RequestHead] = []
        self.cancelled: list[str] = []
        self.probes = 0
        self.bodies: list[bytes] = []
        self.sockets: list[Held] = []
        self.on_change: Callable[[], None] = lambda: None
        self._bus = BusConnection(
            BusOptions([url], name=tag, reconnect_wait_min_s=0.01, reconnect_wait_max_s=0.05),
            random.Random(1),
        )

    async def start(self) -> FakeReplica:
        await self._bus.connect(30)
        self._bus.subscribe(Subjects().replica(self.tag), self._take)
        await self._bus.flush(30)
        return self

    async def close(self) -> None:
        await self._bus.close()

    async def flush(self) -> None:
        """Until what the server had for it has come."""
        await self._bus.flush(20)

    async def wait(self, condition: Callable[[], bool]) -> None:
        """Wait until ``condition`` holds; it is looked at after each frame."""
        event = asyncio.Event()
        self.on_change = lambda: event.set() if condition() else None
        self.on_change()
        await asyncio.wait_for(event.wait(), 30)

    def release(self, body: bytes = b"released") -> None:
        """Answer everything that is held."""
        for held in list(self.held.values()):
            self._finish(held, body)

    def forget(self) -> None:
        """As a restarted process would: what was held is unknown from now on."""
        self.held.clear()

    def send(self, held: Held, head: Head, body: bytes = b"") -> None:
        with contextlib.suppress(NotConnected):  # as a real one: the router will probe
            self._bus.publish(held.reply, encode_frame(head, body))

    def _take(self, _subject: bytes, reply: bytes, payload: bytes, _headers: bytes | None) -> None:
        head, body = decode_frame(payload)
        held = self.held.get(reply)
        match head:
            case RequestHead():
                self._begin(Held(reply, head), bytes(body))
            case BodyHead(sequence, last) if held is not None:
                assert sequence == held.frames + 1
                held.frames = sequence
                self._receive(held, body, last=last)
            case MessageHead() if held is not None:
                self._on_message(held, head, body)
            case CloseHead(code, reason) if held is not None:
                held.closed = (code, reason)
                del self.held[reply]
            case CreditHead(frames) if held is not None:
                held.credit += frames
                self._pump(held)
            case CancelHead() if held is not None:
                self.cancelled.append(held.head.path)
                del self.held[reply]
            case ProbeHead():
                self.probes += 1
                if held is None:
                    self._bus.publish(reply, encode_frame(RefusedHead("unknown", len(self.held))))
        self.on_change()

    def _begin(self, held: Held, body: bytes) -> None:
        if self.is_draining or len(self.held) >= self.limit:
            self.send(held, RefusedHead("draining" if self.is_draining else "busy", len(self.held)))
            return
        self.held[held.reply] = held
        self.seen.append(held.head)
        if held.head.kind is RequestKind.WEBSOCKET:
            self._open_socket(held)
        else:
            self._receive(held, body, last=len(body) == held.head.body_bytes)

    def _receive(self, held: Held, body: bytes | memoryview, *, last: bool) -> None:
        path = held.head.path.removeprefix(held.head.route)
        held.received_bytes += len(body)
        if not path.startswith("/sink"):
            held.body += body
        if path.startswith("/early"):
            self._finish(held, b"enough")
            return
        if path.startswith("/pieces"):
            self._answer_piece(held, bytes(body), last=last)
        if last:
            assert held.head.body_bytes in (UNKNOWN_BYTES, held.received_bytes)
            self.bodies.append(bytes(held.body))
            if path.startswith("/sink"):
                held.body += b"%d" % held.received_bytes
            if not path.startswith("/pieces"):
                self._work(held)
        elif path.startswith("/stuck"):
            held.credit_owed += 1
        else:
            self.send(held, CreditHead(1))

    def take_on(self) -> None:
        """Take what ``/stuck`` has not taken, and what comes after it."""
        for held in self.held.values():
            owed, held.credit_owed = held.credit_owed, 0
            self.send(held, CreditHead(owed))

    def _answer_piece(self, held: Held, body: bytes, *, last: bool) -> None:
        """One piece of the answer for each piece of the body; the router's window is not looked at."""
        if not held.has_answered:
            held.has_answered = True
            self.send(held, ResponseHead(200, [], False, 0), body)
        else:
            self.send(held, BodyHead(held.sequence, last), body)
            held.sequence += 1
        if last:
            self.held.pop(held.reply, None)

    # -- sockets --

    def _open_socket(self, held: Held) -> None:
        """``/ws`` echoes, ``/ws-deaf`` takes nothing, ``/ws-refuse`` says 403, ``/ws-big?n`` says n bytes at once."""
        path = held.head.path.removeprefix(held.head.route)
        if path.startswith("/ws-refuse"):
            self.held.pop(held.reply)
            self.send(held, ResponseHead(403, [(b"content-type", b"text/plain")], True, 0), b"no")
            return
        headers = [(b"x-replica", self.tag.encode())]
        if path.startswith("/ws-protocol"):
            headers.append((b"sec-websocket-protocol", held.head.query.encode()))
        self.sockets.append(held)
        held.credit = WINDOW_MESSAGES
        self.send(held, ResponseHead(101, headers, False, 0))
        if path.startswith("/ws-big"):
            self.say(held, bytes(int(held.head.query)), is_text=False)

    def say(self, held: Held, data: bytes, *, is_text: bool) -> None:
        """Send a message, as far as there is credit."""
        pieces = split_body(data)
        held.to_send += [(is_text, bytes(piece), piece is pieces[-1]) for piece in pieces]  # type: ignore[misc]
        self._pump(held)

    def close_socket(self, held: Held, code: int, reason: str = "") -> None:
        """Say the last word."""
        self.held.pop(held.reply, None)
        self.send(held, CloseHead(code, reason))

    def _on_message(self, held: Held, head: MessageHead, body: memoryview) -> None:
        assert head.sequence == held.frames + 1
        held.frames += 1
        held.partial += body
        path = held.head.path.removeprefix(held.head.route)
        if not path.startswith("/ws-deaf"):
            self.send(held, CreditHead(1))
        if head.last:
            said, held.partial = bytes(held.partial), bytearray()
            held.messages.append((head.is_text, said))
            if path.rstrip("/") in ("/ws", "/ws-protocol"):
                self.say(held, said, is_text=head.is_text)

    def _work(self, held: Held) -> None:
        path = held.head.path.removeprefix(held.head.route)
        if path.startswith("/hold"):
            return
        if path.startswith("/raise"):
            self.send(held, ErrorHead("user_code_raised", 500, "ValueError: no", 0))
            self.held.pop(held.reply, None)
        elif path.startswith("/big"):
            whole = bytes(int(held.head.query))
            headers = [(b"content-length", b"%d" % len(whole))] if path.startswith("/big-sized") else []
            self._stream(held, headers, whole)
        elif path.startswith("/break"):
            self.send(held, ResponseHead(200, [], False, 0), b"first")
            self.send(held, ErrorHead("user_code_raised", 500, "broke off", 0))
            self.held.pop(held.reply, None)
        else:
            self._finish(held, bytes(held.body))

    def _finish(self, held: Held, body: bytes) -> None:
        status = int(held.head.query) if held.head.query.isdigit() else 200
        headers = [(b"content-type", b"text/plain"), (b"x-replica", self.tag.encode())]
        if len(body) > FRAME_BODY_BYTES_MAX:
            self._stream(held, headers, body)
            return
        self.held.pop(held.reply, None)
        self.send(held, ResponseHead(status, headers, True, len(self.held)), body)

    def _stream(self, held: Held, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        held.to_send = [bytes(piece) for piece in split_body(body)]
        self.send(held, ResponseHead(200, headers, False, 0), held.to_send.pop(0))
        self._pump(held)

    def _pump(self, held: Held) -> None:
        while held.to_send and held.credit > 0:
            held.credit -= 1
            piece = held.to_send.pop(0)
            if held.head.kind is RequestKind.WEBSOCKET:
                is_text, data, last = piece
                self.send(held, MessageHead(held.sequence, is_text, last), data)
                held.sequence += 1
                continue
            self.send(held, BodyHead(held.sequence, not held.to_send), piece)
            held.sequence += 1
            if not held.to_send:
                self.held.pop(held.reply, None)
