"""`muster capture show` and `muster replay`: what they print, and their exit codes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from muster.client.requests import AdminReply
from serve_common.api.views import EndpointView
from serve_common.errors import BusAuthorizationFailed
from serve_common.protocol.captures import BodyState, CapturedMessage, CapturedPair


def endpoint(name: str, **traffic: float) -> EndpointView:
    shares = {f"default/{tag}": weight for tag, weight in traffic.items()}
    return EndpointView(endpoint_tag=f"default/{name}", route=None, methods=["GET"], traffic=shares)


def pair(number: int, method: str = "GET", sent: bytes = b"", **response: Any) -> CapturedPair:
    return CapturedPair(
        at=1_700_000_000.0,
        request_id=f"r{number}",
        endpoint_tag="default/digits",
        backend_tag="default/digits",
        method=method,
        path="/p",
        query="n=1",
        request=CapturedMessage(body=sent, body_bytes=len(sent)),
        status=200,
        response=CapturedMessage(**response),
        duration_ms=1.25,
    )


@pytest.fixture(autouse=True)
def _deployed(controller) -> None:
    controller.answers["get_all_endpoints"] = [endpoint("digits", digits=1), endpoint("v2", v2=1)]
    controller.captured = [pair(number) for number in range(30)]


def words(output: str) -> list[str]:
    return [" ".join(line.split()) for line in output.splitlines()]


def test_captured_requests_are_shown(muster, controller) -> None:
    controller.captured = [
        pair(1, "POST", b'{"a": 1}', body=b"\xff\xfe"),
        pair(2, body_bytes=70_000, state=BodyState.TOO_LARGE),
    ]
    shown = words(muster("capture", "show", "digits").output)
    assert '2023-11-14 22:13:20Z POST /p?n=1 {"a": 1} 200 2 bytes 1.2' in shown
    assert "2023-11-14 22:13:20Z GET /p?n=1 200 70000 bytes, too_large 1.2" in shown
    assert len(json.loads(muster("capture", "show", "digits", "--json", "--limit", "1").output)) == 1


def test_a_version_without_a_difference_is_exit_code_0(muster, controller) -> None:
    done = muster("replay", "digits", "--against", "v2", "--limit", "20")
    assert done.exit_code == 0, done.output
    assert "20 requests compared: no difference but noise" in done.output
    assert {subject for subject, _, _ in controller.called} == {"default.digits", "default.v2"}
    assert len(controller.called) == 60
    assert controller.called[0][2] == {
        "X-Serve-Replay": "1", "X-Serve-Method": "GET", "X-Serve-Path": "/p", "X-Serve-Query": "n=1",
    }  # fmt: skip


def test_a_version_with_a_difference_is_exit_code_1_and_says_where(muster, controller) -> None:
    controller.response = AdminReply(b'{"digit": 7}')
    controller.responses["default.v2"] = AdminReply(b'{"digit": 8}')
    done = muster("replay", "digits", "--against", "v2")
    assert done.exit_code == 1
    assert any(
        line.startswith("$.digit value different 30 of 30 0 of 30 7 8 r") for line in words(done.output)
    )
    assert "30 requests compared: the new version differs at $.digit" in done.output
    report = json.loads(muster("replay", "digits", "--against", "v2", "--json").stdout)
    assert (report["old"], report["new"]) == ("default/digits", "default/v2")
    assert report["result"]["paths"][0]["status"] == "different"
    assert muster("replay", "digits", "--against", "v2", "--ignore", "$.digit").exit_code == 0


def test_requests_that_change_something_are_skipped_unless_all_are_wanted(muster, controller) -> None:
    controller.captured = [*controller.captured[:2], pair(9, "POST")]
    assert "2 requests compared, 1 skipped" in muster("replay", "digits", "--against", "v2").output
    assert "3 requests compared:" in muster("replay", "digits", "--against", "v2", "--unsafe").output
    controller.captured = [pair(9, "POST")]
    done = muster("replay", "digits", "--against", "v2")
    assert done.exit_code == 4
    assert "--unsafe" in done.output


@pytest.mark.parametrize(
    ("arguments", "exit_code", "text"),
    [
        (["replay", "digits", "--against", "digits"], 2, "is the old version itself"),
        (["replay", "digits", "--against", "v3"], 2, "muster endpoint create v3-replay v3"),
        (["replay", "nothing", "--against", "v2"], 4, "there is no endpoint 'nothing'"),
        (["replay", "digits", "--against", "v2", "--ignore", "x"], 2, "is no path"),
        (["replay", "digits", "--against", "v2", "--tolerance", "2"], 2, "must be between 0 and 1"),
        (["capture", "set", "digits", "0%"], 2, "above 0 and at most 100%"),
        (["capture", "set", "digits", "many"], 2, "must read N% or a number"),
        (["capture", "set", "digits", "1%", "--redact", "$.user"], 2, "needs bodies"),
        (["capture", "set", "digits", "1%", "--bodies", "--redact", "user"], 2, "is no path"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_sent(
    muster, controller, arguments: list[str], exit_code: int, text: str
) -> None:
    done = muster(*arguments)
    assert done.exit_code == exit_code
    assert text in " ".join(done.output.split())
    assert not controller.called


def test_nothing_captured_says_how_to_start(muster, controller) -> None:
    controller.captured = []
    done = muster("replay", "digits", "--against", "v2")
    assert done.exit_code == 4
    assert "muster capture set digits 1% --bodies" in done.output


def test_who_may_not_read_captures_learns_it(muster, controller) -> None:
    async def read(_limit: int) -> list[CapturedPair]:
        raise BusAuthorizationFailed("NATS does not allow the user 'viewer' to do this")

    controller.read = read
    done = muster("capture", "show", "digits")
    assert done.exit_code == 3
    assert "does not allow" in done.output
