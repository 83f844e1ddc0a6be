"""User middlewares: imported by path, validated, and wrapped around the handler."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, final

import structlog
from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy

from serve_common.config.backend import HttpOptions
from serve_common.dispatch.admission import RequestStats
from serve_common.errors import ServeError
from serve_proxy.core.headers import ObservedRequest, checked_headers
from serve_proxy.core.problems import Problem, build_problem
from serve_proxy.http.bodies import check_announced, send_continue
from serve_proxy.http.responses import as_response, problem_response
from serve_proxy.shell.ingress import MiddlewareRefused

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
Middleware = Callable[[web.BaseRequest, Handler], Awaitable[web.StreamResponse]]
Middlewares = tuple[Middleware, ...]

NO_MIDDLEWARES: Final[Middlewares] = ()


def add_directory(directory: str) -> None:
    """Append ``directory`` to ``sys.path``."""
    if directory not in sys.path:
        sys.path.append(directory)


def compose(middlewares: Sequence[Middleware], handler: Handler) -> Handler:
    """``handler`` with ``middlewares`` around it, the first outermost."""
    for middleware in reversed(middlewares):
        handler = _wrap(middleware, handler)
    return handler


def _wrap(middleware: Middleware, handler: Handler) -> Handler:
    return lambda request: middleware(request, handler)


async def load_middlewares(paths: Sequence[str]) -> Middlewares:
    """Import ``paths`` (``module:attribute``) in a thread. Raises `MiddlewareRefused` naming the path.

    Why a thread: an import may take seconds and must not delay requests. It is a daemon, because one that hangs cannot
    be ended and must not keep the process from exiting.
    """
    loop = asyncio.get_running_loop()
    loaded: asyncio.Future[Middlewares] = loop.create_future()

    def deliver(outcome: Middlewares | MiddlewareRefused) -> None:
        if loaded.done():
            return
        if isinstance(outcome, MiddlewareRefused):
            loaded.set_exception(outcome)
        else:
            loaded.set_result(outcome)

    def work() -> None:
        outcome: Middlewares | MiddlewareRefused
        try:
            importlib.invalidate_caches()  # files may have been added since the last import
            outcome = tuple(_import(path) for path in paths)
        except MiddlewareRefused as error:
            outcome = error
        except Exception as error:  # noqa: BLE001 - reported to the awaiting task
            outcome = MiddlewareRefused(f"{', '.join(paths)}: {type(error).__name__}: {error}")
        # The loop may have closed in the meantime.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(deliver, outcome)

    threading.Thread(target=work, name="import_middlewares", daemon=True).start()
    return await loaded


def _import(path: str) -> Middleware:
    module_name, _, attribute = path.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
        for name in attribute.split("."):
            found = getattr(found, name)
    except BaseException as error:
        # User code runs here; anything that it raises, SystemExit included, refuses the middleware.
        raise MiddlewareRefused(f"{path}: {type(error).__name__}: {error}") from error
    reason = _validation_error(found)
    if reason:
        raise MiddlewareRefused(f"{path}: {reason}; it must be `async def middleware(request, handler)`")
    middleware: Middleware = found
    return middleware


def _validation_error(found: Any) -> str | None:
    """Why ``found`` is not a valid middleware; None when it is."""
    if inspect.isclass(found) or not callable(found):
        return "is a class" if inspect.isclass(found) else f"is of type {type(found).__name__}"
    if not inspect.iscoroutinefunction(found) and not inspect.iscoroutinefunction(type(found).__call__):
        return "is not async"
    try:
        inspect.signature(found).bind(None, None)
    except (TypeError, ValueError) as error:
        return f"cannot be called with a request and a handler ({error})"
    return None


def replace_headers(request: web.BaseRequest, raw: tuple[tuple[bytes, bytes], ...]) -> None:
    """Replace the headers of ``request``, a clone.

    `clone(headers=…)` re-encodes the raw headers, and fails for values that are not UTF-8.
    """
    pairs = ((name.decode("latin-1"), value.decode("utf-8", "surrogateescape")) for name, value in raw)
    headers = CIMultiDictProxy(CIMultiDict(pairs))
    request._message = request._message._replace(headers=headers, raw_headers=raw)  # noqa: SLF001 - see above
    request._headers = headers  # noqa: SLF001 - as above


_log = structlog.get_logger(__name__)

_MIDDLEWARE_GRACE_S: Final = 0.5
"""Seconds that middlewares get beyond the deadline, so that the endpoint's own timeout error comes first."""


@final
class MiddlewareRequestState:
    """State of one request across its middlewares."""

    __slots__ = ("_scope", "client", "deadline", "observer", "problem", "request_id", "stats", "traceparent")

    def __init__(self, request_id: str, deadline: float, stats: RequestStats, client: str) -> None:
        self.request_id = request_id
        self.deadline = deadline
        self.stats = stats
        """The statistics that count it; its endpoint's once that is known."""
        self.client: Final = client
        """The client as ``host:port``, as forwarded by trusted proxies."""
        self.problem: Problem | None = None
        """The error response, when this process failed the request."""
        self.observer: ObservedRequest | None = None
        """The observer of the request; None when it is not observed."""
        self.traceparent = ""
        """The traceparent for replicas; empty when tracing was not decided here."""
        self._scope = asyncio.timeout_at(deadline + _MIDDLEWARE_GRACE_S)

    def started(self) -> None:
        """Called when the response starts: from now on no deadline applies."""
        if not self._scope.expired():
            self._scope.reschedule(None)

    async def run(
        self, chain: Handler, request: web.BaseRequest, options: HttpOptions, forwarded_hops: int
    ) -> web.StreamResponse:
        """The response of the ``chain``, or an error response.

        Why a deadline around the whole chain: a middleware may hang, and its client must still get a response. It
        applies until the response starts; streams and sockets may take as long as they like.
        """
        cloned = request.clone(client_max_size=options.body_bytes_max)
        checked = checked_headers(request.raw_headers, forwarded_hops)
        if checked != request.raw_headers:
            replace_headers(cloned, checked)
        cloned[EXCHANGE] = self
        try:
            check_announced(request, options.body_bytes_max)
        except ServeError as error:
            self.problem = build_problem(error)
            return problem_response(self.problem, self.request_id)
        await send_continue(request)  # a middleware may want the body
        try:
            async with self._scope:
                response = await chain(cloned)
            if not isinstance(response, web.StreamResponse):
                raise TypeError(f"a middleware returned {type(response).__name__}, no response")  # noqa: TRY301 - a failure like what it raises
            if request.writer.output_size > 0 and not response.prepared:
                raise RuntimeError("a middleware returned a response after another one had begun")  # noqa: TRY301 - as above
        except web.HTTPException as response:
            if request.writer.output_size == 0:
                return as_response(response)
            return self._fail(request, response, is_late=False)
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
            # What was written is still sent, and then the connection is closed.
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


EXCHANGE: Final = web.RequestKey("muster.exchange", MiddlewareRequestState)
