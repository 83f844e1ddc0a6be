"""Mistakes that the simulation must catch.

Each mutant changes the real code; a harness that lets one through is blind.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from serve_common.errors import StoreUnavailable
from serve_common.wires.commands import AnyCommand as Command
from serve_common.wires.commands import CommandReply
from serve_controller.core import goals, observed, reconcile, replica_reports, rollout
from serve_controller.core.checkpoint import Draft
from serve_controller.core.commands import decide
from serve_controller.core.objects import HostRecord
from serve_controller.shell.term import Term
from tests.simulation.scenario import build_world, deploy, play
from tests.simulation.twins.memory_store import MemoryStore
from tests.simulation.world import Faults


class RepliesBeforeRecording(Term):
    """Acknowledges a command and leaves the recording to the next cycle."""

    async def execute(self, command: Command, request: bytes) -> CommandReply:
        accepted = decide(self.checkpoint, command, self._clock.now())
        self.checkpoint = self.checkpoint.applied(accepted.changes)
        self.on_change()
        return accepted.reply


class PerformsBeforeRecording(Term):
    """Acts on a plan and records it afterwards."""

    async def run_cycle(self) -> float | None:
        await self._make_certain()
        plan = self._plan()
        for action in plan.actions:
            await self._perform(action)
        try:
            if plan.changes:
                await self._record("record_plan", plan.changes, plan.checkpoint, [])
        except StoreUnavailable:
            return self._clock.now() + 0.5
        return plan.look_again_at


def violations_over_crashes(term_class: type[Term] = Term) -> list[str]:
    """What the harness says over a clean run and every single crash, until it says something."""
    clean = build_world(term_class=term_class)
    found = play(clean).violations
    for number in range(clean.boundary.count):
        for after in (False, True):
            if found:
                return found
            world = build_world(crashes=frozenset({(number, after)}), term_class=term_class)
            found = play(world).violations
    return found


@pytest.mark.parametrize("mutant", [RepliesBeforeRecording, PerformsBeforeRecording])
def test_a_mutant_of_the_order_of_effects_is_caught(mutant: type[Term]) -> None:
    assert violations_over_crashes(mutant)


def _reused_ordinals(draft: Draft) -> int:
    replicas = [r for rs in draft.replicas.values() for r in rs.values()]
    return 1 + max((r.ordinal for r in replicas), default=0)


def _generation_stays(draft: Draft, host_id: str) -> int:
    record = draft.hosts.get(host_id)
    if record is None:
        draft.put(HostRecord(host_id=host_id, generation=1))
        return 1
    return record.generation


def _stops_old_at_once(draft: Draft, _ledger: object, backend: object, now: float) -> None:
    for replica in rollout._old(draft, backend):
        replica_reports.with_event(draft, replica, rollout.Event.UNWANTED, now)


def _fails_without_going_back(draft: Draft, backend: object, goal: object, error: str, now: float) -> None:
    goals.end_goal(draft, goal, goals.GoalStatus.FAILED, now, error)


def _never_forgets_versions(draft: Draft, backend: object) -> None:
    """Harmless by itself; see the control below."""


Patch = tuple[object, str, Callable[..., object]]

MUTANTS: dict[str, Patch] = {
    "ordinals are given again": (Draft, "next_ordinal", _reused_ordinals),
    "a host's generation does not rise": (Draft, "renew_host_goal", _generation_stays),
    "old replicas stop before new ones serve": (rollout, "_stop_old", _stops_old_at_once),
    "a goal succeeds before the proxies applied it": (goals, "_not_applied", lambda *_: ""),
    "a goal succeeds before the replicas run": (goals, "_replicas_missing", lambda *_: ""),
    "a replica that vanished is not noticed": (replica_reports, "_follow_absence", lambda *_: None),
    "a failed version is not put back": (goals, "fail", _fails_without_going_back),
    "snapshots that the bucket lacks are not published": (reconcile, "_bucket_actions", lambda *_: []),
    "an unacknowledged host goal is not sent again": (observed, "GOAL_RESEND_AFTER_S", 1e9),
    "surplus replicas are never stopped": (rollout, "_stop_surplus", lambda *_: None),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_of_the_core_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, replacement = MUTANTS[name]
    monkeypatch.setattr(owner, attribute, replacement)
    if attribute == "GOAL_RESEND_AFTER_S":
        monkeypatch.setattr(reconcile, attribute, replacement)
        world = build_world(seed=1, faults=Faults(loss=0.3))
        assert play(world).violations
        return
    assert violations_over_crashes()


def test_a_store_without_a_fence_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two controllers, the first cut off from its lease: its late write must be refused."""
    assert _stale_leader_writes() is False
    record = MemoryStore.record

    async def unfenced(self: MemoryStore, epoch: int, changes: object, history: object = ()) -> None:
        await record(self, self.epoch, changes, history)

    monkeypatch.setattr(MemoryStore, "record", unfenced)
    assert _stale_leader_writes() is True


def _stale_leader_writes() -> bool:
    world = build_world(controllers=2)
    play(world)
    old, new = world.controllers
    leader = old if old.term is not None else new
    other = new if leader is old else old
    stale = leader.term
    assert stale is not None
    world.store.lease_expires_at = float("-inf")
    other.try_to_lead()
    assert other.term is not None
    assert other.term.epoch > stale.epoch
    before = dict(world.store.rows)
    leader.term = stale
    leader.execute(deploy("late", "v1", num=1, request_id="late"))
    return world.store.rows != before


def test_a_change_that_breaks_no_promise_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the harness must not cry at everything."""
    monkeypatch.setattr(rollout, "_prune_versions", _never_forgets_versions)
    assert play(build_world()).violations == []


def test_frozen_values_make_aliasing_impossible() -> None:
    """Why no mutant of shared mutable state is in the list: it cannot be written."""
    with pytest.raises(AttributeError):
        HostRecord(host_id="h", generation=1).generation = 2
    assert msgspec.structs.replace(HostRecord(host_id="h", generation=1), generation=2).generation == 2
