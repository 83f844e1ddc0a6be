"""What is heard: late and doubled reports undo nothing, and silence is judged fairly."""

from __future__ import annotations

import msgspec
import pytest

from serve_common.errors import LimitReached
from serve_common.names import HostId, ProxyId
from serve_common.protocol.reports import HostReport, ProxyReport
from serve_controller.core import observed as observed_module
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.observed import (
    FORGET_AFTER_S,
    HOST_LOST_AFTER_S,
    HOST_SUSPECT_AFTER_S,
    PROXY_LOST_AFTER_S,
    HeldByAnother,
    HostStatus,
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
from serve_controller.shell import observations as hearing_module
from serve_controller.shell.observations import TermObservations

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
        with pytest.raises(HeldByAnother):
            observe_host(observed, report(9, life=life, leaving=leaving), 101.0 + seconds)
        with pytest.raises(HeldByAnother):
            observe_proxy(heard, forged, 101.0 + seconds)
    at = 101.0 + HOST_SUSPECT_AFTER_S
    assert observe_host(observed, report(1, life=life), at).hosts[HOST].report.started_at == life
    assert observe_proxy(heard, forged, at).proxies[ProxyId("p")].report is forged
    away = observe_break(observed, None)
    with pytest.raises(HeldByAnother):
        observe_host(away, report(1, life=life), 9e9)


def test_who_guesses_when_a_life_began_is_another_all_the_same() -> None:
    forged = msgspec.structs.replace(report(9), incarnation="guessed")
    with pytest.raises(HeldByAnother):
        observe_host(observe_host(NOBODY, report(5), 101.0), forged, 101.0)
    with pytest.raises(HeldByAnother):
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
        with pytest.raises(HeldByAnother):
            observe_host(NOBODY, other, 100.0 + seconds, holder)
    assert HOST in observe_host(NOBODY, other, 100.0 + HOST_SUSPECT_AFTER_S, holder).hosts
    with pytest.raises(HeldByAnother):
        observe_proxy(NOBODY, proxy(life=2), 100.0, holder_digest(proxy()))


def test_silence_that_nobody_could_have_heard_frees_no_id() -> None:
    observed = observe_round_trip(observe_host(NOBODY, report(5), 101.0), 102.0)
    with pytest.raises(HeldByAnother):
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
            self.hearing.hear(said, now)
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
        heard.hearing.hear(said, 101.5)
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
