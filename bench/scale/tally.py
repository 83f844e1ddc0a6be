"""What the simulator counted, as it says it to the benchmark.

Why counted there: whoever receives knows exactly what was sent to hosts and to the bucket; a server's own counters
mix that with answers and questions.
"""

from __future__ import annotations

import msgspec


class Tally(msgspec.Struct, kw_only=True):
    """Rises for ever; a figure is the difference between two of them. Bytes are of payloads, without subjects."""

    host_reports: int = 0
    proxy_reports: int = 0
    reports_dropped: int = 0
    """Not sent, because the connection was away or full; then the figures mean nothing."""
    goals: int = 0
    goal_bytes: int = 0
    goals_refused: int = 0
    snapshots: int = 0
    snapshot_bytes: int = 0
    cpu_s: float = 0.0
    """Of the simulator's process."""

    hosts_with_goal: int = 0
    replicas_running: int = 0
    applied_snapshot_id: int = 0
    late_s: float = 0.0
    """How late periodic reports were at most since the last time we were asked."""

    @property
    def reports(self) -> int:
        """Of hosts and of proxies."""
        return self.host_reports + self.proxy_reports
