"""From what should be and what was heard to what to do next.

``reconcile`` is the whole of recovery too: after a crash, a failover or a lost bucket the next call sees the same
checkpoint and fresh reports, and comes to the same plan. There is no second path.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable

import msgspec

from serve_common.names import BackendTag, HostId
from serve_common.wires.host import HostGoal, ReplicaGoal
from serve_common.wires.snapshots import Snapshot
from serve_controller.core.checkpoint import Changes, Checkpoint, Draft, Kind
from serve_controller.core.goals import (
    fail_if_hopeless,
    forget_finished,
    succeed_where_reached,
)
from serve_controller.core.objects import Backend, ProxyRecord, Replica
from serve_controller.core.observed import (
    GOAL_RESEND_AFTER_S,
    HOST_LOST_AFTER_S,
    HOST_SUSPECT_AFTER_S,
    PROXY_LOST_AFTER_S,
    HostStatus,
    ObservedState,
    host_status,
    is_proxy_live,
    silent_at,
)
from serve_controller.core.placement import Ledger
from serve_controller.core.replica_reports import follow_reports
from serve_controller.core.rollout import look_again_at, roll
from serve_controller.core.snapshots import renew_snapshots
from serve_controller.core.transitions import IN_HOST_GOAL


class SendHostGoal(msgspec.Struct, frozen=True):
    """Send a host everything it should run. May be performed twice."""

    goal: HostGoal


class PublishSnapshot(msgspec.Struct, frozen=True):
    """Put one key of the bucket. May be performed twice."""

    key: str
    snapshot: Snapshot


class RetractSnapshot(msgspec.Struct, frozen=True):
    """Remove a key of the bucket that the checkpoint does not know. May be performed twice."""

    key: str


Action = SendHostGoal | PublishSnapshot | RetractSnapshot


class Fault(msgspec.Struct, frozen=True):
    """One backend's or host's part of the plan could not be made; the others' were."""

    about: str
    """The backend's tag or the host's id."""
    error: str


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything to do now, in the order of the fields."""

    changes: Changes
    """Durable BEFORE any action is performed."""
    checkpoint: Checkpoint
    """The checkpoint once ``changes`` are recorded."""
    actions: tuple[Action, ...]
    """Performed in this order: snapshots first, so that routers leave a replica before its host drains it."""
    look_again_at: float | None
    """When time alone will make a new plan necessary; the core cannot sleep, so it asks to be called."""
    faults: tuple[Fault, ...]


def reconcile(checkpoint: Checkpoint, observed: ObservedState, epoch: int, now: float) -> Plan:
    """The next plan. The same arguments always give the same plan."""
    draft = Draft(checkpoint)
    times: list[float] = []
    for host_id in sorted(observed.hosts):
        if host_id not in draft.hosts:
            draft.renew_host_goal(host_id)
    _follow_proxies(draft, observed, now)
    faults = _reconcile_backends(draft, observed, now, times)
    _drop_deleted(draft)
    _forget_hosts(draft, observed, now)
    renew_snapshots(draft, epoch)
    succeed_where_reached(draft, observed, now)
    forget_finished(draft, now)
    changes = draft.changes()
    result = draft.checkpoint()
    host_actions, host_faults = _host_actions(result, observed, epoch, now, times)
    actions = (*_bucket_actions(result, observed), *host_actions)
    times += _silence_times(result, observed)
    return Plan(
        changes=changes,
        checkpoint=result,
        actions=actions,
        look_again_at=min((at for at in times if at > now), default=None),
        faults=(*faults, *host_faults),
    )


def _reconcile_backends(
    draft: Draft, observed: ObservedState, now: float, times: list[float]
) -> tuple[Fault, ...]:
    faults: list[Fault] = []

    def guarded(tag: BackendTag, part: Callable[[Backend], None]) -> None:
        """One backend's error must not stop the others': its part of the draft is undone and reported."""
        mark = draft.mark()
        try:
            part(draft.backends[tag])
        except Exception:  # noqa: BLE001 - any defect in one backend's part; the shell logs it
            draft.roll_back(mark)
            faults.append(Fault(tag, traceback.format_exc()))

    tags = sorted(draft.backends)
    for tag in tags:
        guarded(tag, lambda backend: follow_reports(draft, observed, backend, now))
    ledger = Ledger(draft, observed, now)

    def advance(backend: Backend) -> None:
        fail_if_hopeless(draft, backend, now)
        roll(draft, ledger, draft.backends[backend.backend_tag], now)
        at = look_again_at(draft, backend, now)
        if at is not None:
            times.append(at)

    for tag in tags:
        guarded(tag, advance)
    return tuple(faults)


def _follow_proxies(draft: Draft, observed: ObservedState, now: float) -> None:
    """Keep the record of those that goals wait for."""
    for proxy_id in sorted({*draft.proxies, *observed.proxies}):
        is_live = is_proxy_live(observed, proxy_id, now)
        if is_live and proxy_id not in draft.proxies:
            draft.put(ProxyRecord(proxy_id=proxy_id))
        elif not is_live and proxy_id in draft.proxies:
            draft.delete((Kind.PROXY, proxy_id))


def _drop_deleted(draft: Draft) -> None:
    """The row of a deleted backend goes with its last replica."""
    for backend in list(draft.backends.values()):
        if backend.deleting and not draft.replicas.get(backend.backend_tag):
            draft.delete((Kind.BACKEND, backend.backend_tag))


def _forget_hosts(draft: Draft, observed: ObservedState, now: float) -> None:
    """Forget the goals of hosts that are lost and run nothing; a returning one gets a newer generation."""
    used = {r.host_id for replicas in draft.replicas.values() for r in replicas.values()}
    for host_id in list(draft.hosts):
        is_known = host_id in used or host_id in observed.hosts
        if not is_known and host_status(observed, host_id, now) is HostStatus.LOST:
            draft.delete((Kind.HOST, host_id))


def _bucket_actions(checkpoint: Checkpoint, observed: ObservedState) -> list[Action]:
    """What makes the bucket equal to the recorded snapshots; nothing while it is not known what it holds."""
    bucket = observed.bucket
    if bucket is None:
        return []
    behind = [r for r in checkpoint.snapshots.values() if bucket.get(r.key) != r.snapshot.snapshot_id]
    behind.sort(key=lambda r: r.snapshot.snapshot_id)
    actions: list[Action] = [PublishSnapshot(record.key, record.snapshot) for record in behind]
    actions += [RetractSnapshot(key) for key in sorted(bucket.keys() - checkpoint.snapshots.keys())]
    return actions


def _host_actions(
    checkpoint: Checkpoint, observed: ObservedState, epoch: int, now: float, times: list[float]
) -> tuple[list[Action], list[Fault]]:
    """Whole goals for the hosts that have not acknowledged theirs, each at most once in `GOAL_RESEND_AFTER_S`."""
    by_host: dict[HostId, list[Replica]] = {}
    for replicas in checkpoint.replicas.values():
        for replica in replicas.values():
            if replica.host_id is not None and replica.state in IN_HOST_GOAL:
                by_host.setdefault(replica.host_id, []).append(replica)
    actions: list[Action] = []
    faults: list[Fault] = []
    for host_id, host in sorted(observed.hosts.items()):
        record = checkpoint.hosts.get(host_id)
        if record is None or host_status(observed, host_id, now) is HostStatus.LOST:
            continue
        wanted = (epoch, record.generation)
        if (host.report.epoch, host.report.generation) == wanted:
            continue
        resend_at = host.sent_at + GOAL_RESEND_AFTER_S
        if host.sent == wanted and now < resend_at:
            times.append(resend_at)
            continue
        times.append(now + GOAL_RESEND_AFTER_S)
        try:
            goal = _host_goal(checkpoint, host_id, wanted, by_host.get(host_id, []))
        except Exception:  # noqa: BLE001 - any defect in one host's part; the shell logs it
            # No goal at all: one that lacks a replica would end it.
            faults.append(Fault(host_id, traceback.format_exc()))
            continue
        actions.append(SendHostGoal(goal))
    return actions, faults


def _host_goal(
    checkpoint: Checkpoint, host_id: HostId, number: tuple[int, int], replicas: list[Replica]
) -> HostGoal:
    goals = []
    for replica in sorted(replicas, key=lambda r: r.replica_tag):
        versions = checkpoint.backends[replica.backend_tag].versions()
        version = {v.config_version: v for v in versions}[replica.config_version]
        config = version.backend_config
        goals.append(
            ReplicaGoal(
                replica_tag=replica.replica_tag,
                backend_tag=replica.backend_tag,
                replica_config=version.replica_config,
                config_version=version.config_version,
                user_config=config.user_config,
                max_concurrent_queries=config.max_concurrent_queries,
                graceful_shutdown_timeout_s=config.graceful_shutdown_timeout_s,
                health_check_period_s=config.health_check_period_s,
                health_check_timeout_s=config.health_check_timeout_s,
                start_timeout_s=config.start_timeout_s,
            )
        )
    return HostGoal(host_id=host_id, epoch=number[0], generation=number[1], replicas=goals)


def _silence_times(checkpoint: Checkpoint, observed: ObservedState) -> list[float]:
    """When a silent host or proxy comes to be treated otherwise."""
    times: list[float | None] = []
    for host_id in checkpoint.hosts.keys() | observed.hosts.keys():
        host = observed.hosts.get(host_id)
        times += [silent_at(observed, host, after_s) for after_s in (HOST_SUSPECT_AFTER_S, HOST_LOST_AFTER_S)]
    for proxy_id in checkpoint.proxies.keys() | observed.proxies.keys():
        times.append(silent_at(observed, observed.proxies.get(proxy_id), PROXY_LOST_AFTER_S))
    return [at for at in times if at is not None]
