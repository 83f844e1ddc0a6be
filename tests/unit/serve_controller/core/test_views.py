"""What callers see."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from serve_common.api.queries import PAGE_LIMIT_MAX, PagedQuery
from serve_common.api.views import DeploymentStatus, GoalStatus, PlannedAction, PlanView
from serve_common.config.backend import HttpOptions, ReplicaConfig
from serve_common.errors import BadField, NotFound
from serve_common.names import BackendTag, GoalId, HostId, ProxyId
from serve_common.protocol.reports import ProxyReport
from serve_controller.core import forecast as forecasting
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.goals import deployment_owned
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
    ReplicaState,
    Revision,
)
from serve_controller.core.observed import PROXY_LOST_AFTER_S, ObservedState, observe_proxy
from serve_controller.core.views import backends, deployments, hosts
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
    observed_hosts,
    replica_of,
)

V1 = get_version(num_replicas=2)
WHOLE = (deployment_of(), endpoint_of(), goal_of(), replica_of(1, V1), replica_of(2, V1))
OBSERVED = ObservedState(since=NOW)
UPDATING, HEALTHY, UNHEALTHY = DeploymentStatus.UPDATING, DeploymentStatus.HEALTHY, DeploymentStatus.UNHEALTHY


def test_a_deployment_joins_its_backend_and_endpoint() -> None:
    checkpoint = checkpoint_of(backend_of(V1), *WHOLE)
    view = deployments.view_deployment(checkpoint, "a")
    assert (view.name, view.status, view.message) == ("default/a", HEALTHY, "")
    assert (view.route_prefix, view.methods, view.version, view.goal_id) == ("/a", ["GET"], "v1", G1)
    assert [(r.replica_tag, r.state, r.version) for r in view.replicas] == [
        ("default/a#1", "running", "v1"),
        ("default/a#2", "running", "v1"),
    ]
    assert (view.started_at, view.ended_at, view.application, view.is_ingress) == (NOW - 100, None, "", False)
    assert deployments.view_deployments(checkpoint) == [view]


def test_a_backend_without_a_deployment_is_listed_as_a_backend_only() -> None:
    checkpoint = checkpoint_of(backend_of(V1), goal_of())
    assert (
        deployments.view_deployments(checkpoint, include_deleted=True)
        == deployments.view_snapshot(checkpoint)
        == []
    )
    with pytest.raises(NotFound, match="no deployment 'default/a'"):
        deployments.view_deployment(checkpoint, "a")
    (view,) = backends.view_backends(checkpoint)
    assert (view.backend_tag, view.status, view.message) == (TAG, UNHEALTHY, "0 of 2 replicas serve")
    assert backends.view_backend_config(checkpoint, "a").backend_config.num_replicas == 2
    with pytest.raises(NotFound):
        backends.view_backend_config(checkpoint, "b")
    with pytest.raises(BadField) as refused:
        backends.view_backend_config(checkpoint, "../..")
    assert refused.value.field == "backend_tag"


def test_a_deleted_deployment_is_remembered_and_not_found() -> None:
    gone = deployment_of(ended_at=NOW, ended_as=V1, ended_route="/a")
    checkpoint = checkpoint_of(gone)
    assert deployments.view_deployments(checkpoint) == []
    (view,) = deployments.view_deployments(checkpoint, include_deleted=True)
    assert (view.status, view.route_prefix, view.ended_at) == (DeploymentStatus.DELETED, "/a", NOW)
    (short,) = deployments.view_snapshot(checkpoint)
    assert (short.class_name, short.version, short.route) == ("A", "v1", "/a")
    assert (short.start_time, short.end_time) == (NOW - 100, NOW)
    with pytest.raises(NotFound):
        deployments.view_deployment(checkpoint, "a")


def test_a_backend_made_under_the_tag_of_a_deleted_deployment_does_not_bring_that_back() -> None:
    gone = deployment_of(ended_at=NOW, ended_as=V1)
    checkpoint = checkpoint_of(gone, backend_of(get_version(version="other")))
    assert deployments.view_deployments(checkpoint) == []
    assert [v.version for v in deployments.view_deployments(checkpoint, include_deleted=True)] == ["v1"]
    assert [v.end_time for v in deployments.view_snapshot(checkpoint)] == [NOW]


def test_the_snapshot_names_class_and_version() -> None:
    version = get_version(version=None, path="pack.mod:Outer.Inner")
    checkpoint = checkpoint_of(backend_of(version), deployment_of(), endpoint_of(route=None))
    (short,) = deployments.view_snapshot(checkpoint)
    assert (short.class_name, short.version, short.route, short.end_time) == (
        "Outer.Inner",
        "Unversioned",
        None,
        None,
    )


@pytest.mark.parametrize(
    ("fields", "goal", "status", "message"),
    [
        ({}, goal_of(status=GoalStatus.PENDING), UPDATING, "no room"),
        ({"deleting": True}, goal_of(), DeploymentStatus.DELETING, "2 replicas still stop"),
        ({"halted": True, "last_error": "E: no"}, goal_of(), UNHEALTHY, "E: no"),
        ({}, goal_of(), UNHEALTHY, "1 of 2 replicas serve: no room"),
    ],
)
def test_a_status_says_why(fields: dict, goal: object, status: DeploymentStatus, message: str) -> None:
    waiting = replica_of(2, V1, ReplicaState.SHOULD_START, None, message="no room")
    checkpoint = checkpoint_of(backend_of(V1, **fields), deployment_of(), goal, replica_of(1, V1), waiting)
    view = deployments.view_deployment(checkpoint, "a")
    assert (view.status, view.message) == (status, message)


def test_a_failed_change_says_what_it_left_behind() -> None:
    v2 = get_version(2, version="v2")
    failed = goal_of(status=GoalStatus.FAILED, error="E: no")
    undone = checkpoint_of(backend_of(V1), *WHOLE, failed)
    assert deployments.view_deployment(undone, "a").message == "the last change failed and was undone: E: no"
    one_kept = checkpoint_of(backend_of(V1, retained=v2), *WHOLE, replica_of(3, v2), failed)
    view = deployments.view_deployment(one_kept, "a")
    assert view.message == "the last change failed; 1 replicas of version v2 are kept: E: no"
    assert (view.status, [r.version for r in view.replicas]) == (HEALTHY, ["v1", "v1", "v2"])
    none_serves = checkpoint_of(
        backend_of(V1, retained=v2), *WHOLE, replica_of(3, v2, ReplicaState.STOPPING), failed
    )
    assert "was undone" in deployments.view_deployment(none_serves, "a").message


def test_an_application_is_as_its_worst_deployment() -> None:
    tags = [BackendTag("shop/x"), BackendTag("shop/y")]
    made = ApplicationVersion(ingress=tags[0], deployments=tags)
    application = Application(name="shop", goal_id=G1, target=made, last_good=made)
    v = get_version()
    parts = [
        p
        for tag in tags
        for p in (
            backend_of(v, tag),
            deployment_of(tag, application="shop"),
            endpoint_of(tag, route="/shop" if tag == tags[0] else None),
            replica_of(1, v, tag=tag),
        )
    ]
    whole = checkpoint_of(application, goal_of(tag=tags[0]), *parts)
    (view,) = deployments.view_applications(whole)
    assert (view.name, view.status, view.message, view.route_prefix) == ("shop", HEALTHY, "", "/shop")
    assert (view.ingress, view.deployments) == ("shop/x", ["shop/x", "shop/y"])
    ingresses = {d.name: (d.application, d.is_ingress) for d in deployments.view_deployments(whole)}
    assert ingresses == {"shop/x": ("shop", True), "shop/y": ("shop", False)}
    one_sick = checkpoint_of(replica_of(1, v, ReplicaState.UNHEALTHY, tag=tags[1]), base=whole)
    (view,) = deployments.view_applications(one_sick)
    assert (view.status, view.message) == (UNHEALTHY, "shop/y: 0 of 1 replicas serve")
    pending = checkpoint_of(goal_of(status=GoalStatus.PENDING), base=whole)
    assert deployments.view_applications(pending)[0].status is UPDATING
    failed = checkpoint_of(goal_of(status=GoalStatus.FAILED, error="E: no"), base=whole)
    assert deployments.view_applications(failed)[0].message == "the last change failed: E: no"
    going = checkpoint_of(msgspec.structs.replace(application, deleting=True), goal_of())
    (view,) = deployments.view_applications(going)
    assert (view.status, view.route_prefix) == (DeploymentStatus.DELETING, None)


def test_endpoints_show_traffic_and_shadows() -> None:
    endpoint = endpoint_of(traffic={TAG: 0.5, BackendTag("default/b"): 0.5})
    target = msgspec.structs.replace(endpoint.target, shadows={BackendTag("default/c"): 0.1})
    checkpoint = checkpoint_of(
        msgspec.structs.replace(endpoint, target=target), endpoint_of(BackendTag("b/b"))
    )
    first, second = deployments.view_endpoints(checkpoint)
    assert (first.endpoint_tag, second.endpoint_tag) == ("b/b", "default/a")
    assert (second.traffic, second.shadows) == ({"default/a": 0.5, "default/b": 0.5}, {"default/c": 0.1})


def test_http_options_are_the_defaults_until_they_are_set() -> None:
    assert checkpoint_of().http_options == HttpOptions()
    options = HttpOptions(request_timeout_s=5)
    checkpoint = checkpoint_of(HttpRecord(target=options, last_good=None, goal_id=G1))
    assert checkpoint.http_options == options


def test_hosts_and_proxies_are_listed_with_how_they_are_treated() -> None:
    checkpoint = checkpoint_of(
        backend_of(V1), *WHOLE, HostRecord(host_id=HostId("host-2"), generation=1, draining=True)
    )
    observed = observed_hosts("host-2", "host-1")
    listed = hosts.view_hosts(checkpoint, observed, NOW)
    assert [(h.host_id, h.status, h.num_replicas, h.draining) for h in listed] == [
        ("host-1", "live", 2, False),
        ("host-2", "live", 0, True),
    ]
    report = ProxyReport(
        proxy_id=ProxyId("p"), incarnation="i", sequence=1, started_at=NOW, applied_snapshot_id=7
    )
    observed = observe_proxy(observed, report, NOW)
    (proxy,) = hosts.view_proxies(observed, NOW)
    assert (proxy.status, proxy.applied_snapshot_id) == ("live", 7)
    assert hosts.view_proxies(observed, NOW + PROXY_LOST_AFTER_S)[0].status == "lost"


def test_revisions_come_newest_first_and_the_current_is_marked() -> None:
    v2 = get_version(2, version="v2", path="m:B", num_replicas=3)
    made = [
        Revision(backend_tag=TAG, revision=n, at=NOW, goal_id=GoalId(f"g{n}"), version=v, endpoint=e)
        for n, v, e in [(1, V1, None), (2, v2, endpoint_of().target), (10, V1, None)]
    ]
    back = msgspec.structs.replace(v2, config_version=9)  # as a failed change puts it back
    checkpoint = checkpoint_of(backend_of(get_version(3), last_good=back), *made)
    shown = backends.view_revisions(checkpoint, "a")
    assert [(r.revision, r.is_current, r.version) for r in shown] == [
        (10, False, "v1"),
        (2, True, "v2"),
        (1, False, "v1"),
    ]
    assert (shown[1].import_path, shown[1].num_replicas, shown[1].route_prefix) == ("m:B", 3, "/a")
    assert [
        r.is_current for r in backends.view_revisions(checkpoint_of(backend_of(V1), base=checkpoint), "a")
    ] == [
        True,
        False,
        False,
    ]
    never = checkpoint_of(backend_of(V1, last_good=None))
    assert backends.view_revisions(never, "a") == []
    with pytest.raises(NotFound):
        backends.view_revisions(never, "b")


def test_an_unknown_goal_is_told_from_a_forgotten_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve_controller.core.views.hosts.waits_for", lambda *_: "waits for b")
    checkpoint = checkpoint_of(Counters(goal=3), goal_of("g2", GoalStatus.PENDING), goal_of("g3", error="E"))
    assert hosts.view_goal(checkpoint, OBSERVED, GoalId("g2")).message == "waits for b"
    ended = hosts.view_goal(checkpoint, OBSERVED, GoalId("g3"))
    assert (ended.status, ended.error, ended.message) == (GoalStatus.SUCCEEDED, "E", "")
    with pytest.raises(NotFound, match="forgotten"):
        hosts.view_goal(checkpoint, OBSERVED, G1)
    for never in ("g4", "g0", "x" * 10_000):
        with pytest.raises(NotFound, match="never given") as refused:
            hosts.view_goal(checkpoint, OBSERVED, GoalId(never))
        assert len(str(refused.value)) < 200


def test_a_pending_goal_says_what_it_waits_for() -> None:
    waiting = replica_of(2, V1, ReplicaState.SHOULD_START, None, message="needs 4 CPU")
    pending = goal_of(status=GoalStatus.PENDING)
    checkpoint = checkpoint_of(backend_of(V1), pending, replica_of(1, V1), waiting)
    message = hosts.view_goal(checkpoint, OBSERVED, G1).message
    assert "1 of 2 replicas" in message
    assert "needs 4 CPU" in message


def test_pages_hold_every_name_once_and_in_order() -> None:
    tags = [BackendTag(f"default/n{i:02}") for i in range(25)]
    checkpoint = checkpoint_of(*(backend_of(V1, tag) for tag in tags))
    seen: list[str] = []
    while True:
        page = backends.view_backends(checkpoint, PagedQuery(limit=10, after=seen[-1] if seen else ""))
        seen += [view.backend_tag for view in page]
        if len(page) < 10:
            break
    assert seen == tags


@pytest.mark.parametrize("limit", [0, -1, PAGE_LIMIT_MAX + 1, 10**50])
def test_a_page_has_a_limit(limit: int) -> None:
    with pytest.raises(BadField) as refused:
        deployments.view_endpoints(checkpoint_of(), PagedQuery(limit=limit))
    assert refused.value.field == "limit"
    assert len(str(refused.value)) < 100


def test_a_page_of_deployments_counts_only_what_is_shown() -> None:
    gone = [deployment_of(BackendTag(f"default/b{i}"), ended_at=NOW, ended_as=V1) for i in range(3)]
    there = [p for t in ("default/a", "default/c") for p in (deployment_of(t), backend_of(V1, BackendTag(t)))]
    checkpoint = checkpoint_of(*gone, *there)
    page = deployments.view_deployments(checkpoint, PagedQuery(limit=2))
    assert [view.name for view in page] == ["default/a", "default/c"]
    assert deployments.view_deployments(checkpoint, with_replicas=False)[0].replicas == []


def test_replicas_are_counted_in_every_state() -> None:
    other = BackendTag("default/b")
    checkpoint = checkpoint_of(backend_of(V1), *WHOLE, backend_of(V1, other)).applied(
        ObjectChanges((), ((ObjectKind.GOAL, "g1"),))
    )
    counts = {(tag, state): count for tag, state, count in backends.count_replicas(checkpoint)}
    assert counts.pop((TAG, ReplicaState.RUNNING)) == 2
    assert set(counts.values()) == {0}
    assert len(counts) == 2 * (len(ReplicaState) - 1) - 1


def test_everything_seen_can_be_sent() -> None:
    checkpoint = checkpoint_of(backend_of(V1), *WHOLE)
    everything = [
        backends.view_backends(checkpoint),
        deployments.view_endpoints(checkpoint),
        deployments.view_snapshot(checkpoint),
    ]
    assert b"default/a" in msgspec.json.encode(everything)


# What a command is said to do before it is made.


START, STOP, RECONFIGURE = PlannedAction.START, PlannedAction.STOP, PlannedAction.RECONFIGURE
V1_PAIR = get_version(num_replicas=3)
RUNNING = [replica_of(n, V1_PAIR) for n in (1, 2, 3)]


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
    return checkpoint_of(backend_of(V1_PAIR), deployment_of(), endpoint_of(), goal_of(), *RUNNING, *others)


def test_nothing_to_do_is_said() -> None:
    assert plan(running()) == PlanView(updating=False, replicas=[], notes=[])


def test_a_new_deployment_starts_its_replicas() -> None:
    view = plan(checkpoint_of(), backend_of(V1_PAIR, last_good=None), deployment_of(), endpoint_of())
    assert told(view) == [(START, None, "the deployment is new")] * 3
    assert view.notes == [
        "the endpoint default/a is made at /a: it sends to default/a 100 %",
        "default/a: there is room for 3 new replicas: 3 on host-1",
    ]
    (replica, *_) = plan(checkpoint_of(), backend_of(V1_PAIR, last_good=None)).replicas
    assert replica.why == "the backend is new"


def test_a_change_of_the_code_replaces_every_replica_and_says_what_changes() -> None:
    v2 = get_version(2, version="v2", path="m:B", cpus=2, num_replicas=3)
    view = plan(running(), backend_of(v2, last_good=V1_PAIR))
    why = "version v1 → v2; the code changes: import_path m:A → m:B, ray_actor_options.num_cpus 1 → 2"
    assert told(view) == [(START, None, why)] * 3 + [(STOP, f"default/a#{n}", why) for n in (1, 2, 3)]
    unnamed = get_version(2, version=None, num_replicas=3)
    before = checkpoint_of(backend_of(msgspec.structs.replace(V1_PAIR, version=None)), *RUNNING)
    assert {r.why for r in plan(before, backend_of(unnamed)).replicas} == {
        "the code may have changed: no version is named"
    }


def test_values_that_may_be_large_or_secret_are_not_repeated() -> None:
    code = ReplicaConfig(import_path="m:A", init_kwargs={"password": "hunter2"})
    v2 = msgspec.structs.replace(V1_PAIR, code_version=2, config_version=2, replica_config=code)
    (replica, *_) = plan(running(), backend_of(v2)).replicas
    assert replica.why == "the code changes: init_kwargs changes"


def test_a_changed_user_config_reconfigures_in_place() -> None:
    v2 = get_version(1, 2, num_replicas=3, user_config={"x": 1}, max_concurrent_queries=5)
    waiting = replica_of(4, V1_PAIR, ReplicaState.SHOULD_START, None)
    before = checkpoint_of(waiting, replica_of(3, V1_PAIR, ReplicaState.STOPPING), base=running())
    view = plan(before, backend_of(v2))
    why = "max_concurrent_queries 100 → 5, user_config changes"
    assert told(view) == [(RECONFIGURE, "default/a#1", why), (RECONFIGURE, "default/a#2", why)]
    assert (view.updating, view.notes) == (True, [])


def test_more_replicas_are_started_and_what_is_missing_anyway_is_told_apart() -> None:
    v5 = msgspec.structs.replace(
        V1_PAIR, backend_config=msgspec.structs.replace(V1_PAIR.backend_config, num_replicas=5)
    )
    assert told(plan(running(), backend_of(v5))) == [(START, None, "num_replicas 3 → 5")] * 2
    before = checkpoint_of(backend_of(V1_PAIR), *RUNNING[:1])
    assert Counter(r.why for r in plan(before, backend_of(v5)).replicas) == {
        "num_replicas 3 → 5": 2,
        "is missing already, whatever the command changes": 2,
    }


def test_scaling_down_gives_up_what_serves_least_then_the_newest() -> None:
    v1 = get_version(num_replicas=6)
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
        fewer = get_version(num_replicas=num)
        view = plan(before, backend_of(fewer))
        assert {r.why for r in view.replicas} == {f"num_replicas 6 → {num}"}
        given_up.append([r.replica_tag[-1] for r in view.replicas if r.replica_tag])
    assert given_up[-1] == ["5", "4", "2", "6", "3", "1"]
    assert [len(g) for g in given_up] == [1, 2, 3, 4, 5, 6]


def test_a_deployment_that_goes_away_stops_everything() -> None:
    gone: tuple[Key, ...] = ((ObjectKind.ENDPOINT, TAG),)
    before = running(replica_of(4, V1_PAIR, ReplicaState.STOPPING))
    view = plan(before, backend_of(V1_PAIR, deleting=True), deletes=gone)
    assert told(view) == [(STOP, f"default/a#{n}", "the deployment goes away") for n in (1, 2, 3)]
    assert view.notes == ["the endpoint default/a goes away, and with it its route /a"]
    deleting = checkpoint_of(backend_of(V1_PAIR, deleting=True), *RUNNING)
    assert plan(deleting, backend_of(V1_PAIR, deleting=True, force_kill=True)).replicas == []


def test_a_drained_host_gives_up_its_replicas_and_new_ones_are_started_elsewhere() -> None:
    before = running(replica_of(1, V1_PAIR, tag=BackendTag("default/b"), host="host-2"))
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
    light = get_version(num_replicas=3, max_queued_requests=5, on_failure="go_back")
    view = plan(running(), backend_of(light))
    assert (view.updating, view.replicas) == (True, [])
    assert view.notes == [
        "default/a: max_queued_requests 1000 → 5, on_failure keep → go_back; no replica is touched"
    ]


def test_replicas_kept_from_a_failed_update_stay_unless_the_command_gives_them_up() -> None:
    failed = get_version(2, version="v2", num_replicas=3)
    before = checkpoint_of(backend_of(V1_PAIR, retained=failed), *RUNNING[:2], replica_of(4, failed))
    light = msgspec.structs.replace(
        V1_PAIR, backend_config=msgspec.structs.replace(V1_PAIR.backend_config, max_queued_requests=1)
    )
    assert plan(before, backend_of(light, retained=failed)).replicas == []
    v3 = get_version(3, version="v3", num_replicas=3)
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
    running = checkpoint_of(
        msgspec.structs.replace(first, last_good=first.target), backend_of(V1_PAIR), *RUNNING
    )
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
    before = running(draining, *(replica_of(n, V1_PAIR, host="host-2") for n in (2, 3)))
    v4 = get_version(num_replicas=4)
    assert told(plan(before, backend_of(v4))) == [
        (START, None, "instead of one on a host that is drained"),
        (START, None, "instead of one on a host that is drained"),
        (START, None, "num_replicas 3 → 4"),
        (STOP, "default/a#2", "the host host-2 is drained"),
        (STOP, "default/a#3", "the host host-2 is drained"),
    ]
    v1 = get_version(num_replicas=1)
    assert Counter(r.action for r in plan(before, backend_of(v1)).replicas) == {STOP: 2}


def test_what_has_no_room_is_told_with_the_reason() -> None:
    v5 = get_version(num_replicas=5)
    assert plan(running(), backend_of(v5), cpus=1).notes == [
        (
            "default/a: there is room for 1 of 2 new replicas (1 on host-1); the others wait: "
            "needs 1 CPU (the freest host has 0)"
        )
    ]
    v2 = get_version(2, num_replicas=3, cpus=2)
    (note,) = plan(running(), backend_of(v2), cpus=1).notes
    assert note == (
        "default/a: there is room for 0 of 3 new replicas; the others wait, also for the room of those that stop: "
        "needs 2 CPU (the freest host has 1)"
    )
    (note,) = plan(running(), backend_of(v5), hosts=()).notes
    assert note.endswith("the others wait: waits for a replica host: none is live")


def test_the_new_replicas_of_several_backends_share_the_room() -> None:
    tags = [BackendTag("default/b"), BackendTag("default/c")]
    made = [backend_of(get_version(num_replicas=4), tag, last_good=None) for tag in tags]
    first, second = plan(checkpoint_of(), *made, hosts=("host-1", "host-2"), cpus=3).notes
    assert first == "default/b: there is room for 4 new replicas: 2 on host-1, 2 on host-2"
    assert "there is room for 2 of 4 new replicas (1 on host-1, 1 on host-2)" in second


def test_an_answer_is_bounded() -> None:
    view = plan(checkpoint_of(), backend_of(get_version(num_replicas=10_000), last_good=None))
    assert len(view.replicas) == forecasting.PLANNED_MAX
    assert view.notes[0] == (
        "only the first 1000 of 10000 replicas are named: 10000 to start, 0 to stop, 0 to reconfigure"
    )
    tags = [BackendTag(f"default/n{i}") for i in range(3_000)]
    before = checkpoint_of(*(backend_of(get_version(num_replicas=0), tag) for tag in tags))
    view = plan(before, deletes=tuple((ObjectKind.BACKEND, tag) for tag in tags))
    assert len(view.notes) == forecasting.NOTES_MAX + 1
    assert view.notes[-1] == "and 2700 more notes"
    assert len(msgspec.json.encode(view)) < 1_000_000
