"""A router's state of replicas, and the choice of one: by affinity (key, version, model), then by load."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from enum import Enum
from hashlib import blake2b
from math import log
from typing import Final, Protocol, TypeVar, final

import msgspec

from serve_common.config.backend import ReplicaPolicyName
from serve_common.names import ReplicaTag
from serve_common.routing.queues import RequestKey, SendTo

_MASK: Final = 0xFFFF_FFFF_FFFF_FFFF
_MIX_1: Final = 0xBF58_476D_1CE4_E5B9
_MIX_2: Final = 0x94D0_49BB_1331_11EB
"""The multipliers of splitmix64's finalizer, which spreads every bit of the input over the output."""


def stable_hash(text: str) -> int:
    """A 64-bit hash of ``text``, the same in every process (Python's own `hash` is not)."""
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def score(key_hash: int, member_hash: int) -> int:
    """The 64-bit rank of a member for a key (rendezvous hashing); the highest is chosen.

    Why rendezvous hashing: a new member takes only the keys that it is first for; when one leaves, only its keys move,
    each to the next member in its own order. Nothing is stored, so every process pins alike, also after a restart.
    """
    mixed = (key_hash ^ member_hash) * _MIX_1 & _MASK
    mixed = (mixed ^ mixed >> 29) * _MIX_2 & _MASK
    return mixed ^ mixed >> 32


def weighted_score(key_hash: int, member_hash: int, weight: float) -> float:
    """As `score`, but a member is first for a share of all keys proportional to its ``weight``, which is above 0.

    A changed weight of one member moves keys to it or from it, and none between the others.
    """
    # 52 bits plus a half: so the logarithm's argument is neither 0 nor 1.
    return -weight / log(((score(key_hash, member_hash) >> 12) + 0.5) / (1 << 52))


BUSY_WAIT_S: Final = 0.02
BUSY_WAIT_S_MAX: Final = 0.3
"""Longest wait before a replica that refused as busy is retried: other routers' requests fill it, and it does not
report when they end."""
SILENT_WAIT_S: Final = 0.5
SILENT_WAIT_S_MAX: Final = 5.0
"""Longest wait before a replica that does not respond is retried: it may be dead, or only be reconnecting."""


class Block(Enum):
    """Why a replica is not chosen for a while."""

    BUSY = "busy"
    """It was full; a slot released there ends the block."""
    SILENT = "silent"
    """It does not respond; any response ends the block."""
    RESTING = "resting"
    """It drains by itself; a snapshot will confirm it."""


@final
class ReplicaSlots:
    """State of one replica; only the router changes it.

    Why a set of requests and not a counter: a slot is then released exactly once, whichever of response, cancel,
    timeout and death comes first; the later ones find nothing to release.
    """

    __slots__ = (
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
        "silent_wait_s",
        "tag",
        "tag_hash",
        "times_ejected",
        "turn",
    )

    def __init__(self, tag: ReplicaTag) -> None:
        self.tag = tag
        self.tag_hash: Final = stable_hash(tag)
        self.send_to: Final = SendTo(tag)
        """Created once for all requests."""
        self.requests: set[RequestKey] = set()
        """Requests in flight there."""
        self.is_draining = False
        """Set by a snapshot: it finishes what it has and takes nothing new."""
        self.block: Block | None = None
        self.blocked_until = 0.0
        """When the block expires."""
        self.has_failed = False
        """True when it has failed since its last success, so that there may be failure state to reset."""
        self.is_dead = False
        """Its subject had no subscriber for so long that it counts as dead; any response resets that."""
        self.busy_wait_s = BUSY_WAIT_S
        self.silent_wait_s = SILENT_WAIT_S
        self.position = -1
        """Index in the router's list of replicas that can be chosen; -1 when it is not in it."""
        self.turn = 0
        self.failures = 0
        """Consecutive failures, for `OutlierEjection.consecutive_failures`."""
        self.times_ejected = 0
        """Consecutive ejections."""
        self.is_ejected = False
        self.ejected_at = self.ejected_until = 0.0
        self.code_version: int | None = None
        """None while all replicas run the same one."""
        self.models: frozenset[str] = frozenset()
        """Multiplexed models that it has loaded."""

    def can_take(self, requests_max: int) -> bool:
        """True when it may be sent a request now."""
        return (
            not self.is_draining
            and not self.is_ejected
            and self.block is None
            and len(self.requests) < requests_max
        )

    @property
    def has_drained(self) -> bool:
        """True when it takes nothing new, by a snapshot or its own word: should it go, it did not die."""
        return self.is_draining or self.block is Block.RESTING

    @property
    def is_healthy(self) -> bool:
        """True when it is present and works, as far as is known; it may be full."""
        return (
            not self.is_draining
            and not self.is_ejected
            and not self.is_dead
            and self.block is not Block.SILENT
        )

    def block_as_busy(self, now: float) -> None:
        """Block it after a refusal because it was full; a block for a stronger reason stays."""
        if self.block in (Block.SILENT, Block.RESTING):
            return
        self.block = Block.BUSY
        self.has_failed = True
        self.blocked_until = now + self.busy_wait_s
        self.busy_wait_s = min(2 * self.busy_wait_s, BUSY_WAIT_S_MAX)

    def quarantine(self, now: float) -> None:
        """Block it because it does not respond. Many such reports at once count as one."""
        if self.block in (Block.SILENT, Block.RESTING):
            return
        self.block = Block.SILENT
        self.has_failed = True
        self.blocked_until = now + self.silent_wait_s
        self.silent_wait_s = min(2 * self.silent_wait_s, SILENT_WAIT_S_MAX)

    def rest(self, now: float) -> None:
        """Block it because it drains by itself; it is retried after a while should no snapshot confirm it."""
        self.block = Block.RESTING
        self.has_failed = True
        self.blocked_until = now + SILENT_WAIT_S_MAX

    def prove_alive(self) -> None:
        """It has responded in any way: reset a block for being silent or full."""
        self.busy_wait_s = BUSY_WAIT_S
        self.silent_wait_s = SILENT_WAIT_S
        self.is_dead = False
        if self.block is not Block.RESTING:
            self.block = None

    def succeed(self) -> None:
        """It has responded successfully: reset all failure state. An ejection lasts to its end."""
        self.prove_alive()
        self.has_failed = False
        self.failures = 0
        self.times_ejected = 0


Rng = Callable[[], float]
"""Returns the next random number in [0, 1)."""


class Load(Protocol):
    """What a policy may use of a replica that has a free slot."""

    @property
    def requests(self) -> Sized:
        """This router's requests in flight there."""
        ...

    @property
    def turn(self) -> int:
        """Number of the router's last choice of this replica; 0 for never."""
        ...


L = TypeVar("L", bound=Load)


class ReplicaPolicy(Protocol):
    """Chooses one of many. State of earlier choices is private to the policy.

    Why a protocol: the router's bookkeeping is the same for all policies, and none of them may change it.
    """

    def choose(self, replicas: Sequence[L], rng: Rng) -> L:
        """One of ``replicas``, which is not empty."""
        ...


@final
class PowerOfTwoChoices:
    """The less loaded of two random replicas: nearly as even as comparing all, at constant cost."""

    def choose(self, replicas: Sequence[L], rng: Rng) -> L:
        """One of ``replicas``."""
        count = len(replicas)
        if count == 1:
            return replicas[0]
        first = int(rng() * count)
        second = int(rng() * (count - 1))
        if second >= first:
            second += 1
        one, other = replicas[first], replicas[second]
        return one if len(one.requests) <= len(other.requests) else other


@final
class RoundRobin:
    """The replica whose last turn is the longest ago. Compares all of them."""

    def choose(self, replicas: Sequence[L], rng: Rng) -> L:  # noqa: ARG002 - part of the Protocol
        """One of ``replicas``."""
        return min(replicas, key=lambda replica: replica.turn)


@final
class RandomChoice:
    """Any replica, with equal probability."""

    def choose(self, replicas: Sequence[L], rng: Rng) -> L:
        """One of ``replicas``."""
        return replicas[int(rng() * len(replicas))]


@final
class FixedPacking:
    """The same replica so many times in a row, then the one whose last turn is the longest ago.

    A row ends early when its replica is not among those to choose from: no request waits for a batch to fill.
    """

    def __init__(self, packing_num: int) -> None:
        """``packing_num`` is the length of a row, at least 1."""
        self._packing_num = packing_num
        self._current: object | None = None
        self._row = 0

    def choose(self, replicas: Sequence[L], rng: Rng) -> L:  # noqa: ARG002 - part of the Protocol
        """One of ``replicas``."""
        if self._row < self._packing_num:
            for replica in replicas:
                if replica is self._current:
                    self._row += 1
                    return replica
        chosen = min(replicas, key=lambda replica: replica.turn)
        self._current, self._row = chosen, 1
        return chosen


_POWER_OF_TWO_CHOICES: Final = PowerOfTwoChoices()


def build_policy(name: ReplicaPolicyName, packing_num: int) -> ReplicaPolicy:
    """Create the policy of that name."""
    match name:
        case ReplicaPolicyName.POWER_OF_TWO_CHOICES:
            return _POWER_OF_TWO_CHOICES
        case ReplicaPolicyName.ROUND_ROBIN:
            return RoundRobin()
        case ReplicaPolicyName.RANDOM:
            return RandomChoice()
        case ReplicaPolicyName.FIXED_PACKING:
            return FixedPacking(packing_num)


class Affinity(msgspec.Struct, frozen=True, gc=False):
    """Preferences of one request: code version, then key, then model. Never a filter.

    It orders the replicas with a free slot and excludes none, so no request waits while a replica could take it.
    """

    code_version: int | None = None
    """Prefer replicas of this version, while one of them has a free slot."""
    shard_hash: int | None = None
    """Hash of the key that pins it. A replica that is full, ejected, silent or leaving is skipped for the next one in
    the key's order, and gets the key's requests again as soon as it is available."""
    model_id: str = ""
    """Prefer replicas that have loaded this model."""


def choose_by_affinity(
    preferred: Affinity,
    replicas: Sequence[ReplicaSlots],
    policy: ReplicaPolicy,
    rng: Rng,
    requests_max: int,
) -> ReplicaSlots:
    """One of ``replicas``, which is not empty; ``requests_max`` is how many requests a replica takes at once."""
    if preferred.code_version is not None:
        replicas = [slots for slots in replicas if slots.code_version == preferred.code_version] or replicas
    if preferred.shard_hash is not None:
        return choose_by_hash(preferred.shard_hash, replicas)
    if preferred.model_id:
        return _choose_for_model(preferred.model_id, replicas, policy, rng, requests_max)
    return policy.choose(replicas, rng)


def choose_by_hash(key_hash: int, replicas: Sequence[ReplicaSlots]) -> ReplicaSlots:
    """The first of ``replicas`` in the order of the key."""
    return max(replicas, key=lambda slots: score(key_hash, slots.tag_hash))


def _choose_for_model(
    model_id: str, replicas: Sequence[ReplicaSlots], policy: ReplicaPolicy, rng: Rng, requests_max: int
) -> ReplicaSlots:
    """A replica that has loaded the model, or the first in the model's order: then not every replica loads it.

    When all of those have half of the requests that they can take, one with at most half of that is chosen: a hot
    model spreads, and any other model stays on one replica.
    """
    holders = [slots for slots in replicas if model_id in slots.models]
    if len(holders) == len(replicas):
        return policy.choose(replicas, rng)
    model_hash = stable_hash(model_id)
    if not holders:
        holders = [choose_by_hash(model_hash, replicas)]
    least = min(len(slots.requests) for slots in holders)
    if 2 * least >= requests_max:
        less_loaded = [
            slots for slots in replicas if 2 * len(slots.requests) <= least and slots not in holders
        ]
        if less_loaded:
            return choose_by_hash(model_hash, less_loaded)
    return policy.choose(holders, rng)
