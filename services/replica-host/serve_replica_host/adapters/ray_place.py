"""Where this process is, in Ray's words: for a replica that must know whether it is on its host's machine."""

from __future__ import annotations

import ray


def own_node_id() -> str:
    """Ray's name of this process' machine, as long as Ray runs there."""
    return str(ray.get_runtime_context().get_node_id())


def own_address() -> str:
    """This machine's address among Ray's machines."""
    return str(ray.util.get_node_ip_address())
