"""Traces from end to end: a real receiver, a real proxy, and replicas in processes of their own."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Iterator
from itertools import pairwise
from typing import Any

import aiohttp
import msgspec
import pytest

from muster.handles import get_deployment_handle
from muster.handles import runtime as handle_runtime
from serve_common.api.commands import ChangeReply, ControlRollout, Deploy, RolloutAction, StartRollout
from serve_common.api.queries import GetRollouts
from serve_common.config.backend import BackendConfig, HttpOptions, ReplicaConfig
from serve_common.config.rollout import RolloutConfig
from serve_common.identities.roles import Role
from serve_common.telemetry.catalogue.services import SPANS_DROPPED
from serve_common.telemetry.trace_context import read_tracing_settings
from serve_proxy.wiring import Proxy
from serve_replica_host.adapters.metrics_files import MetricsFiles
from serve_replica_host.replica.process import StartReplicaRequest
from tests.support.paths import APPS
from tests.support.servers.nats_server import NatsServer
from tests.support.servers.otlp_receiver import OtlpReceiver, ReceivedSpan, tree
from tests.support.servers.postgres_server import PostgresServer
from tests.support.stacks.control_plane import CHANGE_LIMIT_S, ControlPlane, deploy_request
from tests.support.stacks.handle_stack import GuardedNats, HandleStack
from tests.support.stacks.proxy_stack import make_settings
from tests.support.waiting import eventually, until

pytestmark = pytest.mark.timeout(240)

APP_DIR = APPS / "trace_app"
FRONT, BACK, PAGES = "default/front", "default/back", "default/pages"
ROUTES = {FRONT: "/front", PAGES: "/pages", BACK: None}


def order(stack: HandleStack, name: str, tag: str) -> StartReplicaRequest:
    order = stack.order(name, tag)
    config = msgspec.structs.replace(order.goal.replica_config, import_path=f"trace_app:{name}")
    goal = msgspec.structs.replace(order.goal, replica_config=config)
    return msgspec.structs.replace(order, goal=goal, app_dir=str(APP_DIR))


@pytest.fixture(scope="module")
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, receiver: OtlpReceiver) -> Iterator[HandleStack]:
    nats = GuardedNats(tmp_path_factory.mktemp("nats"))
    stack = HandleStack(nats)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in receiver.environment().items():
            patch.setenv(name, value)
        try:
            stack.start(order(stack, "Front", f"{FRONT}#0"))
            stack.start(order(stack, "Pages", f"{PAGES}#0"), order(stack, "Back", f"{BACK}#0"))
            asyncio.run(stack.write_bucket({tag: [f"{tag}#0"] for tag in ROUTES}, routes=ROUTES))
            stack.wait_ready()
            yield stack
        finally:
            stack.close()
            nats.close()


class Client:
    """Asks a proxy."""

    def __init__(self, url: str, session: aiohttp.ClientSession, receiver: OtlpReceiver) -> None:
        self.url = url
        self.session = session
        self.receiver = receiver
        self.parent_id = "00f067aa0ba902b7"

    async def get(self, path: str, *, is_sampled: bool = True, **headers: str) -> tuple[int, str, str]:
        """Status, body, and the id of the trace that the request was in from the start."""
        trace_id = uuid.uuid4().hex
        flags = "01" if is_sampled else "00"
        headers = {"traceparent": f"00-{trace_id}-{self.parent_id}-{flags}", **headers}
        async with self.session.get(self.url + path, headers=headers) as response:
            return response.status, await response.text(), trace_id

    async def spans(self, trace_id: str, count: int) -> list[ReceivedSpan]:
        return await asyncio.to_thread(self.receiver.of_trace, trace_id, count)

    async def tree(self, trace_id: str, count: int) -> list[Any]:
        found = tree(await self.spans(trace_id, count), self.parent_id)
        assert len(found) == 1
        whole: list[Any] = found[0]
        return whole


@pytest.fixture
async def client(
    stack: HandleStack, receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Client]:
    for name, value in receiver.environment().items():
        monkeypatch.setenv(name, value)
    settings = make_settings(
        stack.nats, HttpOptions(request_timeout_s=30.0), tracing=read_tracing_settings(receiver.environment())
    )
    settings = msgspec.structs.replace(settings, bus=stack.nats.settings(Role.PROXY))
    proxy = Proxy(settings, on_failure=lambda: None)
    url = f"http://{await proxy.start()}"
    async with aiohttp.ClientSession() as session:
        yield Client(url, session, receiver)
    await proxy.close()


def chain(last: list[Any], endpoint: str = BACK) -> list[Any]:
    return [f"handle {endpoint}", [f"attempt {endpoint}", [f"replica {endpoint}", last]]]


def through(route: str, backend: str, code: list[Any]) -> list[Any]:
    return [f"GET {route}", [f"attempt {backend}", [f"replica {backend}", code]]]


async def test_one_trace_goes_through_a_chain_of_two_deployments(client: Client) -> None:
    status, body, trace_id = await client.get("/front?do=chain", **{"X-Request-ID": "r-1"})
    assert (status, body) == (200, "1")
    assert await client.tree(trace_id, 8) == through(
        "/front", FRONT, ["user code __call__", chain(["user code __call__"])]
    )
    spans = await client.spans(trace_id, 8)
    assert [span.kind for span in spans] == [
        "server", "client", "server", "internal", "client", "client", "server", "internal",
    ]  # fmt: skip
    assert [span.service for span in spans] == (["muster-proxy"] * 2 + ["muster-replica"] * 6)
    proxy, attempt, replica = spans[:3]
    assert proxy.attributes | {"http.request.method": "GET", "http.route": "/front"} == proxy.attributes
    assert proxy.attributes["url.path"] == "/front"
    assert proxy.attributes["http.response.status_code"] == 200
    assert {span.attributes.get("muster.request_id") for span in (proxy, replica, spans[4])} == {"r-1"}
    assert attempt.attributes["muster.replica_tag"] == f"{FRONT}#0"
    assert attempt.attributes["muster.attempt"] == 1
    assert proxy.resource["service.instance.id"] == "p1"
    assert replica.resource["service.instance.id"] == f"{FRONT}#0"
    for outer, inner in pairwise(spans):  # each lies within the one above it
        assert outer.start_ns - 5_000_000 <= inner.start_ns <= inner.ended_ns <= outer.ended_ns + 5_000_000
    assert {span.error for span in spans} == {None}


async def test_spans_of_user_code_are_in_the_tree(client: Client) -> None:
    _, _, trace_id = await client.get("/front?do=own")
    below = ["user code plain", ["plain span"]]
    assert await client.tree(trace_id, 10) == through(
        "/front", FRONT, ["user code __call__", ["own span", chain(below)]]
    )
    own = next(span for span in await client.spans(trace_id, 10) if span.name == "own span")
    assert (own.scope, own.attributes, own.service) == ("trace_app", {"digits": 3}, "muster-replica")


async def test_user_code_sees_the_trace_and_can_add_to_its_span(client: Client) -> None:
    _, body, trace_id = await client.get("/front?do=see", tracestate="vendor=1, other=2")
    seen = json.loads(body)
    spans = await client.spans(trace_id, 4)
    code = spans[-1]
    assert (seen["trace_id"], seen["of_context"], seen["is_recording"]) == (trace_id, trace_id, True)
    assert seen["header"] == f"00-{trace_id}-{code.span_id}-01"
    assert seen["tracestate"] == "vendor=1,other=2"
    assert code.attributes["seen"] == "yes"
    assert {span.tracestate for span in spans} == {"vendor=1,other=2"}


async def test_what_is_not_sampled_travels_and_exports_nothing(
    client: Client, receiver: OtlpReceiver
) -> None:
    _, body, unsampled = await client.get("/front?do=see", is_sampled=False)
    assert json.loads(body)["trace_id"] == unsampled
    assert json.loads(body)["is_recording"] is False
    await client.get("/front?do=own", is_sampled=False)
    _, _, sampled = await client.get("/front?do=own")
    spans = await client.spans(sampled, 10)
    assert {span.trace_id for span in receiver.spans if span.name == "own span"} >= {sampled}
    assert unsampled not in {span.trace_id for span in receiver.spans}
    traces_of_own = {span.trace_id for span in receiver.spans if span.name == "plain span"}
    assert all(
        any(s.trace_id == t and s.name.startswith("GET") for s in receiver.spans) for t in traces_of_own
    )
    assert len(spans) == 10


async def test_a_trace_that_begins_here_has_the_id_of_its_request(client: Client) -> None:
    async with client.session.get(client.url + "/front?do=chain") as response:
        digits = response.headers["X-Request-ID"].replace("-", "")
    spans = await client.spans(digits, 8)
    assert (spans[0].parent_id, len(spans)) == ("", 8)


async def test_what_user_code_raises_is_on_its_spans(client: Client) -> None:
    status, _, trace_id = await client.get("/front?do=raise")
    assert status == 500
    proxy, attempt, replica, code = await client.spans(trace_id, 4)
    assert "no such digit" in str(code.error)
    assert code.attributes["error.type"] == "ValueError"
    assert "no such digit" in str(replica.error)
    assert "no such digit" in str(attempt.error)
    assert proxy.error is not None
    assert proxy.attributes["http.response.status_code"] == 500
    assert proxy.attributes["error.type"]


async def test_what_is_raised_behind_a_handle_is_on_all_spans_of_the_way(client: Client) -> None:
    _, _, trace_id = await client.get("/front?do=raise-behind")
    spans = await client.spans(trace_id, 8)
    assert all("nothing there" in str(span.error) for span in spans if span.name != "GET /front")


async def test_a_stream_is_traced_to_its_end(client: Client) -> None:
    _, body, trace_id = await client.get("/front?do=stream")
    assert body == "0\n1\n2\n"
    assert await client.tree(trace_id, 8) == through(
        "/front", FRONT, ["user code __call__", chain(["user code numbers"])]
    )


async def test_an_application_and_its_errors_are_traced(client: Client) -> None:
    _, _, trace_id = await client.get("/pages/hello")
    assert await client.tree(trace_id, 4) == through("/pages", PAGES, ["user code __call__"])
    status, _, trace_id = await client.get("/pages/broken")
    assert status == 500
    replica, code = (await client.spans(trace_id, 4))[2:]
    assert "the page is broken" in str(code.error)
    assert code.events == ["exception"]
    assert code.attributes["error.type"] == "RuntimeError"
    assert replica.attributes["http.response.status_code"] == 500
    assert replica.error is not None


async def test_a_websocket_is_traced_while_it_lasts(client: Client) -> None:
    trace_id = uuid.uuid4().hex
    headers = {"traceparent": f"00-{trace_id}-{client.parent_id}-01"}
    async with client.session.ws_connect(client.url + "/pages/echo", headers=headers) as socket:
        await socket.send_str("a")
        assert await socket.receive_str() == "a"
        assert trace_id not in {span.trace_id for span in client.receiver.spans}
    assert await client.tree(trace_id, 4) == through("/pages", PAGES, ["user code __call__"])
    spans = await client.spans(trace_id, 4)
    assert [span.attributes["http.response.status_code"] for span in spans[:2]] == [101, 101]
    assert spans[0].error is None


async def test_a_call_that_nobody_has_decided_about_begins_its_trace_in_the_replica(
    stack: HandleStack, receiver: OtlpReceiver
) -> None:
    handle_runtime.use(stack.nats.settings(Role.CLIENT))
    try:
        assert await get_deployment_handle("back", "default").remote("from outside") == "from outside"
    finally:
        handle_runtime.disconnect()

    def begun(spans: list[ReceivedSpan]) -> list[ReceivedSpan]:
        return [span for span in spans if span.name == f"replica {BACK}" and not span.parent_id]

    (replica,) = begun(await asyncio.to_thread(receiver.wait, begun))
    assert tree(await asyncio.to_thread(receiver.of_trace, replica.trace_id, 2)) == [
        [f"replica {BACK}", ["user code __call__"]]
    ]


async def test_a_batch_has_a_span_that_is_linked_to_all_its_requests(client: Client) -> None:
    (_, _, first), (_, _, second) = await asyncio.gather(
        client.get("/front?do=batch&n=1"), client.get("/front?do=batch&n=2")
    )
    spans = await asyncio.to_thread(
        client.receiver.wait, lambda spans: any(span.name.startswith("batch ") for span in spans)
    )
    batch = next(span for span in spans if span.name.startswith("batch "))
    await client.spans(first, 8)
    await client.spans(second, 8)
    assert batch.trace_id in {first, second}
    assert {trace_id for trace_id, _ in batch.links} | {batch.trace_id} == {first, second}
    assert batch.attributes["muster.batch_size"] == 2


async def test_replicas_count_what_they_could_not_export(stack: HandleStack) -> None:
    def told() -> dict[str, float]:
        return {
            sample.labels["reason"]: sample.value
            for family in MetricsFiles(stack.metrics_dir).collect()
            for sample in family.samples
            if sample.name == SPANS_DROPPED.name
        }

    # Their processes write one after the other.
    await asyncio.to_thread(until, lambda: told() == {"queue": 0.0, "receiver": 0.0})


# What the controller does, in traces: commands, what they record, and the plans that they lead to.


PARENT = "00f067aa0ba902b7"


def command(replicas: int) -> bytes:
    replica_config = ReplicaConfig(import_path="model:Model")
    return msgspec.json.encode(
        Deploy(name="m", replica_config=replica_config, backend_config=BackendConfig(num_replicas=replicas))
    )


async def test_a_deploy_and_the_plan_that_follows_are_one_trace(
    server: NatsServer, postgres_server: PostgresServer
) -> None:
    with OtlpReceiver() as receiver:
        async with ControlPlane.opened(server, postgres_server) as plane:
            await plane.start_controller("c-1", **receiver.environment())
            await plane.until_led_by("c-1", timeout_s=CHANGE_LIMIT_S)
            # Once this succeeded the leader knows host, proxy and bucket; before, what it plans waits for them.
            before = await plane.admin.call(deploy_request("before", "v1"))
            assert before.goal_id is not None
            await plane.admin.wait_for_goal(before.goal_id, deadline_s=CHANGE_LIMIT_S)
            trace_id = uuid.uuid4().hex
            headers = {"traceparent": f"00-{trace_id}-{PARENT}-01", "Muster-Principal": "ann"}

            async def deploy(replicas: int) -> msgspec.Raw:
                answer = await plane.client.request(
                    plane.subjects.admin("deploy"), command(replicas), timeout=CHANGE_LIMIT_S, headers=headers
                )
                return msgspec.Raw(answer.data)

            reply = msgspec.json.decode(await deploy(2), type=ChangeReply)
            assert reply.goal_id is not None
            await plane.admin.wait_for_goal(reply.goal_id, deadline_s=CHANGE_LIMIT_S)

            def is_whole(spans: list[ReceivedSpan]) -> bool:
                return {"admin deploy", "reconcile", "send_host_goal"} <= {
                    span.name for span in spans if span.trace_id == trace_id
                }

            spans = [
                span for span in await asyncio.to_thread(receiver.wait, is_whole) if span.trace_id == trace_id
            ]
            (admin,) = tree(spans, PARENT)
            assert admin[:3] == ["admin deploy", ["record_command"], ["reply"]]
            name, *effects = admin[3]
            assert (name, effects[0]) == ("reconcile", ["record_plan"])
            assert ["send_host_goal"] in effects
            page = await plane.controllers[0].metrics()
            assert 'serve_trace_spans_dropped_total{reason="receiver"} 0.0' in page
            of = {span.name: span for span in spans}
            assert of["admin deploy"].service == "muster-controller"
            assert of["admin deploy"].attributes["muster.subject"] == "default/m"
            assert of["admin deploy"].attributes["muster.principal"] == "ann"
            assert of["reconcile"].attributes["muster.host_goals"] == 1
            assert of["reconcile"].attributes["muster.changes"] >= 2
            assert {span.error for span in spans} == {None}

            plans = [span for span in receiver.spans if span.name == "reconcile"]
            assert all(
                span.attributes["muster.changes"]
                or span.attributes["muster.snapshots"]
                or span.attributes["muster.host_goals"]
                for span in plans
            )

            trace_id = uuid.uuid4().hex
            headers["traceparent"] = f"00-{trace_id}-{PARENT}-01"
            await deploy(-1)
            (refused,) = await asyncio.to_thread(receiver.of_trace, trace_id, 1)
            assert refused.attributes["error.type"] == "BadField"
            assert "num_replicas" in str(refused.error)


async def test_a_rollout_is_a_trace_with_a_span_for_each_step(
    server: NatsServer, postgres_server: PostgresServer
) -> None:
    with OtlpReceiver() as receiver:
        async with ControlPlane.opened(server, postgres_server) as plane:
            await plane.start_controller("c-1", **receiver.environment())
            await plane.until_led_by("c-1", timeout_s=CHANGE_LIMIT_S)
            admin = plane.admin
            deployed = await admin.call(deploy_request("m", "v1"))
            assert deployed.goal_id is not None
            await admin.wait_for_goal(deployed.goal_id, deadline_s=CHANGE_LIMIT_S)
            steps = RolloutConfig(steps=("50%", "100% wait"))
            started = await admin.call(StartRollout(name="m", version="v2", rollout=steps))
            assert started.goal_id is not None

            async def in_force(step: int) -> bool:
                [view] = await admin.call(GetRollouts(name="m"))
                return view.step == step and view.is_in_force

            await eventually(lambda: in_force(0), within_s=CHANGE_LIMIT_S)
            await admin.call(ControlRollout(name="m", action=RolloutAction.STEP))
            await eventually(lambda: in_force(1), within_s=CHANGE_LIMIT_S)
            await admin.call(ControlRollout(name="m", action=RolloutAction.ABORT, reason="it smells"))

            def is_whole(spans: list[ReceivedSpan]) -> bool:
                return any(span.name == "rollout default/m" for span in spans)

            spans = await asyncio.to_thread(receiver.wait, is_whole)
            [whole] = [span for span in spans if span.name == "rollout default/m"]
            of = {span.name: span for span in spans if span.trace_id == whole.trace_id}
            assert set(of) == {"step 50%", "step 100% wait", "rollout default/m"}
            assert of["step 50%"].error is None
            assert of["step 100% wait"].error == whole.error == "by command: it smells"
            assert whole.attributes["muster.outcome"] == "aborted"
            assert whole.attributes["muster.version"] == "v2"
            assert {span.attributes["muster.goal_id"] for span in of.values()} == {started.goal_id}
