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
MODELS_BYTES_MAX: Final = 2 * MODELS_MAX * MODEL_ID_LENGTH_MAX
"""Of one message; a larger one is left out unread."""
AGAIN_S: Final = 0.1
"""What a replica says within this time of the last time is taken in at its end, and only the last of it: nobody who
says something new all the time may keep a router busy."""
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
        self._taken_at: dict[ReplicaTag, float] = {}
        """Of those that were taken in lately."""
        self._waiting: dict[ReplicaTag, bytes] = {}
        """What they said since."""
        self._bad_messages = QuietLog(_log.warning)

    def __len__(self) -> int:
        """Replicas that are known to hold a model."""
        return len(self._heard_at)

    def take(self, subject: bytes, _reply: bytes, payload: bytes, _headers: bytes | None) -> None:
        """A replica says what it holds; to be subscribed to `Subjects.all_models`."""
        now = self._now()
        try:
            replica = self._subjects.replica_of_models(subject.decode())
        except UnicodeDecodeError as error:
            self._refuse(now, subject, str(error))
            return
        router = self._routes.routers.get(backend_tag_of(replica))
        if router is None or not router.knows(replica):
            return  # it says so again
        if len(payload) > MODELS_BYTES_MAX:
            self._refuse(now, subject, f"it has {len(payload)} bytes; {MODELS_BYTES_MAX} are allowed")
        elif now - self._taken_at.get(replica, float("-inf")) < AGAIN_S:
            self._waiting[replica] = payload
        else:
            self._take(replica, payload, now)

    def _take(self, replica: ReplicaTag, payload: bytes, now: float) -> None:
        self._taken_at[replica] = now
        self._waiting.pop(replica, None)
        try:
            held = _decoder.decode(payload)
        except (UnicodeDecodeError, msgspec.DecodeError) as error:
            self._refuse(now, replica.encode(), str(error))
            return
        self.hold(replica, held)

    def _refuse(self, now: float, subject: bytes, reason: str) -> None:
        self._bad_messages.log(now, "models_unreadable", subject=repr(subject[:200]), reason=reason)

    def hold(self, replica: ReplicaTag, held: list[str]) -> None:
        """``replica`` holds exactly these models."""
        now = self._now()
        self._forget(now)
        models = frozenset(model for model in held[:MODELS_MAX] if len(model) <= MODEL_ID_LENGTH_MAX)
        router = self._routes.routers.get(backend_tag_of(replica))
        if router is not None and router.hold(replica, models) and models:
            self._heard_at[replica] = now
        else:
            self._heard_at.pop(replica, None)

    def sweep(self, now: float) -> None:
        """Take in what waits, and forget those that are gone or said nothing for `SILENT_S`; to be called often."""
        if self._taken_at:
            self._take_waiting(now)
        self._forget(now)

    def _forget(self, now: float) -> None:
        if now < self._sweep_at:
            return
        self._sweep_at = now + _SWEEP_EVERY_S
        for replica in [tag for tag, heard_at in self._heard_at.items() if now - heard_at >= SILENT_S]:
            del self._heard_at[replica]
            router = self._routes.routers.get(backend_tag_of(replica))
            if router is not None:
                router.hold(replica, frozenset())

    def _take_waiting(self, now: float) -> None:
        over = [tag for tag, taken_at in self._taken_at.items() if now - taken_at >= AGAIN_S]
        for replica in over:
            del self._taken_at[replica]
            payload = self._waiting.pop(replica, None)
            if payload is not None:
                self._take(replica, payload, now)
