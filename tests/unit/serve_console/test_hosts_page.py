"""The page of hosts and proxies: what each host runs, how full it is, and who is behind."""

from __future__ import annotations

from typing import Any

import msgspec

from serve_common.api.views import (
    DeploymentStatus,
    DeploymentView,
    GoalStatus,
    HostView,
    ProxyView,
    ReplicaView,
    StatusView,
)
from serve_common.config.backend import BackendConfig, RayActorOptions, ReplicaConfig
from serve_common.names import GoalId
from serve_console.core.hosts_page import HostsPage, build_hosts_page, describe_age
from serve_console.core.system import NOTHING_READ


def deployment(name: str, replicas: list[ReplicaView], **options: Any) -> DeploymentView:
    return DeploymentView(
        name=name, status=DeploymentStatus.HEALTHY, message="", route_prefix=None, methods=[], version=None,
        code_version=1, backend_config=BackendConfig(), goal_id=GoalId("g"), goal_status=GoalStatus.SUCCEEDED,
        replica_config=ReplicaConfig(import_path="m:M", ray_actor_options=RayActorOptions(**options)),
        replicas=replicas,
    )  # fmt: skip


def replica(tag: str, host: str | None, state: str = "running", message: str = "") -> ReplicaView:
    return ReplicaView(replica_tag=tag, state=state, host_id=host, version=None, message=message)


def host(name: str, **more: Any) -> HostView:
    fields: dict[str, Any] = {
        "status": "live", "report_age_s": 0.4, "resources": {"memory": 2.0**31, "CPU": 4.0}, "num_replicas": 3,
    }  # fmt: skip
    return HostView(host_id=name, **{**fields, **more})


def page(deployments: list[DeploymentView], hosts: list[HostView], proxies: list[ProxyView]) -> HostsPage:
    status = StatusView(
        controller_id="c1", epoch=3, store_available=True, snapshot_id=9, deployments=deployments, hosts=hosts,
        proxies=proxies,
    )  # fmt: skip
    return build_hosts_page(msgspec.structs.replace(NOTHING_READ, status=status))


def test_a_host_uses_what_its_replicas_reserve() -> None:
    replicas = [replica("default/a#1", "h1"), replica("default/a#2", "h1"), replica("default/a#3", "h2")]
    views = [
        deployment("default/a", replicas, num_cpus=1.5, memory=2.0**30),
        deployment("default/b", [replica("default/b#1", "h1", "starting")], num_cpus=1),
    ]

    [first, second] = page(views, [host("h2", num_replicas=3), host("h1", num_replicas=3)], []).hosts

    assert [(each.name, each.used, each.total, each.percent) for each in first.resources] == [
        ("CPU", "4", "4", 100),
        ("Memory", "2.0 GiB", "2.0 GiB", 100),
    ]
    assert [(group.title, group.dots) for group in first.groups] == [
        ("a", [("a#1", "running"), ("a#2", "running")]),
        ("b", [("b#1", "starting")]),
    ]
    assert (first.unknown, second.unknown) == (0, 2)


def test_replicas_of_a_rollout_are_named_where_they_run() -> None:
    judged = [replica("default/a--canary#1", "h1"), replica("default/a--baseline#1", None, "should_start")]
    view = msgspec.structs.replace(
        deployment("default/a", [replica("default/a#1", "h1")], num_cpus=1), rollout_replicas=judged
    )

    shown = page([view], [host("h1", num_replicas=2)], [])

    [card] = shown.hosts
    assert [(group.title, group.dots, group.href) for group in card.groups] == [
        ("a", [("a#1", "running")], "/deployments/default/a"),
        ("a--canary", [("a--canary#1", "running")], "/rollouts/default/a"),
    ]
    assert card.unknown == 0
    assert [(each.title, each.href) for each in shown.waiting] == [("a--baseline#1", "/rollouts/default/a")]


def test_replicas_without_a_host_are_listed_with_why_they_wait() -> None:
    replicas = [
        replica("default/a#1", "h1"),
        replica("default/a#2", None, "should_start", "needs 1 CPU"),
        replica("default/a#3", None, "stopping"),
    ]

    view = page([deployment("default/a", replicas)], [host("h1")], [])

    assert [(each.title, each.why) for each in view.waiting] == [("a#2", "needs 1 CPU")]


def test_a_proxy_says_how_far_behind_it_is() -> None:
    def proxy(name: str, snapshot_id: int) -> ProxyView:
        return ProxyView(
            proxy_id=name, status="live", report_age_s=0.2, address="h:1", applied_snapshot_id=snapshot_id
        )

    assert [each.behind for each in page([], [], [proxy("p1", 9), proxy("p2", 7)]).proxies] == [0, 2]


def test_a_draining_host_says_so() -> None:
    [card] = page([], [host("h1", draining=True, num_replicas=0)], []).hosts

    assert (card.status, card.status_text) == ("draining", "drained")


def test_reports_that_keep_coming_change_nothing_of_the_page() -> None:
    pages = [page([], [host("h1", report_age_s=age)], []) for age in (0.1, 0.9, 2.4)]

    assert pages[0] == pages[1] == pages[2]
    assert [describe_age(age) for age in (0.0, 5.0, 40.0, 200.0, 7300.0)] == [
        "just now", "some seconds ago", "over 30 s ago", "over 3 min ago", "over 2 h ago",
    ]  # fmt: skip


def test_nothing_is_shown_before_anything_was_read() -> None:
    view = build_hosts_page(NOTHING_READ)

    assert (view.hosts, view.proxies, view.controller) == ([], [], None)
