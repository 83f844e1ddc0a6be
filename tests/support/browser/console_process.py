"""The console as a process, beside a stack of the tests'."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Final, Self

import psutil

from muster.console_users import add_person, find_source
from muster.secrets import PEOPLE_FILE, Secrets
from serve_common.identities.roles import Role
from tests.support.paths import ROOT

PASSWORD: Final = "5eed" * 12
"""As if generated: these are quick to check."""
ROLES: Final = (Role.VIEW, Role.OPERATE, Role.ADMIN)
_STARTS_WITHIN_S: Final = 60.0


def get_person(role: Role | str) -> str:
    """The name of the person with that role."""
    return f"{Role(role).value}@example.org"


def add_people(secrets: Secrets) -> None:
    """One person of each role, each with `PASSWORD`."""
    source = find_source(secrets)
    for role in ROLES:
        add_person(source, get_person(role), role, PASSWORD)


class ConsoleProcess:
    """``python -m serve_console`` until the block ends."""

    def __init__(self, nats_url: str, secrets: Secrets, log_path: Path, **environment: str) -> None:
        """Not started yet. ``environment`` are variables without their prefix ``MUSTER_CONSOLE_``."""
        self.log_path = log_path
        self.url = ""
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("MUSTER_")},
            "MUSTER_NATS_URL": nats_url,
            "MUSTER_OPS_PORT": "0",
            "MUSTER_CONSOLE_USERS_FILE": str(secrets.path(PEOPLE_FILE)),
            "MUSTER_CONSOLE_PORT": "0",
            **{f"MUSTER_CONSOLE_{name}": value for name, value in environment.items()},
        }
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "serve_console"],
                cwd=ROOT,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        try:
            self.url = f"http://127.0.0.1:{self._wait_for_port()}"
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.terminate()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=20)
            raise

    @property
    def usage(self) -> psutil.Process:
        """For its times and memory."""
        assert self._process is not None
        return psutil.Process(self._process.pid)

    def read_log(self) -> list[dict[str, object]]:
        """All lines so far."""
        return [
            json.loads(line)
            for line in self.log_path.read_text(errors="replace").splitlines()
            if line.startswith("{") and line.endswith("}")
        ]

    def _wait_for_port(self) -> int:
        assert self._process is not None
        end = time.monotonic() + _STARTS_WITHIN_S
        while time.monotonic() < end:
            for line in self.read_log():
                if line.get("event") == "console_serves":
                    return int(str(line["port"]))
            assert self._process.poll() is None, self.log_path.read_text()
            time.sleep(0.02)
        raise AssertionError(f"the console does not serve\n{self.log_path.read_text()}")
