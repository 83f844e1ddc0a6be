"""Whose load is to be read, and who must have been heard for a reading to count.

Why the expectation comes from the controller: a proxy that nobody scrapes leaves no trace in what was scraped, and
its waiting requests would silently be missing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from serve_common.names import BackendTag, HostId, ProxyId
from serve_controller.core.autoscaling.values import LoadAsk, Targets
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.observed import HostStatus, ObservedState, host_status, is_proxy_live
from serve_controller.core.transitions import ROUTED

NEWCOMER_S: Final = 20.0
"""A younger process need not have been scraped: Prometheus finds it within seconds, and it has borne little yet."""


def autoscaled(checkpoint: Checkpoint) -> list[BackendTag]:
    """Backends whose number of replicas follows their load now, in order."""
    return sorted(tag for tag, backend in checkpoint.backends.items() if backend.autoscaling is not None)


def asks_of(
    checkpoint: Checkpoint, observed: ObservedState, tags: Iterable[BackendTag], now: float
) -> list[LoadAsk]:
    """What to read of these backends; of those that are not autoscaled (any more), nothing."""
    proxies = frozenset(
        proxy_id
        for proxy_id, proxy in observed.proxies.items()
        if is_proxy_live(observed, proxy_id, now) and now - proxy.report.started_at >= NEWCOMER_S
    )
    asks = []
    for tag in tags:
        backend = checkpoint.backends.get(tag)
        config = None if backend is None else backend.autoscaling
        if config is not None:
            hosts = _hosts_of(checkpoint, observed, tag, now)
            asks.append(LoadAsk(backend_tag=tag, config=config, proxies=proxies, hosts=hosts))
    return asks


def _hosts_of(
    checkpoint: Checkpoint, observed: ObservedState, tag: BackendTag, now: float
) -> frozenset[HostId]:
    found: set[HostId] = set()
    for replica in checkpoint.replicas_of(tag).values():
        host = None if replica.host_id is None else observed.hosts.get(replica.host_id)
        if host is not None and replica.state in ROUTED and now - host.report.started_at >= NEWCOMER_S:
            found.add(host.report.host_id)
    return frozenset(found)


def targets_of(observed: ObservedState, now: float) -> Targets:
    """Where everybody who was heard of lately can be scraped."""
    proxy_ids: list[ProxyId] = [p for p in observed.proxies if is_proxy_live(observed, p, now)]
    urls = {observed.proxies[proxy_id].report.metrics_url for proxy_id in proxy_ids}
    for host_id, host in observed.hosts.items():
        if host_status(observed, host_id, now) is not HostStatus.LOST:
            urls.add(host.report.metrics_url)
    return Targets(urls=frozenset(urls - {""}))


def num_running(checkpoint: Checkpoint, tag: BackendTag) -> int:
    """Replicas of a backend that take requests."""
    return sum(replica.state in ROUTED for replica in checkpoint.replicas_of(tag).values())
