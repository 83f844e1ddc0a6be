"""Evaluations in replicas over a real nats-server: whose reports count, and what bounds the waiting."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator

import msgspec
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from serve_common.names import HostId, ReplicaTag
from serve_common.nats.client import close_nats
from serve_common.protocol.evaluation import (
    Evaluation,
    EvaluationOrder,
    EvaluationReport,
    EvaluationResult,
    PolicyCall,
)
from serve_common.protocol.subjects import Subjects
from serve_common.telemetry.log_lines import RefusedMessages
from serve_controller.adapters.replica_evaluator import NatsReplicaEvaluator
from serve_controller.ports import PolicyFailed, ReplicaSilent
from tests.support.scaling import build_context
from tests.support.servers.nats_server import NatsServer, connected, until_known

HOST, OTHER_HOST = HostId("host-1"), HostId("host-2")
TAG, OTHER_TAG = ReplicaTag("shop/cart#1"), ReplicaTag("shop/cart#2")
RESULT = EvaluationResult(num_replicas=3.0, policy_state={"n": 1})


class Rig:
    """A controller's evaluator, and a connection that plays all hosts."""

    def __init__(self, client: Client, subjects: Subjects) -> None:
        self.client, self.subjects = client, subjects
        self.refused = RefusedMessages(time.monotonic)
        self.evaluator = NatsReplicaEvaluator(client, subjects, self.refused)
        self.orders: asyncio.Queue[EvaluationOrder] = asyncio.Queue()

    async def start(self) -> None:
        await self.evaluator.start()
        await self.client.subscribe(self.subjects.host_evaluation(HOST), cb=self._take)
        await until_known(self.client)

    async def _take(self, message: Msg) -> None:
        self.orders.put_nowait(msgspec.msgpack.decode(message.data, type=EvaluationOrder))

    async def report(
        self, order: EvaluationOrder, result: object = RESULT, host: HostId = HOST, tag: ReplicaTag = TAG
    ) -> None:
        body = msgspec.msgpack.encode(result)
        report = EvaluationReport(request_id=order.request_id, replica_tag=tag, body=body)
        await self.client.publish(self.subjects.evaluation_report(host), msgspec.msgpack.encode(report))


@pytest.fixture
async def rig(shared_server: NatsServer) -> AsyncIterator[Rig]:
    subjects = Subjects(f"t{uuid.uuid4().hex[:10]}")
    client = await connected(shared_server, subjects)
    made = Rig(client, subjects)
    await made.start()
    yield made
    await close_nats(client)


async def test_only_the_host_that_was_asked_can_report_and_only_once(rig: Rig) -> None:
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(rig.evaluator.evaluate(HOST, TAG, Evaluation(), 20.0))
        await report_for_others_and_nonsense(rig, waiting)
    assert waiting.result() == RESULT
    await until_known(rig.client)
    assert rig.refused.counts["evaluation"] == 8


async def report_for_others_and_nonsense(rig: Rig, waiting: asyncio.Task[EvaluationResult]) -> None:
    order = await rig.orders.get()
    assert order.replica_tag == TAG
    assert msgspec.msgpack.decode(order.body, type=Evaluation) == Evaluation()
    forged = EvaluationResult(num_replicas=9.0)
    await rig.report(order, forged, host=OTHER_HOST)
    await rig.report(order, forged, tag=OTHER_TAG)
    await rig.report(order, {"num_replicas": float("nan")})
    await rig.report(order, {"num_replicas": -1.0})
    await rig.report(order, {"stats": {"queue": float("inf")}})
    await rig.report(order, {"policy_state": {"data": "x" * 100_000}})
    await rig.report(order, {"policy_state": {"ext": msgspec.msgpack.Ext(5, b"")}})
    await rig.client.publish(rig.subjects.evaluation_report(HOST), b"\xc1")
    assert not waiting.done()
    await rig.report(order)
    await rig.report(order, forged)


async def test_a_silent_replica_a_late_report_and_a_context_that_is_too_large_end_in_errors(rig: Rig) -> None:
    with pytest.raises(ReplicaSilent, match=r"shop/cart#1 did not return within 0\.05 s"):
        await rig.evaluator.evaluate(HOST, TAG, Evaluation(), 0.05)
    await rig.report(await rig.orders.get())
    context = build_context(policy_state={"data": "x" * 1_000_000})
    call = PolicyCall(name="m:f", digest="", code=b"", kwargs={}, context=context)
    with pytest.raises(PolicyFailed, match="at most 983,040 can be sent"):
        await rig.evaluator.evaluate(HOST, TAG, Evaluation(policy=call), 5.0)
    assert rig.refused.counts["evaluation"] == 0
    assert rig.evaluator._pending == {}
