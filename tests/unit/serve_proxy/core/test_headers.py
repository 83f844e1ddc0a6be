"""What the proxy decides without I/O: headers, admission, problems, retries, deaths, tallies and settings."""

from __future__ import annotations

from http import HTTPStatus
from types import SimpleNamespace

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from serve_common.config.backend import BackpressureConfig
from serve_common.dispatch.admission import (
    LOST_ATTEMPTS_MAX,
    Endpoint,
    FailureDetector,
    RequestStats,
    ShadowOutcome,
    admit,
    admit_call,
    can_repeat,
    may_send_again,
)
from serve_common.dispatch.errors import (
    BackPressureError,
    CircuitOpen,
    HeadersTooLarge,
    MethodNotAllowed,
    NoRoute,
    ReplicaError,
)
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
from serve_common.protocol.frames import RequestKind
from serve_common.protocol.snapshots import BackendProtection, BackendSnapshot, EndpointSnapshot, Snapshot
from serve_common.routing.route_table import RouteTable
from serve_common.routing.router import Router
from serve_common.runtime.settings import Environment
from serve_proxy.adapters.metrics import ProxyCollector, RoutesCollector
from serve_proxy.core.headers import (
    as_text,
    checked_headers,
    earliest_deadline,
    forward,
    get_header_value,
    read_checked_headers,
    read_request_headers,
    read_response_head,
)
from serve_proxy.core.problems import BadRequest, BodyTooLarge, build_problem, encode_problem
from serve_proxy.http.endpoint import build_request_spec
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
        (BackPressureError.of_backend(BackendTag("d/a"), 7, BackendProtection()), 503, "queue_full", True),
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
def test_each_error_has_its_status_and_code_in_a_problem_of_rfc_9457(
    error: ServeError, status: int, code: str, has_retry_after: bool
) -> None:
    problem = build_problem(error)
    assert (problem.status, problem.code) == (status, code)
    assert ("Retry-After" in dict(problem.headers)) == has_retry_after
    content_type, encoded = encode_problem(problem, "id")
    assert content_type == "application/problem+json"
    body = msgspec.json.decode(encoded)
    assert body.pop("error") == {"code": code, "message": str(error), "request_id": "id"}
    assert body.pop("title") == HTTPStatus(status).phrase
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
    assert may_send_again(is_repeatable=True, has_response_started=False, lost_attempts=1)
    assert not may_send_again(is_repeatable=True, has_response_started=True, lost_attempts=1)
    assert not may_send_again(is_repeatable=False, has_response_started=False, lost_attempts=1)
    assert not may_send_again(is_repeatable=True, has_response_started=False, lost_attempts=LOST_ATTEMPTS_MAX)


def test_silence_must_last_before_a_replica_counts_as_dead() -> None:
    failure_detector = FailureDetector()
    assert failure_detector.no_responders(R0, 1.0) == 0.0
    assert failure_detector.suspects
    assert failure_detector.due(1.05) == []
    assert failure_detector.due(1.1) == [R0]
    assert failure_detector.no_responders(R0, 4.5) == 3.5


def test_any_sign_of_life_ends_a_suspicion() -> None:
    failure_detector = FailureDetector()
    failure_detector.no_responders(R0, 1.0)
    failure_detector.no_responders(R1, 1.0)
    failure_detector.on_sign_of_life(R0)
    assert failure_detector.due(9.0) == [R1]
    assert failure_detector.no_responders(R0, 9.0) == 0.0


def test_just_after_a_reconnect_nobody_is_declared_dead() -> None:
    failure_detector = FailureDetector()
    failure_detector.no_responders(R0, 7.0)
    failure_detector.reconnected()
    assert failure_detector.no_responders(R0, 10.0) == 0.0
    assert failure_detector.no_responders(R0, 12.5) == 2.5


class Links:
    open_links, open_tcp_links, opened, failed, lost = 3, 1, 5, 1, 3

    def count_frames(self) -> tuple[int, int]:
        return 40, 50


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
    endpoint.stats.add("GET", 200, 0.003)
    endpoint.stats.add("BREW", 200, 70.0)
    endpoint.stats.add_shadow(BackendTag("d/new"), ShadowOutcome.SKIPPED)
    routes.confirm("endpoints.d.a")
    routes.confirm("backends.d.a")
    registry = CollectorRegistry()
    registry.register(RoutesCollector(routes))
    registry.register(
        ProxyCollector(
            ProxyId("proxy-1"),
            routes,
            QuietBus(),
            reconnects=lambda: 3,
            connections=lambda: 2,
            dropped_calls=lambda: 7,
            memory=UploadMemory(),
            links=Links(),  # type: ignore[arg-type] - what is read of them
            captures=SimpleNamespace(published=4, dropped=1),
        )
    )
    shown = generate_latest(registry).decode()
    for line in (
        'serve_proxy_direct_links{transport="unix"} 2.0',
        'serve_proxy_direct_links{transport="tcp"} 1.0',
        'serve_proxy_direct_dials_total{outcome="lost"} 3.0',
        'serve_proxy_direct_frames_total{direction="received"} 50.0',
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
        'serve_proxy_captured_requests_total{outcome="published"} 4.0',
        'serve_proxy_captured_requests_total{outcome="dropped"} 1.0',
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
    registry.register(RoutesCollector(routes))
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
    tally = routes.endpoints[EndpointTag("d/a")].stats
    moved = msgspec.structs.replace(endpoint_snapshot(), route="/b")
    routes.update({"endpoints.d.a": Snapshot(snapshot_id=2, epoch=1, content=moved)}, whole=False)
    assert routes.endpoints[EndpointTag("d/a")].stats is tally
    assert routes.table.routes() == {"/b": "d/a"}


def test_settings_have_defaults_and_name_the_bad_variable() -> None:
    settings = read_settings(Environment({"MUSTER_NATS_PASSWORD": "p", "MUSTER_PROXY_ID": "p1"}))
    assert (settings.http_host, settings.http_port, settings.operations.port) == ("127.0.0.1", 8000, 9102)
    assert settings.http.request_timeout_s == 60
    assert settings.http.body_bytes_max == 10 * 1024 * 1024
    assert (settings.drain_timeout_s, settings.bus_wait_s, settings.middleware_dir) == (30, 5, None)
    with pytest.raises(BadField, match="MUSTER_REQUEST_TIMEOUT_S"):
        read_settings(Environment({"MUSTER_NATS_PASSWORD": "p", "MUSTER_REQUEST_TIMEOUT_S": "soon"}))


# What a request's headers tell the proxy: who asks, until when, with which key, and what is told of errors.


PEER = "10.0.0.9:5555"


def forwarded(*headers: tuple[bytes, bytes], peer: str = PEER, scheme: str = "http", hops: int = 1):
    read = read_request_headers(headers, hops)
    caller = forward(read, peer, scheme)
    return caller, {name: value for name, value in read.forwarded if name.startswith(b"x-forwarded")}


def test_a_direct_client_is_told_to_the_application() -> None:
    caller, told = forwarded((b"Host", b"api.example"), scheme="https")
    assert caller == (PEER, "https")
    assert told == {
        b"x-forwarded-for": b"10.0.0.9",
        b"x-forwarded-proto": b"https",
        b"x-forwarded-host": b"api.example",
    }


def test_what_a_proxy_in_front_said_is_kept_and_its_address_added() -> None:
    caller, told = forwarded(
        (b"Host", b"internal"),
        (b"X-Forwarded-For", b"203.0.113.7"),
        (b"X-Forwarded-For", b"10.0.0.1"),
        (b"X-Forwarded-Proto", b"HTTPS"),
        (b"X-Forwarded-Host", b"api.example"),
        hops=2,
    )
    assert caller == ("203.0.113.7:0", "https")
    assert told == {
        b"x-forwarded-for": b"203.0.113.7, 10.0.0.1, 10.0.0.9",
        b"x-forwarded-proto": b"HTTPS",
        b"x-forwarded-host": b"api.example",
    }


@pytest.mark.parametrize(
    ("said", "client"),
    [
        (b"1.2.3.4:80", "1.2.3.4:80"),
        (b"2001:db8::1", "2001:db8::1:0"),
        (b"[2001:db8::1]:80", "2001:db8::1:80"),
        (b"[2001:db8::1]", "2001:db8::1:0"),
        (b"6.6.6.6, 1.2.3.4", "1.2.3.4:0"),
        (b"\xff", PEER),
        (b"a\x01b", PEER),
        (b"x" * 65, PEER),
        (b",, 1.2.3.4", "1.2.3.4:0"),
        (b",", PEER),
    ],
)
def test_the_address_that_a_trusted_hop_saw_is_the_client_when_it_can_be_one(said, client) -> None:
    assert forwarded((b"X-Forwarded-For", said))[0] == (client, "http")


def test_a_scheme_that_nobody_speaks_is_not_believed_and_a_socket_without_address_is_no_client() -> None:
    caller, told = forwarded((b"X-Forwarded-Proto", b"gopher"), peer="")
    assert caller == ("", "http")
    assert b"x-forwarded-for" not in told


@pytest.mark.parametrize("hops", [0, 3])
def test_without_all_of_the_trusted_hops_nothing_that_was_forwarded_is_believed(hops: int) -> None:
    caller, told = forwarded((b"Host", b"h"), (b"X-Forwarded-For", b"6.6.6.6, 7.7.7.7"), hops=hops)
    assert (caller, told[b"x-forwarded-for"]) == ((PEER, "http"), b"10.0.0.9")
    if not hops:
        every = [b"X-Forwarded-Proto", b"X-Forwarded-Host", b"X-Forwarded-Port", b"Forwarded", b"X-Real-IP"]
        read = read_request_headers([(name, b"https") for name in every])
        assert read.forwarded == []
        assert forward(read, PEER, "http") == (PEER, "http")


def test_what_middlewares_get_is_checked_once_and_what_they_add_stays() -> None:
    came = (
        (b"Host", b"h"),
        (b"Connection", b"Upgrade, X-Name, X-Own"),
        (b"Upgrade", b"websocket"),
        (b"X-Own", b"1"),
        (b"X_Name", b"forged"),
        (b"Forwarded", b"for=6.6.6.6"),
        (b"X-Forwarded-For", b"6.6.6.6, 1.2.3.4"),
    )
    checked = checked_headers(came, 0)
    assert checked == came[:3]
    assert checked_headers(came, 1) == (*came[:3], came[5], (b"X-Forwarded-For", b"1.2.3.4"))
    read = read_checked_headers((*checked, (b"X-Name", b"shop"), (b"X_Odd", b"ours")))
    assert read.forwarded == [(b"host", b"h"), (b"x-name", b"shop"), (b"x_odd", b"ours")]
    assert read.upgrade == b"websocket"


def test_a_client_cannot_have_the_host_left_out_by_naming_it_hop_by_hop() -> None:
    read = read_request_headers([(b"Host", b"h"), (b"Connection", b"host, x-a"), (b"X-A", b"1")])
    assert read.forwarded == [(b"host", b"h")]


def test_the_header_of_the_model_is_known_with_hyphens_too() -> None:
    read = read_request_headers([(b"Serve-Multiplexed-Model-Id", b"m1")])
    assert read.model_id == b"m1"
    assert read.forwarded == [(b"serve-multiplexed-model-id", b"m1")]


def test_headers_of_ours_are_read_and_passed_on() -> None:
    read = read_request_headers(
        [
            (b"serve_multiplexed_model_id", b"m1"),
            (b"X-Serve-Shard-Key", b"u1"),
            (b"X-Tenant", b"t1"),
            (b"x-tenant", b"t2"),
        ]
    )
    assert (read.model_id, read.shard_key) == (b"m1", b"u1")
    assert (
        get_header_value(read, "X-Tenant"),
        get_header_value(read, "X-Other"),
        get_header_value(read, ""),
    ) == (b"t1", b"", b"")
    assert len(read.forwarded) == 4


def deadline(*headers: tuple[bytes, bytes], endpoint_slo_ms: float | None = None) -> float:
    return earliest_deadline(
        read_request_headers(headers), 160.0, endpoint_slo_ms, now=100.0, wall_now=1_700_000_000.0
    )


def test_the_earliest_deadline_holds() -> None:
    assert deadline() == 160.0
    assert deadline(endpoint_slo_ms=2500) == 102.5
    assert deadline((b"X-Serve-Relative-SLO-MS", b"1500")) == 101.5
    assert deadline((b"X-Serve-Relative-SLO-MS", b"1500"), endpoint_slo_ms=500) == 101.5
    assert deadline((b"X-Serve-Relative-SLO-MS", b"90000")) == 160.0
    assert deadline((b"X-Request-Timeout-Seconds", b"0.25")) == 100.25
    assert deadline((b"X-Serve-Absolute-SLO-MS", b"1700000003000")) == pytest.approx(103.0)
    every = (
        (b"X-Serve-Relative-SLO-MS", b"9000"),
        (b"X-Serve-Absolute-SLO-MS", b"1700000003000"),
        (b"X-Request-Timeout-Seconds", b"5"),
    )
    assert deadline(*every) == pytest.approx(103.0)


@pytest.mark.parametrize(
    "name", [b"X-Serve-Relative-SLO-MS", b"X-Serve-Absolute-SLO-MS", b"X-Request-Timeout-Seconds"]
)
@pytest.mark.parametrize(
    "value", [b"", b"soon", b"-1", b"0", b"nan", b"inf", b"1e3", b"1_0", b"0x1", b"9" * 40]
)
def test_a_deadline_that_is_no_number_is_refused_by_name(name: bytes, value: bytes) -> None:
    with pytest.raises(BadRequest) as caught:
        deadline((name, value))
    assert caught.value.field.lower() == name.decode().lower()
    assert build_problem(caught.value).status == 400


def test_a_deadline_that_has_passed_is_told_before_anybody_is_asked() -> None:
    with pytest.raises(DeadlineExceeded):
        deadline((b"X-Serve-Absolute-SLO-MS", b"1699999999999"))


def test_backpressure_says_when_to_try_again() -> None:
    protection = BackendProtection(backpressure_config=BackpressureConfig(status_code=429, retry_after_s=2.1))
    problem = build_problem(BackPressureError.of_backend(BackendTag("d/a"), 7, protection))
    assert (problem.status, problem.headers) == (429, (("Retry-After", "3"),))
    problem = build_problem(CircuitOpen(BackendTag("d/a"), 4.0))
    assert (problem.status, problem.headers) == (503, (("Retry-After", "4"),))


@pytest.mark.parametrize(
    ("kind", "is_repeatable"), [(RequestKind.HTTP, True), (RequestKind.WEBSOCKET, False)]
)
def test_a_websockets_handshake_is_no_get_that_may_run_twice(
    kind: RequestKind, *, is_repeatable: bool
) -> None:
    snapshot = EndpointSnapshot(endpoint_tag=EndpointTag("d/a"), route="/a", methods=["GET"], traffic={})
    spec = build_request_spec(
        Endpoint(snapshot, RequestStats()),
        read_request_headers([(b"Host", b"a")], 0),
        method="GET",
        path="/a",
        query="",
        body=b"",
        request_id="id",
        now=0.0,
        deadline=1.0,
        peer="",
        scheme="http",
        root_path="",
        kind=kind,
    )
    assert spec.is_repeatable == is_repeatable
