"""Unpacks uploaded archives: files beside the user's code, read-only, in a directory named by the archive's digest.

The host does so for its replicas; on another machine the replica's process does it for itself. Nothing in an archive is
trusted but its digest: names and sizes are the uploader's choice. Archives are not compressed (`protocol.code`).
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import zipfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Final

from serve_common.protocol.code import ARCHIVE_FILES_MAX, CODE_BYTES_MAX, CodeCorrupt, check_code

PARTIAL: Final = "fetch-"
"""Prefix of what is not whole yet."""
_OWN: Final = "muster-code-"
"""Prefix of the directory of one process."""
_CHUNK_BYTES: Final = 1024 * 1024


def unpacked_path(archive: Path) -> Path:
    """The directory of an archive's files."""
    return archive.with_name(f"{archive.name}.files")


def unpack(archive: Path) -> None:
    """Unpack beside the archive, for everyone to read, unless that is there already and has exactly its files.

    Raises `CodeCorrupt` for what is no archive of ours, and OSError of the disk.
    """
    target = unpacked_path(archive)
    try:
        with zipfile.ZipFile(archive) as file:
            entries = _check(file.infolist())
            if target.is_dir() and _has_files(file, entries, target):
                return
            directory = Path(tempfile.mkdtemp(dir=archive.parent, prefix=PARTIAL))
            try:
                for entry in entries:
                    _extract(file, entry, directory)
                for path in _directories(directory):
                    path.chmod(0o555)
                if target.exists():
                    remove_tree(target)
                directory.rename(target)
            finally:
                if directory.exists():
                    remove_tree(directory)
    except (
        zipfile.BadZipFile,
        UnicodeError,
        FileExistsError,
        NotADirectoryError,
        IsADirectoryError,
    ) as error:
        raise CodeCorrupt(f"the archive {archive.name} cannot be unpacked: {error}") from error


def store_uploads(uploads: Mapping[str, bytes], archives: Collection[str]) -> str:
    """Write what was uploaded, by digest, into a directory of this process' own, and unpack the archives among it.

    Directories of processes that have ended are deleted: a killed one could not do so. Raises as `unpack`.
    """
    for former in Path(tempfile.gettempdir()).glob(f"{_OWN}*"):
        pid = former.name.removeprefix(_OWN).partition("-")[0]
        if pid.isdecimal() and not Path("/proc", pid).exists() and former.stat().st_uid == os.geteuid():
            remove_tree(former)
    directory = Path(tempfile.mkdtemp(prefix=f"{_OWN}{os.getpid()}-"))
    for digest, data in uploads.items():
        (directory / digest).write_bytes(check_code(data, digest))
        if digest in archives:
            unpack(directory / digest)
    return str(directory)


def remove_tree(directory: Path) -> None:
    """Delete a directory whose parts are read-only."""
    for path in _directories(directory):
        path.chmod(0o700)
    shutil.rmtree(directory)


def _directories(top: Path) -> Iterator[Path]:
    for path, _, _ in os.walk(top):
        yield Path(path)


def _check(entries: list[zipfile.ZipInfo]) -> list[zipfile.ZipInfo]:
    if len(entries) > ARCHIVE_FILES_MAX:
        raise zipfile.BadZipFile(f"it has more than {ARCHIVE_FILES_MAX:,} files")
    if sum(entry.file_size for entry in entries) > CODE_BYTES_MAX:
        raise zipfile.BadZipFile(f"its files have more than {CODE_BYTES_MAX:,} bytes")
    for entry in entries:
        mode, parts = entry.external_attr >> 16, entry.filename.split("/")
        is_plain = entry.compress_type == zipfile.ZIP_STORED and not entry.flag_bits & 1
        if not is_plain or stat.S_IFMT(mode) not in {0, stat.S_IFREG}:
            raise zipfile.BadZipFile(f"{entry.filename[:200]!r} is not a plain file that is stored as it is")
        if any(part in {"", ".", ".."} or "\\" in part or "\0" in part for part in parts):
            raise zipfile.BadZipFile(f"{entry.filename[:200]!r} is not a path within it")
    return entries


def _extract(file: zipfile.ZipFile, entry: zipfile.ZipInfo, directory: Path) -> None:
    path = directory / entry.filename
    path.parent.mkdir(parents=True, exist_ok=True)
    with file.open(entry) as source, path.open("xb") as target:
        shutil.copyfileobj(source, target, _CHUNK_BYTES)
    path.chmod(0o555 if entry.external_attr >> 16 & stat.S_IXUSR else 0o444)


def _has_files(file: zipfile.ZipFile, entries: list[zipfile.ZipInfo], directory: Path) -> bool:
    names = {entry.filename for entry in entries}
    found = {
        str((top / name).relative_to(directory))
        for top in _directories(directory)
        for name in os.listdir(top)  # noqa: PTH208 - names are all that is needed
        if not (top / name).is_dir() or (top / name).is_symlink()
    }
    found = {
        name for name in found if "__pycache__/" not in name
    }  # root can write into read-only directories
    return found == names and all(_has_content(file, entry, directory / entry.filename) for entry in entries)


def _has_content(file: zipfile.ZipFile, entry: zipfile.ZipInfo, path: Path) -> bool:
    if path.is_symlink() or path.stat().st_size != entry.file_size:
        return False
    with file.open(entry) as expected, path.open("rb") as found:
        while chunk := expected.read(_CHUNK_BYTES):
            if found.read(len(chunk)) != chunk:
                return False
    return True
