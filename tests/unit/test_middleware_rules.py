"""What the ready-made middlewares decide, without HTTP: origins, keys and rates."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_common.errors import BadField
from serve_common.runtime.settings import Environment
from serve_proxy.middlewares.api_keys import parse_keys
from serve_proxy.middlewares.cors import read_cors_rules
from serve_proxy.middlewares.rate_limit import TokenBuckets, read_rate_rules

KEY = "a-key-of-enough-characters"


def cors(origins: str, **more: str):
    return read_cors_rules(Environment({"MUSTER_CORS_ALLOW_ORIGINS": origins, **more}))


@pytest.mark.parametrize(
    ("given", "origin", "is_allowed"),
    [
        ("https://a.example", "https://a.example", True),
        ("https://A.Example/", None, False),
        ("HTTPS://A.example:443", "https://a.example", True),
        ("https://a.example", "http://a.example", False),
        ("https://a.example", "https://a.example:8443", False),
        ("https://a.example", "https://a.example.evil.com", False),
        ("https://a.example", "null", False),
        ("null", "null", True),
        ("http://[::1]:3000", "http://[::1]:3000", True),
        ("https://*.a.example", "https://x.y.a.example", True),
        ("https://*.a.example", "https://a.example", False),
        ("https://*.a.example", "https://evila.example", False),
        ("https://*.a.example", "https://evil.com/.a.example", False),
        ("https://*.a.example", "https://evil.com:1@x.a.example", False),
        ("https://*.a.example:8443", "https://x.a.example:8443", True),
        ("https://*.a.example:8443", "https://x.a.example", False),
        ("*", "https://anything", True),
    ],
)
def test_origins(given: str, origin: str | None, is_allowed: bool) -> None:
    if origin is None:
        with pytest.raises(BadField, match="is no origin"):
            cors(given)
        return
    assert cors(given).allows_origin(origin) is is_allowed
    assert bool(cors(given).answer(origin)) is is_allowed


@pytest.mark.parametrize(
    ("origins", "more", "reason"),
    [
        (",", {}, "names no origin"),
        ("*,https://a.example", {}, "not both"),
        ("https://*", {}, "hosts below a domain"),
        ("https://*.com", {}, "hosts below a domain"),
        ("https://a.*.example", {}, "hosts below a domain"),
        ("https://a.example:port", {}, "is no origin"),
        ("https://u:p@a.example", {}, "is no origin"),
        ("*", {"MUSTER_CORS_ALLOW_CREDENTIALS": "true"}, "MUSTER_CORS_ALLOW_CREDENTIALS"),
        ("https://a.example", {"MUSTER_CORS_ALLOW_CREDENTIALS": "yes"}, "neither true nor false"),
        ("https://a.example", {"MUSTER_CORS_ALLOW_METHODS": "GET,P(ST"}, "no name that HTTP allows"),
        ("https://a.example", {"MUSTER_CORS_ALLOW_HEADERS": "*,x"}, "not both"),
        ("https://a.example", {"MUSTER_CORS_MAX_AGE_S": "x"}, "MUSTER_CORS_MAX_AGE_S"),
    ],
)
def test_settings_that_would_allow_too_much_or_mean_nothing_are_refused(origins, more, reason) -> None:
    with pytest.raises(BadField, match=reason):
        cors(origins, **more)


def test_requested_headers_are_echoed_only_when_they_are_names() -> None:
    rules = cors("https://a.example")
    echoed = dict(rules.preflight("https://a.example", "put", "X-One, x-two"))
    assert echoed["Access-Control-Allow-Headers"] == "X-One, x-two"
    assert "cannot be understood" in rules.preflight("https://a.example", "PUT", "x\u00e9")
    assert "cannot be understood" in rules.preflight("https://a.example", "PUT", "x," * 200)
    any_method = cors("https://a.example", MUSTER_CORS_ALLOW_METHODS="*")
    assert (
        dict(any_method.preflight("https://a.example", "PURGE", ""))["Access-Control-Allow-Methods"]
        == "PURGE"
    )


def test_one_name_may_have_several_keys() -> None:
    keys = parse_keys(f"shop {KEY}\nshop {KEY}2\n", "f")
    assert [keys.name_of(key.encode()) for key in (KEY, KEY + "2", KEY + "3", "")] == [
        "shop",
        "shop",
        None,
        None,
    ]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "has no key"),
        ("# only a comment", "has no key"),
        (f"{KEY}", "line 1: has 1 words"),
        (f"\na b {KEY}", "line 2: has 3 words"),
        ("shop short", "has a key of 5 characters"),
        (f"sh/op {KEY}", "line 1: 'sh/op'"),
        (f"a {KEY}\nb {KEY}", "line 2: has the key that a has too"),
        (f"a {KEY}\nb sha256:{hashlib.sha256(KEY.encode()).hexdigest()}", "has the key that a has too"),
        ("a sha256:abc", "64 hexadecimal digits"),
    ],
)
def test_a_wrong_file_of_keys_is_refused_by_its_line_without_telling_a_key(text: str, reason: str) -> None:
    with pytest.raises(BadField, match=reason) as refused:
        parse_keys(text, "f")
    assert KEY not in str(refused.value)


def rate(by: str = "key", **more: str):
    return read_rate_rules(Environment({"MUSTER_RATE_LIMIT_PER_S": "1", "MUSTER_RATE_LIMIT_BY": by, **more}))


def test_what_a_request_is_counted_by() -> None:
    caller = {
        "api_key_name": "shop",
        "header_value": "t1",
        "client": "10.0.0.1",
    }
    assert rate().key(**caller) == "key shop"
    assert rate().key(**{**caller, "api_key_name": ""}) == "address 10.0.0.1"
    assert rate("header:X-Tenant").key(**caller) == "header t1"
    assert rate("header:key").key(**caller) == "header t1"
    assert rate("address").key(**caller) == "address 10.0.0.1"


def test_addresses_of_one_ipv6_network_are_one_caller() -> None:
    def counted(client: str) -> str:
        return rate().key(api_key_name="", header_value="", client=client)

    assert counted("2001:db8::1") == counted("2001:db8::ffff") != counted("2001:db8:0:1::1")
    assert counted("::ffff:10.0.0.1") == counted("10.0.0.1")
    assert counted("") == "address "


@settings(max_examples=150, deadline=None)
@given(
    rate_per_s=st.floats(0.1, 100),
    burst=st.integers(1, 20),
    gaps_s=st.lists(st.sampled_from([0.0, 0.001, 0.05, 0.5, 5.0]), min_size=1, max_size=80),
)
def test_nobody_gets_more_than_the_burst_and_the_rate_in_any_time(rate_per_s, burst, gaps_s) -> None:
    buckets = TokenBuckets(rate_per_s=rate_per_s, burst=burst, keys_max=10)
    now, taken = 0.0, []
    for gap_s in gaps_s:
        now += gap_s
        wait_s = buckets.take("a", now)
        if not wait_s:
            taken.append(now)
        else:
            again = TokenBuckets(rate_per_s=rate_per_s, burst=burst, keys_max=10)
            again._buckets = buckets._buckets.copy()
            assert again.take("a", now + wait_s * 0.9)
            again._buckets = buckets._buckets.copy()
            assert not again.take("a", now + wait_s * 1.001 + 1e-9)
    for i, begin in enumerate(taken):
        for j in range(i, len(taken)):
            assert j - i + 1 <= burst + rate_per_s * (taken[j] - begin) + 1e-6


def test_callers_are_forgotten_when_there_are_too_many_the_longest_quiet_first() -> None:
    buckets = TokenBuckets(rate_per_s=0.001, burst=1, keys_max=2)
    for key in ("a", "b", "a", "c"):
        buckets.take(key, 0.0)
    assert len(buckets) == 2
    assert buckets.take("a", 0.0)
    assert not buckets.take("b", 0.0)
