"""The scale benchmark's simulated hosts obey like real ones, and its figures follow from what was read."""

from __future__ import annotations

import asyncio
import itertools

import msgspec
import pytest

from serve_common.config.replica import ReplicaConfig
from serve_common.names import BackendTag, ReplicaTag
from serve_common.protocol.reports import (
    HostGoal,
    HostReport,
    LeaderNotice,
    ProxyReport,
    ReplicaGoal,
    ReplicaStatus,
)
from serve_common.protocol.subjects import Subjects
from tests.bench.scale.figures import ChangeFigures, Column, Recovery, Sample, conclude, percentile
from tests.bench.scale.fleets import HostFleet, ProxyFleet
from tests.bench.scale.hosts import Outcome, SimulatedHost
from tests.bench.scale.meters import Sent, controllers_part, sample_of
from tests.bench.scale.report import make_report, problems_of, render
from tests.bench.scale.sizes import host_id, size_of, spread, turns
from tests.bench.scale.tally import Tally


def goal(
    number: tuple[int, int], config_version: int, *ordinals: int, kill: tuple[int, ...] = ()
) -> HostGoal:
    replicas = [
        ReplicaGoal(
            replica_tag=tag(ordinal),
            backend_tag=BackendTag("default/b"),
            replica_config=ReplicaConfig(import_path="noop:Noop"),
            config_version=config_version,
            max_concurrent_queries=1,
            graceful_shutdown_timeout_s=1,
            health_check_period_s=1,
            health_check_timeout_s=1,
            start_timeout_s=1,
        )
        for ordinal in ordinals
    ]
    killed = [tag(ordinal) for ordinal in kill]
    return HostGoal(host_id=host_id(0), epoch=number[0], generation=number[1], replicas=replicas, kill=killed)


def tag(ordinal: int) -> ReplicaTag:
    return ReplicaTag(f"default/b#{ordinal}")


def statuses(host: SimulatedHost) -> dict[str, tuple[ReplicaStatus, int]]:
    return {r.replica_tag: (r.status, r.config_version) for r in host.report().replicas}


def test_a_host_starts_what_its_goal_names_and_it_runs_once_that_is_finished():
    host = SimulatedHost(host_id(0), 1.0)
    outcome = host.take_goal(goal((1, 1), 3, 7))
    assert statuses(host) == {"default/b#7": (ReplicaStatus.STARTING, 0)}
    assert host.finish(outcome)
    assert statuses(host) == {"default/b#7": (ReplicaStatus.RUNNING, 3)}
    assert host.running == 1


def test_a_newer_configuration_applies_at_once_and_also_to_what_still_starts():
    host = SimulatedHost(host_id(0), 1.0)
    first = host.take_goal(goal((1, 1), 1, 7))
    host.take_goal(goal((1, 2), 2, 7))
    host.finish(first)
    assert statuses(host) == {"default/b#7": (ReplicaStatus.RUNNING, 2)}
    host.take_goal(goal((1, 3), 3, 7))
    assert statuses(host) == {"default/b#7": (ReplicaStatus.RUNNING, 3)}


def test_what_a_goal_leaves_out_drains_and_then_is_gone_and_what_it_kills_is_gone_at_once():
    host = SimulatedHost(host_id(0), 1.0)
    host.finish(host.take_goal(goal((1, 1), 1, 7, 8)))
    outcome = host.take_goal(goal((1, 2), 1, kill=(8,)))
    assert outcome == Outcome(drained=(tag(7),))
    assert statuses(host) == {"default/b#7": (ReplicaStatus.DRAINING, 1)}
    assert host.finish(outcome)
    assert statuses(host) == {}


@pytest.mark.parametrize("number", [(1, 9), (2, 1)])
def test_a_host_refuses_older_goals(number: tuple[int, int]):
    host = SimulatedHost(host_id(0), 1.0)
    host.take_goal(goal((2, 2), 1, 7))
    assert host.take_goal(goal(number, 1)).is_refused
    report = host.report()
    assert (report.epoch, report.generation, len(report.replicas)) == (2, 2, 1)


def test_a_host_refuses_goals_of_a_leader_that_was_followed_by_another():
    host = SimulatedHost(host_id(0), 1.0)
    host.on_leader_notice(3)
    assert host.take_goal(goal((2, 5), 1, 7)).is_refused
    assert not host.has_goal
    host.take_goal(goal((3, 1), 1, 7))
    assert host.has_goal


def test_reports_of_a_host_rise_in_sequence_and_start_nothing_twice():
    host = SimulatedHost(host_id(0), 1.0)
    host.take_goal(goal((1, 1), 1, 7))
    assert host.take_goal(goal((1, 1), 1, 7)) == Outcome()
    assert [host.report().sequence for _ in range(3)] == [1, 2, 3]


class HeardBus:
    """Takes what fleets publish, and hands them what a test says."""

    def __init__(self) -> None:
        self.sent: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue()
        self._callbacks = {}

    def subscribe(self, subject, callback) -> None:
        self._callbacks[subject] = callback

    def publish(self, subject: bytes, payload: bytes) -> None:
        self.sent.put_nowait((subject.decode(), payload))

    def tell(self, subject: str, message: msgspec.Struct) -> None:
        self._callbacks[subject](b"", b"", msgspec.json.encode(message), None)


async def test_hosts_report_at_once_what_they_were_told_and_again_when_it_runs():
    bus, tally = HeardBus(), Tally()
    fleet = HostFleet(bus, Subjects(), 2, tally, started_at=1.0)
    bus.tell("serve.host.*.goal", goal((1, 1), 3, 7))
    reports = [msgspec.json.decode((await bus.sent.get())[1], type=HostReport) for _ in range(2)]
    assert [r.replicas[0].status for r in reports] == [ReplicaStatus.STARTING, ReplicaStatus.RUNNING]
    fleet.count()
    assert (tally.goals, tally.host_reports, tally.hosts_with_goal, tally.replicas_running) == (1, 2, 1, 1)
    bus.tell("serve.leader", LeaderNotice(controller_id="c", epoch=2))
    assert {(await bus.sent.get())[0].rpartition(".")[2] for _ in range(2)} == {host_id(0), host_id(1)}


async def test_proxies_report_changes_that_come_together_once_and_each_for_itself():
    bus, tally = HeardBus(), Tally()
    fleet = ProxyFleet(bus, Subjects(), 2, tally, started_at=1.0)
    fleet.on_bucket_entries({"backends.a": (1, b'{"snapshot_id": 4}')}, whole=True)
    fleet.on_bucket_entries({"backends.b": (2, b'{"snapshot_id": 6}')}, whole=False)
    reports = [msgspec.json.decode((await bus.sent.get())[1], type=ProxyReport) for _ in range(2)]
    assert [r.applied_snapshot_id for r in reports] == [6, 6]
    assert reports[0].proxy_id != reports[1].proxy_id
    assert bus.sent.empty()
    assert (tally.snapshots, tally.snapshot_bytes, tally.applied_snapshot_id) == (1, 18, 6)


async def test_proxies_have_applied_nothing_before_the_bucket_was_read():
    bus = HeardBus()
    fleet = ProxyFleet(bus, Subjects(), 1, Tally(), started_at=1.0)
    fleet.report_turns(0.5, 1.5)
    assert msgspec.json.decode((await bus.sent.get())[1], type=ProxyReport).applied_snapshot_id == 0


def test_everybody_has_one_turn_in_each_period():
    ticks = [number * 0.02 for number in range(51)]
    seen = [turn for before, now in itertools.pairwise(ticks) for turn in turns(1000, before, now, 1.0)]
    assert sorted(seen) == list(range(1000))


def test_whoever_is_late_sends_no_report_twice():
    assert sorted(turns(10, 0.0, 7.35, 1.0)) == list(range(10))
    assert turns(10, 1.0, 1.05, 1.0) == []


def test_sizes_keep_ten_replicas_for_a_backend():
    size = size_of(10_000)
    assert (size.hosts, size.proxies, size.backends) == (1000, 1000, 1000)
    with pytest.raises(ValueError, match="105 replicas"):
        size_of(105)
    assert spread(4, 1000) == [0, 250, 500, 750]
    assert spread(10, 3) == [0, 1, 2]


def test_only_the_controllers_connections_count_as_published():
    connz = {
        "connections": [
            {"name": "controller controller-1", "in_msgs": 3, "in_bytes": 40},
            {"name": "simulated hosts", "in_msgs": 100, "in_bytes": 1000},
            {"in_msgs": 1, "in_bytes": 1},
        ]
    }
    assert controllers_part(connz) == Sent(3, 40)


def test_a_metric_is_the_sum_over_its_labels_and_none_when_it_is_not_there():
    text = '# HELP a_sum text\na_sum{kind="x"} 1.5\na_sum{kind="y"} 2e0\na_sum_other 9\n'
    assert sample_of(text, "a_sum") == 3.5
    assert sample_of(text, "b_sum") is None


def sample(seconds: float, wal_bytes: int = 1000) -> Sample:
    return Sample(
        seconds=seconds, wal_bytes=wal_bytes, messages=4, published_bytes=500, goals=1, goal_bytes=300,
        snapshots=1, snapshot_bytes=100, proxy_reports=10,
    )  # fmt: skip


def test_percentiles_are_values_that_were_measured():
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile(range(1, 101), 95) == 95
    assert percentile([4.0], 95) == 4.0


def test_a_change_is_told_by_its_median_and_its_slow_end():
    figures = conclude([sample(0.010), sample(0.020), sample(0.900)])
    assert (figures.p50_ms, figures.p95_ms, figures.samples) == (20.0, 900.0, 3)


def column(replicas: int, wal_bytes: int) -> Column:
    change: ChangeFigures = conclude([sample(0.02, wal_bytes)])
    return Column(
        size=size_of(replicas),
        deploy_all_s=1.0,
        scale=change,
        user_config=change,
        recoveries=[Recovery(reply_s=1.0, applied_s=1.5)],
    )


def test_a_table_says_what_could_not_be_measured_and_reads_back():
    columns = [column(100, 1000), Column(size=size_of(1000), problem="not in time")]
    report = make_report(columns, load_before=0.1)
    assert problems_of(report) == ["1000 replicas: not in time"]
    table = render(report)
    assert "20 / 20 |     - |" in table
    assert msgspec.json.decode(msgspec.json.encode(report), type=type(report)) == report


def test_bytes_that_grow_with_other_backends_are_a_problem():
    grown = make_report([column(100, 1000), column(1000, 2000)], load_before=0.1)
    assert [text.split()[0] for text in problems_of(grown)] == ["scale.wal_bytes", "user_config.wal_bytes"]
    assert problems_of(make_report([column(100, 1000), column(1000, 1100)], load_before=0.1)) == []
