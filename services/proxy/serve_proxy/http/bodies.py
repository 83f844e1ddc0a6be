"""Request bodies: limits on size and memory, memory returned to the system, slow clients aborted.

Why both sizes are checked: the limit must hold for what a client announces and for what it really sends.
"""

from __future__ import annotations

import asyncio
import os
import select
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Final, final

import structlog
from aiohttp import HttpVersion11, web
from aiohttp.streams import StreamReader

from serve_common.config.backend import HttpOptions
from serve_common.dispatch.request_body import UPLOAD_BYTES, RequestBody, UploadMemory
from serve_common.protocol.frames import FRAME_BODY_BYTES_MAX, UNKNOWN_BYTES
from serve_common.runtime.heap import find_trim
from serve_proxy.core.problems import BadRequest, BodyTooLarge, BodyTooSlow
from serve_proxy.http.raw_bodies import CountingConnection, RawBody

_log = structlog.get_logger(__name__)

MEMORY_CHECK_PERIOD_S: Final = 5.0
GROWN_BYTES_MIN: Final = 16 * 1024 * 1024
"""Minimum growth before memory is trimmed: returning less is not worth scanning the whole heap."""
_TRIES_MAX: Final = 6
"""Trims after which the memory that remains counts as in use."""
_STATM: Final = Path("/proc/self/statm")


async def release_memory(memory: UploadMemory) -> None:
    """Every `MEMORY_CHECK_PERIOD_S`, trim the heap if the process has grown while few bodies are held; runs forever.

    Returns at once where the C library has no ``malloc_trim``.

    Why it would not be returned otherwise: glibc takes buffers of up to 32 MiB from its heap once one as large was
    freed, and allocations between them that live on keep all memory below from being returned. Measured: after 300
    uploads at once the process kept all of their memory for good.
    """
    trim = find_trim()
    if trim is None or not _STATM.exists():
        return
    least_bytes = resident_bytes()
    tries = 0
    while True:
        await asyncio.sleep(MEMORY_CHECK_PERIOD_S)
        now_bytes = resident_bytes()
        least_bytes = min(least_bytes, now_bytes)
        if now_bytes - least_bytes < GROWN_BYTES_MIN:
            tries = 0
            continue
        if memory.admitted_bytes > GROWN_BYTES_MIN:
            continue
        await asyncio.to_thread(trim, 0)
        after_bytes = resident_bytes()
        _log.debug("memory_given_back", given_back_bytes=now_bytes - after_bytes, after_bytes=after_bytes)
        # Connections of clients that were refused may still hold some of it: a later round trims that.
        tries += 1
        if tries >= _TRIES_MAX:
            least_bytes, tries = after_bytes, 0


def resident_bytes() -> int:
    """Resident memory of this process in bytes."""
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


PERIOD_S: Final = 10.0


@final
class MinRateGuard:
    """Context manager that enforces a minimum rate on one body's transfer.

    Why: a client that sends or receives so slowly holds a connection, a slot and memory, perhaps on purpose.

    Why a check every ten seconds and no limit for each read: a single pause is normal on a bad network, an average that
    stays low is not.
    """

    __slots__ = ("_last", "_least_bytes", "_loop", "_on_slow", "_progress", "_spares_first", "_timer")

    def __init__(
        self,
        rate_min: int,
        progress: Callable[[], int | None],
        on_slow: Callable[[], None],
        *,
        spares_first: bool = False,
    ) -> None:
        """``rate_min`` is in bytes a second, 0 allows any. ``progress`` returns how many bytes the client has sent or
        received in all; None while the transfer does not wait for the client. ``on_slow`` is called once, and with
        ``spares_first`` not for the first `PERIOD_S`."""
        self._loop = asyncio.get_running_loop()
        self._least_bytes = rate_min * PERIOD_S
        self._progress = progress
        self._on_slow = on_slow
        self._spares_first = spares_first
        self._last: int | None = None
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> None:
        if self._least_bytes > 0:
            self._last = None if self._spares_first else self._progress()
            self._timer = self._loop.call_later(PERIOD_S, self._check_progress)

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _check_progress(self) -> None:
        now = self._progress()
        if now is not None and self._last is not None and now - self._last < self._least_bytes:
            self._timer = None
            self._on_slow()
            return
        self._last = now
        self._timer = self._loop.call_later(PERIOD_S, self._check_progress)


COLLECTED_BYTES_MAX: Final = 256 * 1024
"""A body with a Content-Length up to this is forwarded when it is complete: its client then holds no replica slot while
it sends, and the request can be retried."""
COPIED_BYTES_MAX: Final = 4 * 1024 * 1024
"""A body for an endpoint with shadows is buffered up to this size: one that is still arriving cannot be copied."""
_DISCONNECT_POLL_S: Final = 0.25
UNREAD_BYTES_MAX: Final = 64 * 1024
"""Bytes of an unread body that are drained after the response to keep the connection alive."""


def check_announced(request: web.BaseRequest, bytes_max: int) -> None:
    """Raise `BodyTooLarge` when the Content-Length exceeds ``bytes_max``."""
    announced = request.content_length
    if announced is not None and announced > bytes_max:
        raise BodyTooLarge(f"the body has {announced} bytes; at most {bytes_max} are allowed")


def body_need(content: StreamReader, announced: int | None, *, is_copied: bool) -> int:
    """Maximum bytes of memory for a body; ``content`` is what was received, ``announced`` its length if known.

    ``is_copied`` as for `receive_body`.
    """
    if content.is_eof():
        return content.total_bytes
    most = COPIED_BYTES_MAX if is_copied else UPLOAD_BYTES
    return most if announced is None else min(announced, most)


async def receive_body(
    request: web.BaseRequest,
    options: HttpOptions,
    deadline: float,
    memory: UploadMemory,
    *,
    is_welcomed: bool,
    is_copied: bool,
) -> bytes | RequestBody:
    """The whole body when it is small or complete, otherwise its first part; `feed_body` reads the rest.

    ``is_welcomed``: an `Expect` was answered already; ``is_copied``: shadows may get the body too, for
    which it must be complete. Raises `BodyTooLarge`, `BodyTooSlow` after ``deadline``
    (loop time) and for a client below the minimum rate, `BadRequest`.
    """
    check_announced(request, options.body_bytes_max)
    content = request.content
    announced = request.content_length
    try:
        if content.is_eof():
            # A middleware may have read it; then it is kept in the request.
            whole = await request.read() if is_welcomed else content.read_nowait()
            return _check_size(whole, options.body_bytes_max)
        if not is_welcomed:
            await send_continue(request)
        if is_copied:
            wanted_bytes = COPIED_BYTES_MAX
        elif announced is None or announced > COLLECTED_BYTES_MAX:
            wanted_bytes = 1
        else:
            wanted_bytes = announced
        first = await _collect(content, options, deadline, memory, wanted_bytes)
    except web.HTTPRequestEntityTooLarge as error:
        raise BodyTooLarge(f"the body has more than {options.body_bytes_max} bytes") from error
    except web.RequestPayloadError as error:
        raise _malformed_body(error) from error
    if content.is_eof():
        rest = content.read_nowait()
        return _check_size(first + rest if rest else first, options.body_bytes_max)
    _check_size(first, options.body_bytes_max)
    return RequestBody(first, memory, UNKNOWN_BYTES if announced is None else announced)


async def _collect(
    content: StreamReader, options: HttpOptions, deadline: float, memory: UploadMemory, wanted_bytes: int
) -> bytes:
    """At least ``wanted_bytes``; fewer at the body's end, and when all uploads together hold too much memory."""
    pieces: list[bytes] = []
    size = 0

    def on_too_slow() -> None:
        scope.reschedule(asyncio.get_running_loop().time())

    scope = asyncio.timeout_at(deadline)
    try:
        async with scope:
            with MinRateGuard(options.body_rate_min, lambda: size, on_too_slow):
                while size < wanted_bytes and (piece := await content.readany()):
                    size += len(piece)
                    memory.change(len(piece))
                    pieces.append(piece)
                    if size >= COLLECTED_BYTES_MAX and memory.is_full:
                        break
    except TimeoutError as error:
        raise BodyTooSlow("the body did not come in time") from error
    finally:
        memory.change(-size)
    return b"".join(pieces)


RAW_BYTES_MIN: Final = 128 * 1024
"""Least rest of a body that is read past the parser."""


async def feed_body(
    request: web.BaseRequest,
    connection: CountingConnection,
    body: RequestBody,
    options: HttpOptions,
    memory: UploadMemory,
) -> None:
    """Read the rest of a body at the rate it is consumed; an error in it fails the request."""
    content = request.content
    is_waiting = False

    def on_too_slow() -> None:
        body.fail(BodyTooSlow(f"the body comes at less than {options.body_rate_min} bytes a second"))

    try:
        with MinRateGuard(
            options.body_rate_min, lambda: body.received_bytes if is_waiting else None, on_too_slow
        ):
            while not body.is_closed:
                raw = _start_raw(request, connection, body)
                connection.resume_body()
                while raw is not None and raw.rest_bytes and not body.is_closed:
                    is_waiting = True
                    await raw.wait()
                    is_waiting = False
                    if raw.is_paused:
                        await _wait_for_memory(request, body)
                        raw.resume()
                if raw is not None:
                    if not raw.rest_bytes:
                        body.end()  # a middleware may have read a part, so that fewer bytes came than were announced
                    return
                is_waiting = True
                data = await (content.read(FRAME_BODY_BYTES_MAX) if memory.is_crowded else content.readany())
                is_waiting = False
                if not data:
                    body.end()
                    return
                if body.received_bytes + len(data) > options.body_bytes_max:
                    body.fail(BodyTooLarge(f"the body has more than {options.body_bytes_max} bytes"))
                    return
                body.add(data)
                if not body.has_space:
                    await _wait_for_memory(request, body)
    except web.RequestPayloadError as error:
        body.fail(_malformed_body(error))
    except ConnectionError:
        return  # the client disconnected; the request is cancelled where its response is awaited


def _start_raw(request: web.BaseRequest, connection: CountingConnection, body: RequestBody) -> RawBody | None:
    """Read the rest past the parser if it is large, of known size, and what has arrived was taken."""
    content = request.content
    announced = request.content_length
    if announced is None or announced - content.total_bytes < RAW_BYTES_MIN or not body.has_space:
        return None
    while data := content.read_nowait():  # the library goes on reading by this
        body.add(data)
    rest_bytes = announced - content.total_bytes
    return None if rest_bytes <= 0 else connection.start_raw_body(content, rest_bytes, body)


async def _wait_for_memory(request: web.BaseRequest, body: RequestBody) -> None:
    """Wait for capacity. Nothing is read meanwhile, so the socket is polled for a disconnect."""
    while True:
        try:
            async with asyncio.timeout(_DISCONNECT_POLL_S):
                await body.wait_for_capacity()
        except TimeoutError:
            transport = request.transport
            if transport is not None and _is_disconnected(transport):
                transport.abort()  # which cancels the task that awaits the response
                return
        else:
            return


def _is_disconnected(transport: asyncio.Transport) -> bool:
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), select.POLLRDHUP)
    return bool(poll.poll(0))


def is_mostly_unread(request: web.BaseRequest) -> bool:
    """True when much of a body that is not wanted is unread, or an unknown amount."""
    content = request.content
    if content.is_eof():
        return False
    announced = request.content_length
    return announced is None or announced - content.total_bytes > UNREAD_BYTES_MAX


def _malformed_body(error: web.RequestPayloadError) -> BadRequest:
    return BadRequest("body", str(error).partition("\n")[0][:200] or "is not what its headers say")


def _check_size(body: bytes, bytes_max: int) -> bytes:
    if len(body) > bytes_max:
        raise BodyTooLarge(f"the body has {len(body)} bytes; at most {bytes_max} are allowed")
    return body


async def send_continue(request: web.BaseRequest) -> None:
    """Send 100 Continue to a client that expects it."""
    if request.headers.get("Expect", "").lower() == "100-continue" and request.version >= HttpVersion11:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # the response itself has not started
