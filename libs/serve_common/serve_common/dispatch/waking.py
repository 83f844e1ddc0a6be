"""Says that requests wait for a backend that was scaled to zero, so that it wakes before any scrape tells of them.

Why both when a request begins to wait and with the beat: the first must not wait for anything, and what is said must be
said again for as long as they wait, for a message may be lost and a controller may just have taken over.
"""

from __future__ import annotations

from serve_common.dispatch.outgoing import Outgoing
from serve_common.routing.router import Router


def wake_if_due(outgoing: Outgoing, router: Router, now: float, *, refused: int = 0) -> None:
    """Say it if ``router``'s backend sleeps, a request waits or ``refused`` ones could not, and it is time.

    Copies for a shadow do not count. While NATS is away nothing is said; it is then still due.
    """
    waiting = router.queue_depth or refused
    if (
        router.is_asleep
        and waiting
        and router.alarm.is_due(now, waiting)
        and outgoing.wake(router.backend_tag, waiting)
    ):
        router.alarm.told(now, waiting)
