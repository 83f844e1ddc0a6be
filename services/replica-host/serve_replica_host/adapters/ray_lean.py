"""A local Ray without the processes that nothing here talks to.

Why: besides its two servers, Ray starts an autoscaler monitor, a log monitor and a dashboard's API server, also with
``include_dashboard=False``. Each is a Python process that takes more than a second of CPU to start and about 100 MB
for as long as it lives; `ray.init` waits for the last. Measured on two cores, they are a third to a half of the time
in which a host comes back after a crash. Ray has no public option for it, so this names what it changes in the pinned
version, and changes nothing where that is not found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import structlog
from ray._private import node as ray_node
from ray._private import parameter as ray_parameter

_log = structlog.get_logger(__name__)


@contextmanager
def lean_ray() -> Iterator[None]:
    """While open, `ray.init` starts a local runtime without the three processes."""
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
