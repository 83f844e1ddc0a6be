"""What a replica remembers of requests that ended: for how long, how much, and what it may then say for certain."""

from __future__ import annotations

from serve_replica_host.replica.io import slots as recent_replies
from serve_replica_host.replica.io.slots import ANSWER_BYTES_MAX, RETENTION_MIN_S, RecentReplies


def test_an_answer_is_kept_for_a_while_and_then_known_to_be_forgotten() -> None:
    recent = RecentReplies()
    recent.add(b"a", b"answer", 101.0)
    assert recent.answer(b"a") == b"answer"
    assert recent.last_at == 101.0
    recent.add(b"b", b"other", 101.0 + RETENTION_MIN_S)
    recent.add(b"c", b"third", 101.1 + RETENTION_MIN_S)
    assert (recent.answer(b"a"), recent.answer(b"c")) == (b"answer", b"third")
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
    recent.add(b"a", b"x" * (ANSWER_BYTES_MAX + 1), 1.0)
    assert b"a" in recent
    assert recent.answer(b"a") == b""


def test_number_and_bytes_are_bounded_and_what_falls_out_is_no_longer_covered(monkeypatch) -> None:
    monkeypatch.setattr(recent_replies, "GENERATION_MAX", 2)
    monkeypatch.setattr(recent_replies, "GENERATION_BYTES_MAX", 10)
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
