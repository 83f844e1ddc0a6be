"""Longest prefix on whole segments, and the split of traffic."""

from __future__ import annotations

import time

import msgspec
import pytest

from serve_common.config.backend import EndpointOptions, ErrorFormat, HttpOptions
from serve_common.names import BackendTag, EndpointTag
from serve_common.protocol.snapshots import BackendSnapshot, EndpointSnapshot, HttpSnapshot, Snapshot
from serve_common.protocol.subjects import HTTP_KEY
from serve_common.routing.replica_choice import PowerOfTwoChoices, RandomChoice, RoundRobin
from serve_common.routing.route_table import RouteTable, SnapshotTable, TrafficSplit

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


@pytest.mark.parametrize(
    ("formats", "expected"),
    [("", "problem"), ("t", "text"), ("tt", "text"), ("tp", "problem"), ("p", "problem")],
)
def test_a_path_without_a_route_gets_the_errors_that_all_routes_have(formats: str, expected: str) -> None:
    table = RouteTable(
        msgspec.structs.replace(
            endpoint(f"d/{number}", f"/{number}"),
            options=EndpointOptions(error_format=ErrorFormat.TEXT if name == "t" else ErrorFormat.PROBLEM),
        )
        for number, name in enumerate(formats)
    )
    assert table.error_format.value == expected


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


# The newest snapshot of each key is held, and nothing late brings back what is gone.


ENDPOINT, BACKEND = EndpointTag("d/a"), BackendTag("d/a")
EKEY, BKEY = "endpoints.d.a", "backends.d.a"


def endpoint_snapshot(snapshot_id: int, route: str = "/a", tag: str = ENDPOINT) -> Snapshot:
    content = EndpointSnapshot(
        endpoint_tag=EndpointTag(tag), route=route, methods=["GET"], traffic={BACKEND: 1.0}
    )
    return Snapshot(snapshot_id=snapshot_id, epoch=1, content=content)


def backend(snapshot_id: int) -> Snapshot:
    content = BackendSnapshot(
        backend_tag=BACKEND, replicas=[], draining=[], max_concurrent_queries=1, max_queued_requests=1
    )
    return Snapshot(snapshot_id=snapshot_id, epoch=1, content=content)


def gone(snapshot_id: int) -> Snapshot:
    return Snapshot(snapshot_id=snapshot_id, epoch=1, content=None)


def http(snapshot_id: int, timeout_s: float = 1.0) -> Snapshot:
    return Snapshot(
        snapshot_id=snapshot_id,
        epoch=1,
        content=HttpSnapshot(options=HttpOptions(request_timeout_s=timeout_s)),
    )


def confirm_all(table: SnapshotTable) -> None:
    for key in (EKEY, BKEY, HTTP_KEY):
        table.confirm(key)


def test_nothing_counts_as_applied_before_the_bucket_was_read() -> None:
    table = SnapshotTable()
    table.update({EKEY: endpoint_snapshot(5)}, whole=False)
    assert (table.is_filled, table.applied_snapshot_id) == (False, 0)
    table.update({EKEY: endpoint_snapshot(5)}, whole=True)
    table.confirm(EKEY)
    assert (table.is_filled, table.applied_snapshot_id) == (True, 5)
    table.update({BKEY: backend(9)}, whole=False)
    table.confirm(BKEY)
    assert table.applied_snapshot_id == 9


def test_an_empty_bucket_is_read_too() -> None:
    table = SnapshotTable()
    table.update({}, whole=True)
    assert (table.is_filled, table.applied_snapshot_id) == (True, 0)


def test_a_late_value_neither_replaces_a_newer_one_nor_revives_what_is_gone() -> None:
    table = SnapshotTable()
    table.update({EKEY: endpoint_snapshot(5, "/new")}, whole=True)
    assert not table.update({EKEY: endpoint_snapshot(4, "/old")}, whole=False).endpoints
    assert table.endpoints()[ENDPOINT].route == "/new"
    assert table.update({EKEY: gone(6)}, whole=False).endpoints == {ENDPOINT: None}
    assert not table.update({EKEY: endpoint_snapshot(5, "/new")}, whole=True).endpoints
    assert table.endpoints() == {}
    assert table.is_gone(EKEY)
    table.confirm(EKEY)
    assert table.applied_snapshot_id == 6


def test_the_same_value_again_changes_nothing() -> None:
    table = SnapshotTable()
    table.update({EKEY: endpoint_snapshot(5), BKEY: backend(6)}, whole=True)
    confirm_all(table)
    changes = table.update({EKEY: endpoint_snapshot(5), BKEY: backend(6)}, whole=True)
    assert not changes.endpoints
    assert not changes.backends


def test_a_lost_bucket_takes_nothing_away_but_a_deleted_key_does() -> None:
    table = SnapshotTable()
    table.update({EKEY: endpoint_snapshot(5), BKEY: backend(6)}, whole=True)
    confirm_all(table)
    changes = table.update({BKEY: backend(6)}, whole=True)
    assert not changes.endpoints
    assert not changes.backends
    assert table.is_there(EKEY)
    assert table.update({EKEY: None, BKEY: backend(6)}, whole=True).endpoints == {ENDPOINT: None}
    assert table.update({BKEY: None}, whole=False).backends == {BACKEND: None}
    assert not table.is_there(BKEY)


def test_keys_and_values_that_do_not_belong_together_are_left_out_and_named() -> None:
    table = SnapshotTable()
    changes = table.update(
        {
            EKEY: backend(1),
            "endpoints.d.b": endpoint_snapshot(2),
            "foreign": endpoint_snapshot(3),
            BKEY: backend(4),
        },
        whole=True,
    )
    assert [key for key, _ in changes.ignored] == [EKEY, "endpoints.d.b", "foreign"]
    assert list(changes.backends) == [BACKEND]
    assert table.endpoints() == {}


def test_endpoints_come_in_the_order_of_their_changes() -> None:
    table = SnapshotTable()
    table.update({EKEY: endpoint_snapshot(7), "endpoints.d.b": endpoint_snapshot(3, tag="d/b")}, whole=True)
    assert list(table.endpoints()) == ["d/b", "d/a"]


def test_applied_is_only_what_was_confirmed() -> None:
    table = SnapshotTable()
    table.update({EKEY: endpoint_snapshot(5), BKEY: backend(6)}, whole=True)
    assert table.applied_snapshot_id == 4
    table.confirm(BKEY)
    assert table.applied_snapshot_id == 4
    table.confirm(EKEY)
    assert table.applied_snapshot_id == 6


def test_what_was_never_confirmed_is_handed_out_again_but_nothing_older() -> None:
    table = SnapshotTable()
    table.update({EKEY: endpoint_snapshot(5), BKEY: backend(6)}, whole=True)
    table.confirm(EKEY)
    changes = table.update({EKEY: endpoint_snapshot(5), BKEY: backend(6)}, whole=True)
    assert (list(changes.endpoints), list(changes.backends)) == ([], [BACKEND])
    assert not table.update({BKEY: backend(5)}, whole=False).backends


def test_options_for_http_are_told_with_their_id_and_confirmed_one_by_one() -> None:
    table = SnapshotTable()
    change = table.update({HTTP_KEY: http(3, 2.0)}, whole=True).http
    assert change is not None
    assert change.options is not None
    assert (change.snapshot_id, change.options.request_timeout_s) == (3, 2.0)
    table.update({HTTP_KEY: http(7)}, whole=False)
    table.confirm(HTTP_KEY, 3)  # while the next one is under way
    assert table.applied_snapshot_id == 6
    table.confirm(HTTP_KEY, 7)
    assert table.applied_snapshot_id == 7
    assert table.update({HTTP_KEY: http(7)}, whole=True).http is None
    change = table.update({HTTP_KEY: gone(8)}, whole=False).http
    assert change is not None
    assert (change.options, change.snapshot_id) == (None, 8)


def test_only_the_one_key_of_http_is_known() -> None:
    changes = SnapshotTable().update({"http.other": http(1), HTTP_KEY: endpoint_snapshot(2)}, whole=True)
    assert [key for key, _ in changes.ignored] == ["http.other", HTTP_KEY]
    assert changes.http is None
