"""How a process authenticates to NATS at each connect, and whether it has an identity of its own.

Why again at each connect: credentials expire, and files are replaced while a process runs. The clock, random bytes and
files are read here; `identities.credentials` is pure.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final, final

from serve_common.clock import SystemClock
from serve_common.errors import BusAuthorizationFailed
from serve_common.identities.credentials import (
    SEED_BYTES,
    CredentialsFile,
    CredentialsUnusable,
    SigningKey,
    UserIdentity,
    mint_user,
    parse_credentials_file,
    sign_nonce,
)
from serve_common.nats.options import Login
from serve_common.runtime.settings import BusSettings

LOST = (
    "all processes of a role are one user of NATS: replicas can read and answer each other's requests, hosts and "
    "proxies can report for others, and JetStream can be made to speak for others; see SECURITY.md"
)
_has_identity = False


def declare_identity(settings: BusSettings) -> None:
    """At the start of a service, once: warn of a plain user, and record it for `has_identity`.

    Why a warning: with plain users everything works, but much of what isolates models from each other is missing.
    """
    global _has_identity  # noqa: PLW0603 - one for the process, as its metrics are
    _has_identity = not settings.is_plain
    if settings.is_plain:
        # Only here: the command line logs in too, and importing it takes longer than a command.
        import structlog  # noqa: PLC0415 - as above

        structlog.get_logger(__name__).warning("bus_has_plain_users", user=settings.user, lost=LOST)


def has_identity() -> bool:
    """Whether the service has an identity of its own, as declared."""
    return _has_identity


OWN_LIFETIME_S: Final = 24 * 3600.0
"""Seconds for which a user is valid that the holder of a signing key makes for itself; renewed in time."""


def build_login(settings: BusSettings) -> Login | None:
    """The login for ``settings``; None for their plain user and password."""
    match settings.credentials:
        case CredentialsFile(path):
            return FileLogin(path)
        case SigningKey() as key:
            return MintingLogin(key)
        case UserIdentity() as identity:
            return RenewableLogin(identity)
        case None:
            return None


@final
class FileLogin:
    """Logs in with a credentials file in NATS' format."""

    def __init__(self, path: str) -> None:
        """``path`` is read at each connect."""
        self._path = path

    def fields(self, nonce: str) -> dict[str, str]:
        try:
            jwt, seed = parse_credentials_file(Path(self._path).read_text(encoding="utf-8"))
        except (OSError, UnicodeError, CredentialsUnusable) as error:
            raise BusAuthorizationFailed(f"{self._path} cannot be used: {error}") from error
        return {"jwt": jwt, "sig": sign_nonce(seed, nonce)}

    def renew_in_s(self) -> float | None:
        return None


@final
class MintingLogin:
    """Logs in with a user that is minted for each connection."""

    def __init__(self, key: SigningKey) -> None:
        """Users are named after the key."""
        self._key = key

    def fields(self, nonce: str) -> dict[str, str]:
        user = mint_now(self._key, self._key.name, lifetime_s=OWN_LIFETIME_S)
        return {"jwt": user.jwt, "sig": sign_nonce(user.seed, nonce)}

    def renew_in_s(self) -> float | None:
        return OWN_LIFETIME_S / 2


@final
class RenewableLogin:
    """Logs in with a user that another process mints and renews; shared by all connections of the process."""

    def __init__(self, identity: UserIdentity) -> None:
        self._lock = threading.Lock()
        self._identity = identity
        self._listeners: list[Callable[[], None]] = []

    def fields(self, nonce: str) -> dict[str, str]:
        identity = self._identity
        return {"jwt": identity.jwt, "sig": sign_nonce(identity.seed, nonce)}

    def renew_in_s(self) -> float | None:
        """None: `replace` notifies the listeners."""
        return None

    def listen(self, listener: Callable[[], None]) -> None:
        """Call ``listener``, from any thread, when there is a newer identity."""
        with self._lock:
            self._listeners.append(listener)

    def forget(self, listener: Callable[[], None]) -> None:
        """Stop calling ``listener``."""
        with self._lock:
            if listener in self._listeners:
                self._listeners.remove(listener)

    def replace(self, identity: UserIdentity) -> None:
        """Connect with ``identity`` from now on, unless it is older than the current one; from any thread."""
        with self._lock:
            if identity.expires_at < self._identity.expires_at:
                return
            self._identity = identity
            listeners = tuple(self._listeners)
        for listener in listeners:
            listener()


def mint_now(key: SigningKey, name: str, *, tags: tuple[str, ...] = (), lifetime_s: float) -> UserIdentity:
    """Mint a user that is valid from now on, for ``lifetime_s`` seconds."""
    return mint_user(
        key,
        name,
        tags=tags,
        now=SystemClock().now(),
        lifetime_s=lifetime_s,
        random_bytes=os.urandom(SEED_BYTES),
    )
