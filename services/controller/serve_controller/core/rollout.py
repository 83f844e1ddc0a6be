"""How a backend gets from what runs to what should run, without taking away what serves.

Why "new before old": the old replicas of a changed code version go only as far as new ones serve in their place.
Only where there is no room for even one more replica does an old one make room first, within the unavailable budget,
and only if the new one would fit into what it leaves.
"""

from __future__ import annotations

import math

import msgspec

from serve_common.names import replica_tag
from serve_controller.core.checkpoint import Draft
from serve_controller.core.objects import Backend, Replica, ReplicaState
from serve_controller.core.placement import Ledger, needs_of
from serve_controller.core.replica_reports import SHORT_LIFE_S, with_event
from serve_controller.core.transitions import IN_HOST_GOAL, ROUTED, WANTED, Event

BUDGET_SHARE = 0.25
"""Of the replicas: how many more than wanted may run during an update (surge), and how many fewer may serve when
there is no room for more (the unavailable budget). At least one each, as Kubernetes rounds its surge."""


NO_ROOM_FOR_CONFIG = "the whole goal of its host has no room for a configuration of this size"


def budget_of(num_replicas: int) -> int:
    """Surge and unavailable budget for that many replicas."""
    return max(1, math.ceil(num_replicas * BUDGET_SHARE))


def roll(draft: Draft, ledger: Ledger, backend: Backend, now: float) -> None:
    """Start, place, reconfigure and stop replicas of one backend, one step nearer to its target."""
    _forgive(draft, backend, now)
    _start(draft, draft.backends[backend.backend_tag], now)
    _place(draft, ledger, backend, now)
    _stop_surplus(draft, draft.backends[backend.backend_tag], now)
    _stop_old(draft, ledger, draft.backends[backend.backend_tag], now)
    _reconfigure(draft, ledger, draft.backends[backend.backend_tag], now)
    _take_out_of_goals(draft, backend)
    _prune_versions(draft, backend)


def look_again_at(draft: Draft, backend: Backend, now: float) -> float | None:
    """When time alone makes another step possible, or None."""
    backend = draft.backends.get(backend.backend_tag, backend)
    times = []
    if backend.retry_at > now and backend.num_wanted > 0:
        times.append(backend.retry_at)
    if backend.start_failures > 0:
        times += [r.since + SHORT_LIFE_S for r in _wanted(draft, backend) if r.state in ROUTED]
    return min((at for at in times if at > now), default=None)


def _wanted(draft: Draft, backend: Backend) -> list[Replica]:
    replicas = draft.replicas.get(backend.backend_tag, {}).values()
    return sorted((r for r in replicas if r.state in WANTED), key=lambda r: r.ordinal)


def _current(draft: Draft, backend: Backend) -> list[Replica]:
    return [r for r in _wanted(draft, backend) if r.code_version == backend.target.code_version]


def _old(draft: Draft, backend: Backend) -> list[Replica]:
    return [r for r in _wanted(draft, backend) if r.code_version != backend.target.code_version]


def _forgive(draft: Draft, backend: Backend, now: float) -> None:
    """A replica of the target that came up after the last failure and has served for a while ends the series.

    One that served before it proves nothing: it may run on a better host, or with an older configuration.
    """
    lived = any(
        r.state in ROUTED
        and r.config_version == backend.target.config_version
        and r.since >= backend.retry_at
        and now - r.since >= SHORT_LIFE_S
        for r in _current(draft, backend)
    )
    if backend.start_failures and lived:
        draft.put(msgspec.structs.replace(backend, start_failures=0, retry_at=0.0))


def _start(draft: Draft, backend: Backend, now: float) -> None:
    wanted, current, old = backend.num_wanted, _current(draft, backend), _old(draft, backend)
    missing = wanted - len(current)
    if old:
        surge = wanted + budget_of(wanted) - len(current) - len(old)
        # Where far fewer are wanted than run, all of the old ones wait for a first new one to serve.
        missing = min(missing, max(surge, budget_of(wanted) - len(current)))
    if missing <= 0 or now < backend.retry_at:
        return
    for _ in range(missing):
        draft.put(
            Replica(
                replica_tag=replica_tag(backend.backend_tag, draft.next_ordinal()),
                backend_tag=backend.backend_tag,
                code_version=backend.target.code_version,
                config_version=backend.target.config_version,
                state=ReplicaState.SHOULD_START,
                since=now,
            )
        )


def _place(draft: Draft, ledger: Ledger, backend: Backend, now: float) -> None:
    needs = needs_of(backend.target)
    for replica in _current(draft, backend):
        if replica.state is not ReplicaState.SHOULD_START:
            continue
        host_id = ledger.place(needs)
        if host_id is None:
            draft.put(msgspec.structs.replace(replica, message=ledger.why_not(needs)))
            continue
        placed = with_event(draft, replica, Event.PLACED, now)
        assert placed is not None
        draft.put(
            msgspec.structs.replace(
                placed,
                host_id=host_id,
                generation=draft.renew_host_goal(host_id),
                # It starts with the newest configuration, even if an older one was current when it was decided on.
                config_version=draft.backends[backend.backend_tag].target.config_version,
            )
        )


def _stop_surplus(draft: Draft, backend: Backend, now: float) -> None:
    """Scale down: what serves least goes first, then the newest."""
    current = _current(draft, backend)
    surplus = len(current) - backend.num_wanted
    if surplus <= 0:
        return
    order = list(ReplicaState)
    by_use = sorted(
        current,
        key=lambda r: (r.state in ROUTED, -order.index(r.state) if r.state in ROUTED else 0, -r.ordinal),
    )
    for replica in by_use[:surplus]:
        with_event(draft, replica, Event.UNWANTED, now)


def _stop_old(draft: Draft, ledger: Ledger, backend: Backend, now: float) -> None:
    """Stop replicas of other code versions as far as the target's serve in their place."""
    wanted = backend.num_wanted
    if backend.start_failures and backend.last_good is not None and wanted > 0:
        return  # the new version does not prove itself: nothing is given up for it
    old = _old(draft, backend)
    serving = sum(r.state in ROUTED for r in _wanted(draft, backend))
    # With fewer replicas wanted than serve, the surplus still stays until the new version serves at all.
    is_proven = wanted == 0 or any(r.state in ROUTED for r in _current(draft, backend))
    for replica in old:
        if replica.state not in ROUTED:
            with_event(draft, replica, Event.UNWANTED, now)
        elif serving > wanted and is_proven:
            with_event(draft, replica, Event.UNWANTED, now)
            serving -= 1
    _make_room(draft, ledger, backend, now)


def _make_room(draft: Draft, ledger: Ledger, backend: Backend, now: float) -> None:
    """Where no replica of the target can be placed, old ones leave first, within the unavailable budget."""
    waiting = [r for r in _current(draft, backend) if r.state is ReplicaState.SHOULD_START]
    replicas = draft.replicas.get(backend.backend_tag, {}).values()
    stopping = [r for r in replicas if r.state in (ReplicaState.SHOULD_STOP, ReplicaState.STOPPING)]
    if not waiting or stopping:
        return
    wanted, needs = backend.num_wanted, needs_of(backend.target)
    needs_by_version = {v.config_version: needs_of(v) for v in backend.versions()}
    serving = sum(r.state in ROUTED for r in _wanted(draft, backend))
    for replica in _old(draft, backend)[: len(waiting)]:
        if serving - 1 < wanted - budget_of(wanted):
            return
        if ledger.would_fit_without(replica.host_id, needs_by_version.get(replica.config_version, {}), needs):
            with_event(draft, replica, Event.UNWANTED, now)
            serving -= 1


def _reconfigure(draft: Draft, ledger: Ledger, backend: Backend, now: float) -> None:
    """Give a newer configuration to running replicas, a few at a time, so that a bad one stops early."""
    target = backend.target
    current = _current(draft, backend)
    room = budget_of(backend.num_wanted) - sum(r.state is ReplicaState.UPDATING for r in current)
    if backend.start_failures and backend.last_good is not None:
        room = 0  # what took it did not live: no more are put at risk
    needs_by_version = {v.config_version: needs_of(v) for v in backend.versions()}
    for replica in current:
        if replica.config_version == target.config_version:
            continue
        if replica.state is ReplicaState.RUNNING and room <= 0:
            continue
        if replica.state not in (ReplicaState.RUNNING, ReplicaState.UPDATING, ReplicaState.UNHEALTHY):
            continue
        known = needs_by_version.get(replica.config_version, {})
        if not ledger.resize(replica.host_id, known, needs_by_version[target.config_version]):
            draft.put(msgspec.structs.replace(replica, message=NO_ROOM_FOR_CONFIG))
            continue
        told = replica
        if replica.state is not ReplicaState.UNHEALTHY:
            room -= replica.state is ReplicaState.RUNNING
            updated = with_event(draft, replica, Event.RECONFIGURE, now)
            assert updated is not None
            told = updated
        # An unhealthy one is told too, since that may be what heals it, and stays out of the routes until it is.
        assert replica.host_id is not None
        draft.put(
            msgspec.structs.replace(
                told,
                config_version=target.config_version,
                generation=draft.renew_host_goal(replica.host_id),
                message="",
            )
        )


def _take_out_of_goals(draft: Draft, backend: Backend) -> None:
    """A replica that should stop leaves its host's goal; one that never had a host is simply gone."""
    for replica in list(draft.replicas.get(backend.backend_tag, {}).values()):
        if replica.state is not ReplicaState.SHOULD_STOP:
            continue
        if replica.host_id is None:
            with_event(draft, replica, Event.GONE, replica.since)
        elif not _is_taken_out(draft, replica):
            draft.put(msgspec.structs.replace(replica, generation=draft.renew_host_goal(replica.host_id)))


def _is_taken_out(draft: Draft, replica: Replica) -> bool:
    """Whether the replica left its host's goal in an earlier decision (its state was recorded then)."""
    before = draft.base_replica(replica.replica_tag)
    return before is not None and before.state not in IN_HOST_GOAL


def _prune_versions(draft: Draft, backend: Backend) -> None:
    """Forget versions that no replica runs."""
    backend = draft.backends[backend.backend_tag]
    used = {r.config_version for r in draft.replicas.get(backend.backend_tag, {}).values()}
    kept = {backend.target.config_version}
    if backend.last_good is not None:
        kept.add(backend.last_good.config_version)
    others = []
    for version in backend.others:
        if version.config_version in used and version.config_version not in kept:
            kept.add(version.config_version)
            others.append(version)
    if others != backend.others:
        draft.put(msgspec.structs.replace(backend, others=others))
