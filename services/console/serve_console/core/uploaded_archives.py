"""Archives that people upload: checked as a replica host would, and repacked so that equal files have equal digests."""

from __future__ import annotations

import io
import stat
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from typing import Final

from muster.sdk.files import pack
from serve_common.errors import BadField
from serve_common.protocol.code import ARCHIVE_FILES_MAX
from serve_console.core.deploy_form import ARCHIVE_FIELD

UPLOAD_BYTES_MAX: Final = 32 * 1024 * 1024
"""Most bytes of an upload, packed, and of its files, unpacked."""
_LEFT_OUT: Final = ("__pycache__", "__MACOSX", ".git", ".venv")
_SHOWN: Final = 6
_SHOWN_CHARACTERS_MAX: Final = 600
_ENTRY: Final = b"PK\x01\x02"
"""Before each entry of the directory; archives within the archive have some too."""
_ENTRIES_MAX: Final = 5 * ARCHIVE_FILES_MAX
"""Entries with directories and what does not travel: each takes memory as soon as the archive is opened."""
_METHODS: Final = frozenset({zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED})
"""Others may reserve gigabytes to unpack a few bytes."""


def repack(data: bytes, import_path: str) -> bytes:
    """The archive that hosts unpack for a replica's working directory. Raises `BadField`.

    Where the module of ``import_path`` is in the only directory of the archive, that directory is left out.
    """
    files = _strip_top(_read(data), import_path.partition(":")[0])
    return pack(dict(files), ARCHIVE_FIELD)


def _read(data: bytes) -> dict[str, bytes]:
    if len(data) > UPLOAD_BYTES_MAX:
        raise BadField(ARCHIVE_FIELD, "has more than 32 MiB")
    if data.count(_ENTRY) > _ENTRIES_MAX:
        raise BadField(ARCHIVE_FIELD, f"has more than {ARCHIVE_FILES_MAX:,} files")
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = [
                entry for entry in archive.infolist() if not entry.is_dir() and _travels(entry.filename)
            ]
            _check(entries)
            return {entry.filename: archive.read(entry) for entry in entries}
    except (
        zipfile.BadZipFile,
        zlib.error,
        EOFError,
        NotImplementedError,
        RuntimeError,
        ValueError,
        IndexError,
        OSError,
    ) as error:
        raise BadField(ARCHIVE_FIELD, f"is not a .zip that can be unpacked: {error}") from error


def _travels(name: str) -> bool:
    return not name.endswith(".pyc") and not any(part in _LEFT_OUT for part in name.split("/"))


def _check(entries: Sequence[zipfile.ZipInfo]) -> None:
    if not entries:
        raise BadField(ARCHIVE_FIELD, "has no files")
    if len(entries) > ARCHIVE_FILES_MAX:
        raise BadField(ARCHIVE_FIELD, f"has more than {ARCHIVE_FILES_MAX:,} files")
    if sum(entry.file_size for entry in entries) > UPLOAD_BYTES_MAX:
        raise BadField(ARCHIVE_FIELD, "has files with more than 32 MiB in all")
    for entry in entries:
        parts = entry.filename.split("/")
        if any(part in {"", ".", ".."} or "\\" in part or "\0" in part for part in parts):
            raise BadField(ARCHIVE_FIELD, f"{entry.filename[:200]!r} is no path within it")
        if stat.S_IFMT(entry.external_attr >> 16) not in {0, stat.S_IFREG}:
            raise BadField(ARCHIVE_FIELD, f"{entry.filename[:200]!r} is a link or device; only files travel")
        if entry.compress_type not in _METHODS:
            raise BadField(
                ARCHIVE_FIELD, f"{entry.filename[:200]!r} is packed by an unusual method; use deflate"
            )
        if entry.flag_bits & 1:
            raise BadField(ARCHIVE_FIELD, f"{entry.filename[:200]!r} is encrypted")
    if len({entry.filename for entry in entries}) < len(entries):
        raise BadField(ARCHIVE_FIELD, "has two files of one name")


def _strip_top(files: Mapping[str, bytes], module: str) -> Mapping[str, bytes]:
    top_module = module.partition(".")[0]
    if not top_module or _has_module(files, "", top_module):
        return files
    tops = {name.partition("/")[0] for name in files if "/" in name}
    top = f"{min(tops)}/" if len(tops) == 1 and all("/" in name for name in files) else ""
    if top and _has_module(files, top, top_module):
        return {name.removeprefix(top): data for name, data in files.items()}
    found = sorted(files)
    shown = ", ".join(found[:_SHOWN])[:_SHOWN_CHARACTERS_MAX] + (", …" if len(found) > _SHOWN else "")
    raise BadField(ARCHIVE_FIELD, f"has no module {top_module!r}; it has {shown}")


def _has_module(files: Mapping[str, bytes], top: str, module: str) -> bool:
    return f"{top}{module}.py" in files or any(name.startswith(f"{top}{module}/") for name in files)
