"""Every verb of the admin API, and every refusal, against a real controller over a real NATS and Postgres."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from nats.errors import TimeoutError as NatsTimeoutError

from serve_common.api import commands as c
from serve_common.api import queries as q
from serve_common.api.queries import COMMANDS, QUERIES
from serve_common.api.rollout_views import RolloutView
from serve_common.api.views import DeploymentStatus, EventView, GoalStatus, PlannedAction
from serve_common.config.autoscaling import AutoscalingConfig
from serve_common.config.backend import BackendConfig, EndpointOptions, HttpOptions, ReplicaConfig
from serve_common.config.capture import CaptureConfig
from serve_common.config.rollout import RolloutConfig
from serve_common.errors import BadField, NotFound
from serve_common.protocol.code import digest_code
from serve_common.protocol.subjects import GATEWAY_QUEUE, MODEL_SERVICE
from serve_controller.adapters.load_windows import YOUNG_S
from tests.integration.admin_refusals import REFUSALS
from tests.support.servers.nats_server import NatsServer
from tests.support.servers.postgres_server import PostgresServer
from tests.support.stacks.admin_desk import BAD_CODE, CODE, SOON_S, TRACEBACK, AdminDesk

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.usefixtures("quiet"),
]

ASKED: set[str] = set()
"""Verbs that were answered with success in this module."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(shared_server: NatsServer, postgres_server: PostgresServer) -> AsyncIterator[AdminDesk]:
    """A desk that all tests share, with two backends and an endpoint that sends to one of them."""
    async with AdminDesk.opened(shared_server, postgres_server) as desk:
        for name in ("left", "right"):
            await desk.done(await desk.admin.call(c.CreateBackend(backend_tag=name, replica_config=CODE)))
        await desk.done(
            await desk.admin.call(c.CreateEndpoint(endpoint="fork", traffic={"left": 1.0}, route="/fork"))
        )
        yield desk


@pytest.fixture
def desk(shared: AdminDesk, monkeypatch: pytest.MonkeyPatch) -> AdminDesk:
    """The same, remembering which verbs were asked."""
    call = shared.admin.call

    async def call_and_remember(request: c.Request[Any], **options: Any) -> Any:
        reply = await call(request, **options)
        ASKED.add(request.verb)
        return reply

    monkeypatch.setattr(shared.admin, "call", call_and_remember)
    return shared


def deploy(name: str, version: str | None = "v1", **fields: Any) -> c.Deploy:
    return c.Deploy(name=name, version=version, replica_config=CODE, **fields)


# -- deployments -------------------------------------------------------------------------------------------------------


async def test_a_deployment_from_its_first_version_to_its_end(desk: AdminDesk) -> None:
    admin = desk.admin
    first = await admin.call(deploy("life", route_prefix="/life"))
    assert first.updating
    goal_id = await desk.done(first)
    info = await admin.call(q.GetDeploymentInfo(name="life"))
    assert (info.status, info.version, info.route_prefix) == (DeploymentStatus.HEALTHY, "v1", "/life")
    assert (info.goal_id, info.goal_status) == (goal_id, GoalStatus.SUCCEEDED)
    assert [r.state for r in info.replicas] == ["running"]

    again = await admin.call(deploy("life", route_prefix="/life"))
    assert (again.goal_id, again.updating) == (goal_id, False)
    await desk.done(await admin.call(deploy("life", "v2", prev_version="v1", route_prefix="/life")))
    unversioned = await admin.call(deploy("life", None, route_prefix="/life"))
    assert unversioned.updating
    await desk.done(unversioned)
    assert [r.version for r in await admin.call(q.GetRevisions(name="life"))] == [None, "v2", "v1"]
    await desk.done(await admin.call(c.Rollback(name="life", to="v2")))
    assert (await admin.call(q.GetDeploymentInfo(name="life"))).version == "v2"

    await desk.done(await admin.call(c.DeleteDeployment(name="life")))
    with pytest.raises(NotFound):
        await admin.call(q.GetDeploymentInfo(name="life"))
    assert "default/life" not in {d.name for d in await admin.call(q.ListDeployments())}
    listed = await admin.call(q.ListDeployments(include_deleted=True))
    (gone,) = (d for d in listed if d.name == "default/life")
    assert gone.status is DeploymentStatus.DELETED
    (short,) = (s for s in await admin.call(q.GetSnapshot()) if s.name == "default/life")
    assert (short.class_name, short.version, short.route) == ("Model", "v2", "/life")
    assert short.start_time < (short.end_time or 0.0)
    nobody = await admin.call(c.DeleteDeployment(name="nobody"))
    assert (nobody.goal_id, nobody.updating) == (None, False)


async def test_a_version_that_cannot_start_fails_with_the_users_traceback_and_the_old_one_serves_on(
    desk: AdminDesk,
) -> None:
    await desk.done(await desk.admin.call(deploy("brave", route_prefix="/brave")))
    before = (await desk.admin.call(q.GetDeploymentInfo(name="brave"))).replicas
    config = BackendConfig(max_constructor_retry_count=2)
    bad = c.Deploy(
        name="brave", version="v2", replica_config=BAD_CODE, backend_config=config, route_prefix="/x"
    )
    goal = await desk.ended((await desk.admin.call(bad)).goal_id)
    assert (goal.status, goal.error) == (GoalStatus.FAILED, TRACEBACK)
    info = await desk.admin.call(q.GetDeploymentInfo(name="brave"))
    assert (info.version, info.route_prefix, info.replicas) == ("v1", "/brave", before)
    assert "ValueError: no weights" in info.message


async def test_a_goal_tells_its_progress_and_who_waits_for_a_replaced_one_is_told_so(desk: AdminDesk) -> None:
    config = BackendConfig(num_replicas=1_000)
    pending = await desk.admin.call(deploy("crowd", backend_config=config))
    assert pending.goal_id is not None
    waited = await desk.call("wait_for_goal", goal_id=pending.goal_id, timeout_s=0)
    assert waited.status is GoalStatus.PENDING
    newer = await desk.admin.call(deploy("crowd"))
    view = await desk.ended(pending.goal_id)
    assert (view.status, view.error) == (GoalStatus.SUPERSEDED, f"replaced by {newer.goal_id}")
    await desk.done(newer)
    told = await desk.until_told("goal", str(newer.goal_id), state="succeeded")
    assert {(each.kind, each.subject, each.goal_id) for each in told} == {
        ("goal", newer.goal_id, newer.goal_id)
    }
    assert told[0].state == "pending"
    assert all(each.at > 0 for each in told)
    await desk.until_told("goal", pending.goal_id, state="superseded")
    ASKED.add("wait_for_goal")


# -- applications ------------------------------------------------------------------------------------------------------


def application(*names: str, version: str = "v1", bad: str = "") -> c.DeployApplication:
    return c.DeployApplication(
        name="shop",
        ingress="front",
        route_prefix="/shop",
        deployments=[
            c.DeploymentSpec(name=name, version=version, replica_config=BAD_CODE if name == bad else CODE)
            for name in names
        ],
    )


async def test_an_application_is_deployed_changed_and_deleted_as_one(desk: AdminDesk) -> None:
    admin = desk.admin
    await desk.done(await admin.call(application("front", "model")))
    (shop,) = await admin.call(q.GetAllApplications())
    assert (shop.name, shop.status, shop.route_prefix) == ("shop", DeploymentStatus.HEALTHY, "/shop")
    assert (shop.ingress, shop.deployments) == ("shop/front", ["shop/front", "shop/model"])

    failed = await admin.call(application("front", "model", version="v2", bad="model"))
    goal = await desk.ended(failed.goal_id)
    assert goal.status is GoalStatus.FAILED
    assert goal.error.startswith("shop/model: ")
    assert (await admin.call(q.GetDeploymentInfo(name="shop/front"))).version == "v1", "all or nothing"

    error = "Traceback\nValueError: no weights"
    unbuilt = await admin.call(c.RecordBuildFailure(name="shop", error=error))
    assert (await desk.ended(unbuilt.goal_id)).error == error
    (shop,) = await admin.call(q.GetAllApplications())
    assert (shop.status, shop.goal_status) == (DeploymentStatus.HEALTHY, GoalStatus.FAILED)
    assert (shop.build_error, shop.deployments) == (error, ["shop/front", "shop/model"])

    await desk.done(await admin.call(application("front", "other")))
    assert {d.name for d in await admin.call(q.ListDeployments()) if d.application == "shop"} == {
        "shop/front",
        "shop/other",
    }
    await desk.done(await admin.call(c.DeleteApplication(name="shop")))
    assert await admin.call(q.GetAllApplications()) == []


# -- backends, endpoints, traffic --------------------------------------------------------------------------------------


async def test_a_backend_is_made_updated_and_deleted(desk: AdminDesk) -> None:
    admin = desk.admin
    made = c.CreateBackend(
        backend_tag="solo", replica_config=CODE, backend_config=BackendConfig(max_queued_requests=7)
    )
    goal_id = await desk.done(await admin.call(made))
    again = await admin.call(made)
    assert (again.goal_id, again.updating) == (goal_id, False)
    await desk.done(await admin.call(c.UpdateBackendConfig(backend_tag="solo", config={"num_replicas": 2})))
    config = await admin.call(q.GetBackendConfig(backend_tag="solo"))
    assert (config.backend_config.num_replicas, config.backend_config.max_queued_requests) == (2, 7)
    (view,) = (b for b in await admin.call(q.GetAllBackends()) if b.backend_tag == "default/solo")
    assert (view.status, len(view.replicas)) == (DeploymentStatus.HEALTHY, 2)
    assert {r.host_id for r in view.replicas} == {"host-1", "host-2"}, "spread by default"
    await desk.done(await admin.call(c.DeleteBackend(backend_tag="solo", force_kill=True)))
    assert (await admin.call(c.DeleteBackend(backend_tag="solo"))).goal_id is None


async def test_an_endpoint_is_made_its_traffic_split_and_shadowed_and_it_is_deleted(desk: AdminDesk) -> None:
    admin = desk.admin
    made = c.CreateEndpoint(endpoint="canary", traffic={"left": 1.0}, route="/canary", methods=["GET"])
    goal_id = await desk.done(await admin.call(made))
    assert (await admin.call(made)).goal_id == goal_id
    await desk.done(await admin.call(c.SetTraffic(endpoint="canary", weights={"left": 0.75, "right": 0.25})))
    await desk.done(await admin.call(c.ShadowTraffic(endpoint="canary", backend_tag="right", proportion=0.5)))
    (view,) = (e for e in await admin.call(q.GetAllEndpoints()) if e.endpoint_tag == "default/canary")
    assert (view.route, view.methods, view.options) == ("/canary", ["GET"], EndpointOptions())
    assert view.traffic == {"default/left": 0.75, "default/right": 0.25}
    assert view.shadows == {"default/right": 0.5}
    routed = desk.plane.proxy.snapshots["endpoints.default.canary"].content
    assert routed is not None
    assert getattr(routed, "shadows", None) == {"default/right": 0.5}, (
        "the proxy has it once the goal succeeded"
    )
    await desk.done(await admin.call(c.ShadowTraffic(endpoint="canary", backend_tag="right", proportion=0)))
    (view,) = (e for e in await admin.call(q.GetAllEndpoints()) if e.endpoint_tag == "default/canary")
    assert view.shadows == {}
    options = c.SetEndpointOptions(endpoint="canary", options={"backend_header": "X-To"})
    await desk.done(await admin.call(options))
    routed = desk.plane.proxy.snapshots["endpoints.default.canary"].content
    assert getattr(routed, "options", None) == EndpointOptions(backend_header="X-To")
    assert not (await admin.call(options)).updating
    await desk.done(await admin.call(c.DeleteEndpoint(endpoint="canary")))
    assert desk.plane.proxy.snapshots["endpoints.default.canary"].content is None
    assert (await admin.call(c.DeleteEndpoint(endpoint="canary"))).goal_id is None
    assert {b.backend_tag for b in await admin.call(q.GetAllBackends())} >= {"default/left", "default/right"}


# -- rollouts and captures ---------------------------------------------------------------------------------------------


async def test_a_rollout_is_started_paused_let_pass_aborted_and_promoted(desk: AdminDesk) -> None:
    """Nobody sends requests here, so nothing is shown: each step passes because it is said."""
    admin = desk.admin
    await desk.done(await admin.call(deploy("rolled", route_prefix="/rolled")))
    started = await admin.call(rollout("v2", request_id="once"))
    assert (await admin.call(rollout("v2", request_id="once"))).goal_id == started.goal_id
    assert (await desk.refused("start_rollout", name="rolled", version="v3")).view.code == "conflict"
    view = await until_in_force(desk, 0)
    assert (view.backend_tag, view.version, view.steps) == ("default/rolled", "v2", ["5%", "50%", "100%"])
    assert {gate.status for gate in view.gates} <= {"unknown", "passed"}
    routed = desk.plane.proxy.snapshots["endpoints.default.rolled"].content
    assert len(getattr(routed, "traffic", {})) == 3, "the old version, its baseline and the new one"
    for action, state in ((c.RolloutAction.PAUSE, "paused"), (c.RolloutAction.RESUME, "running")):
        assert (await admin.call(c.ControlRollout(name="rolled", action=action))).updating
        assert not (await admin.call(c.ControlRollout(name="rolled", action=action))).updating
        (view,) = await admin.call(q.GetRollouts(name="rolled"))
        assert view.state == state
    assert not (
        await admin.call(c.ControlRollout(name="rolled", action=c.RolloutAction.STEP, step=1))
    ).updating
    assert (await admin.call(c.ControlRollout(name="rolled", action=c.RolloutAction.STEP, step=0))).updating
    await until_in_force(desk, 1)
    abort = c.ControlRollout(name="rolled", action=c.RolloutAction.ABORT, reason="odd")
    aborted = await admin.call(abort)
    assert (aborted.updating, aborted.goal_id) == (True, started.goal_id)
    goal = await desk.ended(aborted.goal_id)
    assert (goal.status, goal.error) == (GoalStatus.FAILED, "by command: odd")
    assert not (await admin.call(abort)).updating
    assert (await admin.call(q.GetDeploymentInfo(name="rolled"))).version == "v1"

    refusal = await desk.refused("control_rollout", name="rolled", action="promote")
    assert (refusal.status, refusal.view.code) == (409, "conflict"), "it has ended"
    refusal = await desk.refused("start_rollout", **msgspec.to_builtins(rollout("v2")))
    assert (refusal.status, refusal.view.code) == (409, "conflict"), "it was aborted a moment ago"
    again = await admin.call(rollout("v2", again=True))
    promoted = await admin.call(c.ControlRollout(name="rolled", action=c.RolloutAction.PROMOTE))
    assert promoted.goal_id == again.goal_id
    await desk.done(again)
    (view,) = await admin.call(q.GetRollouts())
    assert (view.outcome, view.goal_id) == ("promoted", again.goal_id)
    assert (await admin.call(q.GetDeploymentInfo(name="rolled"))).version == "v2"
    await desk.done(await admin.call(c.DeleteDeployment(name="rolled")))
    assert await admin.call(q.GetRollouts()) == []


def rollout(version: str, **fields: Any) -> c.StartRollout:
    config = RolloutConfig(steps=("5%", "50%", "100%"))
    return c.StartRollout(name="rolled", version=version, rollout=config, **fields)


async def until_in_force(desk: AdminDesk, step: int) -> RolloutView:
    """The rollout, once requests go by that step."""
    async with asyncio.timeout(SOON_S):
        while True:
            (view,) = await desk.admin.call(q.GetRollouts(name="rolled"))
            if view.step == step and view.is_in_force:
                return view
            await asyncio.sleep(0.05)


async def test_requests_of_an_endpoint_are_captured_until_that_is_ended(desk: AdminDesk) -> None:
    admin = desk.admin
    assert await admin.call(q.GetCaptures()) == []
    capture = c.SetCapture(
        endpoint="fork", share=0.5, bodies=True, redact=["$.user"], redact_headers=["X-User"]
    )
    goal_id = await desk.done(await admin.call(capture))
    (view,) = await admin.call(q.GetCaptures())
    config = CaptureConfig(share=0.5, bodies=True, redact=["$.user"], redact_headers=["x-user"])
    assert (view.endpoint_tag, view.goal_id, view.capture) == ("default/fork", goal_id, config)
    routed = desk.plane.proxy.snapshots["endpoints.default.fork"].content
    assert getattr(routed, "capture", None) == config, "the proxy has it once the goal succeeded"
    assert not (await admin.call(capture)).updating
    await desk.done(await admin.call(c.SetCapture(endpoint="fork", share=0)))
    assert await admin.call(q.GetCaptures()) == []
    routed = desk.plane.proxy.snapshots["endpoints.default.fork"].content
    assert getattr(routed, "capture", None) is None
    assert not (await admin.call(c.SetCapture(endpoint="fork", share=0))).updating


# -- numbers of replicas that follow the load --------------------------------------------------------------------------


async def test_a_user_wins_over_the_autoscaling_and_a_load_that_nobody_can_read_holds(
    desk: AdminDesk,
) -> None:
    admin = desk.admin
    scaling = AutoscalingConfig(min_replicas=2, max_replicas=4, metrics_interval_s=1)
    config = BackendConfig(autoscaling_config=scaling)
    await desk.done(await admin.call(deploy("followed", backend_config=config)))
    assert len((await admin.call(q.GetDeploymentInfo(name="followed"))).replicas) == 2
    # Nothing is missed of a proxy that has just begun, so the load counts as known until this one is YOUNG_S old.
    told = await desk.until_told("autoscaling", "default.followed", state="held", timeout_s=YOUNG_S + SOON_S)
    held = next(event for event in told if isinstance(event, EventView) and event.state == "held")
    (view,) = await admin.call(q.GetAutoscaling())
    assert (view.backend_tag, view.verdict, view.num_replicas) == ("default/followed", "held", 2)
    assert (view.seen, view.paused) == (None, "")
    # Which of the hosts and the proxy is named first follows from which of them is no longer young at that look.
    for why in (held.message, view.why):
        assert "no page of metrics is that of " in why

    await desk.done(await admin.call(c.Scale(backend_tag="followed", num_replicas=4)))
    (view,) = await admin.call(q.GetAutoscaling())
    assert (view.num_replicas, view.paused) == (4, "scale")
    assert not (await admin.call(c.PauseAutoscaling(backend_tag="followed"))).updating
    assert (await admin.call(c.ResumeAutoscaling(backend_tag="followed"))).updating
    (view,) = (await admin.call(q.GetStatus())).autoscaling
    assert (view.num_replicas, view.paused) == (4, "")
    load = await admin.call(q.GetLoad())
    assert (load.endpoints, load.backends, load.unreachable) == ([], [], [])
    await desk.done(await admin.call(c.DeleteDeployment(name="followed")))
    assert await admin.call(q.GetAutoscaling()) == []


# -- hosts, proxies, options -------------------------------------------------------------------------------------------


async def test_a_host_is_drained_and_taken_back(desk: AdminDesk) -> None:
    admin = desk.admin
    config = BackendConfig(num_replicas=2)
    await desk.done(await admin.call(deploy("moving", backend_config=config)))
    drained = await admin.call(c.DrainHost(host_id="host-2"))
    await desk.done(drained)
    assert (await admin.call(c.DrainHost(host_id="host-2"))).goal_id == drained.goal_id
    hosts = {host.host_id: host for host in await admin.call(q.GetHosts())}
    assert (hosts["host-2"].draining, hosts["host-2"].num_replicas) == (True, 0)
    assert hosts["host-1"].resources == {"CPU": 64.0}
    assert {r.host_id for r in (await admin.call(q.GetDeploymentInfo(name="moving"))).replicas} == {"host-1"}
    back = await admin.call(c.UndrainHost(host_id="host-2"))
    assert (back.goal_id, back.updating) == (None, True)
    assert not any(host.draining for host in await admin.call(q.GetHosts()))


async def test_options_of_all_proxies_change_live_and_proxies_say_what_they_applied(desk: AdminDesk) -> None:
    admin = desk.admin
    before = await admin.call(q.GetHttpConfig())
    await desk.done(await admin.call(c.SetHttpOptions(options={"request_timeout_s": 7})))
    assert await admin.call(q.GetHttpConfig()) == msgspec.structs.replace(before, request_timeout_s=7.0)
    assert isinstance(before, HttpOptions)
    (proxy,) = await admin.call(q.GetHttpProxies())
    newest = desk.plane.proxy.snapshots["http.options"].snapshot_id
    assert proxy.applied_snapshot_id >= newest > 0
    status = await admin.call(q.GetStatus())
    assert (status.controller_id, status.store_available) == ("controller-1", True)
    assert status.snapshot_id >= newest
    assert [p.proxy_id for p in status.proxies] == ["proxy-1"]


# -- plan, history, events ---------------------------------------------------------------------------------------------


async def test_a_plan_tells_what_a_command_would_do_and_does_nothing(desk: AdminDesk) -> None:
    await desk.done(await desk.admin.call(deploy("planned")))
    before = await desk.admin.call(q.GetDeploymentInfo(name="planned"))
    plan = await desk.admin.call(q.Plan.for_command(deploy("planned", "v2")))
    assert plan.updating
    assert {(r.action, r.backend_tag) for r in plan.replicas} == {
        (PlannedAction.START, "default/planned"),
        (PlannedAction.STOP, "default/planned"),
    }
    assert all(r.why for r in plan.replicas)
    config = {"backend_tag": "planned", "config": {"user_config": 1}}
    plan = await desk.call("plan", verb="update_backend_config", request=config)
    assert [r.action for r in plan.replicas] == [PlannedAction.RECONFIGURE]
    assert not (await desk.admin.call(q.Plan.for_command(deploy("planned")))).updating
    assert await desk.admin.call(q.GetDeploymentInfo(name="planned")) == before


async def test_the_history_shows_who_changed_what_from_what_to_what(desk: AdminDesk) -> None:
    name = "audited"
    await desk.done(await desk.admin.call(deploy(name)))
    change = c.UpdateBackendConfig(backend_tag=name, config={"num_replicas": 2})
    reply = await desk.admin.call(change)
    await desk.done(reply)
    newest, first = await desk.admin.call(q.GetHistory(subject=name))
    assert (newest.verb, newest.subject, newest.goal_id) == (
        "update_backend_config",
        f"default/{name}",
        reply.goal_id,
    )
    assert "@" in newest.principal, "the client says who it is"
    assert newest.request == {
        "backend_tag": name,
        "config": {"num_replicas": 2},
        "skips_rollout": False,
    }
    assert (num_replicas(newest.old, name), num_replicas(newest.new, name)) == (1, 2)
    assert num_replicas(first.old, name) is None
    assert newest.epoch == (await desk.admin.call(q.GetStatus())).epoch
    (older,) = await desk.admin.call(q.GetHistory(subject=name, before=newest.id))
    assert older.id == first.id
    assert len(await desk.admin.call(q.GetHistory(limit=1))) == 1


def num_replicas(side: Any, name: str) -> Any:
    """As it stands on one side of an entry of the history; None when it was not there."""
    found = (side or {}).get(f"backend default/{name}")
    return None if found is None else found["target"]["backend_config"].get("num_replicas", 1)


async def test_what_happens_is_published_and_can_be_asked_for(desk: AdminDesk) -> None:
    reply = await desk.admin.call(deploy("eventful"))
    goal_id = await desk.done(reply)
    await desk.until_told("audit", "default.eventful", state="deploy")
    (replica,) = (await desk.admin.call(q.GetDeploymentInfo(name="eventful"))).replicas
    told = await desk.until_told(
        "replica", replica.replica_tag.replace("/", ".").replace("#", "."), state="running"
    )
    assert all(isinstance(event, EventView) for event in told)
    # They are kept by the server, which may be slower than it was to pass them on.
    events = await desk.until_kept(
        q.GetEvents(subject="eventful"),
        lambda events: {"audit", "replica"} <= {event.kind for event in events},
    )
    assert [event.at for event in events] == sorted(event.at for event in events)
    await desk.until_kept(
        q.GetEvents(subject=goal_id),
        lambda of_goal: {event.state for event in of_goal} >= {"pending", "succeeded"},
    )
    assert len(await desk.admin.call(q.GetEvents(limit=3))) == 3


# -- refusals ----------------------------------------------------------------------------------------------------------


async def test_every_refusal_has_its_code_its_status_and_the_path_of_its_field_and_changes_nothing(
    desk: AdminDesk,
) -> None:
    await desk.done(await desk.admin.call(deploy("fixed")))
    await desk.done(await desk.admin.call(deploy("used")))
    await desk.done(await desk.admin.call(c.SetTraffic(endpoint="fork", weights={"left": 0.5, "used": 0.5})))
    await desk.done(
        await desk.admin.call(c.ShadowTraffic(endpoint="fork", backend_tag="right", proportion=0.1))
    )
    before = await recorded(desk)
    wrong = []
    for verb, request, status, code, field, words in REFUSALS:
        refusal = await desk.refused(verb, **request)
        got = (refusal.status, refusal.view.code, refusal.view.field)
        said = words in refusal.view.message and refusal.text[:20] in refusal.view.message
        if got != (status, code, field) or not said:
            wrong.append((verb, request, got, refusal.view.message[:200]))
    assert wrong == []
    assert await recorded(desk) == before
    assert {verb for verb, *_ in REFUSALS} == {*COMMANDS, *QUERIES}


async def test_code_is_uploaded_noted_and_may_then_be_deployed(desk: AdminDesk) -> None:
    data = b"muster-code of a test"
    digest = digest_code(data)
    config = ReplicaConfig(import_path="own:Code", code=digest)
    with pytest.raises(BadField, match="upload the code first") as refused:
        await desk.admin.call(c.Deploy(name="uploaded", replica_config=config))
    assert refused.value.field == "replica_config.code"
    assert not (await desk.admin.call(c.UploadCode(digest=digest))).is_stored
    for _ in range(2):
        upload = c.UploadCode(digest=digest, page=0, pages=1, data=data)
        assert (await desk.admin.call(upload)).is_stored
    newest, older = await desk.admin.call(q.GetHistory(limit=2))
    assert (newest.verb, newest.subject) == ("upload_code", digest)
    assert older.verb in ("upload_code", "deploy")
    await desk.done(await desk.admin.call(c.Deploy(name="uploaded", replica_config=config)))


async def test_a_backup_is_fetched_checked_and_restored(desk: AdminDesk) -> None:
    admin = desk.admin
    await desk.done(await admin.call(deploy("kept", route_prefix="/kept")))
    data = await admin.fetch_backup()
    await desk.done(await admin.call(deploy("kept", "v2", route_prefix="/kept")))
    await desk.done(await admin.call(deploy("later")))
    before = await recorded(desk)
    checked = await admin.send_backup(data, confirm=False)
    assert "deployments" in checked.summary
    assert checked.goal_ids == []
    assert checked.plan is not None
    assert {each.backend_tag for each in checked.plan.replicas} == {"default/kept", "default/later"}
    assert await recorded(desk) == before, "it was only checked"

    reply = await admin.send_backup(data, confirm=True)
    assert reply.summary == checked.summary
    assert reply.goal_ids
    for goal_id in reply.goal_ids:
        goal = await desk.ended(goal_id)
        assert goal.status is GoalStatus.SUCCEEDED, goal.error
    kept = await admin.call(q.GetDeploymentInfo(name="kept"))
    assert (kept.status, kept.version, kept.route_prefix) == (DeploymentStatus.HEALTHY, "v1", "/kept")
    with pytest.raises(NotFound):
        await admin.call(q.GetDeploymentInfo(name="later"))
    (entry,) = await admin.call(q.GetHistory(limit=1))
    assert (entry.verb, entry.request["backup"]) == ("restore", reply.summary)


async def recorded(desk: AdminDesk) -> list[tuple[str, str, str]]:
    """What people decide, as the database has it."""
    rows = await desk.plane.fetch(
        "SELECT kind, key, value::text FROM muster.checkpoint_rows ORDER BY kind, key"
    )
    decided = ("backend", "endpoint", "deployment", "application", "goal", "http", "rollout", "capture")
    return [(row["kind"], row["key"], row["value"]) for row in rows if row["kind"] in decided]


# -- the death of the leader, and the end ------------------------------------------------------------------------------


async def test_goals_and_everything_else_survive_a_controller_that_is_killed(desk: AdminDesk) -> None:
    done = await desk.done(await desk.admin.call(deploy("survivor", route_prefix="/survivor")))
    desk.plane.host.runtime.hold_constructors()
    config = BackendConfig(num_replicas=64, max_replicas_per_host=64)
    pending = await desk.admin.call(deploy("unfinished", backend_config=config))
    assert pending.goal_id is not None
    history = await desk.admin.call(q.GetHistory(subject="survivor"))
    deployments = [d.name for d in await desk.admin.call(q.ListDeployments())]

    (leader,) = desk.plane.controllers
    leader.signal(signal.SIGKILL)
    assert await leader.until_gone() == -signal.SIGKILL
    await desk.plane.start_controller("controller-1")
    assert (await desk.ended(done)).status is GoalStatus.SUCCEEDED
    view = await desk.call("wait_for_goal", goal_id=pending.goal_id, timeout_s=0)
    assert view.status is GoalStatus.PENDING
    desk.plane.host.runtime.release_constructors()
    assert (await desk.ended(pending.goal_id)).status is GoalStatus.SUCCEEDED
    assert await desk.admin.call(q.GetHistory(subject="survivor")) == history
    assert [d.name for d in await desk.admin.call(q.ListDeployments())] == deployments
    info = await desk.admin.call(q.GetDeploymentInfo(name="survivor"))
    assert (info.status, info.route_prefix) == (DeploymentStatus.HEALTHY, "/survivor")
    # Events of the former leader are known, too, though no new one needs to wait for that.
    await desk.until_kept(
        q.GetEvents(subject=done), lambda events: "succeeded" in {event.state for event in events}
    )


async def test_json_schemas_of_all_verbs_can_be_asked_for(desk: AdminDesk) -> None:
    schemas = await desk.call("get_schemas")
    ASKED.add("get_schemas")
    assert schemas["verbs"].keys() == {*COMMANDS, *QUERIES}
    fields = schemas["$defs"]["Deploy"]["properties"]
    assert schemas["verbs"]["deploy"]["request"] == {"$ref": "#/$defs/Deploy"}
    assert fields["name"]["type"] == "string"
    assert fields["name"]["description"]


async def test_an_unknown_verb_is_refused_at_once_and_names_the_one_that_was_meant(desk: AdminDesk) -> None:
    for verb, meant in (("deploi", "deploy"), ("list.deployments", "list_deployments"), ("x", None)):
        refusal = await desk.refused(verb)
        assert (refusal.status, refusal.view.code, refusal.view.field) == (400, "bad_field", "verb")
        assert (f"did you mean {meant!r}?" in refusal.view.message) is (meant is not None)
    inbox = desk.plane.client.new_inbox()
    replies = await desk.plane.client.subscribe(inbox)
    for verb in ("get_hosts", "get_host"):
        await desk.plane.client.publish(desk.subjects.admin(verb), b"{}", reply=inbox)
        await replies.next_msg(timeout=20)
        with pytest.raises(NatsTimeoutError):
            await replies.next_msg(timeout=0.3)


async def test_endpoints_are_found_as_a_service_of_nats(desk: AdminDesk) -> None:
    await desk.done(await desk.admin.call(deploy("found", route_prefix="/found")))
    info = json.loads((await desk.plane.client.request(f"$SRV.INFO.{MODEL_SERVICE}", b"", timeout=20)).data)
    assert (info["type"], info["name"]) == ("io.nats.micro.v1.info_response", MODEL_SERVICE)
    [found] = [each for each in info["endpoints"] if each["name"] == "found"]
    assert (found["subject"], found["queue_group"]) == (
        f"{desk.subjects.prefix}.call.default.found",
        GATEWAY_QUEUE,
    )
    assert (found["metadata"]["endpoint"], found["metadata"]["route"]) == ("default/found", "/found")
    assert "POST" in found["metadata"]["methods"].split(",")


async def test_shutdown_returns_its_goals_and_empties_everything(desk: AdminDesk) -> None:
    reply = await desk.admin.call(c.Shutdown(confirm="everything"))
    assert len(reply.goal_ids) == len(set(reply.goal_ids)) > 0
    for goal_id in reply.goal_ids:
        assert (await desk.ended(goal_id)).status is GoalStatus.SUCCEEDED
    status = await desk.admin.call(q.GetStatus())
    assert (status.deployments, sum(host.num_replicas for host in status.hosts)) == ([], 0)
    assert await desk.admin.call(q.GetAllBackends()) == []
    assert await desk.admin.call(q.GetAllEndpoints()) == []
    assert desk.plane.host.running == set()
    assert (await desk.admin.call(c.Shutdown(confirm="everything"))).goal_ids == []


async def test_this_module_has_asked_every_verb() -> None:
    """A verb that is added must be added here."""
    if len(ASKED) < len(COMMANDS):
        pytest.skip("only some of the module was run")
    assert {*COMMANDS, *QUERIES} <= ASKED
