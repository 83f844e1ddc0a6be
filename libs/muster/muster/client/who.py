"""Who uses the client, for the audit log: a claim, not a proof, as the person at the terminal would put it."""

from __future__ import annotations

import getpass
import os
import socket

from serve_common.wires.admin import WHO_LENGTH_MAX


def who_am_i() -> str:
    """``user@host`` in characters that a NATS header can carry, at most `WHO_LENGTH_MAX` of them."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = f"uid-{os.getuid()}"  # a container's user often has no name
    who = f"{user}@{socket.gethostname()}"
    return "".join(char if char.isascii() and char.isprintable() else "?" for char in who)[:WHO_LENGTH_MAX]
