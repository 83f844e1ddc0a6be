"""Makes users with signing keys, and their signatures. Pure: the moment and the random bytes are inputs."""

from __future__ import annotations

from typing import Final

from serve_common.identities.claims import encode_user
from serve_common.identities.credentials import SigningKey, UserIdentity
from serve_common.identities.nkeys import KeyKind, NatsKey

CLOCKS_APART_S: Final = 60
"""How far the clock of a NATS server may be behind: it refuses a user of the future."""


def mint_user(
    key: SigningKey,
    name: str,
    *,
    tags: tuple[str, ...] = (),
    now: float,
    lifetime_s: float,
    random_bytes: bytes,
) -> UserIdentity:
    """A user ``name`` of the key's role that NATS takes until ``lifetime_s`` after ``now`` (seconds since 1970).

    ``random_bytes`` are `nkeys.SEED_BYTES`. Raises `KeyUnusable`.
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
    """What a user answers to the server's greeting. Raises `KeyUnusable`."""
    return NatsKey.from_seed(seed, KeyKind.USER).sign(nonce.encode())
