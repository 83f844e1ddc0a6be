"""The checkpoint's objects as rows of a store, and as a backup file.

The core does not know how its objects are stored, nor the store what they mean. The format has a version: this code
refuses what other code wrote instead of dropping what it does not know.

A backup file has what is deployed at one moment, independent of the database. It is gzip of lines of JSON: a header, a
line for each object as it is stored, and the SHA-256 of all lines before. The state of the running system (replicas,
hosts, goals, snapshots) and the audit log are left out.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, Final, Literal

import msgspec

from serve_common.errors import BadField, CheckpointUnreadable
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.objects import (
    CLASSES,
    CheckpointObject,
    Key,
    ObjectChanges,
    ObjectKind,
    get_key,
)

SCHEMA_VERSION: Final = 1
"""The format that is written and read. Every change of the shape of a stored type needs the next number, a file of
examples in ``tests/data/checkpoints``, and in `load` a way from the rows of this one to today's objects."""

_ENCODER: Final = msgspec.json.Encoder()
_DECODERS: Final = {kind.value: msgspec.json.Decoder(stored_type) for kind, stored_type in CLASSES.items()}


class Row(msgspec.Struct, frozen=True):
    """One object as it is stored."""

    kind: str
    key: str
    schema_version: int
    value: str
    """JSON."""


class RowChanges(msgspec.Struct, frozen=True):
    """`ObjectChanges` as rows; each key occurs once."""

    puts: tuple[Row, ...]
    deletes: tuple[tuple[str, str], ...]
    """Kind and key."""


def dump(value: CheckpointObject) -> Row:
    """Encode an object as a row."""
    kind, key = get_key(value)
    return Row(kind.value, key, SCHEMA_VERSION, _to_json(value))


def load(row: Row) -> CheckpointObject:
    """Decode one row by itself. Raises `CheckpointUnreadable`, which names the row and the reason."""
    if row.schema_version != SCHEMA_VERSION:
        raise _unreadable(
            row,
            f"its schema_version is {row.schema_version}, and this version of Muster reads {SCHEMA_VERSION}: "
            "use the version that wrote it",
        )
    decoder = _DECODERS.get(row.kind)
    if decoder is None:
        raise _unreadable(row, "this version of Muster knows no such kind")
    try:
        value = decoder.decode(row.value)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise _unreadable(row, str(error)) from error
    kind, key = get_key(value)
    if key != row.key or kind.value != row.kind:
        raise _unreadable(row, f"it holds the object {key!r}")
    return value


def load_checkpoint(rows: Iterable[Row]) -> Checkpoint:
    """Decode ``rows`` in any order. Raises `CheckpointUnreadable`."""
    return Checkpoint().applied(ObjectChanges(puts=tuple(map(load, rows))))


def dump_changes(changes: ObjectChanges) -> RowChanges:
    """The rows that a store must write. The last of several values of one key wins; a deleted key is not put."""
    gone = dict.fromkeys(changes.deletes)
    puts: dict[Key, CheckpointObject] = {get_key(value): value for value in changes.puts}
    return RowChanges(
        puts=tuple(dump(value) for key, value in puts.items() if key not in gone),
        deletes=tuple((kind.value, key) for kind, key in gone),
    )


def _unreadable(row: Row, reason: str) -> CheckpointUnreadable:
    return CheckpointUnreadable(f"row {row.kind} {row.key!r}: {reason}")


def _to_json(value: CheckpointObject) -> str:
    try:
        return _ENCODER.encode(value).decode()
    except UnicodeEncodeError:
        # A lone surrogate has no UTF-8 encoding, so neither JSON nor Postgres accepts it, yet a traceback with an
        # undecodable file name contains one. An escape is better than refusing the whole change.
        return json.dumps(without_surrogates(msgspec.to_builtins(value)), separators=(",", ":"))


def without_surrogates(value: Any) -> Any:
    """``value``, made of JSON's types, with every lone surrogate in its strings replaced by an escape."""
    match value:
        case str():
            return value.encode("utf-8", "backslashreplace").decode()
        case dict():
            return {without_surrogates(key): without_surrogates(item) for key, item in value.items()}
        case list() | tuple():
            return [without_surrogates(item) for item in value]
        case _:
            return value


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


class _Header(msgspec.Struct, frozen=True, kw_only=True):
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


def write_backup(checkpoint: Checkpoint, epoch: int, taken_at: float) -> bytes:
    """Encode what is deployed by ``checkpoint`` as a file; may be called in another thread."""
    rows = [dump(value) for value in checkpoint.all_objects() if get_key(value)[0] in KINDS]
    rows.sort(key=lambda row: (row.kind, row.key))
    header = _Header(
        format=FORMAT, schema_version=SCHEMA_VERSION, taken_at=taken_at, epoch=epoch, objects=len(rows)
    )
    sha256, packed = hashlib.sha256(), io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", compresslevel=6, mtime=0) as file:
        for line in (msgspec.json.encode(header), *map(_line, rows)):
            sha256.update(line + b"\n")
            file.write(line + b"\n")
        file.write(msgspec.json.encode(_Trailer(sha256=sha256.hexdigest())) + b"\n")
    return packed.getvalue()


def read_backup(data: bytes) -> tuple[float, Checkpoint]:
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


def _header(line: bytes) -> _Header:
    try:
        header = msgspec.json.decode(line, type=_Header)
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
