"""What a router answers to what it is told: who is to be sent where, who waits, who is not taken.

Why apart from the router: whoever acts on these needs no more of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple, final

from serve_common.names import ReplicaTag
from serve_common.routing.queues import RequestKey


@final
class SendTo(NamedTuple):
    """The request has a slot of ``replica``; it is to be sent there now."""

    replica: ReplicaTag


@final
class Queued(NamedTuple):
    """The request waits; a later call returns it as a `Dispatch` or as expired."""


@final
class QueueFull(NamedTuple):
    """The request was not taken: ``limit`` requests wait already."""

    limit: int


class Dispatch(NamedTuple):
    """A request that waited has a slot of ``replica`` now; it is to be sent there."""

    request: RequestKey
    replica: ReplicaTag


class Applied(NamedTuple):
    """What a snapshot changed. ``lost`` were in flight on replicas that are gone; the router has forgotten them."""

    dispatches: Sequence[Dispatch]
    lost: Sequence[RequestKey]
    died: frozenset[RequestKey] = frozenset()
    """Those of ``lost`` whose replica was not draining: it died."""
    are_others_left: bool = False
    """Replicas that were healthy before still are there."""


class Dropped(NamedTuple):
    """All that a router held; it has forgotten them."""

    waiting: Sequence[RequestKey]
    lost: Sequence[RequestKey]


class Refusal(Enum):
    """Why a replica did not begin a request that was sent to it."""

    BUSY = "busy"
    DRAINING = "draining"
    NO_RESPONDERS = "no_responders"
