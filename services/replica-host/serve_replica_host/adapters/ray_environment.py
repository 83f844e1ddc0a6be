"""The environment variables of this process' Ray: quiet, private, and without a home directory.

Why a module of its own: Ray reads them when it is first imported, so they must be set before.
"""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path
from typing import Final

from serve_common.errors import BadField
from serve_common.runtime.private_directory import ensure_private_directory

SESSIONS_MAX: Final = 4

_DEFAULTS: Final = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # Ray's future default; unset, it warns at each start
    "RAY_DEDUP_LOGS": "0",
    # Ray starts workers at niceness 15, which is right for batch work. Replicas serve requests: with a low priority
    # they would start and serve several times slower on a busy machine.
    "RAY_worker_niceness": "0",
}


_LOCAL_DEFAULTS: Final = {
    # Without a cluster Ray uses the loopback address, and its servers listen there only. Despite its name the variable
    # also works on Linux.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # Ray would start as many idle workers as there are CPUs, which hardly speed up replicas; `SparePool` does better.
    "RAY_prestart_worker_first_driver": "0",
    # Maximum delay of a reservation after resources for it have become free.
    "RAY_gcs_create_placement_group_retry_max_interval_ms": "200",
}


def prepare_ray_environment(temp_dir: Path, *, is_local: bool) -> None:
    """Set Ray's variables unless the operator has set them. Call it before Ray is imported.

    A local runtime gets token authentication, with a token of this process that is in no file: by default Ray would
    write one into the home directory, which a container may not have. A private directory of this user is created in
    ``temp_dir``, which is the host's. Raises `BadField` when that fails.
    """
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    if not is_local:
        return
    for name, value in _LOCAL_DEFAULTS.items():
        os.environ.setdefault(name, value)
    try:
        ensure_private_directory(ray_directory(temp_dir))
    except OSError as error:
        raise BadField(
            "MUSTER_RAY_TEMP_DIR", f"{ray_directory(temp_dir)} cannot be this user's alone: {error}"
        ) from error
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    if not {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def ray_directory(temp_dir: Path) -> Path:
    """The directory for Ray. Ray makes it writable for all users, so the one above is private to this user."""
    return temp_dir / "r"


def remove_old_sessions(temp_dir: Path) -> None:
    """Delete the logs of all but the newest Ray sessions, which would otherwise accumulate."""
    sessions = [
        path for path in ray_directory(temp_dir).glob("session_2*") if path.is_dir() and not path.is_symlink()
    ]
    for old in sorted(sessions, key=lambda path: path.name)[:-SESSIONS_MAX]:
        shutil.rmtree(old, ignore_errors=True)
