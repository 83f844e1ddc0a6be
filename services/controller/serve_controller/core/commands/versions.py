"""The new version of a backend by a change: which changes reconfigure running replicas, and which replace them.

Why one place: the cost of a change (nothing, a reconfigure, a restart) is a promise to users, whatever the command.
"""

from __future__ import annotations

import msgspec

from serve_common.config.backend import BackendConfig, check_backend_config
from serve_common.config.endpoint import METHODS
from serve_common.config.replica import ReplicaConfig, check_replica_config
from serve_common.errors import BadField, LimitReached
from serve_common.names import BackendTag, GoalId
from serve_controller.core.audit import REPLICA_OPTIONS
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.objects import Backend, BackendVersion
from serve_controller.core.scaling import scaled_config

NUM_BACKENDS_MAX = 10_000
VERSION_LENGTH_MAX = 200


class Wanted(msgspec.Struct, frozen=True):
    """The desired version of a backend."""

    replica_config: ReplicaConfig
    backend_config: BackendConfig
    version: str | None
    is_same_code: bool
    """Whether replicas of the current target may stay if the replica configuration is the same too."""
    leaves_retained: bool = False
    """Whether replicas kept by a failed update (`Backend.retained`) may stay, unless they must be reconfigured."""


def check_target(wanted: Wanted, at: str = "") -> None:
    """Raise `BadField` for invalid values; ``at`` is put before the field's path."""
    check_backend_config(wanted.backend_config, f"{at}backend_config")
    check_replica_config(wanted.replica_config, f"{at}replica_config")
    if wanted.version is not None and not 0 < len(wanted.version) <= VERSION_LENGTH_MAX:
        raise BadField(f"{at}version", f"must have 1 to {VERSION_LENGTH_MAX} characters")


def as_scaled(wanted: Wanted, existing: Backend | None) -> Wanted:
    """``wanted`` with the number of replicas as decided by autoscaling, by the rules of `core.scaling`."""
    is_new = existing is None or _with_same_code(existing, wanted) is None
    config = scaled_config(wanted.backend_config, existing, is_new_code=is_new)
    return Wanted(
        wanted.replica_config,
        config,
        wanted.version,
        wanted.is_same_code,
        leaves_retained=wanted.leaves_retained,
    )


def check_methods(methods: list[str]) -> list[str]:
    """Validate HTTP methods and return them sorted. Raises `BadField`."""
    if not methods:
        raise BadField("methods", "must not be empty")
    for index, method in enumerate(methods):
        if method not in METHODS:
            raise BadField(f"methods[{index}]", f"{method[:40]!r} is none of {', '.join(METHODS)}")
    return sorted(set(methods))


def check_backend_limit(checkpoint: Checkpoint, more: int) -> None:
    """Raise `LimitReached` when there would be too many."""
    if len(checkpoint.backends) + more > NUM_BACKENDS_MAX:
        raise LimitReached(
            f"there are {len(checkpoint.backends)} backends; at most {NUM_BACKENDS_MAX} may be"
        )


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
        return _changed(existing, goal_id, wanted)
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


def _changed(existing: Backend, goal_id: GoalId, wanted: Wanted) -> Backend:
    target = existing.target
    known = _with_same_code(existing, wanted)
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


def _with_same_code(existing: Backend, wanted: Wanted) -> BackendVersion | None:
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
