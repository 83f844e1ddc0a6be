"""Answers that leave from the user's thread: what may, what may not, and when their slots are free."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import pytest

from serve_common.protocol.frames import (
    ProbeHead,
    RefusedHead,
    RequestHead,
    RequestKind,
    ResponseHead,
    decode_frame,
    encode_frame,
)
from serve_common.runtime.threads import Mailbox
from serve_replica_host.replica.io.protocol import ReplicaProtocol
from serve_replica_host.replica.io.request import Answered, ReplicaRequest
from serve_replica_host.replica.io.response_frames import FRAME_BYTES_MAX, DirectResponses
from tests.unit.replica_rig import NoMetrics


class Wire:
    """Takes what is written, as the bus would."""

    def __init__(self) -> None:
        self.can_write_shared = True
        self.takes = True
        self.messages: list[tuple[bytes, ResponseHead, bytes]] = []
        self.writes = 0

    def write_shared(self, messages: Sequence[bytes]) -> bool:
        if not self.takes:
            return False
        self.writes += 1
        for subject, frame in _split(b"".join(messages)):
            head, body = decode_frame(frame)
            assert type(head) is ResponseHead
            self.messages.append((subject, head, bytes(body)))
        return True


def _split(messages: bytes) -> list[tuple[bytes, bytes]]:
    found = []
    while messages:
        line, _, rest = messages.partition(b"\r\n")
        _, subject, size = line.split(b" ")
        found.append((subject, rest[: int(size)]))
        messages = rest[int(size) + 2 :]
    return found


class Desk:
    """A bus side that hands requests to nobody but the test."""

    def __init__(self, max_concurrent_queries: int = 4) -> None:
        loop = asyncio.get_running_loop()
        self.wire = Wire()
        self.metrics = NoMetrics()
        self.metrics.count_refused = lambda reason: None  # type: ignore[method-assign]
        self.sent: list[tuple[bytes, Any]] = []
        self.begun: list[ReplicaRequest] = []
        self.bus_side = ReplicaProtocol(
            publish=lambda subject, frame: self.sent.append((subject, decode_frame(frame)[0])),
            to_user=lambda item: self.begun.append(item) if type(item) is ReplicaRequest else None,
            now=time.monotonic,
            metrics=self.metrics,
            max_concurrent_queries=max_concurrent_queries,
        )
        self.to_bus: Mailbox[Any] = Mailbox(loop, self.bus_side.handle_outcome)
        self.direct = DirectResponses(
            self.wire,
            self.to_bus.put,
            self.bus_side.handle_outcome,
            lambda: self.bus_side.in_flight,
            time.monotonic,
        )

    def ask(self, reply: bytes, *, patient: bool = False) -> None:
        head = RequestHead(RequestKind.HTTP, "GET", "/", "/", "", [], 5.0, 0, "echo", "id", patient=patient)
        self.bus_side.handle_frame(b"subject", reply, encode_frame(head), None)

    def answer(self, body: bytes = b"done", status: int = 200) -> None:
        self.direct.send(Answered(self.begun.pop(0), status, [], body))


@pytest.fixture
async def desk() -> Desk:
    return Desk()


async def test_the_answers_of_one_turn_leave_together_and_free_their_slots_at_once(desk: Desk) -> None:
    for reply in (b"_INBOX.r1", b"_INBOX.r2", b"_INBOX.r3"):
        desk.ask(reply)
    desk.answer()
    desk.answer(b"teapot", 418)
    assert desk.bus_side.in_flight == 1
    assert desk.wire.messages == []
    await asyncio.sleep(0)
    assert [(reply, head.status, body) for reply, head, body in desk.wire.messages] == [
        (b"_INBOX.r1", 200, b"done"),
        (b"_INBOX.r2", 418, b"teapot"),
    ]
    assert desk.wire.writes == 1
    assert [head.in_flight for _, head, _ in desk.wire.messages] == [2, 1]
    assert desk.metrics.answered == [200, 418]


async def test_a_slot_is_free_for_the_request_that_follows_the_answer(desk: Desk) -> None:
    desk.bus_side.max_concurrent_queries = 1
    for number in range(5):
        desk.ask(b"_INBOX.r%d" % number)
        desk.answer()
        await asyncio.sleep(0)
    assert len(desk.wire.messages) == 5
    assert desk.sent == []  # nobody was refused


async def test_a_request_that_waits_for_a_slot_gets_it_at_once(desk: Desk) -> None:
    desk.bus_side.max_concurrent_queries = 1
    desk.ask(b"_INBOX.r1")
    desk.ask(b"_INBOX.r2", patient=True)
    assert len(desk.begun) == 1
    desk.answer()
    async with asyncio.timeout(30):
        while not desk.begun:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0)
    assert desk.begun[0].reply == b"_INBOX.r2"


async def test_a_drain_ends_when_the_last_answer_has_left(desk: Desk) -> None:
    desk.ask(b"_INBOX.r1")
    desk.bus_side.start_drain()
    desk.answer()
    async with asyncio.timeout(30):
        await desk.bus_side.wait_idle()
    desk.direct.flush()  # as the user's side does when it is idle
    assert len(desk.wire.messages) == 1


async def test_a_drain_knows_what_was_answered_before_it(desk: Desk) -> None:
    desk.ask(b"_INBOX.r1")
    desk.answer()
    await asyncio.sleep(0)
    desk.bus_side.start_drain()
    async with asyncio.timeout(30):
        await desk.bus_side.wait_idle()


async def test_a_router_that_asks_for_a_lost_answer_is_told_it(desk: Desk) -> None:
    desk.wire.takes = False  # the connection is lost in this moment
    desk.ask(b"_INBOX.r1")
    desk.answer()
    await asyncio.sleep(0)
    desk.wire.can_write_shared = False
    probe = encode_frame(ProbeHead())
    desk.bus_side.handle_frame(b"subject", b"_INBOX.r1", probe, None)
    ((reply, head),) = desk.sent
    assert reply == b"_INBOX.r1"
    assert type(head) is ResponseHead
    assert head.status == 200


@pytest.mark.parametrize("why", ["large", "large head", "disconnected", "dropped"])
async def test_all_else_is_left_to_the_bus_side(desk: Desk, why: str) -> None:
    desk.ask(b"_INBOX.r1")
    exchange = desk.begun.pop()
    headers = []
    body = b"done"
    if why == "large":
        body = bytes(FRAME_BYTES_MAX + 1)
    elif why == "large head":
        headers = [(b"x", b"y" * FRAME_BYTES_MAX)]
    elif why == "disconnected":
        desk.wire.can_write_shared = False
    else:
        desk.bus_side._answers.drop(exchange, 499)
    desk.direct.send(Answered(exchange, 200, headers, body))
    async with asyncio.timeout(30):
        await desk.bus_side.wait_idle()
    assert desk.wire.messages == []
    assert len(desk.sent) == (0 if why == "dropped" else 1)
    assert desk.metrics.answered == [499 if why == "dropped" else 200]


async def test_an_answer_that_comes_with_its_deadline_frees_the_slot_once(desk: Desk) -> None:
    desk.ask(b"_INBOX.r1")
    exchange = desk.begun[0]
    desk.answer()
    exchange.deadline = 0.0
    desk.bus_side.sweep()  # hears of the answer first
    assert desk.sent == []
    assert desk.bus_side.in_flight == 0
    assert desk.metrics.answered == [200]
    desk.bus_side.handle_frame(b"subject", b"_INBOX.r1", encode_frame(ProbeHead()), None)
    assert type(desk.sent[0][1]) is not RefusedHead
