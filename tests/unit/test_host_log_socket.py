"""The socket for replicas' lines: whatever datagrams come, the next line is written."""

from __future__ import annotations

import socket
import tempfile
import time
from pathlib import Path

from serve_replica_host.adapters.log_socket import LogSocket


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
