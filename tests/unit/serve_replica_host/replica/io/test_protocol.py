"""A replica's bus side, frame by frame: what is in flight, what is refused, and that every slot comes back once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import msgspec
import pytest

from serve_common.direct.link import DirectLink
from serve_common.nats.options import NotConnected, PayloadTooLarge
from serve_common.protocol.frames import (
    FRAME_BODY_BYTES_MAX,
    LARGE_WINDOW_FRAMES,
    SMALL_FRAME_BYTES_MAX,
    WINDOW_FRAMES,
    AliveHead,
    BodyHead,
    CancelHead,
    CreditHead,
    ErrorHead,
    Head,
    LinkHead,
    ProbeHead,
    ReceivedHead,
    RefusedHead,
    RequestHead,
    RequestKind,
    ResponseHead,
    decode_frame,
    encode_frame,
)
from serve_common.protocol.streams import ON_BUS_BYTES_MAX, RECEIVED_WITHIN_S, RETAINED_BYTES_MAX, OnBusBytes
from serve_common.runtime.threads import Mailbox
from serve_replica_host.replica.io.body_frames import REQUEST_BODY_BYTES_MAX
from serve_replica_host.replica.io.protocol import ROUTER_SILENT_S, ReplicaProtocol
from serve_replica_host.replica.io.request import (
    Drop,
    Ended,
    Failed,
    IoEvent,
    Left,
    Opened,
    Piece,
    ReplicaRequest,
    UserEvent,
    WholeResponseEvent,
    Writable,
)
from serve_replica_host.replica.io.response_frames import DirectResponses
from serve_replica_host.replica.io.slots import UNACKNOWLEDGED_MAX
from tests.support.replica_rig import Tally
from tests.support.waiting import eventually

ME = b"_INBOX.1"
OTHER = b"_INBOX.2"


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

    def answer(self, exchange: ReplicaRequest, body: bytes = b"", status: int = 200) -> None:
        self.side.handle_outcome(WholeResponseEvent(exchange, status, [], body))

    @property
    def heads(self) -> list[Head]:
        return [head for _, head, _ in self.sent]


def _request(body_bytes: int = 0, timeout_s: float = 10.0) -> RequestHead:
    return RequestHead(RequestKind.HTTP, "POST", "/a", "/a", "", [], timeout_s, body_bytes, "default/a", "r1")


@pytest.fixture
def desk() -> Desk:
    return Desk()


async def test_a_small_request_is_handed_over_and_its_answer_frees_the_slot(desk: Desk) -> None:
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

    desk.hear(_request(), reply=OTHER)
    desk.side.is_draining = True
    desk.hear(_request(), reply=b"_INBOX.3")

    assert desk.heads == [RefusedHead("busy", 1), RefusedHead("draining", 1)]
    assert desk.metrics.refused == ["busy", "draining"]


async def test_the_same_request_again_does_not_run_twice(desk: Desk) -> None:
    desk.begin()

    desk.hear(_request())

    assert len(desk.user_queue) == 1
    assert desk.side.in_flight == 1


async def test_a_large_body_is_put_together_under_credit_and_then_handed_over(desk: Desk) -> None:
    desk.hear(_request(body_bytes=6), b"ab")
    assert desk.user_queue == []

    desk.hear(BodyHead(1, False), b"cd")
    desk.hear(BodyHead(1, False), b"cd")
    desk.hear(BodyHead(2, True), b"ef")

    (exchange,) = desk.user_queue
    assert isinstance(exchange, ReplicaRequest)
    assert exchange.body == b"abcdef"


async def test_credit_is_given_for_parts_of_the_window_and_for_all_that_was_taken(desk: Desk) -> None:
    frames = WINDOW_FRAMES * 3
    desk.hear(_request(body_bytes=frames + 2), b"a")
    for sequence in range(1, frames + 1):
        desk.hear(BodyHead(sequence, False), b"b")

    given = [head.frames for head in desk.heads if isinstance(head, CreditHead)]

    assert len(given) == len(desk.heads)
    assert len(given) <= 13
    assert frames - WINDOW_FRAMES < sum(given) <= frames + 1


@pytest.mark.parametrize(("head", "body"), [(BodyHead(1, True), b"c"), (BodyHead(1, False), b"cdefg")])
async def test_a_body_with_a_wrong_size_fails_and_frees_the_slot(
    desk: Desk, head: BodyHead, body: bytes
) -> None:
    desk.hear(_request(body_bytes=6), b"ab")

    desk.hear(head, body)

    assert isinstance(desk.heads[-1], ErrorHead)
    assert desk.heads[-1].status == 502
    assert desk.side.in_flight == 0
    assert desk.user_queue == []


async def test_a_lost_part_of_a_body_is_asked_for_once_and_again_when_its_router_probes(desk: Desk) -> None:
    desk.hear(_request(body_bytes=6), b"ab")

    desk.hear(BodyHead(2, True), b"ef")
    desk.hear(BodyHead(2, True), b"ef")
    assert desk.heads == [AliveHead(1, WINDOW_FRAMES + 1, has_gap=True)]
    desk.hear(ProbeHead(1.0, 0))
    assert desk.heads[1:] == [AliveHead(1, WINDOW_FRAMES + 1)]
    desk.hear(BodyHead(1, False), b"cd")
    desk.hear(BodyHead(2, True), b"ef")

    (exchange,) = desk.user_queue
    assert isinstance(exchange, ReplicaRequest)
    assert exchange.body == b"abcdef"


async def test_a_large_answer_is_sent_again_from_what_its_router_has_until_that_has_all(desk: Desk) -> None:
    exchange = desk.begin()
    body = bytes(range(256)) * (FRAME_BODY_BYTES_MAX // 256) * 4
    desk.answer(exchange, body)
    assert desk.side.in_flight == 0
    first = desk.sent.copy()
    assert [type(head) for head in desk.heads] == [ResponseHead, BodyHead, BodyHead, BodyHead]

    for received in (2, 0):
        desk.sent.clear()
        desk.hear(ProbeHead(1.0, received))  # the others may be on their way
        assert desk.heads == [AliveHead(sent=4)]
        desk.sent.clear()
        desk.hear(ProbeHead(1.0, received, has_lost=True))
        assert desk.heads[0] == AliveHead()
        assert desk.sent[1:] == first[received:]
    desk.sent.clear()
    desk.hear(CreditHead(4, 20, 20))
    desk.hear(ProbeHead(1.0, 2))
    assert desk.heads == [RefusedHead("unknown", 0)]


async def test_what_a_router_does_not_ask_for_is_held_for_seconds_and_within_bounds(desk: Desk) -> None:
    desk.answer(desk.begin(), bytes(FRAME_BODY_BYTES_MAX * 2))
    desk.side.bus_lost()
    desk.now += 60.0
    desk.side.sweep()
    desk.side.bus_joined()
    desk.hear(ProbeHead(60.0, 1, has_lost=True))
    assert desk.heads[-1] == BodyHead(1, True)
    desk.now += 9.0
    desk.side.sweep()
    desk.sent.clear()
    desk.hear(ProbeHead(66.0, 1))
    assert desk.heads == [RefusedHead("unknown", 0)]
    for number in range(UNACKNOWLEDGED_MAX + 5):
        desk.answer(desk.begin(reply=b"_INBOX.n%d" % number), bytes(FRAME_BODY_BYTES_MAX + 1))
    assert len(desk.side._slots.unacknowledged) == UNACKNOWLEDGED_MAX


async def test_what_is_not_held_any_more_fails_its_request_only_once_it_was_lost(desk: Desk) -> None:
    desk.side._responses._retained.retained_bytes = RETAINED_BYTES_MAX + 1
    exchange = desk.begin()
    desk.side.handle_outcome(Opened(exchange, 200, []))
    for _ in range(3):
        desk.side.handle_outcome(Piece(exchange, bytes(FRAME_BODY_BYTES_MAX), last=False))
    desk.sent.clear()

    desk.hear(ProbeHead(1.0, 1))
    assert desk.heads == [AliveHead(sent=4)]
    desk.hear(ProbeHead(1.0, 1, has_lost=True))
    assert isinstance(desk.heads[-1], ErrorHead)


async def test_a_body_beyond_the_limit_is_refused_before_it_comes(desk: Desk) -> None:
    desk.hear(_request(body_bytes=REQUEST_BODY_BYTES_MAX + 1), b"ab")

    assert isinstance(desk.heads[-1], ErrorHead)
    assert desk.heads[-1].status == 413
    assert desk.side.in_flight == 0


async def test_a_large_answer_is_cut_and_waits_for_credit_while_others_are_served(desk: Desk) -> None:
    exchange = desk.begin()
    body = bytes(range(256)) * (FRAME_BODY_BYTES_MAX // 256) * (LARGE_WINDOW_FRAMES + 2)

    desk.answer(exchange, body)
    assert [type(head) for head in desk.heads] == [ResponseHead, *[BodyHead] * (LARGE_WINDOW_FRAMES - 1)]
    other = desk.begin(reply=OTHER)
    desk.answer(other, b"x")
    assert desk.side.in_flight == 1
    desk.hear(CreditHead(1))
    desk.hear(CreditHead(9))

    mine = [(head, piece) for subject, head, piece in desk.sent if subject == ME]
    assert mine[0][0] == ResponseHead(200, [(b"content-length", b"%d" % len(body))], False, 0)
    assert [head for head, _ in mine[1:]] == [
        BodyHead(n, n == LARGE_WINDOW_FRAMES + 1) for n in range(1, LARGE_WINDOW_FRAMES + 2)
    ]
    assert b"".join(piece for _, piece in mine) == body
    assert desk.side.in_flight == 0


async def test_a_streamed_answer_tells_the_user_side_what_has_left_and_ends_with_its_last_piece(
    desk: Desk,
) -> None:
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


async def test_cancel_drops_the_answer_and_holds_the_slot_until_the_work_has_ended(desk: Desk) -> None:
    exchange = desk.begin()

    desk.hear(CancelHead())
    desk.hear(CancelHead())
    assert desk.user_queue[1:] == [Drop(exchange)]
    assert desk.side.in_flight == 1
    desk.answer(exchange, b"too late")

    assert desk.sent == []
    assert desk.side.in_flight == 0
    assert desk.metrics.answered == [499]


async def test_cancel_while_the_body_comes_or_the_answer_goes_frees_the_slot_at_once(desk: Desk) -> None:
    desk.hear(_request(body_bytes=6), b"ab")
    desk.hear(CancelHead())
    assert desk.side.in_flight == 0

    exchange = desk.begin(reply=OTHER)
    desk.side.handle_outcome(
        WholeResponseEvent(exchange, 200, [], b"x" * FRAME_BODY_BYTES_MAX * (WINDOW_FRAMES + 1))
    )
    assert desk.side.in_flight == 1
    desk.hear(CancelHead(), reply=OTHER)
    assert desk.side.in_flight == 0


async def test_the_deadline_does_not_end_an_answer_that_has_begun(desk: Desk) -> None:
    exchange = desk.begin()
    desk.side.handle_outcome(Opened(exchange, 200, []))

    desk.now += 11.0
    desk.side.sweep()

    assert [type(head) for head in desk.heads] == [ResponseHead]
    assert desk.side.in_flight == 1


async def test_a_router_that_is_not_heard_of_gives_its_slots_back_unless_the_bus_was_away(desk: Desk) -> None:
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


@pytest.mark.parametrize("kind", ["whole", "direct", "streamed", "failed"])
async def test_an_answer_that_starts_after_the_deadline_is_the_deadlines_error(
    desk: Desk, direct: DirectDesk, kind: str
) -> None:
    """What an application says when its call of a handle, which has the same deadline, has raised."""
    used = direct if kind == "direct" else desk
    exchange = used.begin()
    used.now = exchange.deadline
    outcomes: dict[str, list[IoEvent]] = {
        "whole": [WholeResponseEvent(exchange, 500, [], b"Internal Server Error")],
        "streamed": [Opened(exchange, 500, []), Piece(exchange, b"no", last=True)],
        "failed": [Failed(exchange, "user_code", 500, "RequestTimedOut")],
    }
    if kind == "direct":
        direct.direct.send(WholeResponseEvent(exchange, 500, [], b"Internal Server Error"))
        async with asyncio.timeout(30):
            await direct.side.wait_idle()
        assert direct.wire.messages == []
    for outcome in outcomes.get(kind, ()):
        used.side.handle_outcome(outcome)
    (error,) = used.heads
    assert isinstance(error, ErrorHead)
    assert (error.error_code, error.status) == ("deadline_exceeded", 504)
    assert used.side.in_flight == 0


async def test_a_deadline_answers_504_and_ends_the_work(desk: Desk) -> None:
    exchange = desk.begin()
    desk.hear(_request(timeout_s=60.0), reply=OTHER)

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


async def test_a_probe_is_refused_only_when_the_request_is_unknown(desk: Desk) -> None:
    desk.begin()

    desk.hear(ProbeHead())
    desk.hear(ProbeHead(), reply=OTHER)

    assert desk.sent == [(ME, AliveHead(), b""), (OTHER, RefusedHead("unknown", 1), b"")]


async def test_a_failure_after_the_answer_has_begun_ends_it_with_an_error(desk: Desk) -> None:
    exchange = desk.begin()
    desk.side.handle_outcome(Opened(exchange, 200, []))

    desk.side.handle_outcome(Failed(exchange, "user_code_raised", 500, "ValueError"))

    assert desk.heads[-1] == ErrorHead("user_code_raised", 500, "ValueError", 0)
    assert desk.side.in_flight == 0


async def test_an_answer_that_cannot_be_sent_still_frees_the_slot(desk: Desk) -> None:
    exchange = desk.begin()
    desk.broken = NotConnected("away")
    desk.answer(exchange, b"x")
    assert desk.side.in_flight == 0

    desk.broken = None
    exchange = desk.begin(reply=OTHER)
    desk.side.handle_outcome(WholeResponseEvent(exchange, 200, [(b"a", b"b" * 70_000)], b"x"))
    assert desk.side.in_flight == 0
    assert isinstance(desk.heads[-1], ErrorHead)
    assert "headers" in desk.heads[-1].message


async def test_a_server_with_a_smaller_payload_limit_gives_an_error_and_frees_the_slot(desk: Desk) -> None:
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


async def test_bytes_that_are_no_frame_and_frames_without_reply_change_nothing(desk: Desk) -> None:
    for payload in (b"", b"\x00", b"\xff\xff", b"\x00\x02\xc1\xc1"):
        desk.side.handle_frame(b"s", ME, payload, None)
    desk.hear(_request(), reply=b"")
    desk.hear(ResponseHead(200, [], True, 0))

    assert (desk.sent, desk.user_queue, desk.side.in_flight) == ([], [], 0)


async def test_idle_is_told_when_the_last_request_has_left(desk: Desk) -> None:
    await desk.side.wait_idle()
    exchange = desk.begin()
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(desk.side.wait_idle())
        await asyncio.sleep(0.02)
        assert not waiting.done()

        desk.side.handle_outcome(Failed(exchange, "user_code_raised", 500, "no"))


async def test_an_answer_that_may_be_lost_is_said_again_when_its_router_asks(desk: Desk) -> None:
    exchange = desk.begin()
    desk.answer(exchange, b"ok")
    desk.now += 1.0

    desk.hear(ProbeHead(1.0))
    desk.hear(_request())  # and the request itself, should it come again, does not run again

    assert desk.sent[1] == desk.sent[0]
    assert len(desk.user_queue) == 1
    assert len(desk.sent) == 2


async def test_an_error_is_said_again_while_the_work_that_nobody_wants_goes_on(desk: Desk) -> None:
    desk.begin(body_bytes=None)
    desk.now += 11.0
    desk.side.sweep()

    desk.hear(ProbeHead(11.0))

    assert [type(head) for head in desk.heads] == [ErrorHead, ErrorHead]


async def test_a_request_that_did_not_arrive_is_known_not_to_have_begun_and_will_not_begin(
    desk: Desk,
) -> None:
    desk.now += 10.0

    desk.hear(ProbeHead(2.0))
    desk.hear(_request())

    assert desk.heads == [RefusedHead("never_begun", 0)]
    assert not desk.user_queue


async def test_what_may_have_ended_and_been_forgotten_is_unknown(desk: Desk) -> None:
    for reply in (b"_INBOX.7", b"_INBOX.8", b"_INBOX.9"):
        exchange = desk.begin(reply=reply)
        desk.answer(exchange, b"ok")
        desk.now += 10.0

    desk.hear(ProbeHead(31.0))
    desk.hear(ProbeHead(), reply=OTHER)
    desk.hear(ProbeHead(31.0), reply=b"_INBOX.7")

    assert desk.heads[3:] == [RefusedHead("unknown", 0)] * 3


async def test_a_replica_that_is_cut_off_stays_for_its_routers_until_it_was_back_for_a_while(
    desk: Desk,
) -> None:
    assert desk.side.seconds_until_probed() == 0.0
    desk.side.bus_joined()
    exchange = desk.begin()
    desk.side.bus_lost()
    desk.answer(exchange, b"lost")
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


async def test_a_replica_whose_link_was_cut_stays_for_the_probes_of_its_router(desk: Desk) -> None:
    link = DirectLink(asyncio.get_running_loop(), lambda *_: None, lambda _: None)
    link.has_parted = True
    desk.side.link_lost(link)
    assert desk.side.seconds_until_probed() == 0.0, "its router had left it"
    link.has_parted = False
    desk.side.link_lost(link)
    desk.now += 0.5
    assert desk.side.seconds_until_probed() == 4.5
    desk.now += 4.5
    assert desk.side.seconds_until_probed() == 0.0


async def test_a_replica_stays_until_its_router_has_all_of_a_long_answer(desk: Desk) -> None:
    exchange = desk.begin()
    desk.answer(exchange, bytes(2 * FRAME_BODY_BYTES_MAX))
    assert desk.side.in_flight == 0
    desk.side.start_drain()
    desk.now += 3.0
    assert desk.side.seconds_until_probed() > 0.0

    desk.hear(CreditHead(0, 0, WINDOW_FRAMES + 2))
    assert desk.side.seconds_until_probed() == 0.0


async def test_a_certain_refusal_that_was_lost_is_said_again(desk: Desk) -> None:
    desk.now += 10.0

    desk.hear(ProbeHead(2.0))
    desk.hear(ProbeHead(3.0))

    assert desk.heads == [RefusedHead("never_begun", 0)] * 2


def _patient(timeout_s: float = 10.0) -> RequestHead:
    return msgspec.structs.replace(_request(timeout_s=timeout_s), may_queue=True)


async def test_patient_requests_get_the_slots_that_come_free_in_their_order() -> None:
    desk = Desk(max_concurrent_queries=1)
    first = desk.begin()
    for reply in (OTHER, b"_INBOX.3", b"_INBOX.4"):
        desk.hear(_patient(), reply=reply)
    desk.hear(_patient(), reply=OTHER)  # doubled
    desk.hear(CancelHead(), reply=b"_INBOX.3")
    desk.hear(ProbeHead(1.0), reply=OTHER)
    assert (desk.side.in_flight, desk.heads) == (1, [AliveHead()])

    desk.answer(first, b"")
    second = desk.user_queue[-1]
    assert isinstance(second, ReplicaRequest)
    assert (second.reply, desk.side.in_flight) == (OTHER, 1)
    desk.hear(_request(), reply=b"_INBOX.5")  # whoever is not patient does not overtake
    assert desk.heads[-1] == RefusedHead("busy", 1)
    desk.answer(second, b"")
    third = desk.user_queue[-1]
    assert isinstance(third, ReplicaRequest)
    assert third.reply == b"_INBOX.4"
    desk.answer(third, b"")
    assert desk.side.in_flight == 0


async def test_who_waits_for_a_slot_too_long_or_into_a_drain_is_told() -> None:
    desk = Desk(max_concurrent_queries=1)
    desk.begin()
    desk.hear(_patient(timeout_s=1.0), reply=OTHER)
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
async def test_nothing_is_answered_but_into_inboxes(desk: Desk, reply: bytes, head: Head) -> None:
    desk.hear(head, reply=reply)
    assert desk.sent == []
    assert desk.user_queue == []
    assert desk.metrics.refused == ["reply_subject"]


async def test_a_probe_gets_a_sign_of_life_while_the_request_is_worked_on_or_waits() -> None:
    desk = Desk(max_concurrent_queries=1)
    desk.begin()
    desk.hear(_patient(), reply=OTHER)
    for reply in (ME, OTHER):
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


class DirectDesk(Desk):
    """A bus side whose user's thread is the test, and sends its answers itself."""

    def __init__(self) -> None:
        super().__init__(max_concurrent_queries=4)
        self.wire = Wire()
        io_queue: Mailbox[Any] = Mailbox(asyncio.get_running_loop(), self.side.handle_outcome)
        self.direct = DirectResponses(
            self.wire, io_queue.put, self.side.handle_outcome, self.side.active, lambda: self.now
        )

    @property
    def begun(self) -> list[ReplicaRequest]:
        return [item for item in self.user_queue if isinstance(item, ReplicaRequest)]

    def answer(self, exchange: ReplicaRequest, body: bytes = b"done", status: int = 200) -> None:
        self.direct.send(WholeResponseEvent(exchange, status, [], body))


@pytest.fixture
async def direct() -> DirectDesk:
    return DirectDesk()


async def test_the_answers_of_one_turn_leave_together_and_free_their_slots_at_once(
    direct: DirectDesk,
) -> None:
    first, second, _ = (direct.begin(reply=b"_INBOX.r%d" % number) for number in (1, 2, 3))
    direct.answer(first)
    direct.answer(second, b"teapot", 418)
    assert direct.side.in_flight == 1
    assert direct.wire.messages == []
    await asyncio.sleep(0)
    assert [(reply, head.status, body) for reply, head, body in direct.wire.messages] == [
        (b"_INBOX.r1", 200, b"done"),
        (b"_INBOX.r2", 418, b"teapot"),
    ]
    assert direct.wire.writes == 1
    assert [head.in_flight for _, head, _ in direct.wire.messages] == [2, 1]
    assert direct.metrics.answered == [200, 418]


async def test_a_slot_is_free_for_the_request_that_follows_the_answer(direct: DirectDesk) -> None:
    direct.side.max_concurrent_queries = 1
    for number in range(5):
        direct.answer(direct.begin(reply=b"_INBOX.r%d" % number))
        await asyncio.sleep(0)
    assert len(direct.wire.messages) == 5
    assert direct.sent == []
    assert direct.metrics.refused == []


class OneLink:
    """A direct link that takes small frames as long as the test says so."""

    def __init__(self) -> None:
        self.takes = True
        self.sent: list[tuple[bytes, bytes]] = []
        self.sent_later: list[tuple[bytes, bytes]] = []

    def send_now(self, frames: Sequence[tuple[bytes, bytes]]) -> bool:
        if self.takes:
            self.sent += frames
        return self.takes

    def send_frame(self, token: bytes, frame: bytes) -> bool:
        self.sent_later.append((token, frame))
        return True


class Lock:
    """Says whether it is held."""

    is_held = False

    def __enter__(self) -> None:
        self.is_held = True

    def __exit__(self, *_: object) -> None:
        self.is_held = False


@pytest.mark.parametrize("takes", [True, False])
async def test_a_response_alone_on_a_link_leaves_before_its_slot_is_free_but_none_can_take_it_meanwhile(
    *, takes: bool
) -> None:
    desk, link, lock = Desk(max_concurrent_queries=4), OneLink(), Lock()
    link.takes = takes
    freed: list[tuple[int, bool]] = []

    def take_left(left: Left) -> None:
        freed.append((len(link.sent) + len(link.sent_later), lock.is_held))
        desk.side.handle_outcome(left)

    direct = DirectResponses(
        Wire(),
        desk.side.handle_outcome,
        take_left,
        desk.side.active,
        lambda: desk.now,
        get_link=lambda _reply: link,  # type: ignore[arg-type, return-value]
        lock=lock,
    )
    alone, first, second = (desk.begin(reply=b"_INBOX.r.%016x" % number) for number in (1, 2, 3))
    for exchange in (first, second):
        exchange.is_direct = True
    direct.send(WholeResponseEvent(first, 200, [], b"one"))
    direct.send(WholeResponseEvent(second, 200, [], b"two"))
    assert freed == [(0, False), (0, False)], "they leave together, later"
    direct.flush()
    assert len(link.sent) + len(link.sent_later) == 2
    freed.clear()
    alone.is_direct = True
    direct.send(WholeResponseEvent(alone, 200, [], b"three"))
    assert freed == [(3, True)]
    assert desk.side.in_flight == 0
    token, frame = (link.sent or link.sent_later)[-1]
    assert token == (1).to_bytes(8, "big")
    assert bytes(decode_frame(frame)[1]) == b"three"


async def test_a_request_that_waits_for_a_slot_gets_it_at_once(direct: DirectDesk) -> None:
    direct.side.max_concurrent_queries = 1
    first = direct.begin()
    direct.hear(_patient(), reply=OTHER)
    assert len(direct.begun) == 1
    direct.answer(first)
    await eventually(lambda: len(direct.begun) == 2)
    assert direct.begun[1].reply == OTHER


async def test_a_drain_ends_when_the_last_answer_has_left(direct: DirectDesk) -> None:
    exchange = direct.begin()
    direct.side.start_drain()
    direct.answer(exchange)
    async with asyncio.timeout(30):
        await direct.side.wait_idle()
    direct.direct.flush()  # as the user's side does when it is idle
    assert len(direct.wire.messages) == 1


async def test_a_drain_knows_what_was_answered_before_it(direct: DirectDesk) -> None:
    direct.answer(direct.begin())
    await asyncio.sleep(0)
    direct.side.start_drain()
    async with asyncio.timeout(30):
        await direct.side.wait_idle()


async def test_a_router_that_asks_for_a_lost_answer_is_told_it(direct: DirectDesk) -> None:
    direct.wire.takes = False  # the connection is lost in this moment
    direct.answer(direct.begin())
    await asyncio.sleep(0)
    direct.wire.can_write_shared = False
    direct.hear(ProbeHead())
    ((reply, head, _),) = direct.sent
    assert reply == ME
    assert type(head) is ResponseHead
    assert head.status == 200


@pytest.mark.parametrize("why", ["large", "large head", "disconnected", "dropped"])
async def test_all_else_is_left_to_the_bus_side(direct: DirectDesk, why: str) -> None:
    exchange = direct.begin()
    headers = []
    body = b"done"
    if why == "large":
        body = bytes(SMALL_FRAME_BYTES_MAX + 1)
    elif why == "large head":
        headers = [(b"x", b"y" * SMALL_FRAME_BYTES_MAX)]
    elif why == "disconnected":
        direct.wire.can_write_shared = False
    else:
        direct.side._responses.drop(exchange, 499)
    direct.direct.send(WholeResponseEvent(exchange, 200, headers, body))
    async with asyncio.timeout(30):
        await direct.side.wait_idle()
    assert direct.wire.messages == []
    assert len(direct.sent) == (0 if why == "dropped" else 1)
    assert direct.metrics.answered == [499 if why == "dropped" else 200]


async def test_an_answer_that_comes_with_its_deadline_frees_the_slot_once(direct: DirectDesk) -> None:
    exchange = direct.begin()
    direct.answer(exchange)
    exchange.deadline = 0.0
    direct.side.sweep()  # hears of the answer first
    assert direct.sent == []
    assert direct.side.in_flight == 0
    assert direct.metrics.answered == [200]
    direct.hear(ProbeHead())
    assert type(direct.heads[0]) is not RefusedHead


def _reply(router: int, request: int) -> bytes:
    return b"_INBOX_proxy.p%d.x.%016x" % (router, request)


async def test_streams_wait_while_their_router_has_not_received_what_is_on_the_bus() -> None:
    desk = Desk(max_concurrent_queries=10)
    body = bytes(LARGE_WINDOW_FRAMES * FRAME_BODY_BYTES_MAX)

    def sent_frames(reply: bytes) -> int:
        return sum(to == reply for to, _, _ in desk.sent)

    for request in range(4):
        desk.answer(desk.begin(reply=_reply(1, request)), body)
    desk.answer(desk.begin(reply=_reply(2, 0)), body)
    fit = ON_BUS_BYTES_MAX // FRAME_BODY_BYTES_MAX
    assert [sent_frames(_reply(1, request)) for request in range(4)] == [fit // 2, fit // 2, 1, 1]
    assert sent_frames(_reply(2, 0)) == LARGE_WINDOW_FRAMES, "another router has its own"

    received = sum(
        len(encode_frame(head, part)) for to, head, part in desk.sent if to[:-16] == _reply(1, 0)[:-16]
    )
    desk.hear(ReceivedHead(received), reply=_reply(1, 0))
    assert sent_frames(_reply(1, 2)) == sent_frames(_reply(1, 3)) == LARGE_WINDOW_FRAMES

    desk.answer(desk.begin(reply=_reply(1, 9)), body)
    assert sent_frames(_reply(1, 9)) < LARGE_WINDOW_FRAMES
    desk.now += RECEIVED_WITHIN_S
    desk.side.send_waiting()
    assert sent_frames(_reply(1, 9)) == LARGE_WINDOW_FRAMES, "a silent router has lost it"


async def test_a_router_that_counts_anew_is_believed() -> None:
    on_bus = OnBusBytes()
    on_bus.add(ON_BUS_BYTES_MAX, 1.0)
    assert on_bus.is_full(1.0)
    on_bus.take(ON_BUS_BYTES_MAX, 1.1)
    assert not on_bus.is_full(1.1)
    on_bus.add(ON_BUS_BYTES_MAX - 1, 1.2)
    assert not on_bus.is_full(1.2)
    on_bus.add(1, 1.2)
    assert on_bus.is_full(1.2)
    on_bus.take(5, 1.3)
    assert not on_bus.is_full(1.3)
    on_bus.add(ON_BUS_BYTES_MAX, 1.4)
    assert on_bus.is_full(1.4)


async def test_a_probe_on_the_bus_moves_a_response_there_unless_that_has_just_left_the_bus(
    desk: Desk,
) -> None:
    frames: list[bytes] = []

    class Link:
        pending_bytes = 0

        def send(self, _token: bytes, head: Head, body: bytes = b"") -> bool:
            return self.send_frame(b"", encode_frame(head, body))

        def send_frame(self, _token: bytes, frame: bytes) -> bool:
            frames.append(frame)
            return True

    reply = _reply(1, 1)
    desk.answer(desk.begin(reply=reply), bytes(3 * WINDOW_FRAMES * FRAME_BODY_BYTES_MAX))
    link = cast(DirectLink, Link())
    desk.side.use_links(lambda _reply, _machine: LinkHead(), lambda _inbox: link)
    desk.hear(CreditHead(0, 0, WINDOW_FRAMES + LARGE_WINDOW_FRAMES - 1), reply=reply)
    assert (len(desk.sent), frames) == (LARGE_WINDOW_FRAMES, []), "some of it may be on its way"
    desk.hear(CreditHead(0, 0, WINDOW_FRAMES + LARGE_WINDOW_FRAMES), reply=reply)
    assert (len(desk.sent), len(frames)) == (LARGE_WINDOW_FRAMES, LARGE_WINDOW_FRAMES)
    desk.sent.clear()

    def probe(**fields: Any) -> list[type]:
        head = ProbeHead(1.0, LARGE_WINDOW_FRAMES, WINDOW_FRAMES + LARGE_WINDOW_FRAMES, **fields)
        desk.sent.clear()
        desk.side.handle_bus_frame(b"", reply, encode_frame(head), None)
        return [type(head) for head in desk.heads]

    assert probe() == [], "from before its router knew of the link"
    assert probe(has_lost=True) == [AliveHead] + [BodyHead] * LARGE_WINDOW_FRAMES
    desk.side.handle_link_frame(
        link, reply, encode_frame(CreditHead(0, 0, WINDOW_FRAMES + LARGE_WINDOW_FRAMES))
    )
    desk.now += 10.0
    assert probe() == [AliveHead], "the router has left the link"
