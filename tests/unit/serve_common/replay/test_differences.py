"""Differences of two responses: by path and kind, with tolerance, and without what is ignored."""

from __future__ import annotations

import pytest

from serve_common.errors import BadField
from serve_common.replay.differences import (
    Example,
    ReplayedResponse,
    ResponseComparator,
    build_example,
    format_place,
)


def response(
    body: str | bytes = b"", status: int = 200, content_type: str = "application/json"
) -> ReplayedResponse:
    raw = body.encode() if isinstance(body, str) else body
    return ReplayedResponse(status=status, content_type=content_type, body=raw)


def differences(old: str, new: str, *, tolerance: float = 0.0, ignored: tuple[str, ...] = ()) -> set[str]:
    found = ResponseComparator(tolerance, ignored).compare(response(old), response(new))
    return {f"{key.path} {key.kind.value}" for key in found}


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ('{"a": 1}', '{"a":1}', set()),
        ('{"a": 1}', '{"a": 2}', {"$.a value"}),
        ('{"a": 1}', '{"a": 1.0}', set()),
        ('{"a": 1}', '{"a": "1"}', {"$.a type"}),
        ('{"a": 1}', '{"a": true}', {"$.a type"}),
        ('{"a": null}', '{"a": false}', {"$.a type"}),
        ('{"a": 1}', '{"b": 1}', {"$.a missing", "$.b added"}),
        ("[1, 2]", "[1, 3]", {"$[*] value"}),
        ("[1, 2]", "[1]", {"$ length"}),
        ('{"i": [{"n": 1}, {"n": 2}]}', '{"i": [{"n": 0}, {"n": 0}]}', {"$.i[*].n value"}),
        ('{"a": NaN}', '{"a": NaN}', set()),
        ('{"a": NaN}', '{"a": 1}', {"$.a value"}),
        ('{"a": Infinity}', '{"a": -Infinity}', {"$.a value"}),
        ('{"a b": 1, "$": 1}', '{"a b": 2, "$": 2}', {'$["a b"] value', '$["$"] value'}),
        ("1" + "0" * 400, "2" + "0" * 400, {"$ value"}),
        ("{}", "{", {"body type"}),
        ("no", "yes", {"body value"}),
        ("", "{}", {"body type"}),
        ("[" * 100_000, "[" * 99_999, {"body value"}),
        ('"\\ud800"', '"\\ud801"', {"$ value"}),
    ],
)
def test_differences_have_a_path_and_a_kind(old, new, expected):
    assert differences(old, new) == expected


def test_status_and_content_type_are_compared_too():
    old, new = response("{}", 200), response("{}", 201, "Text/Plain; charset=utf-8")
    found = ResponseComparator().compare(old, new)
    assert {key.path: build_example(values) for key, values in found.items()} == {
        "status": Example("200", "201"),
        "content-type": Example('"application/json"', '"text/plain"'),
    }
    assert not ResponseComparator(ignored=["status", "content-type"]).compare(old, new)


def test_parameters_of_a_content_type_do_not_count():
    old, new = response(content_type="a/b; charset=utf-8"), response(content_type="A/B")
    assert not ResponseComparator().compare(old, new)


@pytest.mark.parametrize(
    ("tolerance", "old", "new", "is_equal"),
    [
        (1e-6, "0.30000000000000004", "0.3", True),
        (1e-6, "1000000.5", "1000000.4", True),
        (1e-6, "1.1", "1.2", False),
        (0.2, "1.1", "1.2", True),
        (1e-6, "0.0", "1e-9", True),
        (1e-6, "10000001", "10000002", False),
        (1e-6, "10000001", "10000002.0", True),
    ],
)
def test_numbers_are_equal_within_the_tolerance(tolerance, old, new, is_equal):
    assert (differences(old, new, tolerance=tolerance) == set()) is is_equal


@pytest.mark.parametrize(
    ("ignored", "left"),
    [
        (("$.meta",), {"$.items[*].id value"}),
        (("$.items[*].id",), {"$.meta.at value", "$.meta.host missing"}),
        (("$..id", "$.meta.at"), {"$.meta.host missing"}),
        (("$.items[0].id", "$.meta.*"), set()),
        (("$",), set()),
        (("body",), set()),
    ],
)
def test_what_is_ignored_is_left_out_with_all_below_it(ignored, left):
    old = '{"meta": {"at": 1, "host": "a"}, "items": [{"id": 1}]}'
    new = '{"meta": {"at": 2}, "items": [{"id": 2}]}'
    assert differences(old, new, ignored=ignored) == left


def test_an_unknown_part_or_path_cannot_be_ignored():
    with pytest.raises(BadField, match="or one of status, content-type, body"):
        ResponseComparator(ignored=["header"])


def test_members_that_are_data_count_as_one_difference():
    old = "{" + ",".join(f'"{n}": 1' for n in range(40)) + "}"
    assert differences(old, "{}") == {"$ members"}


def test_examples_are_short():
    found = ResponseComparator().compare(response('"' + "x" * 999 + '"'), response(b"\xff" * 999))
    [example] = [build_example(values) for values in found.values()]
    assert len(example.old) <= 200
    assert example.new.startswith("999 bytes: ")


def test_a_place_reads_as_a_json_path():
    assert format_place(("a", None, "b c", 3)) == '$.a[*]["b c"][3]'
