"""The loop that drives the core."""

from __future__ import annotations
