"""The socket for replicas' lines: whatever datagrams come, the next line is written."""

from __future__ import annotations

import json
import socket
import tempfile
import time
from pathlib import Path

from serve_replica_host.adapters.log_socket import BYTES_MAX, LINES_MAX, REPLICAS_MAX, LogSocket, RecentLines


def test_an_empty_datagram_and_bytes_that_are_no_text_end_nothing() -> None:
    directory = Path(tempfile.mkdtemp(prefix="ml", dir="/tmp"))
    lines = LogSocket(directory)
    assert lines.bind() == ""
    written: list[bytes] = []
    lines.open(written.append)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as replica:
        replica.connect(str(lines.path))
        replica.send(b"")
        replica.send(b"\xff\xfe\n")
        replica.send(b'{"replica_tag": "default/a#1", "message": "later"}\n')
        give_up_at = time.monotonic() + 30
        while b"later" not in b"".join(lines.recent()):
            assert time.monotonic() < give_up_at
            time.sleep(0.01)
    lines.close()
    assert written[-1].endswith(b'"later"}\n')
    assert not lines.path.exists()
    directory.rmdir()


# A host remembers what its replicas said last, each of them, within bounds.


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
