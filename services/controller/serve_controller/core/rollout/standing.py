"""How a backend's replicas stand to its target: wanted, what it asks for, or to be replaced.

Why in one place: what is started, stopped and reconfigured must go by the same answer, or a plan would undo itself.
"""

from __future__ import annotations

from serve_controller.core.checkpoint import Draft
from serve_controller.core.objects import Backend, Replica, ReplicaState
from serve_controller.core.transitions import WANTED


def wanted_replicas(draft: Draft, backend: Backend) -> list[Replica]:
    """Replicas that should go on or come up, the oldest first."""
    replicas = draft.replicas_of(backend.backend_tag).values()
    return sorted((r for r in replicas if r.state in WANTED), key=age_rank)


def age_rank(replica: Replica) -> tuple[int, str]:
    """The oldest first: of one backend's tags the longer has the higher ordinal; reading the number costs far more."""
    return (len(replica.replica_tag), replica.replica_tag)


def _is_current(draft: Draft, backend: Backend, replica: Replica) -> bool:
    """Whether a wanted replica is what the target asks for, where it may be; the others are to be replaced."""
    host = None if replica.host_id is None else draft.hosts.get(replica.host_id)
    if host is not None and host.draining:
        return False
    if replica.code_version == backend.target.code_version:
        return True
    return is_kept(backend, replica)


def current_replicas(draft: Draft, backend: Backend) -> list[Replica]:
    """Those of them that are what the target asks for."""
    return [r for r in wanted_replicas(draft, backend) if _is_current(draft, backend, r)]


def old_replicas(draft: Draft, backend: Backend) -> list[Replica]:
    """Those of them that are to be replaced."""
    return [r for r in wanted_replicas(draft, backend) if not _is_current(draft, backend, r)]


def is_kept(backend: Backend, replica: Replica) -> bool:
    """Whether a failed update left the replica with what it has (`OnFailure.KEEP`)."""
    kept = backend.kept
    return (
        kept is not None
        and replica.config_version == kept.config_version
        and replica.state is ReplicaState.RUNNING
    )
