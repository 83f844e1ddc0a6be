"""Objects of a checkpoint for tests that look at it from outside: put any state together without deciding on it."""

from __future__ import annotations

import msgspec

from serve_common.api.views import GoalStatus
from serve_common.config.backend import BackendConfig, RayActorOptions, ReplicaConfig
from serve_common.names import BackendTag, EndpointTag, GoalId, HostId, parse_ordinal, replica_tag
from serve_common.protocol.reports import HostReport
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.goals import deployment_owned
from serve_controller.core.objects import (
    Backend,
    BackendVersion,
    CheckpointObject,
    Deployment,
    EndpointConfig,
    EndpointRecord,
    Goal,
    GoalKind,
    ObjectChanges,
    Replica,
    ReplicaState,
)
from serve_controller.core.observed import ObservedState, observe_host

NOW = 1_000_000.0
TAG = BackendTag("default/a")
G1 = GoalId("g1")


def checkpoint_of(*values: CheckpointObject, base: Checkpoint | None = None) -> Checkpoint:
    """A checkpoint with these objects, on top of ``base``."""
    return (Checkpoint() if base is None else base).applied(ObjectChanges(tuple(values)))


def get_version(
    code: int = 1,
    config: int | None = None,
    *,
    version: str | None = "v1",
    path: str = "m:A",
    cpus: float = 1.0,
    **options: object,
) -> BackendVersion:
    """A version; ``options`` are of its backend's configuration."""
    return BackendVersion(
        code_version=code,
        config_version=code if config is None else config,
        version=version,
        replica_config=ReplicaConfig(import_path=path, ray_actor_options=RayActorOptions(num_cpus=cpus)),
        backend_config=msgspec.convert(options, BackendConfig),
    )


def backend_of(target: BackendVersion, tag: BackendTag = TAG, **fields: object) -> Backend:
    """A backend whose target has succeeded, unless ``fields`` say otherwise."""
    made = Backend(
        backend_tag=tag,
        goal_id=G1,
        target=target,
        last_good=target,
        newest_code_version=target.code_version,
        newest_config_version=target.config_version,
    )
    return msgspec.structs.replace(made, **fields)


def endpoint_of(
    tag: BackendTag = TAG, *, route: str | None = "/a", traffic: dict[BackendTag, float] | None = None
) -> EndpointRecord:
    """An endpoint; without ``traffic`` it sends everything to the backend of its tag."""
    config = EndpointConfig(route=route, methods=["GET"], traffic={tag: 1.0} if traffic is None else traffic)
    return EndpointRecord(endpoint_tag=EndpointTag(tag), target=config, last_good=config)


def deployment_of(tag: BackendTag = TAG, **fields: object) -> Deployment:
    """The mark of a deployment that is there."""
    return msgspec.structs.replace(Deployment(tag=tag, started_at=NOW - 100), **fields)


def goal_of(
    goal_id: str = "g1", status: GoalStatus = GoalStatus.SUCCEEDED, tag: BackendTag = TAG, **fields: object
) -> Goal:
    """A goal of a deployment."""
    made = Goal(
        goal_id=GoalId(goal_id),
        kind=GoalKind.DEPLOY,
        subject=tag,
        owns=deployment_owned(tag),
        status=status,
        created_at=NOW,
        finished_at=None if status is GoalStatus.PENDING else NOW,
    )
    return msgspec.structs.replace(made, **fields)


def replica_of(
    ordinal: int,
    version: BackendVersion,
    state: ReplicaState = ReplicaState.RUNNING,
    host: str | None = "host-1",
    tag: BackendTag = TAG,
    **fields: object,
) -> Replica:
    """A replica of that version."""
    made = Replica(
        replica_tag=replica_tag(tag, ordinal),
        backend_tag=tag,
        code_version=version.code_version,
        config_version=version.config_version,
        state=state,
        since=NOW,
        host_id=None if host is None else HostId(host),
    )
    assert made.ordinal == parse_ordinal(made.replica_tag)
    return msgspec.structs.replace(made, **fields)


def observed_hosts(*host_ids: str, cpus: float = 4.0) -> ObservedState:
    """What is heard when these hosts live."""
    observed = ObservedState(since=NOW - 100, bucket={})
    for host_id in host_ids:
        report = HostReport(
            host_id=HostId(host_id),
            incarnation="i",
            sequence=1,
            started_at=NOW - 100,
            epoch=1,
            generation=1,
            resources={"CPU": cpus},
            replicas=[],
        )
        observed = observe_host(observed, report, NOW)
    return observed
