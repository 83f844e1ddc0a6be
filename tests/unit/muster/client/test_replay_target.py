"""Where a replay sends captured requests, and as what."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from muster.client import replay_target
from muster.client.admin import Caller
from muster.client.replay_target import (
    VersionTarget,
    build_headers,
    find_endpoint,
    find_target,
    get_main_backend,
    send_to,
)
from muster.client.requests import AdminReply
from serve_common.api.views import EndpointView
from serve_common.config.backend import EndpointOptions
from serve_common.errors import BadField, NotFound, TransientError
from serve_common.names import BackendTag
from serve_common.protocol.captures import BodyState, CapturedMessage, CapturedPair
from serve_common.protocol.subjects import Subjects
from serve_common.replay.captured_requests import can_replay
from serve_common.replay.differences import ReplayedResponse

A, B, C = (BackendTag(f"default/{name}") for name in "abc")


def endpoint(name: str, header: str = "", **traffic: float) -> EndpointView:
    return EndpointView(
        endpoint_tag=f"default/{name}",
        route=None,
        methods=["GET"],
        traffic={f"default/{tag}": weight for tag, weight in traffic.items()},
        options=EndpointOptions(backend_header=header),
    )


def pair(method: str = "GET", state: BodyState = BodyState.CAPTURED, **fields: Any) -> CapturedPair:
    size = fields.pop("body_bytes", 0)
    headers = fields.pop("headers", [])
    return CapturedPair(
        at=0.0,
        request_id="r",
        endpoint_tag=A,
        backend_tag=A,
        method=method,
        path="/p",
        request=CapturedMessage(headers=headers, body=b"x", body_bytes=size, state=state),
        status=200,
        response=CapturedMessage(),
        **fields,
    )


@pytest.mark.parametrize(
    ("endpoints", "name", "expected"),
    [
        ([endpoint("a", a=1), endpoint("b", b=1)], "b", VersionTarget("default/b", B)),
        ([endpoint("a", a=1, b=0, header="X-B")], "b", VersionTarget("default/a", B, "X-B")),
        ([endpoint("a", a=0.5, b=0.5), endpoint("z", b=1)], "b", VersionTarget("default/z", B)),
        ([endpoint("a", a=1, b=0), endpoint("b", b=0.5, c=0.5, header="X")], "b", VersionTarget("default/b", B, "X")),
        ([endpoint("a", a=1, b=0)], "a", VersionTarget("default/a", A)),
    ],
)  # fmt: skip
def test_a_version_is_reached_by_an_endpoint_of_its_own_or_by_a_header(endpoints, name, expected):
    assert find_target(endpoints, endpoints[0], name, "--against") == expected


def test_a_version_that_no_endpoint_leads_to_is_refused_with_what_to_do():
    endpoints = [endpoint("a", a=1, b=0)]
    with pytest.raises(BadField, match="muster endpoint create b-replay b"):
        find_target(endpoints, endpoints[0], "b", "--against")


def test_the_old_version_is_the_deployments_own_backend_or_the_largest():
    assert get_main_backend(endpoint("a", a=0.1, b=0.9)) == A
    assert get_main_backend(endpoint("x", a=0.1, b=0.9)) == B


def test_an_unknown_endpoint_is_refused():
    with pytest.raises(NotFound):
        find_endpoint([endpoint("a", a=1)], "b")


@pytest.mark.parametrize(
    ("one", "is_unsafe", "expected"),
    [
        (pair(), False, True),
        (pair("HEAD"), False, True),
        (pair("POST"), False, False),
        (pair("PUT"), False, False),
        (pair("DELETE"), False, False),
        (pair("POST"), True, True),
        (pair(state=BodyState.OFF), False, True),
        (pair(state=BodyState.OFF, body_bytes=3), True, False),
        (pair(state=BodyState.TOO_LARGE), True, False),
        (pair(state=BodyState.NOT_JSON), True, False),
        (pair(state=BodyState.STREAMED), True, False),
    ],
)
def test_only_whole_requests_of_safe_methods_are_sent_again_unless_all_are_wanted(one, is_unsafe, expected):
    assert can_replay(one, is_unsafe=is_unsafe) is expected


def test_headers_are_those_of_the_request_without_its_first_transport_and_secrets():
    one = pair(
        query="n=1",
        headers=[
            ("accept", "a"), ("accept", "b"), ("authorization", "redacted"), ("host", "h"), ("traceparent", "t"),
            ("x-forwarded-for", "f"), ("content-length", "1"), ("x-serve-shard-key", "k"), ("x-name", "ü"),
            ("x-b", "default/c"), ("accept-encoding", "gzip"),
        ],
    )  # fmt: skip
    assert build_headers(one, VersionTarget(A, B, "X-B")) == {
        "accept": "a, b",
        "X-Serve-Replay": "1",
        "X-Serve-Method": "GET",
        "X-Serve-Path": "/p",
        "X-Serve-Query": "n=1",
        "X-B": B,
    }


class PlayedGateway:
    """Implements `Requests`: replies in turn with what a test gives it."""

    where = "nats://stack.example:4222"

    def __init__(self, *replies: AdminReply) -> None:
        self.replies = list(replies)

    async def request(
        self, subject: str, body: bytes, *, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> AdminReply:
        return self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]


def send(*replies: AdminReply) -> ReplayedResponse:
    caller = Caller(PlayedGateway(*replies), Subjects())
    return asyncio.run(send_to(caller, pair(), VersionTarget(A, A), 1.0))


FULL = AdminReply(
    b'{"error":{"code":"no_replica_available","message":"full","field":""}}',
    {"Nats-Service-Error": "full", "Nats-Service-Error-Code": "503"},
)


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (AdminReply(b"7", {"Content-Type": "text/plain"}), (200, "text/plain", b"7")),
        (AdminReply(b"", {"X-Serve-Status": "204"}), (204, "", b"")),
        (AdminReply(b"no", {"Nats-Service-Error": "x", "Nats-Service-Error-Code": "418"}), (418, "", b"no")),
        (
            AdminReply(b"own", {"Nats-Service-Error": "x", "Nats-Service-Error-Code": "503"}),
            (503, "", b"own"),
        ),
    ],
)
def test_a_response_is_read_with_its_status_whatever_it_is(reply, expected):
    found = send(reply)
    assert (found.status, found.content_type, found.body) == expected


def test_a_request_that_proxies_have_no_room_for_is_sent_again_for_a_while(monkeypatch):
    monkeypatch.setattr(replay_target, "_PAUSE_S", 0.0)
    assert send(FULL, FULL, AdminReply(b"7")).body == b"7"
    with pytest.raises(TransientError, match="default/a takes no requests: full"):
        send(FULL)
