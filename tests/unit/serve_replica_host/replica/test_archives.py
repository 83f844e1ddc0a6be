"""Archives are unpacked whole, read-only and as they are, or not at all."""

from __future__ import annotations

import io
import os
import stat
import sys
import zipfile
from pathlib import Path
from typing import Any

import msgspec
import pytest

from serve_common.config.backend import ReplicaConfig
from serve_common.protocol.code import CodeCorrupt, digest_code
from serve_replica_host.replica import archives
from serve_replica_host.replica.archives import remove_tree, store_uploads, unpack, unpacked_path
from serve_replica_host.replica.user.code import enter_archives


def archive(files: dict[str, bytes], *, method: int = zipfile.ZIP_STORED, mode: int = 0o100644) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", method) as file:
        for name, data in files.items():
            entry = zipfile.ZipInfo(name)
            entry.create_system, entry.external_attr, entry.compress_type = 3, mode << 16, method
            file.writestr(entry, data)
    return target.getvalue()


def store(directory: Path, data: bytes) -> Path:
    path = directory / digest_code(data)
    path.write_bytes(data)
    return path


def tree(top: Path) -> dict[str, bytes]:
    return {path.relative_to(top).as_posix(): path.read_bytes() for path in top.rglob("*") if path.is_file()}


FILES = {"a.py": b"1", "d/b.txt": b"two", "d/e/c": b""}


def test_files_are_unpacked_for_all_to_read_and_none_to_write(tmp_path: Path) -> None:
    path = store(tmp_path, archive(FILES, mode=0o100755))
    unpack(path)
    top = unpacked_path(path)
    assert tree(top) == FILES
    modes = {stat.S_IMODE(entry.stat().st_mode) for entry in [top, *top.rglob("*")]}
    assert modes == {0o555}
    assert {entry.name for entry in tmp_path.iterdir()} == {path.name, top.name}
    inode = (top / "a.py").stat().st_ino
    unpack(path)
    assert (top / "a.py").stat().st_ino == inode, "unpacked once"
    remove_tree(top)
    assert not top.exists()


@pytest.mark.parametrize("change", ["content", "added", "gone", "link"])
def test_files_that_were_changed_are_unpacked_again(tmp_path: Path, change: str) -> None:
    path = store(tmp_path, archive(FILES))
    unpack(path)
    top = unpacked_path(path)
    top.chmod(0o755)
    file = top / "a.py"
    file.chmod(0o644)
    if change == "added":
        (top / "more.py").write_text("x")
    else:
        file.unlink()
    if change == "content":
        file.write_bytes(b"2")
    if change == "link":
        (tmp_path / "outside").write_bytes(b"1")
        file.symlink_to(tmp_path / "outside")
    unpack(path)
    assert tree(top) == FILES
    assert not (top / "a.py").is_symlink()


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (archive({"../x": b""}), "not a path within"),
        (archive({"/x": b""}), "not a path within"),
        (archive({"a/../x": b""}), "not a path within"),
        (archive({"a\\x": b""}), "not a path within"),
        (archive({"a": b"x" * 100}, method=zipfile.ZIP_DEFLATED), "stored as it is"),
        (archive({"link": b"/etc/passwd"}, mode=0o120777), "not a plain file"),
        (archive({"a": b"", "a/b": b""}), "cannot be unpacked"),
        (b"no zip at all", "cannot be unpacked"),
    ],
)
def test_hostile_archives_leave_nothing(tmp_path: Path, data: bytes, text: str) -> None:
    path = store(tmp_path, data)
    with pytest.raises(CodeCorrupt, match=text):
        unpack(path)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    assert not (tmp_path.parent / "x").exists()


def test_numbers_and_sizes_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = store(tmp_path, archive(FILES))
    monkeypatch.setattr(archives, "ARCHIVE_FILES_MAX", 2)
    with pytest.raises(CodeCorrupt, match="more than 2 files"):
        unpack(path)
    monkeypatch.setattr(archives, "ARCHIVE_FILES_MAX", 3)
    monkeypatch.setattr(archives, "CODE_BYTES_MAX", 3)
    with pytest.raises(CodeCorrupt, match="more than 3 bytes"):
        unpack(path)


def test_a_replica_on_another_machine_unpacks_for_itself_and_deletes_what_dead_ones_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archives.tempfile, "tempdir", str(tmp_path))
    (tmp_path / "muster-code-999999999-x").mkdir()
    living = tmp_path / f"muster-code-{os.getppid()}-x"
    living.mkdir()
    data = archive(FILES)
    digest, code = digest_code(data), b"code"
    directory = Path(store_uploads({digest: data, digest_code(code): code}, (digest,)))
    assert tree(unpacked_path(directory / digest)) == FILES
    assert (directory / digest_code(code)).read_bytes() == code
    assert {entry.name for entry in tmp_path.iterdir()} == {living.name, directory.name}
    with pytest.raises(CodeCorrupt):
        store_uploads({digest: data + b"x"}, ())


def test_archives_come_first_on_the_path_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", ["/app", *sys.path])
    went: list[Any] = []
    monkeypatch.setattr(os, "chdir", went.append)
    config = ReplicaConfig(import_path="m:C", py_modules=("a" * 64, "b" * 64))
    enter_archives(config, str(tmp_path))
    assert sys.path[:3] == [f"{tmp_path}/{letter * 64}.files" for letter in "ab"] + ["/app"]
    assert went == []
    enter_archives(msgspec.structs.replace(config, working_dir="c" * 64), "/other")
    assert sys.path[:3] == [f"/other/{letter * 64}.files" for letter in "abc"]
    assert went == [f"/other/{'c' * 64}.files"]
