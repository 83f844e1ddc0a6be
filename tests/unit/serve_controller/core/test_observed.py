"""What is heard: late and doubled reports undo nothing, and silence is judged fairly."""

from __future__ import annotations

import msgspec
import pytest
from immutables import Map

from serve_common.api.views import GoalStatus
from serve_common.errors import LimitReached
from serve_common.names import BackendTag, GoalId, HostId, ProxyId, replica_tag
from serve_common.protocol.reports import HostReport, ProxyReport, ReplicaReport, ReplicaStatus
from serve_common.protocol.snapshots import Snapshot
from serve_common.protocol.subjects import HTTP_KEY, backend_key
from serve_controller.core import observed as observed_module
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.objects import Counters, HostRecord, ObjectKind, ReplicaState, SnapshotRecord
from serve_controller.core.observed import (
    FORGET_AFTER_S,
    HOST_LOST_AFTER_S,
    HOST_SUSPECT_AFTER_S,
    PROXY_LOST_AFTER_S,
    HostStatus,
    IdentityTaken,
    ObservedState,
    drop_silent,
    holder_digest,
    host_status,
    is_proxy_live,
    observe_break,
    observe_host,
    observe_proxy,
    observe_round_trip,
    observe_sent,
    silent_at,
)
from serve_controller.core.reconcile import PublishSnapshot, SendHostGoal, reconcile
from serve_controller.core.restored import (
    AHEAD_MAX,
    CLAIMS_WAIT_S,
    MARGIN,
    Claims,
    claims_complete_at,
    get_report_claims,
    overtake,
)
from serve_controller.shell import observations as hearing_module
from serve_controller.shell.observations import TermObservations
from tests.support.control_loop.pure_host import carried
from tests.support.controller_parts import (
    NOW,
    TAG,
    backend_of,
    checkpoint_of,
    deployment_of,
    endpoint_of,
    get_version,
    goal_of,
    observed_hosts,
    replica_of,
)

HOST = HostId("host-1")
NOBODY = ObservedState(since=100.0)


def report(sequence: int = 1, *, life: int = 1, leaving: bool = False) -> HostReport:
    return HostReport(
        host_id=HOST,
        incarnation=str(life),
        sequence=sequence,
        started_at=float(life),
        epoch=0,
        generation=0,
        resources={},
        replicas=[],
        leaving=leaving,
    )


def proxy(sequence: int = 1, *, life: int = 1, leaving: bool = False) -> ProxyReport:
    return ProxyReport(
        proxy_id=ProxyId("p"),
        incarnation=str(life),
        sequence=sequence,
        started_at=float(life),
        applied_snapshot_id=7,
        leaving=leaving,
    )


def test_a_late_report_changes_nothing() -> None:
    observed = observe_host(NOBODY, report(5), 101.0)
    assert observe_host(observed, report(4), 102.0) is observed
    heard = observe_proxy(NOBODY, proxy(5), 101.0)
    assert observe_proxy(heard, proxy(4), 102.0) is heard
    leaving = observe_host(NOBODY, report(5, leaving=True), 101.0)
    assert observe_host(leaving, report(9, life=0), 102.0) is leaving, "of a life before the one that leaves"


def test_a_new_life_of_a_host_has_been_sent_nothing() -> None:
    observed = observe_sent(observe_host(NOBODY, report(5), 101.0), HOST, (1, 3), 101.0)
    assert observe_host(observed, report(6), 102.0).hosts[HOST].sent == (1, 3)
    assert observe_host(observed, report(1, life=2), 101.0 + HOST_SUSPECT_AFTER_S).hosts[HOST].sent is None


@pytest.mark.parametrize("life", [0, 2, 99])
@pytest.mark.parametrize("leaving", [False, True])
def test_an_id_belongs_to_the_life_that_reports_until_it_is_silent(life: int, leaving: bool) -> None:
    observed = observe_host(NOBODY, report(5), 101.0)
    heard = observe_proxy(NOBODY, proxy(5), 101.0)
    forged = proxy(9, life=life, leaving=leaving)
    for seconds in (0.0, HOST_SUSPECT_AFTER_S - 0.1):
        with pytest.raises(IdentityTaken):
            observe_host(observed, report(9, life=life, leaving=leaving), 101.0 + seconds)
        with pytest.raises(IdentityTaken):
            observe_proxy(heard, forged, 101.0 + seconds)
    at = 101.0 + HOST_SUSPECT_AFTER_S
    assert observe_host(observed, report(1, life=life), at).hosts[HOST].report.started_at == life
    assert observe_proxy(heard, forged, at).proxies[ProxyId("p")].report is forged
    away = observe_break(observed, None)
    with pytest.raises(IdentityTaken):
        observe_host(away, report(1, life=life), 9e9)


def test_who_guesses_when_a_life_began_is_another_all_the_same() -> None:
    forged = msgspec.structs.replace(report(9), incarnation="guessed")
    with pytest.raises(IdentityTaken):
        observe_host(observe_host(NOBODY, report(5), 101.0), forged, 101.0)
    with pytest.raises(IdentityTaken):
        observe_proxy(
            observe_proxy(NOBODY, proxy(5), 101.0), msgspec.structs.replace(proxy(9), incarnation="g"), 101.0
        )


def test_an_id_whose_life_leaves_is_free_for_a_later_one_at_once() -> None:
    observed = observe_host(NOBODY, report(5, leaving=True), 101.0)
    assert observe_host(observed, report(1, life=2), 101.0).hosts[HOST].report.started_at == 2.0
    heard = observe_proxy(NOBODY, proxy(5, leaving=True), 101.0)
    assert not observe_proxy(heard, proxy(1, life=2), 101.0).proxies[ProxyId("p")].report.leaving


def test_a_new_leader_believes_whom_the_id_belonged_to_and_others_when_that_one_stays_silent() -> None:
    holder, other = holder_digest(report()), report(1, life=2)
    assert HOST in observe_host(NOBODY, report(), 100.0, holder).hosts
    for seconds in (0.0, HOST_SUSPECT_AFTER_S - 0.1):
        with pytest.raises(IdentityTaken):
            observe_host(NOBODY, other, 100.0 + seconds, holder)
    assert HOST in observe_host(NOBODY, other, 100.0 + HOST_SUSPECT_AFTER_S, holder).hosts
    with pytest.raises(IdentityTaken):
        observe_proxy(NOBODY, proxy(life=2), 100.0, holder_digest(proxy()))


def test_silence_that_nobody_could_have_heard_frees_no_id() -> None:
    observed = observe_round_trip(observe_host(NOBODY, report(5), 101.0), 102.0)
    with pytest.raises(IdentityTaken):
        observe_host(observed, report(1, life=2), 110.0)


def test_the_number_of_ids_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observed_module, "IDS_MAX", 1)
    observed = observe_proxy(observe_host(NOBODY, report(5), 101.0), proxy(5), 101.0)
    with pytest.raises(LimitReached):
        observe_host(observed, msgspec.structs.replace(report(), host_id=HostId("other")), 101.0)
    with pytest.raises(LimitReached):
        observe_proxy(observed, msgspec.structs.replace(proxy(), proxy_id=ProxyId("other")), 101.0)
    assert observe_host(observed, report(6), 102.0).hosts[HOST].report.sequence == 6


@pytest.mark.parametrize(
    ("silent_s", "status"),
    [
        (0.0, HostStatus.LIVE),
        (HOST_SUSPECT_AFTER_S - 0.1, HostStatus.LIVE),
        (HOST_SUSPECT_AFTER_S, HostStatus.SUSPECT),
        (HOST_LOST_AFTER_S, HostStatus.LOST),
    ],
)
def test_a_silent_host_is_suspect_and_then_lost(silent_s: float, status: HostStatus) -> None:
    observed = observe_host(NOBODY, report(), 101.0)
    assert host_status(observed, HOST, 101.0 + silent_s) is status


def test_a_host_never_heard_of_has_a_whole_lease_from_the_leaders_begin() -> None:
    assert host_status(NOBODY, HOST, 100.0) is HostStatus.SUSPECT
    assert host_status(NOBODY, HOST, 99.9 + HOST_LOST_AFTER_S) is HostStatus.SUSPECT
    assert host_status(NOBODY, HOST, 100.0 + HOST_LOST_AFTER_S) is HostStatus.LOST


def test_while_the_bus_is_away_nobody_is_lost_and_afterwards_the_lease_begins_anew() -> None:
    observed = observe_break(observe_host(NOBODY, report(), 101.0), None)
    assert host_status(observed, HOST, 9e9) is HostStatus.LIVE
    assert silent_at(observed, observed.hosts[HOST], HOST_LOST_AFTER_S) is None
    observed = observe_break(observed, 500.0)
    assert host_status(observed, HOST, 500.0 + HOST_LOST_AFTER_S - 0.1) is HostStatus.SUSPECT
    assert host_status(observed, HOST, 500.0 + HOST_LOST_AFTER_S) is HostStatus.LOST
    assert silent_at(observed, None, 3.0) == 503.0


def test_a_host_that_leaves_takes_nothing_new() -> None:
    observed = observe_host(NOBODY, report(leaving=True), 101.0)
    assert host_status(observed, HOST, 101.0) is HostStatus.LEAVING


def test_a_proxy_counts_until_it_leaves_or_is_lost() -> None:
    tag = ProxyId("p")
    assert is_proxy_live(NOBODY, tag, 100.0 + PROXY_LOST_AFTER_S - 0.1)
    assert not is_proxy_live(NOBODY, tag, 100.0 + PROXY_LOST_AFTER_S)
    assert not is_proxy_live(observe_proxy(NOBODY, proxy(leaving=True), 101.0), tag, 101.0)


def test_what_is_silent_for_long_is_forgotten() -> None:
    observed = observe_proxy(observe_host(NOBODY, report(), 101.0), proxy(), 101.0)
    assert drop_silent(observed, 102.0) == observed
    forgotten = drop_silent(observed, 101.0 + FORGET_AFTER_S)
    assert (len(forgotten.hosts), len(forgotten.proxies)) == (0, 0)
    assert msgspec.structs.replace(forgotten, since=None).since is None


# -- who reports in another's name -------------------------------------------------------------------------------------


class Heard:
    """A leader that hears these reports, one plan after each."""

    def __init__(self) -> None:
        self.refused: list[str] = []
        self.hearing = TermObservations(
            100.0, lambda kind, sender, _error: self.refused.append(f"{kind} {sender}")
        )
        self.hearing.on_round_trip(1e9, 100.0)

    def hear(self, now: float, *reports: HostReport | ProxyReport) -> list[str]:
        """Whom it tells of then."""
        for said in reports:
            self.hearing.on_report(said, now)
        self.hearing.fold(Checkpoint(), now)
        return [f"{event.kind} {event.subject}" for event in self.hearing.pop_conflicts(now)]


def test_a_process_that_begins_anew_before_the_last_life_counts_as_silent_is_no_conflict() -> None:
    heard = Heard()
    assert heard.hear(101.0, report(5)) == []
    assert heard.hear(102.0, report(1, life=2)) == []
    assert heard.hear(103.0, report(2, life=2)) == []
    assert heard.hear(101.0 + HOST_SUSPECT_AFTER_S, report(3, life=2)) == []
    assert heard.hearing.observed.hosts[HOST].report.sequence == 3
    assert heard.hear(105.0, report(4, life=2)) == []
    assert heard.refused == ["identity host host-1"] * 2


def test_two_that_report_as_one_are_told_of_now_and_then() -> None:
    heard = Heard()
    told = [
        heard.hear(101.0 + n, report(n), proxy(n), report(n, life=9), proxy(n, life=9)) for n in range(100)
    ]
    assert [names for names in told if names] == [["host host-1", "proxy p"]] * 2
    assert heard.hearing.observed.hosts[HOST].report.incarnation == "1"
    assert heard.refused.count("identity host host-1") == 100


def test_after_this_process_stood_still_the_holder_is_heard_before_whoever_reports_in_its_name() -> None:
    heard = Heard()
    heard.hear(101.0, report(5), proxy(5))
    at = 101.0 + 2 * HOST_SUSPECT_AFTER_S
    heard.hear(at, report(1, life=9, leaving=True), proxy(1, life=9), report(6), proxy(6))
    observed = heard.hearing.observed
    assert observed.hosts[HOST].report == report(6)
    assert observed.proxies[ProxyId("p")].report == proxy(6)
    assert heard.refused == ["identity host host-1", "identity proxy p"]


def test_who_reports_in_the_name_of_one_that_leaves_is_believed_from_then_on_and_no_sooner() -> None:
    heard = Heard()
    heard.hear(101.0, report(5), proxy(5))
    forged = report(1, life=9), proxy(1, life=9)
    for said in forged:
        heard.hearing.on_report(said, 101.5)
    heard.hear(102.0, report(6, leaving=True), proxy(6, leaving=True))
    assert heard.hearing.observed.hosts[HOST].report == report(6, leaving=True)
    assert heard.hearing.observed.proxies[ProxyId("p")].report == proxy(6, leaving=True)
    heard.hear(102.5, *forged)
    assert heard.hearing.observed.hosts[HOST].report == forged[0]
    assert heard.hearing.observed.proxies[ProxyId("p")].report == forged[1]


def test_who_reports_as_everybody_does_not_push_out_all_other_events() -> None:
    heard = Heard()
    names = [HostId(f"h{n}") for n in range(1_000)]
    holders = [msgspec.structs.replace(report(), host_id=name) for name in names]
    forged = [msgspec.structs.replace(report(), host_id=name, incarnation="x") for name in names]
    told = [heard.hear(101.0 + n, *holders, *forged) for n in range(5)]
    assert sum(len(names) for names in told) == hearing_module.CONFLICT_EVENTS_MAX


# A store that is behind what the world has seen: what is claimed, what is believed, and what is recorded then.


H1 = HostId("host-1")
EPOCH = 1007
V1 = get_version(num_replicas=2)
COUNTERS = Counters(goal=5, ordinal=4, generation=9, snapshot=7)
CLAIMS = Claims(epoch=6, ordinal=8, generation=30, snapshot=40)


def report_of(
    *replicas: tuple[int, ReplicaStatus], epoch: int = 6, sequence: int = 2, **fields: object
) -> HostReport:
    made = HostReport(
        host_id=H1,
        incarnation="i",
        sequence=sequence,
        started_at=NOW - 100,
        epoch=epoch,
        generation=30,
        resources={"CPU": 8.0},
        replicas=[
            ReplicaReport(
                replica_tag=replica_tag(TAG, ordinal),
                status=status,
                config_version=1 if ordinal < MARGIN else 2 * MARGIN,
            )
            for ordinal, status in replicas
        ],
    )
    return msgspec.structs.replace(made, **fields)


def restored(*values: object, running: tuple[tuple[int, ReplicaStatus], ...] = ()):
    """A checkpoint that is behind, and what is heard beside it."""
    known = (COUNTERS, backend_of(V1), deployment_of(), endpoint_of(), HostRecord(host_id=H1, generation=9))
    observed = observe_host(observed_hosts("host-1"), report_of(*running), NOW)
    return checkpoint_of(*known, *values), msgspec.structs.replace(observed, bucket=Map())


def test_every_number_is_raised_to_one_above_what_is_claimed_and_what_is_recorded() -> None:
    checkpoint, observed = restored()
    counters = overtake(checkpoint, observed, CLAIMS, EPOCH, NOW).counters
    assert counters == Counters(
        goal=40 + MARGIN,
        ordinal=40 + MARGIN,
        generation=40 + MARGIN,
        snapshot=40 + MARGIN + 1,  # the options of proxies, of which nobody knows
        restored_at=NOW,
        restored_epoch=EPOCH,
        restored_ordinal=4,
        restored_snapshot=40 + MARGIN,
    )


def test_snapshots_keep_their_order_and_what_the_store_does_not_know_is_gone() -> None:
    keys = ["backends.default.b", backend_key(TAG)]
    records = [
        SnapshotRecord(key=key, snapshot=Snapshot(snapshot_id=3 + n, epoch=1, content=None))
        for n, key in enumerate(keys)
    ]
    checkpoint, observed = restored(*records)
    lost = Map({"endpoints.default.x": 39, "rubbish": 40, **{r.key: 38 for r in records}})
    told = overtake(checkpoint, msgspec.structs.replace(observed, bucket=lost), CLAIMS, EPOCH, NOW).snapshots
    assert sorted(told, key=lambda key: told[key].snapshot.snapshot_id) == [
        *keys,
        "endpoints.default.x",
        HTTP_KEY,
    ]
    assert all(r.snapshot.snapshot_id > 40 and r.snapshot.epoch == EPOCH for r in told.values())
    assert told["endpoints.default.x"].snapshot.content is None
    assert told[HTTP_KEY].snapshot.voids_below == 41 + MARGIN, "what nobody knows of any more is gone by that"
    assert all(r.snapshot.snapshot_id >= 41 + MARGIN for r in told.values())


def test_what_voids_the_rest_is_published_after_all_that_is_told_anew() -> None:
    """Else a router would drop, for a moment, what the next plan changes, with all requests in flight there."""
    known = [
        SnapshotRecord(key=key, snapshot=Snapshot(snapshot_id=3 + n, epoch=1, content=None))
        for n, key in enumerate((backend_key(TAG), "endpoints.default.a"))
    ]
    checkpoint, observed = restored(*known, running=((6, ReplicaStatus.RUNNING),))
    lost = Map({record.key: 38 for record in known})
    observed = msgspec.structs.replace(observed, bucket=lost)
    draft = overtake(checkpoint, observed, CLAIMS, EPOCH, NOW)
    plan = reconcile(draft.checkpoint(), observed, EPOCH, NOW)
    told = [action for action in plan.actions if isinstance(action, PublishSnapshot)]
    assert {action.key for action in told} == {*lost, HTTP_KEY}
    assert told[-1].key == HTTP_KEY
    assert sorted(action.snapshot.snapshot_id for action in told) == [a.snapshot.snapshot_id for a in told]
    assert [action.key for action in told if action.snapshot.voids_below] == [HTTP_KEY]


def test_a_tag_that_may_have_run_since_is_not_used_unless_it_runs_and_counts_as_no_failed_start() -> None:
    states = {1: ReplicaState.STARTING, 2: ReplicaState.STARTING, 3: ReplicaState.STARTING}
    replicas = [replica_of(n, V1, state, since=NOW - 500) for n, state in states.items()]
    waiting = replica_of(4, V1, ReplicaState.SHOULD_START, host=None)
    checkpoint, observed = restored(
        *replicas, waiting, running=((1, ReplicaStatus.RUNNING), (2, ReplicaStatus.DEAD))
    )
    draft = overtake(checkpoint, observed, CLAIMS, EPOCH, NOW)
    kept = draft.get_replicas(TAG)
    assert [(r.replica_tag, r.since) for r in kept.values()] == [(replica_tag(TAG, 1), NOW)]
    plan = reconcile(draft.checkpoint(), observed, EPOCH, NOW)
    assert plan.faults == ()
    after = plan.checkpoint
    assert after.backends[TAG].start_failures == 0
    assert after.get_replicas(TAG)[replica_tag(TAG, 1)].state is not ReplicaState.STARTING
    assert {r.ordinal for r in after.get_replicas(TAG).values()} == {1, 41 + MARGIN}


def test_what_a_lost_goal_started_serves_on_until_the_wanted_ones_do() -> None:
    goal = goal_of("g5", GoalStatus.PENDING)
    gone = [replica_of(n, V1, ReplicaState.RUNNING) for n in (1, 2)]
    lost = ((6, ReplicaStatus.RUNNING), (7, ReplicaStatus.RUNNING), (8, ReplicaStatus.STARTING))
    checkpoint, observed = restored(goal, *gone, running=lost)
    draft = overtake(checkpoint, observed, CLAIMS, EPOCH, NOW)
    plan = reconcile(draft.checkpoint(), observed, EPOCH, NOW)
    assert plan.faults == ()
    after = plan.checkpoint
    routed = {r.ordinal for r in after.get_replicas(TAG).values() if r.state is ReplicaState.RUNNING}
    assert routed == {6, 7}
    (sent,) = [action.goal for action in plan.actions if isinstance(action, SendHostGoal)]
    told = {r.replica_tag: r.config_version for r in sent.replicas}
    assert {replica_tag(TAG, 6), replica_tag(TAG, 7)} < told.keys()
    assert replica_tag(TAG, 8) not in told, "what does not serve yet need not go on"
    assert told[replica_tag(TAG, 6)] == 0, "its host must not give it a configuration of other code"
    assert carried(sent) == sent, "its host can read it"
    assert after.goals[GoalId("g5")].status is GoalStatus.PENDING
    new = {r.ordinal for r in after.get_replicas(TAG).values()} - routed
    assert new
    assert min(new) > MARGIN
    serving = tuple((n, ReplicaStatus.RUNNING) for n in (6, 7, *new))
    heard = observe_host(
        observed, report_of(*serving, epoch=EPOCH, sequence=3, generation=sent.generation), NOW
    )
    later = reconcile(after, heard, EPOCH, NOW + 1).checkpoint
    left = {r.ordinal for r in later.get_replicas(TAG).values() if r.state is ReplicaState.RUNNING}
    assert new <= left
    assert len(left & {6, 7}) == 2 - len(new), "only as many as serve in their place"


def test_what_ran_by_a_goal_that_is_not_lost_is_not_adopted() -> None:
    checkpoint, observed = restored(running=((3, ReplicaStatus.RUNNING),))
    draft = overtake(checkpoint, observed, CLAIMS, EPOCH, NOW)
    after = reconcile(draft.checkpoint(), observed, EPOCH, NOW).checkpoint
    assert replica_tag(TAG, 3) not in after.get_replicas(TAG)


def test_what_may_have_been_told_to_stop_is_never_adopted() -> None:
    """Its backend was made by a lost goal, and is made again; or it served only after the first look at its host."""
    other = replica_tag(BackendTag("default/b"), 6)
    stray = ReplicaReport(replica_tag=other, status=ReplicaStatus.RUNNING, config_version=1)
    running = ReplicaReport(replica_tag=replica_tag(TAG, 7), status=ReplicaStatus.RUNNING, config_version=1)
    starting = msgspec.structs.replace(running, status=ReplicaStatus.STARTING)
    checkpoint, observed = restored()
    observed = observe_host(observed, report_of(sequence=3, replicas=[stray, starting]), NOW)
    draft = overtake(checkpoint, observed, CLAIMS, EPOCH, NOW)
    plan = reconcile(draft.checkpoint(), observed, EPOCH, NOW)
    (sent,) = [action.goal for action in plan.actions if isinstance(action, SendHostGoal)]
    assert not {other, running.replica_tag} & {r.replica_tag for r in sent.replicas}
    made_again = checkpoint_of(
        msgspec.structs.replace(backend_of(V1), backend_tag=BackendTag("default/b")), base=plan.checkpoint
    )
    # Whoever leads then does not know what this leader has sent; the host has yet to say that it obeys.
    heard = msgspec.structs.replace(
        observe_host(observed_hosts("host-1"), report_of(sequence=4, replicas=[stray, running]), NOW),
        bucket=Map(),
    )
    after = reconcile(made_again, heard, EPOCH + 1, NOW + 1).checkpoint
    assert other not in after.get_replicas(BackendTag("default/b"))
    assert running.replica_tag not in after.get_replicas(TAG)


def test_configurations_are_given_numbers_that_no_replica_has() -> None:
    serving = [replica_of(n, V1, ReplicaState.RUNNING) for n in (1, 2)]
    checkpoint, observed = restored(
        *serving, running=((1, ReplicaStatus.RUNNING), (2, ReplicaStatus.RUNNING))
    )
    draft = overtake(checkpoint, observed, CLAIMS, EPOCH, NOW)
    backend = draft.backends[TAG]
    assert backend.target.config_version > draft.counters.restored_snapshot > MARGIN
    assert backend.newest_code_version > MARGIN
    assert backend.last_good == backend.target
    after = reconcile(draft.checkpoint(), observed, EPOCH, NOW).checkpoint
    assert ReplicaState.UPDATING in {r.state for r in after.get_replicas(TAG).values()}
    assert not [r for r in after.get_replicas(TAG).values() if r.state is ReplicaState.SHOULD_STOP]


def test_what_a_restore_gave_is_not_given_again_by_another_one_to_the_same_state() -> None:
    """Of goals and versions nobody tells but a controller, which may be started anew."""
    checkpoint, observed = restored(*(replica_of(n, V1, ReplicaState.RUNNING) for n in (1, 2)))
    once = overtake(checkpoint, observed, CLAIMS, EPOCH, NOW)
    seen = Claims(epoch=EPOCH, snapshot=once.counters.snapshot)
    again = overtake(checkpoint, observed, seen, 2 * EPOCH, NOW)
    given = once.counters
    assert again.counters.goal > given.goal + MARGIN / 2
    assert again.counters.ordinal > given.ordinal + MARGIN / 2
    first, second = once.backends[TAG], again.backends[TAG]
    assert second.target.config_version > first.newest_config_version + MARGIN / 2
    assert second.newest_code_version > first.newest_code_version + MARGIN / 2


def test_replicas_take_the_new_number_also_when_they_became_fewer_and_a_start_failed() -> None:
    """They have that configuration already: nothing is put at risk by it."""
    backend = msgspec.structs.replace(backend_of(V1), start_failures=1)
    running = ((1, ReplicaStatus.RUNNING), (2, ReplicaStatus.RUNNING))
    serving = [replica_of(n, V1, ReplicaState.RUNNING) for n, _ in running]
    checkpoint, observed = restored(*serving, backend, running=running)
    draft = overtake(checkpoint, observed, CLAIMS, EPOCH, NOW)
    backend = draft.backends[TAG]
    fewer = msgspec.structs.replace(backend.target.backend_config, num_replicas=1)
    target = msgspec.structs.replace(backend.target, backend_config=fewer)
    draft.put(msgspec.structs.replace(backend, target=target, last_good=target))
    after = reconcile(draft.checkpoint(), observed, EPOCH, NOW).checkpoint
    updating = [r for r in after.get_replicas(TAG).values() if r.state is ReplicaState.UPDATING]
    assert [r.config_version for r in updating] == [target.config_version]


def test_it_is_waited_for_everybody_who_may_speak() -> None:
    checkpoint, observed = restored()
    since = observed.since
    assert since is not None
    assert claims_complete_at(checkpoint, observed, since) == since + CLAIMS_WAIT_S
    silent = checkpoint_of(HostRecord(host_id=HostId("host-2"), generation=1), base=checkpoint)
    assert claims_complete_at(silent, observed, since) == since + HOST_LOST_AFTER_S
    away = msgspec.structs.replace(observed, since=None)
    assert claims_complete_at(checkpoint, away, since) is None


@pytest.mark.parametrize(
    "said",
    [
        report_of((AHEAD_MAX + 100, ReplicaStatus.RUNNING)),
        report_of(generation=AHEAD_MAX + 100),
        report_of(epoch=2**62),
        ProxyReport(
            proxy_id=ProxyId("p"), incarnation="i", sequence=1, started_at=NOW, applied_snapshot_id=2**63 - 1
        ),
    ],
)
def test_an_absurd_claim_is_refused_with_its_whole_report(said: HostReport | ProxyReport) -> None:
    refused: list[str] = []
    hearing = TermObservations(NOW, lambda kind, _, error: refused.append(f"{kind} {error}"))
    hearing.issued = Claims(epoch=6, goal=5, ordinal=4, generation=9, snapshot=7)
    hearing.on_report(said, NOW)
    hearing.take_in(Checkpoint())
    assert [text for text in refused if "cannot have been given" in text] == refused
    assert (len(refused), hearing.claims) == (1, Claims())
    assert not hearing.observed.hosts
    assert not hearing.observed.proxies


def test_an_absurd_value_of_the_bucket_is_to_be_put_right() -> None:
    refused: list[str] = []
    hearing = TermObservations(NOW, lambda kind, key, _: refused.append(f"{kind} {key}"))
    hearing.on_bucket_entries({"endpoints.a": (1, 2**62), "endpoints.b": (2, 41)}, whole=True)
    assert dict(hearing.observed.bucket or {}) == {"endpoints.a": 0, "endpoints.b": 41}
    assert (refused, hearing.claims.snapshot) == (["snapshot endpoints.a"], 41)


def test_a_host_that_has_heard_of_a_leader_claims_its_epoch() -> None:
    assert get_report_claims(report_of(epoch=6, leader_epoch=37)).epoch == 37
    assert get_report_claims(report_of(epoch=6)).epoch == 6, "as hosts of an older version report"


def test_a_tag_without_a_number_claims_nothing() -> None:
    odd = ReplicaReport(replica_tag=replica_tag(TAG, 1).replace("#1", "#-x"), status=ReplicaStatus.RUNNING)  # type: ignore[arg-type]
    assert get_report_claims(report_of(replicas=[odd])).ordinal == 0


def test_raised_numbers_leave_room_for_ages() -> None:
    assert (2**53 - 1) // (AHEAD_MAX + MARGIN) > 1_000_000


def test_goals_that_are_over_stay_so() -> None:
    checkpoint, observed = restored(goal_of("g4"))
    draft = overtake(checkpoint, observed, CLAIMS, EPOCH, NOW)
    assert (ObjectKind.GOAL, "g4") not in draft.changes().deletes
    assert draft.goals[GoalId("g4")].status is GoalStatus.SUCCEEDED
