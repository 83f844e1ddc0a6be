"""Who was heard of, as callers see it: hosts and proxies."""

from __future__ import annotations

from immutables import Map

from serve_common.wires.queries import PagedQuery
from serve_common.wires.views import HostView, ProxyView
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.observed import ObservedState, host_status, is_proxy_silent
from serve_controller.core.views.paging import ALL, page_of


def view_hosts(
    checkpoint: Checkpoint, observed: ObservedState, now: float, query: PagedQuery = ALL
) -> list[HostView]:
    """All hosts that were heard of lately, in the order of their ids."""
    views = []
    for host_id in page_of(observed.hosts, query):
        host, record = observed.hosts[host_id], checkpoint.hosts.get(host_id)
        views.append(
            HostView(
                host_id=host_id,
                status=host_status(observed, host_id, now).value,
                report_age_s=round(now - host.heard_at, 3),
                resources=host.report.resources,
                num_replicas=len(checkpoint.by_host.get(host_id, Map())),
                draining=record is not None and record.draining,
            )
        )
    return views


def view_proxies(observed: ObservedState, now: float, query: PagedQuery = ALL) -> list[ProxyView]:
    """All proxies that were heard of lately, in the order of their ids."""
    views = []
    for proxy_id in page_of(observed.proxies, query):
        proxy = observed.proxies[proxy_id]
        is_lost = is_proxy_silent(observed, proxy, now)
        status = "lost" if is_lost else "leaving" if proxy.report.leaving else "live"
        views.append(
            ProxyView(
                proxy_id=proxy_id,
                status=status,
                report_age_s=round(now - proxy.heard_at, 3),
                address=proxy.report.address,
                applied_snapshot_id=proxy.report.applied_snapshot_id,
            )
        )
    return views
