"""Replicas' responses as HTTP: complete, streamed, or an error.

Why streams are written here and not by the library: a response that breaks off must close the connection, which is the
only way to signal an error in the middle of a body.
"""

from __future__ import annotations

from functools import partial
from typing import Final, NoReturn

import structlog
from aiohttp import web
from aiohttp.hdrs import CONTENT_TYPE
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong
from aiohttp.http_writer import StreamWriter
from multidict import CIMultiDict

from serve_common.dispatch.calls import Call, Response, ResponseBody
from serve_common.dispatch.errors import HeadersTooLarge, ResponseUnusable, get_error_type
from serve_common.errors import ServeError
from serve_proxy.core.headers import REQUEST_ID, as_bytes, decode_headers_exact, read_response_head
from serve_proxy.core.problems import BadRequest, HeadTooSlow, Problem, build_problem, encode_problem
from serve_proxy.http.bodies import MinRateGuard
from serve_proxy.shell.ingress import Ingress
from serve_proxy.shell.request_observers import LoggedRequest

_log = structlog.get_logger(__name__)

SERVER_NAME: Final = "muster"
READS_TOO_SLOWLY: Final = "client_reads_too_slowly"
"""Error in the access log for a client that reads its response too slowly."""

WATCHED_BYTES_MIN: Final = 64 * 1024
"""A complete response up to this size is left to the system; for a larger one a minimum rate is enforced."""

_REASON_LENGTH_MAX: Final = 200


class _ExactResponse(web.StreamResponse):
    """A response exactly as the replica sent it: no content type is added, and no byte of a header is changed."""

    _send_headers_immediately = False  # not before they are final

    async def _prepare_headers(self) -> None:
        is_typed = CONTENT_TYPE in self.headers
        await super()._prepare_headers()
        if not is_typed:
            self.headers.popall(CONTENT_TYPE, None)

    async def _write_headers(self) -> None:
        """The library drops what is not UTF-8, so a head that may have such bytes is built here."""
        await super()._write_headers()
        if "".join(self.headers.values()).isascii():
            return
        writer = self._payload_writer
        assert isinstance(writer, StreamWriter)
        head = writer._headers_buf  # noqa: SLF001 - the library offers no place where the head is bytes
        assert head is not None, "it waits until something is written"
        lines = "".join([f"{name}: {value}\r\n" for name, value in self.headers.items()])
        head = b"%b\r\n%b\r\n" % (head.partition(b"\r\n")[0], as_bytes(lines))
        writer._headers_buf = head  # noqa: SLF001 - as above


class _StreamedResponse(_ExactResponse):
    """A response that is written as it arrives."""

    async def _write_headers(self) -> None:
        await super()._write_headers()
        if self._payload_writer is not None:
            self._payload_writer.send_headers()  # the first chunk may take long


class _WholeResponse(_ExactResponse, web.Response):
    """A complete response."""


async def respond(
    ingress: Ingress,
    request: web.BaseRequest,
    call: Call,
    upstream: Response,
    request_id: str,
    *,
    rate_min: int = 0,
) -> web.StreamResponse:
    """The HTTP response; a streamed or large one is written to its end.

    A client that reads less than ``rate_min`` bytes a second is disconnected. Raises `ResponseUnusable` before
    anything is written.
    """
    try:
        forwarded, content_length = read_response_head(upstream.status, upstream.headers)
    except ValueError as error:
        ingress.abandon(call)
        raise ResponseUnusable(f"the replica's answer cannot be sent: {error}") from error
    headers = CIMultiDict(decode_headers_exact(forwarded))
    headers[REQUEST_ID.lower()] = request_id
    if request.method == "HEAD" or upstream.status in (204, 304):
        ingress.abandon(call)
        if request.method == "HEAD" and content_length is None and upstream.stream is None and upstream.body:
            content_length = len(upstream.body)
        if content_length is not None and upstream.status != 204:
            headers["Content-Length"] = str(content_length)
        return _WholeResponse(status=upstream.status, headers=headers)
    if upstream.stream is None and len(upstream.body) <= WATCHED_BYTES_MIN:
        return _WholeResponse(status=upstream.status, headers=headers, body=bytes(upstream.body))
    response = _StreamedResponse(status=upstream.status, headers=headers)
    response.content_length = content_length if upstream.stream is not None else len(upstream.body)
    response.headers["Server"] = SERVER_NAME
    if ingress.is_draining:
        response.force_close()
    try:
        await response.prepare(request)
        progress = _Progress(request)
        observer = call.spec.trace
        if isinstance(observer, LoggedRequest):
            observer.sends(progress, is_stream=upstream.stream is not None)
        with MinRateGuard(
            rate_min, progress.taken_bytes, partial(_disconnect_slow_client, request, request_id, progress)
        ):
            if upstream.stream is None:
                progress.written_bytes = len(upstream.body)
                await response.write(upstream.body)
            else:
                await _stream(request, response, upstream.stream, response.content_length, progress)
            await response.write_eof()
    finally:
        ingress.abandon(call)
    return response


class _Progress:
    """How much of a response a client has read; a `ResponseProgress`."""

    __slots__ = ("_transport", "failure", "written_bytes")

    def __init__(self, request: web.BaseRequest) -> None:
        self.written_bytes = 0
        self.failure = ""
        self._transport = request.transport

    def taken_bytes(self) -> int | None:
        """Bytes that the client has read; None while it has read everything written so far."""
        unsent_bytes = 0 if self._transport is None else self._transport.get_write_buffer_size()
        return self.written_bytes - unsent_bytes if unsent_bytes else None


def _disconnect_slow_client(request: web.BaseRequest, request_id: str, progress: _Progress) -> None:
    _log.warning("client_reads_too_slowly", request_id=request_id)
    progress.failure = READS_TOO_SLOWLY
    if request.transport is not None:
        request.transport.abort()


async def _stream(
    request: web.BaseRequest,
    response: web.StreamResponse,
    body: ResponseBody,
    content_length: int | None,
    progress: _Progress,
) -> None:
    """Write chunks as they arrive. A response that breaks off closes the connection."""
    try:
        while (data := await body.read()) is not None:
            if data:
                progress.written_bytes += len(data)
                await response.write(data)
        if content_length is not None and progress.written_bytes != content_length:
            raise ResponseUnusable(
                f"the replica promised {content_length} bytes and sent {progress.written_bytes}"
            )
    except ServeError as error:
        _log.warning("answer_broke_off", reason=str(error), written_bytes=progress.written_bytes)
        progress.failure = get_error_type(error)
        _abort(request, error)


def _abort(request: web.BaseRequest, cause: Exception) -> NoReturn:
    """Close the connection in the middle of a response."""
    if request.transport is not None:
        request.transport.abort()
    raise ConnectionResetError("the answer broke off") from cause


def whole_bytes(request: web.BaseRequest, response: web.StreamResponse | None) -> int:
    """Size of the body of a complete response; 0 for others."""
    if not isinstance(response, web.Response) or request.method == "HEAD":
        return 0
    return len(response.body) if isinstance(response.body, bytes | bytearray) else 0


def build_parse_problem(error: BaseException | None, message: str | None) -> Problem | None:
    """The problem of an unreadable request; None for other errors. ``message`` is more specific than the error's."""
    if isinstance(error, HeadTooSlow):
        return build_problem(error)
    if isinstance(error, LineTooLong):
        return build_problem(HeadersTooLarge("a line of the request's head is too long"))
    if isinstance(error, HttpProcessingError):
        reason = (message or str(error)).partition("\n")[0][:_REASON_LENGTH_MAX]
        return build_problem(BadRequest("request", reason))
    return None


def problem_response(problem: Problem, request_id: str) -> web.Response:
    """An error as HTTP."""
    headers = CIMultiDict(problem.headers)
    headers[CONTENT_TYPE], body = encode_problem(problem, request_id)
    headers[REQUEST_ID.lower()] = request_id
    return web.Response(status=problem.status, headers=headers, body=body)


def problem_lines(problem: Problem, request_id: str) -> tuple[bytes, bytes]:
    """An error as the lines of its headers, each with its end, and its body."""
    lines = "".join(f"{name}: {value}\r\n" for name, value in problem.headers)
    content_type, body = encode_problem(problem, request_id)
    return f"{lines}content-type: {content_type}\r\n".encode(), body


def as_response(upstream: web.HTTPException) -> web.Response:
    """The response that a middleware raised as an exception."""
    headers = CIMultiDict(upstream.headers)
    headers.popall("Content-Length", None)
    response = web.Response(
        status=upstream.status, reason=upstream.reason, headers=headers, body=upstream.body or upstream.text
    )
    response.cookies.update(upstream.cookies)
    return response
