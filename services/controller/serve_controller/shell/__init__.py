"""Loops and handlers that drive the core: they perform what the core decided and decide nothing themselves."""

from __future__ import annotations
