"""Evaluations in replicas, over NATS and the replicas' hosts; see `serve_common.protocol.evaluation`."""

from __future__ import annotations

import asyncio
import uuid
from typing import Final, final

import msgspec
from nats.aio.client import Client
from nats.aio.msg import Msg

from serve_common.errors import BadField, BusUnavailable
from serve_common.names import HostId, ReplicaTag
from serve_common.nats.client import publish_now
from serve_common.protocol.evaluation import (
    REQUEST_BYTES_MAX,
    Evaluation,
    EvaluationOrder,
    EvaluationReport,
    EvaluationResult,
    check_evaluation,
)
from serve_common.protocol.subjects import UNREADABLE, Subjects
from serve_common.telemetry.log_lines import RefusedMessages
from serve_controller.ports import PolicyFailed, ReplicaSilent

_PENDING_MAX: Final = 1_000
"""Most evaluations that are waited for at once."""


@final
class NatsReplicaEvaluator:
    """A `ReplicaEvaluator`."""

    def __init__(self, client: Client, subjects: Subjects, refused: RefusedMessages) -> None:
        """``refused`` counts results that cannot be read."""
        self._client = client
        self._subjects = subjects
        self._refused = refused
        self._pending: dict[str, tuple[HostId, ReplicaTag, asyncio.Future[EvaluationResult]]] = {}
        self._slots = asyncio.Semaphore(_PENDING_MAX)

    async def start(self) -> None:
        """Subscribe to results."""
        await self._client.subscribe(self._subjects.evaluation_reports, cb=self._on_report)

    async def evaluate(
        self, host_id: HostId, replica_tag: ReplicaTag, evaluation: Evaluation, timeout_s: float
    ) -> EvaluationResult:
        """What came of it in that replica. Raises `ReplicaSilent` when nothing came within ``timeout_s``, and other
        `PolicyFailed`."""
        try:
            async with asyncio.timeout(timeout_s), self._slots:
                return await self._request(host_id, replica_tag, evaluation)
        except TimeoutError as error:
            raise ReplicaSilent(f"{replica_tag} did not return within {timeout_s:.3g} s") from error
        except BusUnavailable as error:
            raise PolicyFailed(f"{replica_tag} cannot be asked: {error}") from error

    async def _request(
        self, host_id: HostId, replica_tag: ReplicaTag, evaluation: Evaluation
    ) -> EvaluationResult:
        body = msgspec.msgpack.encode(evaluation)
        if len(body) > REQUEST_BYTES_MAX:
            raise PolicyFailed(
                f"what it needs to know has {len(body):,} bytes, and at most {REQUEST_BYTES_MAX:,} can be sent"
            )
        request_id = str(uuid.uuid4())
        order = EvaluationOrder(request_id=request_id, replica_tag=replica_tag, body=body)
        result: asyncio.Future[EvaluationResult] = asyncio.get_running_loop().create_future()
        self._pending[request_id] = host_id, replica_tag, result
        try:
            subject = self._subjects.host_evaluation(host_id)
            await publish_now(self._client, subject, msgspec.msgpack.encode(order))
            return await result
        finally:
            del self._pending[request_id]

    async def _on_report(self, message: Msg) -> None:
        try:
            report = msgspec.msgpack.decode(message.data, type=EvaluationReport)
            known = self._pending.get(report.request_id)
            if known is None:
                return  # it came too late
            host_id, replica_tag, result = known
            self._check_sender(message.subject, report, host_id, replica_tag)
            value = check_evaluation(msgspec.msgpack.decode(report.body, type=EvaluationResult))
        except (*UNREADABLE, BadField) as error:
            self._refused.refuse("evaluation", message.subject, error)
            return
        if not result.done():
            result.set_result(value)

    def _check_sender(
        self, subject: str, report: EvaluationReport, host_id: HostId, replica_tag: ReplicaTag
    ) -> None:
        """Raise `BadField` unless the host that was asked reports: NATS lets each publish on its own subject only."""
        if (subject, report.replica_tag) != (self._subjects.evaluation_report(host_id), replica_tag):
            raise BadField("sender", f"{subject} reports on {report.replica_tag!r}")
