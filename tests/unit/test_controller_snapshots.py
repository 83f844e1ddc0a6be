"""What routers are told: only what changed, under rising ids, and that what is gone is gone."""

from __future__ import annotations

import pytest

from serve_common.api.commands import DeleteDeployment, SetHttpOptions, SetTraffic, ShadowTraffic
from serve_common.config.endpoint import HttpOptions
from serve_common.names import BackendTag, EndpointTag
from serve_common.protocol.snapshots import BackendSnapshot, EndpointSnapshot, HttpSnapshot
from serve_common.protocol.subjects import backend_key, endpoint_key
from serve_controller.core import snapshots
from serve_controller.core.reconcile import PublishSnapshot, RetractSnapshot
from tests.simulation.closed_loop import Loop
from tests.simulation.orders import BAD_CODE, create_backend, create_endpoint, deploy

A = BackendTag("default/a")


def endpoint_snapshot(loop: Loop, key: str) -> EndpointSnapshot:
    content = loop.bucket[key].content
    assert isinstance(content, EndpointSnapshot)
    return content


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
    loop.bucket[endpoint_key(EndpointTag("default/a"))] = loop.bucket[backend_key(A)]
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


def test_traffic_and_shadows_reach_routers_by_the_endpoints_key_alone() -> None:
    loop = Loop()
    loop.command(create_backend("b"))
    loop.command(create_backend("c"))
    loop.command(create_endpoint("e", route="/e", b=1.0))
    loop.settle()
    before = dict(loop.bucket)
    loop.done(SetTraffic(endpoint="e", weights={"b": 0.25, "c": 0.75}))
    loop.done(ShadowTraffic(endpoint="e", backend_tag="c", proportion=0.5))
    assert {key for key in loop.bucket if loop.bucket[key] != before.get(key)} == {"endpoints.default.e"}
    content = endpoint_snapshot(loop, "endpoints.default.e")
    assert (content.route, content.traffic) == ("/e", {"default/b": 0.25, "default/c": 0.75})
    assert content.shadows == {"default/c": 0.5}


def test_http_options_have_a_key_of_their_own() -> None:
    loop = Loop()
    loop.command(deploy())
    loop.settle()
    before = dict(loop.bucket)
    loop.done(SetHttpOptions(options={"request_timeout_s": 5}))
    assert {key for key in loop.bucket if loop.bucket[key] != before.get(key)} == {"http.options"}
    assert loop.bucket["http.options"].content == HttpSnapshot(options=HttpOptions(request_timeout_s=5.0))


def test_a_replica_that_is_not_known_is_never_routed_to_and_is_stopped() -> None:
    """A host comes back with replicas that were given up while it was lost."""
    loop = Loop()
    loop.command(deploy(num=2))
    loop.settle()
    lost = next(host for host in loop.hosts if host.running())
    orphans = lost.running()
    lost.is_up = False
    loop.steps(12, 1.0)
    assert not orphans & set(loop.replicas())
    lost.is_up = True
    loop.step()
    assert not orphans & loop.routed()
    loop.settle()
    assert not orphans & lost.running(), "the forgotten ones are stopped"
    assert len(loop.running()) == 2
