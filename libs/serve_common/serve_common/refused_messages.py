"""Messages that a service could not take in: each costs itself only, and is counted and logged.

Why counted too: a sender that says what nobody understands repeats it every second, and the log must not fill with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, final

import structlog

from serve_common.bus.quiet_log import QuietLog

_log = structlog.get_logger(__name__)

KINDS: Final = ("host_report", "proxy_report", "leader_notice", "wake", "host_goal", "snapshot", "identity")
"""Of messages, as the metric names them; ``identity`` is a report in the name of another that lives."""
_ERROR_LENGTH_MAX: Final = 500


@final
class RefusedMessages:
    """Counts them by kind, and logs one a second of each."""

    def __init__(self, now: Callable[[], float]) -> None:
        """``now`` gives monotonic seconds."""
        self.counts: Final = dict.fromkeys(KINDS, 0)
        self._now = now
        self._logs = {kind: QuietLog(_log.error) for kind in KINDS}

    def refuse(self, kind: str, sender: str, error: Exception) -> None:
        """Note a message of one of `KINDS`; ``sender`` is the subject or name that it came by."""
        self.counts[kind] += 1
        text = f"{type(error).__name__}: {error}"[:_ERROR_LENGTH_MAX]
        self._logs[kind].log(
            self._now(), "message_refused", message=kind, sender=repr(sender[:200]), error=text
        )
