"""The how-to pages and the README as a reader follows them: files are written, commands run on a real stack."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.documents import ROOT, Block, page
from tests.support.reader import ON_AN_EMBEDDED_STACK, STATED_NATS_URL, STATED_URL, Reader
from tests.support.servers.postgres_server import PostgresServer

START_LIMIT_S = 200.0

FILES_OF = {"docs/how-to/command-line.md": "docs/how-to/applications.md"}
"""Pages whose commands are about the files of another."""

pytestmark = pytest.mark.timeout(400)


@contextmanager
def running_stack(
    command: str, folder: Path, environment: dict[str, str], until: str
) -> Iterator[dict[str, Any]]:
    """What ``command``, a `muster up --json` in a shell, has told up to the event ``until``."""
    with (folder / "up.log").open("wb") as log:
        up = subprocess.Popen(
            ["bash", "-c", command],
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment,
            text=True,
            cwd=folder,
        )
    deadline = threading.Timer(START_LIMIT_S, up.kill)
    deadline.start()
    try:
        assert up.stdout is not None
        found: dict[str, Any] = {}
        for line in up.stdout:
            assert line.startswith("{"), line + up.stdout.read() + (folder / "up.log").read_text()
            event = json.loads(line)
            found |= event.get("stack", {})
            if event["event"] == until:
                assert event.get("is_serving", True), event
                break
        assert found, (folder / "up.log").read_text()
        deadline.cancel()
        yield found
    finally:
        deadline.cancel()
        up.send_signal(signal.SIGINT)
        up.communicate(timeout=60)


UP = f"{sys.executable} -m muster.cli.main up --json --http-port 0 --nats-port 0 --num-cpus 4"


def plain_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("MUSTER_")}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """A running `muster up` as `make run` starts it: its addresses and paths."""
    folder = tmp_path_factory.mktemp("docs")
    # What the ready-made middlewares ask for, and where one of the page's own is found.
    (folder / "keys").write_text("shop  s3cr3t-of-at-least-16-characters\n")
    environment = plain_environment() | {
        "MUSTER_CORS_ALLOW_ORIGINS": "https://shop.example.org",
        "MUSTER_API_KEYS_FILE": str(folder / "keys"),
        "MUSTER_RATE_LIMIT_PER_S": "1000",
        "MUSTER_MIDDLEWARE_DIR": str(folder / "here"),
    }
    (folder / "here").mkdir()
    command = f"cd {ROOT} && exec {UP} --deploy-example --state-dir {folder / 'state'}"
    with running_stack(command, folder, environment, "example") as found:
        yield found | {"here": folder / "here"}


def lay_out(folder: Path, stack: dict[str, Any]) -> None:
    """Lay out what a reader of any page finds in the directory of ``make run``."""
    shutil.rmtree(folder)
    folder.mkdir()
    secrets = Path(stack["state_dir"], "secrets")
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / "secrets").symlink_to(secrets)
    (folder / "prod.creds").symlink_to(secrets / "admin.creds")


@pytest.mark.parametrize("name", ON_AN_EMBEDDED_STACK)
def test_a_page_can_be_followed(stack: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder: Path = stack["here"]
    lay_out(folder, stack)
    monkeypatch.chdir(folder)
    instead = {
        STATED_URL: stack["http_url"],
        STATED_NATS_URL: stack["nats_url"],
        "/apps/digits": str(ROOT / "examples/digits"),
    }
    reader = Reader(page(name), folder, {"MUSTER_STATE_DIR": stack["state_dir"]}, instead=instead)
    for block in page(FILES_OF[name]).blocks() if name in FILES_OF else ():
        if block.file_name:
            reader.write(block)
    reader.follow()


def test_the_page_on_several_machines_can_be_followed(
    stack: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    lay_out(stack["here"], stack)
    monkeypatch.chdir(stack["here"])
    environment = {"MUSTER_STATE_DIR": stack["state_dir"]}
    reader = Reader(page("docs/how-to/ray-cluster.md"), stack["here"], environment)
    reader.run(Block("sh", "muster shutdown --yes"))  # there is no other host for its replicas
    reader.follow()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
def test_the_page_on_https_can_be_followed(tmp_path: Path) -> None:
    reader = Reader(page("docs/how-to/https.md"), tmp_path)
    certificate, one_machine, containers = reader.page.blocks("sh")
    reader.run(certificate)
    export, up, curl = one_machine.text.splitlines()
    assert (export.split()[0], up) == ("export", "muster up")
    with running_stack(f"{export}\nexec {UP}", tmp_path, plain_environment(), "stack_ready") as found:
        assert found["http_url"].startswith("https://")
        reader.instead = {"https://127.0.0.1:8000": found["http_url"]}
        reader.run(Block("sh", curl))
    reader.run(containers)


def test_the_page_on_existing_services_can_be_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deploy").symlink_to(ROOT / "deploy")
    with PostgresServer() as postgres:
        postgres.start()
        superuser = postgres.libpq_variables
        Reader(page("docs/how-to/existing-services.md"), tmp_path, superuser).follow()
        password = (tmp_path / "secrets/postgres_password").read_text().strip()
        controller = {**superuser, "PGPASSWORD": password}
        again = Reader(page("docs/how-to/existing-services.md"), tmp_path, controller)
        again.run(Block("sh", "psql -U muster -c 'CREATE TABLE made_by_muster ()'"))


def test_the_page_on_security_can_be_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    reader = Reader(page("docs/how-to/secure.md"), tmp_path)
    reader.run(Block("sh", "muster secrets"))  # the page says that there are some
    files = {path.name: path.read_bytes() for path in (tmp_path / "secrets").iterdir()}
    reader.follow()
    changed = {name for name, old in files.items() if (tmp_path / "secrets" / name).read_bytes() != old}
    assert "proxy.keys" in changed
    assert "host.keys" not in changed
