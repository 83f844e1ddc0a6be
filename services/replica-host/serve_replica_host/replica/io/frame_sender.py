"""Sends the frames of responses to routers, over direct links or the bus, and says when a way is full."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, final

import structlog

from serve_common.direct.link import DirectLink, link_token
from serve_common.direct.listening import parse_inbox
from serve_common.nats.options import InvalidSubject, NotConnected, OutboundFull
from serve_common.protocol.frames import SMALL_FRAME_BYTES_MAX, Head, encode_frame
from serve_common.protocol.streams import OnBusBytes
from serve_common.telemetry.log_lines import RateLimitedLogger

_log = structlog.get_logger(__name__)

WAY_BYTES_MAX: Final = 16 * 1024 * 1024
"""Bytes that wait on a way above which streams send nothing more: the windows of many would together exceed what a link
or a connection takes, and then all would be lost."""
_ROUTERS_MAX: Final = 1_024
"""Routers for which is known what they have on the bus."""
Publish = Callable[[bytes, bytes], None]
"""Publishes (subject, frame). Raises as `BusConnection.publish`."""


@final
class FrameSender:
    """Publishes frames to reply subjects.

    Why a response may be lost: its router probes for the request, and gets the response again (`RecentReplies`).
    """

    def __init__(
        self, publish: Publish, now: Callable[[], float], pending_bytes: Callable[[], int] = lambda: 0
    ) -> None:
        """``now`` is `time.monotonic` or a fake; ``pending_bytes`` is what waits to be sent over the bus."""
        self.publish = publish
        self._pending_bytes = pending_bytes
        self.links: Final[dict[bytes, DirectLink]] = {}
        """The direct links that responses take, by reply subject; all others take the bus."""
        self.link_to: Callable[[bytes], DirectLink | None] = lambda _inbox: None
        """The open link to the router with an inbox."""
        self.left: Final[set[DirectLink | None]] = set()
        """Open links that their routers have left; a frame that comes over one proves that this is not so."""
        self._on_bus: dict[bytes, OnBusBytes] = {}
        """By inbox."""
        self.now: Final = now
        self._lost_response_logger = RateLimitedLogger(_log.warning)

    def send(self, reply: bytes, head: Head, body: bytes | memoryview = b"") -> bytes:
        """Send a frame and return it.

        Raises FrameUnreadable (the head is too large) or PayloadTooLarge; a frame that the bus cannot buffer is lost.
        """
        frame = encode_frame(head, body)
        self.send_again(reply, frame, type(head).__name__)
        return frame

    def post(self, reply: bytes, head: Head, body: bytes | memoryview = b"") -> None:
        """As `send`, without a copy of a large body where a direct link takes it."""
        link = self.links.get(reply) if self.links else None
        if link is None or not link.send(link_token(reply), head, body):
            self.send(reply, head, body)

    def has_capacity(self, reply: bytes) -> bool:
        """False while too much waits on the way of this response for a stream to add to it."""
        link = self.links.get(reply) if self.links else None
        if link is not None:
            return link.pending_bytes < WAY_BYTES_MAX
        if self._pending_bytes() >= WAY_BYTES_MAX:
            return False
        on_bus = self._on_bus.get(parse_inbox(reply) or b"")
        return on_bus is None or not on_bus.is_full(self.now())

    def take_received(self, reply: bytes, total_bytes: int) -> None:
        """The router of ``reply`` has received ``total_bytes`` over the bus."""
        on_bus = self._on_bus.get(parse_inbox(reply) or b"")
        if on_bus is not None:
            on_bus.take(total_bytes, self.now())

    def send_again(self, reply: bytes, frame: bytes, kind: str = "again") -> None:
        """Send an encoded frame. Raises as `send`."""
        link = self.links.get(reply) if self.links else None
        if link is not None and link.send_frame(link_token(reply), frame):
            return
        try:
            self.publish(reply, frame)
        except (NotConnected, OutboundFull, InvalidSubject) as error:
            self._lost_response_logger.log(self.now(), "answer_lost", kind=kind, error=str(error))
            return
        if len(frame) > SMALL_FRAME_BYTES_MAX:
            self._count_on_bus(reply, len(frame))

    def _count_on_bus(self, reply: bytes, size_bytes: int) -> None:
        inbox = parse_inbox(reply)
        if inbox is None:
            return
        on_bus = self._on_bus.get(inbox)
        if on_bus is None:
            if len(self._on_bus) >= _ROUTERS_MAX:
                self._on_bus.clear()
            on_bus = self._on_bus[inbox] = OnBusBytes()
        on_bus.add(size_bytes, self.now())

    def find_link(self, reply: bytes) -> None:
        """Let a response that is worth a link take the open one to its router, if any."""
        if (link := self.unused_link(reply)) is not None:
            self.links[reply] = link

    def unused_link(self, reply: bytes) -> DirectLink | None:
        """The open link to the router of a response that takes the bus, if any."""
        inbox = None if reply in self.links else parse_inbox(reply)
        link = None if inbox is None else self.link_to(inbox)
        return None if link in self.left else link

    def leave_link(self, reply: bytes) -> None:
        """The router of a response has left its link, of whose end this process may hear late: use it for no other."""
        self.left.add(self.links.pop(reply))

    def drop_link(self, link: DirectLink) -> None:
        """A link has ended: its responses take the bus."""
        self.left.discard(link)
        for reply in [reply for reply, used in self.links.items() if used is link]:
            del self.links[reply]
