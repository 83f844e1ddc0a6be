"""What Ray has to give, on all of its machines.

Why looked at again on a cluster: machines come and go there, and a replica that is meant for one that is gone would
wait for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, final

import ray
import structlog

_log = structlog.get_logger(__name__)

LOOK_EVERY_S: Final = 5.0
_NOT_RESOURCES: Final = ("node:", "object_store_memory")


@final
class RayResources:
    """All methods on the Ray thread; ``whole`` may be read on any."""

    def __init__(self, call_later: Callable[..., None]) -> None:
        """``call_later`` (after seconds) runs a method on the Ray thread."""
        self._call_later = call_later
        self._is_open = True
        self.whole: dict[str, float] = {}
        """By Ray's names."""

    def open(self, *, is_cluster: bool) -> None:
        """Look once; and of a cluster, again and again."""
        self.whole = _whole()
        if is_cluster:
            self._call_later(LOOK_EVERY_S, self._look_again)

    def close(self) -> None:
        """No more looks: a call without a Ray would start one."""
        self._is_open = False

    def look(self) -> None:
        """Of a cluster, when something may just have changed."""
        if not self._is_open:
            return
        whole = _whole()
        if whole != self.whole:
            _log.info("ray_resources", resources=whole, before=self.whole)
            self.whole = whole

    def _look_again(self) -> None:
        try:
            self.look()
        finally:
            self._call_later(LOOK_EVERY_S, self._look_again)


def _whole() -> dict[str, float]:
    return {
        name: float(amount)
        for name, amount in ray.cluster_resources().items()
        if not name.startswith(_NOT_RESOURCES)
    }
