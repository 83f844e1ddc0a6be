"""What the autoscaling policy sees, remembers and says, and whose load is to be read for it."""

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
    """The load of one backend, as one look at a source found it."""

    at: float
    """Of the newest sample in it, seconds since 1970."""
    seen: float | None
    """Requests that replicas work on plus those that wait, over `look_back_period_s` by `aggregation_function`; or
    what the query gave. None: not known, and `missing` says why."""
    burst: float | None = None
    """The same, averaged over `panic_window_s`; None where that is not known (a query has none)."""
    queued: float = 0.0
    """Of `seen`: those that waited in routers."""
    source: str = ""
    """``prometheus`` or ``scrape``."""
    over_s: float | None = None
    """Over how long `seen` really was seen: shorter than `look_back_period_s` soon after a start, longer where
    Prometheus scrapes too seldom. None: as asked."""
    missing: str = ""
    """Why `seen` is None, for people: what was not scraped, is stale, or gave no number."""


Series = Sequence[LoadSample]
"""The latest readings, the oldest first; never empty when a policy is asked. At least those of the look-back period."""


class ScalingState(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy remembers between two decisions. Soft: a new leader begins with an empty one, which only delays."""

    up_since: float | None = None
    """Since when more have been wanted without a break; None while not."""
    down_since: float | None = None
    zero_since: float | None = None
    """Since when the last replica has not been wanted."""
    panic_until: float | None = None
    last_up_at: float | None = None
    """When it last decided on more."""
    last_down_at: float | None = None
    decided: int | None = None
    """What it came to. Another number of replicas next time is somebody else's doing: all waiting begins anew."""
    fewer: tuple[tuple[int, float], ...] = ()
    """Each (n, t): fewer than n have been wanted since t without a break; see `waits`. Never more than 32."""
    known_at: float | None = None
    """When the load was known last."""
    is_unknown: bool = False
    """Whether it was not known at the last decision."""
    settled_at: float | None = None
    """When all replicas were seen running that it then decided on; None while they are not."""
    policy_state: dict[str, Any] = {}
    """Of the user's function."""


class ScalingDecisionKind(Enum):
    """What a decision came to."""

    STEADY = "steady"
    """As many as are wanted."""
    WAITS_UP = "waits_up"
    """More are wanted; `upscale_delay_s` is not over."""
    WAITS_DOWN = "waits_down"
    UP = "up"
    DOWN = "down"
    PANIC = "panic"
    """Added at once, because the load is a multiple of what the replicas bear."""
    HELD = "held"
    """Nothing is done because the load is not known, or because a panic is not over."""
    WOKEN = "woken"
    """From zero, by a request that waits."""


class ScalingInput(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about a backend that a decision depends on, but its load and the time."""

    config: AutoscalingConfig
    num_replicas: int
    """As it was decided last."""
    num_running: int
    """Replicas that take requests now."""
    asked: int | None = None
    """What the user's function said; None for the default policy."""
    asked_state: dict[str, Any] | None = None
    """And what it wants to be given next time."""


class ScalingDecision(msgspec.Struct, frozen=True, kw_only=True):
    """How many replicas there shall be, and why."""

    target: int
    state: ScalingState
    verdict: ScalingDecisionKind
    seen: float | None
    wanted: float | None
    """What the load alone comes to, before limits, factors and delays; None where it is not known."""
    why: str
    """For people, in one line: what was seen and why it moved or held."""


class LoadAsk(msgspec.Struct, frozen=True, kw_only=True):
    """Whose load is to be read, and who must have been heard for it to count."""

    backend_tag: BackendTag
    config: AutoscalingConfig
    proxies: frozenset[ProxyId]
    """Every live proxy: one that was not scraped may hold waiting requests."""
    hosts: frozenset[HostId]
    """Every host that runs a replica of it."""
    num_replicas: int = 0
    """So many replicas must be on the pages of hosts: one that is cut off is on none, and its load would be missing
    without a word."""
    began_at: Mapping[str, float] = {}
    """When the processes of these proxies and hosts began, seconds since 1970, where it is known: what has just begun
    bore nothing before, so that nobody needs to have scraped it then."""


class Targets(msgspec.Struct, frozen=True, kw_only=True):
    """Where the services' metrics are, by what they say of themselves in their reports."""

    urls: frozenset[str]


class ScalingStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What the last look at one backend found and came to."""

    decision: ScalingDecision
    decided_at: float
    source: str = ""
    """Of the newest reading."""
    read_at: float | None = None
    """When the newest reading that could be used was taken; None before the first."""


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
