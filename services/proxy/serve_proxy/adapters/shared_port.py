"""Holds the port on which several processes are about to listen together.

Why: with SO_REUSEPORT a second stack of the same user would share the port unnoticed, and get half of the first one's
requests. And where the system is to choose the port, all processes must get the same.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def held_port(host: str, port: int) -> Iterator[int]:
    """The port, kept for sockets with SO_REUSEPORT while the block runs; 0 lets the system choose.

    Raises OSError when something listens there already, or the host has no address.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    if port:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)  # without SO_REUSEPORT: fails where anybody listens
    with socket.socket(family, kind, protocol) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(address)  # and never listens, so it gets no connection
        yield int(holder.getsockname()[1])
