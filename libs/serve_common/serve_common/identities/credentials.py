"""What a process proves its identity to NATS with, and the files that hold it.

Three kinds beside plain users. A *credentials file*, as NATS' own tools have it, is one user's token and seed. A
*signing key* makes short-lived users of one role, so that its holder bears its own name and can name others. A *user*
is what a signing key has made, for a replica that holds nothing else.

No secret appears in a ``repr``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import msgspec

from serve_common.errors import PermanentError
from serve_common.identities.roles import Role

_PART: Final = re.compile(r"-----BEGIN ([A-Z ]+)-----\s*([A-Za-z0-9._=-]+)\s*------END \1------")


class CredentialsUnusable(PermanentError):
    """A file of credentials or keys cannot be read; the message names it and never shows its content."""

    error_code = "credentials_unusable"


class CredentialsFile(msgspec.Struct, frozen=True, tag="file"):
    """A user whose token and seed lie in a file, which is read anew at each connect."""

    path: str


class SigningKey(msgspec.Struct, frozen=True, tag="signing_key"):
    """Makes users of one role, and none of any other: NATS knows the key with the role's permissions."""

    role: Role
    account: str
    """Its account's public key."""
    seed: str
    name: str = ""
    """Of the user that the holder itself is."""

    def __repr__(self) -> str:
        return f"SigningKey(role={self.role.value!r}, name={self.name!r}, seed=…)"


class UserIdentity(msgspec.Struct, frozen=True, tag="user"):
    """One user that was made by a signing key."""

    jwt: str
    seed: str
    expires_at: float
    """Seconds since 1970; NATS then ends its connections."""

    def __repr__(self) -> str:
        return f"UserIdentity(expires_at={self.expires_at!r}, jwt=…, seed=…)"


Credentials = CredentialsFile | SigningKey | UserIdentity


def encode_credentials_file(jwt: str, seed: str) -> str:
    """As NATS' tools read it."""
    return (
        f"-----BEGIN NATS USER JWT-----\n{jwt}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{seed}\n------END USER NKEY SEED------\n"
    )


def parse_credentials_file(text: str) -> tuple[str, str]:
    """The token and the seed; raises `CredentialsUnusable`."""
    parts = dict(_PART.findall(text))
    try:
        return parts["NATS USER JWT"], parts["USER NKEY SEED"]
    except KeyError as error:
        raise CredentialsUnusable("holds no NATS user's JWT and seed") from error


class _KeyEntry(msgspec.Struct, frozen=True):
    account: str
    seed: str


def encode_keys_file(keys: Mapping[Role, tuple[str, str]]) -> str:
    """The signing keys of one service: by role the account's public key and the key's seed."""
    entries = {role.value: _KeyEntry(account, seed) for role, (account, seed) in keys.items()}
    return msgspec.json.format(msgspec.json.encode(entries), indent=2).decode() + "\n"


def parse_keys_file(text: str, role: Role, name: str = "") -> SigningKey:
    """The key that makes users of ``role``; raises `CredentialsUnusable`."""
    try:
        entry = msgspec.json.decode(text, type=dict[str, _KeyEntry]).get(role.value)
    except msgspec.DecodeError as error:
        raise CredentialsUnusable("is not a file of signing keys") from error
    if entry is None:
        raise CredentialsUnusable(f"holds no signing key of role {role.value!r}")
    return SigningKey(role, entry.account, entry.seed, name)
