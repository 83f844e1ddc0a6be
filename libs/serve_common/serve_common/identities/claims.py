"""NATS' JWTs: what an operator says of accounts, and an account of users.

Why pure: when a claim begins and which random bytes make its key are inputs, so that equal inputs give equal tokens.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from serve_common.identities.nkeys import NatsKey, encode_base64
from serve_common.identities.roles import AccountLimits, Permissions, Share, UserLimits

_HEADER: Final = encode_base64(b'{"typ":"JWT","alg":"ed25519-nkey"}')
_VERSION: Final = 2


class Import(msgspec.Struct, frozen=True, kw_only=True):
    """A `Share` of another account, under the same subject."""

    share: Share
    account: str
    """The exporter's public key."""


class Scope(msgspec.Struct, frozen=True, kw_only=True):
    """Whose users a signing key of an account may make, and what all of them may do."""

    key: str
    """The signing key's public half."""
    role: str
    permissions: Permissions
    """May hold ``{{name()}}`` and ``{{tag(x)}}``, each a whole token: what the user's JWT says of itself."""
    limits: UserLimits = UserLimits()


def encode_operator(key: NatsKey, *, name: str, system_account: str, now: int) -> str:
    """The operator's token, which it signs itself. ``now`` is seconds since 1970."""
    claim = {"type": "operator", "system_account": system_account}
    return _encode(key, subject=key.public, name=name, claim=claim, now=now)


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
    """What ``operator`` says of the account whose public key ``subject`` is."""
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
    return _encode(operator, subject=subject, name=name, claim=claim, now=now)


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
    """What ``signer``, a scoped signing key of ``account``, says of the user whose public key ``subject`` is.

    ``now`` and ``expires_at`` are seconds since 1970; without the latter it holds for good.
    """
    claim: dict[str, Any] = {"type": "user", "issuer_account": account}
    if tags:
        claim["tags"] = list(tags)
    return _encode(signer, subject=subject, name=name, claim=claim, now=now, expires_at=expires_at)


def _subject(share: Share) -> dict[str, str]:
    return {"subject": share.subject, "type": "service" if share.is_service else "stream"}


def _export(share: Share) -> dict[str, Any]:
    answers = {"response_type": "Stream"} if share.is_service else {}
    return {"name": share.subject, **_subject(share), **answers}


def _encode(
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
