"""Code of a replica, the resources it reserves, and which deployments it may call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from serve_common.config.validation import check_between, check_import_path, check_size
from serve_common.errors import BadField
from serve_common.names import check_name

EVERYTHING: Final = "*"
CALLS_MAX: Final = 100


def check_may_call(may_call: Sequence[str], field: str) -> None:
    """Raise `BadField` unless each entry is an application, ``application/deployment``, or `EVERYTHING`."""
    if len(may_call) > CALLS_MAX:
        raise BadField(field, f"has {len(may_call)} entries; at most {CALLS_MAX} are allowed")
    for called in may_call:
        if called == EVERYTHING:
            continue
        parts = called.split("/")
        if len(parts) > 2:
            raise BadField(field, f"{called[:100]!r} must be an application, application/deployment, or '*'")
        for part in parts:
            check_name(part, field)


def allows(may_call: Sequence[str] | None, own_tag: str, called_tag: str) -> bool:
    """Whether a replica of deployment ``own_tag`` may call ``called_tag``; None allows only its own application.

    Why ``may_call`` is configuration: NATS enforces it, through the permissions in each replica's token, and those must
    not be the choice of the replica's own code. Handles check too, before they send, so that a call that NATS would
    drop fails with a reason.
    """
    app = called_tag.partition("/")[0]
    if may_call is None:
        return app == own_tag.partition("/")[0]
    return any(called in (EVERYTHING, app, called_tag) for called in may_call)


class RayActorOptions(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Resources and environment of one replica's Ray actor; names and defaults as in Ray Serve."""

    num_cpus: float = 1.0
    """CPUs to reserve, for each replica; fractions are allowed."""
    num_gpus: float = 0.0
    """GPUs to reserve, for each replica; fractions are allowed."""
    memory: float = 0.0
    """Bytes to reserve; 0 reserves none."""
    resources: dict[str, float] = {}
    """Amounts of custom resources by name."""
    runtime_env: dict[str, Any] = {}
    """Ray's runtime environment; only ``env_vars`` is supported."""


class ReplicaConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Code of a replica. Changing it makes a new code version: replicas are replaced."""

    import_path: str
    """``module:attribute`` of a class or function, imported in the replica's process."""
    app_dir: str = ""
    """Directory that comes first on ``sys.path``, as the replica hosts see it; empty for none."""
    init_args: list[Any] = []
    """Positional arguments of the constructor; JSON of at most 64 KiB."""
    init_kwargs: dict[str, Any] = {}
    """Keyword arguments of the constructor; JSON of at most 64 KiB."""
    ray_actor_options: RayActorOptions = RayActorOptions()
    """Resources and environment of each replica."""


def check_replica_config(config: ReplicaConfig, field: str = "replica_config") -> ReplicaConfig:
    """Return ``config`` when every field is acceptable; otherwise raise `BadField` with the field's path."""
    check_import_path(config.import_path, f"{field}.import_path")
    if len(config.app_dir) > 4096 or "\0" in config.app_dir:
        raise BadField(f"{field}.app_dir", "must be a path of at most 4096 characters without NUL")
    options, at = config.ray_actor_options, f"{field}.ray_actor_options"
    check_between(options.num_cpus, 0, 10_000, f"{at}.num_cpus")
    check_between(options.num_gpus, 0, 10_000, f"{at}.num_gpus")
    check_between(options.memory, 0, 2**50, f"{at}.memory")
    if len(options.resources) > 32:
        raise BadField(f"{at}.resources", f"has {len(options.resources)} entries; at most 32 are allowed")
    for name, amount in options.resources.items():
        if not 0 < len(name) <= 63 or name in {"CPU", "GPU", "memory"}:
            raise BadField(f"{at}.resources", f"{name[:80]!r} is not a name for a custom resource")
        check_between(amount, 0, 10**9, f"{at}.resources.{name}")
    _check_runtime_env(options.runtime_env, f"{at}.runtime_env")
    check_size(config.init_args, f"{field}.init_args")
    check_size(config.init_kwargs, f"{field}.init_kwargs")
    return config


def _check_runtime_env(runtime_env: dict[str, Any], field: str) -> None:
    for key in runtime_env:
        if key != "env_vars":
            raise BadField(f"{field}.{key[:80]}", "is not supported; env_vars is")
    env_vars = runtime_env.get("env_vars", {})
    if not isinstance(env_vars, dict):
        raise BadField(f"{field}.env_vars", "must be an object of strings")
    for name, value in env_vars.items():
        if not isinstance(name, str) or not name or "=" in name or "\0" in name:
            raise BadField(f"{field}.env_vars", f"{str(name)[:80]!r} is not a name of a variable")
        if not isinstance(value, str) or "\0" in value:
            raise BadField(f"{field}.env_vars.{name[:80]}", "must be a string without NUL")
    check_size(runtime_env, field)
