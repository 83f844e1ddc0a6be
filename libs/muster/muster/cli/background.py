"""A whole stack in the background: found, started, and moved to another HTTP port where it serves nothing yet."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import msgspec

from muster.cli.output import Progress, print_error
from muster.cli.session import Session, StackChoice, running_embedded
from muster.client.admin import Stack
from muster.embedded.options import DEFAULT_STATE_DIR, STARTED_IN_BACKGROUND, StackFailed, StatePaths
from serve_common.api.queries import GetAllApplications
from serve_common.errors import BusUnavailable

DEFAULT_HTTP_HOST: Final = "127.0.0.1"
DEFAULT_HTTP_PORT: Final = 8000
_START_TIMEOUT_S: Final = 180.0
_START_POLL_S: Final = 0.2
_STOP_TIMEOUT_S: Final = 60.0
_LOG_LINES_MAX: Final = 20


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """Result of `muster start`."""

    http_url: str
    """Empty for a stack that runs elsewhere, or has no proxy."""
    nats_url: str
    pid: int | None
    """The process to end when the stack shall stop; None for a stack that ran before."""


def find_running(session: Session, choice: StackChoice) -> Started | None:
    """The stack that the command line finds; None for none. Raises `ServeError` for one that does not answer."""
    try:
        address = session.find_stack(choice)
    except BusUnavailable:
        return None
    found = running_embedded(session.environment, session.directory)
    is_here = found is not None and found.nats_url in address.urls
    if found is None or not is_here:
        session.run(address, "start", _check_reachable)
        return Started(http_url="", nats_url=address.urls[0], pid=None)
    return Started(http_url=found.http_url, nats_url=found.nats_url, pid=None)


async def _check_reachable(stack: Stack, _progress: Progress) -> None:
    await stack.admin.call(GetAllApplications(limit=1))


def move_when_empty(
    session: Session, choice: StackChoice, http_port: int, http_host: str | None = None
) -> Started | None:
    """Let a background stack that serves nothing start anew at another HTTP port than the default; None: it stays.

    As in Ray Serve a port counts until something is deployed, or one was chosen. Raises `ServeError`.
    """
    found = running_embedded(session.environment, session.directory)
    if found is None or not found.is_background:
        return None
    if found.ports["http"] != DEFAULT_HTTP_PORT or http_port in (0, DEFAULT_HTTP_PORT):
        return None
    address = session.find_stack(choice)
    if found.nats_url not in address.urls or session.run(address, "start", _serves_something):
        return None
    print_error(f"the stack serves nothing yet, and starts anew at HTTP port {http_port}")
    os.kill(found.pid, signal.SIGTERM)
    deadline = time.monotonic() + _STOP_TIMEOUT_S
    while running_embedded(session.environment, session.directory) is not None:
        if time.monotonic() > deadline:
            raise StackFailed(f"the stack did not stop within {_STOP_TIMEOUT_S:g} s")
        time.sleep(_START_POLL_S)
    # Only here: it imports what starts servers.
    from muster.embedded.services import CONSOLE, PROXY  # noqa: PLC0415 - as above

    return start_stack(
        session,
        http_host or found.http_host,
        http_port,
        has_proxy=any(process.name == PROXY for process in found.processes),
        has_console=any(process.name == CONSOLE for process in found.processes),
        state_dir=Path(found.state_dir),
    )


async def _serves_something(stack: Stack, _progress: Progress) -> bool:
    status = await stack.admin.fetch_status()
    return bool(status.deployments or await stack.admin.call(GetAllApplications(limit=1)))


def start_stack(
    session: Session,
    http_host: str,
    http_port: int,
    *,
    has_proxy: bool,
    has_console: bool = True,
    state_dir: Path | None = None,
) -> Started:
    """Start `muster up` in a session of its own, whose output goes into a file, and wait until it is ready.

    Its state is in ``state_dir``, by default that of the directory. Raises `StackFailed`.
    """
    if state_dir is None:
        state_dir = session.directory / (session.environment.get("MUSTER_STATE_DIR") or DEFAULT_STATE_DIR)
    logs = StatePaths(state_dir).logs
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / "up.log"
    command = [sys.executable, "-m", "muster.cli.main", "up", "--json", "--state-dir", str(state_dir)]
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: S603 - our own program
            [
                *command,
                "--http-host",
                http_host,
                "--http-port",
                str(http_port),
                *([] if has_proxy else ["--no-http"]),
                *([] if has_console else ["--no-console"]),
            ],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            cwd=session.directory,
            env={**session.environment, STARTED_IN_BACKGROUND: "1"},
        )
    deadline = time.monotonic() + _START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        if b'"event": "stack_ready"' in log.read_bytes():
            found = running_embedded(
                {**session.environment, "MUSTER_STATE_DIR": str(state_dir)}, session.directory
            )
            if found is not None:
                url = found.http_url if has_proxy else ""
                return Started(http_url=url, nats_url=found.nats_url, pid=process.pid)
        time.sleep(_START_POLL_S)
    if process.poll() is None:
        process.terminate()
        process.wait(_STOP_TIMEOUT_S)
    lines = log.read_text(errors="replace").splitlines()[-_LOG_LINES_MAX:]
    raise StackFailed("the stack did not start:\n" + "\n".join(lines))
