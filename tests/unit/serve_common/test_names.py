"""What a name may look like."""

from __future__ import annotations

import pytest

from serve_common.errors import BadField
from serve_common.names import (
    NAME_LENGTH_MAX,
    ROUTE_LENGTH_MAX,
    BackendTag,
    check_name,
    check_route,
    deployment_tag,
    parse_backend_tag,
    parse_ordinal,
    replica_tag,
)

BAD_PARTS = [
    "",
    " ",
    "-a",
    "_a",
    "a b",
    "a.b",
    "a*",
    ">",
    "a/b",
    "a#1",
    "a\n",
    "a\0",
    "ä",
    "a" * 64,
    "..",
    "\uff11",
]


@pytest.mark.parametrize("name", ["a", "A-b_c", "0", "9lives", "a" * NAME_LENGTH_MAX])
def test_letters_digits_hyphen_and_underscore_make_a_name(name: str) -> None:
    assert check_name(name, "name") == name


@pytest.mark.parametrize("name", BAD_PARTS)
def test_anything_else_is_refused_with_the_field(name: str) -> None:
    with pytest.raises(BadField) as refused:
        check_name(name, "the_field")
    assert refused.value.field == "the_field"


def test_a_bare_name_belongs_to_the_default_application() -> None:
    assert deployment_tag("digits") == "default/digits"
    assert deployment_tag("shop/digits") == "shop/digits"


@pytest.mark.parametrize(
    "name", ["", "/", "a/", "/a", "a//b", "a/b/c", "../..", "a/..", "x" * 10_000, "a/\0"]
)
def test_a_name_of_other_parts_is_no_deployment(name: str) -> None:
    with pytest.raises(BadField) as refused:
        deployment_tag(name)
    assert refused.value.field == "name"
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize(
    ("route", "normal"), [("/", "/"), ("/a", "/a"), ("/a/", "/a"), ("/a.b/c~d-e_f", "/a.b/c~d-e_f")]
)
def test_a_route_has_one_normal_form(route: str, normal: str) -> None:
    assert check_route(route, "route_prefix") == normal
    assert check_route(normal, "route_prefix") == normal


BAD_ROUTES = ["", "a", "//", "/a//b", "/..", "/a/..", "/../a", "/.", "/a/./b", "/-", "/-/", "/-/x"]
BAD_ROUTES += ["/a b", "/a?b", "/a%2f", "/\0", "/ä", "/a\n", "/" + "a" * ROUTE_LENGTH_MAX, "/{x}"]


@pytest.mark.parametrize("route", BAD_ROUTES)
def test_what_no_path_can_be_is_no_route(route: str) -> None:
    with pytest.raises(BadField) as refused:
        check_route(route, "route_prefix")
    assert refused.value.field == "route_prefix"


def test_a_replicas_tag_tells_its_backend_and_number() -> None:
    tag = replica_tag(BackendTag("default/a"), 12)
    assert tag == "default/a#12"
    assert (parse_backend_tag(tag), parse_ordinal(tag)) == ("default/a", 12)
