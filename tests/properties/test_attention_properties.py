"""Looking only at what news make necessary comes to the same as looking at everything."""

from __future__ import annotations

import msgspec
from hypothesis import HealthCheck, given, settings

from serve_controller.core.objects import Key, Replica, key_of
from serve_controller.core.reconcile import ReconcilePlan
from tests.properties.controller_stories import happen, new_hosts, stories
from tests.simulation.attentive_loop import AttentiveLoop
from tests.simulation.closed_loop import check_converged
from tests.simulation.pure_host import PureHost


def touched(plan: ReconcilePlan) -> list[Key]:
    return [*map(key_of, plan.changes.puts), *plan.changes.deletes]


def is_retold(loop: AttentiveLoop, plan: ReconcilePlan, key: Key) -> bool:
    """Whether only the reason why a replica waits for room would be told anew, with other numbers in it."""
    before, after = loop.checkpoint.lookup(key), plan.checkpoint.lookup(key)
    if not isinstance(before, Replica) or not isinstance(after, Replica):
        return False
    return after == msgspec.structs.replace(before, message=after.message)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(stories)
def test_at_rest_a_look_at_everything_would_do_nothing_more(story):
    loop = AttentiveLoop(*new_hosts())
    for kind, value in story:
        happen(loop, kind, value)
        loop.come_to_rest()
        missed = loop.overlooked()
        done = [key for key in touched(missed) if not is_retold(loop, missed, key)]
        assert done == [], f"after {kind} {value}: {missed.changes}"
        assert missed.actions == (), f"after {kind} {value}: {missed.actions}"


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(stories)
def test_after_any_story_the_calm_brings_what_is_wanted_to_who_looks_only_at_news(story):
    loop = AttentiveLoop(*new_hosts())
    for kind, value in story:
        happen(loop, kind, value)
    loop.on_bus_break(loop.now)
    loop.are_proxies_slow = False
    for host in loop.hosts:
        host.is_deaf, host.is_unhealthy, host.is_leaving = False, set(), False
        host.dies_at = host.raises_at = set()
        host.hangs_in_starting = False
        host.finish_drains()
        if not host.is_up:
            host.is_up = True
            host.restart()
    loop.hosts += [PureHost(f"host-{number}", cpus=200) for number in range(3, 9)]
    loop.steps(4, 16.0)
    loop.steps(2, 400.0)
    loop.settle(limit=200, seconds=2.0)
    check_converged(loop)
    assert not loop.checkpoint.pending
