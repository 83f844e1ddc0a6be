"""What a replica remembers of requests that ended: for how long, how much, and what it may then say for certain."""

from __future__ import annotations

from serve_replica_host.replica import recent_replies
from serve_replica_host.replica.recent_replies import ANSWER_BYTES_MAX, KEPT_S, RecentReplies


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_an_answer_is_kept_for_a_while_and_then_known_to_be_forgotten() -> None:
    clock = Clock()
    recent = RecentReplies(clock)
    clock.now = 101.0
    recent.add(b"a", b"answer")
    assert recent.answer(b"a") == b"answer"
    assert recent.covers(0.0)
    assert recent.last_at == 101.0
    clock.now += KEPT_S + 0.1
    recent.add(b"b", b"other")
    assert b"a" not in recent
    assert recent.answer(b"a") == b""
    assert not recent.covers(100.5)
    assert recent.covers(101.5)


def test_a_long_answer_is_not_kept_but_its_end_is() -> None:
    recent = RecentReplies(Clock())
    recent.add(b"a", b"x" * (ANSWER_BYTES_MAX + 1))
    assert b"a" in recent
    assert recent.answer(b"a") == b""


def test_number_and_bytes_are_bounded_and_what_falls_out_is_no_longer_covered(monkeypatch) -> None:
    monkeypatch.setattr(recent_replies, "REPLIES_MAX", 3)
    monkeypatch.setattr(recent_replies, "BYTES_MAX", 10)
    clock = Clock()
    recent = RecentReplies(clock)
    for name in (b"a", b"b", b"c", b"d"):
        clock.now += 1.0
        recent.add(name, b"1")
    assert [name in recent for name in (b"a", b"b", b"c", b"d")] == [False, True, True, True]
    assert not recent.covers(100.9)
    assert recent.covers(101.1)
    clock.now += 1.0
    recent.add(b"e", b"123456789")
    assert b"d" in recent
    assert b"c" not in recent


def test_the_first_end_of_a_request_is_the_one_that_counts() -> None:
    recent = RecentReplies(Clock())
    recent.add(b"a", b"answer")
    recent.add(b"a")
    assert recent.answer(b"a") == b"answer"
