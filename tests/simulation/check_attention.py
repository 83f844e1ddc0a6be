"""Looking at parts must come to the same as looking at everything, and what is visible must be durable."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.dirty_set import NOTHING, DirtySet, DirtySets
from serve_controller.core.objects import CheckpointObject, Replica
from serve_controller.core.reconcile import ReconcilePlan, reconcile

if TYPE_CHECKING:
    from serve_controller.shell.control_loop import Term
    from tests.simulation.sim_controller import SimController
    from tests.simulation.world import World

EVERYTHING_BUT_TIDY: Final = DirtySet(is_everything=True)
ASK_EVERY: Final = 7
BUCKET_READ_S: Final = 5.0
"""A bucket that was lost counts its revisions anew: what is put before the leader heard of it is put again."""
COMPARE_EVERY: Final = 5


class AttentionMissesNothing:
    """Right after a cycle that left nothing to look at, a plan of everything would do nothing more."""

    def __init__(self, world: World) -> None:
        self.world = world
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
        changed = [value for value in plan.changes.puts if not _only_says_more(term.checkpoint, value)]
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


def _only_says_more(checkpoint: Checkpoint, value: CheckpointObject) -> bool:
    """Whether only the words change by which a replica says why it waits: those may be a while behind."""
    if not isinstance(value, Replica):
        return False
    known = checkpoint.get_replicas(value.backend_tag).get(value.replica_tag)
    return known is not None and msgspec.structs.replace(known, message=value.message) == value


def _said(plan: ReconcilePlan) -> str:
    puts = [repr(value)[:300] for value in plan.changes.puts]
    return f"looking at everything would do more: {puts} {plan.changes.deletes} {repr(plan.actions)[:300]}"


class VisibleIsDurable:
    """What a leader decides from and answers with is what is recorded."""

    def __init__(self, world: World) -> None:
        self.world = world

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
