"""Starts a Ray of this host's own, or joins an existing cluster."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final

import msgspec
import ray
import structlog
from ray._private import worker as ray_worker

from serve_common.settings import BusSettings
from serve_replica_host.adapters.ray_environment import remove_old_sessions
from serve_replica_host.adapters.ray_lean import lean_ray

_log = structlog.get_logger(__name__)

OBJECT_STORE_BYTES: Final = 80 * 1024 * 1024
"""Near Ray's minimum: no object passes through Ray here."""
_NOT_RESOURCES: Final = ("node:", "object_store_memory")


class RaySettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the runtime and its replicas need to know."""

    temp_dir: str
    address: str | None
    num_cpus: int | None
    replica_bus: BusSettings
    app_root: str
    metrics_dir: str
    spare_replicas: int
    """Actors that are started ahead, on a local runtime."""
    tracing: dict[str, str] = {}
    """See `StartOrder`."""


def open_ray(settings: RaySettings) -> dict[str, float]:
    """Returns the whole resources by Ray's names. Takes seconds; raises what Ray raises."""
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if settings.address is not None:
        options["address"] = settings.address
    else:
        remove_old_sessions(Path(settings.temp_dir))
        options |= {
            "address": "local",
            "include_dashboard": False,
            "object_store_memory": OBJECT_STORE_BYTES,
            "num_cpus": settings.num_cpus,
            "_temp_dir": settings.temp_dir,
        }
    untyped: Any = ray_worker
    untyped.print_to_stdstream = _log_what_ray_prints
    with nullcontext() if settings.address is not None else lean_ray():
        ray.init(**options)
    return {
        name: float(amount)
        for name, amount in ray.cluster_resources().items()
        if not name.startswith(_NOT_RESOURCES)
    }


def _log_what_ray_prints(printed: dict[str, Any], ignore_prefix: bool) -> None:  # noqa: ARG001, FBT001 - Ray's call
    """In place of Ray's own function, which prints coloured prose between our JSON lines."""
    _log.warning("ray_says", lines=[str(line)[:1000] for line in printed.get("lines", [])])
