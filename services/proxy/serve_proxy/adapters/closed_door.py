"""Lets nobody new connect to a listening socket, so that it can be emptied and closed without losing anybody.

Why: the system resets connections that wait to be accepted when their listener is closed. However quickly one is
closed after the last was accepted, another may have come in between, and its client may have sent a request. Where the
opening segment (SYN) is dropped instead, that client tries again a second later, and is then refused or finds another
listener.
"""

from __future__ import annotations

import ctypes
import socket
import struct
from typing import Final

_SO_ATTACH_FILTER: Final = 26
"""Linux, asm-generic/socket.h."""
_SYN, _ACK, _FLAGS_AT = 0x02, 0x10, 13
"""RFC 9293, 3.1: a filter of a TCP socket sees segments from their header on."""
_PROGRAM: Final = (
    # Classic BPF (linux/filter.h) as (code, jump if true, jump if false, constant).
    (0x30, 0, 0, _FLAGS_AT),  # load the byte of flags
    (0x54, 0, 0, _SYN | _ACK),  # keep these two
    (0x15, 0, 1, _SYN),  # a SYN that answers nothing: it opens a connection
    (0x06, 0, 0, 0),  # drop
    (0x06, 0, 0, 0xFFFFFFFF),  # take
)


def let_nobody_in(listener: socket.socket) -> None:
    """From now on no connection begins on a listening TCP socket; those that have begun may be accepted.

    Raises OSError where the system has no such filters.
    """
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in _PROGRAM))
    described = struct.pack("HL", len(_PROGRAM), ctypes.addressof(program))
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, described)
