"""Whatever order goals, events and time come in, a host keeps its promises."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from serve_common.config.backend import ReplicaConfig
from serve_common.names import BackendTag, HostId, ReplicaTag, replica_tag
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
    FORCE_KILL_AFTER_S,
    CheckReplica,
    DrainReplica,
    KillReplica,
    ReconfigureReplica,
    StartReplica,
    reconcile_host,
)
from serve_replica_host.core.state import HostState, Refused, accept_goal, has_left, start_leaving

HOST = HostId("h")
BACKEND = BackendTag("default/a")
ORDINALS = range(1, 6)


def replica(ordinal: int, version: int) -> ReplicaGoal:
    return ReplicaGoal(
        replica_tag=replica_tag(BACKEND, ordinal),
        backend_tag=BACKEND,
        replica_config=ReplicaConfig(import_path="a:A"),
        config_version=version,
        max_concurrent_queries=1,
        graceful_shutdown_timeout_s=3.0,
        health_check_period_s=1.0,
        health_check_timeout_s=1.0,
        start_timeout_s=5.0,
    )


class HostMachine(RuleBasedStateMachine):
    """Drives the core with a runtime that answers when it likes, or never."""

    @initialize()
    def begin(self) -> None:
        self.state = HostState(host_id=HOST, starts_max=2)
        self.now = 0.0
        self.started: list[ReplicaTag] = []
        self.alive: set[ReplicaTag] = set()
        self.killed: set[ReplicaTag] = set()
        self.killed_at: dict[ReplicaTag, float] = {}
        self.reconfiguring: dict[ReplicaTag, int] = {}
        self.draining: set[ReplicaTag] = set()
        self.checking: set[ReplicaTag] = set()

    def look(self) -> None:
        plan = reconcile_host(self.state, self.now)
        self.state = plan.state
        for action in plan.actions:
            match action:
                case StartReplica(goal):
                    assert goal.replica_tag not in self.started, "a tag was started twice"
                    assert not self.state.is_leaving
                    self.started.append(goal.replica_tag)
                    self.alive.add(goal.replica_tag)
                case ReconfigureReplica(goal):
                    assert goal.replica_tag not in self.reconfiguring, "two reconfigures at once"
                    self.reconfiguring[goal.replica_tag] = goal.config_version
                case CheckReplica(tag):
                    assert tag not in self.checking, "two health checks at once"
                    self.checking.add(tag)
                case DrainReplica(tag):
                    assert tag not in self.draining, "drained twice"
                    self.draining.add(tag)
                case KillReplica(tag, is_forced=True):
                    assert tag in self.killed, "force comes second"
                    assert self.now >= self.killed_at[tag] + FORCE_KILL_AFTER_S
                case KillReplica(tag):
                    assert tag not in self.killed, "killed twice"
                    self.killed.add(tag)
                    self.killed_at[tag] = self.now
        again = reconcile_host(self.state, self.now)
        assert again.actions == []
        assert again.state == self.state
        if plan.check_again_at is not None:
            assert plan.check_again_at > self.now

    def hear(self, event: ReplicaEvent) -> None:
        self.state = apply_event(self.state, event, self.now)
        self.look()

    @rule(
        ordinals=st.sets(st.sampled_from(ORDINALS)),
        kill=st.sets(st.sampled_from(ORDINALS)),
        version=st.integers(1, 4),
        step=st.integers(-1, 2),
    )
    def goal_comes(self, ordinals: set[int], kill: set[int], version: int, step: int) -> None:
        generation = self.state.generation + step
        wanted = HostGoal(
            host_id=HOST,
            epoch=1,
            generation=generation,
            replicas=[replica(ordinal, version) for ordinal in sorted(ordinals)],
            kill=[replica_tag(BACKEND, ordinal) for ordinal in sorted(kill)],
        )
        accepted = accept_goal(self.state, wanted)
        if isinstance(accepted, Refused):
            assert step < 0
        else:
            self.state = accepted
        self.look()

    @rule(after_s=st.floats(0.0, 6.0))
    def time_passes(self, after_s: float) -> None:
        self.now += after_s
        self.look()

    @rule(ordinal=st.sampled_from(ORDINALS), good=st.booleans())
    def start_ends(self, ordinal: int, good: bool) -> None:
        tag = replica_tag(BACKEND, ordinal)
        if tag in self.alive and tag not in self.killed:
            self.hear(Placed(tag, ordinal))
            self.hear(Constructed(tag, 1) if good else ReplicaStartFailed(tag, "no"))

    @rule(ordinal=st.sampled_from(ORDINALS), good=st.booleans())
    def reconfigure_ends(self, ordinal: int, good: bool) -> None:
        tag = replica_tag(BACKEND, ordinal)
        version = self.reconfiguring.pop(tag, None)
        if version is not None and tag in self.alive:
            self.hear(Reconfigured(tag, version, None if good else "no"))

    @rule(ordinal=st.sampled_from(ORDINALS))
    def check_is_sent(self, ordinal: int) -> None:
        tag = replica_tag(BACKEND, ordinal)
        if tag in self.checking:
            self.hear(HealthCheckSent(tag))

    @rule(ordinal=st.sampled_from(ORDINALS), good=st.booleans())
    def check_ends(self, ordinal: int, good: bool) -> None:
        tag = replica_tag(BACKEND, ordinal)
        if tag in self.checking:
            self.checking.discard(tag)
            self.hear(HealthChecked(tag, None if good else "no"))

    @rule(ordinal=st.sampled_from(ORDINALS))
    def drain_ends(self, ordinal: int) -> None:
        tag = replica_tag(BACKEND, ordinal)
        if tag in self.draining and tag in self.alive:
            self.hear(Drained(tag))

    @rule(ordinal=st.sampled_from(ORDINALS))
    def process_ends(self, ordinal: int) -> None:
        tag = replica_tag(BACKEND, ordinal)
        if tag in self.alive:
            self.alive.discard(tag)
            self.hear(ProcessEnded(tag, "ended"))

    @invariant()
    def nothing_unwanted_is_left_alone(self) -> None:
        wanted = {goal.replica_tag for goal in self.state.goal.replicas} if self.state.goal else set()
        for tag in self.alive - wanted:
            assert tag in self.killed or self.state.replicas[tag].status is ReplicaStatus.DRAINING

    @invariant()
    def what_is_to_be_killed_is_killed_at_once_and_nothing_that_is_wanted(self) -> None:
        if self.state.goal is None:
            return
        wanted = {goal.replica_tag for goal in self.state.goal.replicas}
        for tag in set(self.state.goal.kill) & self.alive:
            assert tag in wanted or tag in self.killed

    @invariant()
    def what_is_not_alive_is_never_said_to_serve(self) -> None:
        for tag, held in self.state.replicas.items():
            if held.status in {ReplicaStatus.RUNNING, ReplicaStatus.UNHEALTHY} or held.is_ordered:
                is_over = held.status in {ReplicaStatus.FAILED, ReplicaStatus.DEAD}
                assert tag in self.alive or is_over

    @invariant()
    def nothing_waits_for_its_turn_that_could_start(self) -> None:
        starting = sum(held.is_process_starting for held in self.state.replicas.values())
        assert starting <= self.state.starts_max
        queued = [held for held in self.state.replicas.values() if held.tag not in self.started]
        waiting = [held for held in queued if held.status is ReplicaStatus.STARTING]
        assert not waiting or starting == self.state.starts_max

    def teardown(self) -> None:
        """Leaving always comes to an end, by time alone and the ends of killed processes."""
        self.state = start_leaving(self.state, self.now + 2.0)
        self.look()
        self.now += 2.0
        self.look()
        assert self.alive <= self.killed
        for tag in sorted(self.alive):
            self.hear(ProcessEnded(tag, "killed"))
        assert has_left(self.state)


TestHostMachine = HostMachine.TestCase
TestHostMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@given(
    held=st.tuples(st.integers(0, 3), st.integers(0, 3)), sent=st.tuples(st.integers(0, 3), st.integers(0, 3))
)
def test_a_goal_is_obeyed_exactly_when_it_is_not_older(held: tuple[int, int], sent: tuple[int, int]) -> None:
    first = accept_goal(
        HostState(host_id=HOST), HostGoal(host_id=HOST, epoch=held[0], generation=held[1], replicas=[])
    )
    assert isinstance(first, HostState)

    second = accept_goal(first, HostGoal(host_id=HOST, epoch=sent[0], generation=sent[1], replicas=[]))

    assert isinstance(second, Refused) == (sent < held)
