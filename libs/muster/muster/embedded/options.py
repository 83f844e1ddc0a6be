"""Options and paths of the embedded stack, and the errors of its start."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final

import msgspec

from serve_common.errors import PermanentError


class StackFailed(PermanentError):
    """The stack on this machine cannot run; the message says what the user can do about it."""

    error_code = "stack_failed"


class AlreadyRunning(StackFailed):
    """Another `muster up` holds the same state directory."""

    error_code = "already_running"


class PortTaken(StackFailed):
    """Another program listens on a requested port."""

    error_code = "port_taken"


class StartFailed(StackFailed):
    """A process did not become ready; the message ends with the last lines of its log."""

    error_code = "start_failed"


DEFAULT_STATE_DIR: Final = Path(".muster")
STARTED_IN_BACKGROUND: Final = "MUSTER_STARTED_IN_BACKGROUND"
"""Variable that `muster start` sets for the stack that it starts."""
RUN_STATE_DIR: Final = DEFAULT_STATE_DIR / "run"
"""State of a stack that `muster run` starts for itself; it lasts as long as that."""
CHECKOUT: Final = Path(__file__).resolve().parents[4]
"""The source tree that this file belongs to, unless it was installed from a wheel."""


class StackOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the embedded stack. Port 0 means any free one.

    They are few because the embedded stack is that of compose in small: everything else is configured by the services'
    own environment variables, which are passed on to them.
    """

    http_host: str = "127.0.0.1"
    """Address that the proxy listens on for HTTP."""
    http_port: int = 8000
    """HTTP port; an error if taken, because users rely on the address."""
    http_cert_file: str = ""
    """File of the certificate for HTTPS, in PEM; empty for that of the environment, or plain HTTP."""
    http_key_file: str = ""
    """File of its key; empty takes it from the certificate's file."""
    http_key_password: str = ""
    """Password of the key; empty for none."""
    nats_port: int = 4222
    """NATS port; replaced by a free one if taken."""
    controller_ops_port: int = 9101
    """Operations port of the controller; replaced by a free one if taken."""
    proxy_ops_port: int = 9102
    """Operations port of the proxy; replaced by a free one if taken."""
    host_ops_port: int = 9103
    """Operations port of the replica host; replaced by a free one if taken."""
    console_port: int = 8080
    """Port of the console's pages, on the loopback; replaced by a free one if taken."""
    console_ops_port: int = 9104
    """Operations port of the console; replaced by a free one if taken."""
    has_proxy: bool = True
    """Whether a proxy runs; without one, deployments are called by handles only."""
    has_console: bool = False
    """Whether a console runs; a program that starts a stack for itself needs none."""
    proxy_processes: int = 1
    """Proxy processes that share the HTTP port, each with a core of its own."""
    num_cpus: int | None = None
    """CPUs that all replicas together may reserve; None for those of the machine, at least 8."""
    ray_address: str = ""
    """Address of a running Ray for the replicas, ``host:port``; empty for that of the environment, or their own."""
    app_root: Path | None = None
    """Base directory of a relative app_dir; None for the directory in which the stack was started."""
    deploy_dir: Path = Path(__file__).with_name("deploy")
    """Directory with the configuration of nats-server and Postgres."""


_CPUS_MIN: Final = 8
"""CPUs that replicas in a program's Ray may reserve at least, as on any host; Ray itself is asked for none."""


def find_ray() -> str:
    """Address of the Ray that this program is connected to, ``host:port``; empty for none. Imports nothing."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return ""
    return str(ray.get_runtime_context().gcs_address)


_STATE_DIR_KEY: Final = b"muster_state_dir"


def announce_in_ray(state_dir: str | None) -> None:
    """Let tasks and actors of this program's Ray find the stack within this process, or, with None, no longer.

    Does nothing without Ray.
    """
    if find_ray():
        store = sys.modules["ray"].experimental.internal_kv
        if state_dir is None:
            store._internal_kv_del(_STATE_DIR_KEY)  # noqa: SLF001 - Ray has no other table that its processes share
        else:
            store._internal_kv_put(_STATE_DIR_KEY, state_dir.encode(), overwrite=True)  # noqa: SLF001 - as above


def find_in_ray() -> str | None:
    """State directory of a stack that a program announced in the Ray that this process belongs to."""
    if not find_ray():
        return None
    store = sys.modules["ray"].experimental.internal_kv
    found: bytes | None = store._internal_kv_get(_STATE_DIR_KEY)  # noqa: SLF001 - as above
    return None if found is None else found.decode()


def share_ray(options: StackOptions) -> StackOptions:
    """``options`` with the Ray of this program, whose actors then mean something to its replicas.

    As in Ray Serve, one is started where the program has imported Ray and none runs. Unchanged where it has not.
    """
    ray = sys.modules.get("ray")
    if ray is None:
        return options
    if not ray.is_initialized():
        _start_ray(ray)
    num_cpus = max(int(ray.cluster_resources().get("CPU", 0)), _CPUS_MIN)
    return msgspec.structs.replace(options, ray_address=find_ray(), num_cpus=num_cpus)


def _start_ray(ray: Any) -> None:
    """Start Ray on a thread that stays: Linux ends Ray's processes with the thread that has started them."""
    started = Future[None]()

    def run() -> None:
        try:
            ray.init(namespace="serve")
        except BaseException as error:  # noqa: BLE001 - raised below, on the thread that asked
            started.set_exception(error)
        else:
            started.set_result(None)
            threading.Event().wait()

    threading.Thread(target=run, name="muster-ray", daemon=True).start()
    started.result()


class StatePaths(msgspec.Struct, frozen=True):
    """Paths within one state directory."""

    root: Path
    """The state directory."""

    @property
    def secrets(self) -> Path:
        """Directory of the secrets, one per file."""
        return self.root / "secrets"

    @property
    def nats(self) -> Path:
        """Configuration of NATS and JetStream's files."""
        return self.root / "nats"

    @property
    def postgres(self) -> Path:
        """Postgres; the database is in ``data``."""
        return self.root / "postgres"

    @property
    def logs(self) -> Path:
        """Directory with one ``<name>.log`` per process."""
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
        """Compiled modules that may not be written beside their sources."""
        return self.root / "bytecode"

    @property
    def run_file(self) -> Path:
        """The run record: addresses, ports and processes of the stack."""
        return self.root / "run.json"

    @property
    def lock_file(self) -> Path:
        """File locked by the process that runs the stack."""
        return self.root / "lock"

    def log(self, name: str) -> Path:
        """The log file of the process ``name``."""
        return self.logs / f"{name}.log"
