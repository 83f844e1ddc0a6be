"""Runs a program that leaves nothing behind, whatever it starts and however we end.

Why the embedded stack's guardian: Ray's processes rename themselves and leave their session; a "subreaper" above them
still finds every one, and nothing else.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from muster.embedded.supervisor import last_lines
from serve_common.runtime import guardian
from serve_common.runtime.child_process import ChildProcess

_STOP_WITHIN_S = 8.0


class ProgramFailed(Exception):
    """It did not end well; the message has the end of its output."""


async def run_guarded(argv: Sequence[str], log_path: Path, *, timeout_s: float) -> None:
    """Run ``argv`` from the root of the checkout to its end. Raises `ProgramFailed`."""
    root = Path(__file__).parents[2]
    command = guardian.command(argv, stop_timeout_s=2)
    env = {**os.environ, "PYTHONPATH": str(root)}
    with log_path.open("ab") as log:
        process = await ChildProcess.start(command, env=env, cwd=root, stdout=log, stderr=log)
    try:
        async with asyncio.timeout(timeout_s):
            code = await process.ended()
    except TimeoutError:
        raise ProgramFailed(f"{argv[2]} took longer than {timeout_s:g} s\n{last_lines(log_path)}") from None
    finally:
        # The guardian kills everything below it before it ends.
        if not process.has_ended and not await process.stop((signal.SIGTERM, _STOP_WITHIN_S)):
            raise TimeoutError(f"{argv[2]} does not end")
    if code:
        raise ProgramFailed(f"{argv[2]} ended with code {code}\n{last_lines(log_path)}")
