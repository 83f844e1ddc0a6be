"""What must hold for every story: any commands, any reports (true ones, late ones and lies), any deaths."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serve_common.names import BackendTag, HostId
from serve_common.wires.commands import DeleteDeployment
from serve_common.wires.host import ReplicaReport, ReplicaStatus
from serve_common.wires.views import GoalStatus
from serve_controller.core.checkpoint import Checkpoint, Draft
from serve_controller.core.observed import observe_break, observe_host, observe_proxy
from serve_controller.core.reconcile import reconcile
from tests.simulation.closed_loop import (
    BAD_CODE,
    Loop,
    PureHost,
    all_replicas,
    check_converged,
    check_fixpoint,
    contents,
    deploy,
)

names = st.sampled_from(["a", "a", "b"])
numbers = st.integers(0, 6)
deploys = st.builds(
    deploy,
    names,
    version=st.sampled_from(["v1", "v2", None]),
    num=st.integers(0, 5),
    config=st.sampled_from(["one", "one", "two", "two", "kills", "refused"]),
    code=st.sampled_from(["good:Code"] * 4 + [BAD_CODE]),
    cpus=st.sampled_from([0.5, 0.5, 1.0, 1.0, 3.0, 9.0]),
)
operations = st.one_of(
    st.tuples(st.just("deploy"), deploys),
    st.tuples(st.just("deploy"), deploys),
    st.tuples(st.just("deploy"), deploys),
    st.tuples(st.just("delete"), names),
    st.tuples(st.just("wait"), st.sampled_from([0.1, 0.1, 0.5, 2.0, 4.0, 12.0])),
    st.tuples(st.just("settle"), st.just(4)),
    st.tuples(st.just("settle"), st.just(8)),
    st.tuples(st.just("blind wait"), st.sampled_from([0.1, 2.0])),
    st.tuples(st.just("kill"), numbers),
    st.tuples(st.just("unhealthy"), numbers),
    st.tuples(st.just("restart host"), numbers),
    st.tuples(st.just("host goes"), numbers),
    st.tuples(st.just("host comes"), numbers),
    st.tuples(st.just("host is deaf"), numbers),
    st.tuples(st.just("proxies are slow"), st.booleans()),
    st.tuples(st.just("take over"), st.none()),
    st.tuples(st.just("bucket is lost"), st.none()),
    st.tuples(st.just("bus goes"), st.none()),
    st.tuples(st.just("bus comes"), st.none()),
)
stories = st.lists(operations, min_size=4, max_size=20)


def new_loop(is_checked: bool = True) -> Loop:
    hosts = [PureHost("host-1", cpus=4), PureHost("host-2", cpus=3)]
    for host in hosts:
        host.dies_at, host.raises_at = {"kills"}, {"refused"}
    return Loop(*hosts, is_checked=is_checked)


def happen(loop: Loop, kind: str, value: object) -> None:
    """One thing happens, and the controller plans."""
    host = loop.hosts[value % 2] if isinstance(value, int) else loop.hosts[0]
    match kind:
        case "deploy":
            loop.command(value)
        case "delete":
            loop.command(DeleteDeployment(name=value))
        case "wait":
            loop.steps(2, value)
        case "settle":
            loop.steps(value, 0.2)
        case "blind wait":
            loop.now += value
        case "kill":
            for tag in sorted(host.running())[:1]:
                host.kill(tag)
        case "unhealthy":
            host.is_unhealthy ^= set(sorted(host.held)[:1])
        case "restart host":
            host.restart()
        case "host goes":
            host.is_up = False
        case "host comes":
            if not host.is_up:
                host.is_up = True
                host.restart()
        case "host is deaf":
            host.is_deaf = not host.is_deaf
        case "proxies are slow":
            loop.are_proxies_slow = value
        case "take over":
            loop.take_over()
        case "bucket is lost":
            loop.bucket.clear()
        case "bus goes":
            loop.observed = observe_break(loop.observed, None)
        case "bus comes":
            loop.observed = observe_break(loop.observed, loop.now)
    loop.cycle()


@settings(max_examples=200, deadline=None)
@given(stories)
def test_whatever_happens_every_plan_keeps_its_promises_and_comes_to_rest(story):
    loop = new_loop()
    for kind, value in story:
        happen(loop, kind, value)
        check_fixpoint(loop)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(stories)
def test_after_any_story_the_calm_brings_what_is_wanted(story):
    loop = new_loop()
    for kind, value in story:
        happen(loop, kind, value)
    loop.observed = observe_break(loop.observed, loop.now)
    loop.are_proxies_slow = False
    for host in loop.hosts:
        host.is_deaf, host.is_unhealthy = False, set()
        host.dies_at = host.raises_at = set()
        if not host.is_up:
            host.is_up = True
            host.restart()
    # Room for everything: what waited for room starts. What waited to be tried again is tried again.
    loop.hosts.append(PureHost("host-3", cpus=200))
    loop.steps(4, 16.0)
    loop.settle(limit=200, seconds=2.0)
    check_converged(loop)
    assert all(g.status is not GoalStatus.PENDING for g in loop.checkpoint.goals.values())


lies = st.lists(
    st.tuples(
        numbers,
        st.sampled_from(ReplicaStatus),
        st.integers(0, 4),
        st.integers(0, 4),
        st.integers(-2, 2),
        st.booleans(),
    ),
    max_size=6,
)


@settings(max_examples=200, deadline=None)
@given(stories.map(lambda story: story[:6]), lies)
def test_no_report_whatever_it_says_makes_a_plan_break_its_promises(story, told):
    loop = new_loop()
    for kind, value in story:
        happen(loop, kind, value)
    for number, status, config, refused, generations, is_leaving in told:
        tags = sorted(all_replicas(loop.checkpoint))
        host = loop.hosts[number % 2]
        report = host.report()
        lie = [
            ReplicaReport(
                replica_tag=tag, status=status, config_version=config, config_error_version=refused, error="x"
            )
            for tag in [*tags[number : number + 3], "default/a#999", "nobody"]
        ]
        generation = max(0, loop.checkpoint.counters.generation + generations)
        report = msgspec.structs.replace(
            report, replicas=lie, epoch=loop.epoch, generation=generation, leaving=is_leaving
        )
        loop.observed = observe_host(loop.observed, report, loop.now)
        plan = loop.plan()
        loop.checkpoint = loop.checkpoint.applied(plan.changes)
        check_fixpoint(loop)


@settings(max_examples=60, deadline=None)
@given(stories, st.randoms(use_true_random=False))
def test_what_is_heard_in_another_order_comes_to_the_same_knowledge(story, dice):
    loop = new_loop(is_checked=False)
    for kind, value in story[:6]:
        happen(loop, kind, value)
    reports = [host.report() for host in loop.hosts for _ in range(3)]
    shuffled = list(reports)
    dice.shuffle(shuffled)
    observed, again = loop.observed, loop.observed
    for report in reports:
        observed = observe_host(observed, report, loop.now)
    for report in [*shuffled, *shuffled]:
        again = observe_host(again, report, loop.now)
    assert observed == again
    for proxy in loop.observed.proxies.values():
        assert observe_proxy(loop.observed, proxy.report, proxy.heard_at) == loop.observed


@settings(max_examples=60, deadline=None)
@given(stories)
def test_a_plan_changes_neither_the_checkpoint_nor_what_was_heard(story):
    loop = new_loop(is_checked=False)
    for kind, value in story:
        before, heard = contents(loop.checkpoint), loop.observed
        plan = reconcile(loop.checkpoint, loop.observed, loop.epoch, loop.now)
        assert contents(loop.checkpoint) == before
        assert loop.observed is heard
        assert plan.look_again_at is None or plan.look_again_at > loop.now
        happen(loop, kind, value)


@settings(max_examples=60, deadline=None)
@given(stories, st.integers(0, 3))
def test_a_defect_in_one_backends_part_stops_no_other(story, at):
    loop = new_loop(is_checked=False)
    for kind, value in story:
        happen(loop, kind, value)
    loop.command(deploy("healthy", num=1))
    broken = Draft(loop.checkpoint)
    replicas = [r for r in all_replicas(loop.checkpoint).values() if r.backend_tag != "default/healthy"]
    for replica in replicas[at : at + 1]:
        broken.put(msgspec.structs.replace(replica, config_version=987_654))
    loop.checkpoint = broken.checkpoint()
    plan = reconcile(loop.checkpoint, loop.observed, loop.epoch, loop.now)
    assert plan.checkpoint.replicas[BackendTag("default/healthy")]


@pytest.mark.parametrize("host_id", ["host-1", "host-2"])
def test_a_host_whose_goal_cannot_be_made_is_sent_none_and_the_others_are(host_id):
    loop = Loop(PureHost("host-1"), PureHost("host-2"))
    loop.command(deploy(num=4))
    loop.settle()
    draft = Draft(loop.checkpoint)
    victim = next(r for r in loop.replicas().values() if r.host_id == host_id)
    draft.put(msgspec.structs.replace(victim, config_version=987_654))
    loop.checkpoint = draft.checkpoint()
    loop.take_over()
    loop.hear_hosts()
    plan = reconcile(loop.checkpoint, loop.observed, loop.epoch, loop.now)
    sent = {HostId(a.goal.host_id) for a in plan.actions if hasattr(a, "goal")}
    told = {tag for host in loop.hosts for tag in host.running()}
    assert len(told) == 4
    assert host_id not in sent or plan.faults == ()
    assert sent >= {"host-1", "host-2"} - {host_id}


def test_an_empty_world_asks_for_nothing() -> None:
    loop = Loop()
    plan = reconcile(Checkpoint(), loop.observed, 1, loop.now)
    assert not plan.changes
    assert plan.actions == ()
    assert plan.look_again_at is None
