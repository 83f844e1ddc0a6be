"""What a command is said to do before it is made."""

from __future__ import annotations

from collections import Counter

import msgspec

from serve_common.api.views import GoalStatus, PlannedAction, PlanView
from serve_common.config.endpoint import HttpOptions
from serve_common.config.replica import ReplicaConfig
from serve_common.names import BackendTag, HostId
from serve_controller.core import forecast as forecasting
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.goals.scope import deployment_owned
from serve_controller.core.objects import (
    Application,
    ApplicationVersion,
    CheckpointObject,
    GoalKind,
    HostRecord,
    HttpRecord,
    Key,
    ObjectChanges,
    ObjectKind,
    ReplicaState,
)
from tests.unit.controller_parts import (
    G1,
    NOW,
    TAG,
    backend_of,
    checkpoint_of,
    deployment_of,
    endpoint_of,
    goal_of,
    observed_hosts,
    replica_of,
    version_of,
)

START, STOP, RECONFIGURE = PlannedAction.START, PlannedAction.STOP, PlannedAction.RECONFIGURE
V1 = version_of(num_replicas=3)
RUNNING = [replica_of(n, V1) for n in (1, 2, 3)]


def plan(
    before: Checkpoint,
    *values: CheckpointObject,
    deletes: tuple[Key, ...] = (),
    hosts: tuple[str, ...] = ("host-1",),
    cpus: float = 20_000.0,
) -> PlanView:
    after = before.applied(ObjectChanges(values, deletes))
    return forecasting.forecast(before, after, observed_hosts(*hosts, cpus=cpus), NOW)


def told(view: PlanView) -> list[tuple[PlannedAction, str | None, str]]:
    return [(r.action, r.replica_tag, r.why) for r in view.replicas]


def running(*others: CheckpointObject) -> Checkpoint:
    return checkpoint_of(backend_of(V1), deployment_of(), endpoint_of(), goal_of(), *RUNNING, *others)


def test_nothing_to_do_is_said() -> None:
    assert plan(running()) == PlanView(updating=False, replicas=[], notes=[])


def test_a_new_deployment_starts_its_replicas() -> None:
    view = plan(checkpoint_of(), backend_of(V1, last_good=None), deployment_of(), endpoint_of())
    assert told(view) == [(START, None, "the deployment is new")] * 3
    assert view.notes == [
        "the endpoint default/a is made at /a: it sends to default/a 100 %",
        "default/a: there is room for 3 new replicas: 3 on host-1",
    ]
    (replica, *_) = plan(checkpoint_of(), backend_of(V1, last_good=None)).replicas
    assert replica.why == "the backend is new"


def test_a_change_of_the_code_replaces_every_replica_and_says_what_changes() -> None:
    v2 = version_of(2, version="v2", path="m:B", cpus=2, num_replicas=3)
    view = plan(running(), backend_of(v2, last_good=V1))
    why = "version v1 → v2; the code changes: import_path m:A → m:B, ray_actor_options.num_cpus 1 → 2"
    assert told(view) == [(START, None, why)] * 3 + [(STOP, f"default/a#{n}", why) for n in (1, 2, 3)]
    unnamed = version_of(2, version=None, num_replicas=3)
    before = checkpoint_of(backend_of(msgspec.structs.replace(V1, version=None)), *RUNNING)
    assert {r.why for r in plan(before, backend_of(unnamed)).replicas} == {
        "the code may have changed: no version is named"
    }


def test_values_that_may_be_large_or_secret_are_not_repeated() -> None:
    code = ReplicaConfig(import_path="m:A", init_kwargs={"password": "hunter2"})
    v2 = msgspec.structs.replace(V1, code_version=2, config_version=2, replica_config=code)
    (replica, *_) = plan(running(), backend_of(v2)).replicas
    assert replica.why == "the code changes: init_kwargs changes"


def test_a_changed_user_config_reconfigures_in_place() -> None:
    v2 = version_of(1, 2, num_replicas=3, user_config={"x": 1}, max_concurrent_queries=5)
    waiting = replica_of(4, V1, ReplicaState.SHOULD_START, None)
    before = checkpoint_of(waiting, replica_of(3, V1, ReplicaState.STOPPING), base=running())
    view = plan(before, backend_of(v2))
    why = "max_concurrent_queries 100 → 5, user_config changes"
    assert told(view) == [(RECONFIGURE, "default/a#1", why), (RECONFIGURE, "default/a#2", why)]
    assert (view.updating, view.notes) == (True, [])


def test_more_replicas_are_started_and_what_is_missing_anyway_is_told_apart() -> None:
    v5 = msgspec.structs.replace(
        V1, backend_config=msgspec.structs.replace(V1.backend_config, num_replicas=5)
    )
    assert told(plan(running(), backend_of(v5))) == [(START, None, "num_replicas 3 → 5")] * 2
    before = checkpoint_of(backend_of(V1), *RUNNING[:1])
    assert Counter(r.why for r in plan(before, backend_of(v5)).replicas) == {
        "num_replicas 3 → 5": 2,
        "is missing already, whatever the command changes": 2,
    }


def test_scaling_down_gives_up_what_serves_least_then_the_newest() -> None:
    v1 = version_of(num_replicas=6)
    states = [
        (1, ReplicaState.RUNNING),
        (2, ReplicaState.UPDATING),
        (3, ReplicaState.RUNNING),
        (4, ReplicaState.UNHEALTHY),
        (5, ReplicaState.STARTING),
        (6, ReplicaState.RUNNING),
    ]
    before = checkpoint_of(backend_of(v1), *(replica_of(n, v1, state) for n, state in states))
    given_up = []
    for num in range(5, -1, -1):
        fewer = version_of(num_replicas=num)
        view = plan(before, backend_of(fewer))
        assert {r.why for r in view.replicas} == {f"num_replicas 6 → {num}"}
        given_up.append([r.replica_tag[-1] for r in view.replicas if r.replica_tag])
    assert given_up[-1] == ["5", "4", "2", "6", "3", "1"]
    assert [len(g) for g in given_up] == [1, 2, 3, 4, 5, 6]


def test_a_deployment_that_goes_away_stops_everything() -> None:
    gone: tuple[Key, ...] = ((ObjectKind.ENDPOINT, TAG),)
    before = running(replica_of(4, V1, ReplicaState.STOPPING))
    view = plan(before, backend_of(V1, deleting=True), deletes=gone)
    assert told(view) == [(STOP, f"default/a#{n}", "the deployment goes away") for n in (1, 2, 3)]
    assert view.notes == ["the endpoint default/a goes away, and with it its route /a"]
    deleting = checkpoint_of(backend_of(V1, deleting=True), *RUNNING)
    assert plan(deleting, backend_of(V1, deleting=True, force_kill=True)).replicas == []


def test_a_drained_host_gives_up_its_replicas_and_new_ones_are_started_elsewhere() -> None:
    before = running(replica_of(1, V1, tag=BackendTag("default/b"), host="host-2"))
    drain = HostRecord(host_id=HostId("host-1"), generation=1, draining=True)
    view = plan(before, drain, hosts=("host-1", "host-2"))
    assert told(view)[0] == (START, None, "the host host-1 is drained: instead of default/a#1")
    assert Counter((r.action, r.backend_tag) for r in view.replicas) == {(START, TAG): 3, (STOP, TAG): 3}
    assert view.notes == [
        "nothing more is placed on the host host-1",
        "default/a: there is room for 3 new replicas: 3 on host-2",
    ]
    draining = checkpoint_of(HostRecord(host_id=HostId("host-1"), generation=1, draining=True), base=before)
    again = plan(draining, HostRecord(host_id=HostId("host-1"), generation=1, draining=True))
    assert (again.updating, again.replicas) == (False, [])
    back = plan(draining, HostRecord(host_id=HostId("host-1"), generation=1))
    assert back.notes == ["replicas may be placed on the host host-1 again; none is moved there"]
    assert (back.updating, back.replicas) == (True, [])


def test_light_changes_touch_no_replica() -> None:
    light = version_of(num_replicas=3, max_queued_requests=5, on_failure="go_back")
    view = plan(running(), backend_of(light))
    assert (view.updating, view.replicas) == (True, [])
    assert view.notes == [
        "default/a: max_queued_requests 1000 → 5, on_failure keep → go_back; no replica is touched"
    ]


def test_replicas_kept_from_a_failed_update_stay_unless_the_command_gives_them_up() -> None:
    failed = version_of(2, version="v2", num_replicas=3)
    before = checkpoint_of(backend_of(V1, kept=failed), *RUNNING[:2], replica_of(4, failed))
    light = msgspec.structs.replace(
        V1, backend_config=msgspec.structs.replace(V1.backend_config, max_queued_requests=1)
    )
    assert plan(before, backend_of(light, kept=failed)).replicas == []
    v3 = version_of(3, version="v3", num_replicas=3)
    assert Counter(r.action for r in plan(before, backend_of(v3)).replicas) == {START: 3, STOP: 3}


def test_routes_traffic_and_options_are_told_in_words() -> None:
    other = BackendTag("default/b")
    endpoint = endpoint_of(route="/b", traffic={TAG: 0.7, other: 0.3})
    target = msgspec.structs.replace(endpoint.target, methods=["GET", "POST"], shadows={other: 0.1})
    view = plan(
        running(goal_of("g7", GoalStatus.PENDING)),
        msgspec.structs.replace(endpoint, target=target),
        HttpRecord(target=HttpOptions(request_timeout_s=5), last_good=None, goal_id=G1),
        goal_of("g7", GoalStatus.SUPERSEDED),
        endpoint_of(other, route=None),
    )
    assert (view.updating, view.replicas) == (True, [])
    assert view.notes == [
        (
            "the endpoint default/a changes: route /a → /b; methods GET → GET, POST; "
            "traffic default/a 100 % → default/a 70 %, default/b 30 %; shadows nowhere → default/b 10 %"
        ),
        "the endpoint default/b is made, headless: it sends to default/b 100 %",
        "all proxies: request_timeout_s 60 → 5",
        "the pending goal g7 (deploy default/a) is replaced",
    ]


def test_an_application_says_what_is_added_and_dropped() -> None:
    b = BackendTag("default/b")
    first = Application(
        name="s", goal_id=G1, target=ApplicationVersion(ingress=TAG, deployments=[TAG]), last_good=None
    )
    then = msgspec.structs.replace(first, target=ApplicationVersion(ingress=b, deployments=[b]))
    assert plan(checkpoint_of(), first).notes == ["the application s is made: its route leads to default/a"]
    assert plan(checkpoint_of(first), then).notes == [
        "the application s changes: default/b is added, default/a is dropped, its route leads to default/b"
    ]
    running = checkpoint_of(msgspec.structs.replace(first, last_good=first.target), backend_of(V1), *RUNNING)
    goal = goal_of(G1, GoalStatus.PENDING)
    owns = ["applications.s", *deployment_owned(b), *deployment_owned(TAG)]
    goal = msgspec.structs.replace(goal, kind=GoalKind.APPLICATION, subject="s", owns=owns)
    view = plan(running, goal, msgspec.structs.replace(then, last_good=first.target))
    assert {(r.action, r.why) for r in view.replicas} == {(STOP, "the application s has it no longer")}
    assert len(view.replicas) == 3
    going = msgspec.structs.replace(first, deleting=True)
    assert plan(checkpoint_of(first), going).notes == ["the application s goes away with its deployments"]


def test_replicas_on_a_host_that_is_drained_already_are_not_counted_on() -> None:
    draining = HostRecord(host_id=HostId("host-2"), generation=1, draining=True)
    before = running(draining, *(replica_of(n, V1, host="host-2") for n in (2, 3)))
    v4 = version_of(num_replicas=4)
    assert told(plan(before, backend_of(v4))) == [
        (START, None, "instead of one on a host that is drained"),
        (START, None, "instead of one on a host that is drained"),
        (START, None, "num_replicas 3 → 4"),
        (STOP, "default/a#2", "the host host-2 is drained"),
        (STOP, "default/a#3", "the host host-2 is drained"),
    ]
    v1 = version_of(num_replicas=1)
    assert Counter(r.action for r in plan(before, backend_of(v1)).replicas) == {STOP: 2}


def test_what_has_no_room_is_told_with_the_reason() -> None:
    v5 = version_of(num_replicas=5)
    assert plan(running(), backend_of(v5), cpus=1).notes == [
        (
            "default/a: there is room for 1 of 2 new replicas (1 on host-1); the others wait: "
            "needs 1 CPU (the freest host has 0)"
        )
    ]
    v2 = version_of(2, num_replicas=3, cpus=2)
    (note,) = plan(running(), backend_of(v2), cpus=1).notes
    assert note == (
        "default/a: there is room for 0 of 3 new replicas; the others wait, also for the room of those that stop: "
        "needs 2 CPU (the freest host has 1)"
    )
    (note,) = plan(running(), backend_of(v5), hosts=()).notes
    assert note.endswith("the others wait: waits for a replica host: none is live")


def test_the_new_replicas_of_several_backends_share_the_room() -> None:
    tags = [BackendTag("default/b"), BackendTag("default/c")]
    made = [backend_of(version_of(num_replicas=4), tag, last_good=None) for tag in tags]
    first, second = plan(checkpoint_of(), *made, hosts=("host-1", "host-2"), cpus=3).notes
    assert first == "default/b: there is room for 4 new replicas: 2 on host-1, 2 on host-2"
    assert "there is room for 2 of 4 new replicas (1 on host-1, 1 on host-2)" in second


def test_an_answer_is_bounded() -> None:
    view = plan(checkpoint_of(), backend_of(version_of(num_replicas=10_000), last_good=None))
    assert len(view.replicas) == forecasting.PLANNED_MAX
    assert view.notes[0] == (
        "only the first 1000 of 10000 replicas are named: 10000 to start, 0 to stop, 0 to reconfigure"
    )
    tags = [BackendTag(f"default/n{i}") for i in range(3_000)]
    before = checkpoint_of(*(backend_of(version_of(num_replicas=0), tag) for tag in tags))
    view = plan(before, deletes=tuple((ObjectKind.BACKEND, tag) for tag in tags))
    assert len(view.notes) == forecasting.NOTES_MAX + 1
    assert view.notes[-1] == "and 2700 more notes"
    assert len(msgspec.json.encode(view)) < 1_000_000
