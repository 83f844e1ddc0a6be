"""How many replicas are in which state, for metrics.

Why one pass over the replicas: this is asked at every scrape, also with ten thousand of them.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.objects import ReplicaState


class ReplicaCount(msgspec.Struct, frozen=True):
    """How many replicas of a backend are in a state."""

    backend_tag: str
    state: str
    count: int


def count_replicas(checkpoint: Checkpoint) -> list[ReplicaCount]:
    """Replicas by backend and state; every state is listed, so that a series falls to zero."""
    rows = []
    for tag in sorted(checkpoint.backends.keys()):
        counts = Counter(replica.state for replica in checkpoint.replicas_of(tag).values())
        rows += [
            ReplicaCount(tag, state.value, counts[state])
            for state in ReplicaState
            if state is not ReplicaState.STOPPED
        ]
    return rows
