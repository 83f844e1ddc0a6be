"""Our words for what a replica needs and how it ended, in Ray's words and back. Pure."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

from serve_common.values.replica_config import RayActorOptions


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
