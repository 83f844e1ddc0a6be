"""Starts a private, minimal Ray runtime for this host, or joins an existing cluster."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final

import ray
import structlog
from ray._private import node as ray_node
from ray._private import parameter as ray_parameter
from ray._private import worker as ray_worker

from serve_replica_host.adapters.ray_environment import ray_directory, remove_old_sessions
from serve_replica_host.adapters.ray_protocol import RaySettings
from serve_replica_host.replica.telemetry.remote import HostLocation

_log = structlog.get_logger(__name__)


@contextmanager
def lean_ray() -> Iterator[None]:
    """In this block, `ray.init` starts a local runtime without the monitor, the log monitor and the API server.

    Why: besides its two servers, Ray starts an autoscaler monitor, a log monitor and a dashboard's API server, also
    with ``include_dashboard=False``, and nothing here uses them. Each is a Python process that takes more than a second
    of CPU to start and about 100 MB as long as it lives; `ray.init` waits for the last. Measured on two cores, they are
    a third to a half of the time in which a host comes back after a crash.

    Ray has no public option for it, so this patches private parts of the pinned version, and changes nothing where they
    are not found.
    """
    params: Any = getattr(ray_parameter, "RayParams", None)
    node: Any = getattr(ray_node, "Node", None)
    start_api_server = getattr(node, "start_api_server", None)
    if params is None or start_api_server is None:
        _log.warning("ray_not_lean", reason="this version of Ray is built differently")
        yield
        return
    construct: Callable[..., None] = params.__init__

    def lean_construct(self: Any, *arguments: Any, **options: Any) -> None:
        construct(self, *arguments, **options)
        self.no_monitor = True
        self.include_log_monitor = False

    params.__init__ = lean_construct
    node.start_api_server = lambda _self, **_options: None
    try:
        yield
    finally:
        params.__init__ = construct
        node.start_api_server = start_api_server


def own_node_id() -> str:
    """Ray's id of this process' node, which lasts as long as Ray runs there."""
    return str(ray.get_runtime_context().get_node_id())


def get_node_address() -> str:
    """This machine's address among Ray's machines."""
    return str(ray.util.get_node_ip_address())


OBJECT_STORE_BYTES: Final = 80 * 1024 * 1024
"""Size of the object store; near Ray's minimum, because no object passes through Ray."""
_FORWARDED_VARIABLES: Final = ("MUSTER_LOG_LEVEL", "MUSTER_UNCOUNTED")
"""Variables that replicas read, and would not inherit from an existing cluster."""


def open_ray(settings: RaySettings) -> None:
    """Start or join Ray, which takes seconds. Raises what Ray raises."""
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
            "_temp_dir": str(ray_directory(Path(settings.temp_dir))),
        }
    untyped: Any = ray_worker
    untyped.print_to_stdstream = _log_what_ray_prints
    with nullcontext() if settings.address is not None else lean_ray():
        ray.init(**options)


def dead_servers() -> list[str]:
    """Names of Ray's processes on this machine that have died; none on an existing cluster."""
    untyped: Any = ray_worker
    node = untyped._global_node  # noqa: SLF001 - no public API
    return [] if node is None else [str(name) for name, _process in node.dead_processes()]


def host_location(settings: RaySettings) -> HostLocation:
    """The location of this host, for its replicas."""
    if settings.address is None:
        return HostLocation(
            metrics_dir=settings.metrics_dir
        )  # they are on this machine, and inherit the rest
    return HostLocation(
        metrics_dir=settings.metrics_dir,
        node_id=own_node_id(),
        host_id=settings.host_id,
        log_socket=settings.log_socket,
        variables={name: os.environ[name] for name in _FORWARDED_VARIABLES if name in os.environ},
    )


def _log_what_ray_prints(printed: dict[str, Any], ignore_prefix: bool) -> None:  # noqa: ARG001, FBT001 - Ray's call
    """Replaces Ray's own function, which prints coloured text between JSON lines."""
    _log.warning("ray_says", lines=[str(line)[:1000] for line in printed.get("lines", [])])
