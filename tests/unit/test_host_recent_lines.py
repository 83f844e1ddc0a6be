"""A host remembers what its replicas said last, each of them, within bounds."""

from __future__ import annotations

import json

from serve_replica_host.adapters.log_socket import BYTES_MAX, LINES_MAX, REPLICAS_MAX, RecentLines


def said(replica: int, *messages: str) -> bytes:
    lines = [json.dumps({"replica_tag": f"default/a#{replica}", "message": text}) for text in messages]
    return "".join(f"{line}\n" for line in lines).encode()


def messages(recent: RecentLines) -> list[str]:
    return [json.loads(line)["message"] for line in recent.all()]


def test_a_replica_that_floods_takes_no_room_from_others() -> None:
    recent = RecentLines()
    recent.take(said(1, "constructed"))
    recent.take(said(2, *(str(number) for number in range(10 * LINES_MAX))))
    recent.take(said(2, "last"))
    assert messages(recent) == [
        "constructed",
        *(str(n) for n in range(9 * LINES_MAX + 1, 10 * LINES_MAX)),
        "last",
    ]


def test_bytes_and_replicas_are_bounded_and_what_is_no_line_does_no_harm() -> None:
    recent = RecentLines()
    for replica in range(REPLICAS_MAX + 3):
        recent.take(said(replica, f"from {replica}"))
    assert messages(recent)[0] == "from 3"
    recent = RecentLines()
    for _ in range(10):
        recent.take(said(1, "x" * (BYTES_MAX // 4)))
    assert len(recent.all()) == 3
    recent.take(b"")
    recent.take(b"no json\n")
    recent.take(b"[1]\n")
    assert recent.all()[3:] == [b"no json\n", b"[1]\n"]
