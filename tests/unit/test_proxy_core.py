"""What the proxy decides without I/O: headers, admission, problems, retries, deaths, tallies and settings."""

from __future__ import annotations

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from serve_common.dispatch.admission import (
    LOSSES_MAX,
    Endpoint,
    FailureDetector,
    RequestStats,
    ShadowOutcome,
    admit,
    admit_call,
    can_repeat,
    may_send_again,
)
from serve_common.dispatch.errors import HeadersTooLarge, MethodNotAllowed, NoRoute, ReplicaError
from serve_common.dispatch.request_body import UploadMemory
from serve_common.dispatch.routes import Routes
from serve_common.errors import (
    BadField,
    BusUnavailable,
    DeadlineExceeded,
    NoReplicaAvailable,
    NotFound,
    ReplicaDied,
    ServeError,
)
from serve_common.names import BackendTag, EndpointTag, ProxyId, ReplicaTag
from serve_common.protocol.snapshots import BackendSnapshot, EndpointSnapshot, Snapshot
from serve_common.routing.route_table import RouteTable
from serve_common.routing.router import Router
from serve_common.runtime.settings import Environment
from serve_proxy.adapters.metrics import register_metrics
from serve_proxy.core.headers import as_text, read_request_headers, read_response_head
from serve_proxy.core.problems import BodyTooLarge, build_problem, encode_problem
from serve_proxy.settings import read_settings

R0, R1 = ReplicaTag("d/a#0"), ReplicaTag("d/a#1")


def test_hop_by_hop_headers_end_at_the_proxy_and_others_keep_their_bytes() -> None:
    read = read_request_headers(
        [
            (b"Host", b"h"),
            (b"Connection", b"keep-alive, X-Secret"),
            (b"X-Secret", b"1"),
            (b"Transfer-Encoding", b"chunked"),
            (b"TE", b"trailers"),
            (b"Expect", b"100-continue"),
            (b"X-Name", "é".encode()),
            (b"traceparent", b"00-1"),
            (b"Idempotency-Key", b"k"),
            (b"X-Request-Id", b"mine"),
        ]
    )
    assert [name for name, _ in read.forwarded] == [b"host", b"x-name", b"traceparent", b"idempotency-key"]
    assert read.forwarded[1][1] == "é".encode()
    assert (read.request_id, read.traceparent, read.has_idempotency_key) == ("mine", "00-1", True)


@pytest.mark.parametrize("value", [b"", b"x" * 129, b"a\x01b", "é".encode()])
def test_an_unusable_request_id_is_not_taken_over(value: bytes) -> None:
    assert read_request_headers([(b"X-Request-ID", value)]).request_id == ""


def test_an_answers_own_framing_headers_are_left_out() -> None:
    head = read_response_head(
        200,
        [
            (b"content-length", b"12"),
            (b"Transfer-Encoding", b"chunked"),
            (b"Server", b"x"),
            (b"set-cookie", b"a"),
            (b"set-cookie", b"b"),
            (b"x-utf8", "é".encode()),
            (b"x-latin", b"\xff"),
        ],
    )
    assert head.content_length == 12
    assert as_text(head.forwarded) == [
        ("set-cookie", "a"),
        ("set-cookie", "b"),
        ("x-utf8", "é"),
        ("x-latin", "?"),
    ]


@pytest.mark.parametrize(
    ("status", "headers"),
    [
        (200, [(b"x", b"a\r\nset-cookie: b")]),
        (200, [(b"a b", b"c")]),
        (200, [(b"", b"c")]),
        (200, [("é".encode(), b"c")]),
        (101, []),
        (700, []),
    ],
)
def test_a_head_that_would_break_the_answer_apart_is_refused(status, headers) -> None:
    with pytest.raises(ValueError, match=r"header|status"):
        read_response_head(status, headers)


def endpoint_snapshot() -> EndpointSnapshot:
    return EndpointSnapshot(
        endpoint_tag=EndpointTag("d/a"), route="/a", methods=["GET", "POST"], traffic={BackendTag("d/a"): 1.0}
    )


def test_admission_names_the_path_and_the_allowed_methods() -> None:
    endpoint = Endpoint(endpoint_snapshot(), RequestStats())
    table, endpoints = RouteTable([endpoint_snapshot()]), {endpoint.tag: endpoint}
    assert admit(table, endpoints, "GET", "/a/x") is endpoint
    assert admit_call(endpoints, endpoint.tag) is endpoint
    with pytest.raises(NoRoute, match="'/b'"):
        admit(table, endpoints, "GET", "/b")
    with pytest.raises(MethodNotAllowed) as caught:
        admit(table, endpoints, "PUT", "/a")
    assert build_problem(caught.value).headers == (("Allow", "GET, POST"),)
    with pytest.raises(NotFound, match="d/b"):
        admit_call(endpoints, EndpointTag("d/b"))


@pytest.mark.parametrize(
    ("error", "status", "code", "has_retry_after"),
    [
        (NoRoute("x"), 404, "no_route", False),
        (MethodNotAllowed("PUT", "GET"), 405, "method_not_allowed", False),
        (BodyTooLarge("x"), 413, "body_too_large", False),
        (HeadersTooLarge("x"), 431, "headers_too_large", False),
        (NoReplicaAvailable("x"), 503, "no_replica_available", True),
        (BusUnavailable("x"), 503, "bus_unavailable", True),
        (DeadlineExceeded("x"), 504, "deadline_exceeded", False),
        (ReplicaDied("x"), 502, "replica_died", False),
        (ReplicaError("user_code_raised", 500, "x"), 500, "user_code_raised", False),
        (ReplicaError("user_code_raised", 200, "x"), 500, "user_code_raised", False),
        (ReplicaError("no_replica_available", 503, "x"), 503, "no_replica_available", True),
        (ReplicaError("queue_full", 429, "x"), 429, "queue_full", True),
        (ReplicaError("deadline_exceeded", 504, "x"), 504, "deadline_exceeded", False),
    ],
)
def test_each_error_has_its_status_and_code(
    error: ServeError, status: int, code: str, has_retry_after: bool
) -> None:
    problem = build_problem(error)
    assert (problem.status, problem.code) == (status, code)
    assert ("Retry-After" in dict(problem.headers)) == has_retry_after
    body = msgspec.json.decode(encode_problem(problem, "id"))
    assert body.pop("error") == {"code": code, "message": str(error), "request_id": "id"}
    assert body.pop("title")
    assert body == {
        "type": f"urn:muster:problem:{code}",
        "status": status,
        "detail": str(error),
        "code": code,
        "request_id": "id",
    }


def test_only_what_may_run_twice_is_sent_again_and_not_for_ever() -> None:
    assert [
        m
        for m in ("GET", "HEAD", "PUT", "DELETE", "OPTIONS", "POST", "PATCH")
        if can_repeat(m, has_idempotency_key=False)
    ] == ["GET", "HEAD", "PUT", "DELETE", "OPTIONS"]
    assert can_repeat("POST", has_idempotency_key=True)
    assert may_send_again(is_repeatable=True, has_response_started=False, losses=1)
    assert not may_send_again(is_repeatable=True, has_response_started=True, losses=1)
    assert not may_send_again(is_repeatable=False, has_response_started=False, losses=1)
    assert not may_send_again(is_repeatable=True, has_response_started=False, losses=LOSSES_MAX)


def test_silence_must_last_before_a_replica_counts_as_dead() -> None:
    failure_detector = FailureDetector()
    assert not failure_detector.no_responders(R0, 1.0)
    assert failure_detector
    assert failure_detector.due(1.05) == []
    assert failure_detector.due(1.1) == [R0]
    assert not failure_detector.no_responders(R0, 1.2)
    assert failure_detector.no_responders(R0, 1.3)
    assert not failure_detector


def test_any_sign_of_life_ends_a_suspicion() -> None:
    failure_detector = FailureDetector()
    failure_detector.no_responders(R0, 1.0)
    failure_detector.no_responders(R1, 1.0)
    failure_detector.heard(R0)
    assert failure_detector.due(9.0) == [R1]
    assert not failure_detector.no_responders(R0, 9.0)


def test_just_after_a_reconnect_nobody_is_declared_dead() -> None:
    failure_detector = FailureDetector()
    failure_detector.reconnected(10.0)
    failure_detector.no_responders(R0, 10.0)
    assert not failure_detector.no_responders(R0, 11.9)
    assert failure_detector.no_responders(R0, 12.0)


class QuietBus:
    """A data connection that is well."""

    pending_bytes = 0
    permission_violations = 0


def test_metrics_show_what_is_there_and_forget_what_is_gone() -> None:
    routes = Routes(lambda: 0.5)
    backend = BackendSnapshot(
        backend_tag=BackendTag("d/a"),
        replicas=[R0],
        draining=[],
        max_concurrent_queries=1,
        max_queued_requests=1,
    )
    routes.update(
        {
            "endpoints.d.a": Snapshot(snapshot_id=1, epoch=1, content=endpoint_snapshot()),
            "backends.d.a": Snapshot(snapshot_id=2, epoch=1, content=backend),
        },
        whole=True,
    )
    router = routes.router(BackendTag("d/a"))
    router.apply(backend, now=0.0)
    router.may_send_again(now=0.0)
    endpoint = routes.endpoints[EndpointTag("d/a")]
    endpoint.tally.add("GET", 200, 0.003)
    endpoint.tally.add("BREW", 200, 70.0)
    endpoint.tally.add_shadow(BackendTag("d/new"), ShadowOutcome.SKIPPED)
    routes.confirm("endpoints.d.a")
    routes.confirm("backends.d.a")
    registry = CollectorRegistry()
    register_metrics(
        registry,
        ProxyId("proxy-1"),
        routes,
        QuietBus(),
        reconnects=lambda: 3,
        connections=lambda: 2,
        dropped_calls=lambda: 7,
        room=UploadMemory(),
    )
    shown = generate_latest(registry).decode()
    for line in (
        'serve_proxy_requests_total{code="200",endpoint_tag="d/a",method="GET"} 1.0',
        'serve_proxy_requests_total{code="200",endpoint_tag="d/a",method="other"} 1.0',
        'serve_proxy_request_seconds_bucket{endpoint_tag="d/a",le="0.0025"} 0.0',
        'serve_proxy_request_seconds_bucket{endpoint_tag="d/a",le="0.005"} 1.0',
        'serve_proxy_request_seconds_bucket{endpoint_tag="d/a",le="+Inf"} 2.0',
        'serve_proxy_in_flight_requests{backend_tag="d/a"} 0.0',
        'serve_proxy_queue_depth{backend_tag="d/a"} 0.0',
        'serve_proxy_replica_ejections_total{backend_tag="d/a"} 0.0',
        'serve_proxy_retries_total{backend_tag="d/a"} 1.0',
        'serve_proxy_circuit_open{backend_tag="d/a"} 0.0',
        'serve_proxy_refused_requests_total{backend_tag="d/a",reason="queue"} 0.0',
        'serve_proxy_shadow_requests_total{backend_tag="d/new",endpoint_tag="d/a",outcome="skipped"} 1.0',
        "serve_proxy_nats_reconnects_total 3.0",
        "serve_proxy_dropped_calls_total 7.0",
        "serve_proxy_body_bytes 0.0",
        "serve_proxy_refused_bodies_total 0.0",
        'serve_proxy_info{proxy_id="proxy-1"} 1.0',
        "serve_proxy_connections 2.0",
        'serve_router_queued_seconds_total{backend_tag="d/a"} 0.0',
        "serve_proxy_applied_snapshot_id 2.0",
    ):
        assert line in shown
    gone = Snapshot(snapshot_id=3, epoch=1, content=None)
    routes.update({"endpoints.d.a": gone, "backends.d.a": gone}, whole=False)
    assert 'endpoint_tag="d/a"' not in generate_latest(registry).decode()


def test_the_seconds_of_a_queue_never_fall_until_its_router_is_another_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    routes = Routes(lambda: 0.5)
    told = iter((5.0, 4.9, 5.5, 0.25))
    monkeypatch.setattr(Router, "queued_seconds", lambda _router, _now: next(told))
    registry = CollectorRegistry()
    register_metrics(
        registry,
        ProxyId("proxy-1"),
        routes,
        QuietBus(),
        reconnects=lambda: 0,
        connections=lambda: 0,
        dropped_calls=lambda: 0,
        room=UploadMemory(),
    )
    shown = []
    for is_new in (True, False, False, True):
        if is_new:
            routes.routers.clear()
            routes.router(BackendTag("d/a"))
        shown.append(registry.get_sample_value("serve_router_queued_seconds_total", {"backend_tag": "d/a"}))
    assert shown == [5.0, 5.0, 5.5, 0.25]


def test_statuses_and_methods_that_are_none_are_counted_together() -> None:
    tally = RequestStats()
    for method, status in (("GET", 200), ("GET", 200), ("BREW", 99_999), ("GET", -1), ("BREW", 200)):
        tally.add(method, status, 0.1)
    assert tally.counts == {("GET", 200): 2, ("other", 0): 1, ("GET", 0): 1, ("other", 200): 1}
    assert sum(tally.bucket_counts) == 5


def test_an_endpoint_that_changes_keeps_its_tally() -> None:
    routes = Routes(lambda: 0.5)
    routes.update(
        {"endpoints.d.a": Snapshot(snapshot_id=1, epoch=1, content=endpoint_snapshot())}, whole=True
    )
    tally = routes.endpoints[EndpointTag("d/a")].tally
    moved = msgspec.structs.replace(endpoint_snapshot(), route="/b")
    routes.update({"endpoints.d.a": Snapshot(snapshot_id=2, epoch=1, content=moved)}, whole=False)
    assert routes.endpoints[EndpointTag("d/a")].tally is tally
    assert routes.table.routes() == {"/b": "d/a"}


def test_settings_have_defaults_and_name_the_bad_variable() -> None:
    settings = read_settings(Environment({"MUSTER_NATS_PASSWORD": "p", "MUSTER_PROXY_ID": "p1"}))
    assert (settings.http_host, settings.http_port, settings.operations.port) == ("127.0.0.1", 8000, 9102)
    assert settings.http.request_timeout_s == 60
    assert settings.http.body_bytes_max == 10 * 1024 * 1024
    assert (settings.drain_timeout_s, settings.bus_wait_s, settings.middleware_dir) == (30, 5, None)
    with pytest.raises(BadField, match="MUSTER_REQUEST_TIMEOUT_S"):
        read_settings(Environment({"MUSTER_NATS_PASSWORD": "p", "MUSTER_REQUEST_TIMEOUT_S": "soon"}))
