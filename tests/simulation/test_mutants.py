"""Mistakes that the simulation must catch.

Each mutant changes the real code (or, where the promise is the database's, its twin); a harness that lets one through
is blind. The first seed that shows a mutant ends its test, so the list costs little.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from immutables import Map

from serve_common.api.commands import Command, CommandReply
from serve_common.errors import StoreUnavailable
from serve_controller.core import (
    dirty_set,
    goals,
    observed,
    placement,
    reconcile,
    replica_reports,
    rolling_update,
    scaling,
    snapshots,
)
from serve_controller.core.checkpoint import Draft
from serve_controller.core.commands import changes, decide, deployments
from serve_controller.core.dirty_set import DirtySet
from serve_controller.core.objects import Backend, Deployment, HostRecord, ReplicaState
from serve_controller.core.rolling_update import old_replicas
from serve_controller.core.rollouts import advance, judge
from serve_controller.core.rollouts.judge import GateResult, GateStatus
from serve_controller.shell import control_loop as term
from serve_controller.shell import observations as hearing
from serve_controller.shell.boundary import LeadersBoundary
from serve_controller.shell.control_loop import Term
from serve_controller.shell.leadership import BusLiveness
from tests.simulation.runs import run_seed
from tests.simulation.scenario import (
    PAIR_STORY,
    ROLLOUT_STORY,
    STORY,
    effects_of,
    run_stall,
    run_story,
    run_stuck,
)
from tests.simulation.world import Faults
from tests.simulation.world_store import WorldStore

# The package has a function of the same name.
ROLLBACK = importlib.import_module("serve_controller.core.commands.deployments")
RUNS_MAX = 500
"""Until a mutant must have shown."""


def caught(term_class: type[Term] = Term, first_seed: int = 0) -> str:
    """The first broken promise, and in which run; empty when there is none.

    ``first_seed`` is tried before all others.
    """
    told = [
        lambda: run_story(STORY, term_class=term_class),
        lambda: run_stuck(term_class),
        lambda: run_stall(term_class),
    ]
    for run in told:
        outcome = run()
        if outcome.violations:
            return f"a story: {outcome.violations[0]}"
    for seed in (first_seed, *range(RUNS_MAX)):
        outcome = run_seed(seed, term_class)
        if outcome.violations:
            return f"{outcome.name}: {outcome.violations[0]}"
    return ""


# -- the order of effects ----------------------------------------------------------------------------------------------


class RepliesBeforeRecording(Term):
    """Acknowledges a command and leaves the recording to nobody."""

    async def execute(self, command: Command[Any], request: bytes, who: str = "") -> CommandReply:
        accepted = decide(self.checkpoint, command, self._clock.now())
        self.checkpoint = self.checkpoint.applied(accepted.changes)
        self.on_change()
        return accepted.reply


class PerformsBeforeRecording(Term):
    """Acts on a plan and records it afterwards."""

    async def run_cycle(self) -> float | None:
        await self._make_certain()
        plan = self._plan({})
        check_again_at = await self._executor.perform_all(plan.actions)
        try:
            if plan.changes:
                await self._record("record_plan", plan.changes, plan.checkpoint, [], [])
        except StoreUnavailable:
            return self._clock.now() + 0.5
        self._observations.dirty_sets.add(plan.dirty_set)
        self._observations.due(plan.due)
        return check_again_at


class TrustsWhatIsUncertain(Term):
    """Goes on in the same epoch after a write of unknown fate."""

    async def _make_certain(self) -> None:
        self._is_checkpoint_certain = True


@pytest.mark.parametrize("mutant", [RepliesBeforeRecording, PerformsBeforeRecording, TrustsWhatIsUncertain])
def test_a_mutant_of_the_order_of_effects_is_caught(
    mutant: type[Term], monkeypatch: pytest.MonkeyPatch
) -> None:
    if mutant is TrustsWhatIsUncertain:  # the database, which counts the writes, would refuse its next one
        monkeypatch.setattr(WorldStore, "fence_writes", lambda *_: None)
    assert caught(mutant, first_seed=58 if mutant is TrustsWhatIsUncertain else 0)


# -- the core ----------------------------------------------------------------------------------------------------------


def _autoscaled_though_paused(backend: Backend) -> Any:
    is_off = backend.deleting or backend.halted
    return None if is_off else backend.target.backend_config.autoscaling_config


def _without_limits(config: Any, num_replicas: int) -> Any:
    return msgspec.structs.replace(config, num_replicas=num_replicas)


def _reused_ordinals(draft: Draft) -> int:
    return 1 + max((r.ordinal for rs in draft.replicas.values() for r in rs.values()), default=0)


def _generation_stays(draft: Draft, host_id: Any) -> int:
    record = draft.hosts.get(host_id)
    if record is None:
        draft.put(HostRecord(host_id=host_id, generation=1))
        return 1
    return record.generation


def _stops_old_at_once(draft: Draft, _ledger: object, backend: Backend, now: float) -> None:
    for replica in old_replicas(draft, backend):
        replica_reports.with_event(draft, replica, replica_reports.Event.UNWANTED, now)


def _fails_without_going_back(draft: Draft, goal: Any, error: str, now: float, of: object) -> None:
    goals.end_goal(draft, goal, goals.GoalStatus.FAILED, now, error)


def _fails_one_part_only(draft: Draft, goal: Any, error: str, now: float, of: Any) -> None:
    goals.end_goal(draft, goal, goals.GoalStatus.FAILED, now, error)
    goals.undo_backend(draft, draft.backends[of], error, is_whole=False)


def _never_lost(state: Any, host_id: Any, now: float, _real: Any = observed.host_status) -> Any:
    status = _real(state, host_id, now)
    return observed.HostStatus.SUSPECT if status is observed.HostStatus.LOST else status


def _by_the_clock(_state: Any, at: float, now: float) -> bool:
    return now >= at


def _stays_unhealthy(draft: Draft, replica: Any, report: Any, now: float) -> None:
    replica_reports.with_event(draft, replica, replica_reports.Event.REPORTED_UNHEALTHY, now)


def _takes_every_room(ledger: Any, host_id: Any) -> dict[str, int]:
    return dict(ledger.hosts[host_id])


def _forgets_ended(draft: Draft, value: Any, _real: Any = Draft.put) -> None:
    if not (isinstance(value, Deployment) and value.ended_at is not None):
        _real(draft, value)


def _sends_at_once(checkpoint: Any, state: Any, *rest: Any, _real: Any = reconcile.send_host_goals) -> Any:
    known = state if state.bucket is not None else msgspec.structs.replace(state, bucket=Map())
    return _real(checkpoint, known, *rest)


async def _waits_for_nothing(_term: Term) -> None:
    return None


async def _never_unsure(boundary: Any, effect: str, perform: Any) -> Any:
    return await boundary._inner.cross(effect, perform)


def _gives_up_gently(draft: Draft, backend: Backend, goal_id: Any, *, force_kill: bool = False) -> None:
    deployments.give_up(draft, backend, goal_id)


def _the_oldest_revision(checkpoint: Any, existing: Backend, *_: object) -> Any:
    found = checkpoint.revisions[existing.backend_tag]
    return found[min(found)]


def _without(name: str, real: Callable[..., DirtySet]) -> Callable[..., DirtySet]:
    empty = DirtySet()

    def mutant(*args: Any) -> DirtySet:
        return msgspec.structs.replace(real(*args), **{name: getattr(empty, name)})

    return mutant


def _keeps_everything_routed(states: Any) -> Any:
    return frozenset({*states, ReplicaState.SHOULD_STOP})


def _surges_without_limit(config: Any) -> int:
    return 100


def _drops_versions(draft: Draft, backend: Backend) -> None:
    draft.put(msgspec.structs.replace(backend, others=[], kept=None))


_check_free = observed._check_free


def _free_when_unknown(state: Any, report: Any, known: Any, *rest: Any) -> None:
    if known is not None:
        _check_free(state, report, known, *rest)


Patch = tuple[object, str, object]

MUTANTS: dict[str, list[Patch]] = {
    "ordinals are given again": [(Draft, "next_ordinal", _reused_ordinals)],
    "a host's generation does not rise": [(Draft, "renew_host_goal", _generation_stays)],
    "old replicas stop before new ones serve": [(rolling_update, "stop_old", _stops_old_at_once)],
    "a goal succeeds before the proxies applied it": [(goals, "not_applied", lambda *_: "")],
    "a goal succeeds before the replicas run": [(goals, "replicas_missing", lambda *_: "")],
    "a goal of a drain succeeds at once": [(goals, "_not_drained", lambda *_: "")],
    "a replaced goal is not ended": [(changes, "end_goal", lambda *_: None)],
    "a retry is taken for a new request": [(deployments, "retried", lambda *_: None)],
    "ended deployments are forgotten": [(Draft, "put", _forgets_ended)],
    "proxies are not waited for": [(reconcile, "_update_proxies", lambda *_: None)],
    "a failed version is not put back": [
        (replica_reports, "fail", _fails_without_going_back),
        (goals, "fail", _fails_without_going_back),
    ],
    "an application fails in one part alone": [
        (replica_reports, "fail", _fails_one_part_only),
        (goals, "fail", _fails_one_part_only),
    ],
    "what an application leaves out stays": [(goals, "_drop_left_out", lambda *_: False)],
    "a replica that vanished is not noticed": [(replica_reports, "_apply_absence", lambda *_: None)],
    "a lost host's replicas are not replaced": [
        (replica_reports, "host_status", _never_lost),
    ],
    "silence counts although the bus hangs": [
        (observed, "has_passed", _by_the_clock),
        (dirty_set, "has_passed", _by_the_clock),
        (BusLiveness, "unanswered", lambda *_: False),
        (BusLiveness, "record_response", lambda *_: False),
    ],
    "whoever reports is believed": [(observed, "_check_free", lambda *_: None)],
    "a new leader believes whoever reports first": [(observed, "_check_free", _free_when_unknown)],
    "an unhealthy replica is not replaced": [(replica_reports, "_apply_unhealthy", _stays_unhealthy)],
    "a stuck replica is never given up": [(replica_reports, "stuck_at", lambda *_: None)],
    "surplus replicas are never stopped": [(rolling_update, "stop_surplus", lambda *_: None)],
    "an update surges without limit": [
        (rolling_update, "max_surge", _surges_without_limit),
    ],
    "versions that replicas still run are forgotten": [(rolling_update, "_prune_versions", _drops_versions)],
    "all replicas are reconfigured at once": [
        (rolling_update, "max_unavailable", _surges_without_limit),
    ],
    "hosts are given more than they have": [(placement.Ledger, "free", _takes_every_room)],
    "snapshots that the bucket lacks are not published": [(reconcile, "_bucket_actions", lambda *_: [])],
    "a replica that stops is still routed to": [
        (snapshots, "ROUTED", _keeps_everything_routed(snapshots.ROUTED)),
    ],
    "an unacknowledged host goal is not sent again": [(reconcile, "GOAL_RESEND_AFTER_S", 1e9)],
    "who stood still goes on": [(LeadersBoundary, "cross", _never_unsure)],
    "numbers that a restored store lost are given again": [(Term, "_has_claims_ahead", lambda _: False)],
    "a leader goes on upon a store that was restored": [(WorldStore, "fence_writes", lambda *_: None)],
    "late writes of an older epoch are made": [(WorldStore, "fence", lambda *_: None)],
    "force_kill is ignored": [(deployments, "give_up", _gives_up_gently)],
    "a rollback goes to the oldest revision": [(ROLLBACK, "_chosen", _the_oldest_revision)],
    "a recorded change asks for no look at room": [
        (reconcile, "dirty_by_changes", _without("has_capacity", dirty_set.dirty_by_changes)),
        (term, "dirty_by_changes", _without("has_capacity", dirty_set.dirty_by_changes)),
        (hearing, "dirty_by_host_report", _without("has_capacity", dirty_set.dirty_by_host_report)),
        (dirty_set.SilenceDetector, "of_host", _without("has_capacity", dirty_set.SilenceDetector.of_host)),
    ],
    "a recorded change asks for no look at goals": [
        (reconcile, "dirty_by_changes", _without("goals", dirty_set.dirty_by_changes)),
    ],
    "the autoscaler moves what a user has paused": [
        (Backend, "autoscaling", property(_autoscaled_though_paused))
    ],
    "a deploy says how many replicas an autoscaled backend has": [
        (deployments, "as_scaled", lambda wanted, _existing: wanted),
    ],
    "the autoscaler knows no limits": [(scaling, "_with_num", _without_limits)],
    "a host's report asks for no look at the host": [
        (hearing, "dirty_by_host_report", _without("hosts", dirty_set.dirty_by_host_report)),
    ],
    "a proxy's report asks for no look at goals": [
        (hearing, "dirty_by_proxy_report", _without("goals", dirty_set.dirty_by_proxy_report)),
    ],
}


SHOWN_BY = {
    "the autoscaler moves what a user has paused": 254,
    "a recorded change asks for no look at room": 111,
    "a retry is taken for a new request": 98,
    "an unacknowledged host goal is not sent again": 63,
    "a leader goes on upon a store that was restored": 59,
    "late writes of an older epoch are made": 30,
    "a recorded change asks for no look at goals": 29,
    "a replaced goal is not ended": 29,
    "a new leader believes whoever reports first": 23,
    "a lost host's replicas are not replaced": 17,
    "who stood still goes on": 12,
    "an unhealthy replica is not replaced": 11,
}
"""Seeds that showed these mutants once. They are tried first, which saves hundreds of runs in which nothing shows."""


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_of_the_core_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, attribute, replacement in MUTANTS[name]:
        monkeypatch.setattr(owner, attribute, replacement)
    assert caught(first_seed=SHOWN_BY.get(name, 0))


def _never_failed(results: tuple[GateResult, ...]) -> GateStatus:
    status = judge.get_status(results)
    return GateStatus.UNKNOWN if status is GateStatus.FAILED else status


ROLLOUT_MUTANTS: dict[str, list[Patch]] = {
    "requests are judged again with every report": [(advance, "difference", lambda now, _before: now)],
    "a step passes without requests": [(advance, "get_status", lambda _: GateStatus.PASSED)],
    "requests go to a version before every proxy knows it": [(advance, "_not_ready", lambda *_: "")],
    "a version that fails its requests stays": [(advance, "get_status", _never_failed)],
    "a version that does not start is waited for": [(advance, "_why_wrong", lambda *_: "")],
    "what an abort leaves is not deleted": [(advance, "baseline_tag", lambda tag: tag)],
}


@pytest.mark.parametrize("name", ROLLOUT_MUTANTS)
def test_a_mutant_of_rollouts_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, attribute, replacement in ROLLOUT_MUTANTS[name]:
        monkeypatch.setattr(owner, attribute, replacement)
    assert run_story(ROLLOUT_STORY).violations


def test_a_new_leader_that_commands_hosts_before_it_knows_the_bucket_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It takes a leader that dies between recording and publishing, and a bucket that is slow to read."""
    slow = Faults(bucket_read_s=0.5)
    points = [frozenset({(number, False)}) for number in range(effects_of(PAIR_STORY))]
    assert [run_story(PAIR_STORY, point, faults=slow).violations for point in points] == [[]] * len(points)
    monkeypatch.setattr(Term, "_overtake", _waits_for_nothing)
    monkeypatch.setattr(reconcile, "send_host_goals", _sends_at_once)
    assert any(run_story(PAIR_STORY, point, faults=slow).violations for point in points)


HARMLESS: dict[str, list[Patch]] = {
    "nothing is swept": [(hearing, "SWEEP_STEP_S", 1e9)],
    "host goals are sent again sooner": [(reconcile, "GOAL_RESEND_AFTER_S", 0.3)],
    "every plan looks at everything": [
        (reconcile, "dirty_by_changes", lambda *_: dirty_set.EVERYTHING),
        (term, "dirty_by_changes", lambda *_: dirty_set.EVERYTHING),
    ],
}


@pytest.mark.parametrize("name", HARMLESS)
def test_a_change_that_breaks_no_promise_is_not_reported(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the harness must not cry at everything."""
    for owner, attribute, replacement in HARMLESS[name]:
        monkeypatch.setattr(owner, attribute, replacement)
    assert run_story(STORY).violations == []
    assert [run_seed(seed).violations for seed in range(12)] == [[]] * 12
