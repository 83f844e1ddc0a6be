"""NATS' keys: Ed25519 key pairs written as base32 words whose first letters say what they are for.

Why not the library of that name: it is little more than these lines, and brings a second cryptographic library along.
"""

from __future__ import annotations

import base64
import binascii
import enum
from typing import Final, Self, final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from serve_common.errors import PermanentError

SEED_BYTES: Final = 32
"""Random bytes that make a key."""
_SEED_PREFIX: Final = 18 << 3  # "S"


class KeyUnusable(PermanentError):
    """The text is not the seed of a NATS key of the wanted kind; the message never shows it."""

    error_code = "key_unusable"


class KeyKind(enum.Enum):
    """Whose key it is; the value is the prefix byte that makes its first letter O, A or U."""

    OPERATOR = 14 << 3
    ACCOUNT = 0
    USER = 20 << 3


@final
class NatsKey:
    """One key pair. Its seed appears only where `seed` is read."""

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
    """As JWTs and NATS want it: for URLs, and without padding."""
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _checksum(data: bytes) -> bytes:
    return binascii.crc_hqx(data, 0).to_bytes(2, "little")


def _encode(data: bytes) -> str:
    return base64.b32encode(data + _checksum(data)).rstrip(b"=").decode()
