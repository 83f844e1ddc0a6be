"""Which backend of an endpoint takes a request.

Why apart from the snapshot: the weights are summed up once per change, not once per request.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Container, Mapping
from itertools import accumulate
from typing import final

from serve_common.names import BackendTag
from serve_common.routing.rendezvous import stable_hash, weighted_score


@final
class TrafficSplit:
    """The weights of one endpoint, ready to choose by."""

    __slots__ = ("_bounds", "_hashes", "_weighted", "backend_tags", "sole")

    def __init__(self, traffic: Mapping[BackendTag, float]) -> None:
        """Weights need not sum to exactly 1; a backend with weight 0 is never chosen."""
        weighted = {tag: weight for tag, weight in traffic.items() if weight > 0}
        self._weighted = weighted
        self.backend_tags = tuple(weighted)
        self.sole = self.backend_tags[0] if len(weighted) == 1 else None
        """The only backend with weight, which needs no choice; None when there are more, or none."""
        self._bounds = list(accumulate(weighted.values()))
        self._hashes = {tag: stable_hash(tag) for tag in weighted}

    def choose(self, chance: float) -> BackendTag | None:
        """The backend for ``chance`` in [0, 1), or None when no backend has weight."""
        tags = self.backend_tags
        if len(tags) < 2:
            return tags[0] if tags else None
        # The product can round up to the last bound itself.
        at = bisect_right(self._bounds, chance * self._bounds[-1])
        return tags[min(at, len(tags) - 1)]

    def choose_for(self, key_hash: int) -> BackendTag | None:
        """The backend that requests with a key are pinned to, or None when no backend has weight.

        Keys are spread by the weights. When those change, a key moves only to a backend whose weight grew in proportion
        to that of the backend it leaves.
        """
        tags = self.backend_tags
        if len(tags) < 2:
            return tags[0] if tags else None
        weighted, hashes = self._weighted, self._hashes
        return max(tags, key=lambda tag: weighted_score(key_hash, hashes[tag], weighted[tag]))

    def without(self, left_out: Container[BackendTag]) -> TrafficSplit:
        """The same weights for the other backends."""
        return TrafficSplit({tag: weight for tag, weight in self._weighted.items() if tag not in left_out})
