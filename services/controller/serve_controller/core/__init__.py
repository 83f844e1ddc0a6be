"""Pure decisions: no clock, no randomness, no I/O, no asyncio."""

from __future__ import annotations
