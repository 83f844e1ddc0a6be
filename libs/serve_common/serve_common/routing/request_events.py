"""Results of a router's methods: which request is sent where, which waits, which is refused.

Why apart from the router: code that acts on these needs no more of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple, final

from serve_common.names import ReplicaTag
from serve_common.routing.queues import RequestKey


@final
class SendTo(NamedTuple):
    """The request got a slot of ``replica``; the caller must send it there now."""

    replica: ReplicaTag


@final
class Queued(NamedTuple):
    """The request waits; a later call returns it as a `Dispatch` or as expired."""


@final
class QueueFull(NamedTuple):
    """The request was refused: ``limit`` requests wait already."""

    limit: int


class Dispatch(NamedTuple):
    """A request that waited got a slot of ``replica``; the caller must send it there now."""

    request: RequestKey
    replica: ReplicaTag


class Applied(NamedTuple):
    """Result of a snapshot. ``lost`` were in flight on replicas that are gone; the router has forgotten them."""

    dispatches: Sequence[Dispatch]
    lost: Sequence[RequestKey]
    died: frozenset[RequestKey] = frozenset()
    """Those of ``lost`` whose replica was not draining: it died."""
    are_others_left: bool = False
    """Replicas that were healthy before still exist."""


class Dropped(NamedTuple):
    """All requests of a router, which has forgotten them."""

    waiting: Sequence[RequestKey]
    lost: Sequence[RequestKey]


class Refusal(Enum):
    """Why a replica did not start a request that was sent to it."""

    BUSY = "busy"
    DRAINING = "draining"
    NO_RESPONDERS = "no_responders"
