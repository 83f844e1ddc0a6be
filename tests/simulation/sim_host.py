"""A replica host: its real core, driven by virtual time, with a runtime that is asked for nothing but to behave.

What the code of a replica does is written in its import path (see `Code`), so a command says what will go wrong.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Final

from serve_common.names import HostId, ReplicaTag
from serve_common.protocol.reports import HostGoal, ReplicaGoal, ReplicaStatus
from serve_replica_host.core.events import (
    Constructed,
    Drained,
    HealthChecked,
    HealthCheckSent,
    Placed,
    ProcessEnded,
    Reconfigured,
    ReplicaEvent,
    ReplicaStartFailed,
    apply_event,
)
from serve_replica_host.core.reconcile import (
    Action,
    CheckReplica,
    DrainReplica,
    KillReplica,
    ReconfigureReplica,
    StartReplica,
    reconcile_host,
)
from serve_replica_host.core.state import (
    HostState,
    Refused,
    accept_goal,
    build_report,
    has_left,
    on_leader_notice,
    start_leaving,
)

if TYPE_CHECKING:
    from tests.simulation.world import World

REPORT_INTERVAL_S: Final = 1.0
_SERVES: Final = (ReplicaStatus.RUNNING, ReplicaStatus.UNHEALTHY)


class Code(Enum):
    """What user code does, by its import path."""

    GOOD = "good:Code"
    RAISES = "raises:Code"
    """The constructor raises."""
    HANGS = "hangs:Code"
    """The constructor never ends."""
    DIES = "dies:Code"
    """The process ends a moment after it began to serve."""
    SICK = "sick:Code"
    """Health checks fail."""
    LINGERS = "lingers:Code"
    """What is in flight never ends, so drains last as long as they may."""


BAD_CONFIG: Final = "bad"
"""A user_config at which ``reconfigure`` raises."""


class SimHost:
    """One host; each start of it is a new incarnation."""

    def __init__(self, world: World, host_id: str, cpus: float) -> None:
        self.world, self.host_id, self.cpus = world, HostId(host_id), cpus
        self.lives = 0
        self.is_up = False
        self.is_gone_for_good = False
        """Nothing starts it again."""
        self.is_isolated = False
        """No message reaches it or leaves it."""
        self.is_numb = False
        """It takes goals and reports, and does nothing."""
        self.is_hung = False
        """Its runtime answers nothing: nothing starts, drains or ends."""
        self.start()

    def start(self) -> None:
        """A new process, which runs nothing."""
        self.lives += 1
        self.is_up = True
        self.state = HostState(host_id=self.host_id)
        self.sequence = 0
        self.born_at = self.world.time
        self.processes: dict[ReplicaTag, ReplicaGoal] = {}
        """What really runs."""
        self.configs: dict[tuple[ReplicaTag, int], object] = {}
        """The user_config that each replica was given with each number."""
        self.runs_with: dict[ReplicaTag, object] = {}
        """The user_config that each replica really has."""
        self.serving: set[ReplicaTag] = set()
        """What takes new requests."""
        self.ever_started: set[ReplicaTag] = set()
        self.sick: set[ReplicaTag] = set()
        """Fail their health checks from now on."""
        self._hung: list[ReplicaEvent] = []
        self._look_at: float | None = None
        self._tick(self.lives)

    def stop(self) -> None:
        """The process is killed, and its replicas with it."""
        self.is_up = False
        self.world.checks.not_well.update(self.processes)
        self.processes.clear()
        self.serving.clear()
        self.state = HostState(host_id=self.host_id)

    def come_back(self) -> None:
        """Start again what is down, unless that is for good."""
        if not self.is_up and not self.is_gone_for_good:
            self.start()

    def leave(self) -> None:
        """SIGTERM."""
        if self.is_up:
            self.state = start_leaving(self.state, self.world.time + 3.0)
            self._look(must_report=True)

    def release(self) -> None:
        """The runtime answers again."""
        self.is_hung = self.is_numb = False
        hung, self._hung = self._hung, []
        for event in hung:
            self._take(event)
        if self.is_up:
            self._look(must_report=True)

    def _tick(self, life: int) -> None:
        if self.is_up and self.lives == life:
            self._look(must_report=True)
            self.world.after(REPORT_INTERVAL_S, lambda: self._tick(life))

    # -- hearing -------------------------------------------------------------------------------------------------------

    def hear_goal(self, goal: HostGoal) -> None:
        """A goal came."""
        if not self.is_up or self.is_isolated:
            return
        accepted = accept_goal(self.state, goal)
        if not isinstance(accepted, Refused):
            self.state = accepted
        self._look(must_report=True)

    def on_leader_notice(self, epoch: int) -> None:
        """A controller says that it leads."""
        if self.is_up and not self.is_isolated:
            self.state = on_leader_notice(self.state, epoch)
            self.report()

    def report(self) -> None:
        """Tell the controllers everything."""
        self.sequence += 1
        if self.is_isolated:
            return
        report = build_report(
            self.state,
            incarnation=str(self.lives),
            started_at=self.born_at,
            sequence=self.sequence,
            resources={"CPU": self.cpus},
        )
        self.world.tell_controllers(report)

    # -- doing ---------------------------------------------------------------------------------------------------------

    def _look(self, *, must_report: bool = False) -> None:
        before = self.state
        if not self.is_numb:
            plan = reconcile_host(self.state, self.world.time)
            self.state = plan.state
            for action in plan.actions:
                self._perform(action)
            if plan.check_again_at is not None:
                self._look_again(plan.check_again_at)
        if has_left(self.state):
            self.stop()
        if must_report or self.state is not before:
            self.report()

    def _look_again(self, at: float) -> None:
        if self._look_at is not None and self._look_at <= at:
            return
        self._look_at, life = at, self.lives

        def look() -> None:
            if self.is_up and self.lives == life and self._look_at == at:
                self._look_at = None
                self._look()

        self.world.at(max(at, self.world.time), look)

    def _perform(self, action: Action) -> None:
        match action:
            case StartReplica(goal):
                self._start(goal)
            case ReconfigureReplica(goal):
                self.configs[goal.replica_tag, goal.config_version] = goal.user_config
                error = "ValueError: bad" if goal.user_config == BAD_CONFIG else None
                if error is not None:
                    self.world.checks.not_well.add(goal.replica_tag)
                self._later(0.05, Reconfigured(goal.replica_tag, goal.config_version, error))
            case CheckReplica(tag):
                self._later(0.0, HealthCheckSent(tag))
                self._later(0.01, HealthChecked(tag, None if tag not in self.sick else "RuntimeError: sick"))
            case DrainReplica(tag):
                self.world.checks.on_drain(self, tag)
                self.serving.discard(tag)
                if self._code(tag) is not Code.LINGERS:
                    self._later(self.world.dice.uniform(0.05, 0.3), Drained(tag))
            case KillReplica(tag):
                self.serving.discard(tag)
                self._later(0.02, ProcessEnded(tag, "killed"))

    def _code(self, tag: ReplicaTag) -> Code | None:
        goal = self.processes.get(tag)
        return None if goal is None else Code(goal.replica_config.import_path)

    def _start(self, goal: ReplicaGoal) -> None:
        tag = goal.replica_tag
        self.world.checks.on_start(self, tag)
        self.ever_started.add(tag)
        self.processes[tag] = goal
        self.configs[tag, goal.config_version] = goal.user_config
        self._later(0.05, Placed(tag, pid=len(self.ever_started)))
        after_s = self.world.dice.uniform(0.2, 0.6)
        match Code(goal.replica_config.import_path):
            case Code.RAISES:
                self._fail(tag, after_s)
            case Code.HANGS:
                return
            case _ if goal.user_config == BAD_CONFIG:
                self._fail(tag, after_s)
            case code:
                self._later(after_s, Constructed(tag, goal.config_version))
                if code is Code.DIES:
                    self.world.checks.not_well.add(tag)
                    self._later(after_s + 0.3, ProcessEnded(tag, "segmentation fault"))
                elif code is Code.SICK:
                    self.world.after(after_s + 0.3, lambda: self.sicken(tag))

    def _fail(self, tag: ReplicaTag, after_s: float) -> None:
        self._later(after_s, ReplicaStartFailed(tag, "RuntimeError: no"))
        self._later(after_s + 0.02, ProcessEnded(tag, "exit"))

    def _later(self, delay_s: float, event: ReplicaEvent) -> None:
        life = self.lives

        def happen() -> None:
            if self.lives != life or not self.is_up:
                return
            if self.is_hung:
                self._hung.append(event)
            else:
                self._take(event)
                self._look()

        self.world.after(delay_s, happen)

    def _take(self, event: ReplicaEvent) -> None:
        tag = event.replica_tag
        if isinstance(event, ProcessEnded):
            self.processes.pop(tag, None)
            self.serving.discard(tag)
        elif tag not in self.processes:
            return  # its process is gone
        before = self.state
        self.state = apply_event(self.state, event, self.world.time)
        if isinstance(event, Constructed | Reconfigured) and getattr(event, "error", None) is None:
            self.runs_with[tag] = self.configs[tag, event.config_version]
        if isinstance(event, Constructed):
            held = self.state.replicas.get(tag)
            if held is not None and held.status is ReplicaStatus.RUNNING:
                self.serving.add(tag)
        if self.state is not before:
            self.report()

    def kill_replica(self, tag: ReplicaTag) -> None:
        """Its process dies by itself."""
        if self.is_up and tag in self.processes and not self.is_hung:
            self.world.checks.not_well.add(tag)
            self._take(ProcessEnded(tag, "killed by the kernel"))
            self._look()

    def sicken(self, tag: ReplicaTag) -> None:
        """Its health checks fail, as often as it takes to be noticed."""
        held = self.state.replicas.get(tag)
        if not self.is_up or held is None or tag not in self.serving:
            return
        self.sick.add(tag)
        self.world.checks.not_well.add(tag)
        for _ in range(held.goal.health_check_failure_threshold):
            self._take(HealthChecked(tag, "RuntimeError: sick"))
        self._look()

    def running(self) -> list[ReplicaTag]:
        """Replicas that serve, as it would report."""
        return [tag for tag, held in self.state.replicas.items() if held.status in _SERVES]
