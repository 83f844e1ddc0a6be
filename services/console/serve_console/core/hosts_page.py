"""What the page of hosts and proxies shows: who runs what, how full each host is, and who is behind."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Final
from urllib.parse import quote

import msgspec

from serve_common.api.views import DeploymentView, HostView, ProxyView, ReplicaView
from serve_common.names import ReplicaTag, parse_backend_tag, short_name
from serve_console.core.system import System

WAITING_MAX: Final = 100
"""Waiting replicas that are listed."""
_MIB: Final = 2**20
_GIB: Final = 2**30


class Resource(msgspec.Struct, frozen=True, kw_only=True):
    """One resource of a host."""

    name: str
    used: str
    total: str
    percent: int
    """Used share, 0 to 100; more than the total is 100."""
    is_full: bool


class HostGroup(msgspec.Struct, frozen=True, kw_only=True):
    """The replicas of one deployment on a host."""

    name: str
    title: str
    href: str
    """Its page; of a canary or a baseline that of the rollout."""
    dots: list[tuple[str, str]]
    """Name and state of each replica."""


class HostCard(msgspec.Struct, frozen=True, kw_only=True):
    """One host."""

    host_id: str
    status: str
    status_text: str
    is_draining: bool
    resources: list[Resource]
    groups: list[HostGroup]
    replicas: int
    unknown: int
    """Replicas placed there that the status does not name."""


class ProxyRow(msgspec.Struct, frozen=True, kw_only=True):
    """One proxy."""

    proxy_id: str
    status: str
    address: str
    snapshot_id: int
    behind: int
    """Snapshots that it has not applied."""
    age: str


class WaitingReplica(msgspec.Struct, frozen=True):
    """A replica that waits for a host."""

    name: str
    title: str
    href: str
    """The page of its deployment or its rollout."""
    why: str


class ControllerView(msgspec.Struct, frozen=True, kw_only=True):
    """The leading controller."""

    controller_id: str
    epoch: int
    snapshot_id: int
    is_store_available: bool
    restored_at: float | None


class HostsPage(msgspec.Struct, frozen=True, kw_only=True):
    """The whole page."""

    hosts: list[HostCard]
    proxies: list[ProxyRow]
    waiting: list[WaitingReplica]
    waiting_count: int
    controller: ControllerView | None


def build_hosts_page(system: System) -> HostsPage:
    """The page as of ``system``."""
    status = system.status
    if status is None:
        return HostsPage(hosts=[], proxies=[], waiting=[], waiting_count=0, controller=None)
    by_name = {view.name: view for view in status.deployments}
    placed: dict[str, list[ReplicaView]] = defaultdict(list)
    waiting = []
    for view in status.deployments:
        for replica in (*view.replicas, *view.rollout_replicas):
            if replica.host_id is not None:
                placed[replica.host_id].append(replica)
            elif replica.state == "should_start":
                waiting.append(_wait(replica, by_name))
    return HostsPage(
        hosts=[
            build_host(host, placed.get(host.host_id, []), by_name)
            for host in sorted(status.hosts, key=lambda host: host.host_id)
        ],
        proxies=[
            build_proxy(proxy, status.snapshot_id)
            for proxy in sorted(status.proxies, key=lambda proxy: proxy.proxy_id)
        ],
        waiting=waiting[:WAITING_MAX],
        waiting_count=len(waiting),
        controller=ControllerView(
            controller_id=status.controller_id,
            epoch=status.epoch,
            snapshot_id=status.snapshot_id,
            is_store_available=status.store_available,
            restored_at=status.store_restored_at,
        ),
    )


def build_host(
    host: HostView, replicas: list[ReplicaView], deployments: Mapping[str, DeploymentView]
) -> HostCard:
    """The card of one host; what is used is what its replicas reserve."""
    groups: dict[str, list[tuple[str, str]]] = defaultdict(list)
    used: dict[str, float] = defaultdict(float)
    for replica in replicas:
        name = parse_backend_tag(ReplicaTag(replica.replica_tag))
        groups[name].append((short_name(replica.replica_tag), replica.state))
        for resource, amount in _find_reserved(name, deployments).items():
            used[resource] += amount
    return HostCard(
        host_id=host.host_id,
        status="draining" if host.draining and host.status == "live" else host.status,
        status_text=_describe_host(host),
        is_draining=host.draining,
        resources=[
            build_resource(name, used.get(name, 0.0), total)
            for name, total in sorted(host.resources.items(), key=_resource_order)
            if total > 0
        ],
        groups=[
            HostGroup(
                name=name,
                title=short_name(name),
                href=_build_href(name, deployments),
                dots=sorted(dots),
            )
            for name, dots in sorted(groups.items())
        ],
        replicas=len(replicas),
        unknown=max(0, host.num_replicas - len(replicas)),
    )


def build_proxy(proxy: ProxyView, newest: int) -> ProxyRow:
    """The row of one proxy."""
    return ProxyRow(
        proxy_id=proxy.proxy_id,
        status=proxy.status,
        address=proxy.address,
        snapshot_id=proxy.applied_snapshot_id,
        behind=max(0, newest - proxy.applied_snapshot_id),
        age=describe_age(proxy.report_age_s),
    )


def build_resource(name: str, used: float, total: float) -> Resource:
    """One resource; memory is in bytes."""
    share = used / total
    is_bytes = name.endswith("memory")
    return Resource(
        name="Memory" if name == "memory" else name,
        used=_format_bytes(used) if is_bytes else f"{used:g}",
        total=_format_bytes(total) if is_bytes else f"{total:g}",
        percent=min(100, round(share * 100)),
        is_full=share > 0.995,
    )


def describe_age(seconds: float) -> str:
    """The age of a report in words, coarse enough to stay the same while reports come."""
    if seconds < 3:
        return "just now"
    for limit, text in ((8, "some seconds ago"), (30, "over 8 s ago"), (120, "over 30 s ago")):
        if seconds < limit:
            return text
    return f"over {int(seconds // 60)} min ago" if seconds < 3600 else f"over {int(seconds // 3600)} h ago"


def _describe_host(host: HostView) -> str:
    age = describe_age(host.report_age_s)
    if host.status in {"suspect", "lost"}:
        return f"silent; last report {age}"
    if host.status == "leaving":
        return "drains before it ends"
    if host.draining:
        return "drained" if host.num_replicas == 0 else "its replicas move to other hosts"
    return f"last report {age}"


def _wait(replica: ReplicaView, deployments: Mapping[str, DeploymentView]) -> WaitingReplica:
    name = parse_backend_tag(ReplicaTag(replica.replica_tag))
    return WaitingReplica(
        name=replica.replica_tag,
        title=short_name(replica.replica_tag),
        href=_build_href(name, deployments),
        why=replica.message or "waits for a host",
    )


def _build_href(name: str, deployments: Mapping[str, DeploymentView]) -> str:
    if name in deployments:
        return f"/deployments/{quote(name)}"
    return f"/rollouts/{quote(name.rpartition('--')[0])}"


def _find_reserved(name: str, deployments: Mapping[str, DeploymentView]) -> dict[str, float]:
    """What each replica reserves. Canaries and baselines are counted as their deployment's."""
    view = deployments.get(name) or deployments.get(name.rpartition("--")[0])
    if view is None:
        return {}
    options = view.replica_config.ray_actor_options
    return {
        "CPU": options.num_cpus, "GPU": options.num_gpus, "memory": options.memory, **options.resources,
    }  # fmt: skip


def _resource_order(item: tuple[str, float]) -> tuple[int, str]:
    known = ["CPU", "GPU", "memory", "object_store_memory"]
    return (known.index(item[0]) if item[0] in known else len(known), item[0])


def _format_bytes(value: float) -> str:
    if value >= _GIB:
        return f"{value / _GIB:.1f} GiB"
    return f"{value / _MIB:.0f} MiB" if value else "0"
