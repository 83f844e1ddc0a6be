"""The embedded nats-server: the real one, with the very configuration that compose uses."""

from __future__ import annotations

import shutil
import signal
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from muster.embedded.errors import StackFailed
from muster.embedded.options import StackOptions, StatePaths
from muster.embedded.probes import http_probe
from muster.embedded.process import ProcessSpec
from muster.identities import SERVER_FILE
from muster.secrets import Secrets
from serve_common.adapters.own_directory import make_own_directory, move_aside

NATS = "nats"
MEMORY_ENVIRONMENT: Final = {"GOGC": "800", "GOMEMLIMIT": "512MiB"}
"""Its heap is small and what passes through is large: by default it collects garbage hundreds of times a second.
Measured with bodies of 1 MiB: two fifths of its CPU. As in compose."""


_STORAGE: Final = "\njetstream {\n"
"""How nats.conf begins what the server keeps on disk."""


def nats_config(paths: StatePaths) -> Path:
    """The file that the server reads, also when it is told to read it again."""
    return paths.nats / "nats.conf"


def storage_off(configuration: str) -> str:
    """``configuration`` for a server that keeps nothing, and is otherwise the same."""
    assert configuration.count(_STORAGE) == 1, "nats.conf is written differently"
    return configuration.replace(_STORAGE, f"{_STORAGE}  enabled: false\n")


def prepare_nats(paths: StatePaths, options: StackOptions, secrets: Secrets) -> None:
    """Put the configuration and the identities side by side. Raises `StackFailed`."""
    source = options.deploy_dir / "nats" / "nats.conf"
    try:
        make_own_directory(paths.nats)
        identities = paths.nats / "identities.conf"
        for place in (nats_config(paths), identities):
            if place.is_symlink() or place.is_dir():
                move_aside(place)
        shutil.copyfile(source, nats_config(paths))
        shutil.copyfile(secrets.path(SERVER_FILE), identities)
        # Of a stack from before there were identities.
        (paths.nats / "passwords.conf").unlink(missing_ok=True)
    except OSError as error:
        raise StackFailed(
            f"{source} cannot be used ({error.strerror}): `muster up` needs the project's source tree"
        ) from error


def nats_spec(paths: StatePaths, ports: Mapping[str, int], environment: Mapping[str, str]) -> ProcessSpec:
    """How nats-server runs. Raises `StackFailed` when it is not installed."""
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
