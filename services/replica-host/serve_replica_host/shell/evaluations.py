"""Passes evaluations on: from the controller to a replica, and what came of them back. The host reads neither.

User code can make its host's Ray runtime say anything, so only what was asked for is published, once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol, final

import msgspec

from serve_common.names import ReplicaTag
from serve_common.protocol.evaluation import EvaluationOrder, EvaluationReport
from serve_common.protocol.subjects import UNREADABLE
from serve_replica_host.core.events import Evaluated

PENDING_MAX: Final = 1_000
"""Most evaluations in progress; beyond it the oldest is forgotten: the controller does not wait for long."""


class EvaluatingReplicas(Protocol):
    """Has replicas evaluate."""

    def evaluate(self, replica_tag: ReplicaTag, request_id: str, body: bytes) -> None:
        """Pass ``body`` to the replica; the outcome is an event, which may be missing."""
        ...


@final
class EvaluationForwarder:
    """Evaluations in progress on this host."""

    def __init__(
        self,
        replicas: EvaluatingReplicas,
        publish: Callable[[bytes], None],
        refuse: Callable[[str, str, Exception], None],
    ) -> None:
        """``publish`` sends an encoded report; ``refuse`` counts a message that cannot be read."""
        self._replicas = replicas
        self._publish = publish
        self._refuse = refuse
        self._pending: dict[str, ReplicaTag] = {}

    def take_order(self, payload: bytes) -> None:
        """Pass on an encoded `EvaluationOrder`."""
        try:
            order = msgspec.msgpack.decode(payload, type=EvaluationOrder)
        except UNREADABLE as error:
            self._refuse("evaluation", f"{len(payload)} bytes", error)
            return
        self._pending[order.request_id] = order.replica_tag
        while len(self._pending) > PENDING_MAX:
            del self._pending[next(iter(self._pending))]
        self._replicas.evaluate(order.replica_tag, order.request_id, order.body)

    def take_event(self, event: Evaluated) -> None:
        """Publish what came of an evaluation; what was not asked for is dropped."""
        if self._pending.get(event.request_id) != event.replica_tag:
            return
        del self._pending[event.request_id]
        report = EvaluationReport(request_id=event.request_id, replica_tag=event.replica_tag, body=event.body)
        self._publish(msgspec.msgpack.encode(report))
