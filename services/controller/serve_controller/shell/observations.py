"""Soft state of a term: reports, bucket, timers, never persisted; and the events that it publishes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import msgspec
from immutables import Map

from serve_common.api.views import EventView
from serve_common.errors import BadField
from serve_common.names import BackendTag, GoalId, HostId, ProxyId
from serve_common.protocol.reports import HostReport, ProxyReport
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.dirty_set import (
    EVERYTHING,
    DirtySet,
    DirtySets,
    DueChecks,
    SilenceDetector,
    dirty_by_host_report,
    dirty_by_proxy_report,
)
from serve_controller.core.events import GOAL, conflict_event, goal_event, goal_progress
from serve_controller.core.objects import HostRecord, ProxyRecord
from serve_controller.core.observed import (
    GateKey,
    GateSample,
    HostObserved,
    IdentityTaken,
    ObservedState,
    ProxyObserved,
    drop_silent,
    holder_digest,
    is_same_incarnation,
    observe_break,
    observe_bucket,
    observe_gates,
    observe_host,
    observe_proxy,
    observe_round_trip,
    observe_sent,
)
from serve_controller.core.reconcile import DueTime
from serve_controller.core.restored import AHEAD_MAX, NO_CLAIMS, Claims, get_report_claims
from serve_controller.core.rollouts.external import gate_key
from serve_controller.core.views.hosts import view_goal
from serve_controller.ports import ControllerBus

INBOX_MAX: Final = 50_000
"""Reports waiting to be folded in; beyond it the oldest are dropped, as the next reports repeat their content."""
GC_EVERY_S: Final = 60.0
SWEEP_S: Final = 120.0
"""Seconds in which everything is reconciled at least once, whether or not anything was reported."""
SWEEP_STEP_S: Final = 1.0


CONFLICT_EVENT_EVERY_S: Final = 60.0
"""Least seconds between two conflict events of one host or proxy."""
CONFLICT_EVENTS_MAX: Final = 20
"""Most conflict events of all senders within that time, so that they do not displace other events."""


class _Conflicts:
    """Detects processes that report under the id of another one.

    A process that was killed and restarted is refused as well, until its former incarnation counts as silent. So it
    counts as a conflict only when the holder of the id reports again after the refused one.
    """

    def __init__(self) -> None:
        self._refused: set[tuple[str, str]] = set()
        """(kind, name) of refused senders; bounded by the number of known hosts and proxies."""
        self._published_at: dict[tuple[str, str], float] = {}
        self._found: set[tuple[str, str]] = set()

    def refused(self, report: HostReport | ProxyReport) -> str:
        """A report was refused; returns its sender's kind and name."""
        kind, name = _sender(report)
        self._refused.add((kind, name))
        return f"{kind} {name}"

    def believed(self, report: HostReport | ProxyReport, before: HostObserved | ProxyObserved | None) -> None:
        """A report was accepted; ``before`` is the one known until then."""
        if self._refused and (sender := _sender(report)) in self._refused:
            self._refused.discard(sender)
            if before is not None and is_same_incarnation(report, before.report):
                self._found.add(sender)

    def take(self, now: float) -> list[EventView]:
        """Return events for the conflicts found since the last call."""
        if not self._found:
            return []
        found, self._found = sorted(self._found), set()
        self.forget(now)
        new = [sender for sender in found if sender not in self._published_at]
        new = new[: max(0, CONFLICT_EVENTS_MAX - len(self._published_at))]
        self._published_at |= dict.fromkeys(new, now)
        return [conflict_event(now, kind, name) for kind, name in new]

    def forget(self, now: float) -> None:
        """Forget conflicts that were published more than `CONFLICT_EVENT_EVERY_S` ago."""
        self._published_at = {
            sender: at for sender, at in self._published_at.items() if now - at < CONFLICT_EVENT_EVERY_S
        }


def _sender(report: HostReport | ProxyReport) -> tuple[str, str]:
    if isinstance(report, HostReport):
        return "host", report.host_id
    return "proxy", report.proxy_id


class TermObservations:
    """Soft state of one term.

    Reports, the bucket's content and due times are changed in place as messages arrive, and none of it is ever
    recorded.
    """

    def __init__(
        self, now: float, on_refused: Callable[[str, str, Exception], None], claims: Claims = NO_CLAIMS
    ) -> None:
        """Start with everything dirty: nothing is known but the ``claims`` of this process's former terms.

        ``on_refused`` has the arguments of `Telemetry.message_refused`.
        """
        self._on_refused = on_refused
        self.observed = ObservedState(since=now)
        self.dirty_sets = DirtySets()
        self.dirty_sets.add(EVERYTHING)
        self._due_checks = DueChecks()
        self._silence = SilenceDetector()
        self._inbox: deque[tuple[float, HostReport | ProxyReport]] = deque(maxlen=INBOX_MAX)
        self._revisions: Map[str, int] = Map()
        """The bucket's revision of each key, including removed ones."""
        self._gc_at = now + GC_EVERY_S
        self._sweep_at = now + SWEEP_STEP_S
        self._to_sweep: deque[DirtySet] = deque()
        self._reporting_hosts: set[HostId] = set()
        self._reporting_proxies: set[ProxyId] = set()
        self.claims = claims
        """The highest numbers that any process reported as given."""
        self.issued = NO_CLAIMS
        """Numbers that this leader has given, approximately: claims far ahead of them are refused."""
        self._conflicts = _Conflicts()

    def on_report(self, report: HostReport | ProxyReport, now: float) -> None:
        """Queue a report; `fold` folds it in."""
        self._inbox.append((now, report))

    def on_gate_sample(self, checkpoint: Checkpoint, key: GateKey, sample: GateSample) -> None:
        """Fold in what came of asking an external gate; those of rollouts that have ended are forgotten."""
        rollouts = (checkpoint.rollouts[tag] for tag in checkpoint.active_rollouts)
        current = {gate_key(rollout, gate) for rollout in rollouts for gate in rollout.config.gates}
        self.observed = observe_gates(self.observed, {key: sample}, current)

    def on_bus_break(self, since: float | None) -> None:
        """The bus became unavailable (None) or available again at ``since``."""
        self.observed = observe_break(self.observed, since)
        self.dirty_sets.add(EVERYTHING)

    def on_round_trip(self, started_at: float, now: float) -> bool:
        """The round trip over the bus begun at ``started_at`` ended; True when a host or proxy must be checked now."""
        self.observed = observe_round_trip(self.observed, started_at)
        doubtful = self._silence.pop_unverified()
        for subject in doubtful:
            self._due_checks.add(now, subject)
        return bool(doubtful)

    def on_bucket_entries(self, entries: Mapping[str, tuple[int, int | None]], *, whole: bool) -> None:
        """Fold in entries of the bucket: revision and snapshot id by key (None: the key was removed).

        With ``whole``, ``entries`` is the whole content; otherwise entries older than what is known (the echo of this
        leader's own writes) are ignored.
        """
        bucket: Map[str, int] | None = Map() if whole else self.observed.bucket
        if bucket is None:
            return
        if whole:
            self._revisions = Map()
            self.dirty_sets.add(EVERYTHING)
        changed: set[str] = set()
        for key, (revision, snapshot_id) in entries.items():
            if not whole and revision <= self._revisions.get(key, 0):
                continue
            self._revisions = self._revisions.set(key, revision)
            if snapshot_id is not None:
                try:
                    claims = Claims(snapshot=snapshot_id)
                    self._check_claims(claims)
                    self._accept_claims(claims)
                except BadField as error:
                    self._on_refused("snapshot", key, error)
                    snapshot_id = 0  # noqa: PLW2901 - so that it is overwritten
                bucket = bucket.set(key, snapshot_id)
            elif key in bucket:
                bucket = bucket.delete(key)
            changed.add(key)
        self.observed = observe_bucket(self.observed, bucket)
        self.dirty_sets.add(DirtySet(keys=frozenset(changed), goals=bool(changed)))

    def get_revision(self, key: str) -> int:
        """The bucket's newest known revision of a key; 0 for none."""
        revision: int = self._revisions.get(key, 0)
        return revision

    def retracted(self, key: str) -> None:
        """A key of the bucket was removed."""
        bucket = self.observed.bucket
        if bucket is not None and key in bucket:
            self.observed = observe_bucket(self.observed, bucket.delete(key))

    def sent(self, host_id: HostId, goal: tuple[int, int], now: float) -> None:
        """A goal was sent to a host."""
        self.observed = observe_sent(self.observed, host_id, goal, now)

    def due(self, times: Iterable[DueTime]) -> None:
        """Schedule checks."""
        for time in times:
            self._due_checks.add(time.at, time.subject)

    def next_at(self) -> float:
        """When the next check is due at the latest."""
        at = self._due_checks.next_at()
        return min(self._gc_at, self._sweep_at, self._gc_at if at is None else at)

    def take_in(self, checkpoint: Checkpoint) -> None:
        """Fold in every queued report.

        Reports of the ids' holders come first: whether a holder is silent is known only once all its reports are folded
        in, and this process may have been suspended.
        """
        others: deque[tuple[float, HostReport | ProxyReport]] = deque()
        while self._inbox:
            last_seen_at, report = self._inbox.popleft()
            if self._is_from_holder(report, checkpoint):
                self._fold_report(report, last_seen_at, checkpoint)
            else:
                others.append((last_seen_at, report))
        for last_seen_at, report in others:
            self._fold_report(report, last_seen_at, checkpoint)

    def _is_from_holder(self, report: HostReport | ProxyReport, checkpoint: Checkpoint) -> bool:
        known: HostObserved | ProxyObserved | None
        record: HostRecord | ProxyRecord | None
        match report:
            case HostReport():
                known, record = self.observed.hosts.get(report.host_id), checkpoint.hosts.get(report.host_id)
            case ProxyReport():
                known = self.observed.proxies.get(report.proxy_id)
                record = checkpoint.proxies.get(report.proxy_id)
        if known is not None:
            return is_same_incarnation(report, known.report)
        return record is not None and record.holder == holder_digest(report)

    def _fold_report(
        self, report: HostReport | ProxyReport, last_seen_at: float, checkpoint: Checkpoint
    ) -> None:
        try:
            match report:
                case HostReport():
                    self._fold_host(report, last_seen_at, checkpoint)
                case ProxyReport():
                    self._fold_proxy(report, last_seen_at, checkpoint)
        except IdentityTaken as error:
            self._on_refused("identity", self._conflicts.refused(report), error)
        except Exception as error:  # noqa: BLE001 - an error in one report costs that report only
            kind, sender = _sender(report)
            self._on_refused(f"{kind}_report", sender, error)

    def _fold_host(self, report: HostReport, last_seen_at: float, checkpoint: Checkpoint) -> None:
        host_id = report.host_id
        before, record = self.observed.hosts.get(host_id), checkpoint.hosts.get(host_id)
        claims = get_report_claims(report, before)
        self._check_claims(claims)
        self.observed = observe_host(self.observed, report, last_seen_at, record.holder if record else "")
        after = self.observed.hosts[host_id]
        if after is not before:
            self.dirty_sets.add(dirty_by_host_report(before, after))
        self._reporting_hosts.add(host_id)
        self._conflicts.believed(report, before)
        self._accept_claims(claims)

    def _fold_proxy(self, report: ProxyReport, last_seen_at: float, checkpoint: Checkpoint) -> None:
        proxy_id = report.proxy_id
        before, record = self.observed.proxies.get(proxy_id), checkpoint.proxies.get(proxy_id)
        claims = get_report_claims(report)
        self._check_claims(claims)
        self.observed = observe_proxy(self.observed, report, last_seen_at, record.holder if record else "")
        after = self.observed.proxies[proxy_id]
        if after is not before:
            self.dirty_sets.add(dirty_by_proxy_report(before, after))
        self._reporting_proxies.add(proxy_id)
        self._conflicts.believed(report, before)
        self._accept_claims(claims)

    def _check_claims(self, claims: Claims) -> None:
        """Raise `BadField` for impossible claims; the whole message is then refused."""
        if claims.are_ahead_of(self.issued, AHEAD_MAX):
            raise BadField("claims", f"{claims} cannot have been given: {self.issued} was")

    def _accept_claims(self, claims: Claims) -> None:
        """Remember the claims if they are the highest."""
        if claims.are_ahead_of(self.claims):
            self.claims = self.claims.with_those(claims)

    def fold(self, checkpoint: Checkpoint, now: float) -> DirtySet:
        """Fold in everything received; returns what the next plan must reconcile."""
        self.take_in(checkpoint)
        hosts, self._reporting_hosts = self._reporting_hosts, set()
        proxies, self._reporting_proxies = self._reporting_proxies, set()
        self._take_due(hosts, proxies, now)
        if now >= self._gc_at:
            self._gc(checkpoint, now)
        if now >= self._sweep_at:
            self._sweep(checkpoint, now)
        dirty = self.dirty_sets.take()
        if dirty.is_everything:
            hosts.update(checkpoint.hosts, self.observed.hosts)
            proxies.update(checkpoint.proxies, self.observed.proxies)
        for host_id in hosts:
            self.dirty_sets.add(self._silence.of_host(self.observed, host_id, now, self._due_checks))
        for proxy_id in proxies:
            self.dirty_sets.add(self._silence.of_proxy(self.observed, proxy_id, now, self._due_checks))
        if self.dirty_sets.is_empty:
            return dirty
        self.dirty_sets.add(dirty)
        return self.dirty_sets.take()

    def pop_conflicts(self, now: float) -> list[EventView]:
        """Return the identity conflicts found since the last call, as events."""
        return self._conflicts.take(now)

    def _take_due(self, hosts: set[HostId], proxies: set[ProxyId], now: float) -> None:
        for kind, name in self._due_checks.pop_due(now):
            match kind:
                case "backend":
                    self.dirty_sets.add(DirtySet(backends=frozenset({BackendTag(name)})))
                case "host_goal":
                    self.dirty_sets.add(DirtySet(hosts=frozenset({HostId(name)})))
                case "host":
                    hosts.add(HostId(name))
                case "proxy":
                    proxies.add(ProxyId(name))
                case _:
                    raise AssertionError(f"nothing is known of {kind}")

    def _gc(self, checkpoint: Checkpoint, now: float) -> None:
        self._gc_at = now + GC_EVERY_S
        self.observed = drop_silent(self.observed, now)
        self._conflicts.forget(now)
        self._silence.forget(
            {*checkpoint.hosts, *self.observed.hosts}, {*checkpoint.proxies, *self.observed.proxies}
        )
        self.dirty_sets.add(DirtySet(gc=True))

    def _sweep(self, checkpoint: Checkpoint, now: float) -> None:
        """Mark the next slice of everything as dirty; the last slices of a round may name removed objects."""
        self._sweep_at = now + SWEEP_STEP_S
        if not self._to_sweep:
            slices = int(SWEEP_S / SWEEP_STEP_S)
            backends, endpoints = sorted(checkpoint.backends), sorted(checkpoint.endpoints)
            hosts, keys = sorted(checkpoint.hosts), sorted(checkpoint.snapshots)
            proxies = sorted({*checkpoint.proxies, *self.observed.proxies})
            self._to_sweep.extend(
                DirtySet(
                    backends=frozenset(backends[n::slices]),
                    endpoints=frozenset(endpoints[n::slices]),
                    hosts=frozenset(hosts[n::slices]),
                    proxies=frozenset(proxies[n::slices]),
                    keys=frozenset(keys[n::slices]),
                )
                for n in range(slices)
            )
        self.dirty_sets.add(self._to_sweep.popleft())


EVENTS_MAX: Final = 5_000
"""Events retained for `get_events`."""
PROGRESS_MAX: Final = 50
"""Goals whose progress is published after one plan; that of further goals is published later or never."""


class EventLog:
    """The events of one term.

    Events are for people alone: nothing is decided by them, and any may be lost.
    """

    def __init__(self, bus: ControllerBus) -> None:
        self.events: deque[EventView] = deque(maxlen=EVENTS_MAX)
        """The latest events, the newest last."""
        self._bus = bus
        self._progress: dict[GoalId, str] = {}
        """The message last published for each pending goal."""

    def remember(self, events: Sequence[EventView]) -> None:
        """Prepend events of earlier terms, the oldest first."""
        self.events.extendleft(reversed(events))

    def notify(self, events: Sequence[EventView], checkpoint: Checkpoint, observed: ObservedState) -> None:
        """Publish and retain events; that of a goal is published with its whole error, from ``checkpoint``."""
        self.events.extend(events)
        for event in events:
            if event.kind == GOAL and event.goal_id is not None:
                self._progress.pop(event.goal_id, None)
                self._publish(goal_event(view_goal(checkpoint, observed, event.goal_id), event.at))
            else:
                self._publish(event)

    def publish_progress(self, checkpoint: Checkpoint, observed: ObservedState, now: float) -> None:
        """Publish the progress of pending goals where it changed, at ``now`` in seconds since 1970."""
        goal_ids = sorted(checkpoint.pending)[:PROGRESS_MAX]
        for view in goal_progress(checkpoint, observed, goal_ids, self._progress):
            self._progress[view.goal_id] = view.message
            self._publish(goal_event(view, now))

    def _publish(self, event: EventView) -> None:
        self._bus.publish_event(event.kind, event.subject, msgspec.json.encode(event))
