"""What is told of recorded changes."""

from __future__ import annotations

import random
from collections import deque

import msgspec
import pytest

from serve_common.api.views import EventView, GoalStatus
from serve_common.config.backend import HttpOptions
from serve_common.names import BackendTag, GoalId, HostId, ProxyId
from serve_controller.core.audit import AUDIT_BYTES_MAX, LEFT_OUT, audit_values
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.events import (
    MESSAGE_LENGTH_MAX,
    audit_event,
    get_events,
    goal_progress,
    latest_events,
)
from serve_controller.core.goals import host_owned
from serve_controller.core.objects import (
    Application,
    ApplicationVersion,
    CheckpointObject,
    Counters,
    GoalKind,
    HostRecord,
    HttpRecord,
    Key,
    ObjectChanges,
    ObjectKind,
    ProxyRecord,
    ReplicaState,
)
from serve_controller.core.observed import ObservedState
from tests.support.controller_parts import (
    G1,
    NOW,
    TAG,
    backend_of,
    checkpoint_of,
    deployment_of,
    endpoint_of,
    get_version,
    goal_of,
    replica_of,
)

V1, V2 = get_version(num_replicas=2), get_version(2, version="v2", num_replicas=2)
TRACEBACK = "Traceback (most recent call last):\n  File x\nRuntimeError: no\n"
HOST = HostId("host-1")


def told(before: Checkpoint, *values: CheckpointObject, deletes: tuple[Key, ...] = ()) -> list[EventView]:
    changes = ObjectChanges(values, deletes)
    return get_events(before, before.applied(changes), changes, NOW)


def told_of_replica(before: Checkpoint, *values: CheckpointObject) -> tuple[str, str]:
    (event,) = told(before, *values)
    assert (event.kind, event.at) == ("replica", NOW)
    return event.state, event.message


def test_a_goal_is_told_when_it_begins_and_when_it_ends() -> None:
    (event,) = told(checkpoint_of(), goal_of(status=GoalStatus.PENDING), Counters(goal=1))
    assert event == EventView(
        at=NOW, kind="goal", subject="g1", message="deploy default/a", state="pending", goal_id=GoalId("g1")
    )
    before = checkpoint_of(goal_of(status=GoalStatus.PENDING))
    (event,) = told(before, goal_of(status=GoalStatus.FAILED, error=TRACEBACK))
    assert (event.state, event.message) == ("failed", "deploy default/a: RuntimeError: no")
    assert [e.state for e in told(checkpoint_of(), goal_of())] == ["pending", "succeeded"]
    assert told(checkpoint_of(goal_of()), deletes=((ObjectKind.GOAL, "g1"),)) == []


def test_every_move_of_a_replica_is_told_with_where_or_why() -> None:
    before = checkpoint_of(backend_of(V1), replica_of(1, V1))
    assert told(before, replica_of(1, V1, message="other")) == []
    assert told_of_replica(before, replica_of(2, V1, ReplicaState.SHOULD_START, None)) == (
        "should_start",
        "waits for a host",
    )
    waiting = replica_of(2, V1, ReplicaState.SHOULD_START, None, message="needs 4 CPU")
    assert told_of_replica(before, waiting)[1] == "needs 4 CPU"
    assert told_of_replica(before, replica_of(2, V1, ReplicaState.STARTING))[1] == "starts on host-1"
    assert told_of_replica(before, replica_of(1, V1, ReplicaState.UPDATING))[0] == "updating"
    for state, words in [
        (ReplicaState.STARTING, "runs on host-1"),
        (ReplicaState.UPDATING, "runs with its new configuration on host-1"),
        (ReplicaState.UNHEALTHY, "is healthy again on host-1"),
    ]:
        now = checkpoint_of(replica_of(1, V1, state), base=before)
        assert told_of_replica(now, replica_of(1, V1)) == ("running", words)


@pytest.mark.parametrize(
    ("others", "was", "why"),
    [
        ([backend_of(V1, deleting=True)], ReplicaState.RUNNING, "default/a is deleted"),
        ([backend_of(V1, halted=True)], ReplicaState.RUNNING, "default/a is halted"),
        (
            [backend_of(V1), HostRecord(host_id=HOST, generation=1, draining=True)],
            ReplicaState.RUNNING,
            "the host host-1 is drained",
        ),
        ([backend_of(V2, others=[V1])], ReplicaState.RUNNING, "version v1 is replaced by v2"),
        ([backend_of(V2, last_good=V2)], ReplicaState.RUNNING, "version 1 is replaced by v2"),
        ([backend_of(V1)], ReplicaState.UNHEALTHY, "its health check fails"),
        (
            [backend_of(V1), replica_of(2, V1), replica_of(3, V1)],
            ReplicaState.RUNNING,
            "2 replicas are wanted",
        ),
        ([backend_of(V1), replica_of(2, V1)], ReplicaState.RUNNING, "another one is started in its place"),
    ],
)
def test_a_replica_that_stops_says_why(others: list, was: ReplicaState, why: str) -> None:
    before = checkpoint_of(*others, replica_of(1, V1, was))
    stopping = replica_of(1, V1, ReplicaState.SHOULD_STOP)
    assert told_of_replica(before, stopping) == ("should_stop", f"is to stop: {why}")


def test_a_replica_that_is_gone_says_whether_it_should_be() -> None:
    gone: tuple[Key, ...] = ((ObjectKind.REPLICA, "default/a#1"),)
    before = checkpoint_of(backend_of(V1), replica_of(1, V1, ReplicaState.STOPPING))
    (event,) = told(before, deletes=gone)
    assert (event.subject, event.state, event.message) == ("default/a#1", "stopped", "has stopped")
    before = checkpoint_of(backend_of(V1), replica_of(1, V1, ReplicaState.STARTING))
    failing, event = told(before, backend_of(V1, start_failures=1, last_error=TRACEBACK), deletes=gone)
    assert event.message == "ended on host-1 while it was starting: RuntimeError: no"
    assert (failing.kind, failing.subject, failing.state) == ("backend", TAG, "failing")
    assert failing.message == "version v1: 1 starts failed (a goal fails at 3): RuntimeError: no"
    (event,) = told(before, deletes=gone)
    assert event.message == "ended on host-1 while it was starting"


def test_what_becomes_of_a_failed_update_is_told() -> None:
    updating = checkpoint_of(backend_of(V2, last_good=V1, others=[V1]))
    back = backend_of(msgspec.structs.replace(V1, config_version=3), last_error=TRACEBACK)
    (event,) = told(updating, back)
    assert (event.state, event.message) == ("went back", "version v1 is put back: RuntimeError: no")
    (event,) = told(updating, msgspec.structs.replace(back, retained=V2))
    assert event.state == "kept"
    assert event.message == (
        "version v1 is wanted again; replicas of version v2 that serve are kept: RuntimeError: no"
    )
    first = checkpoint_of(backend_of(V1, last_good=None))
    (event,) = told(first, backend_of(V1, last_good=None, halted=True, last_error=TRACEBACK))
    assert (event.state, event.message) == (
        "halted",
        "nothing is started until the next deploy: RuntimeError: no",
    )
    rollback = told(updating, msgspec.structs.replace(back, goal_id=GoalId("g2")))
    assert rollback == []  # a command's doing, of which its goal tells
    failing = checkpoint_of(backend_of(V1, start_failures=2))
    assert [e.state for e in told(failing, backend_of(V1))] == ["recovered"]
    pending = checkpoint_of(goal_of(status=GoalStatus.PENDING), base=failing)
    ended = told(pending, backend_of(V1), goal_of(status=GoalStatus.FAILED))
    assert [(e.kind, e.state) for e in ended] == [("goal", "failed")]


def test_hosts_and_proxies_come_and_go() -> None:
    record = HostRecord(host_id=HOST, generation=1)
    draining = msgspec.structs.replace(record, draining=True)
    known = checkpoint_of(record, ProxyRecord(proxy_id=ProxyId("p")))
    assert [(e.kind, e.subject, e.state) for e in told(checkpoint_of(), record)] == [("host", HOST, "known")]
    assert (
        told(known, msgspec.structs.replace(record, generation=2), ProxyRecord(proxy_id=ProxyId("p"))) == []
    )
    assert [e.state for e in told(known, draining)] == ["draining"]
    assert [e.state for e in told(checkpoint_of(draining), record)] == ["undrained"]
    gone = told(known, deletes=((ObjectKind.PROXY, "p"), (ObjectKind.HOST, HOST), (ObjectKind.BACKEND, TAG)))
    assert [(e.kind, e.state) for e in gone] == [
        ("host", "forgotten"),
        ("proxy", "gone"),
        ("backend", "deleted"),
    ]


def test_the_order_is_the_same_however_the_changes_are_ordered() -> None:
    replicas = [replica_of(n, V1, ReplicaState.STARTING) for n in (10, 9, 2)]
    before = checkpoint_of(backend_of(V1), goal_of("g9", GoalStatus.PENDING))
    values = [
        *replicas,
        replica_of(1, V1, tag=BackendTag("default/b")),
        goal_of("g9"),
        goal_of("g10", GoalStatus.PENDING),
        HostRecord(host_id=HOST, generation=1),
        backend_of(V1, start_failures=1),
    ]
    expected = told(before, *values)
    assert [e.subject for e in expected] == [
        "g10",
        "host-1",
        "default/a",
        "default/a#2",
        "default/a#9",
        "default/a#10",
        "default/b#1",
        "g9",
    ]
    for seed in range(5):
        random.Random(seed).shuffle(values)
        assert told(before, *values) == expected


def test_a_replica_names_the_goal_that_moves_it_while_that_is_pending() -> None:
    pending = checkpoint_of(backend_of(V1), goal_of(status=GoalStatus.PENDING))
    (event,) = told(pending, replica_of(1, V1, ReplicaState.STARTING))
    assert event.goal_id == "g1"
    events = told(pending, replica_of(1, V1), goal_of())
    assert [e.goal_id for e in events] == ["g1", "g1"]
    (event,) = told(checkpoint_of(backend_of(V1), goal_of()), replica_of(1, V1))
    assert event.goal_id is None


def test_messages_are_bounded() -> None:
    long = "x" * 10_000
    before = checkpoint_of(backend_of(V1), goal_of(status=GoalStatus.PENDING))
    values = [
        goal_of(status=GoalStatus.FAILED, error=long),
        replica_of(1, V1, ReplicaState.SHOULD_START, None, message=long),
        backend_of(V1, halted=True, start_failures=1, last_error=long),
    ]
    events = [
        *told(before, *values),
        audit_event(NOW, verb="deploy", subject=TAG, principal=long, goal_id=None),
    ]
    assert len(events) == 5
    assert all(len(e.message) <= MESSAGE_LENGTH_MAX for e in events)


def test_many_replicas_are_told_of_in_time_that_grows_with_their_number_only() -> None:
    num = 3_000
    before = checkpoint_of(backend_of(V1), *(replica_of(n, V1) for n in range(num)))
    events = told(before, *(replica_of(n, V1, ReplicaState.SHOULD_STOP) for n in range(2, num)))
    assert {e.message for e in events} == {"is to stop: 2 replicas are wanted"}


def test_events_are_asked_for_by_what_they_are_about() -> None:
    drain = goal_of("g2", kind=GoalKind.DRAIN, subject=HOST, owns=[host_owned(HOST)])
    checkpoint = checkpoint_of(goal_of("g1"), drain)
    events = deque(
        [
            *told(checkpoint_of(), goal_of("g1")),
            *told(checkpoint_of(), drain, HostRecord(host_id=HOST, generation=1)),
            *told(checkpoint_of(), replica_of(1, V1), replica_of(1, V1, tag=BackendTag("other/a"))),
        ]
    )

    def about(subject: str | None, limit: int = 100) -> list[str]:
        return [e.subject for e in latest_events(events, checkpoint, limit, subject)]

    assert about("a") == about("default/a") == ["g1", "g1", "default/a#1"]
    assert about("default/a#1") == ["default/a#1"]
    assert about("host-1") == ["g2", "host-1", "g2"]
    assert about("g1") == ["g1", "g1"]
    assert about("../..") == []
    assert len(about(None)) == len(events)
    assert about(None, 2) == ["default/a#1", "other/a#1"]


def test_progress_is_told_when_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = {"g2": "for b", "g10": "x" * 10_000}
    monkeypatch.setattr(
        "serve_controller.core.views.hosts.waits_for",
        lambda _checkpoint, _observed, goal: waits[goal.goal_id],
    )
    observed = ObservedState(since=NOW)
    pending = [goal_of(goal_id, GoalStatus.PENDING) for goal_id in ("g10", "g2")]
    checkpoint = checkpoint_of(*pending, goal_of("g3"))
    asked = [GoalId(g) for g in ("g10", "g2", "g3", "g77")]
    first = goal_progress(checkpoint, observed, asked, {})
    assert [(v.goal_id, v.message[:5], v.status) for v in first] == [
        ("g2", "for b", GoalStatus.PENDING),
        ("g10", "xxxxx", GoalStatus.PENDING),
    ]
    last = {v.goal_id: v.message for v in first}
    assert goal_progress(checkpoint, observed, asked, last) == []
    waits["g2"] = "for c"
    assert [v.goal_id for v in goal_progress(checkpoint, observed, asked, last)] == ["g2"]


# What the audit log says of a command.


FIRST, SECOND = get_version(), get_version(2, version="v2")


def test_what_was_made_was_not_there_before() -> None:
    values = (
        backend_of(FIRST),
        endpoint_of(),
        deployment_of(),
        goal_of(status=GoalStatus.PENDING),
        Counters(goal=1),
        HostRecord(host_id=HostId("h"), generation=3),
    )
    old, new = audit_values(checkpoint_of(), ObjectChanges(values))
    assert old == {"backend default/a": None, "endpoint default/a": None}
    assert new is not None
    assert list(new) == ["backend default/a", "endpoint default/a"]
    assert new["backend default/a"]["target"]["version"] == "v1"
    assert new["endpoint default/a"] == {
        "route": "/a",
        "methods": ["GET"],
        "traffic": {"default/a": 1.0},
        "shadows": {},
        "is_ingress": False,
        "options": {
            "shard_key_header": "X-Serve-Shard-Key",
            "backend_header": "",
            "relative_slo_ms": None,
            "error_format": "problem",
        },
    }


def test_what_changed_is_told_as_it_was_and_is() -> None:
    made = ApplicationVersion(ingress=TAG, deployments=[TAG])
    application = Application(name="shop", goal_id=G1, target=made, last_good=None)
    host = HostRecord(host_id=HostId("h"), generation=1)
    before = checkpoint_of(
        backend_of(FIRST),
        endpoint_of(),
        application,
        HttpRecord(target=HttpOptions(), last_good=None, goal_id=G1),
        host,
        replica_of(1, FIRST),
    )
    changes = ObjectChanges(
        (
            backend_of(SECOND, deleting=True),
            msgspec.structs.replace(application, deleting=True),
            HttpRecord(target=HttpOptions(request_timeout_s=5), last_good=None, goal_id=G1),
            msgspec.structs.replace(host, draining=True, generation=2),
        ),
        ((ObjectKind.ENDPOINT, TAG), (ObjectKind.REPLICA, "default/a#1")),
    )
    old, new = audit_values(before, changes)
    assert old is not None
    assert new is not None
    titles = ["application shop", "backend default/a", "endpoint default/a", "host h", "http options"]
    assert list(old) == list(new) == titles
    assert (old["host h"], new["host h"]) == ({"draining": False}, {"draining": True})
    assert (old["http options"]["request_timeout_s"], new["http options"]["request_timeout_s"]) == (60.0, 5.0)
    assert new["endpoint default/a"] is None
    assert new["backend default/a"]["deleting"] is True
    assert "deleting" not in old["backend default/a"]
    assert new["application shop"] == {
        "ingress": TAG,
        "deployments": [TAG],
        "takes_over": None,
        "app_config": None,
        "deleting": True,
    }


def test_a_change_of_nothing_that_users_decide_on_says_nothing() -> None:
    before = checkpoint_of(backend_of(FIRST))
    changes = ObjectChanges((backend_of(FIRST, goal_id="g2", start_failures=1), goal_of()))
    assert audit_values(before, changes) == (None, None)


def test_large_values_are_named_and_not_repeated() -> None:
    large = get_version(user_config={"weights": "x" * 60_000}, num_replicas=3)
    old, new = audit_values(checkpoint_of(backend_of(FIRST)), ObjectChanges((backend_of(large),)))
    assert old is not None
    assert new is not None
    config = new["backend default/a"]["target"]["backend_config"]
    assert config["user_config"] == "left out: 60014 bytes"
    assert config["num_replicas"] == 3
    assert old["backend default/a"]["target"]["backend_config"]["user_config"] is None


def test_each_side_is_bounded_and_says_what_is_missing() -> None:
    backends = [
        backend_of(get_version(user_config="y" * 2000), BackendTag(f"default/n{i:04}")) for i in range(500)
    ]
    before = checkpoint_of(*backends)
    changes = ObjectChanges((), tuple((ObjectKind.BACKEND, backend.backend_tag) for backend in backends))
    old, new = audit_values(before, changes)
    for side in (old, new):
        assert side is not None
        assert len(msgspec.json.encode(side)) <= AUDIT_BYTES_MAX
    assert old is not None
    assert new is not None
    count = 500 - (len(old) - 1)
    assert old[LEFT_OUT].startswith(f"{count} objects for which there is no room: backend default/n")
    assert old[LEFT_OUT].endswith(f"and {count - 5} more")
    assert LEFT_OUT not in new  # what is gone takes no room
    assert len(new) == 500
