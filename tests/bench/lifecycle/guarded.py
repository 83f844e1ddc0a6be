"""Runs a program that leaves nothing behind, whatever it starts and however we end.

Why the embedded stack's guardian: Ray's processes rename themselves and leave their session; a "subreaper" above them
still finds every one, and nothing else.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from muster.embedded.supervisor import last_lines
from serve_common.runtime import guardian

_STOP_WITHIN_S = 8.0


class ProgramFailed(Exception):
    """It did not end well; the message has the end of its output."""


async def run_guarded(argv: Sequence[str], log_path: Path, *, timeout_s: float) -> None:
    """Run ``argv`` from the root of the checkout to its end. Raises `ProgramFailed`."""
    root = Path(__file__).parents[3]
    reading, writing = os.pipe()
    arguments = [
        *(sys.executable, "-I", "-S", str(guardian.__file__)),
        *("--parent", str(os.getpid()), "--report-fd", str(writing), "--stop-timeout-s", "2", "--"),
    ]
    try:
        with log_path.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *arguments,
                *argv,
                cwd=root,
                env={**os.environ, "PYTHONPATH": str(root)},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(writing,),
                start_new_session=True,
            )
    except BaseException:
        os.close(reading)
        raise
    finally:
        os.close(writing)
    try:
        async with asyncio.timeout(timeout_s):
            code = await process.wait()
    except TimeoutError:
        raise ProgramFailed(f"{argv[2]} took longer than {timeout_s:g} s\n{last_lines(log_path)}") from None
    finally:
        await _stopped(process)
        os.close(reading)  # not before: the guardian writes the program's pid there
    if code:
        raise ProgramFailed(f"{argv[2]} ended with code {code}\n{last_lines(log_path)}")


async def _stopped(process: asyncio.subprocess.Process) -> None:
    """The guardian kills everything below it before it ends."""
    if process.returncode is None:
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(_STOP_WITHIN_S):
            await process.wait()
