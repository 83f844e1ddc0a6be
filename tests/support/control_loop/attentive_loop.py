"""The closed loop as a leader runs it: each plan looks only at what news, changes and times make necessary.

Why beside the loop that always looks at everything: what a plan overlooks is seen only by comparing the two.
"""

from __future__ import annotations

from typing import Any

from serve_common.api.commands import Command
from serve_common.names import HostId
from serve_common.protocol.reports import HostReport, ProxyReport
from serve_controller.core.commands import decide
from serve_controller.core.commands.changes import Accepted
from serve_controller.core.dirty_set import EVERYTHING, NOTHING, DirtySet, dirty_by_changes
from serve_controller.core.reconcile import Action, PublishSnapshot, ReconcilePlan, RetractSnapshot, reconcile
from serve_controller.shell.observations import TermObservations
from tests.simulation.sim_controller import no_refusal
from tests.support.control_loop.closed_loop import Loop
from tests.support.control_loop.promises import check_plan
from tests.support.control_loop.pure_host import PureHost

ROUNDS_MAX = 30


class AttentiveLoop(Loop):
    """As `shell.term.Term` plans, without its shell."""

    def __init__(self, *hosts: PureHost) -> None:
        super().__init__(*hosts)
        self.revision = 0
        self.attention = EVERYTHING
        """Of the last plan."""
        self._hear_anew()

    def _hear_anew(self) -> None:
        self.hearing = TermObservations(self.now, no_refusal)
        self._hear_whole_bucket()

    def _hear_whole_bucket(self) -> None:
        self.revision += 1
        held = {key: (self.revision, snapshot.snapshot_id) for key, snapshot in self.bucket.items()}
        self.hearing.on_bucket_entries(held, whole=True)
        self.observed = self.hearing.observed

    def command(self, command: Command[Any]) -> Accepted:
        before = self.checkpoint
        accepted = decide(before, command, self.now)
        self.checkpoint = before.applied(accepted.changes)
        self.hearing.dirty_sets.add(dirty_by_changes(before, self.checkpoint, accepted.changes))
        return accepted

    def on_report(self, report: HostReport | ProxyReport) -> None:
        self.hearing.on_report(report, self.now)

    def on_bus_break(self, since: float | None) -> None:
        self.hearing.on_bus_break(since)

    def lose_bucket(self) -> None:
        super().lose_bucket()
        self._hear_whole_bucket()

    def take_over(self) -> None:
        super().take_over()
        self._hear_anew()

    def sent(self, host_id: HostId, goal: tuple[int, int]) -> None:
        self.hearing.sent(host_id, goal, self.now)

    def plan(self) -> ReconcilePlan:
        self.attention = self.hearing.fold(self.checkpoint, self.now)
        self.observed = self.hearing.observed
        plan = reconcile(self.checkpoint, self.observed, self.epoch, self.now, self.attention)
        check_plan(self.checkpoint, self.observed, plan, self.epoch, self.remembered)
        return plan

    def record(self, plan: ReconcilePlan) -> None:
        super().record(plan)
        self.hearing.dirty_sets.add(plan.dirty_set)
        self.hearing.due(plan.due)

    def perform(self, action: Action) -> None:
        super().perform(action)
        match action:
            case PublishSnapshot():
                self.revision += 1
                self.hearing.on_bucket_entries(
                    {action.key: (self.revision, action.snapshot.snapshot_id)}, whole=False
                )
            case RetractSnapshot():
                self.hearing.retracted(action.key)
            case _:
                pass

    def come_to_rest(self) -> None:
        """Plan, with nothing new heard, until a plan finds nothing to do and nothing more to look at."""
        for _ in range(ROUNDS_MAX):
            plan = self.cycle()
            if not plan.changes and not plan.actions and self.attention == NOTHING:
                return
        raise AssertionError(f"still changing after {ROUNDS_MAX} rounds")

    def overlooked(self) -> ReconcilePlan:
        """What a look at everything would do now, but for forgetting what is over."""
        everything = DirtySet(is_everything=True)
        return reconcile(self.checkpoint, self.hearing.observed, self.epoch, self.now, everything)
