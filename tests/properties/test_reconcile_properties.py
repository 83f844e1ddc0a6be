"""What must hold for every story: any commands, any reports (true ones, late ones and lies), any deaths."""

from __future__ import annotations

from random import Random

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from immutables import Map

from serve_common.api.commands import ChangeReply, Deploy, Rollback
from serve_common.errors import CommandRefused
from serve_common.names import BackendTag, HostId
from serve_common.protocol.reports import ReplicaReport, ReplicaStatus
from serve_controller.core.checkpoint import Checkpoint, Draft
from serve_controller.core.commands import decide
from serve_controller.core.observed import (
    HOST_SUSPECT_AFTER_S,
    observe_bucket,
    observe_host,
    observe_proxy,
)
from serve_controller.core.reconcile import reconcile
from tests.properties.controller_stories import bring_calm, commands, happen, new_hosts, numbers, stories
from tests.support.control_loop.closed_loop import Loop, check_converged, check_fixpoint
from tests.support.control_loop.orders import deploy
from tests.support.control_loop.promises import all_replicas, contents
from tests.support.control_loop.pure_host import PureHost


def new_loop(is_checked: bool = True) -> Loop:
    return Loop(*new_hosts(), is_checked=is_checked)


@settings(max_examples=80, deadline=None)
@given(stories)
def test_whatever_happens_every_plan_keeps_its_promises_and_comes_to_rest(story):
    loop = new_loop()
    for kind, value in story:
        happen(loop, kind, value)
        check_fixpoint(loop)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(stories)
def test_after_any_story_the_calm_brings_what_is_wanted(story):
    loop = new_loop()
    for kind, value in story:
        happen(loop, kind, value)
    bring_calm(loop)
    check_converged(loop)
    assert not loop.checkpoint.pending


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


@settings(max_examples=80, deadline=None)
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
        loop.on_report(report)
        plan = loop.plan()
        loop.checkpoint = loop.checkpoint.applied(plan.changes)
        check_fixpoint(loop)


@settings(max_examples=40, deadline=None)
@example([("restart host", 0), ("bus goes", None)], Random(0))
@given(stories, st.randoms(use_true_random=False))
def test_what_is_heard_in_another_order_comes_to_the_same_knowledge(story, dice):
    loop = new_loop(is_checked=False)
    for kind, value in story[:6]:
        happen(loop, kind, value)
    happen(
        loop, "bus comes", None
    )  # silence frees the id of a host that was restarted only while the bus is there
    loop.now += HOST_SUSPECT_AFTER_S
    reports = [host.report() for host in loop.hosts for _ in range(3)]
    shuffled = list(reports)
    dice.shuffle(shuffled)
    observed, again = loop.observed, loop.observed
    for report in reports:
        observed = observe_host(observed, report, loop.now)
    for report in [*shuffled, *shuffled]:
        again = observe_host(again, report, loop.now)
    assert observed == again
    for proxy in list(loop.observed.proxies.values()):
        assert observe_proxy(loop.observed, proxy.report, proxy.last_seen_at) == loop.observed


@settings(max_examples=40, deadline=None)
@given(stories)
def test_a_plan_changes_neither_the_checkpoint_nor_what_was_heard(story):
    loop = new_loop(is_checked=False)
    for kind, value in story:
        before, heard = contents(loop.checkpoint), loop.observed
        plan = reconcile(loop.checkpoint, loop.observed, loop.epoch, loop.now)
        assert contents(loop.checkpoint) == before
        assert loop.observed is heard
        assert all(time.at > loop.now for time in plan.due)
        happen(loop, kind, value)


@settings(max_examples=40, deadline=None)
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
    loop.observed = observe_bucket(loop.observed, Map())
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
    assert plan.due == ()


@settings(max_examples=40, deadline=None)
@given(stories, commands)
def test_a_command_again_comes_to_the_same_and_a_refusal_changes_nothing(story, command):
    """Except where another answer is what was asked for: new code without a name, and one step back."""
    loop = new_loop(is_checked=False)
    for kind, value in story[:8]:
        happen(loop, kind, value)
    before = contents(loop.checkpoint)
    try:
        accepted = decide(loop.checkpoint, command, loop.now)
    except CommandRefused as refusal:
        assert contents(loop.checkpoint) == before
        with pytest.raises(type(refusal)):
            decide(loop.checkpoint, command, loop.now)
        return
    assert contents(loop.checkpoint) == before, "a decision changes nothing that others hold"
    once = loop.checkpoint.applied(accepted.changes)
    is_new_each_time = isinstance(command, Deploy) and command.version is None
    if not is_new_each_time and not isinstance(command, Rollback):
        again = decide(once, command, loop.now)
        assert not again.changes
        if accepted.changes and isinstance(again.reply, ChangeReply):
            assert again.reply.goal_id == accepted.goal_id, "whoever asks again can wait for the same"
    with_id = {"request_id": "r1"} if "request_id" in command.__struct_fields__ else None
    if with_id is not None:
        first = decide(loop.checkpoint, msgspec.structs.replace(command, **with_id), loop.now)
        once = loop.checkpoint.applied(first.changes)
        assert not decide(once, msgspec.structs.replace(command, **with_id), loop.now).changes
