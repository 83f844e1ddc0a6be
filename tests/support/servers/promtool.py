"""``promtool`` wherever there is one: on PATH, and in the image of compose; they may be of different versions.

Why both: rules must be right for Prometheus 2.42 and for 3.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest

from tests.support.servers.prometheus_server import IMAGE

MOUNT: Final = "/etc/prometheus"
"""Where the image sees the directory: as in compose."""
REQUIRED: Final = "MUSTER_REQUIRE_COMPOSE"
_TIMEOUT_S: Final = 180.0


def commands(directory: Path) -> list[list[str]]:
    """How to begin a command that runs in ``directory``, one for each that there is.

    Without any the test is skipped, or fails where `MUSTER_REQUIRE_COMPOSE` is 1.
    """
    found = []
    on_path = shutil.which("promtool")
    if on_path is not None:
        found.append([on_path])
    if _has_image():
        inside = ["--network", "none", "--volume", f"{directory}:{MOUNT}:ro", "--workdir", MOUNT]
        found.append(["docker", "run", "--rm", *inside, "--entrypoint", "promtool", IMAGE])
    if not found:
        why = f"promtool is not on PATH, and there is no image {IMAGE}"
        if os.environ.get(REQUIRED) == "1":
            pytest.fail(f"{REQUIRED}=1, but {why}")
        pytest.skip(f"NOT TESTED: alert rules, for {why}")
    return found


def run(command: Sequence[str], directory: Path) -> subprocess.CompletedProcess[str]:
    """Its end and all that it said."""
    return subprocess.run(
        command, cwd=directory, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )


def _has_image() -> bool:
    try:
        return run(["docker", "image", "inspect", IMAGE], Path.cwd()).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
