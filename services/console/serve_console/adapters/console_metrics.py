"""The console's own metrics, built at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import final

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from serve_common.runtime.operations import build_family, build_single
from serve_common.telemetry.catalogue.consoles import CONSOLE_SESSIONS, CONSOLE_SIGN_INS, CONSOLE_TABS


@final
class ConsoleMetrics(Collector):
    """Implements the client library's collector."""

    def __init__(
        self, count_tabs: Callable[[], int], count_sessions: Callable[[], int], sign_ins: Mapping[str, int]
    ) -> None:
        """``sign_ins`` counts attempts to sign in by what became of them, as long as the process lives."""
        self._count_tabs = count_tabs
        self._count_sessions = count_sessions
        self._sign_ins = sign_ins

    def collect(self) -> Iterable[Metric]:
        """The families of one scrape."""
        yield build_single(CONSOLE_TABS, self._count_tabs())
        yield build_single(CONSOLE_SESSIONS, self._count_sessions())
        yield build_family(CONSOLE_SIGN_INS, (([result], count) for result, count in self._sign_ins.items()))
