"""The format of a backup file: what is deployed at one moment, independent of the database.

gzip of lines of JSON: a header, a line for each object as it is stored (`checkpoint_rows`), and the SHA-256 of all
lines before. The state of the running system (replicas, hosts, goals, snapshots) and the audit log are left out.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import zlib
from collections.abc import Iterator
from typing import Final, Literal

import msgspec

from serve_common.errors import BadField, CheckpointUnreadable
from serve_controller.adapters.checkpoint_rows import SCHEMA_VERSION, Row, dump, load_checkpoint
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.objects import ObjectKind, get_key

FORMAT: Final = "muster-backup"
KINDS: Final = (
    ObjectKind.BACKEND,
    ObjectKind.ENDPOINT,
    ObjectKind.DEPLOYMENT,
    ObjectKind.APPLICATION,
    ObjectKind.REVISION,
    ObjectKind.HTTP,
    ObjectKind.COUNTERS,
)
"""Kinds of objects in a backup."""
TEXT_BYTES_MAX: Final = 1024 * 1024 * 1024
"""Most bytes of an unpacked file: a small file must not exhaust the memory."""
_FIELD: Final = "file"


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The first line."""

    format: Literal["muster-backup"]
    schema_version: int
    """The schema version of the file and its objects."""
    taken_at: float
    """Seconds since 1970."""
    epoch: int
    objects: int


class _Line(msgspec.Struct, frozen=True, kw_only=True):
    kind: str
    key: str
    value: msgspec.Raw


class _Trailer(msgspec.Struct, frozen=True, kw_only=True):
    sha256: str


class BackupFiles:
    """Implements `ports.Backups`."""

    def write(self, checkpoint: Checkpoint, epoch: int, taken_at: float) -> bytes:
        """Encode what is deployed by ``checkpoint``."""
        rows = [dump(value) for value in checkpoint.all_objects() if get_key(value)[0] in KINDS]
        rows.sort(key=lambda row: (row.kind, row.key))
        header = Header(
            format=FORMAT, schema_version=SCHEMA_VERSION, taken_at=taken_at, epoch=epoch, objects=len(rows)
        )
        sha256, packed = hashlib.sha256(), io.BytesIO()
        with gzip.GzipFile(fileobj=packed, mode="wb", compresslevel=6, mtime=0) as file:
            for line in (msgspec.json.encode(header), *map(_line, rows)):
                sha256.update(line + b"\n")
                file.write(line + b"\n")
            file.write(msgspec.json.encode(_Trailer(sha256=sha256.hexdigest())) + b"\n")
        return packed.getvalue()

    def read(self, data: bytes) -> tuple[float, Checkpoint]:
        """Decode a file: when the backup was taken, and its contents. Raises `BadField` for an invalid file."""
        lines = _unpacked(data).splitlines(keepends=True)
        header = _header(lines[0] if lines else b"")
        sha256 = hashlib.sha256(b"".join(lines[:-1])).hexdigest()
        try:
            trailer = msgspec.json.decode(lines[-1], type=_Trailer)
        except msgspec.MsgspecError:
            raise BadField(_FIELD, "ends before its end: a part of it is missing") from None
        if trailer.sha256 != sha256:
            raise BadField(_FIELD, "is damaged: its checksum is another one")
        if header.objects != len(lines) - 2:
            raise BadField(_FIELD, f"holds {len(lines) - 2} objects, not {header.objects}")
        try:
            return header.taken_at, load_checkpoint(_rows(lines[1:-1]))
        except (CheckpointUnreadable, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise BadField(_FIELD, f"cannot be understood: {error}") from error


def _line(row: Row) -> bytes:
    return msgspec.json.encode(_Line(kind=row.kind, key=row.key, value=msgspec.Raw(row.value.encode())))


def _unpacked(data: bytes) -> bytes:
    unpacker = zlib.decompressobj(wbits=31)
    try:
        text = unpacker.decompress(data, TEXT_BYTES_MAX)
    except zlib.error:
        raise BadField(_FIELD, "is no backup of Muster's: it is not packed by gzip, or damaged") from None
    if unpacker.unconsumed_tail:
        raise BadField(_FIELD, f"unpacks to more than {TEXT_BYTES_MAX} bytes")
    return text


def _header(line: bytes) -> Header:
    try:
        header = msgspec.json.decode(line, type=Header)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise BadField(_FIELD, "is no backup of Muster's: it does not begin with a header") from None
    if header.schema_version != SCHEMA_VERSION:
        raise BadField(
            _FIELD,
            f"has schema version {header.schema_version}, and this controller reads {SCHEMA_VERSION}: "
            "restore it with the version of Muster that wrote it",
        )
    return header


def _rows(lines: list[bytes]) -> Iterator[Row]:
    known = {kind.value for kind in KINDS}
    for line in lines:
        read = msgspec.json.decode(line, type=_Line)
        if read.kind not in known:
            raise CheckpointUnreadable(f"{read.kind[:40]!r} is nothing that a backup holds")
        yield Row(read.kind, read.key, SCHEMA_VERSION, bytes(read.value).decode())
