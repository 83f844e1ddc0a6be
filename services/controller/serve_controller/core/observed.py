"""Observed state: soft, stale by nature, lost with the process and rebuilt from the next reports.

Why folding is pure: a late or duplicate report must not undo a newer one, and that rule is worth testing by itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from enum import Enum
from math import inf
from typing import TypeAlias

import msgspec
from immutables import Map

from serve_common.errors import BadField, LimitReached
from serve_common.names import BackendTag, GoalId, HostId, ProxyId, ReplicaTag
from serve_common.protocol.reports import HostReport, ProxyReport, ReplicaReport
from serve_controller.core.host_load import in_units

HOST_SUSPECT_AFTER_S = 3.0
"""Seconds of silence (three missed reports) after which nothing new is placed on a host."""
HOST_LOST_AFTER_S = 8.0
"""Seconds of silence after which a host's replicas are placed elsewhere: about as long as a host process needs to
restart on a busy machine. More would only delay failover; less would move replicas because of a pause."""
PROXY_LOST_AFTER_S = 5.0
"""Seconds of silence after which goals no longer wait for a proxy."""
GOAL_RESEND_AFTER_S = 1.0
"""Seconds after which a host goal that no report acknowledges is sent again."""
FORGET_AFTER_S = 3600.0
"""Seconds of silence after which a host or proxy is no longer listed."""
IDS_MAX = 20_000
"""Most hosts, and most proxies, that are tracked."""


class IdentityTaken(BadField):
    """A report under the id of a host or proxy of which another incarnation lives."""

    def __init__(self, name: str) -> None:
        super().__init__("incarnation", f"is not the one that {name} belongs to while it lives")


class HostStatus(Enum):
    """Liveness of a host."""

    LIVE = "live"
    LEAVING = "leaving"
    """Shutting down and draining: nothing new is placed there."""
    SUSPECT = "suspect"
    LOST = "lost"


class HostObserved(msgspec.Struct, frozen=True, kw_only=True):
    """A host's newest report, when it was received, and the goal last sent to it."""

    report: HostReport
    last_seen_at: float
    replicas: Mapping[ReplicaTag, ReplicaReport]
    """The report's inventory by tag."""
    units: Mapping[str, int]
    """The report's resources in whole units."""
    sent: tuple[int, int] | None = None
    """(epoch, generation) of the goal last sent in this incarnation."""
    sent_at: float = 0.0


class ProxyObserved(msgspec.Struct, frozen=True, kw_only=True):
    """A proxy's newest report, and when it was received."""

    report: ProxyReport
    last_seen_at: float


GateKey: TypeAlias = tuple[BackendTag, GoalId, str]
"""The backend of a rollout, its goal (that of an application has several), and the name of an external gate."""


class GateSample(msgspec.Struct, frozen=True, kw_only=True):
    """What an external gate last answered."""

    in_force_at: float
    """When the step began that it is of; what was answered before says nothing of it."""
    at: float
    passed: bool | None
    """None: there was no answer."""
    failures: int = 0
    """Bad answers in a row."""
    text: str = ""
    """Why, for people."""


class ObservedState(msgspec.Struct, frozen=True, kw_only=True):
    """Everything observed by this leader."""

    since: float | None
    """Since when the bus has been available without a break: earlier silence means nothing. None while the bus is
    unavailable, when all are silent and none is lost."""
    received_until: float = inf
    """Everything sent before this time has been received: it is the start of the newest completed round trip over the
    bus. Silence counts up to here, so a hanging bus makes no process silent. Infinite where nothing can be late."""
    hosts: Map[HostId, HostObserved] = Map()
    proxies: Map[ProxyId, ProxyObserved] = Map()
    gates: Map[GateKey, GateSample] = Map()
    """The last answers of rollouts' external gates."""
    bucket: Map[str, int] | None = None
    """Snapshot id of each key that the bucket holds; None while it is not known."""


def observe_host(observed: ObservedState, report: HostReport, now: float, holder: str = "") -> ObservedState:
    """Fold in a host's report; a late one changes nothing.

    ``holder``: the recorded holder of the id. Raises `IdentityTaken`, or `LimitReached` for one host too many.
    """
    known = observed.hosts.get(report.host_id)
    if _is_late(observed, report, known, now):
        return observed
    sent, sent_at = None, 0.0
    if known is None or not is_same_incarnation(report, known.report):
        _check_free(observed, report, known, holder, now)
        _check_limit(observed.hosts, report.host_id)
    else:
        sent, sent_at = known.sent, known.sent_at
    host = _host_observed(report, now, known, sent, sent_at)
    return msgspec.structs.replace(observed, hosts=observed.hosts.set(report.host_id, host))


def _host_observed(
    report: HostReport,
    now: float,
    known: HostObserved | None,
    sent: tuple[int, int] | None,
    sent_at: float,
) -> HostObserved:
    """Build the new observation. Unchanged parts are shared with the known one: most reports bring nothing new."""
    same_replicas = known is not None and known.report.replicas == report.replicas
    same_resources = known is not None and known.report.resources == report.resources
    return HostObserved(
        report=report,
        last_seen_at=now,
        replicas=known.replicas
        if known is not None and same_replicas
        else {replica.replica_tag: replica for replica in report.replicas},
        units=known.units
        if known is not None and same_resources
        else {name: in_units(amount) for name, amount in report.resources.items()},
        sent=sent,
        sent_at=sent_at,
    )


def holder_digest(report: HostReport | ProxyReport) -> str:
    """The recorded holder of an id: a digest of the incarnation, a secret that authenticates reports."""
    return hashlib.blake2b(report.incarnation.encode(), digest_size=16).hexdigest()


def is_same_incarnation(report: HostReport | ProxyReport, known: HostReport | ProxyReport) -> bool:
    """Whether both are of one incarnation; the start time must match too."""
    return report.incarnation == known.incarnation and report.started_at == known.started_at


def _is_late(
    observed: ObservedState,
    report: HostReport | ProxyReport,
    known: HostObserved | ProxyObserved | None,
    now: float,
) -> bool:
    """Whether a newer report is known, of the same incarnation or of a later one that leaves."""
    if known is None:
        return False
    if is_same_incarnation(report, known.report):
        return report.sequence < known.report.sequence
    return (
        known.report.leaving
        and report.started_at <= known.report.started_at
        and not _is_silent(observed, known, HOST_SUSPECT_AFTER_S, now)
    )


def _check_free(
    observed: ObservedState,
    report: HostReport | ProxyReport,
    known: HostObserved | ProxyObserved | None,
    holder: str,
    now: float,
) -> None:
    """Check that an incarnation may take over an id: the holder is leaving, is silent, or is itself.

    Reports of holders are folded in first, so the known report may have been received after ``report``. Once the holder
    is silent, start times do not matter: a machine's clock may have been set back.
    """
    has_left = known is not None and known.report.leaving and known.last_seen_at <= now
    is_free = has_left or (known is None and holder in ("", holder_digest(report)))
    if not is_free and not _is_silent(observed, known, HOST_SUSPECT_AFTER_S, now):
        raise IdentityTaken(report.host_id if isinstance(report, HostReport) else report.proxy_id)


def _check_limit(known_ids: Map[HostId, HostObserved] | Map[ProxyId, ProxyObserved], name: str) -> None:
    if name not in known_ids and len(known_ids) >= IDS_MAX:
        raise LimitReached(f"{IDS_MAX} ids are known, and {name!r} would be one more")


def observe_proxy(
    observed: ObservedState, report: ProxyReport, now: float, holder: str = ""
) -> ObservedState:
    """Fold in a proxy's report, with the arguments and errors of `observe_host`."""
    known = observed.proxies.get(report.proxy_id)
    if _is_late(observed, report, known, now):
        return observed
    if known is None or not is_same_incarnation(report, known.report):
        _check_free(observed, report, known, holder, now)
        _check_limit(observed.proxies, report.proxy_id)
    proxy = ProxyObserved(report=report, last_seen_at=now)
    return msgspec.structs.replace(observed, proxies=observed.proxies.set(report.proxy_id, proxy))


def observe_sent(
    observed: ObservedState, host_id: HostId, goal: tuple[int, int], now: float
) -> ObservedState:
    """Record that a goal was sent to a host."""
    known = observed.hosts.get(host_id)
    if known is None:
        return observed
    host = msgspec.structs.replace(known, sent=goal, sent_at=now)
    return msgspec.structs.replace(observed, hosts=observed.hosts.set(host_id, host))


def observe_bucket(observed: ObservedState, bucket: Map[str, int] | None) -> ObservedState:
    """Record the content of the bucket."""
    return msgspec.structs.replace(observed, bucket=bucket)


def observe_gates(
    observed: ObservedState, samples: Mapping[GateKey, GateSample], current: Collection[GateKey]
) -> ObservedState:
    """Fold in new answers, and drop those of gates that are not among ``current``."""
    gates = observed.gates
    for key in [key for key in gates if key not in current]:
        gates = gates.delete(key)
    gates = gates.update({key: sample for key, sample in samples.items() if key in current})
    return msgspec.structs.replace(observed, gates=gates)


def drop_silent(observed: ObservedState, now: float) -> ObservedState:
    """Drop hosts and proxies that were silent for `FORGET_AFTER_S`, so that the state stays bounded."""
    hosts, proxies = observed.hosts, observed.proxies
    for host_id, host in observed.hosts.items():
        if now - host.last_seen_at >= FORGET_AFTER_S:
            hosts = hosts.delete(host_id)
    for proxy_id, proxy in observed.proxies.items():
        if now - proxy.last_seen_at >= FORGET_AFTER_S:
            proxies = proxies.delete(proxy_id)
    return msgspec.structs.replace(observed, hosts=hosts, proxies=proxies)


def observe_break(observed: ObservedState, since: float | None) -> ObservedState:
    """Record that the bus became unavailable (None) or available again."""
    return msgspec.structs.replace(observed, since=since)


def observe_round_trip(observed: ObservedState, started_at: float) -> ObservedState:
    """Record that the round trip over the bus that began at ``started_at`` ended."""
    return msgspec.structs.replace(observed, received_until=started_at)


def has_passed(observed: ObservedState, at: float, now: float) -> bool:
    """Whether ``at`` has passed and everything sent before it has been received."""
    return min(now, observed.received_until) >= at


def _is_silent(
    observed: ObservedState, known: HostObserved | ProxyObserved | None, after_s: float, now: float
) -> bool:
    """Whether `silent_at` has passed. Uses the same sum: other rounding would miss the due time."""
    at = silent_at(observed, known, after_s)
    return at is not None and has_passed(observed, at, now)


def silent_at(
    observed: ObservedState, known: HostObserved | ProxyObserved | None, after_s: float
) -> float | None:
    """When a process will have been silent for ``after_s``; None while the bus is unavailable."""
    if observed.since is None:
        return None
    return after_s + (observed.since if known is None else max(known.last_seen_at, observed.since))


def host_status(observed: ObservedState, host_id: HostId, now: float) -> HostStatus:
    """The host's status now. One that never reported is SUSPECT until `HOST_LOST_AFTER_S` is over, then LOST."""
    host = observed.hosts.get(host_id)
    if _is_silent(observed, host, HOST_LOST_AFTER_S, now):
        return HostStatus.LOST
    if host is None or _is_silent(observed, host, HOST_SUSPECT_AFTER_S, now):
        return HostStatus.SUSPECT
    return HostStatus.LEAVING if host.report.leaving else HostStatus.LIVE


def is_proxy_live(observed: ObservedState, proxy_id: ProxyId, now: float) -> bool:
    """Whether goals wait for the proxy. One that has not reported to this leader is live until it would be lost."""
    proxy = observed.proxies.get(proxy_id)
    is_leaving = proxy is not None and proxy.report.leaving
    return not is_proxy_silent(observed, proxy, now) and not is_leaving


def is_proxy_silent(observed: ObservedState, proxy: ProxyObserved | None, now: float) -> bool:
    """Whether a proxy counts as lost."""
    return _is_silent(observed, proxy, PROXY_LOST_AFTER_S, now)
