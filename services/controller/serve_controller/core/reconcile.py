"""Reconciles goal state and observed state into a plan, and deletes objects that are no longer needed."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Final

import msgspec

from serve_common.names import BackendTag, EndpointTag, GoalId, HostId
from serve_common.protocol.reports import HostGoal, ReplicaGoal
from serve_common.protocol.snapshots import Snapshot
from serve_common.protocol.subjects import ENDPOINTS, backend_key, endpoint_key, parse_key
from serve_controller.core.checkpoint import Checkpoint, Draft
from serve_controller.core.dirty_set import EVERYTHING, DirtySet, dirty_by_changes
from serve_controller.core.goals import complete_reached_goals, fail_after_retries, host_owned
from serve_controller.core.objects import (
    Backend,
    ObjectChanges,
    ObjectKind,
    ProxyRecord,
    Replica,
    parse_number,
    revision_name,
)
from serve_controller.core.observed import (
    GOAL_RESEND_AFTER_S,
    HostStatus,
    ObservedState,
    holder_digest,
    host_status,
    is_proxy_live,
)
from serve_controller.core.placement import Ledger
from serve_controller.core.replica_reports import apply_reports
from serve_controller.core.restored import adopt_replicas
from serve_controller.core.rolling_update import check_again_at, roll
from serve_controller.core.rollouts.advance import advance_rollout
from serve_controller.core.rollouts.record import canary_tag
from serve_controller.core.scaling import apply_scalings
from serve_controller.core.snapshots import forget_tombstones, renew_snapshots, void_last
from serve_controller.core.transitions import IN_HOST_GOAL

FINISHED_RETENTION_S = 86_400.0
"""Least seconds for which a finished goal can be queried."""
FINISHED_RETAINED_MAX = 20_000
"""Most finished goals; beyond it the oldest are deleted earlier. Their ids still show that they have ended."""
ENDED_RETAINED_MAX = 1_000
"""Most deleted deployments that are still listed."""


def gc(draft: Draft, observed: ObservedState, now: float) -> None:
    """Delete old finished goals, ended deployments, tombstones and lost hosts.

    Without this the state would grow forever. It runs about once a minute; nothing depends on when.
    """
    _gc_goals(draft, now)
    _gc_deployments(draft)
    _gc_hosts(draft, observed, now)
    forget_tombstones(draft)


def _gc_goals(draft: Draft, now: float) -> None:
    """Delete old finished goals, except each backend's newest one."""
    newest = {backend.goal_id for backend in draft.backends.values()}
    finished = sorted(
        (g for g in draft.goals.values() if g.finished_at is not None and g.goal_id not in newest),
        key=lambda g: (g.finished_at or 0.0, parse_number(g.goal_id)),
    )
    surplus = len(finished) - FINISHED_RETAINED_MAX
    for index, goal in enumerate(finished):
        if index < surplus or now - (goal.finished_at or now) > 2 * FINISHED_RETENTION_S:
            draft.delete((ObjectKind.GOAL, goal.goal_id))


def _gc_deployments(draft: Draft) -> None:
    ended = sorted(
        (d for d in draft.deployments.values() if d.ended_at is not None),
        key=lambda d: (d.ended_at or 0.0, d.tag),
    )
    for deployment in ended[: max(0, len(ended) - ENDED_RETAINED_MAX)]:
        draft.delete((ObjectKind.DEPLOYMENT, deployment.tag))


def _gc_hosts(draft: Draft, observed: ObservedState, now: float) -> None:
    """Delete lost hosts that run nothing, unless they are drained: that must outlast their absence."""
    for host_id, record in sorted(draft.hosts.items()):
        is_used = host_id in draft.by_host or host_id in observed.hosts
        if not is_used and not record.draining and host_status(observed, host_id, now) is HostStatus.LOST:
            draft.delete((ObjectKind.HOST, host_id))


class SendHostGoal(msgspec.Struct, frozen=True):
    """Send a host everything it should run, until it acknowledges that. May be performed twice."""

    goal: HostGoal


class Fault(msgspec.Struct, frozen=True):
    """An error in one backend's or host's part of the plan; the other parts are unaffected."""

    about: str
    """The backend's tag or the host's id."""
    error: str


class DueTime(msgspec.Struct, frozen=True):
    """When an object must be reconciled even if nothing is reported."""

    at: float
    subject: tuple[str, str]
    """``backend`` or ``host_goal``, and its name."""


class PublishSnapshot(msgspec.Struct, frozen=True):
    """Put one key of the bucket. May be performed twice."""

    key: str
    snapshot: Snapshot


class RetractSnapshot(msgspec.Struct, frozen=True):
    """Remove a key of the bucket that the checkpoint does not have. May be performed twice."""

    key: str


Action = SendHostGoal | PublishSnapshot | RetractSnapshot

NO_SCALINGS: Final[Mapping[BackendTag, int]] = MappingProxyType({})
FAULT_RETRY_S = 5.0
"""Seconds until a backend whose part of a plan failed is reconciled again."""


class ReconcilePlan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything to do now, in the order of the fields."""

    changes: ObjectChanges
    """Durable BEFORE any action is performed."""
    checkpoint: Checkpoint
    """The checkpoint once ``changes`` are recorded."""
    actions: tuple[Action, ...]
    """Performed in this order: snapshots first, so that routers leave a replica before its host drains it."""
    due: tuple[DueTime, ...]
    """When to make the next plan, and of what, even if nothing is reported meanwhile."""
    dirty_set: DirtySet
    """What the next plan must reconcile because of the changes."""
    faults: tuple[Fault, ...]


class _Scope:
    """Objects that one plan covers; grows while the plan is made."""

    def __init__(self, checkpoint: Checkpoint, observed: ObservedState, dirty_set: DirtySet) -> None:
        self.backends: set[BackendTag] = set(dirty_set.backends)
        self.endpoints: set[EndpointTag] = set(dirty_set.endpoints)
        self.hosts: set[HostId] = set(dirty_set.hosts)
        self.keys: set[str] = set(dirty_set.keys)
        self.proxies = set(dirty_set.proxies)
        self.goals: set[GoalId] = set()
        self.has_capacity = dirty_set.has_capacity
        if dirty_set.is_everything:
            self.backends.update(checkpoint.backends)
            self.endpoints.update(checkpoint.endpoints)
            self.hosts.update(checkpoint.hosts, observed.hosts)
            self.proxies.update(checkpoint.proxies, observed.proxies)
            self.keys.update(checkpoint.snapshots, observed.bucket or ())
            self.has_capacity = True
        self.endpoints.update(_gone_endpoints(checkpoint, self.keys))
        if dirty_set.goals or dirty_set.is_everything:
            self.goals.update(checkpoint.pending)
        for host_id in self.hosts:
            on_host = checkpoint.by_host.get(host_id)
            if on_host is not None:
                self.backends.update(r.backend_tag for r in on_host.values())


def _gone_endpoints(checkpoint: Checkpoint, keys: Iterable[str]) -> Iterator[EndpointTag]:
    """Deleted endpoints that still have a snapshot: a leader that dies after recording a deletion leaves such."""
    for key in keys:
        if key in checkpoint.snapshots:
            kind, tag = parse_key(key)
            if kind == ENDPOINTS and tag not in checkpoint.endpoints:
                yield EndpointTag(tag)


def reconcile(
    checkpoint: Checkpoint,
    observed: ObservedState,
    epoch: int,
    now: float,
    dirty_set: DirtySet = EVERYTHING,
    *,
    scalings: Mapping[BackendTag, int] = NO_SCALINGS,
) -> ReconcilePlan:
    """Make the next plan. The same arguments always give the same plan.

    ``scalings``: numbers of replicas decided by the autoscaler, applied by `core.scaling.apply_scalings`.

    This is the whole of recovery too: after a crash, a failover or a lost bucket the next call gets the same checkpoint
    and fresh reports, and makes the same plan. There is no second path.
    """
    draft = Draft(checkpoint)
    apply_scalings(draft, scalings)
    scope = _Scope(checkpoint, observed, dirty_set)
    scope.backends.update(scalings)
    due: list[DueTime] = []
    for host_id in sorted(scope.hosts):
        _update_host(draft, observed, host_id)
        scope.backends.update(adopt_replicas(draft, observed, host_id, now))
    _update_proxies(draft, observed, scope, now)
    faults = _reconcile_backends(draft, observed, scope, due, epoch=epoch, now=now)
    _drop_deleted(draft, scope, now)
    touched = draft.touched()
    renew_snapshots(
        draft,
        epoch,
        scope.endpoints.union(EndpointTag(name) for kind, name in touched if kind is ObjectKind.ENDPOINT),
        scope.backends.union(BackendTag(name) for kind, name in touched if kind is ObjectKind.BACKEND),
    )
    void_last(draft, observed.bucket, epoch)
    _advance_rollouts(draft, observed, due, now)
    complete_reached_goals(draft, observed, _goals_in(draft, scope), now)
    if dirty_set.gc:
        gc(draft, observed, now)
    changes = draft.changes()
    result = draft.checkpoint()
    for kind, name in draft.touched():
        if kind is ObjectKind.HOST:
            scope.hosts.add(HostId(name))
        elif kind is ObjectKind.SNAPSHOT:
            scope.keys.add(name)
    host_actions, host_times, host_faults = send_host_goals(result, observed, epoch, now, scope.hosts)
    return ReconcilePlan(
        changes=changes,
        checkpoint=result,
        actions=(*_bucket_actions(result, observed, scope.keys), *host_actions),
        due=(*due, *host_times),
        dirty_set=dirty_by_changes(checkpoint, result, changes),
        faults=(*faults, *host_faults),
    )


def _reconcile_backends(
    draft: Draft, observed: ObservedState, scope: _Scope, due: list[DueTime], *, epoch: int, now: float
) -> list[Fault]:
    faults: list[Fault] = []

    def guarded(tag: BackendTag, part: Callable[[Backend], None]) -> None:
        """Isolate the error of one backend: its part of the draft is rolled back and reported as a fault."""
        backend = draft.backends.get(tag)
        if backend is None:
            return
        mark = draft.mark()
        try:
            part(backend)
        except Exception:  # noqa: BLE001 - any defect in one backend's part; the shell logs it
            draft.roll_back(mark)
            faults.append(Fault(tag, traceback.format_exc()))
            due.append(DueTime(now + FAULT_RETRY_S, ("backend", tag)))

    def advance(backend: Backend) -> None:
        tag = backend.backend_tag
        roll(draft, ledger, backend, now)
        at = check_again_at(draft, draft.backends[tag], now)
        if at is not None:
            due.append(DueTime(at, ("backend", tag)))

    tags = sorted(scope.backends)
    for tag in tags:
        guarded(tag, lambda backend: apply_reports(draft, observed, backend, epoch, now))
    for tag in tags:
        guarded(tag, lambda backend: fail_after_retries(draft, backend, now))
    # A failed goal of an application changes its other backends too, before any of them is rolled out.
    scope.backends.update(BackendTag(name) for kind, name in draft.touched() if kind is ObjectKind.BACKEND)
    if scope.has_capacity or any(kind is ObjectKind.REPLICA for kind, _ in draft.touched()):
        scope.backends.update(draft.unplaced)
    ledger = Ledger(draft, observed, now)
    for tag in sorted(scope.backends):
        guarded(tag, advance)
    return faults


def _advance_rollouts(draft: Draft, observed: ObservedState, due: list[DueTime], now: float) -> None:
    """Advance all rollouts, whatever the scope: there are few, and what proxies count of them is always new."""
    for tag in sorted(draft.active_rollouts):
        at = advance_rollout(draft, observed, tag, now)
        if at is not None:
            due.append(DueTime(at, ("backend", tag)))


def _update_host(draft: Draft, observed: ObservedState, host_id: HostId) -> None:
    """Update the record of a reporting host, and the holder of its id."""
    host = observed.hosts.get(host_id)
    if host is None:
        return
    if host_id not in draft.hosts:
        draft.renew_host_goal(host_id)
    record, holder = draft.hosts[host_id], "" if host.report.leaving else holder_digest(host.report)
    if record.holder != holder:
        draft.put(msgspec.structs.replace(record, holder=holder))


def _update_proxies(draft: Draft, observed: ObservedState, scope: _Scope, now: float) -> None:
    """Update the records of the proxies that goals wait for."""
    for proxy_id in sorted(scope.proxies):
        is_live, proxy = is_proxy_live(observed, proxy_id, now), observed.proxies.get(proxy_id)
        holder = None if proxy is None else holder_digest(proxy.report)
        if is_live and holder is not None:
            draft.put(ProxyRecord(proxy_id=proxy_id, holder=holder))
        elif is_live and proxy_id not in draft.proxies:
            draft.put(ProxyRecord(proxy_id=proxy_id))
        elif not is_live and proxy_id in draft.proxies:
            draft.delete((ObjectKind.PROXY, proxy_id))


def _drop_deleted(draft: Draft, scope: _Scope, now: float) -> None:
    """Delete backends whose last replica is gone; a deployment's record retains what it was."""
    for tag in sorted(scope.backends):
        backend = draft.backends.get(tag)
        if backend is None or not backend.deleting or draft.get_replicas(tag):
            continue
        draft.delete((ObjectKind.BACKEND, tag))
        if tag not in draft.active_rollouts:
            draft.delete((ObjectKind.ROLLOUT, tag))
            failed = draft.backends.get(canary_tag(tag))
            if failed is not None:  # an aborted version that was kept
                draft.put(msgspec.structs.replace(failed, deleting=True))
        for number in sorted(draft.revisions.get(tag, {})):
            draft.delete((ObjectKind.REVISION, revision_name(tag, number)))
        deployment = draft.living_deployment(tag)
        if deployment is not None:
            draft.put(
                msgspec.structs.replace(
                    deployment,
                    ended_at=now,
                    ended_as=backend.target,
                    ended_goal_id=backend.goal_id,
                )
            )


def _goals_in(draft: Draft, scope: _Scope) -> list[GoalId]:
    """Pending goals of the objects in scope, in the order of their creation."""
    found = {goal_id for goal_id in scope.goals if goal_id in draft.pending}
    keys: Iterable[str] = (
        *(backend_key(tag) for tag in scope.backends),
        *(endpoint_key(tag) for tag in scope.endpoints),
        *(host_owned(host_id) for host_id in scope.hosts),
        *scope.keys,
    )
    if draft.pending:
        for key in keys:
            found.update(draft.owners.get(key, {}))
    return sorted(found, key=parse_number)


def _bucket_actions(checkpoint: Checkpoint, observed: ObservedState, keys: set[str]) -> list[Action]:
    """Actions that make the bucket equal to the recorded snapshots; none while its content is not known."""
    bucket = observed.bucket
    if bucket is None:
        return []
    records = [record for key in keys if (record := checkpoint.snapshots.get(key)) is not None]
    behind = [r for r in records if bucket.get(r.key) != r.snapshot.snapshot_id]
    behind.sort(key=lambda r: r.snapshot.snapshot_id)
    actions: list[Action] = [PublishSnapshot(record.key, record.snapshot) for record in behind]
    actions += [
        RetractSnapshot(key) for key in sorted(keys) if key in bucket and key not in checkpoint.snapshots
    ]
    return actions


def send_host_goals(
    checkpoint: Checkpoint, observed: ObservedState, epoch: int, now: float, host_ids: Iterable[HostId]
) -> tuple[list[SendHostGoal], list[DueTime], list[Fault]]:
    """Goals for the hosts that have not acknowledged theirs, each at most once in `GOAL_RESEND_AFTER_S`.

    A silent host is sent its goal again too: it responds to each with a report, so it is probed several times before it
    counts as lost.
    """
    if observed.bucket is None:
        # Routers must leave a replica before its host drains it, and nothing can be published yet.
        return [], [], []
    actions: list[SendHostGoal] = []
    times: list[DueTime] = []
    faults: list[Fault] = []
    for host_id in sorted(host_ids):
        host, record = observed.hosts.get(host_id), checkpoint.hosts.get(host_id)
        status = host_status(observed, host_id, now)
        if host is None or record is None or status is HostStatus.LOST:
            continue
        wanted = (epoch, record.generation)
        if (host.report.epoch, host.report.generation) == wanted and status is not HostStatus.SUSPECT:
            continue
        resend_at = host.sent_at + GOAL_RESEND_AFTER_S
        if host.sent == wanted and now < resend_at:
            times.append(DueTime(resend_at, ("host_goal", host_id)))
            continue
        times.append(DueTime(now + GOAL_RESEND_AFTER_S, ("host_goal", host_id)))
        try:
            goal = _host_goal(checkpoint, host_id, wanted)
        except Exception:  # noqa: BLE001 - any defect in one host's part; the shell logs it
            # No goal at all: one that lacks a replica would stop it.
            faults.append(Fault(host_id, traceback.format_exc()))
            continue
        actions.append(SendHostGoal(goal))
    return actions, times, faults


def _host_goal(checkpoint: Checkpoint, host_id: HostId, number: tuple[int, int]) -> HostGoal:
    known = checkpoint.by_host.get(host_id)
    replicas = [] if known is None else sorted(known.values(), key=lambda r: r.replica_tag)
    return HostGoal(
        host_id=host_id,
        epoch=number[0],
        generation=number[1],
        replicas=[_replica_goal(checkpoint, r) for r in replicas if r.state in IN_HOST_GOAL],
        kill=[r.replica_tag for r in replicas if r.force_kill and r.state not in IN_HOST_GOAL],
    )


def _replica_goal(checkpoint: Checkpoint, replica: Replica) -> ReplicaGoal:
    backend = checkpoint.backends[replica.backend_tag]
    version = backend.get_version(replica.config_version)
    assert version is not None, f"{replica.replica_tag} runs a version that is forgotten"
    config = version.backend_config
    return ReplicaGoal(
        replica_tag=replica.replica_tag,
        backend_tag=replica.backend_tag,
        replica_config=version.replica_config,
        config_version=version.config_version,
        user_config=config.user_config,
        logging_config=config.logging_config,
        max_concurrent_queries=config.max_concurrent_queries,
        graceful_shutdown_timeout_s=config.graceful_shutdown_timeout_s,
        health_check_period_s=config.health_check_period_s,
        health_check_timeout_s=config.health_check_timeout_s,
        health_check_failure_threshold=config.health_check_failure_threshold,
        start_timeout_s=version.start_seconds,
        may_call=config.may_call,
        code_version=replica.code_version,
        peer_versions=replica.peer_versions,
        rank=replica.rank,
        world_size=backend.world_size,
    )
