"""Which replicas hold which multiplexed models, as they say themselves.

Why from the replicas and not from where requests were sent: a replica drops models on its own account, other routers
make it load some, and a router that has just started must not load everything once more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, final

import msgspec
import structlog

from serve_common.bus.quiet_log import QuietLog
from serve_common.dispatch.routes import Routes
from serve_common.names import ReplicaTag, backend_tag_of
from serve_common.subjects import Subjects

_log = structlog.get_logger(__name__)

SILENT_S: Final = 15.0
"""A replica says what it holds every five seconds; what it said counts for three times as long."""
MODELS_MAX: Final = 1000
"""Of one replica; what it says beyond that is left out."""
MODEL_ID_LENGTH_MAX: Final = 256
_SWEEP_EVERY_S: Final = 1.0

_decoder: Final = msgspec.msgpack.Decoder(list[str])


@final
class ModelHolders:
    """Tells the routers what their replicas hold.

    Only replicas that a router knows are remembered, so snapshots bound what is kept here; what is said too early is
    said again.
    """

    def __init__(self, routes: Routes, subjects: Subjects, now: Callable[[], float]) -> None:
        """``now`` reads the loop's clock."""
        self._routes = routes
        self._subjects = subjects
        self._now = now
        self._heard_at: dict[ReplicaTag, float] = {}
        self._sweep_at = float("-inf")
        self._bad_messages = QuietLog(_log.warning)

    def __len__(self) -> int:
        """Replicas that are known to hold a model."""
        return len(self._heard_at)

    def take(self, subject: bytes, _reply: bytes, payload: bytes, _headers: bytes | None) -> None:
        """A replica says what it holds; to be subscribed to `Subjects.all_models`."""
        try:
            replica = self._subjects.replica_of_models(subject.decode())
            held = _decoder.decode(payload)
        except (UnicodeDecodeError, msgspec.DecodeError) as error:
            self._bad_messages.log(
                self._now(), "models_unreadable", subject=repr(subject[:200]), reason=str(error)
            )
            return
        self.hold(replica, held)

    def hold(self, replica: ReplicaTag, held: list[str]) -> None:
        """``replica`` holds exactly these models."""
        now = self._now()
        self.sweep(now)
        models = frozenset(model for model in held[:MODELS_MAX] if len(model) <= MODEL_ID_LENGTH_MAX)
        router = self._routes.routers.get(backend_tag_of(replica))
        if router is not None and router.hold(replica, models) and models:
            self._heard_at[replica] = now
        else:
            self._heard_at.pop(replica, None)

    def sweep(self, now: float) -> None:
        """Forget those that are gone or said nothing for `SILENT_S`; to be called often."""
        if now < self._sweep_at:
            return
        self._sweep_at = now + _SWEEP_EVERY_S
        for replica in [tag for tag, heard_at in self._heard_at.items() if now - heard_at >= SILENT_S]:
            del self._heard_at[replica]
            router = self._routes.routers.get(backend_tag_of(replica))
            if router is not None:
                router.hold(replica, frozenset())
