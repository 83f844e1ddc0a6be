"""Installs what packages of this workspace depend on into an image's virtual environment: what is locked and no more.

Why: an image's layer with dependencies must change only when they change, so it is made before any code is copied,
and it takes the names from each package's pyproject.toml, so that no list is kept twice. What they depend on in turn
is read from the lock's own comments, because pip checks hashes only of what it is told by name.

    python install_dependencies.py /opt/venv/bin/python requirements.lock libs/serve_common/pyproject.toml ...

A file that is no pyproject.toml is a list of requirements. What it names without a version is taken from the lock if
it is there; the rest goes to pip as it is, with the locked versions as constraints: its hashes are its owner's matter.
"""

# ruff: noqa: INP001 - a script that an image build copies, not a module of a package
from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

_OURS = re.compile(r"muster\b")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_OPTIONS = ["--quiet", "--no-cache-dir", "--disable-pip-version-check", "--root-user-action=ignore"]


def normal(name: str) -> str:
    """The one form of a package's name."""
    return re.sub(r"[-_.]+", "-", name).lower()


def name_of(requirement: str) -> str:
    """The package that a requirement is about, in its one form; empty when it says none."""
    found = _NAME.match(requirement)
    return normal(found[0]) if found else ""


def read_lock(text: str) -> dict[str, tuple[str, set[str]]]:
    """Each locked package's lines, and the packages because of which it is there."""
    locked: dict[str, tuple[str, set[str]]] = {}
    for block in re.split(r"\n(?=[^ \n])", text.strip()):
        said = re.findall(r"^    #(?: via)? +([^\s(]+)", block, re.MULTILINE)
        locked[name_of(block)] = block, {normal(name) for name in said if name != "via"}
    return locked


def locked_for(names: set[str], locked: dict[str, tuple[str, set[str]]]) -> set[str]:
    """``names`` and all that is there because of them."""
    found: set[str] = set()
    new = names
    while new:
        found |= new
        new = {name for name, (_, because_of) in locked.items() if because_of & new} - found
    return found


def requirements_of(file: Path) -> list[str]:
    """What ``file`` asks for, without this workspace's own packages."""
    text = file.read_text(encoding="utf-8")
    if file.name == "pyproject.toml":
        names: list[str] = tomllib.loads(text)["project"]["dependencies"]
        return [name for name in names if not _OURS.match(name)]
    return [line for part in text.splitlines() if (line := part.partition("#")[0].strip())]


def install(interpreter: str, content: dict[str, str], *options: str) -> int:
    """``pip install`` with files of that content, each after its option; the exit code is pip's."""
    with tempfile.TemporaryDirectory() as directory:
        files: list[str] = []
        for number, (option, text) in enumerate(content.items()):
            file = Path(directory) / f"{number}.txt"
            file.write_text(text, encoding="utf-8")
            files += [option, str(file)]
        command = ["pip", "--python", interpreter, "install", *_OPTIONS, *options, *files]
        return subprocess.run(command, check=False).returncode  # noqa: S603 - the names come from our own files


def main(interpreter: str, lock: str, *files: str) -> int:
    """Install for ``interpreter``; the exit code is that of the pip that failed, or 0."""
    locked = read_lock(Path(lock).read_text(encoding="utf-8"))
    wanted: set[str] = set()
    others: list[str] = []
    for path in map(Path, files):
        for requirement in requirements_of(path):
            is_bare = _NAME.fullmatch(requirement.partition("[")[0].strip()) is not None
            if name_of(requirement) in locked and (is_bare or path.name == "pyproject.toml"):
                wanted.add(name_of(requirement))
            else:
                others.append(requirement)
    chosen = "\n".join(locked[name][0] for name in sorted(locked_for(wanted, locked)))
    failed = install(interpreter, {"-r": f"{chosen}\n"}, "--require-hashes", "--no-deps") if chosen else 0
    if others and not failed:
        constraints = "\n".join(block.partition(" \\")[0] for block, _ in locked.values())
        failed = install(interpreter, {"-c": constraints, "-r": "\n".join(others)})
    return failed or subprocess.run(["pip", "--python", interpreter, "check"], check=False).returncode  # noqa: S603, S607 - the image's own


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
