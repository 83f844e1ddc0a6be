"""Credentials of processes for NATS: keys, JWTs, and the files that hold them.

There are three kinds beside plain users. A *credentials file*, in the format of NATS' own tools, has one user's token
and seed. A *signing key* mints short-lived users of one role, so that its holder has a name of its own and can name
others. A *user* is what a signing key has minted, for a replica that has nothing else. No secret appears in a ``repr``.

Why pure: the time of a claim and the random bytes of a key are inputs, so that equal inputs give equal tokens.
"""

from __future__ import annotations

import base64
import binascii
import enum
import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, Self, final

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from serve_common.errors import PermanentError
from serve_common.identities.roles import AccountLimits, Permissions, Role, Share, UserLimits

_PART: Final = re.compile(r"-----BEGIN ([A-Z ]+)-----\s*([A-Za-z0-9._=-]+)\s*------END \1------")


class CredentialsUnusable(PermanentError):
    """A file of credentials or keys cannot be read; the message names it and never shows its content."""

    error_code = "credentials_unusable"


class CredentialsFile(msgspec.Struct, frozen=True, tag="file"):
    """A user whose token and seed are in a file, which is read again at each connect."""

    path: str


class SigningKey(msgspec.Struct, frozen=True, tag="signing_key"):
    """Mints users of one role only: NATS knows the key with the role's permissions."""

    role: Role
    account: str
    """Its account's public key."""
    seed: str
    name: str = ""
    """Name of the user that the holder itself is."""

    def __repr__(self) -> str:
        return f"SigningKey(role={self.role.value!r}, name={self.name!r}, seed=…)"


class UserIdentity(msgspec.Struct, frozen=True, tag="user"):
    """One user that was minted with a signing key."""

    jwt: str
    seed: str
    expires_at: float
    """Seconds since 1970; NATS then ends its connections."""

    def __repr__(self) -> str:
        return f"UserIdentity(expires_at={self.expires_at!r}, jwt=…, seed=…)"


Credentials = CredentialsFile | SigningKey | UserIdentity


def encode_credentials_file(jwt: str, seed: str) -> str:
    """A credentials file in the format of NATS' tools."""
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
    """The key that mints users of ``role``; raises `CredentialsUnusable`."""
    try:
        entry = msgspec.json.decode(text, type=dict[str, _KeyEntry]).get(role.value)
    except msgspec.DecodeError as error:
        raise CredentialsUnusable("is not a file of signing keys") from error
    if entry is None:
        raise CredentialsUnusable(f"holds no signing key of role {role.value!r}")
    return SigningKey(role, entry.account, entry.seed, name)


SEED_BYTES: Final = 32
"""Number of random bytes of a key."""
_SEED_PREFIX: Final = 18 << 3  # "S"


class KeyUnusable(PermanentError):
    """The text is not the seed of a NATS key of the wanted kind; the message never shows it."""

    error_code = "key_unusable"


class KeyKind(enum.Enum):
    """The kind of a key's owner; the value is the prefix byte that makes its first letter O, A or U."""

    OPERATOR = 14 << 3
    ACCOUNT = 0
    USER = 20 << 3


@final
class NatsKey:
    """One Ed25519 key pair. Its seed appears only where `seed` is read.

    NATS writes keys in base32, with first letters that say what they are for. Why not the library nkeys: it is little
    more than these lines, and depends on a second cryptographic library.
    """

    __slots__ = ("_private", "_raw", "kind", "public")

    def __init__(self, kind: KeyKind, raw: bytes) -> None:
        """``raw`` is `SEED_BYTES` random bytes."""
        self.kind: Final = kind
        self._raw = raw
        self._private = Ed25519PrivateKey.from_private_bytes(raw)
        self.public: Final = _encode(bytes((kind.value,)) + self._private.public_key().public_bytes_raw())
        """The public key, by which NATS knows its owner."""

    def __repr__(self) -> str:
        return f"NatsKey({self.public})"

    @classmethod
    def from_seed(cls, seed: str, kind: KeyKind) -> Self:
        """The key of ``seed``; raises `KeyUnusable`."""
        text = seed.strip()
        try:
            data = base64.b32decode(text + "=" * (-len(text) % 8))
        except (ValueError, UnicodeError) as error:
            raise KeyUnusable("is not the seed of a NATS key") from error
        body, checksum = data[:-2], data[-2:]
        if len(body) != 2 + SEED_BYTES or checksum != _checksum(body) or body[0] & 0b11111000 != _SEED_PREFIX:
            raise KeyUnusable("is not the seed of a NATS key")
        if (body[0] & 0b111) << 5 | body[1] >> 3 != kind.value:
            raise KeyUnusable(f"is not the seed of the key of a NATS {kind.name.lower()}")
        return cls(kind, body[2:])

    @property
    def seed(self) -> str:
        """The secret half as text."""
        value = self.kind.value
        return _encode(bytes((_SEED_PREFIX | value >> 5, (value & 0b11111) << 3)) + self._raw)

    def sign(self, data: bytes) -> str:
        """The signature of ``data``, in base64 for URLs without padding."""
        return encode_base64(self._private.sign(data))


def encode_base64(data: bytes) -> str:
    """Base64 as JWTs and NATS use it: for URLs, and without padding."""
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _checksum(data: bytes) -> bytes:
    return binascii.crc_hqx(data, 0).to_bytes(2, "little")


def _encode(data: bytes) -> str:
    return base64.b32encode(data + _checksum(data)).rstrip(b"=").decode()


_HEADER: Final = encode_base64(b'{"typ":"JWT","alg":"ed25519-nkey"}')
_VERSION: Final = 2


class Import(msgspec.Struct, frozen=True, kw_only=True):
    """A `Share` of another account, under the same subject."""

    share: Share
    account: str
    """The exporter's public key."""


class Scope(msgspec.Struct, frozen=True, kw_only=True):
    """The role whose users a signing key of an account may mint, and the permissions of all of them."""

    key: str
    """The signing key's public half."""
    role: str
    permissions: Permissions
    """May contain ``{{name()}}`` and ``{{tag(x)}}``, each a whole token: replaced from the user's JWT."""
    limits: UserLimits = UserLimits()


def encode_operator(key: NatsKey, *, name: str, system_account: str, now: int) -> str:
    """The operator's token, which it signs itself. ``now`` is seconds since 1970."""
    claim = {"type": "operator", "system_account": system_account}
    return _sign_claims(key, subject=key.public, name=name, claim=claim, now=now)


def encode_account(
    operator: NatsKey,
    *,
    subject: str,
    name: str,
    limits: AccountLimits,
    scopes: Sequence[Scope] = (),
    exports: Sequence[Share] = (),
    imports: Sequence[Import] = (),
    now: int,
) -> str:
    """The token of the account with public key ``subject``, signed by ``operator``."""
    claim = {
        "type": "account",
        "limits": limits.as_claim(),
        "signing_keys": [
            {
                "kind": "user_scope",
                "key": scope.key,
                "role": scope.role,
                "template": {**scope.permissions.as_claim(), **scope.limits.as_claim()},
            }
            for scope in scopes
        ],
        "exports": [_export(share) for share in exports],
        "imports": [
            {"name": each.share.subject, "account": each.account, **_subject(each.share)} for each in imports
        ],
        "default_permissions": {"pub": {}, "sub": {}},
    }
    return _sign_claims(operator, subject=subject, name=name, claim=claim, now=now)


def encode_user(
    signer: NatsKey,
    *,
    account: str,
    subject: str,
    name: str,
    tags: Sequence[str] = (),
    now: int,
    expires_at: int | None = None,
) -> str:
    """The token of the user with public key ``subject``, signed by ``signer``, a scoped signing key of ``account``.

    ``now`` and ``expires_at`` are seconds since 1970; without the latter it does not expire.
    """
    claim: dict[str, Any] = {"type": "user", "issuer_account": account}
    if tags:
        claim["tags"] = list(tags)
    return _sign_claims(signer, subject=subject, name=name, claim=claim, now=now, expires_at=expires_at)


def _subject(share: Share) -> dict[str, str]:
    return {"subject": share.subject, "type": "service" if share.is_service else "stream"}


def _export(share: Share) -> dict[str, Any]:
    response_type = {"response_type": "Stream"} if share.is_service else {}
    return {"name": share.subject, **_subject(share), **response_type}


def _sign_claims(
    key: NatsKey,
    *,
    subject: str,
    name: str,
    claim: Mapping[str, Any],
    now: int,
    expires_at: int | None = None,
) -> str:
    claims: dict[str, Any] = {
        "iat": now,
        "iss": key.public,
        "name": name,
        "sub": subject,
        "nats": {**claim, "version": _VERSION},
    }
    if expires_at is not None:
        claims["exp"] = expires_at
    digest = hashlib.sha256(msgspec.json.encode(claims)).digest()
    claims["jti"] = base64.b32encode(digest).rstrip(b"=").decode()
    signed = f"{_HEADER}.{encode_base64(msgspec.json.encode(claims))}"
    return f"{signed}.{key.sign(signed.encode())}"


CLOCKS_APART_S: Final = 60
"""Seconds by which the clock of a NATS server may be behind: it refuses tokens issued in the future."""


def mint_user(
    key: SigningKey,
    name: str,
    *,
    tags: tuple[str, ...] = (),
    now: float,
    lifetime_s: float,
    random_bytes: bytes,
) -> UserIdentity:
    """Mint a user ``name`` of the key's role, valid until ``lifetime_s`` after ``now`` (seconds since 1970).

    ``random_bytes`` are `SEED_BYTES` long. Raises `KeyUnusable`.
    """
    user = NatsKey(KeyKind.USER, random_bytes)
    expires_at = int(now + lifetime_s)
    token = encode_user(
        NatsKey.from_seed(key.seed, KeyKind.ACCOUNT),
        account=key.account,
        subject=user.public,
        name=name,
        tags=tags,
        now=int(now) - CLOCKS_APART_S,
        expires_at=expires_at,
    )
    return UserIdentity(jwt=token, seed=user.seed, expires_at=expires_at)


def sign_nonce(seed: str, nonce: str) -> str:
    """A user's signature of the server's nonce. Raises `KeyUnusable`."""
    return NatsKey.from_seed(seed, KeyKind.USER).sign(nonce.encode())
