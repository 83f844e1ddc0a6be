"""The address of a stack; requests and feeds over NATS as the clients see them, and the decoding of errors."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Final, Protocol
from urllib.parse import SplitResult, unquote, urlsplit

import msgspec

from serve_common import errors
from serve_common.api.views import ErrorView, ProxyView
from serve_common.errors import BadField, ServeError, TransientError
from serve_common.identities.credentials import CredentialsFile, UserIdentity
from serve_common.identities.roles import Role
from serve_common.runtime.settings import BusSettings, Environment, read_direct_mode

DEFAULT_URL = "nats://127.0.0.1:4222"
DEFAULT_USER = "admin"
_SCHEMES = ("nats", "tls")
_WILDCARDS = frozenset({"0.0.0.0", "::", ""})  # noqa: S104 - compared with, not bound


class StackAddress(msgspec.Struct, frozen=True, kw_only=True):
    """How to reach one instance. ``urls`` hold no user and no password."""

    urls: tuple[str, ...] = (DEFAULT_URL,)
    credentials_file: str | None = None
    """File with the client's identity, in NATS' format; if set, ``user`` and ``password`` are ignored."""
    user: str = DEFAULT_USER
    """User of a NATS with plain users."""
    password: str | None = None
    identity: UserIdentity | None = None
    """An identity in memory; if set, ``credentials_file``, ``user`` and ``password`` are ignored."""
    role: Role = Role.ADMIN
    """Role of the user: replies arrive at its inbox."""
    subject_prefix: str = "serve"
    tls_ca_file: str | None = None
    http_url: str = ""
    """Base URL at which users reach HTTP, where it is known; empty: the proxies' own addresses."""

    def __repr__(self) -> str:
        return f"StackAddress(urls={self.urls!r}, user={self.user!r}, password=…)"

    @property
    def shown_identity(self) -> str:
        """The user or credentials file, for messages."""
        if self.credentials_file is not None and self.identity is None:
            return self.credentials_file
        return f"the user {self.user!r}"

    @property
    def is_plain(self) -> bool:
        """Whether this is a user of a NATS with plain users."""
        return self.credentials_file is None and self.identity is None

    def bus_settings(self, inbox_prefix: str) -> BusSettings:
        """Settings of a connection with this address; replies arrive at ``inbox_prefix``."""
        file = self.credentials_file
        credentials = self.identity or (None if file is None else CredentialsFile(file))
        return BusSettings(
            servers=list(self.urls),
            user=self.user if file is None or self.identity is not None else file,
            password="" if self.identity is not None else self.password or "",
            credentials=credentials,
            inbox_prefix=inbox_prefix,
            subject_prefix=self.subject_prefix,
            tls_ca_file=self.tls_ca_file,
            direct=read_direct_mode(Environment()),
        )

    @property
    def where(self) -> str:
        """The URLs, for messages."""
        return ", ".join(self.urls)

    @property
    def host(self) -> str:
        """Hostname of the first URL."""
        return urlsplit(self.urls[0]).hostname or "127.0.0.1"


class ParsedUrls(msgspec.Struct, frozen=True):
    """URLs without credentials, and the user and password of the first URL that had them."""

    urls: tuple[str, ...]
    user: str | None
    password: str | None


def parse_urls(text: str, field: str) -> ParsedUrls:
    """Parse ``nats://[user[:password]@]host[:port]``; several are separated by commas.

    Raises `BadField` naming ``field``, without the password.
    """
    urls: list[str] = []
    user: str | None = None
    password: str | None = None
    for part in filter(None, (part.strip() for part in text.split(","))):
        split = _split(part if "://" in part else f"nats://{part}", field)
        urls.append(_without_user(split))
        if user is None and split.username:
            user = unquote(split.username)
            password = None if split.password is None else unquote(split.password)
    if not urls:
        raise BadField(field, "is empty; write nats://host:port")
    return ParsedUrls(tuple(urls), user, password)


def _split(url: str, field: str) -> SplitResult:
    try:
        split = urlsplit(url)
        _ = split.port  # evaluated for its ValueError
    except ValueError as error:
        # Chained to nothing: the text of the cause may show the password.
        raise BadField(field, "is not a URL; write nats://user:password@host:port") from (
            None if "@" in url else error
        )
    if split.scheme not in _SCHEMES or not split.hostname:
        raise BadField(field, f"must begin with {' or '.join(f'{s}://' for s in _SCHEMES)} and name a host")
    return split


def _without_user(split: SplitResult) -> str:
    host = split.hostname or ""
    return f"{split.scheme}://{f'[{host}]' if ':' in host else host}:{split.port or 4222}"


class NoListeners(TransientError):
    """NATS reported at once that the subject has no subscriber; the request was not delivered."""


class NoReply(TransientError):
    """No reply arrived in time, or the connection was lost meanwhile; the request may have taken effect."""


class AdminReply(msgspec.Struct, frozen=True):
    """A reply, possibly an error."""

    body: bytes
    headers: Mapping[str, str] = {}


class Requests(Protocol):
    """Request and reply over NATS; an interface, so that retries and errors are tested without NATS."""

    @property
    def where(self) -> str:
        """The URLs of NATS for messages, without passwords."""
        ...

    async def request(
        self, subject: str, body: bytes, *, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> AdminReply:
        """Send one request and wait for its reply.

        Raises `NoListeners`, `NoReply`, `BusUnavailable` when NATS cannot be reached, `BusAuthorizationFailed` when
        it refuses this user or this subject, and `BadField` when the body exceeds its largest message.
        """
        ...


ERROR_HEADER: Final = "Nats-Service-Error"
ERROR_CODE_HEADER: Final = "Nats-Service-Error-Code"

ERRORS_BY_CODE: Final[dict[str, type[ServeError]]] = {
    kind.error_code: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, ServeError)
}
"""Every error class that a service can send, by its stable error code."""

_FOREIGN_BODY_MAX: Final = 2000


class UnknownError(ServeError):
    """An error whose code this version does not know: from a newer service, or from the user's code."""

    def __init__(self, code: str, message: str) -> None:
        """``code`` is the received error code."""
        super().__init__(message)
        self.code = code


class _GatewayError(msgspec.Struct, frozen=True):
    """An error of a proxy, over HTTP and NATS alike: an extension member of problem details (RFC 9457)."""

    error: ErrorView


def _read_error(body: bytes) -> ErrorView:
    try:
        return msgspec.json.decode(body, type=_GatewayError).error
    except msgspec.ValidationError:
        return msgspec.json.decode(body, type=ErrorView)


def restore_error(view: ErrorView) -> ServeError:
    """Restore the error that the service raised; an unknown code becomes an `UnknownError`."""
    kind = ERRORS_BY_CODE.get(view.code)
    if kind is None:
        return UnknownError(view.code, view.message or view.code)
    if kind is BadField:
        field, colon, reason = view.message.partition(": ")
        if view.field:
            return BadField(view.field, view.message.removeprefix(f"{view.field}: "))
        return BadField(field, reason) if colon else BadField("request", view.message)
    return kind(view.message or view.code)


def parse_error(reply: AdminReply) -> ServeError | None:
    """The error that a reply carries, or None."""
    short = reply.headers.get(ERROR_HEADER)
    number = reply.headers.get(ERROR_CODE_HEADER)
    if short is None and number is None:
        return None
    summary = short or f"error {number}"
    try:
        view = _read_error(reply.body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        # Not our format: a response of the user's code, or the micro library's own reply to an exception.
        text = reply.body[:_FOREIGN_BODY_MAX].decode(errors="replace").strip()
        return ServeError(f"{summary}: {text}" if text else summary)
    return restore_error(view)


def ignore(_what: object) -> None:
    """A callback that does nothing."""
    return


class FeedMessage(msgspec.Struct, frozen=True):
    """A message of a feed."""

    subject: str
    payload: bytes


class Feed(Protocol):
    """Messages of some subjects, such as log lines and events, in the order of arrival.

    Why not a part of `Requests`: a feed must go on over a restart of NATS, while a lost request must be reported as
    lost.
    """

    async def receive(self, within_s: float | None = None) -> FeedMessage | None:
        """Wait for the next message; None after ``within_s`` seconds. None for ``within_s`` waits forever."""
        ...

    async def publish(self, subject: str, payload: bytes) -> None:
        """Publish a message. Raises `BusUnavailable`."""
        ...


class Listen(Protocol):
    """Opens a feed, as `listen_to_stack` does."""

    def __call__(self, address: StackAddress, subjects: Sequence[str]) -> AbstractAsyncContextManager[Feed]:
        """Raises `BusUnavailable` and `BusAuthorizationFailed` when entered."""
        ...


@asynccontextmanager
async def listen_to_stack(address: StackAddress, subjects: Sequence[str]) -> AsyncIterator[Feed]:
    """Subscribe to ``subjects``, wildcards included, for the block; the feed reconnects when NATS was away.

    Raises `BusUnavailable` when NATS does not answer within seconds, and `BusAuthorizationFailed`.
    """
    # Only here: the driver takes longer to import than `muster --help` should take.
    from muster.client.feed import NatsFeed  # noqa: PLC0415 - as above

    feed = NatsFeed(address)
    try:
        await feed.open(subjects)
        yield feed
    finally:
        await feed.close()


def proxy_urls(proxies: Sequence[ProxyView], host: str) -> list[str]:
    """The base URLs of the live proxies; ``host`` replaces wildcard addresses."""
    urls = []
    for proxy in proxies:
        split = urlsplit(proxy.address if "://" in proxy.address else f"http://{proxy.address}")
        if proxy.status != "live" or not proxy.address or split.port is None:
            continue
        name = split.hostname or ""
        named = host if name in _WILDCARDS else name
        urls.append(f"{split.scheme}://{f'[{named}]' if ':' in named else named}:{split.port}")
    return sorted(set(urls))
