"""Until when an answer must begin: the earliest of what the proxy, the endpoint and the client want.

Why a bad number is an error: a client that asks for a deadline and silently gets none waits far too long.
"""

from __future__ import annotations

import re
from typing import Final

from serve_common.errors import DeadlineExceeded
from serve_proxy.core.headers import ABSOLUTE_SLO, RELATIVE_SLO, TIMEOUT, RequestHeaders
from serve_proxy.core.problems import BadRequest

_NUMBER: Final = re.compile(rb"\d{1,15}(\.\d{1,9})?")


def earliest_deadline(
    read: RequestHeaders, deadline: float, endpoint_slo_ms: float | None, *, now: float, wall_now: float
) -> float:
    """The deadline of a request, by the clock of ``now`` as ``deadline`` is; all in seconds.

    ``deadline`` is the proxy's own and ``endpoint_slo_ms`` holds for requests that bear none; ``wall_now`` is seconds
    since 1970. Raises `BadRequest` naming the header, `DeadlineExceeded` for one that has passed.
    """
    if not read.has_slo:
        return deadline if endpoint_slo_ms is None else min(deadline, now + endpoint_slo_ms / 1000)
    if read.relative_slo_ms is not None:
        deadline = min(deadline, now + _positive(RELATIVE_SLO, read.relative_slo_ms) / 1000)
    if read.timeout_s is not None:
        deadline = min(deadline, now + _positive(TIMEOUT, read.timeout_s))
    if read.absolute_slo_ms is not None:
        left_s = _positive(ABSOLUTE_SLO, read.absolute_slo_ms) / 1000 - wall_now
        if left_s <= 0:
            raise DeadlineExceeded(f"the time that {ABSOLUTE_SLO} names has passed")
        deadline = min(deadline, now + left_s)
    return deadline


def _positive(name: str, value: bytes) -> float:
    text = value.strip()
    number = float(text) if _NUMBER.fullmatch(text) else 0.0
    if number <= 0:
        raise BadRequest(name, f"{value[:40].decode('latin-1')!r} is not a number above 0")
    return number
