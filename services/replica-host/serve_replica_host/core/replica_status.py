"""The life of one replica on its host, as one table.

Why a table: events come late and out of order (a health check answers while the replica already drains), so what
each of them may change must be seen at one glance.

```
            CONSTRUCTED             CHECKS_FAILED
 STARTING ───────────────▶ RUNNING ◀────────────▶ UNHEALTHY
    │  │                    │    │  CHECK_PASSED      │
    │  └──▶ FAILED          │    └──────▶ DEAD ◀──────┘   PROCESS_ENDED
    │         START_FAILED  │
    └───────────────────────┴──▶ DRAINING ──▶ gone        OMITTED, then PROCESS_ENDED
```

FAILED and DEAD stay until the goal omits them, so that no report of them can be missed; then they are gone, once
they have no process any more.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from serve_common.wires.host import ReplicaStatus


class Happening(Enum):
    """What can happen to a replica."""

    CONSTRUCTED = "constructed"
    """Import and constructor are done, and its subject is subscribed."""
    START_FAILED = "start_failed"
    """Import or constructor raised or took too long, or the process ended before they were done."""
    CHECKS_FAILED = "checks_failed"
    """Its health check failed as often as is allowed."""
    CHECK_PASSED = "check_passed"
    OMITTED = "omitted"
    """The goal leaves it out, or the host itself leaves."""
    PROCESS_ENDED = "process_ended"


class Gone(Enum):
    """The place after every status: the host forgets the replica."""

    GONE = "gone"


_S = ReplicaStatus
_H = Happening

TRANSITIONS: Final[dict[tuple[ReplicaStatus, Happening], ReplicaStatus | Gone]] = {
    (_S.STARTING, _H.CONSTRUCTED): _S.RUNNING,
    (_S.STARTING, _H.START_FAILED): _S.FAILED,
    (_S.STARTING, _H.PROCESS_ENDED): _S.FAILED,
    (_S.STARTING, _H.OMITTED): _S.DRAINING,
    (_S.RUNNING, _H.CHECKS_FAILED): _S.UNHEALTHY,
    (_S.RUNNING, _H.PROCESS_ENDED): _S.DEAD,
    (_S.RUNNING, _H.OMITTED): _S.DRAINING,
    (_S.UNHEALTHY, _H.CHECK_PASSED): _S.RUNNING,
    (_S.UNHEALTHY, _H.PROCESS_ENDED): _S.DEAD,
    (_S.UNHEALTHY, _H.OMITTED): _S.DRAINING,
    (_S.DRAINING, _H.PROCESS_ENDED): Gone.GONE,
    (_S.FAILED, _H.OMITTED): Gone.GONE,
    (_S.DEAD, _H.OMITTED): Gone.GONE,
}
"""What changes; every pair that is not here changes nothing."""


def after(status: ReplicaStatus, happening: Happening) -> ReplicaStatus | Gone:
    """The status that follows; the same one when this happening means nothing (any more) in it."""
    return TRANSITIONS.get((status, happening), status)
