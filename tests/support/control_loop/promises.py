"""What every plan promises, whatever was asked and heard: checked after each one of the closed loop."""

from __future__ import annotations

import msgspec

from serve_common.api.views import GoalStatus
from serve_common.names import HostId, ReplicaTag
from serve_common.protocol.reports import HostGoal
from serve_common.protocol.snapshots import BackendSnapshot, Snapshot
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.host_load import in_units
from serve_controller.core.objects import Backend, BackendVersion, Replica, ReplicaState
from serve_controller.core.observed import ObservedState
from serve_controller.core.placement import resource_needs
from serve_controller.core.reconcile import PublishSnapshot, ReconcilePlan, SendHostGoal
from serve_controller.core.rolling_update import max_surge
from serve_controller.core.transitions import IN_HOST_GOAL, ROUTED, TRANSITIONS, WANTED


class Remembered:
    """What a single plan cannot show."""

    def __init__(self) -> None:
        self.goals_sent: dict[tuple[HostId, int, int], HostGoal] = {}
        self.ended: dict[str, GoalStatus] = {}
        self.ordinals: dict[int, ReplicaTag] = {}
        self.snapshot_ids: dict[int, tuple[str, Snapshot]] = {}


def contents(checkpoint: Checkpoint) -> set[str]:
    """Everything in it, comparable."""
    return {msgspec.json.encode((type(value).__name__, value)).decode() for value in checkpoint.all_objects()}


def all_replicas(checkpoint: Checkpoint) -> dict[ReplicaTag, Replica]:
    """Every replica of every backend."""
    return {tag: r for replicas in checkpoint.replicas.values() for tag, r in replicas.items()}


def check_plan(
    before: Checkpoint, observed: ObservedState, plan: ReconcilePlan, epoch: int, remembered: Remembered
) -> None:
    """Every promise that a single plan can keep or break."""
    assert plan.faults == (), plan.faults
    after = plan.checkpoint
    assert contents(before.applied(plan.changes)) == contents(after)
    _check_replicas(before, after, remembered)
    _check_surge(before, after)
    _check_room(before, observed, after)
    _check_host_goals(after, plan, epoch, remembered)
    _check_snapshots(after, plan, remembered)
    for goal in after.goals.values():
        ended = remembered.ended.get(goal.goal_id)
        assert ended is None or goal.status is ended, f"{goal.goal_id} ended {ended}, then {goal.status}"
        if goal.status is not GoalStatus.PENDING:
            remembered.ended[goal.goal_id] = goal.status
    counters = (before.counters, after.counters)
    assert all(x <= y for x, y in zip(*map(msgspec.structs.astuple, counters), strict=True))


def _check_replicas(before: Checkpoint, after: Checkpoint, remembered: Remembered) -> None:
    former = all_replicas(before)
    for tag, replica in all_replicas(after).items():
        assert replica.state is not ReplicaState.STOPPED, "a stopped replica's row is deleted"
        backend = after.backends[replica.backend_tag]
        assert tag == replica.replica_tag
        assert (replica.host_id is None) == (replica.state is ReplicaState.SHOULD_START)
        version = backend.get_version(replica.config_version)
        assert version is not None, f"{tag} runs a version that is forgotten"
        assert replica.host_id is None or replica.needs == resource_needs(version)
        assert remembered.ordinals.setdefault(replica.ordinal, tag) == tag, "an ordinal was given twice"
        known = former.get(tag)
        if known is None:
            assert replica.ordinal > before.counters.ordinal
            continue
        assert known.host_id in (None, replica.host_id), f"{tag} moved from {known.host_id}"
        assert replica.state in _reachable(known.state), f"{tag}: {known.state} to {replica.state}"


def _reachable(state: ReplicaState) -> set[ReplicaState]:
    found, new = {state}, {state}
    while new:
        new = {to for at in new for to in TRANSITIONS[at].values()} - found
        found |= new
    return found


def _check_surge(before: Checkpoint, after: Checkpoint) -> None:
    for tag, backend in after.backends.items():
        now = sum(r.state in WANTED for r in after.get_replicas(tag).values())
        was = sum(r.state in WANTED for r in before.get_replicas(tag).values())
        configs = [version.backend_config for version in _versions(before, backend)]
        # The many old ones of a smaller new version wait for the first new one to serve.
        most = max(config.num_replicas for config in configs) + max(map(max_surge, configs))
        former = before.backends.get(tag)
        # A replica can be started in the very plan that then drops its backend.
        wanted = max(backend.num_wanted, 0 if former is None else former.num_wanted)
        assert now <= max(was, most if wanted else 0), (
            f"{now} replicas of {tag} for {backend.num_wanted} wanted"
        )


def _versions(before: Checkpoint, backend: Backend) -> list[BackendVersion]:
    former = before.backends.get(backend.backend_tag)
    return [*backend.versions(), *([] if former is None else former.versions())]


def _check_room(before: Checkpoint, observed: ObservedState, after: Checkpoint) -> None:
    former = all_replicas(before)
    placed_on: dict[HostId, list[Replica]] = {}
    used: dict[HostId, dict[str, int]] = {}
    for tag, replica in all_replicas(after).items():
        if replica.host_id is None:
            continue
        on_host = used.setdefault(replica.host_id, {})
        for name, amount in replica.needs.items():
            on_host[name] = on_host.get(name, 0) + in_units(amount)
        known = former.get(tag)
        if known is None or known.host_id is None:
            placed_on.setdefault(replica.host_id, []).append(replica)
    for host_id, on_host in used.items():
        taken = {name: units for name, units in after.get_load(host_id).taken.items() if units}
        assert taken == on_host, f"the index of {host_id} differs from its replicas"
    for host_id, placed in placed_on.items():
        host, record = observed.hosts[host_id], after.hosts[host_id]
        assert not host.report.leaving, f"something was placed on {host_id}, which leaves"
        assert not record.draining, f"something was placed on {host_id}, which is drained"
        for name, units in used[host_id].items():
            assert units <= host.units.get(name, 0), f"{host_id} is given {units} units of {name}"
        for replica in placed:
            _check_number_on_host(after, replica)


def _check_number_on_host(after: Checkpoint, replica: Replica) -> None:
    most = after.backends[replica.backend_tag].target.backend_config.max_replicas_per_host
    beside = [r for r in after.get_replicas(replica.backend_tag).values() if r.host_id == replica.host_id]
    assert most is None or len(beside) <= most, f"{len(beside)} replicas of one backend on {replica.host_id}"


def _check_host_goals(after: Checkpoint, plan: ReconcilePlan, epoch: int, remembered: Remembered) -> None:
    seen: dict[ReplicaTag, HostId] = {}
    for action in plan.actions:
        if not isinstance(action, SendHostGoal):
            continue
        goal = action.goal
        tags = {g.replica_tag for g in goal.replicas}
        assert len(tags) == len(goal.replicas)
        assert tags == {
            tag
            for tag, r in all_replicas(after).items()
            if r.host_id == goal.host_id and r.state in IN_HOST_GOAL
        }
        assert not tags & set(goal.kill)
        for tag in tags:
            assert seen.setdefault(tag, goal.host_id) == goal.host_id, f"{tag} is in two hosts' goals"
        number = (goal.host_id, epoch, goal.generation)
        assert goal.epoch == epoch
        assert remembered.goals_sent.setdefault(number, goal) == goal, f"{number} names two different goals"


def _check_snapshots(after: Checkpoint, plan: ReconcilePlan, remembered: Remembered) -> None:
    ids = [a.snapshot.snapshot_id for a in plan.actions if isinstance(a, PublishSnapshot)]
    assert ids == sorted(ids), "snapshots are published in the order of their ids"
    kinds = [isinstance(a, SendHostGoal) for a in plan.actions]
    assert kinds == sorted(kinds), "routers hear before hosts drain"
    for action in plan.actions:
        if isinstance(action, PublishSnapshot):
            value = (action.key, action.snapshot)
            assert remembered.snapshot_ids.setdefault(action.snapshot.snapshot_id, value) == value
            assert after.snapshots[action.key].snapshot == action.snapshot
            _check_routed(after, action.snapshot)


def _check_routed(after: Checkpoint, snapshot: Snapshot) -> None:
    """Never to what is not recorded as running: an orphan, or one that stops."""
    if isinstance(snapshot.content, BackendSnapshot):
        replicas = after.get_replicas(snapshot.content.backend_tag)
        assert all(replicas[tag].state in ROUTED for tag in snapshot.content.replicas)
