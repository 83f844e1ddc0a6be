"""Address of a stack and the client's credentials: a credentials file, or a plain user with a password, possibly in the
URL. Passwords are never shown."""

from __future__ import annotations

from urllib.parse import SplitResult, unquote, urlsplit

import msgspec

from serve_common.errors import BadField
from serve_common.identities.credentials import CredentialsFile
from serve_common.runtime.settings import BusSettings

DEFAULT_URL = "nats://127.0.0.1:4222"
DEFAULT_USER = "admin"
_SCHEMES = ("nats", "tls")


class StackAddress(msgspec.Struct, frozen=True, kw_only=True):
    """How to reach one instance. ``urls`` hold no user and no password."""

    urls: tuple[str, ...] = (DEFAULT_URL,)
    credentials_file: str | None = None
    """File with the client's identity, in NATS' format; if set, ``user`` and ``password`` are ignored."""
    user: str = DEFAULT_USER
    """User of a NATS with plain users."""
    password: str | None = None
    subject_prefix: str = "serve"
    tls_ca_file: str | None = None

    def __repr__(self) -> str:
        return f"StackAddress(urls={self.urls!r}, user={self.user!r}, password=…)"

    @property
    def identity(self) -> str:
        """The user or credentials file, for messages."""
        return f"the user {self.user!r}" if self.credentials_file is None else self.credentials_file

    def bus_settings(self, inbox_prefix: str) -> BusSettings:
        """Settings of a connection with this address; replies arrive at ``inbox_prefix``."""
        file = self.credentials_file
        return BusSettings(
            servers=list(self.urls),
            user=self.user if file is None else file,
            password=self.password or "",
            credentials=None if file is None else CredentialsFile(file),
            inbox_prefix=inbox_prefix,
            subject_prefix=self.subject_prefix,
            tls_ca_file=self.tls_ca_file,
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
