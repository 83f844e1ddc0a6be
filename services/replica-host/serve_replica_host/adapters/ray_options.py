"""Translates replicas' resource needs and ends to and from Ray's terms; tracks the resources of Ray."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, final

import ray
import structlog

from serve_common.config.replica import RayActorOptions


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


_NODE_DIED: Final = "because its node has died"
_EXIT: Final = re.compile(r"Worker exit type: (\w+) Worker exit detail: ([^.]*)")


def describe_end(pid: int, error: BaseException | None, address: str = "") -> str:
    """One line instead of Ray's page of common causes; ``address`` is set for other machines than the host's."""
    process = f"the replica's process {pid}" if pid else "the replica's process"
    if address:
        process += f" on {address}"
    message = str(error)
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


_log = structlog.get_logger(__name__)

MEMORY_CHECK_PERIOD_S: Final = 5.0
_CLOSE_TIMEOUT_S: Final = 1.0
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
        self._poll_thread: threading.Thread | None = None
        self.whole: dict[str, float] = {}
        """Total resources by Ray's names."""

    def open(self, *, is_cluster: bool) -> None:
        """Read the resources once; for a cluster, poll them from then on."""
        self.whole = _read_total()
        if is_cluster:
            self._call_later(MEMORY_CHECK_PERIOD_S, self._poll)

    def close(self) -> None:
        """Stop polling: a call without a running Ray would start one. Waits briefly for a poll in progress."""
        self._is_open = False
        if self._poll_thread is not None:
            self._poll_thread.join(_CLOSE_TIMEOUT_S)

    def poll(self) -> None:
        """Read the resources now, when those of a cluster may have changed."""
        if self._is_open:
            self._update(_read_total())

    def _poll(self) -> None:
        # While the cluster's head is down Ray blocks callers for up to a minute, and health checks must go on.
        if self._is_open:
            self._poll_thread = threading.Thread(target=self._fetch, name="ray-resources", daemon=True)
            self._poll_thread.start()

    def _fetch(self) -> None:
        whole: dict[str, float] | None = None
        try:
            whole = _read_total()
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


def _read_total() -> dict[str, float]:
    return {
        name: float(amount)
        for name, amount in ray.cluster_resources().items()
        if not name.startswith(_NOT_RESOURCES)
    }
