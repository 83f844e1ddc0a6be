"""Longest prefix on whole segments, and the split of traffic."""

from __future__ import annotations

import time

import pytest

from serve_common.names import BackendTag, EndpointTag
from serve_common.protocol.snapshots import EndpointSnapshot
from serve_common.routing.replica_choice import PowerOfTwoChoices, RandomChoice, RoundRobin
from serve_common.routing.route_table import RouteTable, TrafficSplit

A, B, C = BackendTag("d/a"), BackendTag("d/b"), BackendTag("d/c")


def endpoint(tag: str, route: str | None) -> EndpointSnapshot:
    return EndpointSnapshot(endpoint_tag=EndpointTag(tag), route=route, methods=["GET"], traffic={A: 1.0})


@pytest.mark.parametrize(
    ("path", "tag"),
    [
        ("/digits", "digits"),
        ("/digits/", "digits"),
        ("/digits/x/y", "digits"),
        ("/digits/v2", "v2"),
        ("/digits/v2/x", "v2"),
        ("/digits/v20", "digits"),
        ("/digitsx", "root"),
        ("/", "root"),
        ("//", "root"),
        ("/digits//v2", "digits"),
        ("", None),
        ("*", None),
    ],
)
def test_the_longest_prefix_of_whole_segments_wins(path: str, tag: str | None) -> None:
    table = RouteTable([endpoint("root", "/"), endpoint("digits", "/digits"), endpoint("v2", "/digits/v2")])
    found = table.match(path)
    assert (found and found.endpoint_tag) == tag


def test_without_a_root_route_what_matches_nothing_has_no_endpoint() -> None:
    table = RouteTable([endpoint("digits", "/digits"), endpoint("headless", None)])
    assert table.match("/digitsx") is None
    assert table.match("/") is None
    assert table.routes() == {"/digits": "digits"}
    assert RouteTable().match("/x") is None


def test_of_two_endpoints_with_one_route_the_later_one_wins() -> None:
    found = RouteTable([endpoint("old", "/x"), endpoint("new", "/x")]).match("/x")
    assert found is not None
    assert found.endpoint_tag == "new"


def test_a_path_of_thousands_of_slashes_is_matched_quickly() -> None:
    table = RouteTable([endpoint("digits", "/digits/" + "a/" * 200 + "b")])
    began = time.process_time()
    for _ in range(100):
        assert table.match("/" * 8000) is None
    assert time.process_time() - began < 1


def test_weights_decide_by_the_random_number() -> None:
    split = TrafficSplit({A: 0.25, B: 0.0, C: 0.75})
    assert [split.choose(chance) for chance in (0.0, 0.2499, 0.25, 0.9999999999999999)] == [A, A, C, C]
    assert split.backend_tags == (A, C)


def test_weights_that_do_not_sum_to_one_still_share_everything() -> None:
    split = TrafficSplit({A: 0.1, B: 0.1, C: 0.1})
    chosen = [split.choose(i / 3000) for i in range(3000)]
    assert [chosen.count(tag) for tag in (A, B, C)] == pytest.approx([1000] * 3, abs=2)


def test_no_weight_is_no_backend() -> None:
    assert TrafficSplit({}).choose(0.5) is None
    assert TrafficSplit({A: 0.0}).choose(0.5) is None
    assert TrafficSplit({A: 0.0, B: 1.0}).choose(0.0) == B


class Replica:
    def __init__(self, name: str, in_flight: int, turn: int) -> None:
        self.name, self.requests, self.turn = name, range(in_flight), turn


def test_power_of_two_takes_the_less_loaded_of_two_different_replicas() -> None:
    light, heavy, middle = Replica("light", 1, 0), Replica("heavy", 9, 0), Replica("middle", 5, 0)
    draws = iter([0.4, 0.9, 0.0, 0.0])  # heavy and middle; light and heavy
    policy = PowerOfTwoChoices()
    assert policy.choose([light, heavy, middle], lambda: next(draws)) is middle
    assert policy.choose([light, heavy, middle], lambda: next(draws)) is light
    assert policy.choose([heavy], lambda: 0.5) is heavy


def test_round_robin_takes_who_waited_longest_and_random_takes_by_the_number() -> None:
    replicas = [Replica("a", 0, 3), Replica("b", 7, 1), Replica("c", 0, 2)]
    assert RoundRobin().choose(replicas, lambda: 0.0).name == "b"
    assert RandomChoice().choose(replicas, lambda: 0.99).name == "c"
