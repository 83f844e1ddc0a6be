"""Inputs, state and decisions of the autoscaling policy, and the loads to be read for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, Final

import msgspec

from serve_common.config.autoscaling import AutoscalingConfig
from serve_common.names import BackendTag, HostId, ProxyId
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.observed import HostStatus, ObservedState, host_status, is_proxy_live
from serve_controller.core.transitions import ROUTED


class LoadSample(msgspec.Struct, frozen=True, kw_only=True):
    """The load of one backend, as read from a source at one time."""

    at: float
    """Time of the newest data in it, seconds since 1970."""
    seen: float | None
    """Requests in replicas plus waiting requests, aggregated over `look_back_period_s` by `aggregation_function`; or
    the value of the query. None: not known, and `missing` has the reason."""
    burst: float | None = None
    """The same, averaged over `panic_window_s`; None where not known (a query has none)."""
    queued: float = 0.0
    """The part of `seen` that waited in routers."""
    source: str = ""
    """``prometheus`` or ``scrape``."""
    over_s: float | None = None
    """Actual window of `seen` in seconds: shorter than `look_back_period_s` soon after a start, longer where Prometheus
    scrapes too rarely. None: as requested."""
    missing: str = ""
    """Why `seen` is None, for people: not scraped, stale, or not a number."""


Series = Sequence[LoadSample]
"""The latest samples, the oldest first, at least those of the look-back period; never empty for a policy."""


class ScalingState(msgspec.Struct, frozen=True, kw_only=True):
    """State of a policy between two decisions. Soft: a new leader starts with an empty one, which only delays.

    It is passed through because delays and panics need a memory, and a policy with a hidden one could be neither
    simulated nor compared, nor restarted after a change of leader.
    """

    up_since: float | None = None
    """Since when more replicas have been wanted without a break; None while not."""
    down_since: float | None = None
    zero_since: float | None = None
    """Since when the last replica has not been wanted."""
    panic_until: float | None = None
    last_up_at: float | None = None
    """When it last decided to scale up."""
    last_down_at: float | None = None
    decided: int | None = None
    """The last decision. If the number of replicas differs next time, something else changed it: all delays restart."""
    fewer: tuple[tuple[int, float], ...] = ()
    """Each (n, t): fewer than n have been wanted since t without a break; see `demand.Fewer`. At most 32."""
    known_at: float | None = None
    """When the load was known last."""
    is_unknown: bool = False
    """Whether the load was not known at the last decision."""
    stabilized_at: float | None = None
    """When all replicas of the last scale-up were running; None until then."""
    policy_state: dict[str, Any] = {}
    """State returned by the user's function."""


class ScalingDecisionKind(Enum):
    """Outcome of a decision."""

    STEADY = "steady"
    """As many replicas as wanted."""
    WAITS_UP = "waits_up"
    """More replicas are wanted; `upscale_delay_s` is not over."""
    WAITS_DOWN = "waits_down"
    UP = "up"
    DOWN = "down"
    PANIC = "panic"
    """Scaled up at once, because the load is a multiple of the replicas' capacity."""
    HELD = "held"
    """Not scaled because the load is not known or a panic is not over."""
    WOKEN = "woken"
    """Scaled up from zero because of a waiting request."""


class ScalingInput(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about a backend that a decision depends on, except its load and the time."""

    config: AutoscalingConfig
    num_replicas: int
    """The current target."""
    num_running: int
    """Replicas that take requests now."""
    policy_target: float | None = None
    """Number of replicas returned by the user's function; None for the default policy."""
    new_policy_state: dict[str, Any] | None = None
    """State returned by the user's function; None leaves it unchanged."""


class ScalingDecision(msgspec.Struct, frozen=True, kw_only=True):
    """The number of replicas to run, and why."""

    target: int
    state: ScalingState
    verdict: ScalingDecisionKind
    seen: float | None
    wanted: float | None
    """Replicas for the load alone, before limits, factors and delays; None where the load is not known."""
    why: str
    """Reason in one line, for people: the load and why the number changed or not."""


class LoadRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request for the load of one backend, and the processes that must have been scraped for it to count.

    The controller says which processes to expect: a proxy that is not scraped leaves no trace in the scraped data, and
    its waiting requests would be missing silently.
    """

    backend_tag: BackendTag
    config: AutoscalingConfig
    proxies: frozenset[ProxyId]
    """Every live proxy: one that was not scraped may hold waiting requests."""
    hosts: frozenset[HostId]
    """Every host that runs a replica of it."""
    num_replicas: int = 0
    """Replicas that must be on the hosts' metrics pages: one that is disconnected is on none, and its load would be
    missing silently."""
    started_at: Mapping[str, float] = {}
    """Start times of these proxies and hosts, seconds since 1970, where known: a process had no load before its start,
    so it need not have been scraped then."""


class Targets(msgspec.Struct, frozen=True, kw_only=True):
    """Addresses of the services' metrics, from their reports."""

    urls: frozenset[str]


class ScalingStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The latest decision on one backend, and the load that it was based on."""

    decision: ScalingDecision
    decided_at: float
    source: str = ""
    """Source of the newest load sample."""
    read_at: float | None = None
    """Time of the newest usable load sample; None before the first."""


SCRAPED_AFTER_S: Final = 20.0
"""Seconds after which a serving replica must be on its host's metrics page."""


def autoscaled(checkpoint: Checkpoint) -> list[BackendTag]:
    """Backends with active autoscaling, in order."""
    return sorted(tag for tag, backend in checkpoint.backends.items() if backend.autoscaling is not None)


def build_load_requests(
    checkpoint: Checkpoint, observed: ObservedState, tags: Iterable[BackendTag], now: float
) -> list[LoadRequest]:
    """Load requests for these backends; those that are not (or no longer) autoscaled are left out."""
    proxies = frozenset(p for p in observed.proxies if is_proxy_live(observed, p, now))
    started_at = {str(p): observed.proxies[p].report.started_at for p in proxies}
    started_at |= {str(host_id): host.report.started_at for host_id, host in observed.hosts.items()}
    requests = []
    for tag in tags:
        backend = checkpoint.backends.get(tag)
        config = None if backend is None else backend.autoscaling
        if config is None:
            continue
        routed = [r for r in checkpoint.get_replicas(tag).values() if r.state in ROUTED]
        requests.append(
            LoadRequest(
                backend_tag=tag,
                config=config,
                proxies=proxies,
                hosts=frozenset(
                    r.host_id for r in routed if r.host_id is not None and r.host_id in observed.hosts
                ),
                num_replicas=sum(now - replica.since >= SCRAPED_AFTER_S for replica in routed),
                started_at=started_at,
            )
        )
    return requests


def build_scrape_targets(observed: ObservedState, now: float) -> Targets:
    """Metrics addresses of all live proxies and of all hosts that are not lost."""
    proxy_ids: list[ProxyId] = [p for p in observed.proxies if is_proxy_live(observed, p, now)]
    urls = {observed.proxies[proxy_id].report.metrics_url for proxy_id in proxy_ids}
    for host_id, host in observed.hosts.items():
        if host_status(observed, host_id, now) is not HostStatus.LOST:
            urls.add(host.report.metrics_url)
    return Targets(urls=frozenset(urls - {""}))


def num_running(checkpoint: Checkpoint, tag: BackendTag) -> int:
    """Replicas of a backend that take requests."""
    return sum(replica.state in ROUTED for replica in checkpoint.get_replicas(tag).values())


def unmeasured(request: LoadRequest, measured: int) -> str:
    """Why a load is not known though all services were scraped; empty if it is. ``measured``: replicas found."""
    if measured >= request.num_replicas:
        return ""
    return (
        f"{measured} of {request.num_replicas} replicas are on their hosts' pages of metrics: "
        "the others are cut off from NATS, or from their hosts"
    )
