"""Uploaded code: its name, its first line, and the pages in which it travels.

Code is a pickle that only a replica's process may load, or an *archive*: a zip of files that are beside it there. It is
named by its SHA-256, so what has the name is the code: every receiver checks that, and need not trust where it came
from. Files in an archive are stored without compression: what compresses differs between versions of zlib, and the same
files must have the same digest; and an archive needs no more room than it has.
"""

from __future__ import annotations

import hashlib
import platform
from typing import Final

from serve_common.errors import BadField, LimitReached, PermanentError

CODE_BYTES_MAX: Final = 256 * 1024 * 1024
"""Most bytes of one deployment's code, with its arguments and what they refer to."""
ARCHIVE_FILES_MAX: Final = 20_000
"""Most files of one archive."""
PAGE_BYTES_MAX: Final = 512 * 1024
"""Most bytes of code in one message, before base64 in JSON adds a third."""
PAGES_HEADER: Final = "Muster-Pages"
"""Header of each page in the bucket of code: how many pages the code has."""


class CodeCorrupt(PermanentError):
    """Received code is not what its digest names."""

    error_code = "code_corrupt"


def digest_code(data: bytes) -> str:
    """The name of code: its SHA-256 in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def check_code(data: bytes, digest: str) -> bytes:
    """Return ``data`` if it is what ``digest`` names. Raises `CodeCorrupt`."""
    compare_digests(digest_code(data), digest)
    return data


def compare_digests(found: str, digest: str) -> None:
    """Raise `CodeCorrupt` unless the digest that was ``found`` is the one that was asked for."""
    if found != digest:
        raise CodeCorrupt(f"the code {digest} was changed on its way: what arrived has the digest {found}")


def check_size(size: int, name: str) -> None:
    """Raise `LimitReached` when code of ``size`` bytes is too large."""
    if size > CODE_BYTES_MAX:
        raise LimitReached(
            f"{name}: its code and arguments have {size:,} bytes, and at most {CODE_BYTES_MAX:,} travel; load large "
            "models in the constructor, from a path or a URL"
        )


def split(data: bytes) -> list[bytes]:
    """The pages of ``data``, at least one."""
    return [data[at : at + PAGE_BYTES_MAX] for at in range(0, len(data), PAGE_BYTES_MAX)] or [b""]


def code_header(cloudpickle_version: str) -> bytes:
    """First line of all code: the versions that must be the same where it is loaded."""
    python = ".".join(platform.python_version_tuple()[:2])
    return f"muster-code 1 python {python} cloudpickle {cloudpickle_version}\n".encode()


def strip_header(data: bytes, cloudpickle_version: str) -> bytes:
    """The pickle itself. Raises `BadField` when other versions made it, which names both."""
    header, newline, body = data.partition(b"\n")
    expected = code_header(cloudpickle_version)
    if header + newline != expected:
        theirs, ours = header[:100].decode(errors="replace"), expected.decode().strip()
        raise BadField(
            "code", f"was made with {theirs!r}, and this host has {ours!r}; deploy with the host's versions"
        )
    return body
