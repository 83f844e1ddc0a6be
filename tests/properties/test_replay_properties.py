"""Comparisons of JSON of any shape."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from serve_common.json_paths import parse_json_path, redact_json
from serve_common.replay.comparison import Comparison, PathStatus
from serve_common.replay.differences import DifferenceKind, ReplayedResponse, ResponseComparator, format_place

LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)
BODIES = VALUES.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=40)
RESPONSES = st.builds(
    lambda status, content_type, body: ReplayedResponse(status=status, content_type=content_type, body=body),
    st.sampled_from([200, 404, 500]),
    st.sampled_from(["application/json", "text/plain", ""]),
    BODIES,
)
MIRRORED = {DifferenceKind.MISSING: DifferenceKind.ADDED, DifferenceKind.ADDED: DifferenceKind.MISSING}


@given(RESPONSES)
def test_a_response_does_not_differ_from_itself(response: ReplayedResponse) -> None:
    assert ResponseComparator().compare(response, response) == {}


@given(RESPONSES, RESPONSES)
def test_differences_are_the_same_from_either_side(one: ReplayedResponse, other: ReplayedResponse) -> None:
    comparator = ResponseComparator(1e-6)
    forth, back = comparator.compare(one, other), comparator.compare(other, one)
    assert {(key.path, MIRRORED.get(key.kind, key.kind)) for key in forth} == {(k.path, k.kind) for k in back}


@given(VALUES, VALUES)
def test_values_without_a_difference_are_equal_json(one: Any, other: Any) -> None:
    bodies = [ReplayedResponse(status=200, body=json.dumps(value).encode()) for value in (one, other)]
    if not ResponseComparator().compare(*bodies):
        assert _plain(one) == _plain(other)


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, float) and value != value:
        return "NaN"
    return (type(value) is bool, value)


@given(VALUES, st.lists(st.text() | st.none(), max_size=3))
def test_every_place_is_a_path_that_ignores_it(value: Any, names: list[str | None]) -> None:
    place = tuple(names)
    text = format_place(place)
    if '"' not in text:  # a name in quotes may have escapes, which paths of users need not
        wrapped: Any = value
        for name in reversed(place):
            wrapped = [wrapped] if name is None else {name: wrapped}
        body = ReplayedResponse(status=200, body=json.dumps(wrapped).encode())
        other = ReplayedResponse(status=200, body=json.dumps(_deep_replace(wrapped, len(place))).encode())
        assert not ResponseComparator(ignored=[text]).compare(body, other)


def _deep_replace(value: Any, depth: int) -> Any:
    if not depth:
        return {"something": "else"}
    if isinstance(value, list):
        return [_deep_replace(value[0], depth - 1)]
    return {key: _deep_replace(inner, depth - 1) for key, inner in value.items()}


@given(st.lists(st.tuples(RESPONSES, RESPONSES, RESPONSES), max_size=12))
def test_what_the_old_version_does_too_is_never_a_difference_and_counts_add_up(
    triples: list[tuple[ReplayedResponse, ReplayedResponse, ReplayedResponse]],
) -> None:
    comparison = Comparison(ResponseComparator())
    for number, (old, again, new) in enumerate(triples):
        comparison.add(str(number), old, again, new)
        comparison.add(
            str(number), old, new, again
        )  # the mirrored comparison: the counts of both must be equal
    result = comparison.result()
    assert result.requests == 2 * len(triples)
    assert all(one.differing == one.noisy for one in result.paths)
    assert all(one.status is PathStatus.NOISE for one in result.paths)


@given(VALUES, st.text(alphabet="abc", min_size=1, max_size=3))
def test_a_redacted_text_is_nowhere_in_the_body(value: Any, name: str) -> None:
    secret = "s3cret-value"
    body = json.dumps({"outer": [{name: secret}, value], name: [secret]}).encode()
    redacted = redact_json(body, [parse_json_path(f"$..{name}")])
    assert redacted is not None
    assert secret.encode() not in redacted
