"""Pins keys to members of a changing set: each key has an order of its own of all members, and takes the first.

Why rendezvous hashing: when a member comes, it takes only keys that it is first for; when one goes, only its keys move,
each to the next in its own order. Nothing is stored, so every process pins alike, however often it was restarted.
"""

from __future__ import annotations

from hashlib import blake2b
from math import log
from typing import Final

_MASK: Final = 0xFFFF_FFFF_FFFF_FFFF
_MIX_1: Final = 0xBF58_476D_1CE4_E5B9
_MIX_2: Final = 0x94D0_49BB_1331_11EB
"""The multipliers of splitmix64's finalizer, which spreads every bit of the input over the output."""


def stable_hash(text: str) -> int:
    """64 bits of ``text``, the same in every process (Python's own `hash` is not)."""
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def score(key_hash: int, member_hash: int) -> int:
    """The rank, in 64 bits, of a member in the order of a key; the highest is the first."""
    mixed = (key_hash ^ member_hash) * _MIX_1 & _MASK
    mixed = (mixed ^ mixed >> 29) * _MIX_2 & _MASK
    return mixed ^ mixed >> 32


def weighted_score(key_hash: int, member_hash: int, weight: float) -> float:
    """As `score`, such that a member is first for a share of all keys that is as its ``weight``, which is above 0.

    Another weight of one member moves keys to it or from it, and none between the others.
    """
    # 52 bits and a half: so the logarithm is of neither 0 nor 1.
    return -weight / log(((score(key_hash, member_hash) >> 12) + 0.5) / (1 << 52))
