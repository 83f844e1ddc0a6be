"""That a listener can be emptied and closed without losing anybody."""

from __future__ import annotations

import socket

import pytest

from serve_proxy.http.server import drop_new_connections


def test_who_waits_is_still_accepted_and_heard_and_nobody_comes_after_them() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname(), timeout=5) as early,
        socket.socket() as late,
    ):
        early.sendall(b"request")
        drop_new_connections(listener)
        late.settimeout(0.3)
        with pytest.raises(TimeoutError):
            late.connect(listener.getsockname())
        listener.settimeout(5)
        accepted, _ = listener.accept()
        with accepted:
            accepted.settimeout(5)
            assert accepted.recv(100) == b"request"
            accepted.sendall(b"answer")
            assert early.recv(100) == b"answer"
        listener.settimeout(0)
        with pytest.raises(BlockingIOError):
            listener.accept()
