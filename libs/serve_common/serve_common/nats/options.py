"""Options and errors of a connection to NATS.

Why errors beside `serve_common.errors`: a caller must distinguish that a message was not sent (try elsewhere or later),
that it can never be sent (the caller's mistake), and that the peer does not speak NATS (drop the connection).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol
from urllib.parse import urlsplit

from serve_common.clock import backoff_s
from serve_common.errors import BusUnavailable, PermanentError, TransientError


class NotConnected(BusUnavailable):
    """There is no connection right now, so nothing was sent and nothing is kept for later."""


class OutboundFull(TransientError):
    """The server reads slower than bytes are written, and the limit of pending bytes is reached."""

    error_code = "bus_outbound_full"


class InboxFull(TransientError):
    """As many requests as allowed wait for replies."""

    error_code = "bus_inbox_full"


class PayloadTooLarge(PermanentError):
    """Headers and payload together are larger than the server takes; nothing was sent."""

    error_code = "payload_too_large"
    status_hint = 413


class InvalidSubject(PermanentError, ValueError):
    """The subject would not reach the server as one token; nothing was sent."""

    error_code = "invalid_subject"


class NatsProtocolError(PermanentError):
    """The bytes are not what the NATS client protocol allows; the message says what is wrong."""

    error_code = "bus_protocol_error"


DEFAULT_PORT: Final = 4222
ROUTER_PING_INTERVAL_S: Final = 1.0
"""Seconds. Routers must detect soon that the bus hangs: what they infer from silence is wrong from then on."""
ROUTER_PINGS_MAX: Final = 10
"""Unanswered pings before disconnecting: as long as with the defaults, to keep a connection that only hangs."""


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """One NATS server; `is_tls` when it must be reached through TLS."""

    host: str
    port: int
    is_tls: bool

    def __str__(self) -> str:
        return f"{'tls' if self.is_tls else 'nats'}://{self.host}:{self.port}"


def parse_server(url: str) -> ServerAddress:
    """Read `nats://host[:port]` or `tls://host[:port]`.

    Raises ValueError for anything else, credentials in the URL included: URLs end up in logs.
    """
    parts = urlsplit(url)
    if parts.username is not None or parts.password is not None:
        raise ValueError("servers: a server's URL must not hold credentials; use `user` and `password`")
    if parts.scheme not in ("nats", "tls") or not parts.hostname or parts.path.strip("/"):
        raise ValueError(f"servers: {url!r} is not nats://host[:port] or tls://host[:port]")
    return ServerAddress(parts.hostname, parts.port or DEFAULT_PORT, parts.scheme == "tls")


class Login(Protocol):
    """Authenticates a connection, again at each connect."""

    def fields(self, nonce: str) -> dict[str, str]:
        """The credentials of CONNECT; ``nonce`` is the server's, to be signed, and empty where it wants no signature.

        Raises `BusAuthorizationFailed` when there is nothing to log in with.
        """
        ...

    def renew_in_s(self) -> float | None:
        """Seconds after which a connection should log in again, before the server ends it; None is never."""
        ...


@dataclass(frozen=True, slots=True)
class BusOptions:
    """Settings of one connection. Servers are tried in turn. Raises ValueError for what cannot work."""

    servers: Sequence[str]
    login: Login | None = field(default=None, repr=False)
    """In place of ``user`` and ``password``."""
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    name: str = "muster"
    """Shown by the server's monitoring."""
    inbox_prefix: str = "_INBOX"
    """Where replies to this user go; permissions keep other users from reading them."""
    connect_timeout_s: float = 2.0
    """Seconds for one attempt: TCP, TLS and authorization."""
    ping_interval_s: float = 5.0
    outstanding_pings_max: int = 2
    """The peer is considered dead after so many unanswered pings in a row."""
    reconnect_wait_min_s: float = 0.05
    reconnect_wait_max_s: float = 2.0
    pending_bytes_max: int = 64 * 1024 * 1024
    """Bytes that may wait to be taken by the server."""
    is_shared: bool = False
    """Other threads may write too, by `BusConnection.write_shared`."""
    tls_ca_file: str | None = None
    """Authorities to trust for tls:// servers; None means the system's."""
    tls_first: bool = False
    """The handshake of tls:// servers comes before their greeting (their `handshake_first`)."""

    def __post_init__(self) -> None:
        if not self.addresses:
            raise ValueError("servers: at least one is needed")
        if not 0 < self.reconnect_wait_min_s <= self.reconnect_wait_max_s:
            raise ValueError("reconnect_wait_min_s must be above 0 and at most reconnect_wait_max_s")
        for limit in ("connect_timeout_s", "ping_interval_s", "outstanding_pings_max", "pending_bytes_max"):
            if getattr(self, limit) <= 0:
                raise ValueError(f"{limit} must be above 0")

    def login_fields(self, nonce: str) -> dict[str, str]:
        """The credentials of CONNECT; empty without a user."""
        if self.login is not None:
            return self.login.fields(nonce)
        return {} if self.user is None else {"user": self.user, "pass": self.password or ""}

    @property
    def addresses(self) -> tuple[ServerAddress, ...]:
        """The parsed addresses of the servers."""
        return tuple(parse_server(url) for url in self.servers)


def reconnect_wait_s(options: BusOptions, round_number: int, rng: random.Random) -> float:
    """How long to wait before trying all servers again; `round_number` counts failed rounds from 0.

    Waits double from round to round and are spread by `rng`, so that a restarted server does not get
    all of its clients at once.
    """
    longest_s = backoff_s(round_number + 1, options.reconnect_wait_min_s, options.reconnect_wait_max_s)
    return rng.uniform(longest_s / 2, longest_s)
