"""A router's end of direct links: which replicas to dial, and the links that are open.

No address is part of a snapshot: a router dials when it has a use for a link, by a `DialHead` on the replica's subject.
It takes the Unix socket where that opens, else TCP where the replica offers it.
What it was about to send takes the bus, so nothing ever waits for a link.
"""

from __future__ import annotations

import asyncio
from binascii import hexlify
from collections.abc import Callable
from typing import Final, Protocol, final

import structlog

from serve_common.direct import tcp
from serve_common.direct.link import LEAVE, DirectLink, machine_id
from serve_common.direct.listening import IDLE_S, LINKS_MAX, TICKET_BYTES
from serve_common.direct.writing import CONTROL_TOKEN
from serve_common.errors import ServeError
from serve_common.names import ReplicaTag
from serve_common.protocol.frames import (
    DialHead,
    FrameUnreadable,
    LinkHead,
    SplitFrame,
    decode_frame,
    encode_frame,
)
from serve_common.runtime.settings import DirectMode

_log = structlog.get_logger(__name__)

BUSY_REQUESTS: Final = 50
"""Requests to one replica within `BUSY_S` seconds that are worth a link, where all requests may use one."""
BUSY_S: Final = 10.0
DIAL_TIMEOUT_S: Final = 5.0
RETRY_S: Final = 30.0
"""Seconds after a dial that failed in which the replica is not dialled again."""
_TRACKED_MAX: Final = 10_000


class LinkReplies(Protocol):
    """What links need of `serve_common.nats.connection.Inbox`."""

    def new_reply(
        self, on_reply: Callable[[bytes, bytes, bytes | None], None], on_no_responders: Callable[[], None]
    ) -> tuple[bytes, bytes]:
        """Register a token; return it with its reply subject."""

    def forget(self, token: bytes) -> None:
        """Release a token."""

    def deliver(self, token: bytes, payload: bytes) -> None:
        """Bring a reply that came over a link to its callback."""


Publish = Callable[[bytes, bytes, bytes], None]
"""Publishes (subject, frame, reply) on the bus; raises a `ServeError`."""


@final
class DirectLinks:
    """The links of one router; all methods run on its loop."""

    def __init__(
        self,
        mode: DirectMode,
        inbox: LinkReplies,
        publish: Publish,
        on_lost: Callable[[DirectLink], None],
        *,
        machine: str | None = None,
    ) -> None:
        """``on_lost`` is called when a link has ended, after its last frame."""
        self.mode: Final = mode
        self.opened = 0
        """Links that were opened so far."""
        self.failed = 0
        """Dials that failed."""
        self.lost = 0
        """Links that were open and have ended."""
        self.on_batch_start: Callable[[], None] = lambda: None
        """Called before the frames of one read are delivered; for links that are opened from then on."""
        self.on_batch_end: Callable[[], None] = lambda: None
        """Called after them."""
        self._ended_frames = (0, 0)
        """Frames that ended links have sent and received."""
        self._inbox = inbox
        self._publish = publish
        self._on_lost = on_lost
        self._machine = machine_id() if machine is None else machine
        self._loop = asyncio.get_running_loop()
        self._links: dict[ReplicaTag, DirectLink] = {}
        self._dials: dict[ReplicaTag, asyncio.Task[None]] = {}
        self._not_before: dict[ReplicaTag, float] = {}
        self._requests: dict[ReplicaTag, tuple[float, int]] = {}
        """Since when, and how many, for `DirectMode.ALL`."""

    @property
    def open_links(self) -> int:
        """Number of open links."""
        return len(self._links)

    @property
    def open_tcp_links(self) -> int:
        """Number of open links to other machines."""
        return sum(link.is_tcp for link in list(self._links.values()))

    @property
    def carry_all(self) -> bool:
        """True when requests can be sent without the bus, to some replicas."""
        return self.mode is DirectMode.ALL and bool(self._links)

    def count_frames(self) -> tuple[int, int]:
        """Frames that were sent and received over links so far; for any thread."""
        links = list(self._links.values())
        sent, received = self._ended_frames
        return (
            sent + sum(link.sent_frames for link in links),
            received + sum(link.received_frames for link in links),
        )

    def for_request(self, replica: ReplicaTag, subject: bytes, *, is_large: bool) -> DirectLink | None:
        """The link for a request that is about to be sent; None: it takes the bus. Dials when that is worth it."""
        if self.mode is DirectMode.OFF:
            return None
        link = self._links.get(replica)
        if link is not None:
            return link if is_large or self.mode is DirectMode.ALL else None
        if is_large or (self.mode is DirectMode.ALL and self._is_busy(replica)):
            self.dial(replica, subject)
        return None

    def get(self, replica: ReplicaTag) -> DirectLink | None:
        """The open link to ``replica``, if any."""
        return self._links.get(replica)

    def dial(self, replica: ReplicaTag, subject: bytes) -> None:
        """Open a link to ``replica`` in the background, unless there is one, or it failed lately."""
        if self.mode is DirectMode.OFF or replica in self._links or replica in self._dials:
            return
        if self._loop.time() < self._not_before.get(replica, 0.0) or len(self._dials) >= LINKS_MAX:
            return
        task = self._dials[replica] = self._loop.create_task(self._dial(replica, subject))
        task.add_done_callback(lambda _: self._dials.pop(replica, None))

    def sweep(self) -> None:
        """End links that were not used for `IDLE_S`; called now and then."""
        now = self._loop.time()
        for link in list(self._links.values()):
            if now - link.last_used_at > IDLE_S:
                link.close()
        if len(self._not_before) > _TRACKED_MAX:
            self._not_before.clear()

    async def close(self) -> None:
        """End all links and dials."""
        dials = list(self._dials.values())
        for dial in dials:
            dial.cancel()
        await asyncio.gather(*dials, return_exceptions=True)
        for link in list(self._links.values()):
            link.close()

    def _is_busy(self, replica: ReplicaTag) -> bool:
        now = self._loop.time()
        since, requests = self._requests.get(replica, (now, 0))
        if now - since > BUSY_S:
            since, requests = now, 0
        if len(self._requests) > _TRACKED_MAX:
            self._requests.clear()
        self._requests[replica] = since, requests + 1
        return requests >= BUSY_REQUESTS

    async def _dial(self, replica: ReplicaTag, subject: bytes) -> None:
        try:
            async with asyncio.timeout(DIAL_TIMEOUT_S):
                link = await self._connect(replica, await self._request_way(subject))
        except (OSError, TimeoutError, ServeError) as error:
            self.failed += 1
            self._not_before[replica] = self._loop.time() + RETRY_S
            _log.debug("direct_link_failed", replica_tag=replica, error=str(error) or type(error).__name__)
            return
        if len(self._links) >= LINKS_MAX:
            min(self._links.values(), key=lambda each: each.last_used_at).close()
        self._links[replica] = link
        self.opened += 1
        _log.debug("direct_link_opened", replica_tag=replica)

    async def _request_way(self, subject: bytes) -> LinkHead:
        """Ask the replica over the bus for the way. Raises OSError when there is none."""
        waiter: asyncio.Future[LinkHead] = self._loop.create_future()

        def on_reply(payload: bytes, _reply: bytes, _headers: bytes | None) -> None:
            try:
                head, _ = decode_frame(payload)
            except FrameUnreadable:
                return
            if isinstance(head, LinkHead) and not waiter.done():
                waiter.set_result(head)

        def on_no_responders() -> None:
            if not waiter.done():
                waiter.set_result(LinkHead())

        token, reply = self._inbox.new_reply(on_reply, on_no_responders)
        try:
            self._publish(subject, encode_frame(DialHead(self._machine)), reply)
            found = await waiter
        finally:
            self._inbox.forget(token)
        if not found.path and not found.host:
            raise ConnectionError("the replica offers no way")
        return found

    async def _connect(self, replica: ReplicaTag, way: LinkHead) -> DirectLink:
        """Open a link that the replica has accepted. Raises OSError."""
        has_changed = asyncio.Event()

        def take_frame(link: DirectLink, token: bytes, frame: bytes | memoryview | SplitFrame) -> None:
            if token != CONTROL_TOKEN:
                self._inbox.deliver(hexlify(token), frame)  # type: ignore[arg-type]  # `decode_frame` takes it
            elif not frame:
                has_changed.set()
            elif frame == LEAVE and not link.has_parted:
                link.has_parted = True
                self._not_before[replica] = self._loop.time() + RETRY_S
                link.send_frame(CONTROL_TOKEN, LEAVE)
                ended(link)  # for requests; the replica ends it once it has read everything

        def ended(link: DirectLink) -> None:
            has_changed.set()
            if self._links.get(replica) is link:
                del self._links[replica]
                self.lost += 1
                sent, received = self._ended_frames
                self._ended_frames = (sent + link.sent_frames, received + link.received_frames)
                self._on_lost(link)

        if len(way.ticket) != TICKET_BYTES:
            raise ConnectionError(f"the replica's ticket has {len(way.ticket)} bytes")
        link = DirectLink(
            self._loop,
            take_frame,
            ended,
            on_batch_start=self.on_batch_start,
            on_batch_end=self.on_batch_end,
        )
        try:
            transport = await self._open_transport(link, way)
            transport.write(way.ticket)
            await has_changed.wait()
        except BaseException:
            link.close()
            raise
        if not link.is_open or link.has_parted:
            raise ConnectionError("the replica did not accept the ticket, or leaves")
        return link

    async def _open_transport(self, link: DirectLink, way: LinkHead) -> asyncio.Transport:
        """Connect over the Unix socket, or, where that is of another machine or container, over TCP. Raises OSError."""
        if way.path:
            try:
                transport, _ = await self._loop.create_unix_connection(lambda: link, way.path)
            except OSError:
                if not way.host:
                    raise
            else:
                return transport
        return await tcp.open_connection(link, way.host, way.port, way.certificate, DIAL_TIMEOUT_S)
