"""A second replica host of an embedded stack: `muster up` has one, and draining it needs another."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import psutil

from muster.embedded.services import HOST
from tests.support.paths import ROOT
from tests.support.stacks.embedded_stack import EmbeddedStack

_JOINS_WITHIN_S: Final = 120.0
_STOPS_WITHIN_S: Final = 40.0


@contextlib.contextmanager
def running_second_host(stack: EmbeddedStack, host_id: str) -> Iterator[str]:
    """Its id, once the controller knows it. It has all variables of the first but those that are its own."""
    first = psutil.Process(stack.pid(HOST))
    # Sockets of Ray and of direct links need a short path.
    with tempfile.TemporaryDirectory(prefix="muster-", dir="/tmp", ignore_cleanup_errors=True) as directory:
        metrics = Path(directory) / "metrics"
        metrics.mkdir(mode=0o700)
        environment = {
            **first.environ(),
            "MUSTER_HOST_ID": host_id,
            "MUSTER_OPS_PORT": "0",
            "MUSTER_RAY_TEMP_DIR": directory,
            "MUSTER_DIRECT_DIR": str(Path(directory) / "direct"),
            "PROMETHEUS_MULTIPROC_DIR": str(metrics),
        }
        log_path = stack.state_dir.parent / f"{host_id}.log"
        with log_path.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "serve_replica_host"],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        try:
            end = time.monotonic() + _JOINS_WITHIN_S
            while host_id not in [host["host_id"] for host in stack.status()["hosts"]]:
                assert process.poll() is None, log_path.read_text()[-4000:]
                assert time.monotonic() < end, log_path.read_text()[-4000:]
                time.sleep(0.1)
            yield host_id
        finally:
            process.terminate()
            try:
                process.wait(_STOPS_WITHIN_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(_STOPS_WITHIN_S)
                raise
