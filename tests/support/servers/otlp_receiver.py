"""A receiver of OTLP over HTTP, as a collector is one: takes spans, plain or in gzip, and lets tests wait for them.

Why a thread and not the test's loop: what it hears comes from several processes, and some tests block their loop.
"""

from __future__ import annotations

import gzip
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as ProtoSpan
from opentelemetry.proto.trace.v1.trace_pb2 import Status

SOON_S = 30.0


class ReceivedSpan:
    """One span, in plain values."""

    def __init__(self, span: ProtoSpan, resource: dict[str, Any], scope: str) -> None:
        self.name = span.name
        self.kind = ProtoSpan.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_").lower()
        self.trace_id = span.trace_id.hex()
        self.span_id = span.span_id.hex()
        self.parent_id = span.parent_span_id.hex()
        self.tracestate = span.trace_state
        self.start_ns = span.start_time_unix_nano
        self.ended_ns = span.end_time_unix_nano
        self.attributes = {item.key: _value(item.value) for item in span.attributes}
        self.links = [(link.trace_id.hex(), link.span_id.hex()) for link in span.links]
        self.events = [event.name for event in span.events]
        self.error = span.status.message if span.status.code == Status.STATUS_CODE_ERROR else None
        self.resource = resource
        self.scope = scope

    @property
    def service(self) -> str:
        """Who made it."""
        return str(self.resource["service.name"])

    def __repr__(self) -> str:
        return f"{self.service}: {self.name} {self.attributes} error={self.error!r}"


class OtlpReceiver:
    """Listens from its making to `close`; a context manager."""

    def __init__(self) -> None:
        self.spans: list[ReceivedSpan] = []
        self.headers: list[dict[str, str]] = []
        """Of each request, names in lower case."""
        self.status = 200
        """What it answers."""
        self._changed = threading.Condition()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:  # the server's name for it
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                assert self.path == "/v1/traces"
                receiver._take(body, {name.lower(): value for name, value in self.headers.items()})
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(receiver.status)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: Any) -> None:
                """Says nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def environment(self, **others: str) -> dict[str, str]:
        """What makes a process send its spans here, soon."""
        return {"OTEL_EXPORTER_OTLP_ENDPOINT": self.url, "OTEL_BSP_SCHEDULE_DELAY": "50", **others}

    def close(self) -> None:
        """Listen no more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def wait(
        self, condition: Callable[[list[ReceivedSpan]], object], timeout_s: float = SOON_S
    ) -> list[ReceivedSpan]:
        """All spans, once ``condition`` holds of them."""
        with self._changed:
            if not self._changed.wait_for(lambda: condition(self.spans), timeout_s):
                raise AssertionError(f"it did not come about; there is {self.spans}")
            return list(self.spans)

    def of_trace(self, trace_id: str, count: int, timeout_s: float = SOON_S) -> list[ReceivedSpan]:
        """The spans of one trace, once there are so many, by their beginning."""

        def own(spans: list[ReceivedSpan]) -> list[ReceivedSpan]:
            return [span for span in spans if span.trace_id == trace_id]

        spans = own(self.wait(lambda spans: len(own(spans)) >= count, timeout_s))
        return sorted(spans, key=lambda span: span.start_ns)

    def _take(self, body: bytes, headers: dict[str, str]) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        with self._changed:
            self.headers.append(headers)
            if self.status == 200:
                for of_resource in request.resource_spans:
                    resource = {item.key: _value(item.value) for item in of_resource.resource.attributes}
                    for of_scope in of_resource.scope_spans:
                        self.spans += [
                            ReceivedSpan(span, resource, of_scope.scope.name) for span in of_scope.spans
                        ]
            self._changed.notify_all()


def tree(spans: list[ReceivedSpan], root: str = "") -> list[Any]:
    """Names with what is below them, by time: ``[name, [child, …], …]``. ``root``: the first one's parent."""
    found = sorted((span for span in spans if span.parent_id == root), key=lambda span: span.start_ns)
    return [[span.name, *tree(spans, span.span_id)] for span in found]


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    return None if kind is None else getattr(value, kind)
