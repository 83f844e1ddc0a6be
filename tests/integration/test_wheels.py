"""What is installed from the wheels, without the source tree, is whole: it runs a stack and a program of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.servers.reserved_port import HeldPort

pytestmark = pytest.mark.timeout(400)

QUICKSTART = """
import sys

import requests

import muster as serve


@serve.deployment
class Greeter:
    def __init__(self, greeting):
        self.greeting = greeting

    def __call__(self, request):
        return f"{self.greeting}, {request.query_params['name']}!"


if __name__ == "__main__":
    serve.start(http_options={"port": int(sys.argv[1])})
    serve.run(Greeter.bind("Hello"))
    print(requests.get(f"http://127.0.0.1:{sys.argv[1]}/?name=Ada", timeout=60).text)
    print(serve.__file__)
"""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[zipfile.Path]:
    """The wheels that `make wheels` builds, of each package."""
    target = tmp_path_factory.mktemp("dist")
    packages = [file.parent for file in sorted(ROOT.glob("*/*/pyproject.toml"))]
    for package in packages:
        command = (
            f"-m uv build --quiet --wheel --no-build-isolation --python {sys.executable} --out-dir {target}"
        )
        subprocess.run([sys.executable, *command.split(), str(package)], check=True, timeout=100)
    found = sorted(target.glob("*.whl"))
    assert len(found) == len(packages) == 7
    return [zipfile.Path(file) for file in found]


def test_a_wheel_bounds_what_it_needs_and_says_that_it_is_typed(wheels: list[zipfile.Path]) -> None:
    for wheel in wheels:
        parts = {part.name: part for part in wheel.iterdir()}
        [info] = [part for name, part in parts.items() if name.endswith(".dist-info")]
        metadata = HeaderParser().parsestr((info / "METADATA").read_text())
        assert metadata["License-Expression"] == "Apache-2.0", info.name
        assert metadata["Requires-Python"] == ">=3.11", info.name
        for needed in metadata.get_all("Requires-Dist", []):
            assert re.search(r"<|==\d", needed), f"{info.name}: {needed} has no bound"
            if needed.startswith("muster"):
                assert re.search(rf"=={re.escape(metadata['Version'])}\b", needed), needed
        for name, part in parts.items():
            assert part == info or (part / "py.typed").exists(), name


def test_a_program_runs_in_an_empty_directory_with_only_the_wheels(
    wheels: list[zipfile.Path], tmp_path: Path
) -> None:
    site, directory = tmp_path / "site", tmp_path / "empty"
    directory.mkdir()
    for wheel in wheels:
        assert wheel.root.filename is not None
        with zipfile.ZipFile(wheel.root.filename) as archive:
            archive.extractall(site)
    (directory / "quickstart.py").write_text(QUICKSTART)
    held = HeldPort()
    held.release()
    # Before the virtual environment, whose own packages are links into the source tree.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MUSTER_")}
    done = subprocess.run(
        [sys.executable, "quickstart.py", str(held.port)],
        cwd=directory,
        env=environment | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["Hello, Ada!", str(site / "muster/__init__.py")]
    line, *logged = done.stderr.splitlines()
    assert line.startswith("Muster runs within this process"), done.stderr
    # The request, as Ray Serve shows it to the program; it may come too late for a program that ends at once.
    assert all(re.search(r"Greeter#1.* GET / 200 ", each) for each in logged), done.stderr
    [state_dir] = re.findall(r"MUSTER_STATE_DIR=(\S+)", line)
    assert not Path(state_dir).exists()
    assert [file.name for file in directory.iterdir()] == ["quickstart.py"]
