"""One rollout under one fault: the real core in its closed loop, from the start to its decision."""

from __future__ import annotations

from enum import Enum
from typing import Final

import msgspec
import numpy as np
from immutables import Map

from bench.rollouts.traffic import Traffic, Version
from serve_common.api.commands import StartRollout
from serve_common.config.rollout import RolloutConfig
from serve_common.names import BackendTag
from serve_controller.core.dirty_set import EVERYTHING, DirtySet
from serve_controller.core.observed import observe_bucket
from serve_controller.core.reconcile import ReconcilePlan, reconcile
from serve_controller.core.rollouts.record import (
    STEPPING,
    Rollout,
    RolloutOutcome,
    RolloutState,
    canary_tag,
)
from tests.support.control_loop.closed_loop import Loop
from tests.support.control_loop.orders import deploy
from tests.support.control_loop.pure_host import PureHost

LIMIT_S: Final = 7_200.0
"""Simulated seconds after which a rollout counts as undecided."""
REPORT_S: Final = 1.0
"""Seconds between two reports of a proxy."""
MISSING_REPORT_S: Final = 300.0
"""Seconds between two plans once there is nothing to count."""
STOP_WITHIN_S: Final = 60.0
"""Missing data: they stop at some time within so many seconds after the start."""
_TAG: Final = BackendTag("default/a")


class Missing(Enum):
    """Data that stops coming."""

    REQUESTS = "requests"
    """Clients send none any more; counters stand still."""
    REPORTS = "reports"
    """Nothing is known of any request: proxies report nothing, Prometheus has no series."""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """What is wrong with the new version, or with what is known of it."""

    name: str
    new: Version = Version()
    missing: Missing | None = None
    is_good: bool = False
    """The new version is as good as the old one."""


class Decision(Enum):
    """How a rollout went."""

    ABORTED = "aborted"
    PROMOTED = "promoted"
    UNDECIDED = "undecided"
    """It was neither within `LIMIT_S`."""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout up to its decision."""

    decision: Decision
    canary_requests: int
    """Requests that the new version got until then."""
    seconds: float
    """From the start to the decision."""
    reason: str = ""


class RolloutLoop(Loop):
    """The closed loop, which reconciles everything only after a plan that did more than count requests.

    A leader reconciles no more than that either (`core.dirty_set`); active rollouts are part of every plan.
    """

    def __init__(self, *, is_lazy: bool = True) -> None:
        super().__init__(PureHost("host-1", 8.0), PureHost("host-2", 8.0), is_checked=False)
        self._is_lazy = is_lazy
        self._place: tuple[object, ...] | None = None
        self._dirty_set = EVERYTHING

    def plan(self) -> ReconcilePlan:
        """One plan of what is known now."""
        snapshots = Map({key: snapshot.snapshot_id for key, snapshot in self.bucket.items()})
        self.observed = observe_bucket(self.observed, snapshots)
        plan = reconcile(self.checkpoint, self.observed, self.epoch, self.now, self._dirty_set)
        rollout = plan.checkpoint.rollouts.get(_TAG)
        place = None if rollout is None else (rollout.state, rollout.step, rollout.is_in_force)
        is_counting = place == self._place and not plan.actions and len(plan.changes.puts) <= 1
        self._dirty_set = DirtySet(goals=True) if self._is_lazy and place and is_counting else EVERYTHING
        self._place = place
        return plan


def make_rng(fault: Fault, seed: int) -> np.random.Generator:
    """Random numbers of one run; the same for the same fault and seed."""
    return np.random.default_rng([seed, *fault.name.encode()])


def run_muster(fault: Fault, seed: int, *, is_lazy: bool = True) -> Run:
    """Roll out a version with ``fault`` by the real core, with its default configuration."""
    rng = make_rng(fault, seed)
    stop_s = rng.uniform(0, STOP_WITHIN_S) if fault.missing else LIMIT_S
    loop = RolloutLoop(is_lazy=is_lazy)
    loop.done(deploy(num=2, cpus=0.5))
    traffic = Traffic(loop, _TAG, {"v1": Version(), "v2": fault.new}, rng)
    loop.command(
        StartRollout(
            name="a",
            version="v2",
            replica_config={"import_path": "good:Code"},
            rollout=RolloutConfig(),
        )
    )
    started_at = loop.now
    while loop.now < started_at + LIMIT_S:
        is_stopped = loop.now - started_at >= stop_s
        seconds = MISSING_REPORT_S if is_stopped else REPORT_S
        if is_stopped and fault.missing is Missing.REPORTS:
            loop.proxies.clear()
        if not is_stopped or fault.missing is Missing.REPORTS:
            traffic.flow(seconds)
        loop.step(seconds)
        rollout = loop.checkpoint.rollouts[_TAG]
        if rollout.state not in STEPPING:
            break
    return Run(
        decision=_get_decision(rollout),
        canary_requests=traffic.served.get(canary_tag(_TAG), 0),
        seconds=loop.now - started_at,
        reason=rollout.reason,
    )


def _get_decision(rollout: Rollout) -> Decision:
    if rollout.outcome is RolloutOutcome.ABORTED:
        return Decision.ABORTED
    is_promoted = rollout.state is RolloutState.PROMOTING or rollout.outcome is RolloutOutcome.PROMOTED
    return Decision.PROMOTED if is_promoted else Decision.UNDECIDED
