"""The how-to pages and the README as a reader follows them: files are written, commands run on a real stack."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import shutil
import signal
import ssl
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from muster.cli.main import app as cli
from tests.support.documents import ROOT, Block, Page, page

START_LIMIT_S = 200.0
COMMAND_LIMIT_S = 100.0
STATED_URL = "http://127.0.0.1:8000"
PAGES = (
    "README.md",
    "examples/README.md",
    "docs/how-to/deploy.md",
    "docs/how-to/applications.md",
    "docs/how-to/traffic.md",
    "docs/how-to/autoscaling.md",
    "docs/how-to/handles.md",
    "docs/how-to/batching-and-multiplexing.md",
    "docs/how-to/streaming-and-asgi.md",
    "docs/how-to/observe.md",
    "docs/how-to/backup.md",
    "docs/how-to/http-options.md",
    "docs/how-to/command-line.md",
    "docs/how-to/nats-clients.md",
    "docs/coming-from-ray-serve.md",  # the last one: it ends with a shutdown, which deletes everything
)

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


class Reader:
    """A person who has one page open, a terminal in an empty directory, and the checkout's programs on the path."""

    def __init__(self, stack: dict[str, Any]) -> None:
        self.folder: Path = stack["here"]
        self.url = stack["http_url"]
        self.environment = {
            "MUSTER_STATE_DIR": stack["state_dir"],
            "XDG_CONFIG_HOME": str(self.folder / "config"),
        }
        shutil.rmtree(self.folder)
        self.folder.mkdir()
        (self.folder / "examples").symlink_to(ROOT / "examples")
        (self.folder / "prod.creds").symlink_to(Path(stack["state_dir"], "secrets/admin.creds"))

    def follow(self, followed: Page) -> None:
        """Write the page's files and run its commands, in order."""
        for block in followed.blocks():
            if block.file_name:
                self.write(block)
            elif block.language == "sh":
                self.run(block)

    def write(self, block: Block) -> None:
        file = self.folder / block.file_name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(block.text.replace(STATED_URL, self.url))

    def run(self, block: Block) -> None:
        commands = list(block.commands())
        for number, words in enumerate(commands, 1):
            expected = block.exit_code if number == len(commands) else 0
            match words[0]:
                case "muster":
                    done = CliRunner().invoke(cli, words[1:], env=self.environment)
                    told = done.exit_code
                    if words[1] == "diff" and told == 1:
                        told = 0  # what it says of a file that would change something
                    assert told == expected, f"{shlex.join(words)}\n{done.output}{done.exception!r}"
                case "curl":
                    fetch(words[1:], self.folder, self.url)
                case "python":
                    subprocess.run(
                        [sys.executable, *(word.replace(STATED_URL, self.url) for word in words[1:])],
                        check=True,
                        timeout=COMMAND_LIMIT_S,
                        env=os.environ | self.environment,
                        cwd=self.folder,
                    )
                case "source":
                    subprocess.run(
                        ["bash", "-ec", " ".join(words)],
                        check=True,
                        timeout=COMMAND_LIMIT_S,
                        env=os.environ | self.environment,
                        cwd=self.folder,
                    )
                case "make" | "export" | "docker":
                    continue  # the stack runs already, and this process knows where its programs are
                case "nats":
                    continue  # a program of others, which PyPI and Debian do not have
                case _:
                    pytest.fail(f"who runs {shlex.join(words)}?")


def fetch(words: list[str], folder: Path, url: str) -> None:
    """What curl does in ``folder`` with the options that pages use. Raises for a status that is no success."""
    request, trust = urllib.request.Request(words[-1].replace(STATED_URL, url)), None
    for option, value in itertools.pairwise(words):
        if option == "-H":
            request.add_header(*value.split(": "))
        elif option == "--data-binary":
            file = value.removeprefix("@")
            request.data = (folder / file).read_bytes() if file != value else value.encode()
        elif option == "--cacert":
            trust = ssl.create_default_context(cafile=folder / value)
    with urllib.request.urlopen(request, timeout=COMMAND_LIMIT_S, context=trust) as response:
        assert response.read()


@pytest.mark.parametrize("name", PAGES)
def test_a_page_can_be_followed(stack: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = Reader(stack)
    monkeypatch.chdir(reader.folder)
    for block in page(FILES_OF[name]).blocks() if name in FILES_OF else ():
        if block.file_name:
            reader.write(block)
    reader.follow(page(name))


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
def test_the_page_on_https_can_be_followed(tmp_path: Path) -> None:
    certificate, one_machine, *_ = page("docs/how-to/https.md").blocks("sh")
    subprocess.run(["bash", "-ec", certificate.text], check=True, timeout=COMMAND_LIMIT_S, cwd=tmp_path)
    export, up, curl = one_machine.text.splitlines()
    assert (export.split()[0], up) == ("export", "muster up")
    with running_stack(f"{export}\nexec {UP}", tmp_path, plain_environment(), "stack_ready") as found:
        words = curl.replace("https://127.0.0.1:8000", found["http_url"]).split()
        assert found["http_url"].startswith("https://")
        fetch(words[1:], tmp_path, found["http_url"])
