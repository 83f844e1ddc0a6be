"""Time that passes at once, for what is due after a while: nobody waits for it, and nothing is due by chance before."""

from __future__ import annotations

import asyncio


def let_pass(seconds: float) -> None:
    """For the running loop; timers that are set from now on are as far away as ever."""
    loop = asyncio.get_running_loop()
    before = loop.time
    loop.time = lambda: before() + seconds
