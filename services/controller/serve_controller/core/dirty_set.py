"""The set of objects that the next plan must reconcile.

Why: with 10,000 replicas, a plan of everything for each report would take longer than the interval between reports. So
every report, change and timer marks the objects that it may affect, and only those are reconciled. This is only an
optimization: a plan of `EVERYTHING` is always right, the first plan of a term is one, and everything is reconciled
again in turn within two minutes. The simulation checks after each plan that one of everything would have done no more.
"""

from __future__ import annotations

import heapq

import msgspec

from serve_common.names import BackendTag, EndpointTag, HostId, ProxyId
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.objects import (
    Application,
    Backend,
    Capture,
    Deployment,
    EndpointRecord,
    HostRecord,
    ObjectChanges,
    Replica,
    SnapshotRecord,
)
from serve_controller.core.observed import (
    HOST_LOST_AFTER_S,
    HOST_SUSPECT_AFTER_S,
    PROXY_LOST_AFTER_S,
    HostObserved,
    ObservedState,
    ProxyObserved,
    has_passed,
    host_status,
    is_proxy_live,
    silent_at,
)
from serve_controller.core.rollouts.record import Rollout, baseline_tag, canary_tag


class DirtySet(msgspec.Struct, frozen=True, kw_only=True):
    """Objects to reconcile, as sets of names; missing ones are skipped."""

    is_everything: bool = False
    backends: frozenset[BackendTag] = frozenset()
    endpoints: frozenset[EndpointTag] = frozenset()
    hosts: frozenset[HostId] = frozenset()
    proxies: frozenset[ProxyId] = frozenset()
    keys: frozenset[str] = frozenset()
    """Keys of the bucket."""
    has_capacity: bool = False
    """Some host may have gained capacity: retry backends with unplaced replicas."""
    goals: bool = False
    """Pending goals may have progressed by other means than replicas (proxies, the bucket)."""
    gc: bool = False
    """Delete objects that are no longer needed."""


NOTHING = DirtySet()
EVERYTHING = DirtySet(is_everything=True, gc=True)

Subject = tuple[str, str]
"""Subject of a due check: ``backend``, ``host_goal``, ``host`` or ``proxy``, and its name."""


def dirty_by_host_report(before: HostObserved | None, after: HostObserved) -> DirtySet:
    """Objects that a host's newest report may affect."""
    host_id = after.report.host_id
    if before is None or before.report.incarnation != after.report.incarnation:
        return DirtySet(hosts=frozenset({host_id}), has_capacity=True)
    old, new = before.report, after.report
    gained = old.resources != new.resources or old.leaving != new.leaving
    same = old.generation == new.generation and old.epoch == new.epoch and before.replicas is after.replicas
    if same and not gained:
        return NOTHING
    return DirtySet(hosts=frozenset({host_id}), has_capacity=gained)


def dirty_by_proxy_report(before: ProxyObserved | None, after: ProxyObserved) -> DirtySet:
    """Objects that a proxy's newest report may affect."""
    if before is None:
        return DirtySet(proxies=frozenset({after.report.proxy_id}), goals=True)
    old, new = before.report, after.report
    if old.leaving != new.leaving or old.incarnation != new.incarnation:
        return DirtySet(proxies=frozenset({new.proxy_id}), goals=True)
    has_progress = old.applied_snapshot_id != new.applied_snapshot_id or old.http_error != new.http_error
    return DirtySet(goals=True) if has_progress else NOTHING


def dirty_by_changes(before: Checkpoint, after: Checkpoint, changes: ObjectChanges) -> DirtySet:
    """Objects that recorded changes may affect."""
    backends: set[BackendTag] = set()
    endpoints: set[EndpointTag] = set()
    hosts: set[HostId] = set()
    keys: set[str] = set()
    has_capacity = False
    gone = [value for key in changes.deletes if (value := before.lookup(key)) is not None]
    for value in (*changes.puts, *gone):
        match value:
            case Backend():
                backends.add(value.backend_tag)
            case EndpointRecord() | Capture():
                endpoints.add(value.endpoint_tag)
            case Deployment():
                backends.add(value.tag)
            case Application():
                backends.update(value.target.deployments)
            case Rollout():
                tag = value.backend_tag
                backends.update((tag, canary_tag(tag), baseline_tag(tag)))
            case Replica():
                backends.add(value.backend_tag)
                if value.host_id is not None:
                    hosts.add(value.host_id)
            case HostRecord():
                hosts.add(value.host_id)
                was = before.hosts.get(value.host_id)
                if was is None or was.draining != value.draining:
                    has_capacity = True
                    backends.update(r.backend_tag for r in after.by_host.get(value.host_id, {}).values())
            case SnapshotRecord():
                keys.add(value.key)
            case _:
                pass  # the objects that a goal owns are marked by their own changes; the rest affects nothing else
    has_capacity = has_capacity or any(isinstance(value, Replica) for value in gone)
    return DirtySet(
        backends=frozenset(backends),
        endpoints=frozenset(endpoints),
        hosts=frozenset(hosts),
        keys=frozenset(keys),
        has_capacity=has_capacity,
        goals=bool(changes),
    )


class DueChecks:
    """Timers: the earliest due time of each subject. Soft, rebuilt by any full plan."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, Subject]] = []
        self._times: dict[Subject, float] = {}

    def add(self, at: float, subject: Subject) -> None:
        """Schedule a check of ``subject`` at ``at``; an earlier time already scheduled stays."""
        known = self._times.get(subject)
        if known is None or at < known:
            self._times[subject] = at
            heapq.heappush(self._heap, (at, subject))

    def next_at(self) -> float | None:
        """The earliest time, or None."""
        while self._heap and self._times.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now: float) -> list[Subject]:
        """Remove and return every subject that is due, each once."""
        due: list[Subject] = []
        while (at := self.next_at()) is not None and at <= now:
            _, subject = heapq.heappop(self._heap)
            del self._times[subject]
            due.append(subject)
        return due


class SilenceDetector:
    """Detects processes that fell silent or report again, by checking each only when that may have changed."""

    def __init__(self) -> None:
        self._hosts: dict[HostId, object] = {}
        self._proxies: dict[ProxyId, bool] = {}
        self._doubtful: set[Subject] = set()
        """Subjects whose time has come but whose status needs another round trip over the bus."""

    def of_host(
        self, observed: ObservedState, host_id: HostId, now: float, due_checks: DueChecks
    ) -> DirtySet:
        """Check one host now, and schedule the next check."""
        status = host_status(observed, host_id, now)
        known = observed.hosts.get(host_id)
        for after_s in (HOST_SUSPECT_AFTER_S, HOST_LOST_AFTER_S):
            at = silent_at(observed, known, after_s)
            if at is not None and not has_passed(observed, at, now):
                self._schedule(at, ("host", host_id), now, due_checks)
                break
        if self._hosts.get(host_id) is status:
            return NOTHING
        self._hosts[host_id] = status
        return DirtySet(hosts=frozenset({host_id}), has_capacity=True)

    def of_proxy(
        self, observed: ObservedState, proxy_id: ProxyId, now: float, due_checks: DueChecks
    ) -> DirtySet:
        """Check one proxy now, and schedule the next check."""
        is_live = is_proxy_live(observed, proxy_id, now)
        at = silent_at(observed, observed.proxies.get(proxy_id), PROXY_LOST_AFTER_S)
        if at is not None and not has_passed(observed, at, now):
            self._schedule(at, ("proxy", proxy_id), now, due_checks)
        if self._proxies.get(proxy_id) is is_live:
            return NOTHING
        self._proxies[proxy_id] = is_live
        return DirtySet(proxies=frozenset({proxy_id}), goals=True)

    def pop_unverified(self) -> set[Subject]:
        """Remove and return the subjects to check after a round trip over the bus."""
        doubtful, self._doubtful = self._doubtful, set()
        return doubtful

    def _schedule(self, at: float, subject: Subject, now: float, due_checks: DueChecks) -> None:
        if at > now:
            due_checks.add(at, subject)
        else:
            self._doubtful.add(subject)

    def forget(self, host_ids: set[HostId], proxy_ids: set[ProxyId]) -> None:
        """Drop all hosts and proxies but these."""
        self._hosts = {host_id: status for host_id, status in self._hosts.items() if host_id in host_ids}
        self._proxies = {proxy_id: live for proxy_id, live in self._proxies.items() if proxy_id in proxy_ids}


class DirtySets:
    """Accumulates dirty sets until a plan takes them.

    Mutable: thousands of reports may add to it between two plans.
    """

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._backends: set[BackendTag] = set()
        self._endpoints: set[EndpointTag] = set()
        self._hosts: set[HostId] = set()
        self._proxies: set[ProxyId] = set()
        self._keys: set[str] = set()
        self._flags = DirtySet()
        self.is_empty = True

    def add(self, dirty: DirtySet) -> None:
        """Add a dirty set."""
        if dirty is NOTHING:
            return
        self.is_empty = False
        self._backends |= dirty.backends
        self._endpoints |= dirty.endpoints
        self._hosts |= dirty.hosts
        self._proxies |= dirty.proxies
        self._keys |= dirty.keys
        flags = self._flags
        self._flags = DirtySet(
            is_everything=flags.is_everything or dirty.is_everything,
            has_capacity=flags.has_capacity or dirty.has_capacity,
            goals=flags.goals or dirty.goals,
            gc=flags.gc or dirty.gc,
        )

    def take(self) -> DirtySet:
        """Remove and return everything."""
        result = msgspec.structs.replace(
            self._flags,
            backends=frozenset(self._backends),
            endpoints=frozenset(self._endpoints),
            hosts=frozenset(self._hosts),
            proxies=frozenset(self._proxies),
            keys=frozenset(self._keys),
        )
        self._reset()
        return result
