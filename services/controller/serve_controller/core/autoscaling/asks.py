"""Whose load is to be read, and who must have been heard for a reading to count.

Why the expectation comes from the controller: a proxy that nobody scrapes leaves no trace in what was scraped, and
its waiting requests would silently be missing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from serve_common.names import BackendTag, ProxyId
from serve_controller.core.autoscaling.values import LoadAsk, Targets
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.observed import HostStatus, ObservedState, host_status, is_proxy_live
from serve_controller.core.transitions import ROUTED

MEASURED_AFTER_S: Final = 20.0
"""A replica that serves for so long must be on its host's page, as it was scraped last."""


def autoscaled(checkpoint: Checkpoint) -> list[BackendTag]:
    """Backends whose number of replicas follows their load now, in order."""
    return sorted(tag for tag, backend in checkpoint.backends.items() if backend.autoscaling is not None)


def asks_of(
    checkpoint: Checkpoint, observed: ObservedState, tags: Iterable[BackendTag], now: float
) -> list[LoadAsk]:
    """What to read of these backends; of those that are not autoscaled (any more), nothing."""
    proxies = frozenset(p for p in observed.proxies if is_proxy_live(observed, p, now))
    began_at = {str(p): observed.proxies[p].report.started_at for p in proxies}
    began_at |= {str(host_id): host.report.started_at for host_id, host in observed.hosts.items()}
    asks = []
    for tag in tags:
        backend = checkpoint.backends.get(tag)
        config = None if backend is None else backend.autoscaling
        if config is None:
            continue
        routed = [r for r in checkpoint.replicas_of(tag).values() if r.state in ROUTED]
        asks.append(
            LoadAsk(
                backend_tag=tag,
                config=config,
                proxies=proxies,
                hosts=frozenset(
                    r.host_id for r in routed if r.host_id is not None and r.host_id in observed.hosts
                ),
                num_replicas=sum(now - replica.since >= MEASURED_AFTER_S for replica in routed),
                began_at=began_at,
            )
        )
    return asks


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


def unmeasured(ask: LoadAsk, measured: int) -> str:
    """Why a load is not known though everybody was scraped; empty when that is not so. ``measured``: replicas found."""
    if measured >= ask.num_replicas:
        return ""
    return (
        f"{measured} of {ask.num_replicas} replicas are on their hosts' pages of metrics: "
        "the others are cut off from NATS, or from their hosts"
    )
