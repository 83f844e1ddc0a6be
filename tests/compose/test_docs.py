"""The pages on containers as a reader follows them, on the stack that all compose tests share."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.compose.stack import Stack
from tests.support.documents import ROOT, Block, page
from tests.support.reader import IN_CONTAINERS, STATED_URL, Reader

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1200)]

BEFORE = {"docs/runbook.md": "muster update digits --autoscaling-config max_replicas=2"}
"""What has been done when a page is needed: there is a number to let go on, and a version to go back to."""


def lay_out(folder: Path, secrets: Path) -> None:
    """Lay out a checkout whose secrets are this stack's, and in which everything is installed."""
    of_their_own = {"secrets", ".env", ".git", ".muster", ".venv"}
    for path in ROOT.iterdir():
        if path.name not in of_their_own:
            (folder / path.name).symlink_to(path)
    (folder / "secrets").symlink_to(secrets)
    installed = folder / ".venv"
    installed.mkdir()
    for name in ("bin", "lib", "pyvenv.cfg"):
        (installed / name).symlink_to(Path(sys.prefix, name))
    (installed / ".installed").touch()  # what `make` looks at


@pytest.mark.parametrize("name", IN_CONTAINERS)
def test_a_page_on_containers_can_be_followed(
    stack: Stack, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lay_out(tmp_path, stack.secrets.directory)
    monkeypatch.chdir(tmp_path)

    def live_hosts() -> list[str]:
        return [host["host_id"] for host in stack.status()["hosts"] if host["status"] == "live"]

    stack.wait_until(lambda: len(live_hosts()) == 1, "one host lives", live_hosts)
    instead = {
        STATED_URL: f"http://{os.environ['MUSTER_HTTP_PORT']}",
        "HOST": live_hosts()[0],
        "FILE": "monday.muster",
        "NAME": "digits",
        "SERVICE": "proxy",
    }
    reader = Reader(page(name), tmp_path, {"COMPOSE_FILE": stack.compose_file}, instead=instead)
    stack.forget()
    reader.run(Block("sh", BEFORE.get(name, "")))
    reader.follow()
    stack.wait_for_containers()
