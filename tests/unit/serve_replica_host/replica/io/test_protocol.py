"""A replica's bus side, frame by frame: what is in flight, what is refused, and that every slot comes back once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from serve_common.nats.options import NotConnected, PayloadTooLarge
from serve_common.protocol.frames import (
    FRAME_BODY_BYTES_MAX,
    WINDOW_FRAMES,
    AliveHead,
    BodyHead,
    CancelHead,
    CreditHead,
    ErrorHead,
    Head,
    ProbeHead,
    RefusedHead,
    RequestHead,
    RequestKind,
    ResponseHead,
    decode_frame,
    encode_frame,
)
from serve_common.runtime.threads import Mailbox
from serve_replica_host.ports import Occupancy
from serve_replica_host.replica.io.protocol import REQUEST_BODY_BYTES_MAX, ROUTER_SILENT_S, ReplicaProtocol
from serve_replica_host.replica.io.request import (
    Drop,
    Ended,
    Failed,
    Opened,
    Piece,
    ReplicaRequest,
    UserEvent,
    WholeResponseEvent,
    Writable,
)
from serve_replica_host.replica.io.response_frames import FRAME_BYTES_MAX, DirectResponses
from tests.support.replica_rig import NoMetrics
from tests.support.waiting import eventually

ME = b"_INBOX.1"


class Tally:
    """Metrics that remember."""

    def __init__(self) -> None:
        self.answered: list[int] = []
        self.refused: list[str] = []

    def count_response(self, status: int, seconds: float) -> None:
        assert seconds >= 0
        self.answered.append(status)

    def count_refused(self, reason: str) -> None:
        self.refused.append(reason)

    def turn(self) -> None:
        raise AssertionError

    def write(self, occupancy: Occupancy) -> None:
        raise AssertionError


class Desk:
    """A bus side with a bus and a user side made of lists."""

    def __init__(self, max_concurrent_queries: int = 2) -> None:
        self.sent: list[tuple[bytes, Head, bytes]] = []
        self.user_queue: list[UserEvent] = []
        self.now = 100.0
        self.metrics = Tally()
        self.broken: Exception | None = None
        self.side = ReplicaProtocol(
            publish=self._publish,
            user_queue=self.user_queue.append,
            now=lambda: self.now,
            metrics=self.metrics,
            max_concurrent_queries=max_concurrent_queries,
        )

    def _publish(self, subject: bytes, frame: bytes) -> None:
        if self.broken is not None:
            raise self.broken
        head, body = decode_frame(frame)
        self.sent.append((subject, head, bytes(body)))

    def hear(self, head: Head, body: bytes = b"", reply: bytes = ME) -> None:
        self.side.handle_frame(b"serve.replica.x", reply, encode_frame(head, body), None)

    def begin(self, body: bytes = b"", reply: bytes = ME, body_bytes: int | None = None) -> ReplicaRequest:
        whole = len(body) if body_bytes is None else body_bytes
        self.hear(_request(whole), body, reply)
        exchange = self.user_queue[-1]
        assert isinstance(exchange, ReplicaRequest)
        return exchange

    @property
    def heads(self) -> list[Head]:
        return [head for _, head, _ in self.sent]


def _request(body_bytes: int = 0, timeout_s: float = 10.0) -> RequestHead:
    return RequestHead(RequestKind.HTTP, "POST", "/a", "/a", "", [], timeout_s, body_bytes, "default/a", "r1")


async def test_a_small_request_is_handed_over_and_its_answer_frees_the_slot() -> None:
    desk = Desk()
    exchange = desk.begin(b"body")
    assert (exchange.body, desk.side.in_flight) == (b"body", 1)

    desk.side.handle_outcome(WholeResponseEvent(exchange, 201, [(b"a", b"b")], b"ok"))

    assert desk.sent == [(ME, ResponseHead(201, [(b"a", b"b")], True, 0), b"ok")]
    assert desk.side.in_flight == 0
    assert desk.metrics.answered == [201]
    desk.side.handle_outcome(Ended(exchange))
    assert len(desk.sent) == 1


async def test_what_exceeds_the_concurrency_is_refused_busy_and_a_drain_refuses_all() -> None:
    desk = Desk(max_concurrent_queries=1)
    desk.begin()

    desk.hear(_request(), reply=b"_INBOX.2")
    desk.side.is_draining = True
    desk.hear(_request(), reply=b"_INBOX.3")

    assert desk.heads == [RefusedHead("busy", 1), RefusedHead("draining", 1)]
    assert desk.metrics.refused == ["busy", "draining"]


async def test_the_same_request_again_does_not_run_twice() -> None:
    desk = Desk()
    desk.begin()

    desk.hear(_request())

    assert len(desk.user_queue) == 1
    assert desk.side.in_flight == 1


async def test_a_large_body_is_put_together_under_credit_and_then_handed_over() -> None:
    desk = Desk()
    desk.hear(_request(body_bytes=6), b"ab")
    assert desk.user_queue == []

    desk.hear(BodyHead(1, False), b"cd")
    desk.hear(BodyHead(1, False), b"cd")
    desk.hear(BodyHead(2, True), b"ef")

    (exchange,) = desk.user_queue
    assert isinstance(exchange, ReplicaRequest)
    assert exchange.body == b"abcdef"


async def test_credit_is_given_for_parts_of_the_window_and_for_all_that_was_taken() -> None:
    desk = Desk()
    frames = WINDOW_FRAMES * 3
    desk.hear(_request(body_bytes=frames + 2), b"a")
    for sequence in range(1, frames + 1):
        desk.hear(BodyHead(sequence, False), b"b")

    given = [head.frames for head in desk.heads if isinstance(head, CreditHead)]

    assert len(given) == len(desk.heads)
    assert len(given) <= 13
    assert frames - WINDOW_FRAMES < sum(given) <= frames + 1


@pytest.mark.parametrize(
    ("head", "body"), [(BodyHead(2, False), b"ef"), (BodyHead(1, True), b"c"), (BodyHead(1, False), b"cdefg")]
)
async def test_a_body_with_a_lost_part_or_a_wrong_size_fails_and_frees_the_slot(
    head: BodyHead, body: bytes
) -> None:
    desk = Desk()
    desk.hear(_request(body_bytes=6), b"ab")

    desk.hear(head, body)

    assert isinstance(desk.heads[-1], ErrorHead)
    assert desk.heads[-1].status == 502
    assert desk.side.in_flight == 0
    assert desk.user_queue == []


async def test_a_body_beyond_the_limit_is_refused_before_it_comes() -> None:
    desk = Desk()

    desk.hear(_request(body_bytes=REQUEST_BODY_BYTES_MAX + 1), b"ab")

    assert isinstance(desk.heads[-1], ErrorHead)
    assert desk.heads[-1].status == 413
    assert desk.side.in_flight == 0


async def test_a_large_answer_is_cut_and_waits_for_credit_while_others_are_served() -> None:
    desk = Desk()
    exchange = desk.begin()
    body = bytes(range(256)) * (FRAME_BODY_BYTES_MAX // 256) * (WINDOW_FRAMES + 2)

    desk.side.handle_outcome(WholeResponseEvent(exchange, 200, [], body))
    assert [type(head) for head in desk.heads] == [ResponseHead, *[BodyHead] * (WINDOW_FRAMES - 1)]
    other = desk.begin(reply=b"_INBOX.2")
    desk.side.handle_outcome(WholeResponseEvent(other, 200, [], b"x"))
    assert desk.side.in_flight == 1
    desk.hear(CreditHead(1))
    desk.hear(CreditHead(9))

    mine = [(head, piece) for subject, head, piece in desk.sent if subject == ME]
    assert mine[0][0] == ResponseHead(200, [(b"content-length", b"%d" % len(body))], False, 0)
    assert [head for head, _ in mine[1:]] == [
        BodyHead(n, n == WINDOW_FRAMES + 1) for n in range(1, WINDOW_FRAMES + 2)
    ]
    assert b"".join(piece for _, piece in mine) == body
    assert desk.side.in_flight == 0


async def test_a_streamed_answer_tells_the_user_side_what_has_left_and_ends_with_its_last_piece() -> None:
    desk = Desk()
    exchange = desk.begin()

    desk.side.handle_outcome(Opened(exchange, 200, [(b"a", b"b")]))
    desk.side.handle_outcome(Piece(exchange, b"one", last=False))
    assert desk.user_queue[-1] == Writable(exchange)
    assert exchange.sent_bytes == 3
    desk.side.handle_outcome(Piece(exchange, b"two", last=True))
    desk.side.handle_outcome(Ended(exchange))

    assert [(head, body) for _, head, body in desk.sent] == [
        (ResponseHead(200, [(b"a", b"b")], False, 0), b""),
        (BodyHead(1, False), b"one"),
        (BodyHead(2, True), b"two"),
    ]
    assert desk.side.in_flight == 0
    assert desk.metrics.answered == [200]


async def test_cancel_drops_the_answer_and_holds_the_slot_until_the_work_has_ended() -> None:
    desk = Desk()
    exchange = desk.begin()

    desk.hear(CancelHead())
    desk.hear(CancelHead())
    assert desk.user_queue[1:] == [Drop(exchange)]
    assert desk.side.in_flight == 1
    desk.side.handle_outcome(WholeResponseEvent(exchange, 200, [], b"too late"))

    assert desk.sent == []
    assert desk.side.in_flight == 0
    assert desk.metrics.answered == [499]


async def test_cancel_while_the_body_comes_or_the_answer_goes_frees_the_slot_at_once() -> None:
    desk = Desk()
    desk.hear(_request(body_bytes=6), b"ab")
    desk.hear(CancelHead())
    assert desk.side.in_flight == 0

    exchange = desk.begin(reply=b"_INBOX.2")
    desk.side.handle_outcome(
        WholeResponseEvent(exchange, 200, [], b"x" * FRAME_BODY_BYTES_MAX * (WINDOW_FRAMES + 1))
    )
    assert desk.side.in_flight == 1
    desk.hear(CancelHead(), reply=b"_INBOX.2")
    assert desk.side.in_flight == 0


async def test_the_deadline_does_not_end_an_answer_that_has_begun() -> None:
    desk = Desk()
    exchange = desk.begin()
    desk.side.handle_outcome(Opened(exchange, 200, []))

    desk.now += 11.0
    desk.side.sweep()

    assert [type(head) for head in desk.heads] == [ResponseHead]
    assert desk.side.in_flight == 1


async def test_a_router_that_is_not_heard_of_gives_its_slots_back_unless_the_bus_was_away() -> None:
    desk = Desk()
    exchange = desk.begin()
    desk.side.handle_outcome(Opened(exchange, 200, []))

    desk.now += ROUTER_SILENT_S - 1
    desk.hear(ProbeHead())
    desk.now += ROUTER_SILENT_S - 1
    desk.side.bus_lost()
    desk.now += 2
    desk.side.sweep()
    desk.side.bus_joined()
    desk.side.sweep()
    assert not exchange.is_dropped
    desk.now += ROUTER_SILENT_S
    desk.side.sweep()

    assert desk.user_queue[-1] == Drop(exchange)
    desk.side.handle_outcome(Ended(exchange))
    assert desk.side.in_flight == 0


async def test_a_deadline_answers_504_and_ends_the_work() -> None:
    desk = Desk()
    exchange = desk.begin()
    desk.hear(_request(timeout_s=60.0), reply=b"_INBOX.2")

    desk.now += 10.0
    desk.side.sweep()
    desk.side.sweep()

    (error,) = desk.heads
    assert isinstance(error, ErrorHead)
    assert (error.error_code, error.status) == ("deadline_exceeded", 504)
    assert Drop(exchange) in desk.user_queue
    desk.side.handle_outcome(Ended(exchange))
    assert desk.side.in_flight == 1
    assert desk.metrics.answered == [504]


async def test_a_probe_is_refused_only_when_the_request_is_unknown() -> None:
    desk = Desk()
    desk.begin()

    desk.hear(ProbeHead())
    desk.hear(ProbeHead(), reply=b"_INBOX.2")

    assert desk.sent == [(ME, AliveHead(), b""), (b"_INBOX.2", RefusedHead("unknown", 1), b"")]


async def test_a_failure_after_the_answer_has_begun_ends_it_with_an_error() -> None:
    desk = Desk()
    exchange = desk.begin()
    desk.side.handle_outcome(Opened(exchange, 200, []))

    desk.side.handle_outcome(Failed(exchange, "user_code_raised", 500, "ValueError"))

    assert desk.heads[-1] == ErrorHead("user_code_raised", 500, "ValueError", 0)
    assert desk.side.in_flight == 0


async def test_an_answer_that_cannot_be_sent_still_frees_the_slot() -> None:
    desk = Desk()
    exchange = desk.begin()
    desk.broken = NotConnected("away")
    desk.side.handle_outcome(WholeResponseEvent(exchange, 200, [], b"x"))
    assert desk.side.in_flight == 0

    desk.broken = None
    exchange = desk.begin(reply=b"_INBOX.2")
    desk.side.handle_outcome(WholeResponseEvent(exchange, 200, [(b"a", b"b" * 70_000)], b"x"))
    assert desk.side.in_flight == 0
    assert isinstance(desk.heads[-1], ErrorHead)
    assert "headers" in desk.heads[-1].message


async def test_a_server_with_a_smaller_payload_limit_gives_an_error_and_frees_the_slot() -> None:
    desk = Desk()
    exchange = desk.begin()
    refuse_large = desk._publish

    def publish(subject: bytes, frame: bytes) -> None:
        if len(frame) > 1000:
            raise PayloadTooLarge("too large")
        refuse_large(subject, frame)

    desk.side._frames.publish = publish
    desk.side.handle_outcome(WholeResponseEvent(exchange, 200, [], b"x" * 2000))

    assert isinstance(desk.heads[-1], ErrorHead)
    assert desk.side.in_flight == 0


async def test_bytes_that_are_no_frame_and_frames_without_reply_change_nothing() -> None:
    desk = Desk()

    for payload in (b"", b"\x00", b"\xff\xff", b"\x00\x02\xc1\xc1"):
        desk.side.handle_frame(b"s", ME, payload, None)
    desk.hear(_request(), reply=b"")
    desk.hear(ResponseHead(200, [], True, 0))

    assert (desk.sent, desk.user_queue, desk.side.in_flight) == ([], [], 0)


async def test_idle_is_told_when_the_last_request_has_left() -> None:
    desk = Desk()
    await desk.side.wait_idle()
    exchange = desk.begin()
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(desk.side.wait_idle())
        await asyncio.sleep(0.02)
        assert not waiting.done()

        desk.side.handle_outcome(Failed(exchange, "user_code_raised", 500, "no"))


async def test_an_answer_that_may_be_lost_is_said_again_when_its_router_asks() -> None:
    desk = Desk()
    exchange = desk.begin()
    desk.side.handle_outcome(WholeResponseEvent(exchange, 200, [], b"ok"))
    desk.now += 1.0

    desk.hear(ProbeHead(1.0))
    desk.hear(_request())  # and the request itself, should it come again, does not run again

    assert desk.sent[1] == desk.sent[0]
    assert len(desk.user_queue) == 1
    assert len(desk.sent) == 2


async def test_an_error_is_said_again_while_the_work_that_nobody_wants_goes_on() -> None:
    desk = Desk()
    desk.begin(body_bytes=None)
    desk.now += 11.0
    desk.side.sweep()

    desk.hear(ProbeHead(11.0))

    assert [type(head) for head in desk.heads] == [ErrorHead, ErrorHead]


async def test_a_request_that_did_not_arrive_is_known_not_to_have_begun_and_will_not_begin() -> None:
    desk = Desk()
    desk.now += 10.0

    desk.hear(ProbeHead(2.0))
    desk.hear(_request())

    assert desk.heads == [RefusedHead("never_begun", 0)]
    assert not desk.user_queue


async def test_what_may_have_ended_and_been_forgotten_is_unknown() -> None:
    desk = Desk()
    for reply in (b"_INBOX.7", b"_INBOX.8", b"_INBOX.9"):
        exchange = desk.begin(reply=reply)
        desk.side.handle_outcome(WholeResponseEvent(exchange, 200, [], b"ok"))
        desk.now += 10.0

    desk.hear(ProbeHead(31.0))
    desk.hear(ProbeHead(), reply=b"_INBOX.2")
    desk.hear(ProbeHead(31.0), reply=b"_INBOX.7")

    assert desk.heads[3:] == [RefusedHead("unknown", 0)] * 3


async def test_a_replica_that_is_cut_off_stays_for_its_routers_until_it_was_back_for_a_while() -> None:
    desk = Desk()
    assert desk.side.seconds_until_probed() == 0.0
    desk.side.bus_joined()
    exchange = desk.begin()
    desk.side.bus_lost()
    desk.side.handle_outcome(WholeResponseEvent(exchange, 200, [], b"lost"))
    desk.side.start_drain()
    desk.now += 100.0
    assert desk.side.seconds_until_probed() == 2.0

    desk.side.bus_joined()
    desk.now += 0.5
    assert desk.side.seconds_until_probed() == 1.5
    desk.side.bus_lost()
    desk.now += 1.5
    assert desk.side.seconds_until_probed() == 2.0
    desk.side.bus_joined()
    desk.now += 2.0
    assert desk.side.seconds_until_probed() == 0.0


async def test_a_certain_refusal_that_was_lost_is_said_again() -> None:
    desk = Desk()
    desk.now += 10.0

    desk.hear(ProbeHead(2.0))
    desk.hear(ProbeHead(3.0))

    assert desk.heads == [RefusedHead("never_begun", 0)] * 2


def _patient(timeout_s: float = 10.0) -> RequestHead:
    return msgspec.structs.replace(_request(timeout_s=timeout_s), may_queue=True)


async def test_patient_requests_get_the_slots_that_come_free_in_their_order() -> None:
    desk = Desk(max_concurrent_queries=1)
    first = desk.begin()
    for reply in (b"_INBOX.2", b"_INBOX.3", b"_INBOX.4"):
        desk.hear(_patient(), reply=reply)
    desk.hear(_patient(), reply=b"_INBOX.2")  # doubled
    desk.hear(CancelHead(), reply=b"_INBOX.3")
    desk.hear(ProbeHead(1.0), reply=b"_INBOX.2")
    assert (desk.side.in_flight, desk.heads) == (1, [AliveHead()])

    desk.side.handle_outcome(WholeResponseEvent(first, 200, [], b""))
    second = desk.user_queue[-1]
    assert isinstance(second, ReplicaRequest)
    assert (second.reply, desk.side.in_flight) == (b"_INBOX.2", 1)
    desk.hear(_request(), reply=b"_INBOX.5")  # whoever is not patient does not overtake
    assert desk.heads[-1] == RefusedHead("busy", 1)
    desk.side.handle_outcome(WholeResponseEvent(second, 200, [], b""))
    third = desk.user_queue[-1]
    assert isinstance(third, ReplicaRequest)
    assert third.reply == b"_INBOX.4"
    desk.side.handle_outcome(WholeResponseEvent(third, 200, [], b""))
    assert desk.side.in_flight == 0


async def test_who_waits_for_a_slot_too_long_or_into_a_drain_is_told() -> None:
    desk = Desk(max_concurrent_queries=1)
    desk.begin()
    desk.hear(_patient(timeout_s=1.0), reply=b"_INBOX.2")
    desk.hear(_patient(), reply=b"_INBOX.3")
    desk.now += 2.0
    desk.side.sweep()
    assert [type(head) for head in desk.heads] == [ErrorHead]

    desk.side.start_drain()
    assert desk.heads[-1] == RefusedHead("draining", 1)
    desk.hear(_patient(), reply=b"_INBOX.4")
    assert desk.heads[-1] == RefusedHead("draining", 1)
    assert desk.sent[-1][0] == b"_INBOX.4"


@pytest.mark.parametrize("reply", [b"", b"serve.report.host.h", b"serve.replica.a.b.1", b"$JS.API.INFO"])
@pytest.mark.parametrize("head", [_request(), ProbeHead(1.0), CreditHead(1)])
async def test_nothing_is_answered_but_into_inboxes(reply: bytes, head: Head) -> None:
    desk = Desk()
    desk.hear(head, reply=reply)
    assert desk.sent == []
    assert desk.user_queue == []
    assert desk.metrics.refused == ["reply_subject"]


async def test_a_probe_gets_a_sign_of_life_while_the_request_is_worked_on_or_waits() -> None:
    desk = Desk(max_concurrent_queries=1)
    desk.begin()
    waiting = msgspec.structs.replace(_request(), may_queue=True)
    desk.hear(waiting, reply=b"_INBOX.2")
    for reply in (ME, b"_INBOX.2"):
        desk.hear(ProbeHead(1.0), reply=reply)
        assert desk.sent.pop()[:2] == (reply, AliveHead())


# Answers that leave from the user's thread: what may, what may not, and when their slots are free.


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


class DirectDesk:
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
            user_queue=lambda item: self.begun.append(item) if type(item) is ReplicaRequest else None,
            now=time.monotonic,
            metrics=self.metrics,
            max_concurrent_queries=max_concurrent_queries,
        )
        self.io_queue: Mailbox[Any] = Mailbox(loop, self.bus_side.handle_outcome)
        self.direct = DirectResponses(
            self.wire,
            self.io_queue.put,
            self.bus_side.handle_outcome,
            lambda: self.bus_side.in_flight,
            time.monotonic,
        )

    def ask(self, reply: bytes, *, may_queue: bool = False) -> None:
        head = RequestHead(
            RequestKind.HTTP, "GET", "/", "/", "", [], 5.0, 0, "echo", "id", may_queue=may_queue
        )
        self.bus_side.handle_frame(b"subject", reply, encode_frame(head), None)

    def answer(self, body: bytes = b"done", status: int = 200) -> None:
        self.direct.send(WholeResponseEvent(self.begun.pop(0), status, [], body))


@pytest.fixture
async def desk() -> DirectDesk:
    return DirectDesk()


async def test_the_answers_of_one_turn_leave_together_and_free_their_slots_at_once(desk: DirectDesk) -> None:
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


async def test_a_slot_is_free_for_the_request_that_follows_the_answer(desk: DirectDesk) -> None:
    desk.bus_side.max_concurrent_queries = 1
    for number in range(5):
        desk.ask(b"_INBOX.r%d" % number)
        desk.answer()
        await asyncio.sleep(0)
    assert len(desk.wire.messages) == 5
    assert desk.sent == []  # nobody was refused


async def test_a_request_that_waits_for_a_slot_gets_it_at_once(desk: DirectDesk) -> None:
    desk.bus_side.max_concurrent_queries = 1
    desk.ask(b"_INBOX.r1")
    desk.ask(b"_INBOX.r2", may_queue=True)
    assert len(desk.begun) == 1
    desk.answer()
    await eventually(lambda: desk.begun)
    assert desk.begun[0].reply == b"_INBOX.r2"


async def test_a_drain_ends_when_the_last_answer_has_left(desk: DirectDesk) -> None:
    desk.ask(b"_INBOX.r1")
    desk.bus_side.start_drain()
    desk.answer()
    async with asyncio.timeout(30):
        await desk.bus_side.wait_idle()
    desk.direct.flush()  # as the user's side does when it is idle
    assert len(desk.wire.messages) == 1


async def test_a_drain_knows_what_was_answered_before_it(desk: DirectDesk) -> None:
    desk.ask(b"_INBOX.r1")
    desk.answer()
    await asyncio.sleep(0)
    desk.bus_side.start_drain()
    async with asyncio.timeout(30):
        await desk.bus_side.wait_idle()


async def test_a_router_that_asks_for_a_lost_answer_is_told_it(desk: DirectDesk) -> None:
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
async def test_all_else_is_left_to_the_bus_side(desk: DirectDesk, why: str) -> None:
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
        desk.bus_side._responses.drop(exchange, 499)
    desk.direct.send(WholeResponseEvent(exchange, 200, headers, body))
    async with asyncio.timeout(30):
        await desk.bus_side.wait_idle()
    assert desk.wire.messages == []
    assert len(desk.sent) == (0 if why == "dropped" else 1)
    assert desk.metrics.answered == [499 if why == "dropped" else 200]


async def test_an_answer_that_comes_with_its_deadline_frees_the_slot_once(desk: DirectDesk) -> None:
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
