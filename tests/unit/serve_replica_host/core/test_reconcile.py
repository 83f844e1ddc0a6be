"""What a host decides: goals, the table of statuses, deadlines, health."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from serve_common.names import BackendTag, HostId, ReplicaTag, replica_tag
from serve_common.protocol.reports import ERROR_LENGTH_MAX, HostGoal, ReplicaGoal, ReplicaRank, ReplicaStatus
from serve_replica_host.core.events import (
    TRANSITIONS,
    Constructed,
    Drained,
    Gone,
    HealthChecked,
    HealthCheckSent,
    Placed,
    ProcessEnded,
    Reconfigured,
    ReplicaEvent,
    ReplicaEventKind,
    ReplicaStartFailed,
    Waits,
    after,
    apply_event,
)
from serve_replica_host.core.reconcile import (
    FORCE_KILL_AFTER_S,
    FORCE_KILL_PERIOD_S,
    Action,
    CheckReplica,
    DrainReplica,
    KillReplica,
    ReconfigureReplica,
    StartReplica,
    reconcile_host,
)
from serve_replica_host.core.state import (
    SPENT_TAGS_MAX,
    HostedReplica,
    HostState,
    Refused,
    accept_goal,
    build_report,
    forget_replica,
    has_left,
    on_leader_notice,
    start_leaving,
)
from tests.support.replica_rig import build_goal

HOST = HostId("host-1")
BACKEND = BackendTag("default/app")


def replica(ordinal: int, **changes: Any) -> ReplicaGoal:
    return build_goal(ordinal=ordinal, **changes)


def goal(
    *replicas: ReplicaGoal,
    generation: int = 1,
    epoch: int = 1,
    host: HostId = HOST,
    kill: tuple[ReplicaTag, ...] = (),
) -> HostGoal:
    return HostGoal(
        host_id=host, epoch=epoch, generation=generation, replicas=list(replicas), kill=list(kill)
    )


class World:
    """A host's state that is moved on step by step."""

    def __init__(self) -> None:
        self.state = HostState(host_id=HOST)
        self.now = 1000.0
        self.check_again_at: float | None = None

    def want(self, *replicas: ReplicaGoal, kill: tuple[ReplicaTag, ...] = ()) -> list[Action]:
        accepted = accept_goal(self.state, goal(*replicas, generation=self.state.generation + 1, kill=kill))
        assert isinstance(accepted, HostState)
        self.state = accepted
        return self.look()

    def look(self, after_s: float = 0.0) -> list[Action]:
        self.now += after_s
        plan = reconcile_host(self.state, self.now)
        self.state, self.check_again_at = plan.state, plan.check_again_at
        return plan.actions

    def hear(self, event: ReplicaEvent) -> list[Action]:
        self.state = apply_event(self.state, event, self.now)
        return self.look()

    def run(self, wanted: ReplicaGoal) -> None:
        self.want(wanted)
        self.hear(Placed(wanted.replica_tag, 11))
        self.hear(Constructed(wanted.replica_tag, wanted.config_version))

    def held(self, tag: ReplicaTag) -> HostedReplica:
        return self.state.replicas[tag]


ONE = replica(1)
TAG = ONE.replica_tag


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (goal(epoch=2, generation=4), "generation 2.4 is older than 2.5"),
        (goal(epoch=1, generation=9), "epoch 1 is over"),
        (goal(epoch=2, generation=6, host=HostId("other")), "for host 'other'"),
        (goal(ONE, ONE, epoch=2, generation=6), "twice"),
    ],
)
def test_a_goal_that_is_older_or_wrong_is_refused(sent: HostGoal, reason: str) -> None:
    state = accept_goal(HostState(host_id=HOST), goal(epoch=2, generation=5))
    assert isinstance(state, HostState)

    refused = accept_goal(state, sent)

    assert isinstance(refused, Refused)
    assert reason in refused.reason


def test_the_same_goal_again_changes_nothing_and_a_higher_epoch_wins_over_any_generation() -> None:
    state = accept_goal(HostState(host_id=HOST), goal(epoch=2, generation=5))
    assert isinstance(state, HostState)

    assert accept_goal(state, goal(epoch=2, generation=5)) is state
    newer = accept_goal(state, goal(epoch=3, generation=1))
    assert isinstance(newer, HostState)
    assert (newer.goal_epoch, newer.generation) == (3, 1)


def test_a_leaders_notice_makes_goals_of_older_epochs_refused() -> None:
    state = on_leader_notice(HostState(host_id=HOST), 7)

    assert isinstance(accept_goal(state, goal(epoch=6, generation=99)), Refused)
    assert isinstance(accept_goal(state, goal(epoch=7, generation=1)), HostState)
    assert on_leader_notice(state, 3).epoch == 7


def test_every_status_has_a_way_to_its_end() -> None:
    for status in ReplicaStatus:
        reached = {status}
        while True:
            more = {following for (source, _), following in TRANSITIONS.items() if source in reached}
            if more <= reached:
                break
            reached |= more  # type: ignore[arg-type]
        assert Gone.GONE in reached, status


def test_what_the_table_does_not_name_changes_nothing() -> None:
    assert after(ReplicaStatus.DRAINING, ReplicaEventKind.CHECK_PASSED) is ReplicaStatus.DRAINING
    assert after(ReplicaStatus.DEAD, ReplicaEventKind.PROCESS_ENDED) is ReplicaStatus.DEAD


def test_a_wanted_replica_is_started_once_and_runs_when_constructed() -> None:
    world = World()

    assert world.want(ONE) == [StartReplica(ONE)]
    assert world.look(1.0) == []
    assert world.hear(Placed(TAG, 42)) == []
    assert world.hear(Constructed(TAG, 1)) == []

    held = world.held(TAG)
    assert (held.status, held.pid, held.config_version) == (ReplicaStatus.RUNNING, 42, 1)


def test_a_start_that_takes_too_long_fails_with_what_it_waited_for_and_is_killed() -> None:
    world = World()
    world.want(ONE)
    world.hear(Waits(TAG, "it needs 4 CPU"))
    assert world.check_again_at == world.now + 60.0

    assert world.look(60.0) == [KillReplica(TAG)]
    assert world.held(TAG).status is ReplicaStatus.FAILED
    assert "60 s" in world.held(TAG).error
    assert "4 CPU" in world.held(TAG).error
    world.hear(ProcessEnded(TAG, "killed"))
    assert "60 s" in world.held(TAG).error
    assert world.look(1000.0) == []


def test_a_failed_start_is_kept_until_the_goal_omits_it_and_its_tag_is_never_started_again() -> None:
    world = World()
    world.want(ONE)

    assert world.hear(ReplicaStartFailed(TAG, "RuntimeError: no model")) == [KillReplica(TAG)]
    assert world.hear(ProcessEnded(TAG, "killed")) == []
    assert world.want(ONE) == []
    assert world.held(TAG).error == "RuntimeError: no model"
    assert world.want() == []
    assert world.state.replicas == {}
    assert world.want(ONE) == []
    assert world.held(TAG).status is ReplicaStatus.DEAD
    assert "never used again" in world.held(TAG).error


@pytest.mark.parametrize("is_unusable", [False, True])
def test_a_report_tells_whether_another_start_could_succeed(is_unusable: bool) -> None:
    world = World()
    world.want(ONE)
    world.hear(ReplicaStartFailed(TAG, "no", is_unusable))
    report = build_report(world.state, incarnation="i", started_at=5.0, sequence=3, resources={})
    assert report.replicas[0].is_unusable is is_unusable


def test_a_process_that_ends_before_its_start_is_done_counts_as_failed_and_afterwards_as_dead() -> None:
    world = World()
    world.want(ONE)
    world.hear(ProcessEnded(TAG, "exit 1"))
    assert world.held(TAG).status is ReplicaStatus.FAILED

    two = replica(2)
    world.run(two)
    world.hear(ProcessEnded(two.replica_tag, "signal 9"))
    assert world.held(two.replica_tag).status is ReplicaStatus.DEAD
    assert world.held(two.replica_tag).error == "signal 9"


def test_an_omitted_replica_is_drained_then_killed_then_gone() -> None:
    world = World()
    world.run(ONE)

    assert world.want() == [DrainReplica(TAG)]
    assert world.held(TAG).status is ReplicaStatus.DRAINING
    assert world.check_again_at == world.now + 20.0
    assert world.hear(Drained(TAG)) == [KillReplica(TAG)]
    assert world.hear(ProcessEnded(TAG, "killed")) == []
    assert world.state.replicas == {}


def test_a_drain_that_takes_too_long_is_killed_and_said_so() -> None:
    world = World()
    world.run(ONE)
    world.want()

    assert world.look(19.9) == []
    assert world.look(0.2) == [KillReplica(TAG)]
    assert world.held(TAG).error == "what was in flight did not finish in time"


def test_a_process_that_survives_its_kill_is_killed_by_force_until_it_is_gone() -> None:
    world = World()
    world.run(ONE)
    world.want()
    world.hear(Drained(TAG))
    assert world.check_again_at == world.now + FORCE_KILL_AFTER_S

    assert world.look(FORCE_KILL_AFTER_S) == [KillReplica(TAG, is_forced=True)]
    assert "process 11 was killed and is still there" in world.held(TAG).error
    assert world.look() == []
    assert world.check_again_at == world.now + FORCE_KILL_PERIOD_S
    assert world.look(FORCE_KILL_PERIOD_S) == [KillReplica(TAG, is_forced=True)]
    assert world.hear(ProcessEnded(TAG, "killed")) == []
    assert world.state.replicas == {}


def test_a_stuck_start_or_stop_keeps_no_other_replica_waiting() -> None:
    world = World()
    two, three = replica(2, start_timeout_s=5.0), replica(3)
    world.run(ONE)
    world.want()
    world.look(21.0)

    assert world.want(two) == [StartReplica(two)]
    assert KillReplica(two.replica_tag) in world.look(5.0)
    assert world.want(three) == [StartReplica(three)]
    world.hear(Constructed(three.replica_tag, 1))
    statuses = {tag: held.status for tag, held in world.state.replicas.items()}
    assert statuses == {
        TAG: ReplicaStatus.DRAINING,
        two.replica_tag: ReplicaStatus.FAILED,
        three.replica_tag: ReplicaStatus.RUNNING,
    }


def test_a_failed_start_whose_process_is_still_there_is_not_forgotten() -> None:
    world = World()
    world.want(ONE)
    assert world.look(60.0) == [KillReplica(TAG)]

    assert world.want() == []
    assert world.held(TAG).status is ReplicaStatus.FAILED
    assert world.look(FORCE_KILL_AFTER_S) == [KillReplica(TAG, is_forced=True)]
    assert "60 s" in world.held(TAG).error
    world.hear(ProcessEnded(TAG, "killed"))
    assert world.state.replicas == {}


def test_a_replica_to_be_killed_is_not_drained() -> None:
    world = World()
    world.run(ONE)

    assert world.want(kill=(TAG,)) == [KillReplica(TAG)]
    assert world.held(TAG).status is ReplicaStatus.DRAINING
    world.hear(ProcessEnded(TAG, "killed"))
    assert world.state.replicas == {}


def test_a_replica_that_drains_already_is_killed_when_asked_and_only_once() -> None:
    world = World()
    world.run(ONE)
    assert world.want() == [DrainReplica(TAG)]

    assert world.want(kill=(TAG,)) == [KillReplica(TAG)]
    assert world.want(kill=(TAG,)) == []
    assert world.hear(Drained(TAG)) == []


def test_a_replica_that_is_wanted_is_not_killed_whatever_the_list_says() -> None:
    world = World()
    world.run(ONE)

    assert world.want(ONE, kill=(TAG, ReplicaTag("default/app#99"))) == []
    assert world.held(TAG).status is ReplicaStatus.RUNNING


def test_a_replica_omitted_while_it_starts_is_killed_at_once() -> None:
    world = World()
    world.want(ONE)

    assert world.want() == [KillReplica(TAG)]
    assert world.hear(Constructed(TAG, 1)) == []
    world.hear(ProcessEnded(TAG, "killed"))
    assert world.state.replicas == {}


def test_a_draining_replica_that_is_wanted_again_drains_on_and_is_then_reported_dead() -> None:
    world = World()
    world.run(ONE)
    world.want()

    assert world.want(ONE) == []
    assert world.hear(Drained(TAG)) == [KillReplica(TAG)]
    world.hear(ProcessEnded(TAG, "killed"))
    world.look()
    assert world.held(TAG).status is ReplicaStatus.DEAD


def test_a_new_configuration_is_applied_once_and_the_newest_follows() -> None:
    world = World()
    world.run(ONE)
    second, third = replica(1, config_version=2, user_config="b"), replica(1, config_version=3)

    assert world.want(second) == [ReconfigureReplica(second)]
    assert world.want(third) == []
    assert world.hear(Reconfigured(TAG, 2, None)) == [ReconfigureReplica(third)]
    assert world.hear(Reconfigured(TAG, 3, None)) == []
    assert world.held(TAG).config_version == 3


def test_a_new_rank_is_passed_on_once_without_a_new_configuration() -> None:
    world = World()
    world.run(ONE)
    rank = ReplicaRank(rank=2, node_rank=1, local_rank=0)
    ranked, larger = replica(1, rank=rank, world_size=3), replica(1, rank=rank, world_size=4)

    assert world.want(ranked) == [ReconfigureReplica(ranked)]
    assert world.want(larger) == []
    assert world.hear(Reconfigured(TAG, 1, None)) == [ReconfigureReplica(larger)]
    assert world.hear(Reconfigured(TAG, 1, None)) == []
    assert world.want(larger) == []
    assert world.held(TAG).config_version == 1


def test_a_replica_starts_with_the_rank_of_its_newest_goal() -> None:
    rank = ReplicaRank(rank=1, node_rank=0, local_rank=1)
    world = World()
    goal = replica(1, rank=rank, world_size=2)

    assert world.want(goal) == [StartReplica(goal)]
    assert world.hear(Placed(TAG, 1)) == []
    assert world.hear(Constructed(TAG, 1)) == []


def test_a_configuration_that_raised_is_reported_and_not_tried_again() -> None:
    world = World()
    world.run(ONE)
    world.want(replica(1, config_version=2))

    assert world.hear(Reconfigured(TAG, 2, "ValueError: bad")) == []
    assert world.want(replica(1, config_version=2)) == []
    held = world.held(TAG)
    assert (held.status, held.config_version) == (ReplicaStatus.RUNNING, 1)
    assert (held.config_error_version, held.error) == (2, "ValueError: bad")
    world.want(replica(1, config_version=3))
    world.hear(Reconfigured(TAG, 3, None))
    assert (world.held(TAG).config_error_version, world.held(TAG).error) == (0, "")


def test_a_reconfigure_that_hangs_is_reported_once_and_a_late_success_still_counts() -> None:
    world = World()
    world.run(replica(1, health_check_period_s=3600.0))
    world.want(replica(1, config_version=2, health_check_period_s=3600.0))
    assert world.check_again_at == world.now + 60.0

    assert world.look(60.0) == []
    assert world.held(TAG).config_error_version == 2
    assert "60 s" in world.held(TAG).error
    assert world.want(replica(1, config_version=3, health_check_period_s=3600.0)) == []
    late = world.hear(Reconfigured(TAG, 2, None))
    assert [type(action) for action in late] == [ReconfigureReplica]
    assert (world.held(TAG).config_version, world.held(TAG).error) == (2, "")


@pytest.mark.parametrize("threshold", [1, 3, 5])
def test_failed_health_checks_in_a_row_make_a_replica_unhealthy_and_one_passed_heals_it(
    threshold: int,
) -> None:
    world = World()
    world.run(replica(1, health_check_failure_threshold=threshold))

    for _ in range(threshold - 1):
        assert world.look(10.0) == [CheckReplica(TAG)]
        world.hear(HealthChecked(TAG, "no disk"))
    assert world.held(TAG).status is ReplicaStatus.RUNNING
    world.look(10.0)
    world.hear(HealthChecked(TAG, "no disk"))
    assert (world.held(TAG).status, world.held(TAG).error) == (ReplicaStatus.UNHEALTHY, "no disk")
    world.look(10.0)
    world.hear(HealthChecked(TAG, None))
    assert (world.held(TAG).status, world.held(TAG).error) == (ReplicaStatus.RUNNING, "")


def test_a_health_check_that_hangs_counts_as_failed_without_a_second_call() -> None:
    world = World()
    world.run(ONE)

    assert world.look(10.0) == [CheckReplica(TAG)]
    assert world.hear(HealthCheckSent(TAG)) == []
    assert world.look(30.0) == []
    assert world.look(10.0) == []
    assert world.look(10.0) == []
    assert world.held(TAG).status is ReplicaStatus.UNHEALTHY
    assert "30 s" in world.held(TAG).error


def test_the_time_to_answer_a_health_check_begins_when_it_is_sent() -> None:
    world = World()
    world.run(replica(1, health_check_failure_threshold=1))

    assert world.look(10.0) == [CheckReplica(TAG)]
    for _ in range(20):
        assert world.look(30.0) == []
    assert world.held(TAG).status is ReplicaStatus.RUNNING
    world.hear(HealthCheckSent(TAG))
    world.look(29.0)
    assert world.held(TAG).status is ReplicaStatus.RUNNING
    world.look(1.0)
    assert world.held(TAG).status is ReplicaStatus.UNHEALTHY
    world.hear(HealthChecked(TAG, None))
    assert world.hear(HealthCheckSent(TAG)) == []
    assert world.held(TAG).check_at == world.now + 10.0


def test_so_many_processes_start_at_once_and_those_behind_them_lose_no_time() -> None:
    world = World()
    world.state = msgspec.structs.replace(world.state, starts_max=2)
    wanted = [replica(n) for n in range(1, 6)]

    assert world.want(*wanted) == [StartReplica(wanted[0]), StartReplica(wanted[1])]
    assert "turn" in world.held(wanted[2].replica_tag).error
    assert world.look(59.0) == []
    assert world.hear(Placed(wanted[1].replica_tag, 12)) == [StartReplica(wanted[2])]
    # What waits for resources keeps nobody waiting; what waits for its process does.
    assert world.hear(Waits(wanted[2].replica_tag, "its process", is_process_starting=True)) == []
    assert world.hear(Waits(wanted[0].replica_tag, "it needs 4 CPU")) == [StartReplica(wanted[3])]
    assert world.hear(ProcessEnded(wanted[3].replica_tag, "gone")) == [StartReplica(wanted[4])]
    world.look(59.0)
    assert world.held(wanted[4].replica_tag).status is ReplicaStatus.STARTING
    world.look(1.0)
    assert "longer than 60 s" in world.held(wanted[4].replica_tag).error


def test_a_start_that_is_no_longer_wanted_never_begins() -> None:
    world = World()
    world.state = msgspec.structs.replace(world.state, starts_max=1)
    one, two, three = replica(1), replica(2), replica(3)
    world.want(one, two, three)

    assert world.want(one, three) == []
    assert two.replica_tag not in world.state.replicas
    assert world.hear(Constructed(one.replica_tag, 1)) == [StartReplica(three)]
    world.want(one, two, three)
    assert world.held(two.replica_tag).status is ReplicaStatus.DEAD
    world.state = start_leaving(world.state, world.now)
    world.look()
    world.hear(ProcessEnded(one.replica_tag, "killed"))
    world.hear(ProcessEnded(three.replica_tag, "killed"))
    assert has_left(world.state)


def test_one_that_survives_its_kill_keeps_no_other_from_starting() -> None:
    world = World()
    world.state = msgspec.structs.replace(world.state, starts_max=1)
    one, two = replica(1), replica(2)
    world.want(one, two)

    assert world.want(two) == [KillReplica(TAG)]
    assert world.look(FORCE_KILL_AFTER_S) == [KillReplica(TAG, is_forced=True), StartReplica(two)]


def test_checks_and_drains_come_before_starts_and_kills() -> None:
    world = World()
    checked, drained, killed, started = (replica(n) for n in range(1, 5))
    for each in (checked, drained, killed):
        world.want(*(held.goal for held in world.state.replicas.values()), each)
        world.hear(Constructed(each.replica_tag, 1))
    world.now += 10.0

    actions = world.want(killed, checked, started, kill=())
    assert actions == [
        CheckReplica(checked.replica_tag),
        CheckReplica(killed.replica_tag),
        DrainReplica(drained.replica_tag),
        StartReplica(started),
    ]
    assert world.want(checked, kill=(killed.replica_tag, started.replica_tag)) == [
        KillReplica(killed.replica_tag),
        KillReplica(started.replica_tag),
    ]


def test_leaving_drains_everything_within_its_own_time_whatever_the_goal_says() -> None:
    world = World()
    world.run(ONE)
    world.state = start_leaving(world.state, world.now + 5.0)

    assert world.look() == [DrainReplica(TAG)]
    assert not has_left(world.state)
    assert world.check_again_at == world.now + 5.0
    assert world.want(ONE, replica(2)) == []
    assert world.look(5.0) == [KillReplica(TAG)]
    world.hear(ProcessEnded(TAG, "killed"))
    assert has_left(world.state)


def test_a_report_is_the_whole_inventory_with_the_goal_that_it_obeys() -> None:
    world = World()
    world.run(ONE)
    world.state = on_leader_notice(world.state, 9)

    report = build_report(world.state, incarnation="i", started_at=5.0, sequence=3, resources={"CPU": 2.0})

    assert (report.epoch, report.generation, report.sequence, report.leaving) == (1, 1, 3, False)
    assert [(x.replica_tag, x.status, x.pid) for x in report.replicas] == [(TAG, ReplicaStatus.RUNNING, 11)]


def test_errors_are_cut_to_their_end_and_spent_tags_to_the_newest() -> None:
    world = World()
    world.want(ONE)
    world.hear(ReplicaStartFailed(TAG, "x" * ERROR_LENGTH_MAX + "ValueError"))
    assert len(world.held(TAG).error) == ERROR_LENGTH_MAX
    assert world.held(TAG).error.endswith("ValueError")

    spent = {replica_tag(BACKEND, n): None for n in range(SPENT_TAGS_MAX)}
    state = msgspec.structs.replace(world.state, spent_tags=spent)
    state = forget_replica(state, ReplicaTag("new#1"))
    assert len(state.spent_tags) == SPENT_TAGS_MAX
    assert ReplicaTag("new#1") in state.spent_tags
    assert replica_tag(BACKEND, 0) not in state.spent_tags
