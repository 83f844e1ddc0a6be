"""Requests that meet middlewares: the detour whose cost only those who want it pay.

Why a deadline of its own around the chain: a middleware may hang, and its client is owed an answer. It holds until the
answer begins; streams and sockets go on as long as they like.
"""

from __future__ import annotations

import asyncio
from typing import Final, final

import structlog
from aiohttp import web

from serve_common.dispatch.tallies import EndpointTally
from serve_common.errors import ServeError
from serve_common.values.http_options import HttpOptions
from serve_proxy.adapters.http_answers import as_response, problem_response
from serve_proxy.adapters.http_body import check_announced, let_continue
from serve_proxy.adapters.http_targets import replace_headers
from serve_proxy.adapters.middlewares import Handler
from serve_proxy.core.following import FollowedRequest
from serve_proxy.core.headers import checked_headers
from serve_proxy.core.problems import Problem, problem_of

_log = structlog.get_logger(__name__)

_MIDDLEWARE_GRACE_S: Final = 0.5
"""What middlewares get beyond the deadline, so that a late answer is told by what waited for it."""


@final
class Exchange:
    """What a request with middlewares carries through them."""

    __slots__ = ("_scope", "client", "deadline", "follower", "problem", "request_id", "tally", "traceparent")

    def __init__(self, request_id: str, deadline: float, tally: EndpointTally, client: str) -> None:
        self.request_id = request_id
        self.deadline = deadline
        self.tally = tally
        """Where it counts; its endpoint's once that is known."""
        self.client: Final = client
        """Who asks as ``host:port``, as far as the proxies in front are believed."""
        self.problem: Problem | None = None
        """What it is answered with, when this process has failed it."""
        self.follower: FollowedRequest | None = None
        """Of a request that is followed."""
        self.traceparent = ""
        """What goes on to replicas, where it was decided here whether the request is traced."""
        self._scope = asyncio.timeout_at(deadline + _MIDDLEWARE_GRACE_S)

    def begun(self) -> None:
        """The answer begins: from now on no deadline holds."""
        if not self._scope.expired():
            self._scope.reschedule(None)

    async def run(
        self, chain: Handler, request: web.BaseRequest, options: HttpOptions, forwarded_hops: int
    ) -> web.StreamResponse:
        """The answer of the ``chain``, or what is told instead of it."""
        given = request.clone(client_max_size=options.body_bytes_max)
        checked = checked_headers(request.raw_headers, forwarded_hops)
        if checked != request.raw_headers:
            replace_headers(given, checked)
        given[EXCHANGE] = self
        try:
            check_announced(request, options.body_bytes_max)
        except ServeError as error:
            self.problem = problem_of(error)
            return problem_response(self.problem, self.request_id)
        await let_continue(request)  # a middleware may want the body
        try:
            async with self._scope:
                response = await chain(given)
            if not isinstance(response, web.StreamResponse):
                raise TypeError(f"a middleware returned {type(response).__name__}, no response")  # noqa: TRY301 - a failure like what it raises
            if request.writer.output_size > 0 and not response.prepared:
                raise RuntimeError("a middleware returned a response after another one had begun")  # noqa: TRY301 - as above
        except web.HTTPException as answer:
            if request.writer.output_size == 0:
                return as_response(answer)
            return self._fail(request, answer, is_late=False)
        except Exception as error:
            transport = request.transport
            if isinstance(error, ConnectionError) and (transport is None or transport.is_closing()):
                raise  # the client's own connection, not one that a middleware made
            return self._fail(request, error, is_late=self._scope.expired())
        return response

    def _fail(self, request: web.BaseRequest, error: Exception, *, is_late: bool) -> web.Response:
        _log.error(
            "middleware_failed", request_id=self.request_id, path=request.raw_path[:200], exc_info=error
        )
        if request.writer.output_size > 0:
            # What was written still goes out, and then the connection is closed.
            raise ConnectionResetError("a middleware failed after the answer had begun") from error
        if is_late:
            problem = Problem(
                status=504, code="deadline_exceeded", message="the middlewares did not answer in time"
            )
        else:
            message = f"a middleware failed: {type(error).__name__}"
            problem = Problem(status=500, code="middleware_failed", message=message)
        self.problem = problem
        return problem_response(problem, self.request_id)


EXCHANGE: Final = web.RequestKey("muster.exchange", Exchange)
