"""Ray as a host uses it: its start or an existing cluster, its resources, and replicas' needs and ends in its terms."""

from __future__ import annotations

import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final, final

import ray
import structlog
from ray._private import node as ray_node
from ray._private import parameter as ray_parameter
from ray._private import utils as ray_utils
from ray._private import worker as ray_worker
from ray.exceptions import RuntimeEnvSetupError

from serve_common.config.backend import RayActorOptions
from serve_common.values import truncate_start
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


NUM_CPUS_MIN: Final = 8
"""CPUs that a small machine has to reserve. A reservation only limits how many replicas are placed, and a replica
reserves one by default: four small models would not fit on two cores."""
OBJECT_STORE_BYTES: Final = 80 * 1024 * 1024
"""Size of the object store; near Ray's minimum, because no object passes through Ray."""
_FORWARDED_VARIABLES: Final = ("MUSTER_LOG_LEVEL", "MUSTER_UNCOUNTED", "MUSTER_STATE_DIR")
"""Variables that replicas read, and would not inherit from an existing cluster."""


def open_ray(settings: RaySettings) -> None:
    """Start or join Ray, which takes seconds. Raises what Ray raises."""
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if settings.address is not None:
        options["address"] = settings.address
    else:
        remove_old_sessions(settings.ray_directory)
        options |= {
            "address": "local",
            "include_dashboard": False,
            "object_store_memory": OBJECT_STORE_BYTES,
            "num_cpus": settings.num_cpus or max(int(ray_utils.get_num_cpus()), NUM_CPUS_MIN),
            "_temp_dir": str(settings.ray_directory),
        }
    untyped: Any = ray_worker
    untyped.print_to_stdstream = _log_what_ray_prints
    with nullcontext() if settings.address is not None else lean_ray():
        ray.init(**options)


SESSIONS_MAX: Final = 4


def remove_old_sessions(ray_directory: Path) -> None:
    """Delete the logs of all but the newest Ray sessions, which would otherwise accumulate."""
    sessions = [path for path in ray_directory.glob("session_2*") if path.is_dir() and not path.is_symlink()]
    for old in sorted(sessions, key=lambda path: path.name)[:-SESSIONS_MAX]:
        shutil.rmtree(old, ignore_errors=True)


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


def actor_options(options: RayActorOptions) -> dict[str, Any]:
    """Keyword arguments for an actor class' ``options``."""
    known: dict[str, Any] = {"num_cpus": options.num_cpus, "num_gpus": options.num_gpus}
    if options.memory:
        known["memory"] = options.memory
    if options.resources:
        known["resources"] = dict(options.resources)
    if options.runtime_env:
        known["runtime_env"] = dict(options.runtime_env)
    return known


def fits_spare(options: RayActorOptions) -> bool:
    """True when a spare actor can become this replica.

    A spare has a fixed environment and no devices. Ray sets the number of threads of numerical libraries when an actor
    starts; below two CPUs that is one, as in a spare.
    """
    return not (
        options.num_gpus
        or options.memory
        or options.resources
        or options.runtime_env
        or options.num_cpus >= 2
    )


def describe_needs(options: RayActorOptions) -> str:
    """The resources that must be free on one node, such as ``4 CPU, 1 GPU``."""
    needed = {"CPU": options.num_cpus, "GPU": options.num_gpus, "bytes of memory": options.memory}
    needed |= options.resources
    return ", ".join(f"{amount:g} {name}" for name, amount in needed.items() if amount) or "nothing"


def absolute_app_dir(app_dir: str, app_root: str) -> str:
    """The absolute path of ``app_dir``; empty stays empty."""
    return str(Path(app_root, app_dir)) if app_dir else ""


_ENVIRONMENT_ERROR_MAX: Final = 1500
"""Characters of the end of what an installer printed, where it says what went wrong."""
_NODE_DIED: Final = "because its node has died"
_EXIT: Final = re.compile(r"Worker exit type: (\w+) Worker exit detail: ([^.]*)")


def describe_end(pid: int, error: BaseException | None, address: str = "") -> str:
    """One line instead of Ray's page of common causes; ``address`` is set for other machines than the host's."""
    process = f"the replica's process {pid}" if pid else "the replica's process"
    if address:
        process += f" on {address}"
    message = str(error)
    if isinstance(error, RuntimeEnvSetupError):
        return (
            f"its runtime_env could not be set up: {truncate_start(message.strip(), _ENVIRONMENT_ERROR_MAX)}"
        )
    if "killed by `ray.kill`" in message:
        return f"{process} was killed by its host"
    if _NODE_DIED in message:
        return f"{process} ended with its machine: Ray hears nothing of that any more"
    found = _EXIT.search(message)
    if found is None:
        return f"{process} ended: {' '.join(message.split())}"
    return (
        f"{process} ended unasked ({found[1]}: {found[2].strip()}); "
        "it was killed, crashed, exited, or the machine ran out of memory"
    )


MEMORY_CHECK_PERIOD_S: Final = 5.0
_POLL_END_TIMEOUT_S: Final = 1.0
_NOT_RESOURCES: Final = ("node:", "object_store_memory")


@final
class RayResources:
    """The total resources of Ray. All methods run on the Ray thread; ``whole`` may be read on any.

    Why a cluster is polled: machines come and go there, and a replica that is placed on one that is gone would wait for
    ever.
    """

    def __init__(self, call_later: Callable[..., None]) -> None:
        """``call_later`` (after seconds) runs a function on the Ray thread; it may be called from any."""
        self._call_later = call_later
        self._is_open = True
        self._num_cpus: int | None = None
        self._poll_thread: threading.Thread | None = None
        self.whole: dict[str, float] = {}
        """Total resources by Ray's names."""

    def open(self, *, is_cluster: bool, num_cpus: int | None = None) -> None:
        """Read the resources once; for a cluster, poll them from then on.

        ``num_cpus`` replaces the cluster's CPUs, where Ray is asked for none.
        """
        self._num_cpus = num_cpus if is_cluster else None
        self.whole = self._read_total()
        if is_cluster:
            self._call_later(MEMORY_CHECK_PERIOD_S, self._poll)

    def close(self) -> None:
        """Stop polling: a call without a running Ray would start one. Waits briefly for a poll in progress."""
        self._is_open = False
        if self._poll_thread is not None:
            self._poll_thread.join(_POLL_END_TIMEOUT_S)

    def poll(self) -> None:
        """Read the resources now, when those of a cluster may have changed."""
        if self._is_open:
            self._update(self._read_total())

    def _poll(self) -> None:
        # While the cluster's head is down Ray blocks callers for up to a minute, and health checks must go on.
        if self._is_open:
            self._poll_thread = threading.Thread(target=self._fetch, name="ray-resources", daemon=True)
            self._poll_thread.start()

    def _fetch(self) -> None:
        whole: dict[str, float] | None = None
        try:
            whole = self._read_total()
        except Exception as error:  # noqa: BLE001 - Ray raises many kinds, and the next poll may succeed
            _log.warning("ray_resources_unknown", error=str(error))
        self._call_later(0.0, self._on_resources, whole)

    def _on_resources(self, whole: dict[str, float] | None) -> None:
        if self._is_open:
            if whole is not None:
                self._update(whole)
            self._call_later(MEMORY_CHECK_PERIOD_S, self._poll)

    def _update(self, whole: dict[str, float]) -> None:
        if whole != self.whole:
            _log.info("ray_resources", resources=whole, before=self.whole)
            self.whole = whole

    def _read_total(self) -> dict[str, float]:
        total = {
            name: float(amount)
            for name, amount in ray.cluster_resources().items()
            if not name.startswith(_NOT_RESOURCES)
        }
        return total if self._num_cpus is None else {**total, "CPU": float(self._num_cpus)}
