"""What routers are told: only what changed, under rising ids, and that what is gone is gone."""

from __future__ import annotations

import pytest

from serve_common.names import BackendTag
from serve_common.subjects import backend_key, endpoint_key
from serve_common.wires.commands import DeleteDeployment
from serve_common.wires.snapshots import BackendSnapshot, EndpointSnapshot
from serve_controller.core import snapshots
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.reconcile import PublishSnapshot, RetractSnapshot
from tests.simulation.closed_loop import BAD_CODE, Loop, deploy

A = BackendTag("default/a")


def published(loop: Loop, seconds: float = 0.1) -> list[str]:
    return [action.key for action in loop.step(seconds).actions if isinstance(action, PublishSnapshot)]


def test_a_change_of_one_deployment_publishes_no_key_of_another() -> None:
    loop = Loop()
    loop.command(deploy("a"))
    loop.command(deploy("b"))
    loop.settle()
    before = dict(loop.bucket)
    loop.command(deploy("b", route="/new"))
    loop.settle()
    changed = {key for key in loop.bucket if loop.bucket[key] != before.get(key)}
    assert changed == {"endpoints.default.b"}


def test_a_backend_comes_before_its_endpoint_and_goes_after_it() -> None:
    loop = Loop()
    loop.command(deploy())
    assert published(loop) == [backend_key(A), "endpoints.default.a"]
    loop.settle()
    before = loop.bucket[backend_key(A)].snapshot_id
    loop.command(DeleteDeployment(name="a"))
    loop.settle()
    gone = {key: snapshot.snapshot_id for key, snapshot in loop.bucket.items()}
    assert before < gone["endpoints.default.a"] < gone[backend_key(A)]
    assert all(snapshot.content is None for snapshot in loop.bucket.values())


def test_what_fails_at_first_has_no_endpoint() -> None:
    loop = Loop()
    loop.command(deploy(code=BAD_CODE, route="/a"))
    loop.steps(40, 0.2)
    assert loop.backend().halted
    assert loop.bucket["endpoints.default.a"].content is None
    loop.command(deploy(route="/a"))
    loop.settle()
    assert isinstance(loop.bucket["endpoints.default.a"].content, EndpointSnapshot)


def test_a_replica_that_stops_drains_before_it_leaves_the_snapshot() -> None:
    loop = Loop()
    loop.command(deploy(num=1))
    loop.settle()
    (tag,) = loop.running()
    for host in loop.hosts:
        host.is_deaf = True
    loop.command(deploy(num=0))
    loop.step()
    content = loop.bucket[backend_key(A)].content
    assert isinstance(content, BackendSnapshot)
    assert (content.replicas, content.draining) == ([], [tag])


def test_an_unknown_key_is_retracted_and_a_stale_value_put_right() -> None:
    loop = Loop()
    loop.command(deploy())
    loop.settle()
    right = dict(loop.bucket)
    loop.bucket["backends.default.stranger"] = loop.bucket[backend_key(A)]
    loop.bucket[endpoint_key("default/a")] = loop.bucket[backend_key(A)]
    plan = loop.step()
    assert RetractSnapshot("backends.default.stranger") in plan.actions
    assert loop.bucket == right


def test_the_memory_of_what_is_gone_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "TOMBSTONES_MAX", 3)
    loop = Loop()
    for name in "abcd":
        loop.command(deploy(name, num=0))
    loop.settle()
    for name in "abcd":
        loop.command(DeleteDeployment(name=name))
    loop.settle()
    assert len(loop.checkpoint.snapshots) == 3
    assert set(loop.bucket) == set(loop.checkpoint.snapshots)
    assert Checkpoint().snapshots == {}
