"""What a process tells NATS of itself each time that it connects; the clock, randomness and files are here.

Why anew each time: credentials expire, and files are replaced while a process runs.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final, final

from serve_common.adapters.system_clock import SystemClock
from serve_common.bus.options import Login
from serve_common.errors import BusAuthorizationFailed
from serve_common.identities.credentials import (
    CredentialsFile,
    CredentialsUnusable,
    SigningKey,
    UserIdentity,
    parse_credentials_file,
)
from serve_common.identities.minting import mint_user, sign_nonce
from serve_common.identities.nkeys import SEED_BYTES
from serve_common.settings import BusSettings

OWN_LIFETIME_S: Final = 24 * 3600.0
"""Of a user that the holder of a signing key makes for itself; it makes another in time."""


def login_of(settings: BusSettings) -> Login | None:
    """How to log in with ``settings``; None is their plain user and password."""
    match settings.credentials:
        case CredentialsFile(path):
            return FileLogin(path)
        case SigningKey() as key:
            return MintingLogin(key)
        case UserIdentity() as identity:
            return HeldLogin(identity)
        case None:
            return None


@final
class FileLogin:
    """By a file in NATS' format."""

    def __init__(self, path: str) -> None:
        """Read at each connect."""
        self._path = path

    def fields(self, nonce: str) -> dict[str, str]:
        """See `Login`."""
        try:
            jwt, seed = parse_credentials_file(Path(self._path).read_text(encoding="utf-8"))
        except (OSError, UnicodeError, CredentialsUnusable) as error:
            raise BusAuthorizationFailed(f"{self._path} cannot be used: {error}") from error
        return {"jwt": jwt, "sig": sign_nonce(seed, nonce)}

    def renew_in_s(self) -> float | None:
        """See `Login`."""
        return None


@final
class MintingLogin:
    """By a user that is made for each connection."""

    def __init__(self, key: SigningKey, lifetime_s: float = OWN_LIFETIME_S) -> None:
        """Users are as the key names them."""
        self._key = key
        self._lifetime_s = lifetime_s

    def fields(self, nonce: str) -> dict[str, str]:
        """See `Login`."""
        made = mint_now(self._key, self._key.name, lifetime_s=self._lifetime_s)
        return {"jwt": made.jwt, "sig": sign_nonce(made.seed, nonce)}

    def renew_in_s(self) -> float | None:
        """See `Login`."""
        return self._lifetime_s / 2


@final
class HeldLogin:
    """By a user that somebody else made, and makes anew in time; shared by all connections of the process."""

    def __init__(self, identity: UserIdentity) -> None:
        self._lock = threading.Lock()
        self._identity = identity
        self._listeners: list[Callable[[], None]] = []

    def fields(self, nonce: str) -> dict[str, str]:
        """See `Login`."""
        held = self._identity
        return {"jwt": held.jwt, "sig": sign_nonce(held.seed, nonce)}

    def renew_in_s(self) -> float | None:
        """See `Login`: who replaces it says so."""
        return None

    def listen(self, listener: Callable[[], None]) -> None:
        """Have ``listener`` called, from any thread, when there is a newer one."""
        with self._lock:
            self._listeners.append(listener)

    def forget(self, listener: Callable[[], None]) -> None:
        """Call it no more."""
        with self._lock:
            if listener in self._listeners:
                self._listeners.remove(listener)

    def replace(self, identity: UserIdentity) -> None:
        """Connect with ``identity`` from now on, unless it is older than what is held; from any thread."""
        with self._lock:
            if identity.expires_at < self._identity.expires_at:
                return
            self._identity = identity
            listeners = tuple(self._listeners)
        for listener in listeners:
            listener()


def mint_now(key: SigningKey, name: str, *, tags: tuple[str, ...] = (), lifetime_s: float) -> UserIdentity:
    """A user that is valid from now on."""
    return mint_user(
        key,
        name,
        tags=tags,
        now=SystemClock().now(),
        lifetime_s=lifetime_s,
        random_bytes=os.urandom(SEED_BYTES),
    )
