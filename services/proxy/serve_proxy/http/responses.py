"""Replicas' responses as HTTP: complete, streamed, or an error."""

from __future__ import annotations

from typing import Final

from aiohttp import HttpVersion11, web
from aiohttp.hdrs import CONTENT_TYPE, TRANSFER_ENCODING
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong
from aiohttp.http_writer import StreamWriter
from multidict import CIMultiDict

from serve_common.dispatch.calls import Call, Response
from serve_common.dispatch.errors import HeadersTooLarge, ResponseUnusable
from serve_proxy.core.headers import REQUEST_ID, as_bytes, decode_headers_exact, read_response_head
from serve_proxy.core.problems import BadRequest, HeadTooSlow, Problem, build_problem, encode_problem
from serve_proxy.http.response_heads import SERVER_NAME, response_start, stream_head
from serve_proxy.http.streamed_responses import StreamedBody
from serve_proxy.shell.ingress import Ingress

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
    """A response that is written as it arrives; its body not by the library."""

    async def _write_headers(self) -> None:
        await super()._write_headers()
        if self._payload_writer is not None:
            self._payload_writer.send_headers()  # the first chunk may take long

    def is_written(self, request: web.BaseRequest, head: bytes, *, closes: bool) -> None:
        """Its ``head`` is not written by the library either, which knows by the size that no other can be sent."""
        request.writer.output_size += len(head)
        self._keep_alive = not closes

    def finish(self, body_bytes: int) -> None:
        """It has been written to its end."""
        self._eof_sent, self._body_length = True, body_bytes
        self._req = self._payload_writer = None


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
    has_middlewares: bool = False,
) -> web.StreamResponse:
    """The HTTP response; a streamed or large one is written to its end.

    A client that reads less than ``rate_min`` bytes a second is disconnected. Middlewares may change the head of the
    response. Raises `ResponseUnusable` before anything is written.
    """
    status = upstream.status
    try:
        start, is_bodiless, content_length = response_start(status, upstream.headers)
    except ValueError as error:
        ingress.abandon(call)
        raise ResponseUnusable(f"the replica's answer cannot be sent: {error}") from error
    if request.method == "HEAD" or is_bodiless:
        ingress.abandon(call)
        headers = _build_headers(upstream, request_id)
        if request.method == "HEAD" and content_length is None and upstream.stream is None and upstream.body:
            content_length = len(upstream.body)
        if content_length is not None and status != 204:
            headers["Content-Length"] = str(content_length)
        return _WholeResponse(status=status, headers=headers)
    if upstream.stream is None and len(upstream.body) <= WATCHED_BYTES_MIN:
        headers = _build_headers(upstream, request_id)
        return _WholeResponse(status=status, headers=headers, body=bytes(upstream.body))
    length = len(upstream.body) if upstream.stream is None else content_length
    connection, transport = request.protocol, request.transport
    try:
        if transport is None:
            raise ConnectionResetError("the client is gone")
        if has_middlewares or request.version != HttpVersion11:
            response = _StreamedResponse(status=status, headers=_build_headers(upstream, request_id))
            response.content_length = length
            response.headers["Server"] = SERVER_NAME
            if ingress.is_draining or (length is None and request.version < HttpVersion11):
                response.force_close()  # without chunks and a length, the end of the connection is that of the body
            await response.prepare(request)
            head, is_chunked = b"", TRANSFER_ENCODING in response.headers
        else:
            response = _StreamedResponse(status=status)
            closes = ingress.is_draining or not request.keep_alive
            head, is_chunked = stream_head(start, length, request_id, closes=closes), length is None
            response.is_written(request, head, closes=closes)
        body = StreamedBody(connection, transport, call, upstream, length, is_chunked=is_chunked)
        body.start(head)
        await body.finish(rate_min)
        response.finish(body.written_bytes)
    finally:
        ingress.abandon(call)
    return response


def _build_headers(upstream: Response, request_id: str) -> CIMultiDict[str]:
    headers = CIMultiDict(
        decode_headers_exact(read_response_head(upstream.status, upstream.headers).forwarded)
    )
    headers[REQUEST_ID.lower()] = request_id
    return headers


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
