"""What callers see."""

from __future__ import annotations

import msgspec
import pytest

from serve_common.api.queries import PAGE_LIMIT_MAX, PagedQuery
from serve_common.api.views import DeploymentStatus, GoalStatus
from serve_common.config.endpoint import HttpOptions
from serve_common.errors import BadField, NotFound
from serve_common.names import BackendTag, GoalId, HostId, ProxyId
from serve_common.protocol.reports import ProxyReport
from serve_controller.core import views
from serve_controller.core.objects import (
    Application,
    ApplicationVersion,
    Counters,
    HostRecord,
    HttpRecord,
    ObjectChanges,
    ObjectKind,
    ReplicaState,
    Revision,
)
from serve_controller.core.observed import PROXY_LOST_AFTER_S, ObservedState, observe_proxy
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

V1 = version_of(num_replicas=2)
WHOLE = (deployment_of(), endpoint_of(), goal_of(), replica_of(1, V1), replica_of(2, V1))
OBSERVED = ObservedState(since=NOW)
UPDATING, HEALTHY, UNHEALTHY = DeploymentStatus.UPDATING, DeploymentStatus.HEALTHY, DeploymentStatus.UNHEALTHY


def test_a_deployment_joins_its_backend_and_endpoint() -> None:
    checkpoint = checkpoint_of(backend_of(V1), *WHOLE)
    view = views.view_deployment(checkpoint, "a")
    assert (view.name, view.status, view.message) == ("default/a", HEALTHY, "")
    assert (view.route_prefix, view.methods, view.version, view.goal_id) == ("/a", ["GET"], "v1", G1)
    assert [(r.replica_tag, r.state, r.version) for r in view.replicas] == [
        ("default/a#1", "running", "v1"),
        ("default/a#2", "running", "v1"),
    ]
    assert (view.started_at, view.ended_at, view.application, view.is_ingress) == (NOW - 100, None, "", False)
    assert views.view_deployments(checkpoint) == [view]


def test_a_backend_without_a_deployment_is_listed_as_a_backend_only() -> None:
    checkpoint = checkpoint_of(backend_of(V1), goal_of())
    assert views.view_deployments(checkpoint, include_deleted=True) == views.view_snapshot(checkpoint) == []
    with pytest.raises(NotFound, match="no deployment 'default/a'"):
        views.view_deployment(checkpoint, "a")
    (view,) = views.view_backends(checkpoint)
    assert (view.backend_tag, view.status, view.message) == (TAG, UNHEALTHY, "0 of 2 replicas serve")
    assert views.view_backend_config(checkpoint, "a").backend_config.num_replicas == 2
    with pytest.raises(NotFound):
        views.view_backend_config(checkpoint, "b")
    with pytest.raises(BadField) as refused:
        views.view_backend_config(checkpoint, "../..")
    assert refused.value.field == "backend_tag"


def test_a_deleted_deployment_is_remembered_and_not_found() -> None:
    gone = deployment_of(ended_at=NOW, ended_as=V1, ended_route="/a")
    checkpoint = checkpoint_of(gone)
    assert views.view_deployments(checkpoint) == []
    (view,) = views.view_deployments(checkpoint, include_deleted=True)
    assert (view.status, view.route_prefix, view.ended_at) == (DeploymentStatus.DELETED, "/a", NOW)
    (short,) = views.view_snapshot(checkpoint)
    assert (short.class_name, short.version, short.route) == ("A", "v1", "/a")
    assert (short.start_time, short.end_time) == (NOW - 100, NOW)
    with pytest.raises(NotFound):
        views.view_deployment(checkpoint, "a")


def test_a_backend_made_under_the_tag_of_a_deleted_deployment_does_not_bring_that_back() -> None:
    gone = deployment_of(ended_at=NOW, ended_as=V1)
    checkpoint = checkpoint_of(gone, backend_of(version_of(version="other")))
    assert views.view_deployments(checkpoint) == []
    assert [v.version for v in views.view_deployments(checkpoint, include_deleted=True)] == ["v1"]
    assert [v.end_time for v in views.view_snapshot(checkpoint)] == [NOW]


def test_the_snapshot_names_class_and_version() -> None:
    version = version_of(version=None, path="pack.mod:Outer.Inner")
    checkpoint = checkpoint_of(backend_of(version), deployment_of(), endpoint_of(route=None))
    (short,) = views.view_snapshot(checkpoint)
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
    view = views.view_deployment(checkpoint, "a")
    assert (view.status, view.message) == (status, message)


def test_a_failed_change_says_what_it_left_behind() -> None:
    v2 = version_of(2, version="v2")
    failed = goal_of(status=GoalStatus.FAILED, error="E: no")
    undone = checkpoint_of(backend_of(V1), *WHOLE, failed)
    assert views.view_deployment(undone, "a").message == "the last change failed and was undone: E: no"
    one_kept = checkpoint_of(backend_of(V1, kept=v2), *WHOLE, replica_of(3, v2), failed)
    view = views.view_deployment(one_kept, "a")
    assert view.message == "the last change failed; 1 replicas of version v2 are kept: E: no"
    assert (view.status, [r.version for r in view.replicas]) == (HEALTHY, ["v1", "v1", "v2"])
    none_serves = checkpoint_of(
        backend_of(V1, kept=v2), *WHOLE, replica_of(3, v2, ReplicaState.STOPPING), failed
    )
    assert "was undone" in views.view_deployment(none_serves, "a").message


def test_an_application_is_as_its_worst_deployment() -> None:
    tags = [BackendTag("shop/x"), BackendTag("shop/y")]
    made = ApplicationVersion(ingress=tags[0], deployments=tags)
    application = Application(name="shop", goal_id=G1, target=made, last_good=made)
    v = version_of()
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
    (view,) = views.view_applications(whole)
    assert (view.name, view.status, view.message, view.route_prefix) == ("shop", HEALTHY, "", "/shop")
    assert (view.ingress, view.deployments) == ("shop/x", ["shop/x", "shop/y"])
    ingresses = {d.name: (d.application, d.is_ingress) for d in views.view_deployments(whole)}
    assert ingresses == {"shop/x": ("shop", True), "shop/y": ("shop", False)}
    one_sick = checkpoint_of(replica_of(1, v, ReplicaState.UNHEALTHY, tag=tags[1]), base=whole)
    (view,) = views.view_applications(one_sick)
    assert (view.status, view.message) == (UNHEALTHY, "shop/y: 0 of 1 replicas serve")
    pending = checkpoint_of(goal_of(status=GoalStatus.PENDING), base=whole)
    assert views.view_applications(pending)[0].status is UPDATING
    failed = checkpoint_of(goal_of(status=GoalStatus.FAILED, error="E: no"), base=whole)
    assert views.view_applications(failed)[0].message == "the last change failed: E: no"
    going = checkpoint_of(msgspec.structs.replace(application, deleting=True), goal_of())
    (view,) = views.view_applications(going)
    assert (view.status, view.route_prefix) == (DeploymentStatus.DELETING, None)


def test_endpoints_show_traffic_and_shadows() -> None:
    endpoint = endpoint_of(traffic={TAG: 0.5, BackendTag("default/b"): 0.5})
    target = msgspec.structs.replace(endpoint.target, shadows={BackendTag("default/c"): 0.1})
    checkpoint = checkpoint_of(
        msgspec.structs.replace(endpoint, target=target), endpoint_of(BackendTag("b/b"))
    )
    first, second = views.view_endpoints(checkpoint)
    assert (first.endpoint_tag, second.endpoint_tag) == ("b/b", "default/a")
    assert (second.traffic, second.shadows) == ({"default/a": 0.5, "default/b": 0.5}, {"default/c": 0.1})


def test_http_options_are_the_defaults_until_they_are_set() -> None:
    assert views.view_http_config(checkpoint_of()) == HttpOptions()
    options = HttpOptions(request_timeout_s=5)
    checkpoint = checkpoint_of(HttpRecord(target=options, last_good=None, goal_id=G1))
    assert views.view_http_config(checkpoint) == options


def test_hosts_and_proxies_are_listed_with_how_they_are_treated() -> None:
    checkpoint = checkpoint_of(
        backend_of(V1), *WHOLE, HostRecord(host_id=HostId("host-2"), generation=1, draining=True)
    )
    observed = observed_hosts("host-2", "host-1")
    hosts = views.view_hosts(checkpoint, observed, NOW)
    assert [(h.host_id, h.status, h.num_replicas, h.draining) for h in hosts] == [
        ("host-1", "live", 2, False),
        ("host-2", "live", 0, True),
    ]
    report = ProxyReport(proxy_id=ProxyId("p"), sequence=1, started_at=NOW, applied_snapshot_id=7)
    observed = observe_proxy(observed, report, NOW)
    (proxy,) = views.view_proxies(observed, NOW)
    assert (proxy.status, proxy.applied_snapshot_id) == ("live", 7)
    assert views.view_proxies(observed, NOW + PROXY_LOST_AFTER_S)[0].status == "lost"


def test_revisions_come_newest_first_and_the_current_is_marked() -> None:
    v2 = version_of(2, version="v2", path="m:B", num_replicas=3)
    made = [
        Revision(backend_tag=TAG, revision=n, at=NOW, goal_id=GoalId(f"g{n}"), version=v, endpoint=e)
        for n, v, e in [(1, V1, None), (2, v2, endpoint_of().target), (10, V1, None)]
    ]
    back = msgspec.structs.replace(v2, config_version=9)  # as a failed change puts it back
    checkpoint = checkpoint_of(backend_of(version_of(3), last_good=back), *made)
    shown = views.view_revisions(checkpoint, "a")
    assert [(r.revision, r.is_current, r.version) for r in shown] == [
        (10, False, "v1"),
        (2, True, "v2"),
        (1, False, "v1"),
    ]
    assert (shown[1].import_path, shown[1].num_replicas, shown[1].route_prefix) == ("m:B", 3, "/a")
    assert [
        r.is_current for r in views.view_revisions(checkpoint_of(backend_of(V1), base=checkpoint), "a")
    ] == [
        True,
        False,
        False,
    ]
    never = checkpoint_of(backend_of(V1, last_good=None))
    assert views.view_revisions(never, "a") == []
    with pytest.raises(NotFound):
        views.view_revisions(never, "b")


def test_an_unknown_goal_is_told_from_a_forgotten_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve_controller.core.views.hosts.waits_for", lambda *_: "waits for b")
    checkpoint = checkpoint_of(Counters(goal=3), goal_of("g2", GoalStatus.PENDING), goal_of("g3", error="E"))
    assert views.view_goal(checkpoint, OBSERVED, GoalId("g2")).message == "waits for b"
    ended = views.view_goal(checkpoint, OBSERVED, GoalId("g3"))
    assert (ended.status, ended.error, ended.message) == (GoalStatus.SUCCEEDED, "E", "")
    with pytest.raises(NotFound, match="forgotten"):
        views.view_goal(checkpoint, OBSERVED, G1)
    for never in ("g4", "g0", "x" * 10_000):
        with pytest.raises(NotFound, match="never given") as refused:
            views.view_goal(checkpoint, OBSERVED, GoalId(never))
        assert len(str(refused.value)) < 200


def test_a_pending_goal_says_what_it_waits_for() -> None:
    waiting = replica_of(2, V1, ReplicaState.SHOULD_START, None, message="needs 4 CPU")
    pending = goal_of(status=GoalStatus.PENDING)
    checkpoint = checkpoint_of(backend_of(V1), pending, replica_of(1, V1), waiting)
    message = views.view_goal(checkpoint, OBSERVED, G1).message
    assert "1 of 2 replicas" in message
    assert "needs 4 CPU" in message


def test_pages_hold_every_name_once_and_in_order() -> None:
    tags = [BackendTag(f"default/n{i:02}") for i in range(25)]
    checkpoint = checkpoint_of(*(backend_of(V1, tag) for tag in tags))
    seen: list[str] = []
    while True:
        page = views.view_backends(checkpoint, PagedQuery(limit=10, after=seen[-1] if seen else ""))
        seen += [view.backend_tag for view in page]
        if len(page) < 10:
            break
    assert seen == tags


@pytest.mark.parametrize("limit", [0, -1, PAGE_LIMIT_MAX + 1, 10**50])
def test_a_page_has_a_limit(limit: int) -> None:
    with pytest.raises(BadField) as refused:
        views.view_endpoints(checkpoint_of(), PagedQuery(limit=limit))
    assert refused.value.field == "limit"
    assert len(str(refused.value)) < 100


def test_a_page_of_deployments_counts_only_what_is_shown() -> None:
    gone = [deployment_of(BackendTag(f"default/b{i}"), ended_at=NOW, ended_as=V1) for i in range(3)]
    there = [p for t in ("default/a", "default/c") for p in (deployment_of(t), backend_of(V1, BackendTag(t)))]
    checkpoint = checkpoint_of(*gone, *there)
    page = views.view_deployments(checkpoint, PagedQuery(limit=2))
    assert [view.name for view in page] == ["default/a", "default/c"]
    assert views.view_deployments(checkpoint, with_replicas=False)[0].replicas == []


def test_replicas_are_counted_in_every_state() -> None:
    other = BackendTag("default/b")
    checkpoint = checkpoint_of(backend_of(V1), *WHOLE, backend_of(V1, other)).applied(
        ObjectChanges((), ((ObjectKind.GOAL, "g1"),))
    )
    counts = {(row.backend_tag, row.state): row.count for row in views.count_replicas(checkpoint)}
    assert counts.pop((TAG, "running")) == 2
    assert set(counts.values()) == {0}
    assert len(counts) == 2 * (len(ReplicaState) - 1) - 1


def test_everything_seen_can_be_sent() -> None:
    checkpoint = checkpoint_of(backend_of(V1), *WHOLE)
    everything = [
        views.view_backends(checkpoint),
        views.view_endpoints(checkpoint),
        views.view_snapshot(checkpoint),
    ]
    assert b"default/a" in msgspec.json.encode(everything)
