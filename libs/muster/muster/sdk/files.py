"""Files that travel with the code: modules beside the program, ``working_dir``, ``py_modules``.

Each becomes one archive: a zip whose bytes follow from its files alone (sorted names, no times, no compression), so the
same files have the same digest in every process. What may be ignored: see `_Ignored`.
"""

from __future__ import annotations

import atexit
import io
import os
import re
import shutil
import site
import stat
import sys
import sysconfig
import tempfile
import types
import urllib.request
import zipfile
from collections.abc import Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Final, final

import msgspec
from pathspec import GitIgnoreSpec

from serve_common.errors import BadField, LimitReached
from serve_common.protocol.code import ARCHIVE_FILES_MAX, CODE_BYTES_MAX, digest_code

IGNORE_FILES: Final = (".gitignore", ".musterignore")
"""Files with patterns of what does not travel, in Git's syntax; the later one decides."""
_NEVER: Final = frozenset(
    {
        ".git",
        ".hg",
        ".svn",
        ".venv",
        "venv",
        "__pycache__",
        "secrets",
        "node_modules",
        ".muster",
        ".tox",
        ".nox",
    }
    | {".mypy_cache", ".pytest_cache", ".ruff_cache", ".ipynb_checkpoints", ".DS_Store"}
)
_OURS: Final = frozenset(
    {"muster", "ray", "serve_common", "serve_controller", "serve_proxy", "serve_replica_host"}
)
_LARGEST_SHOWN: Final = 5
_LOCAL: Final = ("", "file", "local")
"""Schemes of paths on this machine, as Ray Serve's files have them."""
_DOWNLOAD_TIMEOUT_S: Final = 60.0
_EARLIEST: Final = (1980, 1, 1, 0, 0, 0)
_IMPORT: Final = re.compile(
    r"(?:^|[:;])[ \t]*(?:from[ \t]+([\w.]+)[ \t]+import\b|import[ \t]+([^\n;#]+))", re.MULTILINE
)


class PackagedEnvironment(msgspec.Struct, frozen=True, kw_only=True):
    """A deployment's ``runtime_env``, ready to travel."""

    runtime_env: dict[str, Any]
    """What is left for Ray: variables and packages."""
    working_dir: str
    """Digest of its archive; empty for none."""
    py_modules: tuple[str, ...]
    """Digests of their archives, in the order of ``sys.path``."""


@final
class Files:
    """The archives of one application; each directory is read once."""

    def __init__(self) -> None:
        self.archives: dict[str, bytes] = {}
        """Content by digest."""
        self._known: dict[tuple[str, tuple[str, ...]], str] = {}
        siblings = find_siblings()
        self.travelling: dict[str, str] = {
            os.path.abspath(path): name  # noqa: PTH100 - as modules have it, links and all
            for name, path in siblings.items()
            if isinstance(path, Path)
        }
        """Files of the modules beside the program, by their paths: the names that they have in a replica."""
        self._siblings = (self._add(pack(siblings, "the modules beside the program")),) if siblings else ()

    def package(self, runtime_env: Mapping[str, Any], where: str) -> PackagedEnvironment:
        """Archive what ``runtime_env`` names, and the modules beside the program; ``where`` is the path of it.

        Raises `BadField` for what cannot be read, and `LimitReached` naming the largest files.
        """
        rest = {name: value for name, value in runtime_env.items() if value}
        excludes = _check_texts(rest.pop("excludes", []), f"{where}.excludes")
        source, modules = rest.pop("working_dir", None), rest.pop("py_modules", [])
        working_dir = "" if source is None else self._add_source(source, excludes, f"{where}.working_dir")
        if not isinstance(modules, list):
            raise BadField(f"{where}.py_modules", "must be a list of directories, files and modules")
        digests = [
            self._add_source(module, excludes, f"{where}.py_modules[{at}]", is_module=True)
            for at, module in enumerate(modules)
        ]
        for installer in ("pip", "uv"):
            if installer in rest:
                rest[installer] = _read_packages(rest[installer], f"{where}.{installer}")
        return PackagedEnvironment(
            runtime_env=rest,
            working_dir=working_dir,
            py_modules=tuple(dict.fromkeys([*digests, *self._siblings])),
        )

    def _add(self, archive: bytes) -> str:
        digest = digest_code(archive)
        self.archives[digest] = archive
        return digest

    def _add_source(self, source: Any, excludes: list[str], where: str, *, is_module: bool = False) -> str:
        if isinstance(source, types.ModuleType) and is_module:
            source = _module_path(source, where)
        if isinstance(source, os.PathLike):
            source = os.fspath(source)
        if not isinstance(source, str):
            raise BadField(where, f"must be a path, not {type(source).__name__}")
        key = (f"{is_module}:{Path(source).absolute()}", tuple(excludes))
        if key not in self._known:
            self._known[key] = self._add(_archive(source, excludes, where, is_module=is_module))
        return self._known[key]


def pack(files: Mapping[str, Path | bytes], where: str) -> bytes:
    """The archive of ``files``, by their names in it. Raises `LimitReached`, `BadField`; ``where`` names the whole."""
    sizes = {
        name: len(source) if isinstance(source, bytes) else source.stat().st_size
        for name, source in files.items()
    }
    total = sum(sizes.values())
    if total > CODE_BYTES_MAX or len(files) > ARCHIVE_FILES_MAX:
        largest = sorted(sizes, key=lambda name: (-sizes[name], name))[:_LARGEST_SHOWN]
        shown = ", ".join(f"{name} ({sizes[name]:,} bytes)" for name in largest)
        raise LimitReached(
            f"{where}: {len(files):,} files with {total:,} bytes; at most {ARCHIVE_FILES_MAX:,} with "
            f"{CODE_BYTES_MAX:,} bytes travel. The largest are {shown}. Name what is not needed in a file .musterignore"
        )
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(files):
            source, mode = files[name], 0o644
            if isinstance(source, Path):
                mode = 0o755 if source.stat().st_mode & stat.S_IXUSR else 0o644
            entry = zipfile.ZipInfo(name, _EARLIEST)
            entry.create_system, entry.external_attr = 3, (stat.S_IFREG | mode) << 16
            try:
                archive.writestr(entry, source if isinstance(source, bytes) else source.read_bytes())
            except (OSError, UnicodeError) as error:
                raise BadField(where, f"{name!r} cannot be read: {error}") from error
    return target.getvalue()


def unpack(source: str, where: str, *, is_module: bool = False) -> Path:
    """A directory with what a .zip, or with ``is_module`` one of ``py_modules``, has, for imports.

    It ends with this process. Raises as `Files`.
    """
    directory = tempfile.mkdtemp(prefix="muster-code-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    with zipfile.ZipFile(io.BytesIO(_archive(source, [], where, is_module=is_module))) as archive:
        archive.extractall(directory)
    return Path(directory)


def _archive(source: str, excludes: list[str], where: str, *, is_module: bool) -> bytes:
    scheme, _, path_of = source.partition("://") if "://" in source else ("", "", source)
    suffix = ".whl" if is_module and source.endswith(".whl") else ".zip"
    if scheme == "https":
        if not source.endswith(suffix):
            raise BadField(where, f"{source[:200]!r} must end in {'.zip or .whl' if is_module else '.zip'}")
        return pack(_unzip(_download(source, where), where, strips_top=suffix == ".zip"), where)
    if scheme not in _LOCAL:
        raise BadField(
            where, f"{source[:200]!r} is not supported: give a local path, or an https:// address of a .zip"
        )
    path = Path(path_of).expanduser()
    if path.is_dir():
        prefix = f"{path.resolve().name}/" if is_module else ""
        ignored = _Ignored(path, excludes)
        return pack({f"{prefix}{name}": file for name, file in ignored.walk()}, where)
    if not path.is_file():
        raise BadField(where, f"there is no directory or file {str(path)!r} (looked for in {Path.cwd()})")
    if is_module and path.suffix == ".py":
        return pack({path.name: path}, where)
    if path.suffix == suffix and (scheme == "file" or not (is_module and suffix == ".zip")):
        return pack(_unzip(path.read_bytes(), where, strips_top=scheme == "file" and suffix == ".zip"), where)
    file = "a .py file or a .whl" if is_module else "or a .zip"
    raise BadField(where, f"{str(path)!r} must be a directory, {file}")


def _module_path(module: types.ModuleType, where: str) -> str:
    paths = list(getattr(module, "__path__", []))
    if paths:
        return str(paths[0])
    if getattr(module, "__file__", None):
        return str(module.__file__)
    raise BadField(where, f"the module {module.__name__} has no file")


def _download(address: str, where: str) -> bytes:
    try:
        with urllib.request.urlopen(address, timeout=_DOWNLOAD_TIMEOUT_S) as response:  # noqa: S310 - https only
            data: bytes = response.read(CODE_BYTES_MAX + 1)
    except OSError as error:
        raise BadField(where, f"{address[:200]} cannot be downloaded: {error}") from error
    if len(data) > CODE_BYTES_MAX:
        raise LimitReached(f"{where}: {address[:200]} has more than {CODE_BYTES_MAX:,} bytes")
    return data


def _unzip(data: bytes, where: str, *, strips_top: bool) -> dict[str, Path | bytes]:
    """The files of a zip that others made; with ``strips_top`` without the one directory that all are in."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = [entry for entry in archive.infolist() if not entry.is_dir()]
            if len(entries) > ARCHIVE_FILES_MAX or sum(entry.file_size for entry in entries) > CODE_BYTES_MAX:
                raise LimitReached(
                    f"{where}: at most {ARCHIVE_FILES_MAX:,} files, {CODE_BYTES_MAX:,} bytes, travel"
                )
            names = [entry.filename for entry in entries]
            tops = {name.partition("/")[0] for name in names}
            cut = (
                len(tops.pop()) + 1
                if strips_top and len(tops) == 1 and all("/" in name for name in names)
                else 0
            )
            for name in names:
                if name.startswith("/") or "\\" in name or {"", ".", ".."} & set(name.split("/")):
                    raise BadField(where, f"the zip has a file {name[:200]!r} outside of itself")
            return {entry.filename[cut:]: archive.read(entry) for entry in entries}
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
        raise BadField(where, f"is not a zip that can be read: {error}") from error


def _read_packages(value: Any, where: str) -> Any:
    """Requirements as lists; a path is read here, because hosts do not see it."""
    if isinstance(value, dict) and isinstance(value.get("packages"), str):
        return {**value, "packages": _read_requirements(value["packages"], f"{where}.packages")}
    return _read_requirements(value, where) if isinstance(value, str | os.PathLike) else value


def _read_requirements(source: str | os.PathLike[str], where: str) -> list[str]:
    try:
        text = Path(source).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise BadField(where, f"{str(source)!r} must be a file of requirements: {error}") from error
    lines = text.replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]


def _check_texts(value: Any, where: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise BadField(where, "must be a list of strings")
    return value


@final
class _Ignored:
    """The files of a directory that travel.

    Never: version control, virtual environments, caches, ``secrets``, compiled Python. Otherwise `IGNORE_FILES` of each
    directory decide, the deepest first, then ``excludes``. Of packages that were found by themselves, sources travel
    although Git ignores them: versions and protocols are often generated.
    """

    def __init__(self, top: Path, excludes: list[str], *, always: str = "") -> None:
        """``always`` is a suffix of files that `IGNORE_FILES` but the last do not concern."""
        self._top = top
        self._excludes = GitIgnoreSpec.from_lines(excludes)
        self._always = always
        self._rules: dict[Path, tuple[GitIgnoreSpec, GitIgnoreSpec]] = {}

    def walk(self) -> Iterator[tuple[str, Path]]:
        """The files, each with its name relative to the top."""
        seen: set[str] = set()
        for text, directories, names in os.walk(self._top, followlinks=True):
            directory = Path(text)
            real = os.path.realpath(text)
            if real in seen:  # a link that leads back
                directories.clear()
                continue
            seen.add(real)
            texts = [_read_patterns(directory / name) for name in IGNORE_FILES]
            self._rules[directory] = (
                GitIgnoreSpec.from_lines(texts[0] + texts[1]),
                GitIgnoreSpec.from_lines(texts[1]),
            )
            directories[:] = sorted(
                name for name in directories if not self._is_ignored(directory / name, is_directory=True)
            )
            for name in sorted(names):
                path = directory / name
                if not self._is_ignored(path, is_directory=False) and path.is_file():
                    yield path.relative_to(self._top).as_posix(), path

    def _is_ignored(self, path: Path, *, is_directory: bool) -> bool:
        if path.name in _NEVER or path.suffix == ".pyc" or (path / "pyvenv.cfg").exists():
            return True
        tail = "/" * is_directory
        # A directory may hold sources that travel anyway.
        spares = bool(self._always) and (is_directory or path.name.endswith(self._always))
        parent = path.parent
        while True:
            spec = self._rules[parent][1 if spares else 0]
            found = spec.check_file(path.relative_to(parent).as_posix() + tail).include
            if found is not None:
                return found
            if parent == self._top:
                break
            parent = parent.parent
        return self._excludes.match_file(path.relative_to(self._top).as_posix() + tail)


def _read_patterns(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []


def find_siblings() -> dict[str, Path | bytes]:
    """Modules of the program that are not installed: files by their names in the archive.

    They are found on ``sys.path`` outside of where packages are installed: in the directory of the script or the test,
    the current one of a notebook, those of ``PYTHONPATH``. Of these travel the modules that were imported, and the ones
    that they and the script import later; a package whole, with its data.
    """
    roots = _local_roots()
    found: dict[str, Path | bytes] = {}
    names = {name for name in sys.modules if "." not in name} - {"__main__", "__mp_main__"}
    sources: list[Path] = []
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    if main and Path(main).suffix == ".py" and Path(main).resolve().parent in roots:
        sources.append(Path(main))
    seen: set[str] = set(_OURS)
    while names or sources:
        for name in sorted(names - seen):
            seen.add(name)
            added = _module_files(name, roots)
            found |= added
            sources += [path for path in added.values() if isinstance(path, Path) and path.suffix == ".py"]
        names = {name for path in sources for name in _imported_names(path)} - seen - sys.stdlib_module_names
        sources = []
        seen |= {name for name in names if not any(_has_module(root, name) for root in roots)}
        names -= seen
    return found


def _sites() -> list[str]:
    return [*site.getsitepackages(), site.getusersitepackages()]


def _installed() -> set[Path]:
    """Where installers put packages."""
    named = [
        path for name, path in sysconfig.get_paths().items() if name != "data"
    ]  # that is the whole prefix
    return {Path(path).resolve() for path in named + _sites()}


def _local_roots() -> list[Path]:
    """Directories on ``sys.path`` that no installer fills."""
    installed = _installed()
    linked = {
        Path(directory, line.strip()).resolve()
        for directory in _sites()
        if Path(directory).is_dir()
        for file in Path(directory).glob("*.pth")
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines()
        if line.strip() and not line.startswith(("#", "import ", "import\t"))
    }
    roots = list(dict.fromkeys(Path(entry or ".").resolve() for entry in sys.path))
    return [
        root
        for root in roots
        if root.is_dir() and root not in linked and not any(map(root.is_relative_to, installed))
    ]


def is_local(file: Path) -> bool:
    """Whether a module's file is on ``sys.path`` outside of where packages are installed."""
    return any(map(file.resolve().is_relative_to, _local_roots())) and not any(
        map(file.resolve().is_relative_to, _installed())
    )


def _has_module(root: Path, name: str) -> bool:
    return (root / f"{name}.py").is_file() or (root / name / "__init__.py").is_file()


def _module_files(name: str, roots: list[Path]) -> dict[str, Path | bytes]:
    """The files of a top-level module or package, if it is in one of ``roots``."""
    module: Any = sys.modules.get(name)
    spec = PathFinder.find_spec(name) if module is None else None
    file = getattr(module, "__file__", None) or (spec.origin if spec is not None else None)
    places = getattr(module, "__path__", None) or (
        spec.submodule_search_locations if spec is not None else None
    )
    found: dict[str, Path | bytes] = {}
    if not places:
        path = Path(file) if file else None
        if path is not None and path.parent.resolve() in roots:
            found[path.name] = path
        return found
    for place in map(Path, places):
        if place.parent.resolve() in roots:
            files = _Ignored(place, [], always=".py").walk()
            # Without an __init__.py it may be any directory: only its sources travel.
            found |= {f"{place.name}/{inner}": path for inner, path in files if file or path.suffix == ".py"}
    return found


def _imported_names(source: Path) -> set[str]:
    """Top-level names that a source seems to import, anywhere in it."""
    text = source.read_text(encoding="utf-8", errors="replace")
    names = set()
    for module, modules in _IMPORT.findall(text):
        for part in [module] if module else modules.split(","):
            name = part.strip().partition(" ")[0].partition(".")[0]
            if name.isidentifier():
                names.add(name)
    return names
