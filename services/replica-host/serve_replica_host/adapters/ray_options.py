"""Our words for what a replica needs and how it ended, in Ray's words and back; and what Ray has to give."""

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
    """Arguments of an actor class' ``options``."""
    known: dict[str, Any] = {"num_cpus": options.num_cpus, "num_gpus": options.num_gpus}
    if options.memory:
        known["memory"] = options.memory
    if options.resources:
        known["resources"] = dict(options.resources)
    if options.runtime_env:
        known["runtime_env"] = dict(options.runtime_env)
    return known


def fits_spare(options: RayActorOptions) -> bool:
    """Whether an actor that was started ahead can be this replica.

    Its environment is given and it has no device. Ray tells numerical libraries at an actor's start how many threads
    to use; below two CPUs that is one, as in an actor that was started ahead.
    """
    return not (
        options.num_gpus
        or options.memory
        or options.resources
        or options.runtime_env
        or options.num_cpus >= 2
    )


def describe_needs(options: RayActorOptions) -> str:
    """What has to be free somewhere, such as ``4 CPU, 1 GPU``."""
    needed = {"CPU": options.num_cpus, "GPU": options.num_gpus, "bytes of memory": options.memory}
    needed |= options.resources
    return ", ".join(f"{amount:g} {name}" for name, amount in needed.items() if amount) or "nothing"


def absolute_app_dir(app_dir: str, app_root: str) -> str:
    """``app_dir`` as the replica's process will find it; empty stays empty."""
    return str(Path(app_root, app_dir)) if app_dir else ""


_NODE_DIED: Final = "because its node has died"
_EXIT: Final = re.compile(r"Worker exit type: (\w+) Worker exit detail: ([^.]*)")


def describe_end(pid: int, error: BaseException | None, address: str = "") -> str:
    """One line instead of Ray's page of common causes. ``address`` of another machine than the host's."""
    process = f"the replica's process {pid}" if pid else "the replica's process"
    if address:
        process += f" on {address}"
    told = str(error)
    if "killed by `ray.kill`" in told:
        return f"{process} was killed by its host"
    if _NODE_DIED in told:
        return f"{process} ended with its machine: Ray hears nothing of that any more"
    found = _EXIT.search(told)
    if found is None:
        return f"{process} ended: {' '.join(told.split())}"
    return (
        f"{process} ended unasked ({found[1]}: {found[2].strip()}); "
        "it was killed, crashed, exited, or the machine ran out of memory"
    )


_log = structlog.get_logger(__name__)

LOOK_EVERY_S: Final = 5.0
_CLOSE_TIMEOUT_S: Final = 1.0
_NOT_RESOURCES: Final = ("node:", "object_store_memory")


@final
class RayResources:
    """All methods on the Ray thread; ``whole`` may be read on any."""

    def __init__(self, call_later: Callable[..., None]) -> None:
        """``call_later`` (after seconds) runs a method on the Ray thread; it may be called on any."""
        self._call_later = call_later
        self._is_open = True
        self._asking: threading.Thread | None = None
        self.whole: dict[str, float] = {}
        """By Ray's names."""

    def open(self, *, is_cluster: bool) -> None:
        """Look once; and of a cluster, again and again."""
        self.whole = _whole()
        if is_cluster:
            self._call_later(LOOK_EVERY_S, self._look_again)

    def close(self) -> None:
        """No more looks: a call without a Ray would start one. Waits a moment for one that is under way."""
        self._is_open = False
        if self._asking is not None:
            self._asking.join(_CLOSE_TIMEOUT_S)

    def look(self) -> None:
        """Of a cluster, when something may just have changed."""
        if self._is_open:
            self._take(_whole())

    def _look_again(self) -> None:
        # While the cluster's head is away Ray makes callers wait up to a minute, and health checks must go on.
        if self._is_open:
            self._asking = threading.Thread(target=self._ask, name="ray-resources", daemon=True)
            self._asking.start()

    def _ask(self) -> None:
        whole: dict[str, float] | None = None
        try:
            whole = _whole()
        except Exception as error:  # noqa: BLE001 - Ray raises many kinds, and the next look may do
            _log.warning("ray_resources_unknown", error=str(error))
        self._call_later(0.0, self._hear, whole)

    def _hear(self, whole: dict[str, float] | None) -> None:
        if self._is_open:
            if whole is not None:
                self._take(whole)
            self._call_later(LOOK_EVERY_S, self._look_again)

    def _take(self, whole: dict[str, float]) -> None:
        if whole != self.whole:
            _log.info("ray_resources", resources=whole, before=self.whole)
            self.whole = whole


def _whole() -> dict[str, float]:
    return {
        name: float(amount)
        for name, amount in ray.cluster_resources().items()
        if not name.startswith(_NOT_RESOURCES)
    }
