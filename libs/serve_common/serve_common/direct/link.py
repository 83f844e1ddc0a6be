"""One direct link: an ordered byte stream between a router and a replica that carries frames of many requests.

Why beside NATS: a body on the bus crosses the server and four more sockets. Why the frames are the same: a frame may
take either way, and receivers order them (`serve_common.protocol.streams`), so a link that ends loses nothing.

On the wire a frame is ``size (4 bytes, big endian) + token (8 bytes) + frame``. The token is the last one of the
request's reply subject, as raw bytes; the rest of that subject is the router's inbox, which both ends know. A
router first sends its ticket, and uses the link once the replica has accepted that.
A replica that leaves says so. Its router says the same after all that it has sent, and takes the bus from then on; so
the replica ends the link once it has read and answered everything.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import socket
import threading
from binascii import unhexlify
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, cast, final

from serve_common.direct.pipes import PipedBytes
from serve_common.direct.writing import CONTROL_TOKEN, SMALL_BYTES_MAX, TOKEN_BYTES, LinkWriter, Piece
from serve_common.protocol.frames import (
    FRAME_BODY_BYTES_MAX,
    HEAD_BYTES_MAX,
    FrameUnreadable,
    Head,
    SplitFrame,
    encode_head,
    encoded_head_bytes,
)

LARGE_BYTES_MIN: Final = 64 * 1024
"""Bodies of this size and more are worth a link."""
LEAVE: Final = b"leave"
"""Frame with `CONTROL_TOKEN`: a replica asks its router to leave the link, and the router says that it has."""
FRAME_BYTES_MAX: Final = 2 + HEAD_BYTES_MAX + FRAME_BODY_BYTES_MAX
_PREFIX_BYTES: Final = 4 + TOKEN_BYTES
_READ_BYTES: Final = 32 * 1024
"""Size of the buffer for reading small frames, and the beginnings of others: some hundred requests."""
_OWN_BYTES_MIN: Final = 8 * 1024
"""Frames from this size on that have not arrived whole are read into a buffer of their own, which is not copied."""
_AFTER_LARGE_BYTES: Final = 64
"""Bytes that are read after a large frame, which hold the head of another one: its body is then not copied either."""
_READS_MAX: Final = 16
"""Reads before others have a turn, of a socket that fills its buffer each time."""

_MACHINE_FILE: Final = Path("/proc/sys/kernel/random/boot_id")

Bytes = bytes | memoryview
OnFrame = Callable[["DirectLink", bytes, Bytes | SplitFrame], None]
"""Gets the link, the token and the frame, which is the receiver's."""

# The documented way to make bytes whose content is written afterwards; it is not written to before, as a bytearray is.
_new_bytes: Final = ctypes.pythonapi.PyBytes_FromStringAndSize
_new_bytes.argtypes, _new_bytes.restype = (ctypes.c_char_p, ctypes.c_ssize_t), ctypes.py_object
_address_of_bytes: Final = ctypes.pythonapi.PyBytes_AsString
_address_of_bytes.argtypes, _address_of_bytes.restype = (ctypes.py_object,), ctypes.c_void_p
_view_of_memory: Final = ctypes.pythonapi.PyMemoryView_FromMemory
_view_of_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_view_of_memory.restype = ctypes.py_object
_WRITABLE: Final = 0x200
"""``PyBUF_WRITE``."""


def machine_id() -> str:
    """What this machine is known by: its boot id, which is equal in all containers of a machine and in no other.

    Empty where there is none.
    """
    try:
        return _MACHINE_FILE.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def link_token(reply: bytes) -> bytes:
    """The token of a reply subject that ends in one. Raises ValueError for any other."""
    return unhexlify(reply[-2 * TOKEN_BYTES :])


def _prefix(token: bytes, frame: bytes) -> bytes:
    return len(frame).to_bytes(4, "big") + token


@final
class DirectLink(asyncio.BufferedProtocol):
    """One end of a link. Frames may be sent from any thread; the rest is the loop's.

    Why `BufferedProtocol`: many small frames are read at once, and large ones to where they stay.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        on_frame: OnFrame,
        on_end: Callable[[DirectLink], None],
        *,
        on_batch_start: Callable[[], None] = lambda: None,
        on_batch_end: Callable[[], None] = lambda: None,
    ) -> None:
        """``on_batch_start`` is called before the frames of one read are delivered, ``on_batch_end`` after them."""
        self.last_received_at = loop.time()
        """When anything last came, by the loop's clock; initially, when it was made."""
        self.inbox = b""
        """At a replica: the inbox of the router at the other end, with its last dot; empty when the link has ended."""
        self.has_parted = False
        """True once both ends have left: the router sends nothing more over the link."""
        self.received_frames = 0
        self._loop = loop
        self._on_frame = on_frame
        self._on_end = on_end
        self._on_batch_start = on_batch_start
        self._on_batch_end = on_batch_end
        self._thread = threading.get_ident()
        self._writer = LinkWriter(loop, self.close)
        self._transport: asyncio.Transport | None = None
        self._is_ended = False
        self._is_tcp = False
        # reading
        self._view = memoryview(bytearray(_READ_BYTES))
        self._parsed = 0
        self._filled = 0
        self._is_after_large = False
        self._token = b""
        self._head = b""
        """Head of a large frame whose body is arriving."""
        self._body = b""
        """Its body, and its memory while that is not whole."""
        self._body_view: memoryview | None = None
        self._body_filled = 0

    @property
    def is_tcp(self) -> bool:
        """True for a link between machines; for any thread."""
        return self._is_tcp

    @property
    def is_open(self) -> bool:
        """True while frames can be sent."""
        return not self._is_ended and self._transport is not None

    @property
    def sent_frames(self) -> int:
        """Frames that were sent so far, or wait to be written."""
        return self._writer.sent_frames

    @property
    def last_used_at(self) -> float:
        """When a frame was last sent or received, by the loop's clock."""
        return max(self.last_received_at, self._writer.last_written_at)

    @property
    def splices(self) -> bool:
        """True when `PipedBytes` are sent without a copy."""
        return self._writer.splices

    @property
    def pending_bytes(self) -> int:
        """Bytes of frames that wait to be written; on any thread."""
        return self._writer.pending_bytes

    @property
    def is_written(self) -> bool:
        """True when nothing waits to be written; on the loop's thread."""
        return self._writer.is_written

    # -- what asyncio calls --

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._is_tcp = transport.get_extra_info("ssl_object") is not None
        self._writer.start(self._transport, is_tls=self._is_tcp)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - asyncio's
        if self._body_view is not None:
            return self._body_view[self._body_filled :]
        view, parsed, filled = self._view, self._parsed, self._filled
        if parsed and _READ_BYTES - filled < _READ_BYTES // 2:  # the begun frame goes to the front
            filled -= parsed
            view[:filled] = view[parsed : self._filled]
            self._parsed, self._filled = 0, filled
        if self._is_after_large and _READ_BYTES - filled > _AFTER_LARGE_BYTES:
            return view[filled : filled + _AFTER_LARGE_BYTES]
        return view[filled:]

    def buffer_updated(self, nbytes: int) -> None:
        self._on_batch_start()
        try:
            self._take(nbytes)
        finally:
            self._on_batch_end()

    def _take(self, nbytes: int) -> None:
        """Deliver the frames of one read."""
        self.last_received_at = self._loop.time()
        body_view = self._body_view
        if body_view is None:
            self._filled += nbytes
            self._is_after_large = False
        else:
            self._body_filled += nbytes
            if self._body_filled < len(body_view):
                return
            self._body_view = None
            self._is_after_large = True
        if body_view is None:
            self._parse()
        elif not self._is_ended:
            body, self._body = self._body, b""
            self.received_frames += 1
            self._on_frame(self, self._token, SplitFrame(self._head, body) if self._head else body)

    def detach_reader(self) -> socket.socket | None:
        """Stop reading, so that another thread calls `read` with what this returns, which that thread closes.

        None where that is not possible: for TLS. On the loop's thread.
        """
        own = self._writer.duplicate()
        if own is not None and self._transport is not None:
            self._transport.pause_reading()
        return own

    def read(self, own: socket.socket) -> int:
        """Read what there is from what `detach_reader` returned; returns the number of bytes, 0 at the end of the link.

        The caller knows where its batches start and end: the two callbacks are left out.
        Raises BlockingIOError when there is nothing. For any thread, one at a time.
        """
        total_bytes = 0
        for _ in range(_READS_MAX):
            buffer = self.get_buffer(-1)
            try:
                size_bytes = own.recv_into(buffer)
            except BlockingIOError:
                if not total_bytes:
                    raise
                break
            except OSError:  # it is broken
                size_bytes = 0
            if not size_bytes:
                self._close_soon()
                return 0
            self._take(size_bytes)
            total_bytes += size_bytes
            if size_bytes < len(buffer):
                break
        return total_bytes

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's
        self.close()

    def pause_writing(self) -> None:
        self._writer.pause()

    def resume_writing(self) -> None:
        self._writer.resume()

    # -- reading --

    def _parse(self) -> None:
        view, at, end = self._view, self._parsed, self._filled
        while end - at >= _PREFIX_BYTES and not self._is_ended:
            size = int.from_bytes(view[at : at + 4], "big")
            if size > FRAME_BYTES_MAX:
                self._close_soon()
                return
            start = at + _PREFIX_BYTES
            stop = start + size
            if stop > end:
                if size >= _OWN_BYTES_MIN and self._start_body(
                    bytes(view[at + 4 : start]), size, view[start:end]
                ):
                    at = end
                break
            self.received_frames += 1
            self._on_frame(self, bytes(view[at + 4 : start]), bytes(view[start:stop]))
            at = stop
        if at == end:
            at = self._filled = 0
        self._parsed = at

    def _start_body(self, token: bytes, size: int, beginning: memoryview) -> bool:
        """Read the rest of a large frame into memory of its own; False while its head has not arrived."""
        head_bytes = encoded_head_bytes(beginning)
        if head_bytes is None or len(beginning) < head_bytes <= _READ_BYTES // 4:
            return False
        if not 0 < head_bytes <= min(len(beginning), size - 1):
            head_bytes = 0  # it is very large, or wrong: the frame stays in one
        self._token, self._head = token, bytes(beginning[:head_bytes])
        body_bytes, beginning_bytes = size - head_bytes, len(beginning) - head_bytes
        self._body = _new_bytes(None, body_bytes)
        self._body_view = _view_of_memory(_address_of_bytes(self._body), body_bytes, _WRITABLE)
        self._body_view[:beginning_bytes] = beginning[head_bytes:]
        self._body_filled = beginning_bytes
        return True

    # -- writing --

    def send_frame(self, token: bytes, frame: bytes) -> bool:
        """Send an encoded frame. False when the link has ended, or ends because too much waits."""
        if self._is_ended:
            return False
        start, size = _prefix(token, frame), len(frame)
        pieces = (start + frame,) if size <= SMALL_BYTES_MAX else (start, frame)
        self._writer.add((token, pieces, size + _PREFIX_BYTES), is_alone=False)
        return True

    def send_now(self, frames: Sequence[tuple[bytes, bytes]]) -> bool:
        """Send small frames, each with its token, at once and on the calling thread.

        False where that is not possible now: something waits to be written, or the link is TLS. Then `send_frame` them.
        """
        token, frame = frames[-1]
        if len(frames) == 1:  # as mostly where few clients wait
            data = b"".join((len(frame).to_bytes(4, "big"), token, frame))
        else:
            data = b"".join([part for each in frames for part in (_prefix(*each), each[1])])
        return self._writer.write_now(token, data, len(frames))

    def send(
        self, token: bytes, head: Head, body: Bytes | PipedBytes = b"", *, is_alone: bool = False
    ) -> bool:
        """Send a frame without copying a large body. As `send_frame`. Raises `FrameUnreadable` as `encode_frame`.

        ``is_alone``: no other frame is likely to be sent in this iteration of the loop, so it does not wait for more.
        """
        if self._is_ended:
            return False
        encoded = encode_head(head)
        size = len(encoded) + len(body)
        if size > FRAME_BYTES_MAX:
            raise FrameUnreadable(f"a frame of {size} bytes exceeds {FRAME_BYTES_MAX}")
        if type(body) is PipedBytes:
            if self.splices:
                is_alone = True
            else:
                body = body.read()
        start = size.to_bytes(4, "big"), token, encoded
        if size <= SMALL_BYTES_MAX and type(body) is not PipedBytes:
            pieces: tuple[Piece, ...] = (b"".join((*start, body)),)
        else:
            pieces = b"".join(start), body
        self._writer.add((token, pieces, size + _PREFIX_BYTES), is_alone=is_alone)
        return True

    def leave(self) -> None:
        """At a replica: ask the router to leave the link."""

        def take(
            link: DirectLink, token: bytes, frame: Bytes | SplitFrame, on_frame: OnFrame = self._on_frame
        ) -> None:
            if token != CONTROL_TOKEN:
                on_frame(link, token, frame)
            else:
                self.has_parted = frame == LEAVE

        self._on_frame = take
        self.send_frame(CONTROL_TOKEN, LEAVE)

    def close(self) -> None:
        """End the link at once; what was not written is lost. May be called twice; on the loop's thread only."""
        if self._is_ended:
            return
        self._is_ended = True
        self._writer.close()
        if self._transport is not None:
            self._transport.abort()
        self._on_end(self)

    def _close_soon(self) -> None:
        if threading.get_ident() == self._thread:
            self.close()
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends
                self._loop.call_soon_threadsafe(self.close)
