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
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, cast, final

from serve_common.protocol.frames import (
    FRAME_BODY_BYTES_MAX,
    HEAD_BYTES_MAX,
    FrameUnreadable,
    Head,
    encode_head,
)

LARGE_BYTES_MIN: Final = 64 * 1024
"""Bodies of this size and more are worth a link."""
TOKEN_BYTES: Final = 8
CONTROL_TOKEN: Final = bytes(TOKEN_BYTES)
"""Token of frames about the link itself. A replica's first frame is an empty one: it has accepted the ticket."""
LEAVE: Final = b"leave"
"""Frame with `CONTROL_TOKEN`: a replica asks its router to leave the link, and the router says that it has."""
FRAME_BYTES_MAX: Final = 2 + HEAD_BYTES_MAX + FRAME_BODY_BYTES_MAX
PENDING_BYTES_MAX: Final = 64 * 1024 * 1024
"""Most bytes that wait to be written; a link whose peer reads so slowly is ended."""
_PREFIX_BYTES: Final = 4 + TOKEN_BYTES
_READ_BYTES: Final = 32 * 1024
"""Size of the buffer for reading small frames, and the beginnings of others: some hundred requests."""
_OWN_BYTES_MIN: Final = 8 * 1024
"""Frames from this size on that have not arrived whole are read into a buffer of their own, which is not copied."""
_READS_MAX: Final = 8
"""Reads before others have a turn, of a socket that fills its buffer each time."""
_SOCKET_BYTES: Final = 1024 * 1024
"""What a Unix socket should hold, so that both ends work at once; the system's limit is mostly lower."""
_WRITE_BUFFER_BYTES_MAX: Final = 256 * 1024
"""Where the transport says "pause"; beyond it frames wait here, where small ones and other requests can go first."""
_SMALL_BYTES_MAX: Final = 4 * 1024
"""Frames up to this size are joined, and go before the bodies of other requests that wait."""
EARLY_FRAMES: Final = 8
"""Small frames that do not wait for others to be written with: the other end works on them meanwhile."""
_SMALL_BATCH_BYTES_MAX: Final = 16 * 1024
"""What one record of TLS holds."""

_MACHINE_FILE: Final = Path("/proc/sys/kernel/random/boot_id")

Bytes = bytes | memoryview
OnFrame = Callable[["DirectLink", bytes, Bytes], None]
"""Gets the link, the token and the frame, which is the receiver's."""
_Item = tuple[bytes, tuple[Bytes, ...], int]
"""Token, pieces, and their size."""


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
    return bytes.fromhex(reply[-2 * TOKEN_BYTES :].decode())


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
        self.last_used_at = loop.time()
        """When a frame was last sent or received, by the loop's clock."""
        self.last_received_at = self.last_used_at
        """When anything last came; initially, when it was made."""
        self.inbox = b""
        """At a replica: the inbox of the router at the other end, with its last dot; empty when the link has ended."""
        self.has_parted = False
        """True once both ends have left: the router sends nothing more over the link."""
        self.sent_frames = 0
        self.received_frames = 0
        self._loop = loop
        self._on_frame = on_frame
        self._on_end = on_end
        self._on_batch_start = on_batch_start
        self._on_batch_end = on_batch_end
        self._thread = threading.get_ident()
        # RLock: a transport may pause or end while it is written to.
        self._writing = threading.RLock()
        """Held while bytes are given to the socket, by whichever thread."""
        self._descriptor = -1
        """The socket's, for `send_now`; the transport's own may be closed and given to something else at any moment."""
        self._transport: asyncio.Transport | None = None
        self._is_ended = False
        self._is_tcp = False
        # reading
        self._view = memoryview(bytearray(_READ_BYTES))
        self._parsed = 0
        self._filled = 0
        self._token = b""
        self._frame: memoryview | None = None
        """Memory of a large frame that is arriving, and of the beginning of the next, which then needs no read."""
        self._frame_bytes = 0
        self._frame_filled = 0
        # writing
        self._new: deque[_Item] = deque()
        """Not looked at yet by the loop."""
        self._is_scheduled = False
        self._is_paused = False
        self._urgent: deque[_Item] = deque()
        self._waiting: dict[bytes, deque[_Item]] = {}
        """Frames by request; requests take turns."""
        # Two counts, because each has one writer: threads that send, and the loop's.
        self._added_bytes = 0
        self._written_bytes = 0

    @property
    def is_tcp(self) -> bool:
        """True for a link between machines; for any thread."""
        return self._is_tcp

    @property
    def is_open(self) -> bool:
        """True while frames can be sent."""
        return not self._is_ended and self._transport is not None

    @property
    def pending_bytes(self) -> int:
        """Bytes of frames that the transport was not given yet; on any thread."""
        return self._added_bytes - self._written_bytes

    @property
    def is_written(self) -> bool:
        """True when nothing waits to be written; on the loop's thread."""
        return not (self.pending_bytes or (self._transport and self._transport.get_write_buffer_size()))

    # -- what asyncio calls --

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=_WRITE_BUFFER_BYTES_MAX)
        self._is_tcp = transport.get_extra_info("ssl_object") is not None
        if not self._is_tcp:
            with contextlib.suppress(OSError):  # no descriptor is free: then only the loop writes
                self._descriptor = os.dup(transport.get_extra_info("socket").fileno())
                with socket.socket(fileno=os.dup(self._descriptor)) as connection:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - asyncio's
        if self._frame is not None:
            return self._frame[self._frame_filled :]
        view, parsed, filled = self._view, self._parsed, self._filled
        if parsed and _READ_BYTES - filled < _READ_BYTES // 2:  # the begun frame goes to the front
            filled -= parsed
            view[:filled] = view[parsed : self._filled]
            self._parsed, self._filled = 0, filled
        return view[filled:]

    def buffer_updated(self, nbytes: int) -> None:
        self.last_used_at = self.last_received_at = self._loop.time()
        frame = self._frame
        if frame is None:
            self._filled += nbytes
        else:
            self._frame_filled += nbytes
            if self._frame_filled < self._frame_bytes:
                return
            self._frame = None
        self._on_batch_start()
        try:
            if frame is not None and not self._is_ended:
                next_bytes = self._frame_filled - self._frame_bytes
                self._view[:next_bytes] = frame[self._frame_bytes : self._frame_filled]
                self._filled = next_bytes
                self._deliver(self._token, frame[: self._frame_bytes])
            self._parse()
        finally:
            self._on_batch_end()

    def detach_reader(self) -> socket.socket | None:
        """Stop reading, so that another thread calls `read` with what this returns, which that thread closes.

        None where that is not possible: for TLS. On the loop's thread.
        """
        if self._descriptor < 0 or self._transport is None:
            return None
        self._transport.pause_reading()
        return socket.socket(fileno=os.dup(self._descriptor))

    def read(self, own: socket.socket) -> int:
        """Read what there is from what `detach_reader` returned; returns the number of bytes, 0 at the end of the link.

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
            self.buffer_updated(size_bytes)
            total_bytes += size_bytes
            if size_bytes < len(buffer):
                break
        return total_bytes

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's
        self.close()

    def pause_writing(self) -> None:
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False
        with self._writing:
            self._write_waiting()

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
                if size >= _OWN_BYTES_MIN:
                    self._start_frame(bytes(view[at + 4 : start]), size, view[start:end])
                    at = end
                break
            self._deliver(bytes(view[at + 4 : start]), bytes(view[start:stop]))
            at = stop
        if at == end:
            at = self._filled = 0
        self._parsed = at

    def _start_frame(self, token: bytes, size: int, beginning: memoryview) -> None:
        self._token = token
        self._frame = memoryview(bytearray(size + _PREFIX_BYTES))
        self._frame_bytes, self._frame_filled = size, len(beginning)
        self._frame[: len(beginning)] = beginning

    def _deliver(self, token: bytes, frame: Bytes) -> None:
        self.received_frames += 1
        self._on_frame(self, token, frame)

    # -- writing --

    def send_frame(self, token: bytes, frame: bytes) -> bool:
        """Send an encoded frame. False when the link has ended, or ends because too much waits."""
        size = len(frame)
        start = _prefix(token, frame)
        if size <= _SMALL_BYTES_MAX:
            return self._add((token, (start + frame,), size + _PREFIX_BYTES))
        return self._add((token, (start, frame), size + _PREFIX_BYTES))

    def send_now(self, frames: Sequence[tuple[bytes, bytes]]) -> bool:
        """Send small frames, each with its token, at once and on the calling thread.

        False where that is not possible now: something waits to be written, or the link is TLS. Then `send_frame` them.
        """
        data = b"".join([part for token, frame in frames for part in (_prefix(token, frame), frame)])
        with self._writing:
            if not self._can_write_now():
                return False
            rest = self._write_now((data,))
            if rest and len(rest[0]) == len(data):
                return False  # it is full, or broken, which the transport reports
            self.sent_frames += len(frames)
            if rest:
                self._queue((frames[-1][0], rest, len(rest[0])))  # the first that the loop writes
        return True

    def send(self, token: bytes, head: Head, body: Bytes = b"", *, is_alone: bool = False) -> bool:
        """Send a frame without copying a large body. As `send_frame`. Raises `FrameUnreadable` as `encode_frame`.

        ``is_alone``: no other frame is likely to be sent in this iteration of the loop, so it does not wait for more.
        """
        encoded = encode_head(head)
        size = len(encoded) + len(body)
        if size > FRAME_BYTES_MAX:
            raise FrameUnreadable(f"a frame of {size} bytes exceeds {FRAME_BYTES_MAX}")
        start = b"".join((size.to_bytes(4, "big"), token, encoded))
        if size <= _SMALL_BYTES_MAX:
            return self._add((token, (b"".join((start, body)),), size + _PREFIX_BYTES), is_alone=is_alone)
        return self._add((token, (start, body), size + _PREFIX_BYTES), is_alone=is_alone)

    def leave(self) -> None:
        """At a replica: ask the router to leave the link."""

        def take(link: DirectLink, token: bytes, frame: Bytes, on_frame: OnFrame = self._on_frame) -> None:
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
        with self._writing:
            if self._descriptor >= 0:
                # Another thread may still have a descriptor of it.
                with socket.socket(fileno=self._descriptor) as own, contextlib.suppress(OSError):
                    own.shutdown(socket.SHUT_RDWR)
                self._descriptor = -1
        for items in (self._new, self._urgent, self._waiting):
            items.clear()
        if self._transport is not None:
            self._transport.abort()
        self._on_end(self)

    def _close_soon(self) -> None:
        if threading.get_ident() == self._thread:
            self.close()
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends
                self._loop.call_soon_threadsafe(self.close)

    def _add(self, item: _Item, *, is_alone: bool = False) -> bool:
        if self._is_ended:
            return False
        with self._writing:
            self.sent_frames += 1
            if (is_alone or threading.get_ident() != self._thread) and self._can_write_now():
                token, pieces, _ = item
                rest = self._write_now(pieces)
                if not rest:
                    return True
                item = token, rest, sum(map(len, rest))
            self._queue(item)
        return True

    def _queue(self, item: _Item) -> None:
        self._new.append(item)
        self._added_bytes += item[2]
        self._schedule_writing()
        if (
            len(self._new) == EARLY_FRAMES
            and self._added_bytes - self._written_bytes <= EARLY_FRAMES * _SMALL_BYTES_MAX
            and threading.get_ident() == self._thread
        ):
            self._write_early()

    def _write_early(self) -> None:
        """Write what would wait for the end of the loop's iteration, if nothing has to go first."""
        items = tuple(self._new)
        self._new.clear()
        if not self._can_write_now():
            self._new.extend(items)
            return
        rest = self._write_now(tuple(piece for _, pieces, _ in items for piece in pieces))
        rest_bytes = sum(map(len, rest))
        self._written_bytes += sum(size for _, _, size in items) - rest_bytes
        if rest:
            self._new.append((items[-1][0], rest, rest_bytes))  # the first that the loop writes

    def _can_write_now(self) -> bool:
        """Whether the calling thread may write to the socket: nothing waits that has to go first."""
        transport = self._transport
        return not (
            self._descriptor < 0
            or transport is None
            or self._is_paused
            or self._new
            or self._urgent
            or self._waiting
            or transport.get_write_buffer_size()
        )

    def _write_now(self, pieces: tuple[Bytes, ...]) -> tuple[Bytes, ...]:
        """Write what the socket takes; returns the rest."""
        self.last_used_at = self._loop.time()
        try:
            written = os.writev(self._descriptor, pieces)
        except OSError:  # it is full, or broken, which the transport reports
            return pieces
        for number, piece in enumerate(pieces):
            if written < len(piece):
                return (memoryview(piece)[written:], *pieces[number + 1 :])
            written -= len(piece)
        return ()

    def _schedule_writing(self) -> None:
        if self._is_scheduled:
            return
        self._is_scheduled = True
        if threading.get_ident() == self._thread:
            self._loop.call_soon(self._write_new)
        else:
            self._loop.call_soon_threadsafe(self._write_new)

    def _write_new(self) -> None:
        self._is_scheduled = False  # before reading: what is added from now on is scheduled again
        self.last_used_at = self._loop.time()
        if self._added_bytes - self._written_bytes > PENDING_BYTES_MAX:
            self.close()
        transport = self._transport
        if transport is None or self._is_ended:
            return
        with self._writing:
            self._write_batch(transport)

    def _write_batch(self, transport: asyncio.Transport) -> None:
        new, batch, batch_bytes = self._new, list[Bytes](), 0
        while new and not (self._is_paused or self._waiting or self._urgent):
            _, pieces, size = new.popleft()
            batch += pieces
            batch_bytes += size
            if batch_bytes >= _WRITE_BUFFER_BYTES_MAX:
                self._written_bytes += batch_bytes
                transport.writelines(batch)
                batch, batch_bytes = [], 0
        if batch:
            self._written_bytes += batch_bytes
            if self._is_tcp and batch_bytes <= _SMALL_BATCH_BYTES_MAX:
                batch = [b"".join(batch)]  # TLS makes a record of each
            transport.writelines(batch)
        while new:
            self._let_wait(new.popleft())
        self._write_waiting()  # another thread may have added something a moment ago

    def _let_wait(self, item: _Item) -> None:
        token, _, size = item
        queue = self._waiting.get(token)
        if queue is not None:
            queue.append(item)  # a request's frames stay in order
        elif size <= _SMALL_BYTES_MAX and token != CONTROL_TOKEN:
            self._urgent.append(item)
        else:  # the end of the link is behind the first frames of all requests
            self._waiting[token] = deque((item,))

    def _write_waiting(self) -> None:
        transport = self._transport
        while transport is not None and not self._is_paused and not self._is_ended:
            if self._urgent:
                item = self._urgent.popleft()
            elif self._waiting:
                token = next(iter(self._waiting))
                queue = self._waiting.pop(token)
                item = queue.popleft()
                if queue:
                    self._waiting[token] = queue  # behind the others
            else:
                return
            self._written_bytes += item[2]
            transport.writelines(item[1])
