"""Looking only at what news make necessary comes to the same as looking at everything."""

from __future__ import annotations

import msgspec
from hypothesis import HealthCheck, given, settings

from serve_common.api.views import GoalStatus
from serve_controller.core.checkpoint import PARTS, Checkpoint
from serve_controller.core.objects import Key, ObjectChanges, Replica, get_key
from serve_controller.core.reconcile import ReconcilePlan, reconcile
from tests.properties.controller_stories import bring_calm, happen, new_hosts, stories
from tests.support.control_loop.attentive_loop import AttentiveLoop
from tests.support.control_loop.closed_loop import Loop, check_converged


def touched(plan: ReconcilePlan) -> list[Key]:
    return [*map(get_key, plan.changes.puts), *plan.changes.deletes]


def is_retold(loop: AttentiveLoop, plan: ReconcilePlan, key: Key) -> bool:
    """Whether only the reason why a replica waits for room would be told anew, with other numbers in it."""
    before, after = loop.checkpoint.lookup(key), plan.checkpoint.lookup(key)
    if not isinstance(before, Replica) or not isinstance(after, Replica):
        return False
    return after == msgspec.structs.replace(before, message=after.message)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
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


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(stories)
def test_after_any_story_the_calm_brings_what_is_wanted_to_who_looks_only_at_news(story):
    loop = AttentiveLoop(*new_hosts())
    for kind, value in story:
        happen(loop, kind, value)
    bring_calm(loop)
    check_converged(loop)
    assert not loop.checkpoint.pending


# What is recorded stays consistent in itself, and who looks only at news settles where who looks at all does.


class UncheckedLoop(AttentiveLoop):
    """As `AttentiveLoop`; the promises of single plans are others' to check."""

    def plan(self) -> ReconcilePlan:
        self.attention = self.hearing.fold(self.checkpoint, self.now)
        self.observed = self.hearing.observed
        return reconcile(self.checkpoint, self.observed, self.epoch, self.now, self.attention)


def check_references(checkpoint: Checkpoint) -> None:
    """Nothing leads to what is not there, and no two claim the same."""
    routes = [e.target.route for e in checkpoint.endpoints.values() if e.target.route is not None]
    assert len(routes) == len(set(routes)), f"a route belongs to two endpoints: {routes}"
    for endpoint in checkpoint.endpoints.values():
        for tag in {tag for config in endpoint.configs() for tag in config.backend_tags()}:
            assert tag in checkpoint.backends, f"{endpoint.endpoint_tag} sends to {tag}, which is gone"
            assert not checkpoint.backends[tag].deleting, f"{endpoint.endpoint_tag} sends to {tag}"
    for application in checkpoint.applications.values():
        assert application.target.ingress in application.target.deployments
        for tag in application.target.deployments:
            backend = checkpoint.backends.get(tag)
            assert application.deleting or backend is not None, f"{application.name} lacks {tag}"
            goal = None if backend is None else checkpoint.goals.get(backend.goal_id)
            assert goal is None or application.deleting or goal.status is not GoalStatus.SUPERSEDED


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(stories)
def test_whatever_happens_indices_and_references_are_true(story):
    loop = UncheckedLoop(*new_hosts())
    for kind, value in story:
        happen(loop, kind, value)
        rebuilt = Checkpoint().applied(ObjectChanges(tuple(loop.checkpoint.all_objects())))
        for name in PARTS:
            assert getattr(rebuilt, name) == getattr(loop.checkpoint, name), name
        check_references(loop.checkpoint)


def settled(loop: Loop) -> dict[str, object]:
    """Everything but numbers and times, which depend on which plan came first."""
    checkpoint = loop.checkpoint
    return {
        "backends": {
            tag: (b.num_wanted, b.halted, b.target.version, b.target.backend_config, b.target.replica_config)
            for tag, b in checkpoint.backends.items()
        },
        "endpoints": {tag: e.target for tag, e in checkpoint.endpoints.items()},
        "applications": {name: a.target for name, a in checkpoint.applications.items()},
        "goals": {goal_id: g.status for goal_id, g in checkpoint.goals.items()},
        "routed": {tag: len(loop.routed(tag)) for tag in checkpoint.backends},
        "http": None if checkpoint.http is None else checkpoint.http.target,
    }


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(stories)
def test_who_looks_only_at_news_settles_where_who_looks_at_everything_does(story):
    one, other = UncheckedLoop(*new_hosts()), Loop(*new_hosts(), is_checked=False)
    for loop in (one, other):
        for kind, value in story:
            happen(loop, kind, value)
        bring_calm(loop)
    assert settled(one) == settled(other)
