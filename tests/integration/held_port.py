"""A port that stays one test's own, also while nobody listens on it.

Why hold it: a port that was merely free a moment ago may be given to anybody before a server takes it, or between two
lives of a server, and clients that try to connect to it again and again may even be given it as their own.
"""

from __future__ import annotations

import socket
from typing import final


@final
class HeldPort:
    """On 127.0.0.1, chosen by the system. While this is not closed, nobody is given it.

    Whoever names it with SO_REUSEADDR, as servers do, may listen on it, for this side does not listen; connections to
    it are refused while nobody does.
    """

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", 0))
        self.number: int = self._socket.getsockname()[1]

    def close(self) -> None:
        """Let go of it. May be called twice."""
        self._socket.close()
