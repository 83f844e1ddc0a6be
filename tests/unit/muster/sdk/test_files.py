"""Files that travel: which ones, under which names, and always with the same bytes."""

from __future__ import annotations

import io
import os
import stat
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from muster.sdk import files as files_module
from muster.sdk.files import Files, find_siblings, pack
from serve_common.errors import BadField, LimitReached

WHERE = "Model: ray_actor_options.runtime_env"


def write(top: Path, *names: str, text: str = "") -> Path:
    for name in names:
        path = top / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text or name)
    return top


def names_in(archive: bytes) -> list[str]:
    with zipfile.ZipFile(io.BytesIO(archive)) as file:
        return file.namelist()


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> Files:
    monkeypatch.setattr(files_module, "find_siblings", dict)
    return Files()


def package(files: Files, **runtime_env: Any) -> tuple[str, tuple[str, ...], dict[str, Any]]:
    environment = files.package(runtime_env, WHERE)
    return environment.working_dir, environment.py_modules, environment.runtime_env


def test_equal_files_are_equal_bytes_and_any_change_is_another_archive(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a", "x.py", "d/y.txt"), write(tmp_path / "b", "d/y.txt", "x.py")
    os.utime(second / "x.py", (0, 1_900_000_000))
    (second / "x.py").chmod(0o600)

    def packed(top: Path) -> bytes:
        return pack({"x.py": top / "x.py", "d/y.txt": top / "d/y.txt"}, "here")

    assert packed(first) == packed(second)
    (second / "x.py").chmod(0o700)
    assert packed(first) != packed(second)
    (second / "x.py").chmod(0o600)
    (second / "x.py").write_text("y.py")
    assert packed(first) != packed(second)
    with zipfile.ZipFile(io.BytesIO(packed(first))) as file:
        assert [entry.filename for entry in file.infolist()] == ["d/y.txt", "x.py"]
        assert {entry.compress_type for entry in file.infolist()} == {zipfile.ZIP_STORED}
        assert all(stat.S_ISREG(entry.external_attr >> 16) for entry in file.infolist())


def test_a_working_dir_travels_without_what_is_ignored(files: Files, tmp_path: Path) -> None:
    write(tmp_path, "app.py", "data/a.bin", "data/b.log", "data/keep.log", "deep/secrets/key", "secrets/key")
    write(
        tmp_path,
        ".git/config",
        "env/bin/python",
        "env/pyvenv.cfg",
        "__pycache__/app.pyc",
        "x.pyc",
        "out/deep/x",
    )
    write(tmp_path, ".gitignore", text="*.log\n/out/\n")
    write(tmp_path, "data/.musterignore", text="!keep.log\n*.bin\n")
    write(tmp_path, "left.out")
    (tmp_path / "loop").symlink_to(tmp_path)
    working_dir, modules, rest = package(
        files, working_dir=str(tmp_path), excludes=["left.*"], env_vars={"A": "b"}
    )
    assert names_in(files.archives[working_dir]) == [
        ".gitignore", "app.py", "data/.musterignore", "data/keep.log",
    ]  # fmt: skip
    assert modules == ()
    assert rest == {"env_vars": {"A": "b"}}


def test_modules_travel_below_their_own_name(files: Files, tmp_path: Path) -> None:
    write(tmp_path, "package/__init__.py", "package/sub/x.py", "one.py")
    with zipfile.ZipFile(tmp_path / "wheel-1-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr("wheeled/__init__.py", "")
    import json

    _, digests, _ = package(
        files,
        py_modules=[
            str(tmp_path / "package"),
            tmp_path / "one.py",
            str(tmp_path / "wheel-1-py3-none-any.whl"),
            json,
        ],
    )
    found = [names_in(files.archives[digest]) for digest in digests]
    assert found[:3] == [["package/__init__.py", "package/sub/x.py"], ["one.py"], ["wheeled/__init__.py"]]
    assert "json/decoder.py" in found[3]


def test_a_zip_is_a_working_dir_and_the_same_files_have_the_same_digest(files: Files, tmp_path: Path) -> None:
    write(tmp_path / "plain", "app.py", "d/x")
    for name, method in (("a.zip", zipfile.ZIP_DEFLATED), ("b.zip", zipfile.ZIP_STORED)):
        with zipfile.ZipFile(tmp_path / name, "w", method) as archive:
            archive.write(tmp_path / "plain/d/x", "d/x")
            archive.write(tmp_path / "plain/app.py", "app.py")
    digests = {package(files, working_dir=str(tmp_path / name))[0] for name in ("a.zip", "b.zip", "plain")}
    assert len(digests) == 1


def test_a_zip_from_the_web_is_downloaded_here_without_its_top_directory(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("repo-main/app.py", "x")
        archive.writestr("repo-main/d/y", "y")
    asked = []
    monkeypatch.setattr(
        files_module.urllib.request,
        "urlopen",
        lambda address, timeout: asked.append((address, timeout)) or io.BytesIO(content.getvalue()),
    )
    working_dir, _, _ = package(files, working_dir="https://example.org/repo/main.zip")
    assert names_in(files.archives[working_dir]) == ["app.py", "d/y"]
    assert asked == [("https://example.org/repo/main.zip", 60.0)]


def test_requirement_files_are_read_here(files: Files, tmp_path: Path) -> None:
    write(tmp_path, "r.txt", text="# those\nrequests==2.26.0\n\nx >= 1 \\\n  --hash=sha256:00\n")
    expected = ["requests==2.26.0", "x >= 1    --hash=sha256:00"]
    assert package(files, pip=str(tmp_path / "r.txt"))[2] == {"pip": expected}
    assert package(files, uv={"packages": str(tmp_path / "r.txt"), "uv_check": True})[2] == {
        "uv": {"packages": expected, "uv_check": True}
    }
    assert package(files, pip=["a"], uv=[])[2] == {"pip": ["a"]}


@pytest.mark.parametrize(
    ("runtime_env", "field", "text"),
    [
        ({"working_dir": "no-such"}, "working_dir", "there is no directory or file"),
        ({"working_dir": 1}, "working_dir", "must be a path"),
        ({"working_dir": __file__}, "working_dir", "must be a directory, or a .zip"),
        ({"working_dir": "s3://bucket/x.zip"}, "working_dir", "local path, or an https"),
        ({"working_dir": "https://example.org/x"}, "working_dir", "must end in .zip"),
        ({"py_modules": "x"}, "py_modules", "must be a list"),
        ({"py_modules": [sys]}, "py_modules[0]", "has no file"),
        ({"pip": "no-such.txt"}, "pip", "must be a file of requirements"),
        ({"excludes": "*.log", "working_dir": "."}, "excludes", "must be a list of strings"),
    ],
)
def test_what_cannot_travel_is_refused_by_name(
    files: Files, runtime_env: dict[str, Any], field: str, text: str
) -> None:
    with pytest.raises(BadField, match=text) as refused:
        files.package(runtime_env, WHERE)
    assert refused.value.field == f"{WHERE}.{field}"


@pytest.mark.parametrize("name", ["../x", "/x", "a/../../x", "a\\x"])
def test_a_zip_with_paths_outside_of_itself_is_refused(files: Files, tmp_path: Path, name: str) -> None:
    with zipfile.ZipFile(tmp_path / "bad.zip", "w") as archive:
        archive.writestr(zipfile.ZipInfo(name), "x")
    with pytest.raises(BadField, match="outside of itself"):
        package(files, working_dir=str(tmp_path / "bad.zip"))


def test_too_much_is_refused_and_the_largest_files_are_named(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "small", text="x" * 10)
    write(tmp_path, "d/large", text="x" * 1000)
    monkeypatch.setattr(files_module, "CODE_BYTES_MAX", 1005)
    with pytest.raises(
        LimitReached, match=r"largest are d/large \(1,000 bytes\), small \(10 bytes\).*musterignore"
    ):
        package(files, working_dir=str(tmp_path))
    monkeypatch.setattr(files_module, "CODE_BYTES_MAX", 2000)
    monkeypatch.setattr(files_module, "ARCHIVE_FILES_MAX", 1)
    with pytest.raises(LimitReached, match="2 files"):
        package(files, working_dir=str(tmp_path))


SCRIPT = """
import helpers
import spaced.loader
from muster.sdk.files import find_siblings, pack
def later():
    import lazy, os
    if True: import both
if __name__ == "__main__":
    import hashlib, sys
    print(*sorted(find_siblings()))
    print(hashlib.sha256(pack(find_siblings(), "x")).hexdigest())
"""


def siblings(directory: Path, *arguments: str, **variables: str) -> list[str]:
    environment = {**os.environ, **variables}
    command = [sys.executable, *(arguments or ("script.py",))]
    result = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    return result.stdout.splitlines()


def test_what_a_script_imports_from_beside_it_travels_and_nothing_else(tmp_path: Path) -> None:
    write(tmp_path, "script.py", text=SCRIPT)
    write(tmp_path, "helpers.py", text="import package\n")
    write(tmp_path, "lazy.py", "both.py", "unused.py", "notes.txt", "package/__init__.py", text="VALUE = 1\n")
    write(
        tmp_path,
        "package/_version.py",
        "package/words.txt",
        "package/junk.tmp",
        "spaced/huge.bin",
        text="1\n",
    )
    write(tmp_path, "spaced/loader.py", text="import hashlib\n")
    write(tmp_path, "package/.gitignore", text="_version.py\n*.tmp\n")
    names, digest = siblings(tmp_path)
    assert names.split() == [
        "both.py", "helpers.py", "lazy.py", "package/.gitignore", "package/__init__.py", "package/_version.py",
        "package/words.txt", "spaced/loader.py",
    ]  # fmt: skip
    assert siblings(tmp_path, PYTHONHASHSEED="7") == [names, digest]
    (tmp_path / "script.py").write_text(SCRIPT + "\n# the script itself goes by value\n")
    assert siblings(tmp_path) == [names, digest]
    (tmp_path / "lazy.py").write_text("VALUE = 2\n")
    assert siblings(tmp_path)[1] != digest


def test_code_without_a_script_has_what_it_imported_from_the_current_directory(tmp_path: Path) -> None:
    write(tmp_path, "helpers.py", "other.py", text="VALUE = 1\n")
    code = "import helpers; from muster.sdk.files import find_siblings; print(*sorted(find_siblings()))"
    assert siblings(tmp_path, "-c", code) == ["helpers.py"]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert siblings(elsewhere, "-c", code, PYTHONPATH=str(tmp_path)) == ["helpers.py"]


def test_what_is_installed_does_not_travel() -> None:
    found = find_siblings()
    tops = {name.partition("/")[0].removesuffix(".py") for name in found}
    assert "tests" in tops, "this very test is beside the program"
    assert not tops & {"muster", "serve_common", "pytest", "msgspec", "ray", "json"}


LOCATED = """
import hashlib, pickle, sys
from package.model import Model
from muster.sdk.code import dump_code
from muster.sdk.files import Files
from serve_common.protocol.code import strip_header
import cloudpickle
code = dump_code(Model.func_or_class, (), {}, name="m", files=Files().travelling)
print(hashlib.sha256(code).hexdigest())
sys.path.insert(0, sys.argv[1])
target, _, _ = pickle.loads(strip_header(code, cloudpickle.__version__))
print(target().where())
"""


def test_code_in_a_file_that_travels_finds_itself_where_it_is_then(tmp_path: Path) -> None:
    model = "import muster\n@muster.deployment\nclass Model:\n    def where(self):\n        return __file__\n"
    write(tmp_path / "here", "script.py", text=LOCATED)
    for name in ("here", "host"):
        write(tmp_path / name, "package/__init__.py", "package/model.py", text=model)
    _, place = siblings(tmp_path / "here", "script.py", str(tmp_path / "host"))
    assert place == str(tmp_path / "host/package/model.py")
