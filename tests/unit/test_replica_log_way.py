"""The way of a replica's log lines to its host on the same machine."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from serve_replica_host.replica.telemetry.logs import LOG_SOCKET, open_log_sender

PIECES = 1_000
"""More than a socket holds that nobody reads."""


# A replica's process keeps its way as long as it lives, and has nothing that closes it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_lines_that_a_host_takes_only_after_a_while_are_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a host that has no processor for a moment while a replica prints a lot."""
    path = tmp_path / "socket"
    monkeypatch.setenv(LOG_SOCKET, str(path))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as host:
        host.bind(str(path))
        host.settimeout(30)
        way = open_log_sender()
        sending = threading.Thread(target=lambda: [way(b"%d\n" % number) for number in range(PIECES)])
        sending.start()
        sending.join(1.5)
        assert sending.is_alive(), "the socket is full"
        taken = [host.recv(100) for _ in range(PIECES)]
        sending.join()
    assert taken == [b"%d\n" % number for number in range(PIECES)]
