"""A host passes evaluations on, and back only what was asked for."""

from __future__ import annotations

import msgspec

from serve_common.names import ReplicaTag
from serve_common.protocol.evaluation import RESULT_BYTES_MAX, EvaluationOrder, EvaluationReport
from serve_replica_host.core.events import Evaluated
from serve_replica_host.shell import evaluations
from serve_replica_host.shell.evaluations import EvaluationForwarder

TAG, OTHER = ReplicaTag("shop/cart#1"), ReplicaTag("bank/ledger#2")


class Rig:
    def __init__(self) -> None:
        self.asked: list[tuple[ReplicaTag, str, bytes]] = []
        self.published: list[EvaluationReport] = []
        self.refused: list[tuple[str, str]] = []
        self.forwarder = EvaluationForwarder(
            self, self._publish, lambda kind, sender, _: self._refuse(kind, sender)
        )

    def evaluate(self, replica_tag: ReplicaTag, request_id: str, body: bytes) -> None:
        self.asked.append((replica_tag, request_id, body))

    def _publish(self, payload: bytes) -> None:
        self.published.append(msgspec.msgpack.decode(payload, type=EvaluationReport))

    def _refuse(self, kind: str, sender: str) -> None:
        self.refused.append((kind, sender))

    def order(self, request_id: str) -> None:
        order = EvaluationOrder(request_id=request_id, replica_tag=TAG, body=b"question")
        self.forwarder.take_order(msgspec.msgpack.encode(order))


def test_what_came_of_an_evaluation_is_published_once_and_nothing_else_is() -> None:
    rig = Rig()
    rig.order("r1")
    assert rig.asked == [(TAG, "r1", b"question")]
    rig.forwarder.take_event(Evaluated(OTHER, "r1", b"forged"))
    rig.forwarder.take_event(Evaluated(TAG, "r2", b"never asked for"))
    assert rig.published == []
    for _ in range(2):
        rig.forwarder.take_event(Evaluated(TAG, "r1", b"result"))
    assert rig.published == [EvaluationReport(request_id="r1", replica_tag=TAG, body=b"result")]


def test_orders_that_cannot_be_read_are_counted_and_the_oldest_in_progress_is_forgotten() -> None:
    rig = Rig()
    for payload in (
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"request_id": "x" * 65, "replica_tag": TAG, "body": b""}),
    ):
        rig.forwarder.take_order(payload)
    assert [kind for kind, _ in rig.refused] == ["evaluation"] * 3
    assert rig.asked == []
    for number in range(evaluations.PENDING_MAX + 1):
        rig.order(f"r{number}")
    rig.forwarder.take_event(Evaluated(TAG, "r0", b"late"))
    rig.forwarder.take_event(Evaluated(TAG, "r1", b"in time"))
    assert [report.request_id for report in rig.published] == ["r1"]
    assert RESULT_BYTES_MAX < 256 * 1024, "a notice of the runtime has at most as much"
