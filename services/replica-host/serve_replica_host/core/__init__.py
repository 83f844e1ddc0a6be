"""What a replica host decides: pure functions of goal, events and time. No clock, no I/O, no asyncio."""

from __future__ import annotations
