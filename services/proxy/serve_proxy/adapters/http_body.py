"""Reading a request's body, never more of it than is allowed, and no more of it at once than is needed.

Why its own file: the limit must hold for what a client announces and for what it really sends, and a client that sends
slowly must not hold a handler for ever.
"""

from __future__ import annotations

import asyncio
import select
from typing import Final

from aiohttp import HttpVersion11, web
from aiohttp.streams import StreamReader

from serve_common.dispatch.request_body import UPLOAD_BYTES, RequestBody, UploadRoom
from serve_common.values.http_options import HttpOptions
from serve_common.wires.frames import FRAME_BODY_BYTES_MAX, UNKNOWN_BYTES
from serve_proxy.adapters.slow_clients import Pace
from serve_proxy.core.problems import BadRequest, BodyTooLarge, BodyTooSlow

COLLECTED_BYTES_MAX: Final = 256 * 1024
"""A body that is announced to be no larger is sent on when it is whole: its client then holds no replica's slot while
it sends, and it can be sent again."""
COPIED_BYTES_MAX: Final = 4 * 1024 * 1024
"""A body for an endpoint that has shadows is collected up to here: one that is still arriving cannot be copied."""
_LOOK_FOR_CLIENT_S: Final = 0.25
UNREAD_BYTES_MAX: Final = 64 * 1024
"""What is read and dropped of a body whose request is answered already, for the connection to be kept."""


def check_announced(request: web.BaseRequest, bytes_max: int) -> None:
    """Raise `BodyTooLarge` when the client says that it would send more."""
    announced = request.content_length
    if announced is not None and announced > bytes_max:
        raise BodyTooLarge(f"the body has {announced} bytes; at most {bytes_max} are allowed")


def body_need(content: StreamReader, announced: int | None, *, is_copied: bool) -> int:
    """How much memory a body may need at once; ``content`` is what has come of it, ``announced`` its length if known.

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
    room: UploadRoom,
    *,
    is_welcomed: bool,
    is_copied: bool,
) -> bytes | RequestBody:
    """The whole body when it is small or has come already, otherwise its beginning; `feed_body` brings the rest.

    ``is_welcomed`` says that an `Expect` was answered already, ``is_copied`` that shadows may get it too, for
    which the body must be whole. Raises `BodyTooLarge`, `BodyTooSlow` after ``deadline``
    (the loop's time) and for a client that is slower than allowed, `BadRequest`.
    """
    check_announced(request, options.body_bytes_max)
    content = request.content
    announced = request.content_length
    try:
        if content.is_eof():
            # A middleware may have read it; then it is kept in the request.
            whole = await request.read() if is_welcomed else content.read_nowait()
            return _within(whole, options.body_bytes_max)
        if not is_welcomed:
            await let_continue(request)
        if is_copied:
            wanted_bytes = COPIED_BYTES_MAX
        elif announced is None or announced > COLLECTED_BYTES_MAX:
            wanted_bytes = 1
        else:
            wanted_bytes = announced
        first = await _collect(content, options, deadline, room, wanted_bytes)
    except web.HTTPRequestEntityTooLarge as error:
        raise BodyTooLarge(f"the body has more than {options.body_bytes_max} bytes") from error
    except web.RequestPayloadError as error:
        raise _malformed(error) from error
    if content.is_eof():
        rest = content.read_nowait()
        return _within(first + rest if rest else first, options.body_bytes_max)
    _within(first, options.body_bytes_max)
    return RequestBody(first, room, UNKNOWN_BYTES if announced is None else announced)


async def _collect(
    content: StreamReader, options: HttpOptions, deadline: float, room: UploadRoom, wanted_bytes: int
) -> bytes:
    """The next so many bytes or a few more; fewer at the body's end, and when all uploads together hold too much."""
    pieces: list[bytes] = []
    size = 0

    def give_up() -> None:
        scope.reschedule(asyncio.get_running_loop().time())

    scope = asyncio.timeout_at(deadline)
    try:
        async with scope:
            with Pace(options.body_rate_min, lambda: size, give_up):
                while size < wanted_bytes and (piece := await content.readany()):
                    size += len(piece)
                    room.change(len(piece))
                    pieces.append(piece)
                    if size >= COLLECTED_BYTES_MAX and room.is_full:
                        break
    except TimeoutError as error:
        raise BodyTooSlow("the body did not come in time") from error
    finally:
        room.change(-size)
    return b"".join(pieces)


async def feed_body(
    request: web.BaseRequest, body: RequestBody, options: HttpOptions, room: UploadRoom
) -> None:
    """Bring the rest of a body, as fast as it is taken; what is wrong with it fails its request."""
    content = request.content
    is_waiting = False

    def give_up() -> None:
        body.fail(BodyTooSlow(f"the body comes at less than {options.body_rate_min} bytes a second"))

    try:
        with Pace(options.body_rate_min, lambda: body.received_bytes if is_waiting else None, give_up):
            while not body.is_closed:
                is_waiting = True
                data = await (content.read(FRAME_BODY_BYTES_MAX) if room.is_crowded else content.readany())
                is_waiting = False
                if not data:
                    body.end()
                    return
                if body.received_bytes + len(data) > options.body_bytes_max:
                    body.fail(BodyTooLarge(f"the body has more than {options.body_bytes_max} bytes"))
                    return
                body.add(data)
                if not body.has_room:
                    await _wait_for_room(request, body)
    except web.RequestPayloadError as error:
        body.fail(_malformed(error))
    except ConnectionError:
        return  # the client is gone, and its request is given up where it is waited for


async def _wait_for_room(request: web.BaseRequest, body: RequestBody) -> None:
    """Nothing is read meanwhile, and so nobody would be told that the client is gone: it is looked for."""
    while True:
        try:
            async with asyncio.timeout(_LOOK_FOR_CLIENT_S):
                await body.wait_for_room()
        except TimeoutError:
            transport = request.transport
            if transport is not None and _has_left(transport):
                transport.abort()  # which cancels whoever waits for the answer
                return
        else:
            return


def _has_left(transport: asyncio.Transport) -> bool:
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), select.POLLRDHUP)
    return bool(poll.poll(0))


def is_mostly_unread(request: web.BaseRequest) -> bool:
    """True when a client would go on sending much of a body that nobody wants, or nobody knows how much."""
    content = request.content
    if content.is_eof():
        return False
    announced = request.content_length
    return announced is None or announced - content.total_bytes > UNREAD_BYTES_MAX


def _malformed(error: web.RequestPayloadError) -> BadRequest:
    return BadRequest("body", str(error).partition("\n")[0][:200] or "is not what its headers say")


def _within(body: bytes, bytes_max: int) -> bytes:
    if len(body) > bytes_max:
        raise BodyTooLarge(f"the body has {len(body)} bytes; at most {bytes_max} are allowed")
    return body


async def let_continue(request: web.BaseRequest) -> None:
    """Tell a client that asked first that its body is welcome."""
    if request.headers.get("Expect", "").lower() == "100-continue" and request.version >= HttpVersion11:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # the answer itself has not begun
