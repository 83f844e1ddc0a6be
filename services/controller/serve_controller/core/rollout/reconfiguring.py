"""How replicas that run take a newer configuration without a restart.

Why a few at a time: one that raises in ``reconfigure``, or dies of what it was given, must not take the others along.
"""

from __future__ import annotations

import msgspec

from serve_controller.core.checkpoint import Draft
from serve_controller.core.objects import Backend, Replica, ReplicaState
from serve_controller.core.placement import Ledger, goal_bytes_of, needs_of
from serve_controller.core.replica_reports import with_event
from serve_controller.core.rollout.budgets import unavailable_of
from serve_controller.core.rollout.standing import is_kept, wanted_replicas
from serve_controller.core.transitions import Event

NO_ROOM_FOR_CONFIG = "the whole goal of its host has no room for a configuration of this size"


def _differs_by_number(backend: Backend, replica: Replica) -> bool:
    """Whether the replica has the target's configuration already, under a number from before the store was restored."""
    version, target = backend.version_of(replica.config_version), backend.target
    if version is None:
        return False
    # How many there are to be is nothing that a replica is given, and the autoscaler may have moved it since.
    num_replicas = target.backend_config.num_replicas
    config = msgspec.structs.replace(version.backend_config, num_replicas=num_replicas)
    number = target.config_version
    return msgspec.structs.replace(version, config_version=number, backend_config=config) == target


def reconfigure(draft: Draft, ledger: Ledger, backend: Backend, now: float) -> None:
    """Give the target's configuration to replicas that run its code with an older one, as many as the budget allows."""
    target = backend.target
    # Also on a host that is drained: where nothing can replace them, they serve for long.
    same_code = [r for r in wanted_replicas(draft, backend) if r.code_version == target.code_version]
    stale = [r for r in same_code if r.config_version != target.config_version and not is_kept(backend, r)]
    if not stale:
        return
    updating = sum(r.state is ReplicaState.UPDATING for r in same_code)
    room = max(1, unavailable_of(target.backend_config)) - updating
    is_risky = backend.start_failures > 0 and backend.last_good is not None
    for replica in stale:
        if replica.state is ReplicaState.RUNNING and room <= 0:
            continue
        if replica.state is ReplicaState.RUNNING and is_risky and not _differs_by_number(backend, replica):
            continue  # what took it did not live: no more are put at risk
        if replica.state not in (ReplicaState.RUNNING, ReplicaState.UPDATING):
            continue
        size = goal_bytes_of(target, replica.companions)
        if not ledger.resize(replica.host_id, size - replica.goal_bytes):
            if replica.message != NO_ROOM_FOR_CONFIG:
                draft.put(msgspec.structs.replace(replica, message=NO_ROOM_FOR_CONFIG))
            continue
        room -= replica.state is ReplicaState.RUNNING
        told = with_event(draft, replica, Event.RECONFIGURE, now)
        assert told is not None
        assert replica.host_id is not None
        draft.put(
            msgspec.structs.replace(
                told,
                config_version=target.config_version,
                generation=draft.renew_host_goal(replica.host_id),
                goal_bytes=size,
                needs=needs_of(target),
                message="",
            )
        )
