"""JSON paths: what is understood, and what is redacted by them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from serve_common.errors import BadField
from serve_common.json_paths import parse_json_path, parse_json_paths, redact_json


def redacted(value: Any, *paths: str) -> Any:
    body = redact_json(json.dumps(value).encode(), parse_json_paths(paths, "redact"))
    assert body is not None
    return json.loads(body)


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("$.user", {"user": "ann", "n": 1}, {"user": "redacted", "n": 1}),
        ("$.a.b", {"a": {"b": "x", "c": "y"}, "b": "z"}, {"a": {"b": "redacted", "c": "y"}, "b": "z"}),
        ("$.items[*].name", {"items": [{"name": "a"}, {"name": "b"}]}, {"items": [{"name": "redacted"}] * 2}),
        ("$.items[1]", {"items": ["a", "b", "c"]}, {"items": ["a", "redacted", "c"]}),
        ("$[*]", ["a", 1, 2.5, True, None, {"x": 1}, [1]], ["redacted", 0, 0.0, False, None, {}, []]),
        ("$['a b'][\"c\"]", {"a b": {"c": "x"}}, {"a b": {"c": "redacted"}}),
        ("$.*", {"a": "x", "b": "y"}, {"a": "redacted", "b": "redacted"}),
        ("$..m", {"m": "a", "x": [{"m": "b", "n": "c"}]}, {"m": "redacted", "x": [{"m": "redacted", "n": "c"}]}),
        ("$..x.y", {"x": {"x": {"y": "a"}, "y": "b"}}, {"x": {"x": {"y": "redacted"}, "y": "redacted"}}),
        ("$", {"a": 1}, {}),
        ("$.a[0]", {"a": {"0": "kept"}}, {"a": {"0": "kept"}}),
        ("$['0']", ["kept"], ["kept"]),
        ("$.none.there", {"a": 1}, {"a": 1}),
    ],
)  # fmt: skip
def test_the_values_at_a_path_are_redacted_and_keep_their_type(path, value, expected):
    assert redacted(value, path) == expected


@pytest.mark.parametrize(
    "path",
    [
        "",
        "user",
        "$user",
        "$.",
        "$.a.",
        "$[",
        "$[x]",
        "$.a b",
        "$...a",
        "$.a[-1]",
        "$.a[?(@.b)]",
        "$" + ".a" * 200,
    ],
)
def test_a_path_that_is_not_understood_is_refused(path):
    with pytest.raises(BadField, match="redact"):
        parse_json_path(path, "redact")


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"a=1&b=2", b"[" * 100_000, b"1" * 5_000])
def test_a_body_in_which_nothing_can_be_found_is_none(body):
    assert redact_json(body, [parse_json_path("$.a")]) is None


def test_only_the_last_of_two_members_of_one_name_is_left():
    assert (
        redact_json(b'{"user": "ann", "user": "bob"}', [parse_json_path("$.user")]) == b'{"user":"redacted"}'
    )


def test_too_many_paths_are_refused():
    with pytest.raises(BadField, match="at most 64"):
        parse_json_paths(["$.a"] * 65, "redact")
