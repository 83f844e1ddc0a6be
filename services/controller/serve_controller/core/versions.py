"""Versions of a backend: what is wanted, and the backend with it as its target.

Why one place: the cost of a change (nothing, a reconfigure, a restart) is a promise to users, whatever makes it.
"""

from __future__ import annotations

import msgspec

from serve_common.config.backend import BackendConfig, ReplicaConfig
from serve_common.names import BackendTag, GoalId
from serve_controller.core.audit import REPLICA_OPTIONS
from serve_controller.core.objects import Backend, BackendVersion


class Wanted(msgspec.Struct, frozen=True):
    """The desired version of a backend."""

    replica_config: ReplicaConfig
    backend_config: BackendConfig
    version: str | None
    is_same_code: bool
    """Whether replicas of the current target may stay if the replica configuration is the same too."""
    leaves_retained: bool = False
    """Whether replicas kept by a failed update (`Backend.retained`) may stay, unless they must be reconfigured."""


def matches_target(backend: Backend, wanted: Wanted) -> bool:
    """Whether the target equals ``wanted`` already."""
    target = backend.target
    return (
        wanted.is_same_code
        and not backend.deleting
        and not backend.halted
        and (backend.retained is None or wanted.leaves_retained)
        and wanted.version == target.version
        and wanted.replica_config == target.replica_config
        and wanted.backend_config == target.backend_config
    )


def make_backend(existing: Backend | None, tag: BackendTag, goal_id: GoalId, wanted: Wanted) -> Backend:
    """The backend with ``wanted`` as its target."""
    if existing is not None:
        return _with_target(existing, goal_id, wanted)
    return Backend(
        backend_tag=tag,
        goal_id=goal_id,
        target=BackendVersion(
            code_version=1,
            config_version=1,
            version=wanted.version,
            replica_config=wanted.replica_config,
            backend_config=wanted.backend_config,
        ),
        last_good=None,
        newest_code_version=1,
        newest_config_version=1,
    )


def _with_target(existing: Backend, goal_id: GoalId, wanted: Wanted) -> Backend:
    target = existing.target
    known = with_same_code(existing, wanted)
    light = known is target and replica_part(wanted.backend_config) == replica_part(target.backend_config)
    newest_code = existing.newest_code_version + (1 if known is None else 0)
    newest_config = existing.newest_config_version + (0 if light else 1)
    version = BackendVersion(
        code_version=newest_code if known is None else known.code_version,
        config_version=target.config_version if light else newest_config,
        version=wanted.version,
        replica_config=wanted.replica_config,
        backend_config=wanted.backend_config,
    )
    others = existing.others if light else [*existing.others, target]
    retained = existing.retained if light and wanted.leaves_retained else None
    if existing.retained is not None and retained is None:
        others = [*others, existing.retained]
    last_good = existing.last_good
    if existing.deleting and last_good is not None:
        # It was being deleted: if the new version fails, the deleted one must not come back.
        others, last_good = [*others, last_good], None
    return msgspec.structs.replace(
        existing,
        goal_id=goal_id,
        target=version,
        last_good=last_good,
        retained=retained,
        others=others,
        newest_code_version=newest_code,
        newest_config_version=newest_config,
        deleting=False,
        force_kill=False,
        halted=False,
        start_failures=0,
        last_error="",
        retry_at=0.0,
        autoscaling_paused=(
            "" if wanted.backend_config.autoscaling_config is None else existing.autoscaling_paused
        ),
    )


def with_same_code(existing: Backend, wanted: Wanted) -> BackendVersion | None:
    """The version with the wanted code that may run already: the target, or, to cancel an update, the last good one."""
    if existing.halted or not wanted.is_same_code:
        return None
    for version in (existing.target, existing.last_good):
        if version is None or wanted.version != version.version:
            continue
        if wanted.replica_config == version.replica_config:
            return version
    return None


def replica_part(config: BackendConfig) -> BackendConfig:
    """The configuration reduced to the options that replicas must apply."""
    return BackendConfig(**{name: getattr(config, name) for name in REPLICA_OPTIONS})
