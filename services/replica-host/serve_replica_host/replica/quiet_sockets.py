"""The WebSockets that a drain may close: those on which nobody says anything.

Why a drain closes them: a socket may stay open for days, and its client can connect to another replica at any time.
What is in use goes on, for what is being said would be lost: a socket on which messages pass, and one whose client
spoke last, for the application may be working on its answer.

Why counts are compared and no times kept: while nothing drains, a message costs nothing here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, final

from serve_replica_host.replica.exchange import Exchange, Phase
from serve_replica_host.replica.outgoing import OutgoingMessages

QUIET_S: Final = 1.0
"""Without a message in either direction."""
SERVICE_RESTART: Final = 1012
"""As registered for RFC 6455: connect again."""
WHY_CLOSED: Final = "the replica is being replaced"


@final
class QuietSockets:
    """Watches the sockets of one replica from the beginning of its drain."""

    def __init__(self) -> None:
        self._seen: dict[bytes, tuple[int, float]] = {}
        """Frames so far, and since when there have been no more, by reply subject."""

    def find(self, exchanges: Iterable[Exchange], now: float) -> list[Exchange]:
        """Those that have been quiet for `QUIET_S`, as far as these looks can tell; ``now`` is `time.monotonic`.

        What is not among ``exchanges`` is forgotten.
        """
        quiet: list[Exchange] = []
        seen: dict[bytes, tuple[int, float]] = {}
        for exchange in exchanges:
            outgoing = exchange.outgoing
            if (
                not isinstance(outgoing, OutgoingMessages)
                or exchange.is_dropped
                or exchange.phase is not Phase.WORKING
            ):
                continue
            frames = outgoing.sent_frames
            if exchange.incoming is not None:
                frames += exchange.incoming.taken_frames
            known = self._seen.get(exchange.reply)
            owes_answer = exchange.sent_before == outgoing.sent_frames
            if known is None or known[0] != frames or owes_answer or outgoing.has_unsent:
                known = frames, now
            elif now - known[1] >= QUIET_S:
                quiet.append(exchange)
            seen[exchange.reply] = known
        self._seen = seen
        return quiet
