"""Puts backends that may be asked about together into groups.

Why: Prometheus answers one query about ten thousand backends as quickly as one about ten.
"""

from __future__ import annotations

from typing import Final, NamedTuple, final

from serve_common.autoscaling import AggregationFunction
from serve_controller.adapters.prometheus_coverage import Coverage, Process, Window
from serve_controller.core.autoscaling.values import LoadAsk

_INTERVAL_MAX_S: Final = 120.0
"""Who scrapes less often gives no load: the windows would have to be longer than five minutes."""


class Group(NamedTuple):
    """What one set of queries answers for all backends that share it."""

    window_s: float
    burst_s: float | None
    aggregation: AggregationFunction


class Placed(NamedTuple):
    """An ask and the windows that it may be answered over."""

    ask: LoadAsk
    group: Group
    newest_at: float


@final
class Placer:
    """Finds each ask's windows; those that expect the same processes are decided once."""

    def __init__(self, coverage: Coverage, now: float) -> None:
        self._coverage = coverage
        self._now = now
        self._known: dict[tuple[object, ...], Window | str] = {}

    def place(self, ask: LoadAsk) -> Placed | str:
        interval_s = self._coverage.interval_s
        if interval_s is not None and interval_s > _INTERVAL_MAX_S:
            return f"Prometheus scrapes every {interval_s:.0f} s, more than {_INTERVAL_MAX_S:.0f} s"
        seen = self._window(ask, ask.config.look_back_period_s)
        if isinstance(seen, str):
            return seen
        burst = self._window(ask, ask.config.panic_window_s) if ask.config.panic_threshold else ""
        burst_s = burst.length_s if isinstance(burst, Window) else None
        return Placed(ask, Group(seen.length_s, burst_s, ask.config.aggregation_function), seen.newest_at)

    def _window(self, ask: LoadAsk, wanted_s: float) -> Window | str:
        key = (wanted_s, ask.proxies, ask.hosts)
        found = self._known.get(key)
        if found is None:
            expected = [Process("proxy", name) for name in ask.proxies]
            expected += [Process("host", name) for name in ask.hosts]
            expected = expected or self._coverage.fresh()
            ahead_s = self._coverage.at - self._now
            began_at = {name: at + ahead_s for name, at in ask.began_at.items()}
            found = self._known[key] = self._coverage.window(wanted_s, expected, began_at)
        return found
