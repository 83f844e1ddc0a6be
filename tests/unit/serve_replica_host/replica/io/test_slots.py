"""What a replica tells of its load: the exact time that requests have been in it, whatever becomes of them."""

from __future__ import annotations

import random

import pytest

from serve_common.protocol.frames import CancelHead, CreditHead, RequestHead, RequestKind, encode_frame
from serve_replica_host.ports import Occupancy
from serve_replica_host.replica.io import slots as recent_replies
from serve_replica_host.replica.io.protocol import ReplicaProtocol
from serve_replica_host.replica.io.request import (
    Closed,
    Ended,
    Failed,
    Left,
    Opened,
    Piece,
    ReplicaRequest,
    UserEvent,
    WholeResponseEvent,
)
from serve_replica_host.replica.io.slots import RESPONSE_BYTES_MAX, RETENTION_MIN_S, RecentReplies
from tests.support.replica_rig import Tally

SLOTS = 2


class Replica:
    """A bus side on a clock of its own, beside which the load is summed up."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.summed_up_s = 0.0
        self.user_queue: list[UserEvent] = []
        self.side = ReplicaProtocol(
            publish=lambda _subject, _frame: None,
            user_queue=self.user_queue.append,
            now=lambda: self.now,
            metrics=Tally(),
            max_concurrent_queries=SLOTS,
        )
        self._replies = 0

    @property
    def exchanges(self) -> list[ReplicaRequest]:
        """Those that the user's side has seen and not ended."""
        return [item for item in self.user_queue if isinstance(item, ReplicaRequest)]

    def wait(self, seconds: float) -> None:
        occupancy = self.side.occupancy()
        self.summed_up_s += seconds * (occupancy.in_flight + occupancy.waiting)
        self.now += seconds

    def begin(self, kind: RequestKind = RequestKind.HTTP, timeout_s: float = 1e6) -> bytes:
        self._replies += 1
        reply = b"_INBOX.%d" % self._replies
        head = RequestHead(kind, "POST", "/a", "/a", "", [], timeout_s, 0, "default/a", "r", may_queue=True)
        self.hear(head, reply)
        return reply

    def hear(self, head: RequestHead | CancelHead | CreditHead, reply: bytes) -> None:
        self.side.handle_frame(b"serve.replica.x", reply, encode_frame(head, b""), None)


def test_nothing_has_been_there_at_first() -> None:
    assert Replica().side.occupancy() == Occupancy(ongoing_s=0.0, limit=SLOTS)


def test_those_that_are_still_there_and_those_that_wait_for_a_slot_count() -> None:
    replica = Replica()
    for _ in range(SLOTS + 1):
        replica.begin()
    replica.wait(2.0)
    assert replica.side.occupancy() == Occupancy(ongoing_s=6.0, in_flight=2, limit=SLOTS, waiting=1)

    replica.side.handle_outcome(
        WholeResponseEvent(replica.exchanges[0], 200, [], b"")
    )  # who waited gets its slot
    replica.wait(1.0)
    assert replica.side.occupancy() == Occupancy(ongoing_s=8.0, in_flight=2, limit=SLOTS)


def test_streams_and_sockets_count_while_they_last() -> None:
    replica = Replica()
    replica.begin()
    replica.begin(RequestKind.WEBSOCKET)
    stream, socket = replica.exchanges
    replica.side.handle_outcome(Opened(stream, 200, []))
    replica.side.handle_outcome(Opened(socket, 101, []))
    replica.wait(60.0)
    assert replica.side.occupancy() == Occupancy(
        ongoing_s=120.0, in_flight=2, limit=SLOTS, streams=1, sockets=1
    )

    replica.side.handle_outcome(Piece(stream, b"", last=True))
    replica.side.handle_outcome(Closed(socket, 1000, ""))
    replica.wait(5.0)
    assert replica.side.occupancy() == Occupancy(ongoing_s=120.0, limit=SLOTS)


def test_an_answer_that_left_by_itself_counts_until_it_left() -> None:
    replica = Replica()
    replica.begin()
    replica.wait(1.0)
    left_at = replica.now
    replica.wait(0.25)  # until the bus side hears of it
    replica.side.handle_outcome(Left(replica.exchanges[0], 200, left_at))
    assert replica.side.occupancy().ongoing_s == 1.0


def test_who_leaves_the_waiting_room_without_a_slot_was_there_all_the_same() -> None:
    for leave in ("cancel", "deadline", "drain"):
        replica = Replica()
        for _ in range(SLOTS):
            replica.begin()
        waiting = replica.begin(timeout_s=3.0)
        replica.wait(3.0)
        if leave == "cancel":
            replica.hear(CancelHead(), waiting)
        elif leave == "deadline":
            replica.side.sweep()
        else:
            replica.side.start_drain()
        replica.wait(1.0)
        occupancy = replica.side.occupancy()
        assert (occupancy.ongoing_s, occupancy.waiting) == (11.0, 0), leave


def test_a_draining_replica_offers_no_slots() -> None:
    replica = Replica()
    replica.side.start_drain()
    assert replica.side.occupancy().limit == 0


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_it_is_the_sum_of_those_that_were_there_over_time(seed: int) -> None:
    chance = random.Random(seed)
    replica = Replica()
    begun: list[bytes] = []
    ended: set[int] = set()
    seen_s = 0.0
    for _ in range(300):
        replica.wait(chance.choice((0.0, 0.1, 0.7)))
        running = [exchange for exchange in replica.exchanges if id(exchange) not in ended]
        match chance.randrange(6):
            case 0 | 1:
                timeout_s = chance.choice((0.5, 5.0, 1e6))
                begun.append(
                    replica.begin(chance.choice((RequestKind.HTTP, RequestKind.WEBSOCKET)), timeout_s)
                )
            case 2 if begun:
                replica.hear(CancelHead(), chance.choice(begun))
            case 3 if running:
                exchange = chance.choice(running)
                ended.add(id(exchange))
                outcomes = (
                    WholeResponseEvent(exchange, 200, [], b"x"),
                    Left(exchange, 200, replica.now),
                    Failed(exchange, "error", 500, "no"),
                )
                if (
                    exchange.is_dropped
                    or exchange.head.kind is RequestKind.WEBSOCKET
                    or exchange.has_response_started
                ):
                    replica.side.handle_outcome(Ended(exchange))
                else:
                    replica.side.handle_outcome(chance.choice(outcomes))
            case 4 if running:
                exchange = chance.choice(running)
                if exchange.head.kind is RequestKind.HTTP:
                    replica.side.handle_outcome(Opened(exchange, 200, []))
            case _:
                replica.side.sweep()
        ongoing_s = replica.side.occupancy().ongoing_s
        assert ongoing_s == pytest.approx(replica.summed_up_s)
        assert ongoing_s >= seen_s - 1e-9
        seen_s = ongoing_s
    assert seen_s > 10


# What a replica remembers of requests that ended: for how long, how much, and what it may then say for certain.


def test_an_answer_is_kept_for_a_while_and_then_known_to_be_forgotten() -> None:
    recent = RecentReplies()
    recent.add(b"a", b"answer", 101.0)
    assert recent.response(b"a") == b"answer"
    assert recent.last_at == 101.0
    recent.add(b"b", b"other", 101.0 + RETENTION_MIN_S)
    recent.add(b"c", b"third", 101.1 + RETENTION_MIN_S)
    assert (recent.response(b"a"), recent.response(b"c")) == (b"answer", b"third")
    assert recent.covers(0.0)
    recent.add(b"d", b"", 101.2 + 2 * RETENTION_MIN_S)
    assert b"a" not in recent
    assert b"c" in recent
    assert not recent.covers(100.5)
    assert recent.covers(101.2 + RETENTION_MIN_S)


def test_what_ended_within_the_time_is_held_whatever_came_between() -> None:
    recent = RecentReplies()
    for at in range(200):
        now = 100.0 + at * 0.3
        recent.add(b"%d" % at, b"x", now)
        lately = [k for k in range(at + 1) if 100.0 + k * 0.3 >= now - RETENTION_MIN_S]
        assert all(b"%d" % k in recent for k in lately)
        assert recent.covers(now - RETENTION_MIN_S)


def test_a_long_answer_is_not_kept_but_its_end_is() -> None:
    recent = RecentReplies()
    recent.add(b"a", b"x" * (RESPONSE_BYTES_MAX + 1), 1.0)
    assert b"a" in recent
    assert recent.response(b"a") == b""


def test_many_long_answers_leave_the_record_of_what_ended_complete(monkeypatch) -> None:
    monkeypatch.setattr(recent_replies, "LARGER_BYTES_MAX", 10_000)
    recent = RecentReplies()
    for at in range(100):
        recent.add(b"%d" % at, b"x" * 1_000, 100.0 + at / 100)
    assert [bool(recent.response(b"%d" % at)) for at in (0, 89, 90, 99)] == [False, False, True, True]
    assert all(b"%d" % at in recent for at in range(100))
    assert recent.covers(99.0)


def test_the_number_is_bounded_and_what_falls_out_is_no_longer_covered(monkeypatch) -> None:
    monkeypatch.setattr(recent_replies, "GENERATION_MAX", 2)
    recent = RecentReplies()
    for at, name in enumerate((b"a", b"b", b"c", b"d", b"e")):
        recent.add(name, b"1", 100.0 + at)
    assert [name in recent for name in (b"a", b"b", b"c", b"d", b"e")] == [False, False, True, True, True]
    assert not recent.covers(99.9)
    assert recent.covers(102.5)
    recent.add(b"f", b"x" * 20, 106.0)
    recent.add(b"g", b"1", 106.1)
    assert b"d" not in recent
    assert b"f" in recent
