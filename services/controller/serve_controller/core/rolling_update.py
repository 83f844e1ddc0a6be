"""Rolls a backend from what runs to its target, without removing replicas that still serve.

A stopped replica cannot be brought back, so new replicas come before old ones go: replicas of a former code version, or
on a drained host, stop only as far as new ones serve in their place. Only where there is no capacity for even one more
replica does an old one stop first, within the unavailable budget, and only if a new one fits into what it frees.
"""

from __future__ import annotations

import math

import msgspec

from serve_common.config.backend import BackendConfig
from serve_common.names import BackendTag, replica_tag
from serve_controller.core.checkpoint import Checkpoint, Draft
from serve_controller.core.objects import Backend, Replica, ReplicaState
from serve_controller.core.placement import Ledger, Placer, estimate_goal_bytes, resource_needs
from serve_controller.core.ranks import FreeRanks, renew_ranks
from serve_controller.core.replica_reports import SHORT_LIFE_S, stuck_at, with_event
from serve_controller.core.transitions import IN_HOST_GOAL, ROUTED, WANTED, TransitionEvent


def get_peer_versions(checkpoint: Checkpoint, tag: BackendTag) -> dict[BackendTag, int]:
    """Target code versions of the other backends of the backend's application; empty without an application.

    They are recorded with each replica (`Replica.peer_versions`) when it is placed, and must not change while it runs:
    during an update replicas of two versions of every deployment serve side by side, and a request that began with the
    new ingress should continue with the new model.
    """
    deployment = checkpoint.deployments.get(tag)
    if deployment is None or deployment.ended_at is not None:
        return {}
    application = checkpoint.applications.get(deployment.application)
    if application is None or tag not in application.target.deployments:
        return {}
    return {
        other: backend.target.code_version
        for other in sorted(application.target.deployments)
        if other != tag and (backend := checkpoint.backends.get(other)) is not None and not backend.deleting
    }


def _share(num_replicas: int, percent: float) -> int:
    """A percentage of the replicas, rounded up as Kubernetes rounds its surge: at least one unless it is 0 %.

    Budgets are percentages because what a backend can spare, and what its hosts can bear, grow with it.
    """
    return math.ceil(max(num_replicas, 1) * percent / 100.0)


def max_surge(config: BackendConfig) -> int:
    """Extra replicas allowed during an update."""
    return _share(config.num_replicas, config.max_surge_percent)


def max_unavailable(config: BackendConfig) -> int:
    """Replicas that may be missing during an update where there is no capacity for extra ones."""
    return _share(config.num_replicas, config.max_unavailable_percent)


def wanted_replicas(draft: Draft, backend: Backend) -> list[Replica]:
    """Replicas that should keep running or start, the oldest first."""
    replicas = draft.get_replicas(backend.backend_tag).values()
    return sorted((r for r in replicas if r.state in WANTED), key=age_rank)


def age_rank(replica: Replica) -> tuple[int, str]:
    """Sort key by age. Of one backend's tags the longer has the higher ordinal; parsing the number costs far more."""
    return (len(replica.replica_tag), replica.replica_tag)


def _is_current(draft: Draft, backend: Backend, replica: Replica) -> bool:
    """Whether a wanted replica matches the target and is on a host that is not drained; others are to be replaced.

    Starting, stopping and reconfiguring must all go by this answer, or a plan would undo itself.
    """
    host = None if replica.host_id is None else draft.hosts.get(replica.host_id)
    if host is not None and host.draining:
        return False
    if replica.code_version == backend.target.code_version:
        return True
    return is_retained(backend, replica)


def current_replicas(draft: Draft, backend: Backend) -> list[Replica]:
    """Wanted replicas that match the target."""
    return [r for r in wanted_replicas(draft, backend) if _is_current(draft, backend, r)]


def old_replicas(draft: Draft, backend: Backend) -> list[Replica]:
    """Wanted replicas that are to be replaced."""
    return [r for r in wanted_replicas(draft, backend) if not _is_current(draft, backend, r)]


def is_retained(backend: Backend, replica: Replica) -> bool:
    """Whether a failed update retained the replica with its version (`OnFailure.KEEP`)."""
    retained = backend.retained
    return (
        retained is not None
        and replica.config_version == retained.config_version
        and replica.state is ReplicaState.RUNNING
    )


NO_CAPACITY_FOR_CONFIG = "the whole goal of its host has no room for a configuration of this size"


def _differs_by_number(backend: Backend, replica: Replica) -> bool:
    """Whether the replica has the target's configuration under a number from before the store was restored."""
    version, target = backend.get_version(replica.config_version), backend.target
    if version is None:
        return False
    # Replicas do not get num_replicas, and the autoscaler may have changed it since.
    num_replicas = target.backend_config.num_replicas
    config = msgspec.structs.replace(version.backend_config, num_replicas=num_replicas)
    number = target.config_version
    return msgspec.structs.replace(version, config_version=number, backend_config=config) == target


def reconfigure(draft: Draft, ledger: Ledger, backend: Backend, now: float) -> None:
    """Reconfigure replicas that run the target's code with an older configuration, as many as the budget allows.

    Only a few at a time: one that raises in ``reconfigure``, or dies of its new configuration, must not take the others
    along.
    """
    target = backend.target
    # Also on a drained host: where they cannot be replaced, they may serve for long.
    same_code = [r for r in wanted_replicas(draft, backend) if r.code_version == target.code_version]
    stale = [
        r for r in same_code if r.config_version != target.config_version and not is_retained(backend, r)
    ]
    if not stale:
        return
    updating = sum(r.state is ReplicaState.UPDATING for r in same_code)
    budget = max(1, max_unavailable(target.backend_config)) - updating
    is_risky = backend.start_failures > 0 and backend.last_good is not None
    for replica in stale:
        if replica.state is ReplicaState.RUNNING and budget <= 0:
            continue
        if replica.state is ReplicaState.RUNNING and is_risky and not _differs_by_number(backend, replica):
            continue  # a replica with this configuration failed: no more are put at risk
        if replica.state not in (ReplicaState.RUNNING, ReplicaState.UPDATING):
            continue
        size = estimate_goal_bytes(target, replica.peer_versions)
        if not ledger.resize(replica.host_id, size - replica.goal_bytes):
            if replica.message != NO_CAPACITY_FOR_CONFIG:
                draft.put(msgspec.structs.replace(replica, message=NO_CAPACITY_FOR_CONFIG))
            continue
        budget -= replica.state is ReplicaState.RUNNING
        updated = with_event(draft, replica, TransitionEvent.RECONFIGURE, now)
        assert updated is not None
        assert replica.host_id is not None
        draft.put(
            msgspec.structs.replace(
                updated,
                config_version=target.config_version,
                generation=draft.renew_host_goal(replica.host_id),
                goal_bytes=size,
                needs=resource_needs(target),
                message="",
            )
        )


def start(draft: Draft, backend: Backend, now: float) -> None:
    """Add as many new replicas as are missing, within the surge budget.

    They are added whether or not there is capacity: a replica that could not be placed makes an old one give way (see
    `_free_capacity`).
    """
    wanted, current, old = backend.num_wanted, current_replicas(draft, backend), old_replicas(draft, backend)
    missing = wanted - len(current)
    if old:
        surge = max_surge(backend.target.backend_config)
        budget = wanted + surge - len(current) - len(old)
        # Where far fewer are wanted than run, all old ones stay until a first new one serves.
        missing = min(missing, max(budget, surge - len(current)))
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


def place(draft: Draft, ledger: Ledger, backend: Backend, now: float) -> None:
    """Place replicas that wait for a host, or record why no host has capacity."""
    if backend.backend_tag not in draft.unplaced:
        return
    waiting = [r for r in current_replicas(draft, backend) if r.state is ReplicaState.SHOULD_START]
    peer_versions = get_peer_versions(draft, backend.backend_tag)
    placer = Placer(ledger, backend.backend_tag, backend.target, peer_versions)
    ranks = FreeRanks(draft.get_replicas(backend.backend_tag).values())
    for number, replica in enumerate(waiting):
        host_id = placer.place()
        if host_id is None:
            _record_reason(draft, ledger, backend, waiting, number)
            return
        placed = with_event(draft, replica, TransitionEvent.PLACED, now)
        assert placed is not None
        draft.put(
            msgspec.structs.replace(
                placed,
                host_id=host_id,
                generation=draft.renew_host_goal(host_id),
                # It starts with the newest configuration, even if an older one was current when it was added.
                config_version=backend.target.config_version,
                needs=placer.needs,
                goal_bytes=placer.goal_bytes,
                peer_versions=peer_versions,
                rank=ranks.assign(replica.replica_tag, host_id),
            )
        )


def _record_reason(
    draft: Draft, ledger: Ledger, backend: Backend, waiting: list[Replica], placed: int
) -> None:
    message = ledger.why_not(backend.backend_tag, backend.target)
    if len(waiting) > 1:
        message = f"{placed} of {len(waiting)} more fit: {message}"
    # One replica has the message of all: else thousands of rows would be written whenever a number in it changes.
    for replica in waiting[placed:]:
        text = message if replica is waiting[placed] else ""
        if replica.message != text:
            draft.put(msgspec.structs.replace(replica, message=text))


def stop_surplus(draft: Draft, backend: Backend, now: float) -> None:
    """Scale down: replicas that do not serve stop first, then the newest."""
    current = current_replicas(draft, backend)
    surplus = len(current) - backend.num_wanted
    if surplus <= 0:
        return
    for replica in sorted(current, key=stop_rank)[:surplus]:
        with_event(draft, replica, TransitionEvent.UNWANTED, now)


_ORDER = list(ReplicaState)


def stop_rank(replica: Replica) -> tuple[bool, int, int]:
    """Sort key for scaling down: replicas that do not serve come first, then the newest."""
    is_routed = replica.state in ROUTED
    return (is_routed, -_ORDER.index(replica.state) if is_routed else 0, -replica.ordinal)


def stop_old(draft: Draft, ledger: Ledger, backend: Backend, now: float) -> None:
    """Stop replicas that are to be replaced, as far as the target's replicas serve in their place."""
    old = old_replicas(draft, backend)
    if not old:
        return
    wanted = backend.num_wanted
    if backend.start_failures and backend.last_good is not None and wanted > 0:
        return  # the new version fails to start: no old replica is stopped for it
    serving = sum(r.state in ROUTED for r in wanted_replicas(draft, backend))
    # With fewer replicas wanted than serve, the surplus still stays until the new version serves at all.
    is_proven = wanted == 0 or any(r.state in ROUTED for r in current_replicas(draft, backend))
    floor = wanted
    if max_surge(backend.target.backend_config) == 0:
        # No extra replica is allowed, so some old ones stop first.
        floor, is_proven = wanted - max_unavailable(backend.target.backend_config), True
    for replica in old:
        if replica.state not in ROUTED:
            with_event(draft, replica, TransitionEvent.UNWANTED, now)
        elif serving > floor and is_proven:
            with_event(draft, replica, TransitionEvent.UNWANTED, now)
            serving -= 1
    _free_capacity(draft, ledger, backend, now)


def _free_capacity(draft: Draft, ledger: Ledger, backend: Backend, now: float) -> None:
    """Where no replica of the target can be placed, stop old ones first, within the unavailable budget."""
    if backend.backend_tag not in draft.unplaced:
        return
    waiting = [r for r in current_replicas(draft, backend) if r.state is ReplicaState.SHOULD_START]
    replicas = draft.get_replicas(backend.backend_tag).values()
    stopping = any(r.state in (ReplicaState.SHOULD_STOP, ReplicaState.STOPPING) for r in replicas)
    if not waiting or stopping:
        return
    lowest = backend.num_wanted - max_unavailable(backend.target.backend_config)
    serving = sum(r.state in ROUTED for r in wanted_replicas(draft, backend))
    old, made = old_replicas(draft, backend), 0
    for host_id in dict.fromkeys(r.host_id for r in old):
        leaving: list[Replica] = []  # a larger new one may need the capacity of several
        for replica in old:
            if replica.host_id != host_id:
                continue
            leaving.append(replica)
            if made == len(waiting) or serving - len(leaving) < lowest:
                break
            if ledger.would_fit_without(backend.backend_tag, host_id, leaving, backend.target):
                for left in leaving:
                    with_event(draft, left, TransitionEvent.UNWANTED, now)
                serving, made, leaving = serving - len(leaving), made + 1, []


def remove_from_host_goals(draft: Draft, backend: Backend) -> None:
    """Take replicas that should stop out of their hosts' goals; delete those that never had a host."""
    is_forced = backend.deleting and backend.force_kill
    for replica in sorted(draft.get_replicas(backend.backend_tag).values(), key=age_rank):
        if replica.state is ReplicaState.SHOULD_STOP:
            if replica.host_id is None:
                with_event(draft, replica, TransitionEvent.GONE, replica.since)
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
    """Whether the replica was taken out of its host's goal by an earlier plan."""
    before = draft.base.get_replicas(replica.backend_tag).get(replica.replica_tag)
    return before is not None and before.state not in IN_HOST_GOAL


def roll(draft: Draft, ledger: Ledger, backend: Backend, now: float) -> None:
    """Start, place, reconfigure and stop replicas of one backend: one step towards its target."""
    tag = backend.backend_tag
    _reset_failures(draft, backend, now)
    start(draft, draft.backends[tag], now)
    place(draft, ledger, draft.backends[tag], now)
    stop_surplus(draft, draft.backends[tag], now)
    stop_old(draft, ledger, draft.backends[tag], now)
    reconfigure(draft, ledger, draft.backends[tag], now)
    remove_from_host_goals(draft, draft.backends[tag])
    renew_ranks(draft, draft.backends[tag])
    _prune_versions(draft, draft.backends[tag])


def check_again_at(draft: Draft, backend: Backend, now: float) -> float | None:
    """When another step becomes possible by time alone, or None."""
    times = []
    if backend.retry_at > now and backend.num_wanted > 0:
        times.append(backend.retry_at)
    if backend.start_failures > 0:
        times += [r.since + SHORT_LIFE_S for r in wanted_replicas(draft, backend) if r.state in ROUTED]
    for replica in draft.get_replicas(backend.backend_tag).values():
        at = stuck_at(backend, replica)
        if at is not None:
            times.append(at)
    return min((at for at in times if at > now), default=None)


def _reset_failures(draft: Draft, backend: Backend, now: float) -> None:
    """Reset the failure count once a replica of the target that came up after the last failure has served for a while.

    A replica that served before proves nothing: it may run on a better host, or with an older configuration. But once
    all wanted replicas have served for so long, none is left to start that could prove more.
    """
    if not backend.start_failures:
        return
    lived = [
        r
        for r in current_replicas(draft, backend)
        if r.state in ROUTED
        and r.config_version == backend.target.config_version
        and now >= r.since + SHORT_LIFE_S  # the same sum as in `check_again_at`
    ]
    if any(r.since >= backend.retry_at for r in lived) or len(lived) >= backend.num_wanted > 0:
        draft.put(msgspec.structs.replace(backend, start_failures=0, retry_at=0.0))


def _prune_versions(draft: Draft, backend: Backend) -> None:
    """Delete versions that no replica runs."""
    if not backend.others and backend.retained is None:
        return
    used = {r.config_version for r in draft.get_replicas(backend.backend_tag).values()}
    retained = (
        backend.retained if backend.retained is not None and backend.retained.config_version in used else None
    )
    named = {v.config_version for v in (backend.target, backend.last_good, retained) if v is not None}
    others = []
    for version in backend.others:
        if version.config_version in used and version.config_version not in named:
            named.add(version.config_version)
            others.append(version)
    if others != backend.others or retained != backend.retained:
        draft.put(msgspec.structs.replace(backend, others=others, retained=retained))
