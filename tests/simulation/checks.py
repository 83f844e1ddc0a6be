"""What must hold, stated from the goal and not from the code: one class for each promise.

Every commit of the store, every start and drain on a host, every message and every cycle is shown to them. The first
broken promise ends the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

import msgspec

from serve_common.names import ReplicaTag
from serve_common.protocol.reports import HostGoal
from serve_common.protocol.snapshots import Snapshot
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.dirty_set import NOTHING, DirtySet, DirtySets
from serve_controller.core.objects import CheckpointObject, Replica
from serve_controller.core.reconcile import ReconcilePlan, reconcile
from serve_controller.core.rollouts.record import Rollout, baseline_tag, canary_tag
from tests.simulation.check_budgets import (
    ForceKillIsForced,
    ReconfiguresAFew,
    RoomOfHosts,
    ServingIsNotForgotten,
    StuckIsGivenUp,
    Surge,
    UnavailableBudget,
    UsersWinOverTheAutoscaler,
)
from tests.simulation.check_numbers import GoalsEndOnce, NumbersRise, OneWriter, SuccessIsTrue
from tests.simulation.check_routing import (
    DroppedIsNotRouted,
    HostGoalsAreRecorded,
    RoutesAreLeftFirst,
    SnapshotsAreTrue,
)
from tests.simulation.reference import Reference
from tests.simulation.rollout_wishes import RolloutsKeepTheirWord
from tests.simulation.world_store import Check, Commit

if TYPE_CHECKING:
    from serve_controller.shell.control_loop import Term
    from tests.simulation.sim_controller import SimController
    from tests.simulation.sim_host import SimHost
    from tests.simulation.sim_proxy import SimProxy
    from tests.simulation.world import World
    from tests.simulation.world_store import Writer

HOOKS: Final = (
    "on_commit",
    "on_start",
    "on_drain",
    "on_goal_sent",
    "on_publish",
    "on_proxy",
    "on_cycle",
    "on_epoch",
)

EVERYTHING_BUT_TIDY: Final = DirtySet(is_everything=True)
ASK_EVERY: Final = 7
BUCKET_READ_S: Final = 5.0
"""A bucket that was lost counts its revisions anew: what is put before the leader heard of it is put again."""
COMPARE_EVERY: Final = 5


class AttentionMissesNothing(Check):
    """Right after a cycle that left nothing to look at, a plan of everything would do nothing more."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.asked = 0

    def on_cycle(self, controller: SimController, term: Term) -> None:
        if controller.cycles % ASK_EVERY == 0:
            self.ask(term)

    def ask(self, term: Term) -> bool:
        """Look at everything now; False when something is still to be looked at anyway."""
        hearing = term._observations
        at = hearing._due_checks.next_at()
        if (
            _is_something_left(hearing.dirty_sets)
            or hearing._inbox
            or not term._is_checkpoint_certain
            or self.world.time - self.world.checks.bucket_lost_at < BUCKET_READ_S
            or (self.world.checks.is_bucket_lost and self.world.bus.is_hanging)
            or (at is not None and at <= self.world.time)
        ):
            return False
        self.asked += 1
        plan = reconcile(term.checkpoint, term.observed, term.epoch, self.world.time, EVERYTHING_BUT_TIDY)
        self.world.check(not plan.faults, lambda: f"a plan of everything fails: {plan.faults}")
        changed = [
            value
            for value in plan.changes.puts
            if not _only_says_more(term.checkpoint, value, plan.changes.puts)
        ]
        self.world.check(not changed and not plan.changes.deletes and not plan.actions, lambda: _said(plan))
        return True


def _is_something_left(dirty_sets: DirtySets) -> bool:
    named = (
        dirty_sets._backends,
        dirty_sets._endpoints,
        dirty_sets._hosts,
        dirty_sets._proxies,
        dirty_sets._keys,
    )
    return any(named) or dirty_sets._flags != NOTHING


def _only_says_more(
    checkpoint: Checkpoint, value: CheckpointObject, puts: Iterable[CheckpointObject]
) -> bool:
    """Whether only the words change by which a replica says why it waits: those may be a while behind. And those of a
    rollout that waits for such a replica."""
    if isinstance(value, Rollout):
        waiting, tag = checkpoint.rollouts.get(value.backend_tag), value.backend_tag
        of = {tag, canary_tag(tag), baseline_tag(tag)}
        return (
            waiting is not None
            and msgspec.structs.replace(waiting, reason=value.reason) == value
            and any(isinstance(one, Replica) and one.backend_tag in of for one in puts)
        )
    if not isinstance(value, Replica):
        return False
    known = checkpoint.get_replicas(value.backend_tag).get(value.replica_tag)
    return known is not None and msgspec.structs.replace(known, message=value.message) == value


def _said(plan: ReconcilePlan) -> str:
    puts = [repr(value)[:300] for value in plan.changes.puts]
    return f"looking at everything would do more: {puts} {plan.changes.deletes} {repr(plan.actions)[:300]}"


class VisibleIsDurable(Check):
    """What a leader decides from and answers with is what is recorded."""

    def on_cycle(self, controller: SimController, term: Term) -> None:
        if controller.cycles % COMPARE_EVERY:
            return
        store = self.world.store
        if term.epoch != store.epoch or not term._is_checkpoint_certain:
            return
        if controller.store.writes != store.writes:
            return  # it has yet to notice that the store was restored
        for name in term.checkpoint.__slots__:
            self.world.check(
                getattr(term.checkpoint, name) == getattr(store.checkpoint, name),
                lambda name=name: f"the leader's {name} differ from the recorded ones",
            )


class Checks:
    """All promises; each hears what it has a method for."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.not_well: set[ReplicaTag] = set()
        """Replicas that something happened to: they may be stopped at any time."""
        self.is_bucket_lost = False
        """Proxies that read the bucket may know less than before."""
        self.bucket_lost_at = float("-inf")
        """Leaders need a moment to hear of it."""
        self.led_since = float("inf")
        """Since when the present leader leads with store and bus there."""
        self.is_silence_possible = False
        """The bus is away for a while."""
        self.reference = Reference(world)
        self.attention = AttentionMissesNothing(world)
        self.all: list[Any] = [
            OneWriter(world),
            NumbersRise(world),
            GoalsEndOnce(world),
            HostGoalsAreRecorded(world),
            SnapshotsAreTrue(world),
            DroppedIsNotRouted(world),
            RoutesAreLeftFirst(world),
            Surge(world),
            UnavailableBudget(world),
            ServingIsNotForgotten(world),
            StuckIsGivenUp(world),
            ForceKillIsForced(world),
            ReconfiguresAFew(world),
            RoomOfHosts(world),
            SuccessIsTrue(world),
            self.reference,
            self.attention,
            VisibleIsDurable(world),
            UsersWinOverTheAutoscaler(world),
            RolloutsKeepTheirWord(world),
        ]
        self._hooks: dict[str, list[Callable[..., None]]] = {
            hook: [getattr(check, hook) for check in self.all if hasattr(check, hook)] for hook in HOOKS
        }

    def save(self) -> list[Any]:
        """What each promise knows of the store's content, for when that goes back in time."""
        return [check.save() if hasattr(check, "save") else None for check in self.all]

    def go_back(self, saved: list[Any]) -> None:
        """The store is as it was when this was saved."""
        for check, known in zip(self.all, saved, strict=True):
            if hasattr(check, "go_back"):
                check.go_back(known)

    def on_commit(self, commit: Commit) -> None:
        """The store made a write."""
        for entry in commit.history:
            self.world.trace(f"epoch {commit.epoch} commits {entry.verb} {entry.subject} {entry.goal_id}")
        for hear in self._hooks["on_commit"]:
            hear(commit)

    def on_start(self, host: SimHost, tag: ReplicaTag) -> None:
        """A host starts a replica."""
        self.world.trace(f"{host.host_id} starts {tag}")
        for hear in self._hooks["on_start"]:
            hear(host, tag)

    def on_drain(self, host: SimHost, tag: ReplicaTag) -> None:
        """A host begins to drain a replica."""
        self.world.trace(f"{host.host_id} drains {tag}")
        for hear in self._hooks["on_drain"]:
            hear(host, tag)

    def on_goal_sent(self, goal: HostGoal) -> None:
        """A controller sends a host its goal."""
        for hear in self._hooks["on_goal_sent"]:
            hear(goal)

    def on_publish(self, key: str, snapshot: Snapshot) -> None:
        """A controller puts a key of the bucket."""
        for hear in self._hooks["on_publish"]:
            hear(key, snapshot)

    def on_proxy(self, proxy: SimProxy) -> None:
        """A proxy took something from the bucket."""
        for hear in self._hooks["on_proxy"]:
            hear(proxy)

    def on_cycle(self, controller: SimController, term: Term) -> None:
        """A leader's cycle is over."""
        for hear in self._hooks["on_cycle"]:
            hear(controller, term)

    def on_epoch(self, epoch: int, writer: Writer) -> None:
        """A controller was given an epoch."""
        self.led_since = self.world.time
        for hear in self._hooks["on_epoch"]:
            hear(epoch, writer)
