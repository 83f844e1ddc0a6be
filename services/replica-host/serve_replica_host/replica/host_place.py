"""Where a replica's host is, as the host says it: for replicas that Ray may have put on another machine.

Why by Ray's node and not by what there is to be found: a directory of the same name may well exist on two machines,
and is then a different one.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from serve_replica_host.replica.log_lines import HOST_ID, LOG_SOCKET


class HostPlace(msgspec.Struct, frozen=True, kw_only=True):
    """What the actor is told when it is made."""

    metrics_dir: str = ""
    """prometheus_client's multiprocess directory on the host's machine; empty for none."""
    node_id: str = ""
    """Ray's name of the host's machine; empty where all replicas are on it, and have inherited its environment."""
    host_id: str = ""
    log_socket: str = ""
    """Its path on the host's machine; empty where the host has none."""
    variables: dict[str, str] = {}
    """Of the host's environment, for a process whose own has none of that name."""

    def is_shared_by(self, node_id: str) -> bool:
        """Whether a process on ``node_id`` can write to what the host reads.

        The same node is not enough: it may run as another user, or in another container.
        """
        if not self.node_id:
            return True
        if node_id != self.node_id or not os.access(self.metrics_dir, os.R_OK | os.W_OK | os.X_OK):
            return False
        # Its name is random, so who sees it sees the host's own files.
        return not self.log_socket or Path(self.log_socket).exists()

    def enter(self, *, is_shared: bool) -> None:
        """Make this process' environment what it would have inherited from its host."""
        if not self.node_id:
            return
        for name, value in self.variables.items():
            os.environ.setdefault(name, value)
        os.environ[HOST_ID] = self.host_id
        # What is there may be another host's, that started this Ray.
        os.environ.pop(LOG_SOCKET, None)
        if is_shared and self.log_socket:
            os.environ[LOG_SOCKET] = self.log_socket


def encode_place(place: HostPlace) -> bytes:
    """The bytes that travel through Ray."""
    return msgspec.msgpack.encode(place)


def decode_place(data: bytes) -> HostPlace:
    """A `HostPlace`; raises msgspec.DecodeError."""
    return msgspec.msgpack.decode(data, type=HostPlace)
