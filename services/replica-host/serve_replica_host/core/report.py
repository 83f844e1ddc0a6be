"""The host's report: its whole inventory, as one value.

Why whole: a report that is lost is repaired by the next one, and the controller never has to add up differences.
"""

from __future__ import annotations

from serve_common.wires.host import HostReport, ReplicaReport
from serve_replica_host.core.state import HeldReplica, HostState


def build_report(
    state: HostState,
    *,
    incarnation: str,
    started_at: float,
    sequence: int,
    resources: dict[str, float],
    metrics_url: str = "",
) -> HostReport:
    """What the host says of itself; equal states give reports that differ in ``sequence`` only."""
    return HostReport(
        host_id=state.host_id,
        incarnation=incarnation,
        sequence=sequence,
        started_at=started_at,
        epoch=state.goal_epoch,
        leader_epoch=state.epoch,
        generation=state.generation,
        resources=resources,
        replicas=[_replica_report(held) for held in state.replicas.values()],
        metrics_url=metrics_url,
        leaving=state.is_leaving,
    )


def _replica_report(held: HeldReplica) -> ReplicaReport:
    return ReplicaReport(
        replica_tag=held.tag,
        status=held.status,
        config_version=held.config_version,
        config_error_version=held.config_error_version,
        error=held.error,
        pid=held.pid,
    )
