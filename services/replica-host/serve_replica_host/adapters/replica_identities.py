"""Issues each replica its own identity on the bus, and renews it well before it expires.

Why in front of the runtime: the signing key stays in the host's process, and processes that run user code get the
replica's own token only. NATS verifies tokens by itself, so a replica can reconnect without controller and host.
"""

from __future__ import annotations

import asyncio
import math
from typing import Final, Protocol, final

import msgspec

from serve_common.identities.credentials import SigningKey, UserIdentity
from serve_common.identities.roles import Role, call_tags, inbox_prefix
from serve_common.names import ReplicaTag
from serve_common.nats.login import mint_now
from serve_common.protocol.reports import ReplicaGoal
from serve_common.protocol.subjects import tokens
from serve_common.runtime.settings import BusSettings
from serve_replica_host.core.events import ProcessEnded, ReplicaEvent

_RENEWALS: Final = 3
"""Renewals per lifetime of an identity, so that a late one is harmless."""


class IdentityAwareRuntime(Protocol):
    """A `ports.ReplicaRuntime` that also gets the bus settings of each replica."""

    @property
    def resources(self) -> dict[str, float]:
        """Total resources by Ray's names."""
        ...

    def start(self, goal: ReplicaGoal, bus: BusSettings) -> None:
        """Start the replica with ``bus``, its own settings."""
        ...

    def reconfigure(self, goal: ReplicaGoal) -> None:
        """Apply the goal's configuration to a running replica."""
        ...

    def renew(self, replica_tag: ReplicaTag, identity: UserIdentity) -> None:
        """Make the replica log in with ``identity`` from now on."""
        ...

    def check_health(self, replica_tag: ReplicaTag) -> None:
        """Request a health check."""
        ...

    def drain(self, replica_tag: ReplicaTag) -> None:
        """Make the replica refuse new requests and finish those in flight."""
        ...

    def kill(self, replica_tag: ReplicaTag) -> None:
        """Kill the replica's process."""
        ...

    def kill_by_force(self, replica_tag: ReplicaTag) -> None:
        """Kill a process that survived `kill`."""
        ...


@final
class IdentifiedReplicas:
    """A `ports.ReplicaRuntime` that issues an identity to each replica."""

    def __init__(self, runtime: IdentityAwareRuntime, bus: BusSettings, lifetime_s: float) -> None:
        """``bus`` has the settings shared by all replicas: a signing key of role replica, or a plain user.

        Identities last ``lifetime_s`` seconds.
        """
        self._runtime = runtime
        self._bus = bus
        self._key = bus.credentials if isinstance(bus.credentials, SigningKey) else None
        self._lifetime_s = lifetime_s
        self._goals: dict[ReplicaTag, ReplicaGoal] = {}
        """Goals of the replicas that have identities."""
        self.kill: Final = runtime.kill
        self.kill_by_force: Final = runtime.kill_by_force
        self.check_health: Final = runtime.check_health
        self.drain: Final = runtime.drain

    @property
    def resources(self) -> dict[str, float]:
        """Total resources by Ray's names."""
        return self._runtime.resources

    def start(self, goal: ReplicaGoal) -> None:
        """Start the replica with a new identity."""
        bus = self._bus
        if self._key is not None:
            self._goals[goal.replica_tag] = goal
            bus = msgspec.structs.replace(
                bus,
                user=f"{Role.REPLICA.value} {goal.replica_tag}",
                credentials=self._mint(self._key, goal),
                inbox_prefix=inbox_prefix(Role.REPLICA, tokens(goal.replica_tag)),
            )
        self._runtime.start(goal, bus)

    def reconfigure(self, goal: ReplicaGoal) -> None:
        """Apply the goal's configuration; renews the identity if ``may_call`` has changed."""
        former = self._goals.get(goal.replica_tag)
        self._runtime.reconfigure(goal)
        if former is not None:
            self._goals[goal.replica_tag] = goal
            if former.may_call != goal.may_call:
                self._renew(goal)

    def take_event(self, event: ReplicaEvent) -> None:
        """Forget replicas that have ended."""
        if isinstance(event, ProcessEnded):
            self._goals.pop(event.replica_tag, None)

    async def run(self) -> None:
        """Renew all identities periodically, until cancelled."""
        while True:
            await asyncio.sleep(self._lifetime_s / _RENEWALS)
            for goal in tuple(self._goals.values()):
                self._renew(goal)

    def _renew(self, goal: ReplicaGoal) -> None:
        if self._key is not None:
            self._runtime.renew(goal.replica_tag, self._mint(self._key, goal))

    def _mint(self, key: SigningKey, goal: ReplicaGoal) -> UserIdentity:
        return mint_now(
            key,
            tokens(goal.replica_tag),
            tags=call_tags(goal.backend_tag, goal.may_call),
            lifetime_s=math.ceil(self._lifetime_s),
        )
