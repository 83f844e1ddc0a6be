"""Replicas' answers as HTTP: whole, in pieces, or an error.

Why streams are written here and not by the library: an answer that breaks off must close the connection, for nothing
else can tell a client in the middle of a body.
"""

from __future__ import annotations

import asyncio
from typing import Final, NoReturn

import structlog
from aiohttp import web
from multidict import CIMultiDict

from serve_common.dispatch.calls import Answer, AnswerBody, Call
from serve_common.dispatch.errors import AnswerUnusable
from serve_common.errors import ServeError
from serve_proxy.core.headers import REQUEST_ID, as_text, read_response_head
from serve_proxy.core.problems import Problem, encode_problem
from serve_proxy.shell.ingress import Ingress

_log = structlog.get_logger(__name__)

SERVER_NAME: Final = "muster"


async def respond(
    ingress: Ingress, request: web.BaseRequest, call: Call, answer: Answer, request_id: str
) -> web.StreamResponse:
    """The HTTP answer; one that comes in pieces is written to its end. Raises `AnswerUnusable` before it has begun."""
    try:
        forwarded, content_length = read_response_head(answer.status, answer.headers)
    except ValueError as error:
        ingress.abandon(call)
        raise AnswerUnusable(f"the replica's answer cannot be sent: {error}") from error
    headers = CIMultiDict(as_text(forwarded))
    headers[REQUEST_ID] = request_id
    if answer.stream is None:
        if request.method == "HEAD" and content_length is not None and not answer.body:
            headers["Content-Length"] = str(content_length)
        return web.Response(status=answer.status, headers=headers, body=bytes(answer.body))
    if request.method == "HEAD" or answer.status in (204, 304):
        ingress.abandon(call)
        if content_length is not None:
            headers["Content-Length"] = str(content_length)
        return web.Response(status=answer.status, headers=headers)
    response = web.StreamResponse(status=answer.status, headers=headers)
    response.content_length = content_length
    response.headers["Server"] = SERVER_NAME
    if ingress.is_draining:
        response.force_close()
    try:
        async with asyncio.timeout_at(call.ask.deadline):
            await _stream(request, response, answer.stream, content_length)
    except TimeoutError as error:
        _log.warning("client_reads_too_slowly", request_id=request_id)
        _break_off(request, error)
    finally:
        ingress.abandon(call)
    return response


async def _stream(
    request: web.BaseRequest,
    response: web.StreamResponse,
    body: AnswerBody,
    content_length: int | None,
) -> None:
    """Write pieces as they come. An answer that breaks off closes the connection: nothing else can tell."""
    await response.prepare(request)
    written_bytes = 0
    try:
        while (piece := await body.read()) is not None:
            if piece:
                await response.write(piece)
                written_bytes += len(piece)
        if content_length is not None and written_bytes != content_length:
            raise AnswerUnusable(f"the replica promised {content_length} bytes and sent {written_bytes}")
    except ServeError as error:
        _log.warning("answer_broke_off", reason=str(error), written_bytes=written_bytes)
        _break_off(request, error)
    await response.write_eof()


def _break_off(request: web.BaseRequest, cause: Exception) -> NoReturn:
    """Close the connection in the middle of an answer."""
    if request.transport is not None:
        request.transport.abort()
    raise ConnectionResetError("the answer broke off") from cause


def problem_response(problem: Problem, request_id: str) -> web.Response:
    """An error as HTTP."""
    headers = CIMultiDict(problem.headers)
    headers["Content-Type"] = "application/json"
    headers[REQUEST_ID] = request_id
    return web.Response(status=problem.status, headers=headers, body=encode_problem(problem, request_id))


def as_response(answer: web.HTTPException) -> web.Response:
    """The answer that a middleware raised, as one that is returned."""
    headers = CIMultiDict(answer.headers)
    headers.popall("Content-Length", None)
    response = web.Response(
        status=answer.status, reason=answer.reason, headers=headers, body=answer.body or answer.text
    )
    response.cookies.update(answer.cookies)
    return response
