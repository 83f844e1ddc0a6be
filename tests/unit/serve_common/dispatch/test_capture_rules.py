"""What a capture rule leaves of headers, queries and bodies."""

from __future__ import annotations

import pytest

from serve_common.config.capture import CAPTURED_BODY_BYTES_MAX, CaptureConfig
from serve_common.dispatch.capture_rules import CaptureRule
from serve_common.protocol.captures import BodyState


def rule(**fields: object) -> CaptureRule:
    return CaptureRule(CaptureConfig(share=0.5, **fields))  # type: ignore[arg-type] - what a test gives


@pytest.mark.parametrize(
    "name",
    [
        "Authorization", "cookie", "SET-COOKIE", "Proxy-Authorization", "X-Api-Key", "x-goog-api-key", "apikey",
        "X-Auth-Token", "X-Access-Token", "X_Session_Id", "X-Client-Secret", "x-amz-security-token", "x-own",
    ],
)  # fmt: skip
def test_headers_with_secrets_are_always_redacted(name: str) -> None:
    message = rule(redact_headers=["X-Own"]).message([(name.encode(), b"s3cret"), (b"Accept", b"a")], None, 0)
    assert message.headers == [(name.lower(), "redacted"), ("accept", "a")]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("", ""),
        ("n=1&api_key=s&b", "n=1&api_key=redacted&b"),
        ("access_token=s&own=s&Password=s", "access_token=redacted&own=redacted&Password=redacted"),
        ("a%70i_key=s&X-Amz-Signature=s&sig=s", "a%70i_key=redacted&X-Amz-Signature=redacted&sig=redacted"),
        ("key=a=b&token", "key=redacted&token"),
    ],
)
def test_query_parameters_with_secrets_are_always_redacted(query: str, expected: str) -> None:
    assert rule(redact_query=["Own"]).query(query) == expected


def test_the_size_of_a_body_is_captured_in_any_case() -> None:
    off, on = rule(), rule(bodies=True)
    large = b"x" * (CAPTURED_BODY_BYTES_MAX + 1)
    assert [off.keeps(b"x"), on.keeps(b"x"), on.keeps(large)] == [False, True, False]
    states = [
        off.message([], None, 7), on.message([], None, 7), on.message([], b"x", 1),
        on.message([], b"", 0), on.message([], b"x", 1, is_streamed=True),
    ]  # fmt: skip
    assert [(one.state, one.body, one.body_bytes) for one in states] == [
        (BodyState.OFF, b"", 7), (BodyState.TOO_LARGE, b"", 7), (BodyState.CAPTURED, b"x", 1),
        (BodyState.CAPTURED, b"", 0), (BodyState.STREAMED, b"", 0),
    ]  # fmt: skip


def test_a_path_that_a_newer_version_may_know_leaves_bodies_out() -> None:
    unknown = rule(bodies=True, redact=["$[?(@.x)]"])
    assert not unknown.has_bodies
    assert unknown.message([], b'{"x": "s3cret"}', 15).body == b""


def test_many_and_long_headers_are_cut() -> None:
    message = rule().message([(b"a", b"x" * 5_000)] * 300, None, 0)
    assert len(message.headers) == 100
    assert len(message.headers[0][1]) == 4_096
