"""Names, tags, subjects and keys: whatever is accepted parses back to what it was."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from serve_common.errors import BadField
from serve_common.names import (
    NAME_LENGTH_MAX,
    BackendTag,
    EndpointTag,
    HostId,
    ProxyId,
    check_name,
    check_route,
    deployment_tag,
    parse_backend_tag,
    parse_ordinal,
    replica_tag,
)
from serve_common.protocol.subjects import BACKENDS, ENDPOINTS, Subjects, backend_key, endpoint_key, parse_key

parts = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}", fullmatch=True)
tags = st.tuples(parts, parts).map("/".join)
ordinals = st.integers(1, 2**53)
anything = st.text(max_size=80) | st.text(alphabet="ab/.-_#*> \0\n", max_size=12)


@given(tags, ordinals)
def test_a_replicas_tag_parses_back(tag, ordinal):
    made = replica_tag(BackendTag(tag), ordinal)
    assert (parse_backend_tag(made), parse_ordinal(made)) == (tag, ordinal)


@given(tags)
def test_a_key_parses_back(tag):
    assert parse_key(endpoint_key(EndpointTag(tag))) == (ENDPOINTS, tag)
    assert parse_key(backend_key(BackendTag(tag))) == (BACKENDS, tag)


@given(parts, tags, ordinals)
def test_a_subject_is_one_that_nats_takes_and_a_call_parses_back(prefix, tag, ordinal):
    subjects = Subjects(prefix)
    made = [
        subjects.call(EndpointTag(tag)),
        subjects.replica(replica_tag(BackendTag(tag), ordinal)),
        subjects.host_goal(HostId(tag.partition("/")[0])),
        subjects.host_report(HostId(tag.partition("/")[0])),
        subjects.proxy_report(ProxyId(tag.partition("/")[0])),
        subjects.admin("deploy"),
    ]
    for subject in made:
        tokens = subject.split(".")
        assert all(token and token.isascii() and not set(token) & set(" *>\r\n\t") for token in tokens)
        assert len(tokens) <= 16
        assert len(subject) < 256
    assert subjects.parse_call_endpoint(made[0]) == tag


@given(tags, tags, ordinals, ordinals)
def test_different_things_have_different_subjects_and_keys(one, other, first, second):
    subjects = Subjects()
    ones, others = replica_tag(BackendTag(one), first), replica_tag(BackendTag(other), second)
    assert (subjects.replica(ones) == subjects.replica(others)) == (ones == others)
    assert (endpoint_key(EndpointTag(one)) == endpoint_key(EndpointTag(other))) == (one == other)
    assert backend_key(BackendTag(one)) != endpoint_key(EndpointTag(other))


@given(anything)
def test_any_text_is_a_name_or_is_refused_with_the_field(text):
    letters = set(text.replace("-", "").replace("_", ""))
    is_name = (
        0 < len(text) <= NAME_LENGTH_MAX
        and text[0] not in "-_"
        and all(letter.isascii() and letter.isalnum() for letter in letters)
    )
    try:
        assert check_name(text, "f") == text
        assert is_name
    except BadField:
        assert not is_name


@given(anything)
def test_any_text_is_a_deployment_in_normal_form_or_is_refused(text):
    try:
        tag = deployment_tag(text)
    except BadField:
        return
    assert deployment_tag(tag) == tag
    assert tag.count("/") == 1


@given(anything.map("/".__add__) | anything)
def test_any_text_is_a_route_in_normal_form_or_is_refused(text):
    try:
        route = check_route(text, "f")
    except BadField:
        return
    assert check_route(route, "f") == route
    assert route == "/" or not route.endswith("/")
    assert ".." not in route.split("/")
