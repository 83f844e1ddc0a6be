"""Reading a request's body, never more of it than is allowed.

Why its own file: the limit must hold for what a client announces and for what it really sends, and a client that sends
slowly must not hold a handler for ever.
"""

from __future__ import annotations

import asyncio

from aiohttp import web

from serve_proxy.core.problems import BadRequest, BodyTooLarge, BodyTooSlow


def check_announced(request: web.BaseRequest, bytes_max: int) -> None:
    """Raise `BodyTooLarge` when the client says that it would send more."""
    announced = request.content_length
    if announced is not None and announced > bytes_max:
        raise BodyTooLarge(f"the body has {announced} bytes; at most {bytes_max} are allowed")


async def read_body(request: web.BaseRequest, bytes_max: int, deadline: float) -> bytes:
    """The whole body. Raises `BodyTooLarge`, `BodyTooSlow` after ``deadline`` (the loop's time), `BadRequest`."""
    check_announced(request, bytes_max)
    content = request.content
    try:
        if content.is_eof():
            return _within(content.read_nowait(), bytes_max)
        async with asyncio.timeout_at(deadline):
            await let_continue(request)
            pieces: list[bytes] = []
            size = 0
            while piece := await content.readany():
                size += len(piece)
                if size > bytes_max:
                    raise BodyTooLarge(f"the body has more than {bytes_max} bytes")
                pieces.append(piece)
            return b"".join(pieces)
    except TimeoutError as error:
        raise BodyTooSlow("the body did not come in time") from error
    except web.RequestPayloadError as error:
        raise _malformed(error) from error


async def read_body_once(request: web.BaseRequest, bytes_max: int, deadline: float) -> bytes:
    """As `read_body`, also for a body that a middleware may have read already; it is kept for others to read again."""
    check_announced(request, bytes_max)
    try:
        async with asyncio.timeout_at(deadline):
            return _within(await request.read(), bytes_max)
    except web.HTTPRequestEntityTooLarge as error:
        raise BodyTooLarge(f"the body has more than {bytes_max} bytes") from error
    except TimeoutError as error:
        raise BodyTooSlow("the body did not come in time") from error
    except web.RequestPayloadError as error:
        raise _malformed(error) from error


def _malformed(error: web.RequestPayloadError) -> BadRequest:
    return BadRequest("body", str(error).partition("\n")[0][:200] or "is not what its headers say")


def _within(body: bytes, bytes_max: int) -> bytes:
    if len(body) > bytes_max:
        raise BodyTooLarge(f"the body has {len(body)} bytes; at most {bytes_max} are allowed")
    return body


async def let_continue(request: web.BaseRequest) -> None:
    """Tell a client that asked first that its body is welcome."""
    if request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # the answer itself has not begun
