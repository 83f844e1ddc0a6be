"""One replica as its router sees it: what is in flight there, and whether it may be chosen.

Why sets of requests and never counters: a slot is then given back exactly once, whichever of answer, cancel, time-out
and death comes first, and the later ones find nothing to give back.
"""

from __future__ import annotations

from enum import Enum
from typing import Final, final

from serve_common.names import ReplicaTag
from serve_common.routing.outcomes import SendTo
from serve_common.routing.rendezvous import stable_hash
from serve_common.routing.request_queue import RequestKey

BUSY_WAIT_S: Final = 0.02
BUSY_WAIT_S_MAX: Final = 0.3
"""A replica that refused as busy is full of other routers' requests; it says nothing when they end."""
ASIDE_WAIT_S: Final = 0.5
ASIDE_WAIT_S_MAX: Final = 5.0
"""A replica that does not answer may be dead, or only be reconnecting: it is tried again, ever more seldom."""


class Block(Enum):
    """Why a replica is not chosen for a while."""

    BUSY = "busy"
    """It was full; a slot given back there ends that."""
    SILENT = "silent"
    """It does not answer; any answer ends that."""
    RESTING = "resting"
    """It drains on its own account; a snapshot will say so."""


@final
class ReplicaSlots:
    """Bookkeeping of one replica; only the router changes it."""

    __slots__ = (
        "aside_wait_s",
        "block",
        "blocked_until",
        "busy_wait_s",
        "code_version",
        "ejected_at",
        "ejected_until",
        "failures",
        "has_failed",
        "is_dead",
        "is_draining",
        "is_ejected",
        "models",
        "position",
        "requests",
        "send_to",
        "tag",
        "tag_hash",
        "times_ejected",
        "turn",
    )

    def __init__(self, tag: ReplicaTag) -> None:
        self.tag = tag
        self.tag_hash: Final = stable_hash(tag)
        self.send_to: Final = SendTo(tag)
        """Made once for all requests."""
        self.requests: set[RequestKey] = set()
        """In flight there."""
        self.is_draining = False
        """By snapshot: answers what it has, takes nothing new."""
        self.block: Block | None = None
        self.blocked_until = 0.0
        """When the block ends by itself."""
        self.has_failed = False
        """Since its last success, so that there may be something below to forget."""
        self.is_dead = False
        """Nobody listened there for so long that it counts as dead; any answer says that it was only cut off."""
        self.busy_wait_s = BUSY_WAIT_S
        self.aside_wait_s = ASIDE_WAIT_S
        self.position = -1
        """Index in the router's list of replicas that can be chosen; -1 when it is not in it."""
        self.turn = 0
        self.failures = 0
        """In a row; see `OutlierEjection.consecutive_failures`."""
        self.times_ejected = 0
        """In a row."""
        self.is_ejected = False
        self.ejected_at = self.ejected_until = 0.0
        self.code_version: int | None = None
        """None while all replicas run the same one."""
        self.models: frozenset[str] = frozenset()
        """Multiplexed models that it holds."""

    def can_take(self, requests_max: int) -> bool:
        """True when it may be sent a request now."""
        return (
            not self.is_draining
            and not self.is_ejected
            and self.block is None
            and len(self.requests) < requests_max
        )

    @property
    def is_healthy(self) -> bool:
        """True when it is there and well, as far as is known; it may be full."""
        return (
            not self.is_draining
            and not self.is_ejected
            and not self.is_dead
            and self.block is not Block.SILENT
        )

    def block_as_busy(self, now: float) -> None:
        """It refused for being full; a block for a stronger reason stays."""
        if self.block in (Block.SILENT, Block.RESTING):
            return
        self.block = Block.BUSY
        self.has_failed = True
        self.blocked_until = now + self.busy_wait_s
        self.busy_wait_s = min(2 * self.busy_wait_s, BUSY_WAIT_S_MAX)

    def put_aside(self, now: float) -> None:
        """It does not answer. Hearing the same many times at once counts as once."""
        if self.block in (Block.SILENT, Block.RESTING):
            return
        self.block = Block.SILENT
        self.has_failed = True
        self.blocked_until = now + self.aside_wait_s
        self.aside_wait_s = min(2 * self.aside_wait_s, ASIDE_WAIT_S_MAX)

    def rest(self, now: float) -> None:
        """It drains on its own account; should no snapshot say so, it is asked again after a while."""
        self.block = Block.RESTING
        self.has_failed = True
        self.blocked_until = now + ASIDE_WAIT_S_MAX

    def prove_alive(self) -> None:
        """It has answered, whatever it was: that it was silent or full counts no more."""
        self.busy_wait_s = BUSY_WAIT_S
        self.aside_wait_s = ASIDE_WAIT_S
        self.is_dead = False
        if self.block is not Block.RESTING:
            self.block = None

    def succeed(self) -> None:
        """It has answered well: earlier failures of every kind count no more. An ejection goes on to its end."""
        self.prove_alive()
        self.has_failed = False
        self.failures = 0
        self.times_ejected = 0
