"""Installs what packages of this workspace depend on into an image's virtual environment, at the locked versions.

Why: an image's layer with dependencies must change only when they change, so it is made before any code is copied,
and it takes the names from each package's pyproject.toml, so that no list is kept twice.

    python install_dependencies.py /opt/venv/bin/python requirements.lock libs/serve_common/pyproject.toml ...

A file that is no pyproject.toml is given to pip as it is, as a list of requirements.
"""

# ruff: noqa: INP001 - a script that an image build copies, not a module of a package
from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

_OURS = "muster-"


def requirements_of(file: Path) -> list[str]:
    """What ``file`` asks for, as arguments of pip, without this workspace's own packages."""
    if file.name != "pyproject.toml":
        return ["-r", str(file)]
    project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
    return [name for name in project["dependencies"] if not name.startswith(_OURS)]


def main(interpreter: str, constraints: str, *files: str) -> int:
    """Install for ``interpreter``; the exit code is pip's."""
    wanted = [argument for file in files for argument in requirements_of(Path(file))]
    options = ["--quiet", "--no-cache-dir", "--disable-pip-version-check", "--root-user-action=ignore"]
    command = ["pip", "--python", interpreter, "install", *options, "-c", constraints, *wanted]
    return subprocess.run(command, check=False).returncode  # noqa: S603 - the names come from our own files


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
