"""The programs, the one rule that changes their imports, and what they print under Ray Serve, as recorded."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

PROGRAMS: Final = Path(__file__).parent / "programs"
RECORDED: Final = Path(__file__).parent / "recorded.json"
TIMEOUT_S: Final = 120

FAILED: Final = ("EXIT ", "TIMEOUT ")
"""The last lines of a program that failed begin so."""
OF_ONE_MACHINE: Final = re.compile(
    r"/(work|root|tmp|home|usr|var|opt)/|\bpid=\d|\bip=\d|\(raylet\)|InvalidAuthToken|\b(?!127\.0\.)\d+\.\d+\.\d+\.\d+:\d"
)
"""Paths, processes and addresses, and what another Ray on the machine says."""

_IMPORTS: Final = (
    (re.compile(r"^(\s*)from ray import serve\b", re.MULTILINE), r"\1import muster as serve"),
    (re.compile(r"^(\s*)import ray\.serve as\b", re.MULTILINE), r"\1import muster as"),
    (re.compile(r"\bray\.serve\b(?=[.\s])(?!\")"), "muster"),
)
"""What a user changes. Names of loggers, in quotes, stay."""
_PORT: Final = re.compile(r"(localhost|127\.0\.0\.1):8000\b")


def names() -> list[str]:
    """Of all programs, sorted."""
    return sorted(path.stem for path in PROGRAMS.glob("*.py"))


def with_port(text: str, port: int) -> str:
    """The program's text, for a proxy on this port."""
    return _PORT.sub(rf"\1:{port}", text)


def for_muster(text: str) -> str:
    """The program's text with its imports changed."""
    for pattern, new in _IMPORTS:
        text = pattern.sub(new, text)
    return text


def recorded() -> dict[str, list[str]]:
    """What each program printed under Ray Serve, by lines."""
    return json.loads(RECORDED.read_text()) if RECORDED.exists() else {}


def is_unrepeatable(line: str) -> bool:
    """Whether a line tells of a failure, or of the machine that printed it."""
    return line.startswith(FAILED) or OF_ONE_MACHINE.search(line) is not None


def record(name: str, lines: list[str]) -> None:
    """Keep what a program printed under Ray Serve; what is recorded of programs that are gone, goes.

    A program that failed is not recorded, nor one whose output another machine could not repeat.
    """
    if any(is_unrepeatable(line) for line in lines):
        print(f"{name} is not recorded:", *lines, sep="\n")
        return
    all_lines = {**recorded(), name: lines}
    wanted = {each: all_lines[each] for each in names() if each in all_lines}
    RECORDED.write_text(json.dumps(wanted, indent=1, ensure_ascii=False) + "\n")


def run_under_muster(name: str, port: int, state_dir: Path, directory: Path) -> list[str]:
    """The lines that the program prints beside a running stack, whose state is in ``state_dir``."""
    program = directory / f"{name}.py"
    program.write_text(for_muster(with_port((PROGRAMS / f"{name}.py").read_text(), port)))
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MUSTER_")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return run(
        [sys.executable, program.name], directory, {**environment, "MUSTER_STATE_DIR": str(state_dir)}, port
    )


def run(argv: list[str], directory: Path, environment: Mapping[str, str], port: int) -> list[str]:
    """The lines of a program's output, with port 8000 for its own; after a failure the end of its errors too."""
    try:
        done = subprocess.run(
            argv,
            cwd=directory,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        return [*(error.stdout or b"").decode().splitlines(), f"TIMEOUT after {TIMEOUT_S} s"]
    lines = done.stdout.replace(f":{port}", ":8000").splitlines()
    lines = [
        line for line in lines if "(raylet)" not in line
    ]  # Ray's own, which it prints into programs' output
    if done.returncode:
        lines += [f"EXIT {done.returncode}", *done.stderr.splitlines()[-25:]]
    return lines
