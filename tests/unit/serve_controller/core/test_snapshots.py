"""What routers are told: only what changed, under rising ids, and that what is gone is gone."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from serve_common.api.commands import (
    DeleteDeployment,
    Deploy,
    DeployApplication,
    SetHttpOptions,
    SetTraffic,
    ShadowTraffic,
    UpdateBackendConfig,
)
from serve_common.config.backend import (
    METHODS,
    BackendConfig,
    BackpressureConfig,
    CircuitBreaker,
    HttpOptions,
    OutlierEjection,
    ReplicaConfig,
    ReplicaPolicyName,
)
from serve_common.errors import BadField
from serve_common.names import BackendTag, EndpointTag, ReplicaTag
from serve_common.protocol.reports import ReplicaGoal
from serve_common.protocol.snapshots import (
    BackendProtection,
    BackendSnapshot,
    EndpointSnapshot,
    HttpSnapshot,
    Snapshot,
)
from serve_common.protocol.subjects import backend_key, endpoint_key
from serve_controller.core import snapshots
from serve_controller.core.forecast import forecast
from serve_controller.core.objects import ReplicaState
from serve_controller.core.placement import GOAL_BYTES_MAX, estimate_goal_bytes
from serve_controller.core.reconcile import PublishSnapshot, RetractSnapshot
from serve_controller.core.snapshots import derive_backend
from serve_controller.core.versions import replica_part
from tests.support.control_loop.closed_loop import Loop
from tests.support.control_loop.orders import (
    BAD_CODE,
    application,
    create_backend,
    create_endpoint,
    deploy,
    spec,
)
from tests.support.control_loop.pure_host import PureHost
from tests.support.controller_parts import backend_of, get_version, replica_of

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
    loop.done(deploy("b"))
    before = dict(loop.bucket)
    loop.done(deploy("b", route="/new"))
    changed = {key for key in loop.bucket if loop.bucket[key] != before.get(key)}
    assert changed == {"endpoints.default.b"}


def test_a_backend_comes_before_its_endpoint_and_goes_after_it() -> None:
    loop = Loop()
    loop.command(deploy())
    assert published(loop) == [backend_key(A), "endpoints.default.a"]
    loop.settle()
    before = loop.bucket[backend_key(A)].snapshot_id
    loop.done(DeleteDeployment(name="a"))
    gone = {key: snapshot.snapshot_id for key, snapshot in loop.bucket.items()}
    assert before < gone["endpoints.default.a"] < gone[backend_key(A)]
    assert all(snapshot.content is None for snapshot in loop.bucket.values())


def test_what_fails_at_first_has_its_endpoint_and_refuses_every_request_at_once() -> None:
    loop = Loop()
    loop.command(deploy(code=BAD_CODE, route="/a"))
    loop.steps(40, 0.2)
    assert loop.backend().halted
    assert is_stopped(loop)
    loop.done(deploy(route="/a"))
    assert not is_stopped(loop)
    loop.done(DeleteDeployment(name="a"))
    assert loop.bucket["endpoints.default.a"].content is None


def is_stopped(loop: Loop) -> bool:
    """Whether requests of the endpoint, which has its route, are refused."""
    endpoint, backend = loop.bucket["endpoints.default.a"].content, loop.bucket[backend_key(A)].content
    assert isinstance(endpoint, EndpointSnapshot)
    assert isinstance(backend, BackendSnapshot)
    assert endpoint.route == "/a"
    return backend.is_stopped


def test_a_replica_that_stops_drains_before_it_leaves_the_snapshot() -> None:
    loop = Loop()
    loop.done(deploy(num=1))
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
    loop.done(deploy())
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
    loop.done(create_endpoint("e", route="/e", b=1.0))
    before = dict(loop.bucket)
    loop.done(SetTraffic(endpoint="e", weights={"b": 0.25, "c": 0.75}))
    loop.done(ShadowTraffic(endpoint="e", backend_tag="c", proportion=0.5))
    assert {key for key in loop.bucket if loop.bucket[key] != before.get(key)} == {"endpoints.default.e"}
    content = endpoint_snapshot(loop, "endpoints.default.e")
    assert (content.route, content.traffic) == ("/e", {"default/b": 0.25, "default/c": 0.75})
    assert content.shadows == {"default/c": 0.5}


def test_http_options_have_a_key_of_their_own() -> None:
    loop = Loop()
    loop.done(deploy())
    before = dict(loop.bucket)
    loop.done(SetHttpOptions(options={"request_timeout_s": 5}))
    assert {key for key in loop.bucket if loop.bucket[key] != before.get(key)} == {"http.options"}
    assert loop.bucket["http.options"].content == HttpSnapshot(options=HttpOptions(request_timeout_s=5.0))


def test_a_replica_that_is_not_known_is_never_routed_to_and_is_stopped() -> None:
    """A host comes back with replicas that were given up while it was lost."""
    loop = Loop()
    loop.done(deploy(num=2))
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


# How backends are protected and which versions belong together: what routers and hosts are told of it.


CHANGES: list[dict[str, Any]] = [
    {"replica_policy": "fixed_packing"},
    {"packing_num": 8},
    {"backpressure_config": {"status_code": 429, "retry_after_s": 2}},
    {"outlier_ejection": {"consecutive_failures": 3}},
    {"retry_budget_percent": 0},
    {"circuit_breaker": {"failure_percent": 0}},
]


def told(loop: Loop, tag: str = "default/a") -> BackendSnapshot:
    content = loop.bucket[f"backends.{tag.replace('/', '.')}"].content
    assert isinstance(content, BackendSnapshot)
    return content


def host_goals(loop: Loop, tag: str) -> dict[ReplicaTag, ReplicaGoal]:
    goals = {t: goal for host in loop.hosts for t, goal in host.told.items()}
    return {t: goal for t, goal in goals.items() if goal.backend_tag == tag}


# -- protection --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: next(iter(change)))
def test_a_change_of_protection_reaches_routers_and_no_replica(change: dict[str, Any]) -> None:
    loop = Loop()
    loop.done(deploy("a", num=2))
    before, config_version = loop.replicas(), loop.backend().target.config_version
    sent = {host.host_id: host.number for host in loop.hosts}
    loop.done(UpdateBackendConfig(backend_tag="a", config=change))
    assert loop.replicas() == before, "not even their records"
    assert loop.backend().target.config_version == config_version
    assert {host.host_id: host.number for host in loop.hosts} == sent, "no host was told anything"
    (name,) = change
    wanted = getattr(loop.backend().target.backend_config, name)
    assert wanted != getattr(BackendProtection(), name)
    assert told(loop).protection == msgspec.structs.replace(BackendProtection(), **{name: wanted})


def test_of_a_group_of_fields_those_that_are_not_given_stay() -> None:
    loop = Loop()
    loop.done(deploy("a", outlier_ejection={"ejection_time_s": 3.0}))
    loop.done(UpdateBackendConfig(backend_tag="a", config={"outlier_ejection": {"consecutive_failures": 2}}))
    config = loop.backend().target.backend_config
    assert config.outlier_ejection == OutlierEjection(ejection_time_s=3.0, consecutive_failures=2)


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"circuit_breaker": {"percent": 1}}, "config.circuit_breaker"),
        ({"circuit_breaker": {"open_time_s": 0}}, "config.circuit_breaker.open_time_s"),
        ({"circuit_breaker": 5}, "config.circuit_breaker"),
        ({"backpressure_config": {"status_code": 500}}, "config.backpressure_config.status_code"),
        ({"replica_policy": "best"}, "config.replica_policy"),
    ],
)
def test_a_protection_that_cannot_be_is_refused_with_its_path(config: dict[str, Any], field: str) -> None:
    loop = Loop()
    loop.done(deploy("a"))
    with pytest.raises(BadField) as refused:
        loop.command(UpdateBackendConfig(backend_tag="a", config=config))
    assert refused.value.field == field


def test_only_what_a_host_is_told_of_is_heard_by_replicas() -> None:
    changed = BackendConfig(
        num_replicas=9,
        max_queued_requests=9,
        replica_policy=ReplicaPolicyName.RANDOM,
        circuit_breaker=CircuitBreaker(failure_percent=9.0),
    )
    assert replica_part(changed) == replica_part(BackendConfig())
    heard = BackendConfig(user_config=1, max_concurrent_queries=9, health_check_period_s=9.0)
    assert replica_part(heard) == heard


@pytest.mark.parametrize("at", [0, 1], ids=["least", "most"])
def test_whatever_a_configuration_may_hold_can_be_read_by_routers_and_hosts(at: int) -> None:
    config = BackendConfig(
        num_replicas=1,
        max_concurrent_queries=(1, 100_000)[at],
        max_queued_requests=(-1, 1_000_000)[at],
        graceful_shutdown_timeout_s=(0, 3600)[at],
        health_check_period_s=(0.1, 3600)[at],
        health_check_timeout_s=(0.1, 3600)[at],
        health_check_failure_threshold=(1, 1000)[at],
        start_timeout_s=(1, 86_400)[at],
        packing_num=(1, 100_000)[at],
        retry_budget_percent=(0, 100)[at],
        backpressure_config=BackpressureConfig(retry_after_s=(0, 3600)[at]),
        outlier_ejection=OutlierEjection(
            consecutive_failures=(0, 1000)[at],
            ejection_time_s=(0.1, 3600)[at],
            max_ejected_percent=(0, 50)[at],
        ),
        circuit_breaker=CircuitBreaker(
            failure_percent=(0, 100)[at],
            requests_min=(1, 100_000)[at],
            window_s=(1, 600)[at],
            open_time_s=(0.1, 3600)[at],
        ),
    )
    loop = Loop()
    loop.done(Deploy(name="a", replica_config=ReplicaConfig(import_path="m:C"), backend_config=config))
    snapshot = loop.bucket["backends.default.a"]
    assert msgspec.json.decode(msgspec.json.encode(snapshot), type=Snapshot) == snapshot


def test_a_plan_tells_of_the_field_within_its_group() -> None:
    loop = Loop()
    loop.done(deploy("a"))
    before = loop.checkpoint
    command = UpdateBackendConfig(backend_tag="a", config={"circuit_breaker": {"window_s": 20}})
    plan = forecast(before, before.applied(loop.command(command).changes), loop.observed, loop.now)
    assert plan.replicas == []
    assert plan.notes == ["default/a: circuit_breaker.window_s 10 → 20; no replica is touched"]


def test_defaults_add_no_byte_to_what_the_bucket_holds() -> None:
    loop = Loop()
    given = msgspec.json.encode(deploy("a"))  # as it comes over the bus: every number a new object
    loop.done(msgspec.json.decode(given, type=Deploy))
    for key, fields in (
        ("backends.default.a", ["protection", "code_versions"]),
        ("endpoints.default.a", ["options"]),
    ):
        snapshot = loop.bucket[key]
        value = msgspec.json.encode(snapshot)
        assert not any(field.encode() in value for field in fields), value
        read = msgspec.json.decode(value, type=Snapshot)
        assert read == snapshot
        assert msgspec.json.encode(read) == value
    loop.done(deploy("a", retry_budget_percent=0.0))
    assert b'"protection":{"retry_budget_percent":0.0}' in msgspec.json.encode(
        loop.bucket["backends.default.a"]
    )


# -- versions ----------------------------------------------------------------------------------------------------------


def test_code_versions_are_told_only_while_replicas_of_two_serve() -> None:
    loop = Loop(PureHost("host-1", cpus=8))
    loop.done(deploy("a", num=2))
    assert told(loop).code_versions == {}
    loop.command(deploy("a", num=2, version="v2"))
    seen = []
    for _ in range(40):
        loop.step()
        content = told(loop)
        rows = {tag: r.code_version for tag, r in loop.replicas().items() if tag in content.replicas}
        several = len(set(rows.values())) > 1
        assert content.code_versions == (rows if several else {})
        seen.append(several)
    assert (seen[0], any(seen), seen[-1]) == (False, True, False)


def test_of_very_many_replicas_no_code_versions_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = get_version(1), get_version(2)
    replicas = [replica_of(1, old), replica_of(2, new), replica_of(3, new, ReplicaState.SHOULD_STOP)]
    assert derive_backend(backend_of(new), replicas).code_versions == {"default/a#1": 1, "default/a#2": 2}
    monkeypatch.setattr(snapshots, "CODE_VERSIONS_MAX", 1)
    assert derive_backend(backend_of(new), replicas).code_versions == {}


def test_replicas_are_told_their_code_version_and_those_of_their_companions() -> None:
    loop = Loop(PureHost("host-1", cpus=16))
    loop.done(deploy("alone"))
    (alone,) = host_goals(loop, "default/alone").values()
    assert (alone.code_version, alone.peer_versions) == (1, {})

    loop.done(application(spec("front"), spec("model")))
    (front,) = host_goals(loop, "app/front").values()
    assert (front.code_version, front.peer_versions) == (1, {"app/model": 1})

    loop.done(application(spec("front", version="v2"), spec("model", version="v2")))
    (front,) = host_goals(loop, "app/front").values()
    (model,) = host_goals(loop, "app/model").values()
    assert (front.code_version, front.peer_versions) == (2, {"app/model": 2})
    assert (model.code_version, model.peer_versions) == (2, {"app/front": 2})


def test_a_replica_that_runs_keeps_the_companions_that_it_began_with() -> None:
    loop = Loop(PureHost("host-1", cpus=16))
    loop.done(application(spec("front"), spec("model")))
    before = host_goals(loop, "app/front")
    loop.done(application(spec("front"), spec("model", version="v2")))
    assert host_goals(loop, "app/front") == before, "its code did not change"
    loop.done(UpdateBackendConfig(backend_tag="app/front", config={"user_config": "new"}))
    (front,) = host_goals(loop, "app/front").values()
    assert (front.user_config, front.peer_versions) == ("new", {"app/model": 1})

    loop.done(UpdateBackendConfig(backend_tag="app/front", config={"num_replicas": 2}))
    companions = {t: goal.peer_versions["app/model"] for t, goal in host_goals(loop, "app/front").items()}
    assert sorted(companions.values()) == [1, 2], "one that begins now belongs with the new model"


def test_after_a_failed_update_replicas_belong_with_what_is_wanted_again() -> None:
    loop = Loop(PureHost("host-1", cpus=16))
    loop.done(application(spec("front"), spec("model")))
    loop.ask(application(spec("front", version="v2"), spec("model", version="v2", code=BAD_CODE, retries=1)))
    loop.settle()
    loop.done(UpdateBackendConfig(backend_tag="app/front", config={"num_replicas": 2}))
    assert all(goal.peer_versions == {"app/model": 1} for goal in host_goals(loop, "app/front").values())


def test_a_replica_that_waits_for_room_belongs_with_what_is_wanted_when_it_gets_some() -> None:
    loop = Loop(PureHost("host-1", cpus=1))
    loop.ask(application(spec("front"), spec("model")))
    loop.steps(5)
    loop.ask(application(spec("front"), spec("model", version="v2")))
    loop.hosts.append(PureHost("host-2", cpus=4))
    loop.settle()
    recorded = loop.replicas("app/front").values()
    assert {tuple(r.peer_versions.items()) for r in recorded} <= {
        (("app/model", 1),),
        (("app/model", 2),),
    }
    (model,) = loop.replicas("app/model").values()
    assert (model.code_version, model.peer_versions) == (2, {"app/front": 1})


def test_companions_count_towards_the_size_of_their_hosts_goal() -> None:
    companions = {BackendTag(f"{'a' * 63}/{'b' * 60}{n:03}"): n for n in range(100)}
    version = get_version()
    with_them = estimate_goal_bytes(version, companions)
    assert with_them - estimate_goal_bytes(version) >= len(msgspec.json.encode(companions)) - 2
    tag = BackendTag(f"{'a' * 63}/{'b' * 63}")
    goal = ReplicaGoal(
        replica_tag=ReplicaTag(f"{tag}#12345678"),
        backend_tag=tag,
        replica_config=version.replica_config,
        config_version=10**6,
        max_concurrent_queries=100_000,
        graceful_shutdown_timeout_s=3599.999999,
        health_check_period_s=3599.999999,
        health_check_timeout_s=3599.999999,
        start_timeout_s=86399.999999,
        health_check_failure_threshold=1000,
        code_version=10**6,
        peer_versions=companions,
    )
    assert len(msgspec.json.encode(goal)) <= with_them < GOAL_BYTES_MAX


# -- methods -----------------------------------------------------------------------------------------------------------


def test_a_deployment_takes_every_method_unless_told_otherwise() -> None:
    code = spec("a").replica_config
    assert Deploy(name="a", replica_config=code).methods == list(METHODS)
    made = DeployApplication(name="app", deployments=[spec("a")], ingress="a")
    assert made.methods == list(METHODS)
