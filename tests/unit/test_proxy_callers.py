"""What a request's headers tell the proxy: who asks, until when, with which key, and what is told of errors."""

from __future__ import annotations

import msgspec
import pytest

from serve_common.config.backend import BackpressureConfig
from serve_common.dispatch.errors import CircuitOpen, QueueIsFull
from serve_common.errors import DeadlineExceeded
from serve_common.names import BackendTag
from serve_common.protocol.snapshots import BackendProtection
from serve_proxy.core.callers import earliest_deadline, forward
from serve_proxy.core.headers import (
    checked_headers,
    get_header_value,
    read_checked_headers,
    read_request_headers,
)
from serve_proxy.core.problems import BadRequest, build_problem, encode_problem

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


def test_a_problem_follows_rfc_9457() -> None:
    problem = build_problem(QueueIsFull(BackendTag("d/a"), 7, BackendProtection()))
    body = msgspec.json.decode(encode_problem(problem, "id"))
    assert body["type"] == "urn:muster:problem:queue_full"
    assert (body["title"], body["status"]) == ("Service Unavailable", 503)
    assert body["detail"] == body["error"]["message"]
    assert (body["code"], body["request_id"]) == ("queue_full", "id")


def test_backpressure_says_when_to_try_again() -> None:
    protection = BackendProtection(backpressure_config=BackpressureConfig(status_code=429, retry_after_s=2.1))
    problem = build_problem(QueueIsFull(BackendTag("d/a"), 7, protection))
    assert (problem.status, problem.headers) == (429, (("Retry-After", "3"),))
    problem = build_problem(CircuitOpen(BackendTag("d/a"), 4.0))
    assert (problem.status, problem.headers) == (503, (("Retry-After", "4"),))
