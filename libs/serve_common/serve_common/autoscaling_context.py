"""What a user's autoscaling policy is given.

Why here: the controller runs policies, users write them against `muster.AutoscalingContext`, and neither of the two
knows the other.
"""

from __future__ import annotations

from typing import Any

import msgspec


class LoadReading(msgspec.Struct, frozen=True, kw_only=True):
    """The load as one look found it; not in Ray Serve."""

    at: float
    """Of the newest sample in it, seconds since 1970."""
    seen: float | None
    """Requests that are worked on or wait, over ``look_back_period_s``; or what the query gave. None: not known."""
    burst: float | None = None
    """The same over ``panic_window_s``."""
    queued: float = 0.0
    """Of ``seen``: those that waited."""
    source: str = ""
    """``prometheus`` or ``scrape``."""
    over_s: float | None = None
    """Over how long it really was seen; None: as asked."""
    missing: str = ""
    """Why ``seen`` is None."""


class AutoscalingContext(msgspec.Struct, frozen=True, kw_only=True):
    """A deployment and its load at the time of a decision; the names are Ray Serve's."""

    deployment_name: str
    app_name: str
    current_num_replicas: int
    """That run now."""
    target_num_replicas: int
    """As it was decided last."""
    total_num_requests: float
    """Worked on and waiting, over ``look_back_period_s``; or what the configured query gave."""
    total_queued_requests: float
    capacity_adjusted_min_replicas: int
    """``min_replicas``; what the function returns is kept within these two."""
    capacity_adjusted_max_replicas: int
    policy_state: dict[str, Any]
    """What the function returned beside its number the last time; empty at first, and with a new leader."""
    last_scale_up_time: float | None
    """Seconds since 1970, as all times here."""
    last_scale_down_time: float | None
    current_time: float
    readings: list[LoadReading] = []
    """The latest looks, the oldest first; not in Ray Serve."""

    @property
    def total_running_requests(self) -> float:
        """Those that replicas work on."""
        return self.total_num_requests - self.total_queued_requests
