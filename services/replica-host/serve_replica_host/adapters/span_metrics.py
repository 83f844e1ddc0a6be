"""How many spans of a replica never reached the receiver of traces, in its process' multiprocess files.

Import it only after PROMETHEUS_MULTIPROC_DIR is set (or unset) for good: prometheus_client decides at its import.
"""

from __future__ import annotations

from typing import final

from prometheus_client import Counter

from serve_common.adapters.otlp import SpanCounts
from serve_common.metrics_catalogue.everywhere import SPANS_DROPPED


@final
class PrometheusSpanMetrics:
    """What became of one process' spans."""

    def __init__(self, counts: SpanCounts) -> None:
        self._counts = counts
        self._written: dict[str, int] = {}
        self._dropped = Counter(SPANS_DROPPED.family, SPANS_DROPPED.text, SPANS_DROPPED.labels, registry=None)

    def write(self) -> None:
        """Write out what has changed since the last time; each reason is there from the first time on, with 0."""
        for reason, count in self._counts.dropped_by_reason.items():
            written = self._written.get(reason)
            if written != count:
                self._dropped.labels(reason).inc(count - (written or 0))
                self._written[reason] = count
