"""The replica host as a process: ``python -m serve_replica_host``.

Why the late imports: prometheus_client and Ray look at the environment when they are imported, and no later.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from pathlib import Path
from typing import NoReturn

import structlog

from serve_common.adapters.logs import configure_logs
from serve_common.errors import BadField
from serve_common.settings import Environment
from serve_replica_host.adapters.ray_environment import prepare_ray_environment
from serve_replica_host.settings import read_host_settings


def main() -> int:
    """Run until told to stop. The exit status: 2 for bad settings, else as `run_host`."""
    try:
        settings = read_host_settings(Environment())
        prepare_ray_environment(Path(settings.ray_temp_dir), is_local=settings.ray_address is None)
        Path(settings.metrics_dir).mkdir(parents=True, exist_ok=True)
    except (BadField, OSError) as error:
        sys.stderr.write(f"serve_replica_host: {error}\n")
        return 2
    logs = configure_logs("replica-host", host_id=settings.host_id)
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = settings.metrics_dir
    from serve_replica_host.wiring import run_host  # noqa: PLC0415 - see above

    try:
        return asyncio.run(run_host(settings, logs))
    except Exception as error:  # noqa: BLE001 - no end may be silent
        structlog.get_logger(__name__).critical("host_ended_by_an_error", exc_info=error)
        return 1
    finally:
        logs.flush()


def _end(status: int) -> NoReturn:
    """End without the interpreter's own teardown, in which Ray's threads now and then abort the process."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # such as of a full disk
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    _end(main())
