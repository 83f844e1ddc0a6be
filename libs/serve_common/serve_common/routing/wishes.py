"""Requests that do not take just any replica: pinned by a key, kept to a version, or better off where their model is.

Why wishes and not demands: a wish orders the replicas that have a free slot and leaves none of them out, so nobody
waits while a replica could take the request.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from serve_common.routing.rendezvous import score, stable_hash
from serve_common.routing.replica_choice import Draw, ReplicaPolicy
from serve_common.routing.replica_slots import ReplicaSlots


class Wish(msgspec.Struct, frozen=True, gc=False):
    """What one request prefers; the first of the fields that decides, decides."""

    code_version: int | None = None
    """Replicas of this version before all others, while one of them has a free slot."""
    shard_hash: int | None = None
    """Of the key that pins it. A replica that is full, ejected, silent or leaving is passed over for the next one in
    the key's own order, and gets the key's requests again as soon as it is open again."""
    model_id: str = ""
    """Replicas that hold this model before those that would have to load it."""


def choose_by_wish(
    wish: Wish, replicas: Sequence[ReplicaSlots], policy: ReplicaPolicy, draw: Draw, requests_max: int
) -> ReplicaSlots:
    """One of ``replicas``, which is not empty; ``requests_max`` is how many requests a replica takes at once."""
    if wish.code_version is not None:
        replicas = [slots for slots in replicas if slots.code_version == wish.code_version] or replicas
    if wish.shard_hash is not None:
        return first_for(wish.shard_hash, replicas)
    if wish.model_id:
        return _choose_for_model(wish.model_id, replicas, policy, draw, requests_max)
    return policy.choose(replicas, draw)


def first_for(key_hash: int, replicas: Sequence[ReplicaSlots]) -> ReplicaSlots:
    """The first of ``replicas`` in the order of the key."""
    return max(replicas, key=lambda slots: score(key_hash, slots.tag_hash))


def _choose_for_model(
    model_id: str, replicas: Sequence[ReplicaSlots], policy: ReplicaPolicy, draw: Draw, requests_max: int
) -> ReplicaSlots:
    """One that holds the model, or the one that is first for it: then not every replica loads it.

    When all of those have half of what they can take, one with at most half of that takes over: a hot model spreads,
    and a model that is not is held in one place.
    """
    holders = [slots for slots in replicas if model_id in slots.models]
    if len(holders) == len(replicas):
        return policy.choose(replicas, draw)
    model_hash = stable_hash(model_id)
    if not holders:
        holders = [first_for(model_hash, replicas)]
    least = min(len(slots.requests) for slots in holders)
    if 2 * least >= requests_max:
        calm = [slots for slots in replicas if 2 * len(slots.requests) <= least and slots not in holders]
        if calm:
            return first_for(model_hash, calm)
    return policy.choose(holders, draw)
