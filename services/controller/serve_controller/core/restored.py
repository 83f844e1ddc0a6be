"""Recovery after Postgres was restored to an earlier state than other processes have seen.

How it is detected: the bucket, proxies, hosts and replicas report the newest numbers that they received. A number that
the checkpoint has not given yet is a *claim* from the lost state. If it were given again, routers would refuse the new
snapshot as an old one, hosts would refuse goals or start a tag twice, and goals would succeed before their changes are
applied. So all counters are raised to one number above every claim, by a margin for claims that are yet to be
received, and the whole checkpoint is published again under unused numbers.

Why one number for all: no other process stores ids of goals or versions of configurations, and the same dump may be
restored twice. One claim of any kind then keeps all numbers of the lost state from being given again.
"""

from __future__ import annotations

from typing import Final

import msgspec

from serve_common.api.views import EventView
from serve_common.errors import BadField
from serve_common.names import BackendTag, GoalId, HostId, ReplicaTag, parse_backend_tag
from serve_common.protocol.reports import HostReport, ProxyReport, ReplicaReport, ReplicaStatus
from serve_common.protocol.subjects import HTTP_KEY, parse_key
from serve_controller.core.checkpoint import Checkpoint, Draft
from serve_controller.core.objects import (
    Backend,
    BackendVersion,
    Counters,
    Replica,
    ReplicaState,
    parse_number,
)
from serve_controller.core.observed import (
    HOST_LOST_AFTER_S,
    HOST_SUSPECT_AFTER_S,
    HostObserved,
    HostStatus,
    ObservedState,
    host_status,
)
from serve_controller.core.placement import estimate_goal_bytes, resource_needs
from serve_controller.core.replica_reports import with_event
from serve_controller.core.snapshots import http_snapshot, put_snapshot
from serve_controller.core.transitions import TransitionEvent

MARGIN: Final = 1_000_000
"""Counters are raised by so much above the highest claim: more than the lost state can have given unreported."""
EPOCH_MARGIN: Final = 1_000
ADOPTED_CONFIG_VERSION: Final = 0
"""Configuration version of adopted replicas; a backend's own versions count from 1."""
AHEAD_MAX: Final = 1_000_000_000
"""A claim further ahead than this is refused: a forged report must not use up the numbers, which end at 2**63."""
CLAIMS_WAIT_S: Final = HOST_SUSPECT_AFTER_S + 1.5
"""Seconds for which a leader whose store is behind collects claims before it acts: hosts and proxies report every
second, and restarted ones are accepted once the recorded incarnation counts as silent."""
_HOLDS: Final = (ReplicaStatus.STARTING, ReplicaStatus.RUNNING, ReplicaStatus.UNHEALTHY)


class Claims(msgspec.Struct, frozen=True, kw_only=True):
    """The highest numbers that were reported as given."""

    epoch: int = 0
    goal: int = 0
    ordinal: int = 0
    generation: int = 0
    snapshot: int = 0

    def with_those(self, other: Claims) -> Claims:
        """The higher of each number."""
        return Claims(**{name: max(getattr(self, name), getattr(other, name)) for name in _NUMBERS})

    def are_ahead_of(self, other: Claims, by: int = 0) -> bool:
        """Whether any number exceeds that of ``other`` by more than ``by``."""
        return (
            self.snapshot > other.snapshot + by
            or self.generation > other.generation + by
            or self.ordinal > other.ordinal + by
            or self.epoch > other.epoch + by
            or self.goal > other.goal + by
        )


_NUMBERS: Final = Claims.__struct_fields__
NO_CLAIMS: Final = Claims()


def restored_event(draft: Draft, now: float) -> EventView:
    """The event that the store was restored, with its consequences."""
    before, after = draft.base.counters, draft.counters
    message = (
        f"Postgres was restored to an earlier state: what was decided since is lost; goals go on after g{after.goal} "
        f"(g{before.goal}), snapshots after {after.snapshot} ({before.snapshot}), epochs from {after.restored_epoch}"
    )
    return EventView(at=now, kind="store", subject="postgres", message=message, state="restored")


def _ordinal(tag: ReplicaTag) -> int:
    return parse_number(GoalId(f"g{tag.rpartition('#')[2]}"))


def get_leader_claims(checkpoint: Checkpoint, epoch: int) -> Claims:
    """The numbers that a leader has given."""
    issued = checkpoint.counters
    return Claims(
        epoch=epoch,
        goal=issued.goal,
        ordinal=issued.ordinal,
        generation=issued.generation,
        snapshot=issued.snapshot,
    )


def get_report_claims(report: HostReport | ProxyReport, known: HostObserved | None = None) -> Claims:
    """The claims of a report. Replicas unchanged since ``known``, the same host's former report, are skipped."""
    if isinstance(report, ProxyReport):
        return Claims(snapshot=max(report.applied_snapshot_id, report.http_error_snapshot_id))
    ordinal = 0
    if known is None or known.report.replicas != report.replicas:
        # The number of an invalid tag is 0: its replica is stopped by its host's goal like any unknown one.
        ordinal = max((_ordinal(r.replica_tag) for r in report.replicas), default=0)
    epoch = max(report.epoch, report.leader_epoch)
    return Claims(epoch=epoch, generation=report.generation, ordinal=ordinal)


def raise_counters_above(counters: Counters, others: Counters | Claims, by: int) -> Counters:
    """``counters`` with all set to one number, which is above the highest of both arguments by ``by``."""
    names = ("goal", "ordinal", "generation", "snapshot")
    number = max(getattr(those, name) for those in (counters, others) for name in names) + by
    return msgspec.structs.replace(counters, **dict.fromkeys(names, number))


def claims_complete_at(checkpoint: Checkpoint, observed: ObservedState, now: float) -> float | None:
    """When all live processes will have reported, at the latest; None while the bus is unavailable."""
    if observed.since is None:
        return None
    unheard = [host_id for host_id in checkpoint.hosts if host_id not in observed.hosts]
    waits_for_host = any(host_status(observed, host_id, now) is not HostStatus.LOST for host_id in unheard)
    return observed.since + (HOST_LOST_AFTER_S if waits_for_host else CLAIMS_WAIT_S)


def overtake(
    checkpoint: Checkpoint, observed: ObservedState, claims: Claims, epoch: int, now: float
) -> Draft:
    """The whole checkpoint under unused numbers. ``epoch`` is above all claims.

    Goals that were pending in it go on: none of the numbers that proxies and hosts have reported can fulfil them.
    """
    draft, issued = Draft(checkpoint), checkpoint.counters
    counters = raise_counters_above(issued, claims, MARGIN)
    draft.put(
        msgspec.structs.replace(
            counters,
            restored_at=now,
            restored_epoch=epoch,
            restored_ordinal=issued.ordinal,
            restored_snapshot=counters.snapshot,
        )
    )
    for tag in sorted(draft.backends):
        _renumber_versions(draft, draft.backends[tag], counters.snapshot)
        for replica_tag in sorted(draft.get_replicas(tag)):
            _drop_doubtful(draft, observed, draft.get_replicas(tag)[replica_tag], now)
    for record in sorted(draft.snapshots.values(), key=lambda r: r.snapshot.snapshot_id):
        if record.key != HTTP_KEY:
            put_snapshot(draft, record.key, record.snapshot.content, epoch)
    for key in sorted(observed.bucket or ()):
        if key not in draft.snapshots and _is_key(key):
            put_snapshot(draft, key, None, epoch)
    # The last one, because it voids every snapshot that was not published again.
    put_snapshot(draft, HTTP_KEY, http_snapshot(draft), epoch)
    return draft


def _is_key(key: str) -> bool:
    try:
        parse_key(key)
    except BadField:
        return False
    return True


def _renumber_versions(draft: Draft, backend: Backend, above: int) -> None:
    """Renumber versions: replicas may have lost configurations, and hosts apply only rising numbers."""
    config_version = max(backend.newest_config_version, above) + 1
    target = msgspec.structs.replace(backend.target, config_version=config_version)
    last_good = backend.last_good
    if last_good == backend.target:
        last_good = target
    elif last_good is not None:
        config_version += 1
        last_good = msgspec.structs.replace(last_good, config_version=config_version)
    former = (backend.target, backend.last_good, backend.retained)
    draft.put(
        msgspec.structs.replace(
            backend,
            target=target,
            last_good=last_good,
            retained=None,
            others=[*backend.others, *(version for version in former if version is not None)],
            newest_code_version=max(backend.newest_code_version, above),
            newest_config_version=config_version,
        )
    )


def _drop_doubtful(draft: Draft, observed: ObservedState, replica: Replica, now: float) -> None:
    """Drop a replica that was about to start, unless it runs: it may have run and ended since, under the same tag."""
    if replica.state is ReplicaState.SHOULD_START:
        with_event(draft, replica, TransitionEvent.GONE, now)
    elif replica.state is ReplicaState.STARTING:
        host = observed.hosts.get(replica.host_id) if replica.host_id is not None else None
        if host is None:
            return  # no report yet
        report = host.replicas.get(replica.replica_tag)
        if report is None or report.status not in _HOLDS:
            with_event(draft, replica, TransitionEvent.GONE, now)
        else:
            draft.put(msgspec.structs.replace(replica, since=now))  # otherwise it would count as stuck
    elif replica.state is ReplicaState.STOPPING:
        draft.put(msgspec.structs.replace(replica, since=now))


def adopt_replicas(draft: Draft, observed: ObservedState, host_id: HostId, now: float) -> set[BackendTag]:
    """Record the replicas that a host runs by a lost goal, for existing backends; returns those backends.

    They serve, perhaps alone: once recorded, under a version of their own, they are replaced or scaled down by the same
    rules as all others, so they stop only as far as wanted replicas serve. This is done once, before the host gets its
    first goal: replicas left out then are stopped, and a later plan must not route to them.
    """
    host, counters = observed.hosts.get(host_id), draft.counters
    if host is None or host.report.epoch >= counters.restored_epoch or host.report.leaving:
        return set()
    record = draft.hosts[host_id]
    if record.adopted_epoch == counters.restored_epoch:
        return set()
    if host_status(observed, host_id, now) is HostStatus.LOST:
        return set()
    draft.put(msgspec.structs.replace(record, adopted_epoch=counters.restored_epoch))
    adopted: dict[BackendTag, list[ReplicaReport]] = {}
    for tag, report in sorted(host.replicas.items()):
        backend_tag = parse_backend_tag(tag)
        is_lost = _ordinal(tag) > counters.restored_ordinal
        is_known = backend_tag not in draft.backends or tag in draft.get_replicas(backend_tag)
        if is_lost and not is_known and report.status is ReplicaStatus.RUNNING:
            adopted.setdefault(backend_tag, []).append(report)
    for backend_tag, reports in adopted.items():
        version = _lost_version(draft, backend_tag)
        for report in reports:
            draft.put(
                Replica(
                    replica_tag=report.replica_tag,
                    backend_tag=backend_tag,
                    code_version=version.code_version,
                    config_version=version.config_version,
                    state=ReplicaState.RUNNING,
                    since=counters.restored_at,
                    host_id=host_id,
                    generation=draft.renew_host_goal(host_id),
                    needs=resource_needs(version),
                    goal_bytes=estimate_goal_bytes(version),
                )
            )
    return set(adopted)


def _lost_version(draft: Draft, tag: BackendTag) -> BackendVersion:
    """The version of adopted replicas: treated as other code than the target's, and so to be replaced.

    Its number is below all others, so that hosts do not reconfigure these replicas, whose code is lost.
    """
    backend = draft.backends[tag]
    lost = backend.get_version(ADOPTED_CONFIG_VERSION)
    if lost is not None:
        return lost
    code_version = backend.newest_code_version + 1
    version = msgspec.structs.replace(
        backend.target, code_version=code_version, config_version=ADOPTED_CONFIG_VERSION, version=None
    )
    others = [*backend.others, version]
    draft.put(msgspec.structs.replace(backend, others=others, newest_code_version=code_version))
    return version
