"""A replica's end of direct links: who may connect, and the links that are open.

The bus is the one authority: only who may publish on the replica's subject, and receive on the inbox that it names,
gets a ticket. A ticket is 256 random bits, good for one connection within seconds, and bound to that inbox: requests on
the link can name no other. On its own machine a replica listens on a Unix socket, in a directory that only Muster's
processes can enter, and checks the peer's user; for other machines, where that is configured, on TCP with TLS
(`serve_common.direct.tcp`), which lets in nobody while no ticket is out.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import socket
import ssl
import struct
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final, cast, final

import structlog

from serve_common.direct.link import DirectLink, OnFrame, machine_id
from serve_common.direct.tcp import TcpEndpoint, configure, create_server_identity, is_loopback, listen
from serve_common.direct.writing import CONTROL_TOKEN
from serve_common.protocol.frames import LinkHead
from serve_common.runtime.tasks import OwnedTask, TaskOwner
from serve_common.telemetry.log_lines import RateLimitedLogger

_log = structlog.get_logger(__name__)

TICKET_BYTES: Final = 32
TICKET_S: Final = 5.0
"""Seconds for which a ticket is good, and for which a connection may be without one."""
TICKETS_MAX: Final = 64
"""Most tickets, and of each transport most connections without one, at a time."""
LINKS_MAX: Final = 256
"""Most open links of a process; beyond it the one that was idle longest is ended."""
IDLE_S: Final = 300.0
"""Seconds without a frame after which a link is ended."""
_SWEEP_S: Final = 30.0
_LEAVING_POLL_S: Final = 0.005
_ACCEPT_RETRY_S: Final = 1.0
"""Seconds without accepting after that failed, as it does when the process has too many open files."""
_DEAD_SOCKETS_MAX: Final = 1_000
_NEW_S: Final = 60.0
"""Seconds in which a socket may be bound and not listened on yet."""
_INBOX: Final = b"_INBOX"
_TOKEN_DIGITS: Final = 16
_HEX: Final = frozenset(b"0123456789abcdef")


def parse_inbox(reply: bytes) -> bytes | None:
    """The router's inbox with its last dot, of a reply subject that ends in a token; None for any other subject.

    Subjects that a server made, as for requests from another account, name no inbox.
    """
    inbox, token = reply[:-_TOKEN_DIGITS], reply[-_TOKEN_DIGITS:]
    is_token = len(token) == _TOKEN_DIGITS and _HEX.issuperset(token)
    return inbox if is_token and inbox.startswith(_INBOX) and inbox.endswith(b".") else None


@final
class LinkListener:
    """Offers and accepts links; all methods but `offer` and `link_to` run on the loop."""

    def __init__(
        self,
        directory: Path | None,
        uids: Collection[int],
        *,
        tcp: TcpEndpoint | None = None,
        on_frame: OnFrame,
        on_end: Callable[[DirectLink], None],
        on_batch_end: Callable[[], None],
        on_open: Callable[[DirectLink], None] = lambda _link: None,
        machine: str | None = None,
    ) -> None:
        """``directory`` is where the socket is made, ``uids`` are the users whose processes may connect there.

        ``tcp`` is where links of other machines are accepted. None of either: no such links. Links lend their frames to
        ``on_frame``.
        """
        # A short name: such paths have 107 characters at most.
        self._path = None if directory is None else directory / secrets.token_urlsafe(16)
        self._tcp = tcp
        self._port = 0
        """Bound TCP port; 0: none."""
        self._certificate = b""
        self._tcp_server: socket.socket | None = None
        self._accepting: OwnedTask | None = None
        self._machine = machine_id() if machine is None else machine
        self._uids = frozenset(uids)
        self._on_frame = on_frame
        self._on_end = on_end
        self._on_batch_end = on_batch_end
        self.on_open: Final = on_open
        """Called with each new link."""
        self._loop = asyncio.get_running_loop()
        self._tickets: dict[bytes, tuple[bytes, float]] = {}
        """Inbox, and until when it is good, by ticket; oldest first."""
        self._unknown: set[_Arrival] = set()
        self._links: dict[bytes, DirectLink] = {}
        """Open links by inbox."""
        self._open: set[DirectLink] = set()
        self._server: asyncio.Server | None = None
        self._refusals = RateLimitedLogger(_log.warning)

    async def start(self, tasks: TaskOwner) -> None:
        """Listen. What cannot be listened on is logged, and its links are not offered."""
        if self._path is not None:
            try:
                self._path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
                await self._listen_unix(self._path)
            except OSError as error:
                _log.warning("direct_links_not_accepted", path=str(self._path.parent), error=str(error))
        if self._tcp is not None:
            try:
                self._listen_tcp(self._tcp, tasks)
            except OSError as error:
                first, last = self._tcp.ports
                _log.warning(
                    "direct_links_not_accepted",
                    host=self._tcp.host,
                    ports=f"{first}-{last}",
                    error=str(error),
                )
        tasks.start(self._sweep(), "direct_links")

    async def _listen_unix(self, path: Path) -> None:
        self._server = await self._loop.create_unix_server(lambda: _Arrival(self, is_tcp=False), str(path))
        _share_socket(path)

    def _listen_tcp(self, tcp: TcpEndpoint, tasks: TaskOwner) -> None:
        context, self._certificate = create_server_identity()
        server = self._tcp_server = listen(tcp.host, tcp.ports)
        self._port = server.getsockname()[1]
        self._accepting = tasks.start(self._accept(server, context, tasks), "accept_links")
        _log.debug("direct_links_accepted", host=tcp.host, port=self._port)

    async def drain(self, timeout_s: float) -> None:
        """Accept no more links, and end the open ones, each when its router has left it and everything is answered.

        A link whose router does not leave it within ``timeout_s`` ends then.
        """
        await self._stop_listening()
        self._links.clear()
        for link in list(self._open):
            link.leave()
        deadline = self._loop.time() + timeout_s
        while self._open and self._loop.time() < deadline:
            await asyncio.sleep(_LEAVING_POLL_S)
            for link in list(self._open):
                if link.has_parted and link.is_written:
                    link.close()
        await self.close()

    async def close(self) -> None:
        """End everything."""
        await self._stop_listening()
        for link in list(self._open):
            link.close()

    async def _stop_listening(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        self._port = 0
        if self._accepting is not None:
            self._accepting.cancel()
            while not self._accepting.is_done:  # noqa: ASYNC110 - it ends at once; then the loop leaves the socket alone
                await asyncio.sleep(0)
        if self._tcp_server is not None:
            self._tcp_server.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        for arrival in list(self._unknown):
            arrival.refuse("the replica ends")

    def offer(self, reply: bytes, machine: str) -> LinkHead:
        """Answer a `DialHead`, on any thread."""
        inbox = parse_inbox(reply)
        if inbox is None:
            return LinkHead()
        is_here = bool(machine) and machine == self._machine
        path = str(self._path) if is_here and self._server is not None else ""
        host = self._advertised_host(is_here=is_here)
        if not path and not host:
            return LinkHead()
        if len(self._tickets) >= TICKETS_MAX:
            self._drop_old_tickets()
            if len(self._tickets) >= TICKETS_MAX:
                return LinkHead()
        ticket = secrets.token_bytes(TICKET_BYTES)
        self._tickets[ticket] = inbox, self._loop.time() + TICKET_S
        if not host:
            return LinkHead(path, ticket)
        return LinkHead(path, ticket, host, self._port, self._certificate)

    def _advertised_host(self, *, is_here: bool) -> str:
        """The host that a router dials over TCP; empty: it cannot."""
        if self._tcp is None or not self._port:
            return ""
        host = self._tcp.advertised_host()
        return "" if is_loopback(host) and not is_here else host

    def link_to(self, inbox: bytes) -> DirectLink | None:
        """The open link to the router with this inbox, on any thread."""
        return self._links.get(inbox)

    @property
    def open_links(self) -> int:
        """Number of open links."""
        return len(self._links)

    # -- arrivals --

    async def _accept(self, server: socket.socket, context: ssl.SSLContext, tasks: TaskOwner) -> None:
        """Accept TCP connections. Why not asyncio's server: it would bound nothing before a handshake is over."""
        while True:
            try:
                connection, _ = await self._loop.sock_accept(server)
            except OSError as error:
                self.log_refusal(f"connections cannot be accepted: {error}")
                await asyncio.sleep(_ACCEPT_RETRY_S)
                continue
            arrival = _Arrival(self, is_tcp=True)
            reason = self.arrive(arrival)
            if reason is None:
                tasks.start(self._handshake(arrival, connection, context), "tls_handshake")
            else:
                connection.close()
                self.log_refusal(reason)

    async def _handshake(self, arrival: _Arrival, connection: socket.socket, context: ssl.SSLContext) -> None:
        try:
            configure(connection)
            async with asyncio.timeout(TICKET_S):
                await self._loop.connect_accepted_socket(
                    lambda: arrival, connection, ssl=context, ssl_handshake_timeout=TICKET_S
                )
        except OSError as error:  # of TLS, too
            arrival.refuse(f"no TLS: {str(error) or type(error).__name__}")

    def arrive(self, arrival: _Arrival) -> str | None:
        """A connection was made; returns why it is refused."""
        if sum(each.is_tcp is arrival.is_tcp for each in self._unknown) >= TICKETS_MAX:
            return "too many connections without a ticket"
        if arrival.is_tcp:
            self._drop_old_tickets()
            if not self._tickets:
                return "no ticket is out"
        elif (uid := _peer_uid(arrival.transport)) not in self._uids:
            return f"the peer's user is {uid}"
        self._unknown.add(arrival)
        self._loop.call_later(TICKET_S, arrival.expire)
        return None

    def leave(self, arrival: _Arrival) -> None:
        """A connection without a ticket has ended."""
        self._unknown.discard(arrival)

    def log_refusal(self, reason: str) -> None:
        """Log why a connection was refused."""
        self._refusals.log(self._loop.time(), "direct_link_refused", reason=reason)

    def admit(self, arrival: _Arrival, ticket: bytes) -> DirectLink | None:
        """Exchange a ticket for a link; None when it is not good."""
        inbox, until = self._tickets.pop(ticket, (b"", 0.0))
        if not inbox or self._loop.time() > until:
            return None
        self._unknown.discard(arrival)
        former = self._links.get(inbox)
        if former is not None:
            former.close()
        if len(self._links) >= LINKS_MAX:
            min(self._open, key=lambda link: link.last_used_at).close()
        link = DirectLink(self._loop, self._on_frame, self._ended, on_batch_end=self._on_batch_end)
        self._links[inbox] = link
        link.inbox = inbox
        self._open.add(link)
        return link

    def _ended(self, link: DirectLink) -> None:
        self._open.discard(link)
        if self._links.get(link.inbox) is link:
            del self._links[link.inbox]
        link.inbox = b""
        self._on_end(link)

    # -- time --

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            self._drop_old_tickets()
            now = self._loop.time()
            for link in list(self._open):
                if now - link.last_used_at > IDLE_S:
                    link.close()

    def _drop_old_tickets(self) -> None:
        now = self._loop.time()
        for ticket, (_, until) in list(self._tickets.items()):
            if now > until:
                self._tickets.pop(ticket, None)


@final
class _Arrival(asyncio.Protocol):
    """A connection until its ticket has arrived; then its transport is a link's."""

    def __init__(self, listener: LinkListener, *, is_tcp: bool) -> None:
        self.is_tcp = is_tcp
        self.transport: asyncio.Transport | None = None
        """None until a TLS handshake is over."""
        self._listener = listener
        self._data = b""
        self._is_over = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        if self._is_over:
            self.transport.abort()
        elif not self.is_tcp:  # those were let in before TLS
            reason = self._listener.arrive(self)
            if reason is not None:
                self.refuse(reason)

    def data_received(self, data: bytes) -> None:
        if self._is_over or self.transport is None:
            return
        self._data += data
        if len(self._data) < TICKET_BYTES:
            return
        ticket, rest = self._data[:TICKET_BYTES], self._data[TICKET_BYTES:]
        link = self._listener.admit(self, ticket)
        if link is None:
            self.refuse("its ticket is not good")
            return
        self._is_over = True
        link.connection_made(self.transport)
        self.transport.set_protocol(link)
        link.send_frame(CONTROL_TOKEN, b"")
        while rest:
            buffer = link.get_buffer(len(rest))
            part, rest = rest[: len(buffer)], rest[len(buffer) :]
            buffer[: len(part)] = part
            link.buffer_updated(len(part))
        if link.is_open:
            self._listener.on_open(link)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's
        self._listener.leave(self)

    def expire(self) -> None:
        """The ticket did not come in time."""
        if not self._is_over:
            self.refuse("no ticket within seconds")

    def refuse(self, reason: str) -> None:
        """End the connection; one without a transport ends with its handshake."""
        if not self._is_over:
            self._listener.log_refusal(reason)
        self._is_over = True
        self._listener.leave(self)
        if self.transport is not None:
            self.transport.abort()


def _peer_uid(transport: asyncio.Transport | None) -> int:
    """The user of the process at the other end of a Unix socket."""
    assert transport is not None, "it is connected"
    peer: socket.socket = transport.get_extra_info("socket")
    size = struct.calcsize("3i")
    _, uid, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return int(uid)


def _share_socket(path: Path) -> None:
    # The directory decides who may come near; other users of it need the right to write, to connect.
    path.chmod(0o660)
    _remove_dead_sockets(path)


def _remove_dead_sockets(own: Path) -> None:
    """Remove what killed replicas have left beside ``own``: older sockets on which nobody listens."""
    made_at = own.stat().st_mtime
    for path in itertools.islice(own.parent.iterdir(), _DEAD_SOCKETS_MAX):
        with contextlib.suppress(OSError):
            if not path.is_socket() or made_at - path.stat().st_mtime < _NEW_S:
                continue
            with socket.socket(socket.AF_UNIX) as probe:
                probe.setblocking(False)  # noqa: FBT003 - the standard library's
                try:
                    probe.connect(str(path))
                except ConnectionRefusedError:
                    path.unlink()
