"""Where a replica's log lines go on its own machine: to its host's socket, or to its own standard error.

Why a socket: Ray sends what its processes write into files of its own that nobody follows. Datagrams, because they
need no connection that could break, and because a line can never be torn.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from typing import Final

from serve_common.adapters.system_clock import SystemClock
from serve_common.logs.lines import encode_line
from serve_common.logs.standard_error import StandardError

LOG_SOCKET: Final = "SERVE_LOG_SOCKET"
"""The variable that a host leaves to the processes that it starts: the path of its socket."""
HOST_ID: Final = "SERVE_HOST_ID"
_SEND_TIMEOUT_S: Final = 10.0
"""Nobody waits for it but the thread that sends. A host that has no processor for a second or two has not gone."""
_SEND_BYTES: Final = 512 * 1024


def open_log_way() -> Callable[[bytes], None]:
    """Takes whole lines, on one thread at a time; what cannot be sent is written to standard error."""
    path = os.environ.get(LOG_SOCKET, "")
    to_stderr = own_stderr()
    if not path:
        return to_stderr
    try:
        out = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        out.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)
        out.settimeout(_SEND_TIMEOUT_S)
        out.connect(path)
    except OSError as error:  # such as of another user than the host's
        to_stderr(encode_line({"event": "no_log_socket", "reason": str(error), "level": "info"}))
        return to_stderr

    def to_host(lines: bytes) -> None:
        try:
            out.send(lines)
        except OSError:
            to_stderr(lines)

    return to_host


def own_stderr() -> Callable[[bytes], None]:
    """Takes whole lines; they end in a file of Ray's on this machine."""
    return StandardError({"service": "replica"}, SystemClock(), sys.stderr.fileno()).write
