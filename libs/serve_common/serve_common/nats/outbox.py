"""Writing on a link: batched for one iteration of the loop, and possible from other threads."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Final, final

from serve_common.nats.options import OutboundFull, PayloadTooLarge
from serve_common.nats.protocol import CRLF, encode_hpub_line, encode_pub, encode_pub_line

_PIECES_MAX: Final = 1024
"""Pieces in one system call, IOV_MAX."""


@final
class SharedSocket:
    """Writes for any thread. Each piece of data is whole messages: those of two threads may come in any order.

    Why: what another thread sends would otherwise wait until the loop's thread has woken up. Why not the transport: it
    belongs to its loop. The writing thread makes the system call itself; only what the socket does not take goes to the
    transport, and everything after it too, so that bytes stay in order.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        transport: asyncio.Transport,
        pending_bytes_max: int,
        on_behind: Callable[[], None],
    ) -> None:
        """``on_behind`` is called on the loop when another thread has left something for `write_on_loop`.

        ``transport`` is plain TCP and has written everything that it was given.
        """
        self._loop = loop
        self._transport = transport
        self._pending_bytes_max = pending_bytes_max
        self._on_behind = on_behind
        # A descriptor of its own: the transport's may be closed and given to something else at any moment.
        self._descriptor = os.dup(transport.get_extra_info("socket").fileno())
        self._is_closed = False
        self._lock = threading.Lock()
        self._is_behind = False
        """The transport writes, until its buffer is empty."""
        self._is_paused = False
        self._rest: list[bytes] = []
        """What the loop's thread has yet to give to the transport."""
        self._rest_bytes = 0

    @property
    def rest_bytes(self) -> int:
        """Bytes that the transport was not given yet; on any thread."""
        return self._rest_bytes

    def reader(self) -> socket.socket:
        """The same connection for another thread to read from, which closes what it gets."""
        return socket.socket(fileno=os.dup(self._descriptor))

    def close(self) -> None:
        """Stop writing."""
        with self._lock:
            self._is_closed = True

    def shut_down(self) -> None:
        """End the connection for all descriptors of it. For when the transport is closed; may be called twice."""
        with self._lock:
            self._is_closed = True
            if self._descriptor >= 0:
                with socket.socket(fileno=self._descriptor) as own, contextlib.suppress(OSError):
                    own.shutdown(socket.SHUT_RDWR)  # raises where the other end was faster
                self._descriptor = -1

    def is_readable(self) -> bool:
        """Whether there are unread bytes; also true when the connection has ended."""
        with self._lock:
            if self._descriptor < 0:
                return False
            poller = select.poll()
            poller.register(self._descriptor, select.POLLIN)
            return bool(poller.poll(0))

    def write(self, pieces: Sequence[bytes]) -> bool:
        """Send ``pieces`` soon, from any thread. False when they will not be sent: closed, or too much is pending."""
        with self._lock:
            if self._is_closed:
                return False
            size_bytes = sum(map(len, pieces))
            if self._is_behind:
                if self._rest_bytes + size_bytes > self._pending_bytes_max:
                    return False
                self._leave(b"".join(pieces))
                return True
            written_bytes = self._try_write(pieces)
            if written_bytes < size_bytes:
                self._is_behind = True
                self._leave(b"".join(pieces)[written_bytes:])
            return True

    def buffer_writes(self) -> None:
        """Keep what other threads write, until `release`."""
        with self._lock:
            self._is_paused = self._is_behind = True

    def release(self) -> None:
        """Write what was kept; on the loop's thread only."""
        with self._lock:
            self._is_paused = False
        self.write_on_loop([])

    def write_on_loop(self, pieces: list[bytes]) -> None:
        """Send ``pieces``, and what other threads have left; on the loop's thread only."""
        with self._lock:
            if self._is_paused:
                self._rest += pieces
                self._rest_bytes += sum(map(len, pieces))
                return
            if self._is_behind:
                pieces = [*self._rest, *pieces]
                self._rest, self._rest_bytes = [], 0
                if self._is_closed or self._transport.get_write_buffer_size():
                    self._transport.writelines(pieces)
                    return
            written_bytes = self._try_write(pieces) if pieces else 0
            left = b"" if written_bytes == sum(map(len, pieces)) else b"".join(pieces)[written_bytes:]
            self._is_behind = bool(left)
            if left:
                self._transport.write(left)

    def _leave(self, data: bytes) -> None:
        if not self._rest:
            self._loop.call_soon_threadsafe(self._on_behind)
        self._rest.append(data)
        self._rest_bytes += len(data)

    def _try_write(self, pieces: Sequence[bytes]) -> int:
        """How many bytes the socket took; 0 when it is broken, which its transport detects and reports."""
        try:
            if len(pieces) == 1:
                return os.write(self._descriptor, pieces[0])
            return os.writev(self._descriptor, pieces[:_PIECES_MAX])
        except OSError:
            return 0


_BATCH_BYTES_MAX: Final = 256 * 1024
"""A batch this large is written at once: waiting for more would only hide that the server is slow."""
_SMALL_BYTES_MAX: Final = 4 * 1024
"""Payloads up to this become one piece with their line: copying them costs less than handling three pieces."""
_COPY_BYTES_MAX: Final = 32 * 1024
"""Payloads up to this are copied into the batch's one buffer; larger ones are handed over as they are."""


@final
class Outbox:
    """The batch of one link; its link says when it may be used.

    Why batches: what is written in one iteration of the loop leaves in one system call. Measured, most of the
    throughput comes from that.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, pending_bytes_max: int) -> None:
        """``pending_bytes_max`` limits what waits to be taken by the server."""
        self.transport: asyncio.Transport | None = None
        """Writes the batch."""
        self.shared: SharedSocket | None = None
        """Writes the batch instead, while other threads may write too."""
        self.max_payload = 0
        """Bytes of headers and payload that the server takes in one message."""
        self._loop = loop
        self._pending_bytes_max = pending_bytes_max
        self._batch: list[bytes] = []
        self._batch_bytes = 0
        self._batch_capacity = 0
        """Bytes that the batch may reach before the limit of those that wait is exceeded; valid while it has any."""
        self._is_batch_copied = True
        self._is_paused = False

    @property
    def pending_bytes(self) -> int:
        """Bytes written here that the operating system has not taken yet."""
        assert self.transport is not None
        rest_bytes = 0 if self.shared is None else self.shared.rest_bytes
        return self._batch_bytes + rest_bytes + self.transport.get_write_buffer_size()

    def publish(self, subject: bytes, reply: bytes, payload: bytes, headers: bytes | None) -> None:
        """Put a message into this iteration's batch. Errors as for `BusConnection.publish`."""
        size_bytes = len(payload)
        if headers is not None or size_bytes > _SMALL_BYTES_MAX:
            self._publish_in_pieces(subject, reply, payload, headers)
            return
        message = encode_pub(subject, reply, payload)
        if size_bytes > self.max_payload:
            raise self._too_large(size_bytes)
        batch = self._batch
        is_first = not batch
        if is_first:
            self._update_capacity()
        total_bytes = self._batch_bytes + len(message)
        if total_bytes > self._batch_capacity:
            raise self._full()
        if is_first:
            self._loop.call_soon(self.flush)
        batch.append(message)
        self._batch_bytes = total_bytes
        if total_bytes >= _BATCH_BYTES_MAX:
            self.flush()

    def write(self, line: bytes) -> None:
        """Put a line of the protocol into this iteration's batch, however much is pending already."""
        if not self._batch:
            self._update_capacity()
        self._append((line,), len(line))

    def flush(self) -> None:
        """Hand the batch to the socket now."""
        if not self._batch or self.transport is None or self._is_paused:
            return
        pieces, is_copied = self._batch, self._is_batch_copied
        self._batch, self._batch_bytes, self._is_batch_copied = [], 0, True
        if self.shared is not None:
            self.shared.write_on_loop([b"".join(pieces)] if is_copied and len(pieces) > 1 else pieces)
        elif is_copied:
            self.transport.write(b"".join(pieces) if len(pieces) > 1 else pieces[0])
        else:
            self.transport.writelines(pieces)

    def buffer_writes(self) -> None:
        """Keep everything that is not written yet, until `release`."""
        self.flush()
        self._is_paused = True
        if self.shared is not None:
            self.shared.buffer_writes()

    def release(self) -> None:
        """Write what was kept."""
        self._is_paused = False
        if self.shared is not None:
            self.shared.release()
        self.flush()

    def clear(self) -> None:
        """Forget what was not sent."""
        self._batch.clear()
        self._batch_bytes = 0

    def _publish_in_pieces(self, subject: bytes, reply: bytes, payload: bytes, headers: bytes | None) -> None:
        size_bytes = len(payload)
        if headers is None:
            line = encode_pub_line(subject, reply, size_bytes)
            pieces: tuple[bytes, ...] = (line, payload, CRLF)
        else:
            line = encode_hpub_line(subject, reply, len(headers), size_bytes)
            size_bytes += len(headers)
            pieces = (line, headers, payload, CRLF)
        if size_bytes > self.max_payload:
            raise self._too_large(size_bytes)
        if not self._batch:
            self._update_capacity()
        if self._batch_bytes + size_bytes > self._batch_capacity:
            raise self._full()
        if size_bytes > _COPY_BYTES_MAX:
            self._is_batch_copied = False
        self._append(pieces, len(line) + size_bytes + 2)

    def _too_large(self, size_bytes: int) -> PayloadTooLarge:
        return PayloadTooLarge(f"message of {size_bytes} bytes: the server takes at most {self.max_payload}")

    def _full(self) -> OutboundFull:
        return OutboundFull(f"{self.pending_bytes} bytes wait for the server to take them")

    def _update_capacity(self) -> None:
        # At a batch's start: the transport's buffer only shrinks until then, and a check per message is costly.
        assert self.transport is not None
        self._batch_capacity = self._pending_bytes_max - self.transport.get_write_buffer_size()

    def _append(self, pieces: tuple[bytes, ...], size_bytes: int) -> None:
        if not self._batch:
            self._loop.call_soon(self.flush)
        self._batch += pieces
        self._batch_bytes += size_bytes
        if self._batch_bytes >= _BATCH_BYTES_MAX:
            self.flush()
