"""The keys that callers may use: read from the text of a file, looked up so that time tells nothing about them.

Why digests: neither this process' memory nor, if its owner likes, the file holds the keys themselves.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Final, final

from serve_common.errors import BadField
from serve_common.names import check_name

KEYS_MAX: Final = 10_000
KEY_LENGTH_MIN: Final = 16
KEY_LENGTH_MAX: Final = 512
_DIGEST_PREFIX: Final = "sha256:"


@final
class KeyList:
    """Keys by their owners' names."""

    __slots__ = ("_names", "_secret")

    def __init__(self, digests: dict[bytes, str]) -> None:
        """``digests`` are the SHA-256 of the keys, with the names."""
        self._secret = secrets.token_bytes(32)
        self._names = {self._place(digest): (digest, name) for digest, name in digests.items()}

    def __len__(self) -> int:
        return len(self._names)

    def name_of(self, key: bytes) -> str | None:
        """Whose key that is; None when it is nobody's.

        Found by a digest that is keyed with a secret of this process, so nobody can choose a key that takes longer to
        refuse because it is nearly right.
        """
        if len(key) > KEY_LENGTH_MAX:
            return None
        digest = hashlib.sha256(key).digest()
        known, name = self._names.get(self._place(digest), (b"", ""))
        return name if hmac.compare_digest(known, digest) else None

    def _place(self, digest: bytes) -> bytes:
        return hashlib.blake2b(digest, key=self._secret, digest_size=32).digest()


def parse_keys(text: str, field: str) -> KeyList:
    """Read a file of keys: a name and a key a line, with white space between; ``#`` begins a comment.

    A key may stand there as ``sha256:`` and 64 hexadecimal digits. One name may have several keys, so that they can be
    changed without a gap. Raises `BadField` naming ``field`` and the line, never a key.
    """
    digests: dict[bytes, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"{field}: line {number}"
        if len(words) != 2:
            raise BadField(where, f"has {len(words)} words; write a name and a key")
        digest = _digest(words[1], where)
        if digest in digests:
            raise BadField(where, f"has the key that {digests[digest]} has too")
        digests[digest] = check_name(words[0], where)
        if len(digests) > KEYS_MAX:
            raise BadField(field, f"has more than {KEYS_MAX} keys")
    if not digests:
        raise BadField(field, "has no key, so nobody could call")
    return KeyList(digests)


def _digest(key: str, where: str) -> bytes:
    if key.startswith(_DIGEST_PREFIX):
        try:
            digest = bytes.fromhex(key.removeprefix(_DIGEST_PREFIX))
        except ValueError:
            digest = b""
        if len(digest) != 32:
            raise BadField(where, f"{_DIGEST_PREFIX} must be followed by 64 hexadecimal digits")
        return digest
    if not KEY_LENGTH_MIN <= len(key) <= KEY_LENGTH_MAX:
        raise BadField(
            where, f"has a key of {len(key)} characters; {KEY_LENGTH_MIN} to {KEY_LENGTH_MAX} are needed"
        )
    return hashlib.sha256(key.encode()).digest()
