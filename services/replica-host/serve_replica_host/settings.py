"""Settings of the replica host, read from its environment."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Final

import msgspec

from serve_common.errors import BadField
from serve_common.identities.roles import Role
from serve_common.names import HostId
from serve_common.runtime.settings import (
    BusSettings,
    Environment,
    OperationsSettings,
    read_bus_settings,
    read_operations_settings,
)
from serve_common.telemetry.trace_context import TracingSettings, read_tracing_settings

OPERATIONS_PORT: Final = 9103
SPARE_REPLICAS: Final = 8
RAY_TEMP_DIR_LENGTH_MAX: Final = 40
"""Maximum length of Ray's directory: its unix sockets are up to 67 characters deeper, and the kernel allows 107."""

OWN_DIR_SUFFIX: Final = "-host"


class HostSettings(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of a host."""

    host_id: HostId
    """Id of this host, unique among all; the machine's name unless set."""
    bus: BusSettings
    """Connection of the host itself, as role ``host``."""
    replica_bus: BusSettings
    """Connection of its replicas: a key that signs an identity for each, or a plain user for all."""
    replica_identity_s: float
    """Seconds that an identity lasts; it is renewed well before."""
    operations: OperationsSettings
    """Where metrics and health are served."""
    ray_temp_dir: str
    """Absolute directory for the sockets and logs of the local runtime, at most 40 characters."""
    ray_address: str | None
    """Address of an existing Ray cluster; None starts a local runtime that ends with this process."""
    num_cpus: int | None
    """CPUs of the local runtime; None for those of the machine, at least 8."""
    app_root: str
    """Directory to which a relative app_dir is resolved."""
    metrics_dir: str
    """Directory of the files in which replicas count: prometheus_client's multiprocess directory."""
    spare_replicas: int
    """Maximum spare processes of a local runtime; half of them while few replicas run."""
    drain_timeout_s: float
    """Seconds that requests in flight may take to finish after a stop signal."""
    own_dir: str = ""
    """Directory of the host's sockets; Ray's directory, unless that is another user's."""
    host_user: str = ""
    """User to which the host switches after reading its secrets: ``name``, ``uid`` or ``uid:gid``; empty: no switch."""
    replica_user: str = ""
    """User that runs Ray and user code: ``name``, ``uid`` or ``uid:gid``; empty: the host's user."""
    code_dir: str = ""
    """Directory of the code that was fetched; replicas read it."""
    tracing: TracingSettings | None = None
    """Tracing of its replicas; None turns it off."""


def read_host_settings(environment: Environment) -> HostSettings:
    """Read the settings. Raises `BadField` naming the variable."""
    ray_temp_dir = environment.text("MUSTER_RAY_TEMP_DIR", str(Path(tempfile.gettempdir()) / "muster-ray"))
    if not Path(ray_temp_dir).is_absolute() or len(ray_temp_dir) > RAY_TEMP_DIR_LENGTH_MAX:
        raise BadField(
            "MUSTER_RAY_TEMP_DIR",
            f"{ray_temp_dir!r} must be absolute and have at most {RAY_TEMP_DIR_LENGTH_MAX} characters: "
            "Ray puts unix sockets below it",
        )
    host_id = HostId(environment.identity("MUSTER_HOST_ID"))
    replica_user = environment.optional("MUSTER_REPLICA_USER") or ""
    # The host must not create its files in another user's directory.
    own_dir = f"{ray_temp_dir}{OWN_DIR_SUFFIX}" if replica_user else ray_temp_dir
    return HostSettings(
        host_id=host_id,
        bus=read_bus_settings(environment, Role.HOST, host_id),
        replica_bus=read_bus_settings(environment, Role.REPLICA, prefix="MUSTER_REPLICA_NATS"),
        replica_identity_s=environment.seconds("MUSTER_REPLICA_IDENTITY_S", 3_600.0, 3.0, 30 * 86_400.0),
        operations=read_operations_settings(environment, OPERATIONS_PORT),
        ray_temp_dir=ray_temp_dir,
        ray_address=environment.optional("RAY_ADDRESS"),
        num_cpus=environment.integer("MUSTER_NUM_CPUS", 0, 0, 10_000) or None,
        app_root=str(Path(environment.text("MUSTER_APP_ROOT", str(Path.cwd()))).absolute()),
        metrics_dir=environment.text("PROMETHEUS_MULTIPROC_DIR", str(Path(own_dir) / f"metrics-{host_id}")),
        spare_replicas=environment.integer("MUSTER_SPARE_REPLICAS", SPARE_REPLICAS, 0, 1_000),
        drain_timeout_s=environment.seconds("MUSTER_DRAIN_TIMEOUT_S", 20.0, 0.0, 3600.0),
        own_dir=own_dir,
        code_dir=environment.text("MUSTER_CODE_DIR", str(Path(own_dir) / f"code-{host_id}")),
        host_user=environment.optional("MUSTER_HOST_USER") or "",
        replica_user=replica_user,
        tracing=read_tracing_settings(environment.variables),
    )
