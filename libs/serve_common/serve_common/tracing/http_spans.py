"""What the span of an HTTP request says, by OpenTelemetry's semantic conventions.

Source: https://opentelemetry.io/docs/specs/semconv/http/http-spans/ (stable since 1.23). Queries, headers and bodies
are left out: they may hold secrets.
"""

from __future__ import annotations

from typing import Final

from serve_common.tracing.request_trace import RequestTrace
from serve_common.tracing.spans import Value, cut
from serve_common.values.endpoint_options import METHODS

_METHODS: Final = frozenset({*METHODS, "CONNECT", "TRACE"})
_OTHER: Final = "_OTHER"
_CLIENT_GONE: Final = 499


def request_attributes(method: str, path: str, scheme: str, request_id: str) -> dict[str, Value]:
    """Of the server's span, as far as known from the start."""
    attributes: dict[str, Value] = {
        "http.request.method": method if method in _METHODS else _OTHER,
        "url.path": cut(path),
        "url.scheme": scheme,
        "muster.request_id": request_id,
    }
    if method not in _METHODS:
        attributes["http.request.method_original"] = cut(method)
    return attributes


def name_of(method: str) -> str:
    """Of the span, until its route is known."""
    return method if method in _METHODS else "HTTP"


def note_route(trace: RequestTrace, method: str, route: str, endpoint_tag: str) -> None:
    """The endpoint was found."""
    trace.span.name = f"{name_of(method)} {route}" if route else name_of(method)
    if route:
        trace.span.attributes["http.route"] = route
    trace.span.attributes["muster.endpoint_tag"] = endpoint_tag


def end_request(trace: RequestTrace, status: int, error_type: str = "", error: str = "") -> None:
    """The request has ended with this status; 499 means that its client went away.

    ``error_type`` and ``error`` say more where this process itself has failed it. A status below 500 is no failure of
    a server's span. Does nothing when it had ended.
    """
    if trace.span.ended_ns:
        return
    attributes = trace.span.attributes
    if status == _CLIENT_GONE:
        attributes["error.type"] = "client_gone"
        trace.end()
        return
    attributes["http.response.status_code"] = status
    if error_type:
        attributes["error.type"] = error_type
    elif status >= 500:
        attributes["error.type"] = str(status)
    trace.end(error if status >= 500 else None)
