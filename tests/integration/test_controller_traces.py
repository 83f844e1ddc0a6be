"""What the controller does, in traces: commands, what they record, and the plans that they lead to."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from serve_common.api.commands import ChangeReply, Deploy
from serve_common.config.backend import BackendConfig
from serve_common.config.replica import ReplicaConfig
from tests.integration.control_plane import CHANGE_LIMIT_S, ControlPlane, NatsServer, deploy_request
from tests.integration.otlp_receiver import OtlpReceiver, ReceivedSpan, tree
from tests.integration.postgres_server import PostgresServer

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

PARENT = "00f067aa0ba902b7"


@pytest.fixture
def nats(tmp_path: Path) -> Iterator[NatsServer]:
    with NatsServer(tmp_path) as server:
        yield server


def command(replicas: int) -> bytes:
    replica_config = ReplicaConfig(import_path="model:Model")
    return msgspec.json.encode(
        Deploy(name="m", replica_config=replica_config, backend_config=BackendConfig(num_replicas=replicas))
    )


async def test_a_deploy_and_the_plan_that_follows_are_one_trace(
    nats: NatsServer, postgres_server: PostgresServer
) -> None:
    with OtlpReceiver() as receiver:
        async with ControlPlane.opened(nats, postgres_server) as plane:
            await plane.start_controller("c-1", **receiver.environment())
            await plane.until_led_by("c-1", timeout_s=CHANGE_LIMIT_S)
            # Once this succeeded the leader knows host, proxy and bucket; before, what it plans waits for them.
            before = await plane.admin.deploy(deploy_request("before", "v1"))
            assert before.goal_id is not None
            await plane.admin.wait_for_goal(before.goal_id, deadline_s=CHANGE_LIMIT_S)
            trace_id = uuid.uuid4().hex
            headers = {"traceparent": f"00-{trace_id}-{PARENT}-01", "Muster-Who": "ann"}

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
            assert of["admin deploy"].attributes["muster.who"] == "ann"
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
