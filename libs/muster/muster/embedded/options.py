"""What may be chosen about the embedded stack, and why one could not start."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from serve_common.errors import PermanentError


class StackFailed(PermanentError):
    """The stack on this machine cannot run."""

    error_code = "stack_failed"


class AlreadyRunning(StackFailed):
    """Another `muster up` holds the same state directory."""

    error_code = "already_running"


class PortTaken(StackFailed):
    """Something else listens on a port that was asked for."""

    error_code = "port_taken"


class StartFailed(StackFailed):
    """A process did not become ready; the message ends with the last lines of its log."""

    error_code = "start_failed"


DEFAULT_STATE_DIR: Final = Path(".muster")
CHECKOUT: Final = Path(__file__).resolve().parents[4]
"""The source tree that this file belongs to; its deploy/ holds the configuration that compose uses too."""


class StackOptions(msgspec.Struct, frozen=True, kw_only=True):
    """A port of 0 means: any free one."""

    http_host: str = "127.0.0.1"
    http_port: int = 8000
    """A taken one is an error, for this is the address that people were told."""
    nats_port: int = 4222
    """A taken one is replaced by a free one."""
    controller_ops_port: int = 9101
    proxy_ops_port: int = 9102
    host_ops_port: int = 9103
    """Operations ports, too, are replaced when taken."""
    proxy_processes: int = 1
    """How many share the HTTP port, each with a core of its own."""
    num_cpus: int | None = None
    """CPUs that replicas may use in all; None for the machine's."""
    app_root: Path | None = None
    """Where a relative app_dir begins; None for the directory in which the stack was started."""
    deploy_dir: Path = CHECKOUT / "deploy"


class StatePaths(msgspec.Struct, frozen=True):
    """Where things lie in one state directory."""

    root: Path

    @property
    def secrets(self) -> Path:
        """One file a password."""
        return self.root / "secrets"

    @property
    def nats(self) -> Path:
        """Configuration and JetStream's files."""
        return self.root / "nats"

    @property
    def postgres(self) -> Path:
        """Configuration and, in ``data``, the database."""
        return self.root / "postgres"

    @property
    def logs(self) -> Path:
        """One ``<name>.log`` a process."""
        return self.root / "logs"

    @property
    def ray(self) -> Path:
        """Ray's sessions, unless the path is too long for its sockets."""
        return self.root / "ray"

    @property
    def metrics(self) -> Path:
        """prometheus_client's multiprocess files of the host and its replicas."""
        return self.root / "metrics"

    @property
    def bytecode(self) -> Path:
        """Compiled modules, where they may not be written beside their sources."""
        return self.root / "bytecode"

    @property
    def run_file(self) -> Path:
        """What runs where."""
        return self.root / "run.json"

    @property
    def lock_file(self) -> Path:
        """Held by the process that runs the stack."""
        return self.root / "lock"

    def log(self, name: str) -> Path:
        """The log of the process ``name``."""
        return self.logs / f"{name}.log"
