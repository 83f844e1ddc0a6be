"""What Ray has to give, on all of its machines.

Why looked at again on a cluster: machines come and go there, and a replica that is meant for one that is gone would
wait for ever.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, final

import ray
import structlog

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
