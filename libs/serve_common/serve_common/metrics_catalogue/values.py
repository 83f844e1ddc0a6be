"""How a metric is described: all that an exporter, a page of documentation and a checker of dashboards need.

Why values of its own: exporters write by two ways (a library's objects, families at each scrape), and neither can be
asked what there will be before something is counted.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

import msgspec

SECONDS_BUCKETS: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0
)  # fmt: skip
"""Of requests and of what happens within them."""


class MetricKind(Enum):
    """Prometheus' type."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Exporter(Enum):
    """On which page of metrics it is."""

    PROXY = "proxy"
    CONTROLLER = "controller"
    HOST = "host"
    """Written by the host process itself."""
    REPLICA = "replica"
    """Written by replica processes, shown on the page of their host."""


class MetricSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One metric."""

    name: str
    """As in PromQL; of a histogram without ``_bucket``, ``_sum`` and ``_count``."""
    kind: MetricKind
    text: str
    """What it means, in one or two sentences; its first line is the help text of the scrape."""
    unit: str
    """Of its value; ``1`` for a state that is 0 or 1."""
    exporters: tuple[Exporter, ...]
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds, of a histogram; without the last one, which is infinite."""
    when: str = ""
    """When it is there, if not always."""

    @property
    def family(self) -> str:
        """The name that client libraries take, which add ``_total`` to a counter by themselves."""
        return self.name.removesuffix("_total") if self.kind is MetricKind.COUNTER else self.name

    @property
    def series(self) -> tuple[str, ...]:
        """The names of its samples."""
        if self.kind is MetricKind.HISTOGRAM:
            return (f"{self.name}_bucket", f"{self.name}_sum", f"{self.name}_count")
        return (self.name,)
