"""The embedded stack as a process: `muster up`, and the commands that a user has for it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from muster.client import StackAddress, connect_stack
from muster.embedded.supervisor import STOP_TIMEOUT_S
from muster.secrets import Secrets
from serve_common.api.commands import Request
from serve_common.api.queries import GetStatus
from serve_common.identities.roles import Role
from tests.support.paths import ROOT

Reply = TypeVar("Reply")

START_LIMIT_S = 200.0
"""`muster up` itself gives up before."""
STOP_LIMIT_S = STOP_TIMEOUT_S + 20.0
"""What is left after the first of them is killed; all else is the machine's own slowness."""


class EmbeddedStack:
    """A running `muster up` and what a user can do with it."""

    def __init__(self, state_dir: Path) -> None:
        """Not started yet; its log is beside ``state_dir``."""
        self.state_dir = state_dir
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith("MUSTER_")}
        self.environment["MUSTER_STATE_DIR"] = str(state_dir)
        self.output = (state_dir.parent / "up.log").open("ab")
        self.process: subprocess.Popen[bytes] | None = None
        self.principal: str | None = None
        """The name that history has for requests; None: that of this process."""

    def start(self) -> None:
        """Until all of its processes are ready."""
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "muster.cli.main",
                "up",
                "--state-dir",
                str(self.state_dir),
                "--num-cpus",
                "4",
                *("--http-port", "0", "--nats-port", "0"),  # any at first, later those of the run before
            ],
            cwd=ROOT,
            env=self.environment,
            stdout=self.output,
            stderr=self.output,
        )
        end = time.monotonic() + START_LIMIT_S
        while not (self.is_ready() or self.process.poll() is not None):
            assert time.monotonic() < end, self.said()
            time.sleep(0.1)
        assert self.process.poll() is None, self.said()

    def is_ready(self) -> bool:
        """Whether all of its processes are."""
        try:
            record = self.record()
        except (OSError, ValueError):
            return False
        names = {p["name"]: p for p in record["processes"]}
        return record["pid"] != 0 and len(names) >= 5 and all(p.get("is_ready", True) for p in names.values())

    def said(self) -> str:
        """The end of its log."""
        return (self.state_dir.parent / "up.log").read_text()[-4000:]

    def record(self) -> dict[str, Any]:
        """Its file `run.json`."""
        return json.loads((self.state_dir / "run.json").read_text())

    def stop(self) -> None:
        """Ctrl-C."""
        assert self.process is not None
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(timeout=STOP_LIMIT_S) == 0, self.said()
        self.process = None

    def pid(self, name: str) -> int:
        """That of the process of this name; 0: it is being started."""
        return next(p["pid"] for p in self.record()["processes"] if p["name"] == name)

    def muster(self, *arguments: str, exit_code: int | None = 0) -> str:
        """What the command prints; None: whatever its exit code."""
        done = subprocess.run(
            [sys.executable, "-m", "muster.cli.main", *arguments],
            cwd=ROOT,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        if exit_code is not None:
            assert done.returncode == exit_code, (
                f"{done.returncode}\n{done.stdout}\n{done.stderr}\n{self.said()}"
            )
        return done.stdout + done.stderr

    def status(self) -> dict[str, Any]:
        """What `muster status --json` says, without a process for it: this is asked all the time."""
        status: dict[str, Any] = msgspec.to_builtins(self.request(GetStatus()))
        return status

    def request(self, request: Request[Reply]) -> Reply:
        """The reply to a command or query of an admin; in a thread, for the caller's may have a loop that runs."""
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, self._request(request)).result()

    async def _request(self, request: Request[Reply]) -> Reply:
        record = self.record()
        file = str(Secrets(Path(record["secrets"])).credentials_file(Role.ADMIN))
        address = StackAddress(urls=(record["nats_url"],), credentials_file=file)
        async with connect_stack(address, principal=self.principal) as reached:
            return await reached.admin.call(request)
