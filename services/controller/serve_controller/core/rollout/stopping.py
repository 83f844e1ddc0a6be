"""Which replicas go: what is too much, what is replaced, and what makes room for its successor.

Why so careful: a replica that is stopped cannot be had back, so none that serves goes before another does in its place,
but for the unavailable budget.
"""

from __future__ import annotations

import msgspec

from serve_controller.core.checkpoint import Draft
from serve_controller.core.objects import Backend, Replica, ReplicaState
from serve_controller.core.placement import Ledger
from serve_controller.core.replica_reports import with_event
from serve_controller.core.rollout.budgets import surge_of, unavailable_of
from serve_controller.core.rollout.standing import age_rank, current_replicas, old_replicas, wanted_replicas
from serve_controller.core.transitions import IN_HOST_GOAL, ROUTED, Event


def stop_surplus(draft: Draft, backend: Backend, now: float) -> None:
    """Scale down: what serves least goes first, then the newest."""
    current = current_replicas(draft, backend)
    surplus = len(current) - backend.num_wanted
    if surplus <= 0:
        return
    for replica in sorted(current, key=stop_rank)[:surplus]:
        with_event(draft, replica, Event.UNWANTED, now)


_ORDER = list(ReplicaState)


def stop_rank(replica: Replica) -> tuple[bool, int, int]:
    """The lower, the sooner a replica is stopped when fewer are wanted: what serves least, then the newest."""
    is_routed = replica.state in ROUTED
    return (is_routed, -_ORDER.index(replica.state) if is_routed else 0, -replica.ordinal)


def stop_old(draft: Draft, ledger: Ledger, backend: Backend, now: float) -> None:
    """Stop replicas that are to be replaced as far as the target's serve in their place."""
    old = old_replicas(draft, backend)
    if not old:
        return
    wanted = backend.num_wanted
    if backend.start_failures and backend.last_good is not None and wanted > 0:
        return  # the new version does not prove itself: nothing is given up for it
    serving = sum(r.state in ROUTED for r in wanted_replicas(draft, backend))
    # With fewer replicas wanted than serve, the surplus still stays until the new version serves at all.
    is_proven = wanted == 0 or any(r.state in ROUTED for r in current_replicas(draft, backend))
    floor = wanted
    if surge_of(backend.target.backend_config) == 0:
        # None may run beside the old ones, so some of these go first.
        floor, is_proven = wanted - unavailable_of(backend.target.backend_config), True
    for replica in old:
        if replica.state not in ROUTED:
            with_event(draft, replica, Event.UNWANTED, now)
        elif serving > floor and is_proven:
            with_event(draft, replica, Event.UNWANTED, now)
            serving -= 1
    _make_room(draft, ledger, backend, now)


def _make_room(draft: Draft, ledger: Ledger, backend: Backend, now: float) -> None:
    """Where no replica of the target can be placed, old ones leave first, within the unavailable budget."""
    if backend.backend_tag not in draft.unplaced:
        return
    waiting = [r for r in current_replicas(draft, backend) if r.state is ReplicaState.SHOULD_START]
    replicas = draft.replicas_of(backend.backend_tag).values()
    stopping = any(r.state in (ReplicaState.SHOULD_STOP, ReplicaState.STOPPING) for r in replicas)
    if not waiting or stopping:
        return
    lowest = backend.num_wanted - unavailable_of(backend.target.backend_config)
    serving = sum(r.state in ROUTED for r in wanted_replicas(draft, backend))
    old, made = old_replicas(draft, backend), 0
    for host_id in dict.fromkeys(r.host_id for r in old):
        leaving: list[Replica] = []  # a larger new one may need the room of several
        for replica in old:
            if replica.host_id != host_id:
                continue
            leaving.append(replica)
            if made == len(waiting) or serving - len(leaving) < lowest:
                break
            if ledger.would_fit_without(backend.backend_tag, host_id, leaving, backend.target):
                for left in leaving:
                    with_event(draft, left, Event.UNWANTED, now)
                serving, made, leaving = serving - len(leaving), made + 1, []


def take_out_of_goals(draft: Draft, backend: Backend) -> None:
    """A replica that should stop leaves its host's goal; one that never had a host is simply gone."""
    is_forced = backend.deleting and backend.force_kill
    for replica in sorted(draft.replicas_of(backend.backend_tag).values(), key=age_rank):
        if replica.state is ReplicaState.SHOULD_STOP:
            if replica.host_id is None:
                with_event(draft, replica, Event.GONE, replica.since)
                continue
            if not _is_taken_out(draft, replica):
                draft.put(
                    msgspec.structs.replace(
                        replica,
                        generation=draft.renew_host_goal(replica.host_id),
                        force_kill=replica.force_kill or is_forced,
                    )
                )
                continue
        is_stopping = replica.state in (ReplicaState.SHOULD_STOP, ReplicaState.STOPPING)
        if is_stopping and is_forced and not replica.force_kill and replica.host_id is not None:
            generation = draft.renew_host_goal(replica.host_id)
            draft.put(msgspec.structs.replace(replica, generation=generation, force_kill=True))


def _is_taken_out(draft: Draft, replica: Replica) -> bool:
    """Whether the replica left its host's goal in an earlier decision (its state was recorded then)."""
    before = draft.base.replicas_of(replica.backend_tag).get(replica.replica_tag)
    return before is not None and before.state not in IN_HOST_GOAL
