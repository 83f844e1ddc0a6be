"""What is started for a backend's target, and where.

Why apart from stopping: what is missing is started as far as the surge allows, whether or not there is room; that a
replica finds none is told, and is what lets an old one make room.
"""

from __future__ import annotations

import msgspec

from serve_common.names import replica_tag
from serve_controller.core.checkpoint import Draft
from serve_controller.core.companions import companions_of
from serve_controller.core.objects import Backend, Replica, ReplicaState
from serve_controller.core.placement import Ledger
from serve_controller.core.replica_reports import with_event
from serve_controller.core.rollout.budgets import surge_of
from serve_controller.core.rollout.standing import current_replicas, old_replicas
from serve_controller.core.transitions import Event


def start(draft: Draft, backend: Backend, now: float) -> None:
    """Decide on as many new replicas as are missing, within the surge budget."""
    wanted, current, old = backend.num_wanted, current_replicas(draft, backend), old_replicas(draft, backend)
    missing = wanted - len(current)
    if old:
        surge = surge_of(backend.target.backend_config)
        room = wanted + surge - len(current) - len(old)
        # Where far fewer are wanted than run, all of the old ones wait for a first new one to serve.
        missing = min(missing, max(room, surge - len(current)))
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
    """Give those that wait for a host one that has room, or say why there is none."""
    if backend.backend_tag not in draft.unplaced:
        return
    waiting = [r for r in current_replicas(draft, backend) if r.state is ReplicaState.SHOULD_START]
    companions = companions_of(draft, backend.backend_tag)
    placer = ledger.placer(backend.backend_tag, backend.target, companions)
    for number, replica in enumerate(waiting):
        host_id = placer.place()
        if host_id is None:
            _tell_why_not(draft, ledger, backend, waiting, number)
            return
        placed = with_event(draft, replica, Event.PLACED, now)
        assert placed is not None
        draft.put(
            msgspec.structs.replace(
                placed,
                host_id=host_id,
                generation=draft.renew_host_goal(host_id),
                # It starts with the newest configuration, even if an older one was current when it was decided on.
                config_version=backend.target.config_version,
                needs=placer.needs,
                goal_bytes=placer.goal_bytes,
                companions=companions,
            )
        )


def _tell_why_not(
    draft: Draft, ledger: Ledger, backend: Backend, waiting: list[Replica], placed: int
) -> None:
    message = ledger.why_not(backend.backend_tag, backend.target)
    if len(waiting) > 1:
        message = f"{placed} of {len(waiting)} more fit: {message}"
    # One says it for all: else the rows of thousands would be written anew whenever a number in the text changes.
    for replica in waiting[placed:]:
        told = message if replica is waiting[placed] else ""
        if replica.message != told:
            draft.put(msgspec.structs.replace(replica, message=told))
