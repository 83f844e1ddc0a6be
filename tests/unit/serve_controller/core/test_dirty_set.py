"""What the next plan looks at: news, changes and times name what they concern, and nothing else is looked at."""

from __future__ import annotations

import msgspec
from immutables import Map

from serve_common.api.commands import DrainHost
from serve_common.names import BackendTag, HostId, ProxyId
from serve_common.protocol.reports import HostReport, ProxyReport, ReplicaReport, ReplicaStatus
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.dirty_set import (
    EVERYTHING,
    NOTHING,
    DirtySet,
    DirtySets,
    DueChecks,
    SilenceDetector,
    dirty_by_changes,
    dirty_by_host_report,
    dirty_by_proxy_report,
)
from serve_controller.core.objects import HostRecord, ObjectChanges, ObjectKind, ReplicaState
from serve_controller.core.observed import (
    HOST_LOST_AFTER_S,
    HOST_SUSPECT_AFTER_S,
    PROXY_LOST_AFTER_S,
    HostObserved,
    ObservedState,
    ProxyObserved,
    observe_host,
    observe_proxy,
)
from serve_controller.core.reconcile import DueTime
from serve_controller.shell.observations import GC_EVERY_S, SWEEP_S, TermObservations
from tests.simulation.sim_controller import no_refusal
from tests.support.control_loop.attentive_loop import AttentiveLoop
from tests.support.control_loop.orders import deploy
from tests.support.control_loop.pure_host import PureHost
from tests.support.controller_parts import NOW, TAG, backend_of, checkpoint_of, get_version, replica_of

HOST, PROXY = HostId("host-1"), ProxyId("proxy-1")
V1 = get_version()


def host_report(sequence: int = 1, **fields: object) -> HostReport:
    report = HostReport(
        host_id=HOST,
        incarnation="i",
        sequence=sequence,
        started_at=1.0,
        epoch=1,
        generation=1,
        resources={"CPU": 4.0},
        replicas=[],
    )
    return msgspec.structs.replace(report, **fields)


def hosts_heard(*reports: HostReport) -> list[HostObserved]:
    observed, heard = ObservedState(since=NOW), []
    for seconds, report in enumerate(reports):
        observed = observe_host(observed, report, NOW + seconds * HOST_SUSPECT_AFTER_S)
        heard.append(observed.hosts[HOST])
    return heard


def proxy_heard(**fields: object) -> ProxyObserved:
    report = ProxyReport(proxy_id=PROXY, incarnation="i", sequence=1, started_at=1.0, applied_snapshot_id=7)
    observed = observe_proxy(ObservedState(since=NOW), msgspec.structs.replace(report, **fields), NOW)
    return observed.proxies[PROXY]


# -- reports -----------------------------------------------------------------------------------------------------------


def test_a_report_that_says_nothing_new_asks_for_no_look() -> None:
    first, second = hosts_heard(host_report(1), host_report(2))
    assert dirty_by_host_report(first, second) == NOTHING
    assert dirty_by_proxy_report(proxy_heard(), proxy_heard(sequence=2)) == NOTHING


def test_a_new_host_or_a_new_life_of_one_is_looked_at_and_may_have_room() -> None:
    (first,) = hosts_heard(host_report())
    assert dirty_by_host_report(None, first) == DirtySet(hosts=frozenset({HOST}), has_capacity=True)
    old, new = hosts_heard(host_report(), host_report(1, incarnation="j", started_at=2.0))
    assert dirty_by_host_report(old, new) == DirtySet(hosts=frozenset({HOST}), has_capacity=True)


def test_a_changed_inventory_or_acknowledgement_is_looked_at() -> None:
    replica = ReplicaReport(replica_tag=replica_of(1, V1).replica_tag, status=ReplicaStatus.RUNNING)
    for fields in ({"replicas": [replica]}, {"generation": 2}, {"epoch": 2}):
        old, new = hosts_heard(host_report(1), host_report(2, **fields))
        assert dirty_by_host_report(old, new) == DirtySet(hosts=frozenset({HOST}))


def test_a_host_that_grew_or_no_longer_leaves_may_have_room() -> None:
    old, new = hosts_heard(host_report(1), host_report(2, resources={"CPU": 8.0}))
    assert dirty_by_host_report(old, new).has_capacity
    old, new = hosts_heard(host_report(1, leaving=True), host_report(2))
    assert dirty_by_host_report(old, new).has_capacity


def test_what_a_proxy_applied_or_cannot_apply_concerns_goals() -> None:
    assert dirty_by_proxy_report(proxy_heard(), proxy_heard(applied_snapshot_id=8)) == DirtySet(goals=True)
    assert dirty_by_proxy_report(proxy_heard(), proxy_heard(http_error="no")) == DirtySet(goals=True)
    assert dirty_by_proxy_report(None, proxy_heard()) == DirtySet(proxies=frozenset({PROXY}), goals=True)
    assert dirty_by_proxy_report(proxy_heard(), proxy_heard(leaving=True)).proxies == {PROXY}


# -- changes -----------------------------------------------------------------------------------------------------------


def test_a_changed_replica_concerns_its_backend_and_its_host_and_one_that_is_gone_leaves_room() -> None:
    before = checkpoint_of(backend_of(V1), replica_of(1, V1))
    put = ObjectChanges((replica_of(1, V1, ReplicaState.SHOULD_STOP),))
    looked = dirty_by_changes(before, before.applied(put), put)
    assert (looked.backends, looked.hosts, looked.has_capacity) == ({TAG}, {HOST}, False)
    gone = ObjectChanges(deletes=((ObjectKind.REPLICA, "default/a#1"),))
    looked = dirty_by_changes(before, before.applied(gone), gone)
    assert (looked.backends, looked.hosts, looked.has_capacity) == ({TAG}, {HOST}, True)


def test_a_drained_host_concerns_every_backend_on_it() -> None:
    before = checkpoint_of(backend_of(V1), replica_of(1, V1), HostRecord(host_id=HOST, generation=1))
    changes = ObjectChanges((HostRecord(host_id=HOST, generation=1, draining=True),))
    looked = dirty_by_changes(before, before.applied(changes), changes)
    assert (looked.backends, looked.hosts, looked.has_capacity) == ({TAG}, {HOST}, True)


def test_no_change_concerns_nobody() -> None:
    assert dirty_by_changes(Checkpoint(), Checkpoint(), ObjectChanges()) == NOTHING


def test_a_change_of_one_deployment_is_planned_without_a_look_at_another() -> None:
    loop = AttentiveLoop(PureHost("host-1", cpus=8), PureHost("host-2", cpus=8))
    loop.command(deploy("a"))
    loop.done(deploy("b"))
    loop.command(deploy("b", num=2))
    seen: set[BackendTag] = set()
    for _ in range(5):
        loop.cycle()
        assert not loop.attention.is_everything
        seen |= loop.attention.backends
    assert seen == {"default/b"}


# -- times -------------------------------------------------------------------------------------------------------------


def test_the_agenda_gives_each_subject_once_at_its_earliest_time() -> None:
    agenda = DueChecks()
    assert agenda.next_at() is None
    agenda.add(5.0, ("backend", "a"))
    agenda.add(3.0, ("backend", "b"))
    agenda.add(4.0, ("backend", "a"))
    agenda.add(9.0, ("backend", "b"))
    assert agenda.next_at() == 3.0
    assert agenda.pop_due(2.9) == []
    assert agenda.pop_due(4.0) == [("backend", "b"), ("backend", "a")]
    assert agenda.next_at() is None, "what was put off by an earlier time is not due again"
    agenda.add(5.0, ("backend", "a"))
    assert agenda.pop_due(5.0) == [("backend", "a")]


def test_who_falls_silent_is_looked_at_when_that_changes_how_it_is_treated() -> None:
    observed = observe_host(ObservedState(since=NOW), host_report(), NOW)
    silence, agenda = SilenceDetector(), DueChecks()
    assert silence.of_host(observed, HOST, NOW, agenda).hosts == {HOST}, "it is new"
    assert silence.of_host(observed, HOST, NOW + 1, agenda) == NOTHING
    assert agenda.next_at() == NOW + HOST_SUSPECT_AFTER_S
    suspect_at = NOW + HOST_SUSPECT_AFTER_S
    assert agenda.pop_due(suspect_at) == [("host", HOST)]
    assert silence.of_host(observed, HOST, suspect_at, agenda).hosts == {HOST}
    assert agenda.next_at() == NOW + HOST_LOST_AFTER_S
    assert silence.of_host(observed, HOST, NOW + HOST_LOST_AFTER_S, agenda).hosts == {HOST}
    back = observe_host(observed, host_report(2), NOW + 20)
    assert silence.of_host(back, HOST, NOW + 20, agenda).has_capacity


def test_a_proxy_that_falls_silent_concerns_goals() -> None:
    observed = ObservedState(since=NOW, proxies=Map({PROXY: proxy_heard()}))
    silence, agenda = SilenceDetector(), DueChecks()
    assert silence.of_proxy(observed, PROXY, NOW, agenda).goals
    assert silence.of_proxy(observed, PROXY, NOW + 1, agenda) == NOTHING
    lost = silence.of_proxy(observed, PROXY, NOW + PROXY_LOST_AFTER_S, agenda)
    assert (lost.proxies, lost.goals) == ({PROXY}, True)


def test_attention_is_gathered_until_a_plan_takes_it() -> None:
    dirty_sets = DirtySets()
    dirty_sets.add(NOTHING)
    assert dirty_sets.is_empty
    dirty_sets.add(DirtySet(backends=frozenset({TAG}), goals=True))
    dirty_sets.add(DirtySet(hosts=frozenset({HOST}), has_capacity=True))
    assert dirty_sets.take() == DirtySet(
        backends=frozenset({TAG}), hosts=frozenset({HOST}), goals=True, has_capacity=True
    )
    assert dirty_sets.take() == NOTHING
    dirty_sets.add(EVERYTHING)
    assert dirty_sets.take() == EVERYTHING


# -- hearing -----------------------------------------------------------------------------------------------------------


def test_the_first_plan_of_a_term_looks_at_everything() -> None:
    assert TermObservations(NOW, no_refusal).fold(Checkpoint(), NOW).is_everything


def test_the_bus_going_and_coming_makes_everything_worth_a_look() -> None:
    hearing = TermObservations(NOW, no_refusal)
    hearing.fold(Checkpoint(), NOW)
    hearing.on_bus_break(None)
    assert hearing.fold(Checkpoint(), NOW).is_everything
    assert hearing.observed.since is None
    hearing.on_bus_break(NOW + 1)
    assert hearing.fold(Checkpoint(), NOW + 1).is_everything


def test_of_the_buckets_news_late_ones_change_nothing() -> None:
    hearing = TermObservations(NOW, no_refusal)
    hearing.on_bucket_entries({"k": (5, 50)}, whole=False)
    assert hearing.observed.bucket is None, "nothing is known before the whole was read"
    hearing.on_bucket_entries({"k": (5, 50), "l": (6, 60)}, whole=True)
    hearing.fold(Checkpoint(), NOW)
    hearing.on_bucket_entries({"k": (4, 40), "l": (7, None)}, whole=False)
    assert hearing.observed.bucket == Map({"k": 50})
    assert hearing.fold(Checkpoint(), NOW).keys == {"l"}
    hearing.on_bucket_entries({"l": (6, 60)}, whole=False)
    assert hearing.observed.bucket == Map({"k": 50}), "a deletion is not undone by what came before it"


def test_what_is_due_is_looked_at_when_its_time_comes() -> None:
    hearing = TermObservations(NOW, no_refusal)
    hearing.fold(Checkpoint(), NOW)
    hearing.due([DueTime(NOW + 0.5, ("backend", TAG)), DueTime(NOW + 0.7, ("host_goal", HOST))])
    assert hearing.next_at() == NOW + 0.5
    assert hearing.fold(Checkpoint(), NOW + 0.4) == NOTHING
    assert hearing.fold(Checkpoint(), NOW + 0.5).backends == {TAG}
    assert hearing.fold(Checkpoint(), NOW + 0.8).hosts == {HOST}


def test_everything_is_looked_at_in_turn_whatever_is_heard_and_what_is_over_is_forgotten() -> None:
    backends = [backend_of(V1, BackendTag(f"default/b{number}")) for number in range(300)]
    checkpoint = checkpoint_of(*backends)
    hearing = TermObservations(NOW, no_refusal)
    hearing.fold(checkpoint, NOW)
    seen: list[BackendTag] = []
    tidied = 0
    for second in range(1, int(SWEEP_S) + 2):
        attention = hearing.fold(checkpoint, NOW + second)
        assert not attention.is_everything
        assert len(attention.backends) <= 3, "a slice at a time"
        seen += sorted(attention.backends)
        tidied += attention.gc
    assert set(seen) == set(checkpoint.backends)
    assert len(seen) <= len(backends) + 3, "each once"
    assert tidied == int(SWEEP_S / GC_EVERY_S)


def test_a_drain_is_planned_from_the_command_alone() -> None:
    loop = AttentiveLoop(PureHost("host-1", cpus=8), PureHost("host-2", cpus=8))
    loop.done(deploy(num=2))
    loop.done(DrainHost(host_id="host-1"))
    assert loop.hosts_of() == ["host-2", "host-2"]
