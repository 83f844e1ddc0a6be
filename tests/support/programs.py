"""Programs of the checkout, run as a user runs them beside a stack."""

from __future__ import annotations

import asyncio
import os
import subprocess

from tests.support.paths import ROOT

LIMIT_S = 200.0


async def run_beside(state_dir: str, *words: str) -> str:
    """What a program prints that is run in the checkout, knows the stack of ``state_dir`` alone, and must succeed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MUSTER_")}
    done = await asyncio.to_thread(
        subprocess.run,
        words,
        cwd=ROOT,
        env=environment | {"MUSTER_STATE_DIR": state_dir},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
