"""A port that nobody else gets while its server is not up yet, or is down for a moment.

Why not just bind port 0, look which it is and close: from then on the system may give it to any program that opens a
connection or listens somewhere, and a stack that starts opens hundreds. A socket that is bound and never listens keeps
it from them; a server binds it all the same, for servers set SO_REUSEADDR as this one does. Meanwhile a connection to
it is refused, as to every port on which nobody listens.
"""

from __future__ import annotations

import os
import socket
import weakref

from muster.embedded.options import StackOptions

ANY_PORTS = StackOptions(http_port=0, nats_port=0, controller_ops_port=0, proxy_ops_port=0, host_ops_port=0)
"""An embedded stack whose ports are all chosen by the system, so that any number of them can start at once."""


class HeldPort:
    """A port of this machine's own address, held until it is let go of or this object is gone."""

    def __init__(self, port: int = 0) -> None:
        """0: one that the system chooses. Raises OSError when somebody listens on the given one."""
        with socket.socket() as holder:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind(("127.0.0.1", port))
            self.port: int = holder.getsockname()[1]
            # Without a socket object nobody has to remember to close it: one that is forgotten is a warning.
            self._let_go = weakref.finalize(self, os.close, holder.detach())

    def release(self) -> None:
        """From now on anybody may have it."""
        self._let_go()
