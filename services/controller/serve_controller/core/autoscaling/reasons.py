"""What a decision says for itself, in one line.

Why apart: whoever is woken at night reads these lines first; they must tell what was seen, what that comes to and what
is being waited for, always in the same words and units.
"""

from __future__ import annotations


def number_text(value: float) -> str:
    """``value`` with as many digits as say something."""
    if value >= 1000 or value == int(value):
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2g}"


def replicas_text(count: int) -> str:
    """``count`` with its noun."""
    return "1 replica" if count == 1 else f"{count} replicas"


def requests_text(count: str) -> str:
    """``count``, as `number_text` writes it, with its noun."""
    return f"{count} request" if count == "1" else f"{count} requests"


def waiting_reason(count: int) -> str:
    """So many requests that wait."""
    return "1 request waits" if count == 1 else f"{count} requests wait"


def wanted_reason(seen: str, count: int, limited: int) -> str:
    """What the load comes to, and what the limits make of it."""
    words = f"{seen}: {replicas_text(count)} wanted"
    if limited < count:
        return f"{words}, max_replicas is {limited}"
    return f"{words}, min_replicas is {limited}" if limited > count else words


def waits_reason(load: str, waited_s: float, delay_s: float, what: str) -> str:
    """How much of a delay is over."""
    return f"{load}; waits {max(waited_s, 0.0):.0f} s of {delay_s:.0f} s before {what}"
