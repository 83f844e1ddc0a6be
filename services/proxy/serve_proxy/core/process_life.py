"""What is decided about the processes of one container: their names, and when a dead one is started again.

Why pure: a process that dies at once, again and again, must neither eat the machine nor be given up.
"""

from __future__ import annotations

from typing import Final

from serve_common.names import NAME_LENGTH_MAX, ProxyId

PROCESSES_MAX: Final = 64
PARENT_FD: Final = "SERVE_PROXY_PARENT_FD"
"""The variable that names a child's end of the socket to its parent; set by the parent only."""
LONG_LIFE_S: Final = 10.0
"""Who lived for so long did not die of its start."""
_WAIT_MIN_S: Final = 0.1
_WAIT_MAX_S: Final = 5.0


def child_id(proxy_id: ProxyId, number: int) -> ProxyId:
    """``<id>-<number>``; of an id that is too long for that, the end is kept, where names of containers differ."""
    suffix = f"-{number}"
    return ProxyId(proxy_id[-(NAME_LENGTH_MAX - len(suffix)) :].lstrip("-_") + suffix)


def restart_wait_s(short_lives: int) -> float:
    """How long to wait before the next start, after so many short lives in a row."""
    if short_lives == 0:
        return 0.0
    return min(_WAIT_MAX_S, _WAIT_MIN_S * 2.0 ** min(short_lives - 1, 30))
