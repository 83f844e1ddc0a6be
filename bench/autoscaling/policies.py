"""What is compared: one interface for policies that see the load in different ways.

Why each reads for itself: how often a load is looked at, over which window and how old it is then, is as much a part of
a policy as its formula.
"""

from __future__ import annotations

from typing import Protocol

from bench.autoscaling.backend import Backend


class Policy(Protocol):
    """Something that scales a backend; made anew for each run."""

    tick_s: float
    """How often it is asked."""

    def tick(self, backend: Backend) -> int:
        """How many replicas there shall be; called at every multiple of ``tick_s``."""
        ...
